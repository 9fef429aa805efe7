"""Whole runs of every tuner: resumed from a checkpoint they end bit for bit as undisturbed ones, for grpo and sft."""

import json
import os
import shutil
import sys
from pathlib import Path

import pytest
import torch
from cli_runs import ROOT, assert_same, log_rows, state_files
from safetensors.torch import load_file

pytestmark = [pytest.mark.slow, pytest.mark.long]

OPTIONAL = Path(sys.prefix) / "optional"
"""Where `make install` puts packages that not every process is to import."""
TUNERS = {
    "dora": {"use_dora": "true"},
    "pissa": {"init_weights": "pissa"},
    "vera": {"tuner_type": "vera", "vera_rank": 8},
    "ia3": {"tuner_type": "ia3"},
    "boft": {"tuner_type": "boft"},
    "frozen": {"tuner_type": "full", "freeze_parameters_ratio": 0.5},
    "nf4": {"quant_method": "bnb", "quant_bits": 4},
    "int8": {"quant_method": "bnb", "quant_bits": 8},
}
GRPO = {"tuner_type": "lora", "max_steps": 4, "save_steps": 2, "beta": 0.1, "learning_rate": 1e-2}


def flags_of(tuner: str) -> dict:
    more: dict = dict(TUNERS[tuner])
    if "quant_method" in more:
        if not list(OPTIONAL.glob("bitsandbytes-*")):
            pytest.skip(f"no bitsandbytes in {OPTIONAL}; make install puts it there")
        more["variables"] = {"PYTHONPATH": f"{ROOT}{os.pathsep}{OPTIONAL}"}
    return more


def numbers(folder: Path) -> dict:
    """Weights and optimizer of the last checkpoint of swift sft."""
    (weights,) = (folder / "checkpoint-4").glob("*model.safetensors")
    return {
        "weights": load_file(weights),
        "optimizer": torch.load(folder / "checkpoint-4" / "optimizer.pt", weights_only=True),
    }


@pytest.mark.parametrize("mode", ["rlhf", "sft"])
@pytest.mark.parametrize("tuner", TUNERS)
def test_a_resumed_run_ends_as_an_undisturbed_one(cli, tuner, mode, tmp_path):
    flags = {**GRPO, **flags_of(tuner)}
    if mode == "sft":
        chats = tmp_path / "chats.jsonl"
        rows = [[{"role": "user", "content": f"{n}?"}, {"role": "assistant", "content": str(n)}] for n in range(16)]
        chats.write_text("".join(json.dumps({"messages": one}) + "\n" for one in rows))
        flags |= {"mode": "sft", "dataset": chats, "per_device_train_batch_size": 2, "logging_steps": 1}
        del flags["beta"]
    folder, _, _ = cli.finish("run", **flags)
    state_of = numbers if mode == "sft" else state_files
    straight = state_of(folder)
    key = "loss" if mode == "sft" else "grad_norm"
    assert log_rows(folder)[-1][key] > 0
    shutil.rmtree(folder / "checkpoint-4")
    cli.finish("run", **flags, resume_from_checkpoint=folder / "checkpoint-2")
    assert_same(state_of(folder), straight, "resumed")


@pytest.mark.parametrize("tuner", ["dora", "vera", "nf4"])
def test_an_engine_of_its_own_has_the_trainers_logprobs(cli, tuner):
    own = {"infer_backend": "transformers", "vllm_mode": "dedicated", "parity_check": "start", "max_steps": 2}
    _, out, err = cli.finish("own", **{**GRPO, **flags_of(tuner), **own})
    assert "parity" in out + err
