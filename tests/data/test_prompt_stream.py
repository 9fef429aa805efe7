"""The order of rows: every row once per epoch, and a resumed stream is the uninterrupted one."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swift.data.sampler import PromptStream
from swift.data.source import shuffled
from swift.errors import ConfigError

sizes = st.integers(1, 40)
seeds = st.integers(-(2**70), 2**70)


@given(sizes, seeds, st.booleans(), st.integers(1, 3))
def test_every_row_comes_exactly_once_per_epoch(size, seed, shuffle, epochs):
    stream = PromptStream(size, seed=seed, shuffle=shuffle)
    for epoch in range(epochs):
        items = [stream.next() for _ in range(size)]
        assert sorted(item.row for item in items) == list(range(size))
        assert [item.epoch for item in items] == [epoch] * size
        assert [item.cursor for item in items] == list(range(size))


@given(sizes, seeds, st.booleans(), st.integers(0, 100), st.booleans())
def test_a_resumed_stream_gives_the_same_next_rows(size, seed, shuffle, taken, skip):
    stream = PromptStream(size, seed=seed, shuffle=shuffle)
    for _ in range(taken):
        stream.next()
    if skip:
        stream.skip_to_epoch_end()
    resumed = PromptStream(size, seed=seed, shuffle=shuffle)
    resumed.load_state_dict(json.loads(json.dumps(stream.state_dict())))
    assert [resumed.next() for _ in range(2 * size)] == [stream.next() for _ in range(2 * size)]


@given(sizes, seeds, st.integers(1, 100))
def test_skipping_goes_to_the_next_epoch_once(size, seed, taken):
    stream = PromptStream(size, seed=seed, shuffle=True)
    for _ in range(taken):
        last = stream.next()
    left = stream.remaining
    assert stream.skip_to_epoch_end() == left == size - last.cursor - 1
    assert stream.skip_to_epoch_end() == 0
    assert stream.next()[1:] == (last.epoch + 1, 0)


def test_skipping_before_the_first_row_gives_nothing_up():
    stream = PromptStream(3, seed=1, shuffle=False)
    assert stream.skip_to_epoch_end() == 0
    assert stream.next() == (0, 0, 0)


def test_seeds_and_epochs_give_different_orders():
    def rows(seed, count):
        stream = PromptStream(50, seed=seed, shuffle=True)
        return [stream.next().row for _ in range(count)]

    assert rows(1, 100) == rows(1, 100)
    assert rows(1, 50) != rows(2, 50)
    assert rows(1, 100)[:50] != rows(1, 100)[50:]
    assert rows(1, 50) != list(range(50))


def test_the_order_is_that_of_earlier_versions():
    stream = PromptStream(8, seed=42, shuffle=True)
    first = [stream.next().row for _ in range(8)]
    assert first == [3, 4, 2, 7, 6, 1, 5, 0]


def test_no_rows_is_an_error():
    with pytest.raises(ConfigError, match="0 rows"):
        PromptStream(0, seed=1, shuffle=True)


@pytest.mark.parametrize(
    ("other", "says"),
    [
        ({"size": 9}, "rows of --dataset: 8 in the checkpoint, 9 now"),
        ({"seed": 2}, "--data_seed: 1 in the checkpoint, 2 now"),
        ({"shuffle": False}, "--dataset_shuffle: True in the checkpoint, False now"),
    ],
)
def test_a_position_in_other_data_is_refused(other, says):
    state = PromptStream(8, seed=1, shuffle=True).state_dict()
    with pytest.raises(ConfigError, match=says):
        PromptStream(**{"size": 8, "seed": 1, "shuffle": True, **other}).load_state_dict(state)


@settings(max_examples=50)
@given(st.integers(0, 60), st.integers(2, 70), seeds, st.integers(0, 5))
def test_the_shuffle_buffer_loses_and_repeats_nothing(count, size, seed, epoch):
    mixed = list(shuffled(iter(range(count)), size, seed, epoch))
    assert sorted(mixed) == list(range(count))
    assert mixed == list(shuffled(iter(range(count)), size, seed, epoch))
    for place, row in enumerate(mixed):
        assert row < place + size  # nothing comes before it was read
