import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from swift.rollout.replay import ReplayBuffer, ReplayState
from swift.rollout.samples import TrainSample
from swift.rollout.saved_state import decode, encode


def sample(value=1):
    return TrainSample(
        0, np.array([1, 2]), np.array([value]), np.array([-1.0], dtype=np.float32), np.array([True]), 0.5,
        versions=[(2, 0, 1)], old_logprobs=np.array([-2.0]), ref_logprobs=np.array([-3.0]),
    )  # fmt: skip


def filled(scores, size=4, **settings):
    buffer = ReplayBuffer(size, **{"max_age": 10, "seed": 3, **settings})
    for i, score in enumerate(scores):
        buffer.store(f"g{i}", 0, score, [sample(i)])
    return buffer


def names(entries):
    return [entry.group_id for entry in entries]


def test_the_best_stay_and_of_equal_ones_the_newest():
    buffer = filled([1.0, 2.0, 1.0, 1.0], size=3)
    assert sorted(names(buffer.draw(9, 1))) == ["g1", "g2", "g3"]


def test_groups_without_a_score_are_never_kept():
    assert len(filled([0.0, 0.0])) == 0


def test_entries_are_forgotten_by_age_and_never_drawn_for_their_own_batch():
    buffer = filled([1.0, 1.0], max_age=2)
    assert names(buffer.draw(2, 2, without={"g0"})) == ["g1"]
    assert buffer.draw(2, 3) == [] and len(buffer) == 0


def test_draws_follow_the_scores():
    buffer = filled([1.0, 3.0])
    first = [names(buffer.draw(1, 1))[0] for _ in range(2000)]
    assert first.count("g1") / len(first) == pytest.approx(0.75, abs=0.03)


@pytest.mark.parametrize("recompute", [True, False])
def test_a_drawn_sample_keeps_its_advantage_and_nothing_that_depends_on_an_older_policy(recompute):
    buffer = filled([1.0], recompute=recompute)
    [entry] = buffer.draw(1, 1)
    [replayed] = buffer.samples_of(entry, 4)
    assert (replayed.group, replayed.advantage, replayed.ref_logprobs) == (4, 0.5, None)
    assert replayed.old_logprobs is None if recompute else replayed.old_logprobs.tolist() == [-1.0]


@given(st.lists(st.floats(0, 10), max_size=20), st.integers(1, 6), st.integers(0, 8))
def test_a_saved_buffer_goes_on_with_the_same_draws(scores, size, count):
    buffer = filled(scores, size=size)
    again = ReplayBuffer(size, max_age=10, seed=3)
    again.load(decode(encode(buffer.state()), ReplayState))
    drawn = buffer.draw(count, 1)
    assert names(drawn) == names(again.draw(count, 1)) and len(set(names(drawn))) == len(drawn)
    assert len(drawn) == min(count, len(buffer)) and len(buffer) <= size
    assert names(buffer.draw(count, 2)) == names(again.draw(count, 2))


def test_a_smaller_buffer_keeps_the_best_of_a_larger_one():
    small = ReplayBuffer(1, max_age=10, seed=3)
    small.load(filled([1.0, 5.0, 2.0]).state())
    assert names(small.draw(9, 1)) == ["g1"]
