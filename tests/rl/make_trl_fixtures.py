"""Write tests/rl/fixtures/trl_*.json from the methods of TRL's own GRPOTrainer. Run by hand:

    python tests/rl/make_trl_fixtures.py        (needs trl 1.16)

No formula stands here: `GRPOTrainer._compute_loss` and `GRPOTrainer._generate_and_score_completions` run
unbound on a stub that has the attributes they read, with a real `GRPOConfig`, on random float64 inputs. The
stub replaces what is not under test: model forward (its log-probs are the leaf), generation and rewards.
"""

import json
import tempfile
from collections import defaultdict
from contextlib import nullcontext
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import torch
import trl
from trl import GRPOConfig
from trl.trainer.grpo_trainer import GRPOTrainer

FIXTURES = Path(__file__).parent / "fixtures"
BATCH, MICRO_BATCHES, LENGTH, MAX_COMPLETION_LENGTH = 2, 3, 6, 8
SEQUENCES = BATCH * MICRO_BATCHES

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


class Accelerator:
    """One process: what is gathered or reduced is what was given."""

    device = torch.device("cpu")
    num_processes, process_index, sync_gradients = 1, 0, True

    def reduce(self, tensor, reduction="sum"):
        return tensor

    def gather(self, tensor):
        return tensor

    def autocast(self):
        return nullcontext()


def make_window(seed, filtered):
    """Random padded tensors of a window; `filtered` sequences have no trained token."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    lengths = torch.randint(1, LENGTH + 1, (SEQUENCES,), generator=generator)
    lengths[0] = LENGTH
    completion_mask = (torch.arange(LENGTH) < lengths.unsqueeze(1)).long()
    tool_mask = (torch.rand(SEQUENCES, LENGTH, generator=generator) < 0.8).long()
    tool_mask[:, 0] = 1
    tool_mask[filtered] = 0
    mask = completion_mask * tool_mask
    policy = -random(SEQUENCES, LENGTH).abs() - 0.05
    log_weights = 0.5 * random(SEQUENCES, LENGTH)
    return {
        "policy": policy,
        "old": policy + 0.3 * random(SEQUENCES, LENGTH),
        "ref": policy + 0.3 * random(SEQUENCES, LENGTH),
        "advantages": random(SEQUENCES),
        "completion_mask": completion_mask,
        "tool_mask": tool_mask,
        "token_weights": torch.where(mask.bool(), log_weights.exp(), 1.0),
        "sequence_weights": log_weights[:, :1].exp(),
    }


def make_config(settings, folder):
    return GRPOConfig(
        output_dir=folder,
        use_cpu=True,
        bf16=False,
        report_to=[],
        per_device_train_batch_size=BATCH,
        gradient_accumulation_steps=MICRO_BATCHES,
        num_generations=2,
        max_completion_length=MAX_COMPLETION_LENGTH,
        **settings,
    )


def stub_for_loss(config, *, weighted):
    return SimpleNamespace(
        args=config,
        accelerator=Accelerator(),
        model=SimpleNamespace(training=True),
        aux_loss_enabled=False,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        importance_sampling_level=config.importance_sampling_level,
        loss_type=config.loss_type,
        beta=config.beta,
        epsilon_low=config.epsilon,
        epsilon_high=config.epsilon if config.epsilon_high is None else config.epsilon_high,
        use_vllm=weighted,
        vllm_importance_sampling_correction=weighted,
        max_completion_length=config.max_completion_length,
        current_gradient_accumulation_steps=MICRO_BATCHES,
        _entropy_bonus_enabled=False,
        _metrics={"train": defaultdict(list)},
        get_gamma_weights=GRPOTrainer.get_gamma_weights,
    )


def run_loss(window, settings, weights, folder):
    """Sum of TRL's loss over the micro-batches of the window, the gradient of it, and TRL's metrics."""
    stub = stub_for_loss(make_config(settings, folder), weighted=weights is not None)
    mask = window["completion_mask"] * window["tool_mask"]
    policy = window["policy"].clone().requires_grad_()
    losses = []
    for start in range(0, SEQUENCES, BATCH):
        rows = slice(start, start + BATCH)
        stub._get_per_token_logps_and_entropies = lambda *_, rows=rows, **__: (
            policy[rows],
            torch.zeros(BATCH, LENGTH, dtype=torch.float64),
            None,
        )
        inputs = {
            "prompt_ids": torch.zeros(BATCH, 1, dtype=torch.long),
            "prompt_mask": torch.ones(BATCH, 1, dtype=torch.long),
            "completion_ids": torch.zeros(BATCH, LENGTH, dtype=torch.long),
            "completion_mask": window["completion_mask"][rows],
            "tool_mask": window["tool_mask"][rows],
            "advantages": window["advantages"][rows],
            "old_per_token_logps": window["old"][rows],
            "ref_per_token_logps": window["ref"][rows],
            "num_items_in_batch": mask.sum(),
        }
        if weights is not None:
            inputs["importance_sampling_ratio"] = window[weights][rows].clone()
        loss = GRPOTrainer._compute_loss(stub, stub.model, inputs)
        loss.backward()
        losses.append(loss.item())
    metrics = {
        name: values
        for name, values in stub._metrics["train"].items()
        if name in ("kl", "clip_ratio/low_mean", "clip_ratio/high_mean", "clip_ratio/region_mean")
    }
    return sum(losses), policy.grad, metrics


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


def make_loss_fixtures(folder):
    windows = []
    for seed, filtered in ((0, []), (1, []), (2, [3])):
        window = make_window(seed, filtered)
        lengths = window["completion_mask"]
        cases = []
        for settings, weights in loss_cases():
            loss, gradient, metrics = run_loss(window, settings, weights, folder)
            assert not (gradient * (1 - lengths)).any()
            packed = pack(gradient, lengths)
            cases.append(
                {
                    "settings": settings,
                    "weights": weights,
                    "loss": loss,
                    "gradient": packed,
                    "metrics": metrics,
                }
            )
        windows.append(
            {
                "micro_batch_size": BATCH,
                "max_completion_length": MAX_COMPLETION_LENGTH,
                "policy": pack(window["policy"], lengths),
                "old": pack(window["old"], lengths),
                "ref": pack(window["ref"], lengths),
                "mask": pack(window["tool_mask"], lengths),
                "advantages": window["advantages"].tolist(),
                "token_weights": pack(window["token_weights"], lengths),
                "sequence_weights": window["sequence_weights"].squeeze(1).tolist(),
                "cases": cases,
            }
        )
    return {"trl": trl.__version__, "windows": windows}


class NoModel:
    training, is_gradient_checkpointing = True, False


def run_advantages(rewards, weights, settings, folder):
    """TRL's advantages for rewards [S, K], groups of four."""
    count, functions = rewards.shape
    names = [f"function{index}" for index in range(functions)]
    config = make_config({}, folder)
    ids = [[1, 2]] * count
    stub = SimpleNamespace(
        args=config,
        accelerator=Accelerator(),
        model=NoModel(),
        environment_factories=None,
        environments=None,
        tools=None,
        pad_to_multiple_of=None,
        _tokenizer=SimpleNamespace(pad_token_id=0),
        mask_truncated_completions=False,
        num_iterations=1,
        beta=0.0,
        use_vllm=False,
        num_generations=4,
        num_generations_eval=4,
        reward_weights=weights,
        reward_funcs=names,
        reward_func_names=names,
        log_multimodal=False,
        _is_vlm=False,
        _generate=lambda prompts: (ids, ids, None, ["text"] * count, None, {}, None, []),
        _calculate_rewards=lambda *_: rewards.clone(),
        _metrics={"train": defaultdict(list)},
        _logs={
            "prompt": [],
            "completion": [],
            "advantages": [],
            "rewards": defaultdict(list),
            "extra": defaultdict(list),
        },
        _pending_extra_logs={},
        _pending_metrics={},
        **settings,
    )
    inputs = [{"prompt": "text"} for _ in range(count)]
    return GRPOTrainer._generate_and_score_completions(stub, inputs)["advantages"]


