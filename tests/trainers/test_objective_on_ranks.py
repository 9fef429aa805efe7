"""Two processes choose the same tokens, steer the same controller and move the same reference as one does.

In two processes rewards come only after the passes of the reference, in one process before them.
"""

from __future__ import annotations

import pytest
import torch
from sharded_runs import PARTS, assert_same_training, gap
from sharded_worker import launch

from swift.observability.metrics import is_timing

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

EVERYTHING = {
    "beta": 0.1,
    "moves": [3, 0.6],
    "settings": {
        "entropy": {"quantile": 0.6, "adaptive": {"coefficient": 0.05, "target": 5.455, "step": 0.02}},
        "off_policy_delta": 0.01,
        "log_offpolicy": True,
    },
    "loss": {"loss_type": "cispo", "epsilon_high": 1.1, "kl_bias_correction": True},
    "parts": PARTS,
    "arguments": {"max_steps": 5, "learning_rate": 2e-3},
}
SEQUENCES = {**EVERYTHING, "policy": "lora", "loss": {"loss_type": "luspo", "epsilon_high": 0.05, "epsilon": 0.05}}
KINDS = {"full": EVERYTHING, "lora": SEQUENCES}
WAYS = {
    "ddp": ("full", {}),
    "ddp-lora": ("lora", {}),
    "zero3": ("full", {"deepspeed": "zero3"}),
    "zero3-lora": ("lora", {"deepspeed": "zero3"}),
    "fsdp": ("full", {"fsdp": "full_shard"}),
}


@pytest.fixture(scope="module")
def alone(nano_folders, tmp_path_factory):
    model = str(nano_folders["qwen2"])
    results = launch(tmp_path_factory.mktemp("alone"), 1, list(KINDS.values()), model=model)
    return dict(zip(KINDS, results, strict=True))


@pytest.fixture(scope="module")
def spread(nano_folders, tmp_path_factory):
    """All runs in two processes; that of ZeRO-3 is resumed from its middle too."""
    results = {}
    for fsdp in (False, True):  # a process has one of the two libraries
        folder = tmp_path_factory.mktemp("spread")
        chosen = {way: one for way, one in WAYS.items() if ("fsdp" in one[1]) == fsdp}
        ways = {way: {**KINDS[kind], **how, "late": True} for way, (kind, how) in chosen.items()}
        if not fsdp:
            saving = {**EVERYTHING["arguments"], "save_strategy": "steps", "save_steps": 3}
            ways["zero3"] |= {"arguments": saving, "output": str(folder / "saved")}
            ways["resumed"] = {**ways["zero3"], "output": str(folder / "again")}
            ways["resumed"]["resume"] = str(folder / "saved" / "checkpoint-3")
        made = launch(folder, 2, list(ways.values()), model=str(nano_folders["qwen2"]))
        results |= dict(zip(ways, made, strict=True))
    return results


@pytest.mark.parametrize("way", WAYS)
def test_two_processes_train_as_one_does(alone, spread, way):
    kind, _ = WAYS[way]
    ours, theirs = spread[way], alone[kind]
    assert_same_training(ours, theirs, tolerance=2e-5)
    for mine, other in zip(ours["logs"], theirs["logs"], strict=True):
        assert {name for name in mine if not is_timing(name)} == {name for name in other if not is_timing(name)}
        for name in other:
            if name.startswith(("entropy", "rollout_ratio/", "off_policy_mask/", "logp/", "mismatch/", "kl")):
                assert mine[name] == pytest.approx(other[name], rel=1e-3, abs=2e-5), name
    assert ours["controller"] == pytest.approx(theirs["controller"], rel=1e-4)
    assert gap(ours["reference"], theirs["reference"]) < 2e-5
    moved = [name for name, value in theirs["reference"].items() if not torch.equal(value, theirs["state"][name])]
    assert moved


@pytest.mark.parametrize("kind", KINDS)
def test_everything_acted(alone, kind):
    logs = alone[kind]["logs"]
    assert len({row["entropy_coef"] for row in logs}) > 1
    assert max(row["off_policy_mask/muted_frac"] for row in logs) > 0
    assert max(row["rollout_ratio/abs_log_max"] for row in logs) < 1e-5, (
        "the sampler has the weights of the unit's start"
    )
    assert min(row["rollout_ratio/ess"] for row in logs) > 0.999
    assert max(row["clip_ratio/high_mean"] for row in logs) > 0


def test_a_resumed_run_on_spread_weights_is_the_straight_one(spread):
    straight, again = spread["zero3"], spread["resumed"]
    assert again["controller"] == straight["controller"]
    for part in ("state", "reference"):
        assert all(torch.equal(again[part][name], value) for name, value in straight[part].items()), part
    for ours, theirs in zip(again["logs"][-2:], straight["logs"][-2:], strict=True):
        assert [ours[name] for name in ("loss", "grad_norm", "kl", "entropy")] == [
            theirs[name] for name in ("loss", "grad_norm", "kl", "entropy")
        ]
