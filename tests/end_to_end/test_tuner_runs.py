"""Whole runs of every tuner: resumed from a checkpoint they end bit for bit as undisturbed ones, for grpo and sft; vLLM
has their log-probs; sharded over two ranks they are the run of one process.
"""

import json
import os
import shutil
import sys
from pathlib import Path

import pytest
import torch
from cli_runs import ROOT, Cli, assert_close, assert_same, error_lines, log_rows, sampled, state_files
from safetensors.torch import load_file

from swift.models.arguments import ModelArguments
from swift.models.export import merge_adapter

pytestmark = [pytest.mark.slow, pytest.mark.long]

OPTIONAL = Path(sys.prefix) / "optional"
"""Where `make install` puts packages that not every process is to import."""
TUNERS = {
    "dora": {"use_dora": "true"},
    "pissa": {"init_weights": "pissa"},
    "vera": {"tuner_type": "vera", "vera_rank": 8},
    "ia3": {"tuner_type": "ia3"},
    "boft": {"tuner_type": "boft"},
    "miss": {"tuner_type": "miss"},
    "frozen": {"tuner_type": "full", "freeze_parameters_ratio": 0.5},
    "nf4": {"quant_method": "bnb", "quant_bits": 4},
    "int8": {"quant_method": "bnb", "quant_bits": 8},
    "dora int8": {"use_dora": "true", "quant_method": "bnb", "quant_bits": 8},
    "rslora": {"use_rslora": "true"},
    "saved": {"modules_to_save": "norm"},
}
GRPO = {"tuner_type": "lora", "max_steps": 4, "save_steps": 2, "beta": 0.1, "learning_rate": 1e-2}


def flags_of(tuner: str) -> dict:
    more: dict = dict(TUNERS[tuner])
    if "quant_method" in more:
        if not list(OPTIONAL.glob("bitsandbytes-*")):
            pytest.skip(f"no bitsandbytes in {OPTIONAL}; make install puts it there")
        more["variables"] = {"PYTHONPATH": f"{ROOT}{os.pathsep}{OPTIONAL}"}
    return more


def supervised(folder: Path) -> dict:
    """What is different in `swift sft`."""
    rows = [[{"role": "user", "content": f"{n}?"}, {"role": "assistant", "content": str(n)}] for n in range(16)]
    (folder / "chats.jsonl").write_text("".join(json.dumps({"messages": one}) + "\n" for one in rows))
    batches = {"per_device_train_batch_size": 2, "logging_steps": 1}
    return {"mode": "sft", "dataset": folder / "chats.jsonl", "beta": None, **batches}


@pytest.mark.parametrize("mode", ["rlhf", "sft"])
@pytest.mark.parametrize("tuner", [name for name in TUNERS if name not in ("rslora", "saved")])
def test_a_resumed_run_ends_as_an_undisturbed_one(cli, tuner, mode, tmp_path):
    flags = {**GRPO, **flags_of(tuner)}
    if mode == "sft":
        flags |= supervised(tmp_path)
    folder = cli.finish("run", **flags)
    straight = state_files(folder)
    key = "loss" if mode == "sft" else "grad_norm"
    assert log_rows(folder)[-1][key] > 0
    shutil.rmtree(folder / "checkpoint-4")
    cli.finish("run", **flags, resume_from_checkpoint=folder / "checkpoint-2")
    assert_same(state_files(folder), straight, "resumed")


@pytest.mark.parametrize("tuner", ["dora", "vera", "nf4"])
def test_an_engine_of_its_own_has_the_trainers_logprobs(cli, tuner):
    own = {"infer_backend": "transformers", "vllm_mode": "dedicated", "parity_check": "start", "max_steps": 2}
    cli.finish("own", **{**GRPO, **flags_of(tuner), **own})
    assert "parity" in cli.printed


@pytest.mark.parametrize("mode", ["sft", "grpo"])
@pytest.mark.parametrize(
    ("way", "copies"),
    [
        ({"fsdp": "full_shard"}, 1),
        ({"fsdp": "full_shard", "fsdp_replicas": 2}, 2),
        ({"fsdp": "full_shard", "fsdp_offload_params": "true"}, 1),
        ({"deepspeed": "zero2"}, 1),
        ({"deepspeed": "zero3"}, 1),
    ],
    ids=["fsdp", "hsdp", "offload", "zero2", "zero3"],
)
def test_a_quantised_base_is_trained_by_several_as_by_one(cli, mode, way, copies):
    common = {
        **GRPO,
        **flags_of("nf4"),
        "lora_dropout": 0,
        "optim": "sgd",
        "learning_rate": 0.5,
        "max_grad_norm": 0,
        "max_steps": 2,
    }
    if mode == "sft":
        common |= supervised(cli.folder)
    one = cli.finish("one", **{**common, "gradient_accumulation_steps": 2 * copies, "per_device_train_batch_size": 2})
    ranks = {"NPROC_PER_NODE": 2 * copies, **common.pop("variables")}
    sharded = {**common, **way, "per_device_train_batch_size": 2}
    several = cli.finish("several", **{**sharded, "gradient_accumulation_steps": 1}, variables=ranks)
    assert_close(several, one, "loss", "grad_norm")
    if mode == "grpo":
        assert sampled(several) == sampled(one)
        assert max(row["mismatch/logp_abs_diff_max"] for row in log_rows(several)) < 1e-5
    ours, theirs = (load_file(folder / "checkpoint-2" / "adapter_model.safetensors") for folder in (several, one))
    assert max(float(theirs[name].abs().max()) for name in theirs if "lora_B" in name) > 1e-3
    assert all(torch.allclose(ours[name], theirs[name], atol=1e-5) for name in theirs)


