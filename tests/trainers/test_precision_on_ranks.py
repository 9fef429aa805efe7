"""16-bit weights on two processes: replicas stay equal, and what overflows on one of them is left out on both."""

from __future__ import annotations

import pytest
import torch
from sharded_worker import launch

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

HALF = {"parts": {"max_samples": 2}, "arguments": {"max_steps": 4, "learning_rate": 1e-4, "max_grad_norm": 0.5}}
SAVING = {"save_strategy": "steps", "save_steps": 2}
FLOAT16 = {"dtype": "float16", **HALF, "poisoned_step": 0}


@pytest.fixture(scope="module")
def runs(nano_folders, tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    rounded = {**HALF, "dtype": "bfloat16", "parts": {"max_samples": 2, "stochastic_rounding": True}}
    saved = {**FLOAT16, "arguments": {**HALF["arguments"], **SAVING}, "output": str(folder / "float16")}
    again = {**FLOAT16, "output": str(folder / "again"), "resume": str(folder / "float16" / "checkpoint-2")}
    made = launch(folder, 2, [rounded, saved, again], model=str(nano_folders["qwen2"]))
    return dict(zip(("rounded", "float16", "resumed"), made, strict=True))


@pytest.mark.parametrize("name", ["rounded", "float16", "resumed"])
def test_replicas_are_equal(runs, name):
    first, second = runs[name]["replicas"]
    assert first == second and len(first) > 10


def test_an_overflow_in_the_first_step_on_one_rank_is_left_out_on_both(runs):
    skips = [row.get("health/nan_skips", 0) for row in runs["float16"]["logs"]]
    assert skips[0] == 1 and 0 in skips[1:], "gradients of so small a model may overflow by themselves, too"


def test_a_run_goes_on_exactly_after_an_overflow(runs):
    ours, theirs = runs["resumed"]["state"], runs["float16"]["state"]
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
