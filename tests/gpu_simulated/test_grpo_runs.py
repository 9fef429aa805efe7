"""Whole runs of GRPO on the simulated GPU: no operand is elsewhere, and the host waits as seldom as it is said."""

import pytest
from gpu_runs import BUDGET, EBFT, GRPO, LONG, SPLIT, STEPS, TWO, beyond

GRADIENTS = "transfer.py to_host"


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
