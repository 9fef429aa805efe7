"""Whole runs on the simulated GPU: no operand is on another device, and the host waits as seldom as it is said here."""

import json

import pytest
from gpu_runs import BUDGET, EBFT, GRPO, SPLIT, STEPS, beyond
from safetensors.torch import load_file
from torch import equal

GRADIENTS, FEATURES = "transfer.py to_host", "rewards.py FeatureRewards._features"
LONG = pytest.mark.long
TWO = "--per_device_train_batch_size 2 --gradient_accumulation_steps 2"


@pytest.mark.parametrize(
    ("flags", "more"),
    [
        pytest.param("--tuner_type full --torch_dtype float32 --beta 0", {}, id="full"),
        pytest.param(
            "--tuner_type full --torch_dtype bfloat16 --beta 0.04 --num_iterations 2",
            {SPLIT: 2 * STEPS},  # log-probs of the reference, and of the first iteration
            id="bf16-reference-iterations",
        ),
        pytest.param("--tuner_type lora", {}, id="lora"),
        pytest.param("--tuner_type lora --use_dora true --gradient_checkpointing true", {}, id="dora-recomputed"),
        pytest.param(
            "--tuner_type full --off_policy_sequence_mask_delta 0.2 --rollout_importance_sampling_mode token_truncate",
            {},
            id="corrections",
        ),
        pytest.param("--tuner_type full --loss_type dapo --dynamic_sample true", {}, id="dapo-dynamic"),
        pytest.param("--tuner_type full --offload_model true --offload_optimizer true", {}, id="offload"),
        pytest.param(
            "--tuner_type full --torch_dtype bfloat16 --optim adamw_cpu", {GRADIENTS: STEPS}, id="optimizer-on-the-host"
        ),
        pytest.param(
            "--tuner_type full --top_entropy_quantile 0.5",
            {SPLIT: 2 * STEPS},  # log-probs of the reference, and the entropies
            id="top-entropy",
        ),
        pytest.param("--tuner_type full --use_adaptive_entropy true", {}, id="adaptive-entropy"),
    ],
)
def test_grpo_waits_once_a_step(on_gpu, flags, more):
    code, err, found = on_gpu(f"{GRPO} {flags}")
    assert code == 0, err[-3000:]
    assert found["steps"] == STEPS
    assert beyond(found, {**BUDGET, **more}) == {}


def test_shards_of_fsdp_keep_the_budget(on_gpu):
    code, err, found = on_gpu(f"{GRPO} --fsdp full_shard --tuner_type full")
    assert code == 0, err[-3000:]
    assert found["steps"] == STEPS
    assert beyond(found, BUDGET) == {}


@pytest.mark.parametrize(
    "command",
    [
        pytest.param(
            f"{GRPO} --tuner_type lora --gradient_checkpointing true --ds3_gather_for_generation false", id="grpo"
        ),
        pytest.param(f"rlhf --rlhf_type ebft {EBFT} --tuner_type full", id="ebft", marks=LONG),
        pytest.param(f"rlhf --rlhf_type dpo {TWO} --tuner_type full", id="dpo", marks=LONG),
        pytest.param(f"sft {TWO} --tuner_type full --packing true --max_length 64", id="sft", marks=LONG),
    ],
)
def test_shards_on_the_host_meet_nothing_of_the_device(on_gpu, command):
    """FSDP2 waits in the backward pass, for each gradient on its way to the host."""
    code, err, found = on_gpu(f"{command} --fsdp full_shard --fsdp_offload_params true")
    assert code == 0, err[-3000:]
    assert found["steps"] == STEPS
    assert found["copies"] == found["attention"] == []


