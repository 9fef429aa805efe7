"""Two processes with FSDP2 train like one process without it, and their checkpoints resume bit for bit."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file
from sharded_runs import ADAPTER, FULL, LORA, PARTS, SCHEDULED, SKIPPING, assert_same_training, gap, make_adapter
from sharded_worker import launch

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

KINDS = {"full": FULL, "lora": LORA, "adapter": ADAPTER, "skipping": SKIPPING}
RUNS = {
    "full": ("full", {"fsdp": "full_shard"}),
    "on-shards": ("full", {"fsdp": "full_shard", "gather": False}),
    "shard_grad_op": ("full", {"fsdp": "shard_grad_op"}),
    "lora": ("lora", {"fsdp": "full_shard"}),
    "adapter": ("adapter", {"fsdp": "full_shard"}),
    "skipping": ("skipping", {"fsdp": "full_shard"}),
}
SAVING = {"fsdp": "full_shard", "parts": PARTS, "arguments": {**SCHEDULED, "save_strategy": "steps", "save_steps": 2}}
BF16 = {"dtype": "bfloat16", "parts": {"slice_size": 8}, "arguments": {"max_steps": 2, "learning_rate": 1e-4}}


@pytest.fixture(scope="module")
def common(nano_folders, tmp_path_factory):
    adapter = make_adapter(nano_folders["qwen2"], tmp_path_factory.mktemp("adapter"))
    return {"model": str(nano_folders["qwen2"]), "adapter": adapter}


@pytest.fixture(scope="module")
def alone(common, tmp_path_factory):
    """Each kind of run in one process, without FSDP."""
    kinds = {**KINDS, "bf16": BF16}
    return dict(zip(kinds, launch(tmp_path_factory.mktemp("alone"), 1, list(kinds.values()), **common), strict=True))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("spread")


@pytest.fixture(scope="module")
def spread(common, folder):
    """All runs with FSDP, in two processes."""
    tasks = {name: {**KINDS[kind], **way} for name, (kind, way) in RUNS.items()}
    tasks["bf16"] = {**BF16, "fsdp": "full_shard", "output": str(folder / "bf16")}
    for policy in ("full", "lora"):
        run = {**SAVING, "policy": policy, "output": str(folder / policy)}
        tasks[f"straight-{policy}"] = run
        again = {"output": str(folder / f"{policy}-again"), "resume": str(folder / policy / "checkpoint-2")}
        tasks[f"resumed-{policy}"] = {**run, **again}
    return dict(zip(tasks, launch(folder, 2, list(tasks.values()), **common), strict=True))


@pytest.mark.parametrize("name", RUNS)
def test_fsdp_trains_as_one_process_does(alone, spread, name):
    assert_same_training(spread[name], alone[RUNS[name][0]])


@pytest.mark.parametrize("policy", ["full", "lora"])
def test_a_resumed_run_is_the_straight_one_bit_for_bit(spread, folder, policy):
    straight, again = spread[f"straight-{policy}"], spread[f"resumed-{policy}"]
    assert all(torch.equal(again["state"][name], value) for name, value in straight["state"].items())
    assert [row["loss"] for row in again["logs"][-2:]] == [row["loss"] for row in straight["logs"][-2:]]
    file = "adapter_model" if policy == "lora" else "model"
    saved = load_file(folder / policy / "checkpoint-4" / f"{file}.safetensors")
    expected = straight["adapter" if policy == "lora" else "published"]
    assert all(torch.equal(saved[name], expected[name]) for name in saved)


def test_masters_are_float32_and_everyone_else_sees_bfloat16(alone, spread, folder):
    ours, theirs = spread["bf16"], alone["bf16"]
    assert {tensor.dtype for tensor in ours["published"].values()} == {torch.bfloat16}
    assert any((value != value.bfloat16()).any() for value in ours["state"].values()), "what is trained has more digits"
    assert gap(ours["published"], theirs["published"]) < 2e-3
    saved = folder / "bf16" / "checkpoint-2"
    assert {value.dtype for value in load_file(saved / "model.safetensors").values()} == {torch.bfloat16}
    assert json.loads((saved / "config.json").read_text())["dtype"] == "bfloat16"