def make_advantage_fixtures(folder):
    cases = []
    sums = "sum_then_normalize"
    kinds = [{"scale_rewards": scale, "multi_objective_aggregation": sums} for scale in ("group", "batch", "none")]
    kinds.append({"scale_rewards": "group", "multi_objective_aggregation": "normalize_then_sum"})
    for seed, functions, missing in product(range(4), (1, 3), (0.0, 0.3)):
        generator = torch.Generator().manual_seed(seed)
        rewards = torch.randn(16, functions, generator=generator, dtype=torch.float64)
        rewards[torch.rand(16, functions, generator=generator) < missing] = torch.nan
        weights = torch.rand(functions, generator=generator, dtype=torch.float64) + 0.5
        for settings in kinds:
            advantages = run_advantages(rewards, weights, settings, folder)
            cases.append(
                {
                    "settings": settings,
                    "rewards": [[None if value != value else value for value in row] for row in rewards.tolist()],
                    "weights": weights.tolist(),
                    "advantages": advantages.tolist(),
                }
            )
    return {"trl": trl.__version__, "group_size": 4, "cases": cases}


def main():
    # TRL divides int64 counts (Bessel's n / (n - 1), among others), which yields the default dtype
    torch.set_default_dtype(torch.float64)
    FIXTURES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        files = {
            "trl_losses.json": make_loss_fixtures(folder),
            "trl_advantages.json": make_advantage_fixtures(folder),
        }
    for name, content in files.items():
        (FIXTURES / name).write_text(json.dumps(content, separators=(",", ":"), allow_nan=False) + "\n")
        print(name, (FIXTURES / name).stat().st_size, "bytes")


if __name__ == "__main__":
    main()