@pytest.mark.parametrize(
    ("way", "own"),
    [
        ("zero2", 0),
        pytest.param("zero2_offload", 6, marks=LONG),
        pytest.param("zero3", 3, marks=LONG),
        pytest.param("zero3_offload", 7, marks=LONG),
    ],
)
def test_zero_runs_there(on_gpu, way, own):
    """`own`: pageable copies of DeepSpeed's, which waits as it likes."""
    code, err, found = on_gpu(f"{GRPO} --deepspeed {way} --tuner_type full")
    assert code == 0, err[-3000:]
    assert found["steps"] == STEPS
    assert sum(count for *_, count in found["copies"]) <= own and found["attention"] == []


def test_ebft_waits_once_a_step_and_for_its_features(on_gpu):
    code, err, found = on_gpu(f"rlhf --rlhf_type ebft {EBFT} --tuner_type full --ebft_ce_coef 0.1")
    assert code == 0, err[-3000:]
    assert found["steps"] == STEPS
    assert beyond(found, {**BUDGET, FEATURES: STEPS, "batch.py BatchRun.step": STEPS * 16}) == {}


def test_strided_ebft_waits_once_a_micro_batch(on_gpu, tmp_path):
    documents = tmp_path / "documents.jsonl"
    lines = [{"text": " ".join(f"{row} plus {more} is {row + more}." for more in range(12))} for row in range(12)]
    documents.write_text("\n".join(map(json.dumps, lines)))
    strided = f"rlhf --rlhf_type ebft --ebft_mode strided {TWO} --tuner_type full"
    code, err, found = on_gpu(strided, dataset=documents)
    assert code == 0, err[-3000:]
    assert beyond(found, {"energy.py energies": 2 * STEPS}) == {}


@pytest.mark.parametrize(
    "command",
    [
        pytest.param(f"sft {TWO} --tuner_type full", id="sft", marks=LONG),
        pytest.param(f"sft {TWO} --tuner_type lora --packing true --max_length 64", id="sft-packed-lora"),
        pytest.param(f"rlhf --rlhf_type dpo {TWO} --tuner_type full", id="dpo"),
        pytest.param(f"rlhf --rlhf_type rm {TWO} --tuner_type lora", id="rm", marks=LONG),
        pytest.param(f"rlhf --rlhf_type orpo {TWO} --tuner_type lora", id="orpo", marks=LONG),
        pytest.param(f"rlhf --rlhf_type simpo {TWO} --tuner_type full", id="simpo", marks=LONG),
    ],
)
def test_trainers_of_trl_run_without_pageable_copies(on_gpu, command):
    """TRL's own losses and metrics wait for the device several times a micro-batch."""
    code, err, found = on_gpu(command)
    assert code == 0, err[-3000:]
    assert found["steps"] == STEPS
    assert found["copies"] == found["attention"] == []


@pytest.mark.long
@pytest.mark.parametrize("method", ["kto", "gkd --lmbda 1 --teacher_model {teacher} --max_completion_length 4"])
def test_kto_and_gkd_run_there(on_gpu, nano_folders, method):
    command = f"rlhf --rlhf_type {method} {TWO} --tuner_type full".replace("{teacher}", str(nano_folders["qwen2"]))
    code, err, found = on_gpu(command)
    assert code == 0, err[-3000:]
    assert found["steps"] == STEPS and found["attention"] == []


def test_a_resumed_run_ends_with_the_same_weights(on_gpu):
    command = f"{GRPO} --tuner_type lora --torch_dtype bfloat16 --save_steps 2"
    code, err, _ = on_gpu(command)
    assert code == 0, err[-3000:]
    end = on_gpu.folder / "out" / "checkpoint-3"
    undisturbed = load_file(end / "adapter_model.safetensors")
    end.rename(on_gpu.folder / "first-end")
    code, err, _ = on_gpu(f"{command} --resume_from_checkpoint {end.with_name('checkpoint-2')}")
    assert code == 0, err[-3000:]
    resumed = load_file(end / "adapter_model.safetensors")
    assert resumed.keys() == undisturbed.keys()
    assert all(equal(resumed[name], value) for name, value in undisturbed.items())
