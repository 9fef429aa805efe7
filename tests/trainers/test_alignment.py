"""Log-probs that another process reports: shifted, untempered, of other weights; and those that are right."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from swift.errors import NumericError
from swift.rollout.samples import RolloutBatch, TrainSample
from swift.trainers.grpo.alignment import AlignmentCheck, sampled_all

LENGTH = 40


def logits():
    return np.random.default_rng(0).normal(size=LENGTH).astype(np.float32) * 2 - 3


def trainer(temperature):
    """The trainer's log-probs of a sample; what a temperature does to them is made up."""
    return logits() / temperature


def check(sampler, *, temperature=1.0, fresh=True, trained=None, times=1):
    seen = {}
    one = AlignmentCheck(
        score=lambda sequences, t: torch.from_numpy(np.concatenate([trainer(t) for _ in sequences])),
        temperature=temperature,
        is_fresh=lambda sample: fresh,
        add=seen.__setitem__,
    )
    mask = np.ones(LENGTH, dtype=bool) if trained is None else trained
    sample = TrainSample(0, np.array([1, 2]), np.arange(LENGTH), np.asarray(sampler, np.float32), mask, 1.0)
    for _ in range(times):
        one.check(RolloutBatch([sample], 1, 1))
    return seen


@pytest.mark.parametrize(
    ("versions", "counts"),
    [([(2, 0, 1), (2, 3, 5)], True), ([(1, 0, 1), (2, 3, 5)], False), ([(2, 0, 1)], False), ([], False)],
)
def test_what_is_compared_was_sampled_by_the_present_weights_in_every_turn(versions, counts):
    mask = np.array([True, False, False, True, True])
    sample = TrainSample(0, np.array([1]), np.arange(5), np.zeros(5, np.float32), mask, 1.0, versions)
    assert sampled_all(sample, lambda version: version == 2) is counts


def test_what_is_right_passes():
    seen = check(trainer(1.0) + 1e-4, times=3)
    assert seen["alignment/diff_abs_mean"] == pytest.approx(1e-4, rel=0.01)
    assert set(seen) == {"alignment/diff_mean", "alignment/diff_abs_mean", "alignment/diff_max"}


@pytest.mark.parametrize("shift", [-1, 1])
def test_a_shift_by_one(shift):
    with pytest.raises(NumericError, match=f"shifted by one: those of token t are at t\\{shift:+d}"):
        check(np.roll(trainer(1.0), shift))


def test_untempered_logprobs():
    check(trainer(0.7), temperature=0.7)
    with pytest.raises(NumericError, match=r"untempered log-probs: they fit temperature 1, not --temperature 0.7"):
        check(trainer(1.0), temperature=0.7)


def test_other_weights_end_the_run_the_second_time(caplog):
    wrong = trainer(1.0) - 1.5
    check(wrong)
    assert "disagree by 1.5 nats a token" in caplog.text
    with pytest.raises(NumericError, match=r"disagree by 1.5 nats a token, twice in a row"):
        check(wrong, times=2)


def test_one_token_far_off_is_told(caplog):
    values = trainer(1.0)
    values[7] -= 3.0
    check(values)
    assert "token 7 (id 7)" in caplog.text
    assert "3.0 nats apart" in caplog.text


@pytest.mark.parametrize("way", ["stale", "unknown", "masked"])
def test_what_cannot_be_compared_is_left_alone(way):
    wrong = trainer(1.0) - 5.0
    masked = np.zeros(LENGTH, dtype=bool)
    assert (
        check(
            np.full(LENGTH, np.nan) if way == "unknown" else wrong,
            fresh=way != "stale",
            trained=masked if way == "masked" else None,
            times=3,
        )
        == {}
    )
