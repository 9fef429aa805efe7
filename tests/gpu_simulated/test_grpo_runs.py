"""Whole runs of GRPO on the simulated GPU: no operand is elsewhere, and the host waits as seldom as it is said."""

import pytest
from gpu_runs import BUDGET, CHECKED, EBFT, GRPO, LONG, SPLIT, STEPS, TWO, beyond, image_rows
from hybrids import hybrid
from vlms import build_vlm

from swift.models.tiny import build_tiny

GRADIENTS = "transfer.py to_host"


@pytest.mark.parametrize(
    ("flags", "more"),
    [
        pytest.param(
            "--tuner_type full --torch_dtype bfloat16 --beta 0.04 --num_iterations 2",
            {SPLIT: 2 * STEPS},  # log-probs of the reference, and of the first iteration
            id="bf16-reference-iterations",
        ),
        pytest.param("--tuner_type lora", {}, id="lora"),
        pytest.param("--tuner_type lora --use_dora true --gradient_checkpointing true", {}, id="dora-recomputed"),
        pytest.param(
            "--tuner_type full --loss_type dapo --dynamic_sample true --off_policy_sequence_mask_delta 0.2 "
            "--rollout_importance_sampling_mode token_truncate",
            {},
            id="dapo-dynamic-corrections",
        ),
        pytest.param(
            "--tuner_type full --torch_dtype bfloat16 --optim adamw_cpu", {GRADIENTS: STEPS}, id="optimizer-on-the-host"
        ),
        pytest.param(
            "--tuner_type full --offload_model true --offload_optimizer true --top_entropy_quantile 0.5",
            {SPLIT: 2 * STEPS},  # log-probs of the reference, and the entropies
            id="offload-top-entropy",
        ),
        pytest.param("--tuner_type full --use_adaptive_entropy true", {}, id="adaptive-entropy", marks=LONG),
    ],
)
def test_grpo_waits_once_a_step(on_gpu, flags, more):
    keeps_budget(*on_gpu(f"{GRPO} {flags}"), more)


def test_a_run_that_checks_parity_first_waits_once_a_step(on_gpu):
    keeps_budget(*on_gpu(f"{CHECKED} --tuner_type full --torch_dtype float32 --beta 0"))


def keeps_budget(code, err, found, more=()):
    assert code == 0, err[-3000:]
    assert found["steps"] == STEPS
    assert beyond(found, BUDGET | dict(more)) == {}


@pytest.mark.parametrize(
    "arch", ["lfm2", pytest.param("qwen3_5_text", marks=LONG), pytest.param("nemotron_h", marks=LONG)]
)
def test_completions_that_continue_from_states_keep_the_budget(on_gpu, tmp_path, arch):
    model = build_tiny(tmp_path / "model", size="nano")
    hybrid(arch, vocab_size=263).save_pretrained(model)
    keeps_budget(*on_gpu(f"{GRPO} --tuner_type full --torch_dtype float32 --beta 0", model=model))
    assert "padded rows" not in (on_gpu.folder / "stdout.txt").read_text()


def test_images_reach_the_tower_without_pageable_copies(on_gpu, tmp_path):
    """Towers of transformers read sizes of images and masks of patches on the host, in each pass."""
    flags = "--tuner_type full --torch_dtype float32 --beta 0 --freeze_vit false --max_length 200"
    model = build_vlm(tmp_path / "model", "idefics3")
    more = {"scoring.py _scoring_forward.<locals>.forward": 1000}
    keeps_budget(*on_gpu(f"{CHECKED} {flags}", model=model, dataset=image_rows(tmp_path)), more)


def test_shards_of_fsdp_keep_the_budget(on_gpu):
    keeps_budget(*on_gpu(f"{GRPO} --fsdp full_shard --tuner_type full"))


@LONG
@pytest.mark.parametrize("flags", ["--tuner_type full", "--tuner_type full --fsdp full_shard"])
def test_a_teacher_keeps_the_budget(on_gpu, nano_folders, flags):
    """Log-probs of the reference and of the teacher are brought to the host once a step each."""
    code, err, found = on_gpu(f"{GRPO} {flags} --teacher_model {nano_folders['qwen2']}")
    assert code == 0, err[-3000:]
    assert found["steps"] == STEPS
    assert beyond(found, {**BUDGET, SPLIT: 2 * STEPS}) == {}


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
    "flags", ["--tuner_type full --moe_router_replay trainer", "--tuner_type lora --router_aux_loss_coef 0.01"]
)
def test_experts_keep_the_budget(on_gpu, tmp_path, flags):
    model = build_tiny(tmp_path / "model", size="nano", arch="qwen3_moe")
    keeps_budget(*on_gpu(f"{GRPO} --torch_dtype bfloat16 --beta 0 {flags}", model=model))
