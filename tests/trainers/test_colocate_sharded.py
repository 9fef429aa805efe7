"""The cycle with a policy that several processes share: DDP, ZeRO, FSDP2. Real offloads, equal to the last bit."""

import json
from pathlib import Path

import pytest
import torch
from preloaded import run_ranks

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent
LIMIT_S = 240
WAYS = {
    "ddp": {},
    "zero2": {"deepspeed": "zero2"},
    "zero3": {"deepspeed": "zero3"},
    "fsdp2": {"fsdp": "full_shard"},
}
GATHERED_FIRST = ("zero3", "fsdp2")
FLAGS = {"sleep_level": 2, "offload_model": True, "offload_optimizer": True, "gc_collect_after_offload": True}


def run(folder, **task):
    """A run on two ranks; what each of them ended with."""
    folder.mkdir()
    (folder / "task.json").write_text(json.dumps({**task, "result": str(folder / "result"), "output": str(folder)}))
    words = [HERE / "colocate_worker.py", folder / "task.json"]
    run_ranks(words, folder / "logs", limit_s=LIMIT_S, DS_ACCELERATOR="cpu")
    return [torch.load(folder / f"result.{rank}", weights_only=False) for rank in range(2)]


@pytest.mark.parametrize("way", WAYS)
def test_offloading_changes_no_bit_of_a_run_on_two_ranks(way, nano_folders, tmp_path):
    task = {"model": str(nano_folders["qwen2"]), "scenario": "train", "arguments": {"max_steps": 3}, **WAYS[way]}
    plain = run(tmp_path / "plain", **task)
    cycled = run(tmp_path / "cycled", **task, flags=FLAGS)
    for mine, theirs in zip(cycled, plain, strict=True):
        assert mine["weights"].keys() == theirs["weights"].keys()
        for name, value in theirs["weights"].items():
            assert torch.equal(mine["weights"][name], value), name
        assert len(mine["state"]) == len(theirs["state"]) > 0
        assert all(torch.equal(a, b) for a, b in zip(mine["state"], theirs["state"], strict=True))
        for name in ("losses", "tokens"):
            assert mine[name] == theirs[name], name
        assert torch.equal(mine["random"], theirs["random"])
        assert mine["seen"] == [(0, 0)] * 3, "something stayed on the device while the engine sampled"
        mem = [line for line in mine["lines"] if line.startswith("mem ")]
        assert len(mem) == 9
    assert len({loss for loss, _ in plain[0]["losses"]}) == 3
