"""Two processes under ZeRO train like one process without it: completions, losses, norms, weights, publications."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file
from sharded_runs import ADAPTER, FULL, LORA, PARTS, SCHEDULED, SKIPPING, assert_same_training, make_adapter
from sharded_worker import launch

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

KINDS = {"full": FULL, "lora": LORA, "adapter": ADAPTER, "skipping": SKIPPING}
RUNS = {
    "zero1": ("full", {"deepspeed": "zero1"}),
    "zero2": ("full", {"deepspeed": "zero2"}),
    "zero3": ("full", {"deepspeed": "zero3"}),
    "zero3-on-shards": ("full", {"deepspeed": "zero3", "gather": False}),
    "zero2_offload": ("full", {"deepspeed": "zero2_offload"}),
    "zero2-lora": ("lora", {"deepspeed": "zero2"}),
    "zero3-lora": ("lora", {"deepspeed": "zero3"}),
    "zero3-adapter": ("adapter", {"deepspeed": "zero3"}),
    "zero0-skipping": ("skipping", {"deepspeed": "zero0"}),
    "zero2-skipping": ("skipping", {"deepspeed": "zero2"}),
    "zero3-skipping": ("skipping", {"deepspeed": "zero3"}),
}
SAVING = {"parts": PARTS, "arguments": {**SCHEDULED, "save_strategy": "steps", "save_steps": 2}}


@pytest.fixture(scope="module")
def common(nano_folders, tmp_path_factory):
    adapter = make_adapter(nano_folders["qwen2"], tmp_path_factory.mktemp("adapter"))
    return {"model": str(nano_folders["qwen2"]), "adapter": adapter}


@pytest.fixture(scope="module")
def alone(common, tmp_path_factory):
    """Each kind of run in one process, without DeepSpeed."""
    return dict(zip(KINDS, launch(tmp_path_factory.mktemp("alone"), 1, list(KINDS.values()), **common), strict=True))


@pytest.fixture(scope="module")
def spread(common, tmp_path_factory):
    """All runs under ZeRO, in two processes."""
    tasks = [{**KINDS[kind], **way} for kind, way in RUNS.values()]
    return dict(zip(RUNS, launch(tmp_path_factory.mktemp("spread"), 2, tasks, **common), strict=True))


@pytest.mark.parametrize("name", RUNS)
def test_zero_trains_as_one_process_does(alone, spread, name):
    kind, _ = RUNS[name]
    assert_same_training(spread[name], alone[kind])
    if kind == "skipping":
        logs = spread[name]["logs"]
        assert [row.get("health/steps_without_signal", 0) for row in logs] == [0, 1, 0, 0]
        assert [row.get("health/non_finite_steps", 0) for row in logs] == [0, 0, 1, 0]
        assert logs[1]["grad_norm"] == 0


def test_one_process_under_zero_is_one_process(alone, common, tmp_path):
    (single,) = launch(tmp_path, 1, [{**FULL, "deepspeed": "zero2"}], **common)
    assert_same_training(single, alone["full"])


def test_a_resumed_run_is_the_straight_one_bit_for_bit_and_its_checkpoints_hold_models(common, tmp_path):
    ways = {"zero2": {"deepspeed": "zero2"}, "zero3": {"deepspeed": "zero3"}}
    ways["zero3-lora"] = {"deepspeed": "zero3", "policy": "lora"}
    outputs = {name: str(tmp_path / name) for name in ways}
    tasks = [{**SAVING, **way, "output": outputs[name]} for name, way in ways.items()]
    resumed = [
        {**SAVING, **way, "output": f"{outputs[name]}-again", "resume": f"{outputs[name]}/checkpoint-2"}
        for name, way in ways.items()
    ]
    results = launch(tmp_path, 2, [*tasks, *resumed], **common)
    for name, straight, again in zip(ways, results[: len(ways)], results[len(ways) :], strict=True):
        assert all(torch.equal(again["state"][key], value) for key, value in straight["state"].items()), name
        for ours, theirs in zip(again["logs"][-2:], straight["logs"][-2:], strict=True):
            assert (ours["loss"], ours["grad_norm"], ours["learning_rate"]) == (
                theirs["loss"],
                theirs["grad_norm"],
                theirs["learning_rate"],
            )
        lora = name.endswith("lora")
        saved = load_file(f"{outputs[name]}/checkpoint-4/{'adapter_model' if lora else 'model'}.safetensors")
        expected = straight["adapter" if lora else "published"]
        assert set(expected) - set(saved) == (set() if lora else {"lm_head.weight"}), "tied weights are saved once"
        assert all(torch.equal(saved[key], expected[key]) for key in saved), name
