"""The order of rows; that every row comes once per epoch and that a position is resumed is tested with curricula."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swift.data.sampler import RowOrder
from swift.data.stream import shuffled
from swift.errors import ConfigError

seeds = st.integers(-(2**70), 2**70)


def test_seeds_and_epochs_give_different_orders():
    def rows(seed):
        stream = RowOrder(50, seed=seed, shuffle=True)
        return [stream.draw() for _ in range(100)]

    assert rows(1) == rows(1)
    assert rows(1) != rows(2)
    assert rows(1)[:50] != rows(1)[50:]


def test_the_order_is_that_of_earlier_versions():
    stream = RowOrder(8, seed=42, shuffle=True)
    assert [stream.draw() for _ in range(8)] == [3, 4, 2, 7, 6, 1, 5, 0]


def test_no_rows_is_an_error():
    with pytest.raises(ConfigError, match="0 rows"):
        RowOrder(0, seed=1, shuffle=True)


@pytest.mark.parametrize(
    ("other", "says"),
    [
        ({"size": 9}, "rows of --dataset: 8 in the checkpoint, 9 now"),
        ({"seed": 2}, "--data_seed: 1 in the checkpoint, 2 now"),
        ({"shuffle": False}, "--dataset_shuffle: True in the checkpoint, False now"),
    ],
)
def test_a_position_in_other_data_is_refused(other, says):
    state = RowOrder(8, seed=1, shuffle=True).state_dict()
    with pytest.raises(ConfigError, match=says):
        RowOrder(**{"size": 8, "seed": 1, "shuffle": True, **other}).load_state_dict(state)


@settings(max_examples=50)
@given(st.integers(0, 60), st.integers(2, 70), seeds, st.integers(0, 5))
def test_the_shuffle_buffer_loses_and_repeats_nothing(count, size, seed, epoch):
    mixed = list(shuffled(iter(range(count)), size, seed, epoch))
    assert sorted(mixed) == list(range(count))
    assert mixed == list(shuffled(iter(range(count)), size, seed, epoch))
    for place, row in enumerate(mixed):
        assert row < place + size  # nothing comes before it was read
