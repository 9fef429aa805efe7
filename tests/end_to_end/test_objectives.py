"""Every loss and every setting of the objective from the command line."""

import math

import pytest
import torch
from cli_runs import assert_resumes, assert_same, completion_rows, log_rows, state_files

pytestmark = pytest.mark.slow

SMALL = {"max_steps": 2, "save_steps": 2, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}
LOSSES = {
    "gspo": ({"epsilon": 3e-4, "epsilon_high": 4e-4, "steps_per_generation": 4}, "sequence ratio, clipped to 0.9997.."),
    "luspo": ({"num_iterations": 2}, "sequence ratio, clipped to 0.8..1.2"),
    "cispo": ({"epsilon_high": 5}, "token ratio, capped at 5"),
    "sapo": ({"tau_neg": 1.2}, "token ratio, gated with temperatures 1 and 1.2"),
    "vespo": ({"log_rollout_offpolicy_metrics": "true"}, "weighted by a gamma kernel"),
    "dapo": (
        {"delta": 1.5, "importance_sampling_level": "sequence_token", "beta": 0.05, "kl_bias_correction": "true"},
        "sequence_token ratio, clipped to 0.8..1.2, unclipped at most 1.5; 0.05 KL, bias-corrected",
    ),
}


SHORT = ("gspo", "vespo", "dapo")


@pytest.mark.parametrize(
    "loss", [pytest.param(loss, marks=[] if loss in SHORT else [pytest.mark.long]) for loss in LOSSES]
)
def test_a_loss_trains_and_says_how_its_ratio_is_bounded(cli, loss):
    flags, said = LOSSES[loss]
    folder = cli.finish(loss, loss_type=loss, **SMALL, **flags)
    rows = log_rows(folder)
    assert [row["step"] for row in rows] == [1, 2]
    assert all(math.isfinite(row["loss"]) and row["grad_norm"] > 0 for row in rows)
    (line,) = [line for line in cli.printed.splitlines() if line.startswith("loss: ")]
    assert line.startswith(f"loss: {loss} (arXiv:")
    assert said in line
    if loss == "vespo":
        assert all({"mismatch/ess", "logp/positive_advantage_mean", "vespo/phi_mean"} <= row.keys() for row in rows)


EVERYTHING = {
    "max_steps": 6,
    "save_steps": 3,
    "beta": 0.05,
    "num_iterations": 2,
    "steps_per_generation": 4,
    "per_device_train_batch_size": 2,
    "use_adaptive_entropy": "true",
    "entropy_coef": 0.05,
    "entropy_target": 5.44,
    "entropy_coef_delta": 0.01,
    "top_entropy_quantile": 0.5,
    "off_policy_sequence_mask_delta": 0.001,
    "log_rollout_offpolicy_metrics": "true",
    "sync_ref_model": "true",
    "ref_model_sync_steps": 2,
    "ref_model_mixup_alpha": 0.5,
    "tuner_type": "lora",
    "lora_rank": 4,
    "learning_rate": 1e-2,
}


def test_a_run_with_everything_resumes_bit_for_bit(cli):
    straight = cli.finish("straight", **EVERYTHING)
    rows = log_rows(straight)
    assert {"entropy", "entropy_coef", "entropy_threshold", "off_policy/masked_frac", "kl"} <= rows[-1].keys()
    assert len({row["entropy_coef"] for row in rows}) > 1
    folder = assert_resumes(cli, straight, 3, **EVERYTHING)
    moved = [torch.load(run / "checkpoint-6" / "reference.pt", weights_only=True) for run in (folder, straight)]
    assert_same(*moved, "reference")
    adapter = state_files(straight)["adapter_model.safetensors"]
    assert len(moved[0]) == len(adapter)
    assert all(float(tensor.abs().max()) > 0 for tensor in moved[0].values()), "the second factors are no longer zero"


def test_the_samplers_log_probs_stand_in_for_the_old_ones(cli):
    flags = {**SMALL, "max_steps": 4, "steps_per_generation": 4, "learning_rate": 1e-2}
    usual = cli.finish("usual", **flags)
    sampler = cli.finish("sampler", **flags, old_logprobs="sampler", log_rollout_offpolicy_metrics="true")
    for ours, theirs in zip(log_rows(sampler), log_rows(usual), strict=True):
        assert ours["ratio/mean"] == pytest.approx(theirs["ratio/mean"], rel=1e-4)
        assert ours["loss"] == pytest.approx(theirs["loss"], abs=1e-4)
    assert max(row["mismatch/logp_abs_diff_max"] for row in log_rows(sampler)) > 1e-3, "of the policy as it trains"
    assert [row["completion"] for row in completion_rows(sampler)] == [
        row["completion"] for row in completion_rows(usual)
    ]


@pytest.mark.long
@pytest.mark.parametrize("method", ["gdpo", "rloo"])
def test_a_method_that_is_a_preset_learns_and_resumes_bit_for_bit(cli, method):
    flags = {"rlhf_type": method, "max_steps": 60, "save_steps": 30, "learning_rate": 3e-3, "num_generations": 8}
    flags |= {"per_device_train_batch_size": 16, "gradient_accumulation_steps": 1}
    straight = cli.finish("straight", **flags)
    rows = completion_rows(straight)

    def odd(steps):
        texts = [row["completion"] for row in rows if row["step"] in steps]
        return sum(ord(one) % 2 for text in texts for one in text) / sum(map(len, texts))

    assert odd(range(51, 61)) > odd(range(1, 11)) + 0.1
    assert_resumes(cli, straight, 30, **flags)