# --- vLLM ----------------------------------------------------------------------------------------------------------

VLLM = {"use_vllm": "true", "vllm_enforce_eager": "true", "vllm_max_num_seqs": 16, "max_length": 40}
LIMITS = {"int8": 0.3, "dora int8": 0.3}  # activations are rounded, too
ALONE = {
    "rslora": 1e-5, "pissa": 1e-5, "nf4": 0.6, "int8": 0.3, "dora": "--vllm_enable_lora", "vera": "--vllm_enable_lora",
    "saved": "--modules_to_save",
}  # fmt: skip
"""The adapter sent alone -> largest difference of log-probs (on a base that is not quantised), or what is refused."""


@pytest.fixture
def vllm(nano_folders, material, tmp_path):
    """Runs of a model whose heads are as wide as vLLM's kernels for CPUs want them."""
    from swift.models.tiny import build_tiny

    with Cli(build_tiny(tmp_path / "tiny", arch="qwen2", size="tiny"), material[1], tmp_path) as runs:
        yield runs


def largest_mismatch(folder: Path) -> float:
    rows = log_rows(folder)
    assert len(rows) == 2 and rows[-1]["grad_norm"] > 0
    return max(row["mismatch/logp_abs_diff_max"] for row in rows)


@pytest.mark.parametrize("place", ["colocate", "dedicated"])
@pytest.mark.parametrize("tuner", [name for name in TUNERS if name != "frozen"])
def test_vllm_samples_with_merged_weights(vllm, tuner, place):
    folder = vllm.finish("run", **{**GRPO, **flags_of(tuner), **VLLM, "max_steps": 2, "vllm_mode": place})
    assert largest_mismatch(folder) <= LIMITS.get(tuner, 1e-5)


@pytest.mark.parametrize("tuner", ALONE)
def test_an_adapter_is_sent_to_vllm_alone_or_refused(vllm, tuner):
    flags = {**GRPO, **flags_of(tuner), **VLLM, "max_steps": 2, "vllm_mode": "colocate", "vllm_enable_lora": "true"}
    if isinstance(wanted := ALONE[tuner], float):
        assert largest_mismatch(vllm.finish("run", **flags)) <= wanted
        return
    code, _, err = vllm.start("run", **flags).wait()
    assert (code, [line.split()[2] for line in error_lines(err)]) == (2, [f"{wanted}:"])


# --- sharded weights -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["rlhf", "sft"])
@pytest.mark.parametrize("tuner", ["dora", "rslora", "saved", "ia3"])
def test_a_sharded_tuner_is_that_of_one_process_and_merges(cli, tuner, mode, tmp_path):
    dropout = {} if tuner == "ia3" else {"lora_dropout": 0}  # masks are those of each rank
    flags = {**GRPO, **TUNERS[tuner], **dropout, "max_steps": 2, **(supervised(tmp_path) if mode == "sft" else {})}
    batch = 4 if mode == "rlhf" else 2
    one = cli.finish("one", **{**flags, "per_device_train_batch_size": batch})
    expected = load_file(one / "checkpoint-2" / "adapter_model.safetensors")
    for way in ({"deepspeed": "zero3"}, {"fsdp": "full_shard"}):
        name = next(iter(way))
        two = {"variables": {"NPROC_PER_NODE": 2}, "per_device_train_batch_size": batch // 2}
        folder = cli.finish(name, **{**flags, **way, **two})
        ours = load_file(folder / "checkpoint-2" / "adapter_model.safetensors")
        assert ours.keys() == expected.keys(), name
        assert max(float((ours[key] - expected[key]).abs().max()) for key in ours) < 1e-4, name
        adapter = ModelArguments(adapters=[str(folder / "checkpoint-2")])
        assert (merge_adapter(adapter, tmp_path / f"{name}-merged") / "model.safetensors").is_file()
