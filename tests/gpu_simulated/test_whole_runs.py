"""Whole runs on the simulated GPU: no operand is on another device, and the host waits as seldom as it is said here."""

import pytest
from gpu_runs import BUDGET, GRPO, SPLIT, STEPS, beyond

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
