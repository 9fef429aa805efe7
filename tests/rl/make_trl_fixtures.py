"""Write tests/rl/fixtures/trl_*.json from the methods of TRL's own GRPOTrainer. Run by hand:

    python tests/rl/make_trl_fixtures.py        (needs trl 1.16)

The record pins what one release computes, and is compared without importing TRL. `trl_oracle.py` says how its methods
are run; test_trl_options.py runs them live, over far more combinations.
"""

import json
from itertools import product
from pathlib import Path

import torch
import trl_oracle
from padded_windows import MAX_COMPLETION_LENGTH, make_window

FIXTURES = Path(__file__).parent / "fixtures"
BATCH = 2

CLIPS = {
    "symmetric": {"epsilon": 0.2},
    "clip-higher": {"epsilon": 0.2, "epsilon_high": 0.28},
    "two-sided": {"epsilon": 0.2, "epsilon_high": 0.28, "delta": 1.5},
}
KLS = {
    "no KL": {"beta": 0.0},
    "KL": {"beta": 0.1, "use_bias_correction_kl": False},
    "corrected KL": {"beta": 0.1, "use_bias_correction_kl": True},
}
METRICS = ("kl", "clip_ratio/low_mean", "clip_ratio/high_mean", "clip_ratio/region_mean")


def loss_cases():
    """Settings of TRL and the sampler weights, for every loss."""
    surrogates = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo")
    levels = ("token", "sequence")
    for loss_type, level, clip, kl in product(surrogates, levels, CLIPS, KLS):
        yield {"loss_type": loss_type, "importance_sampling_level": level, **CLIPS[clip], **KLS[kl]}, None
    for level, kl in product(levels, KLS):
        yield (
            {"loss_type": "cispo", "importance_sampling_level": level, "epsilon_high": 1.2, **KLS[kl]},
            None,
        )
        yield {"loss_type": "sapo", "importance_sampling_level": level, **KLS[kl]}, None
    for kl in KLS:
        yield {"loss_type": "vespo", **KLS[kl]}, None
    for loss_type, weights in product((*surrogates, "sapo", "vespo"), ("token_weights", "sequence_weights")):
        yield {"loss_type": loss_type, **KLS["KL"]}, weights


def pack(values, mask):
    """Rows of a padded tensor without their padding."""
    rows = zip(values.tolist(), mask.sum(1).tolist(), strict=True)
    return [row[:length] for row, length in rows]


def make_loss_fixtures():
    windows = []
    for seed, filtered in ((0, []), (1, []), (2, [3])):
        window = make_window(seed, filtered)
        lengths = window.completion_mask
        cases = []
        for settings, name in loss_cases():
            weights = None if name is None else getattr(window, name)
            outcome = trl_oracle.run_loss(window, settings, batch=BATCH, weights=weights)
            assert not (outcome.gradient * (1 - lengths)).any()
            cases.append(
                {
                    "settings": settings,
                    "weights": name,
                    "loss": outcome.loss,
                    "gradient": pack(outcome.gradient, lengths),
                    "metrics": {name: values for name, values in outcome.metrics.items() if name in METRICS},
                }
            )
        windows.append(
            {
                "micro_batch_size": BATCH,
                "max_completion_length": MAX_COMPLETION_LENGTH,
                "policy": pack(window.policy, lengths),
                "old": pack(window.old, lengths),
                "ref": pack(window.ref, lengths),
                "mask": pack(window.tool_mask, lengths),
                "advantages": window.advantages.tolist(),
                "token_weights": pack(window.token_weights, lengths),
                "sequence_weights": window.sequence_weights.squeeze(1).tolist(),
                "cases": cases,
            }
        )
    return {"trl": trl_oracle.VERSION, "windows": windows}


def make_advantage_fixtures():
    cases = []
    sums = "sum_then_normalize"
    kinds = [{"scale_rewards": scale, "multi_objective_aggregation": sums} for scale in ("group", "batch", "none")]
    kinds.append({"scale_rewards": "group", "multi_objective_aggregation": "normalize_then_sum"})
    for seed, functions, missing in product(range(4), (1, 3), (0.0, 0.3)):
        generator = torch.Generator().manual_seed(seed)
        rewards = torch.randn(16, functions, generator=generator, dtype=torch.float64)
        rewards[torch.rand(16, functions, generator=generator, dtype=torch.float64) < missing] = torch.nan
        weights = torch.rand(functions, generator=generator, dtype=torch.float64) + 0.5
        for settings in kinds:
            advantages = trl_oracle.run_advantages(rewards, weights, settings)["advantages"]
            cases.append(
                {
                    "settings": settings,
                    "rewards": [[None if value != value else value for value in row] for row in rewards.tolist()],
                    "weights": weights.tolist(),
                    "advantages": advantages.tolist(),
                }
            )
    return {"trl": trl_oracle.VERSION, "group_size": 4, "cases": cases}


def main():
    FIXTURES.mkdir(exist_ok=True)
    files = {"trl_losses.json": make_loss_fixtures(), "trl_advantages.json": make_advantage_fixtures()}
    for name, content in files.items():
        (FIXTURES / name).write_text(json.dumps(content, separators=(",", ":"), allow_nan=False) + "\n")
        print(name, (FIXTURES / name).stat().st_size, "bytes")


if __name__ == "__main__":
    main()
