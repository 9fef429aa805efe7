"""TRL's own GRPO arithmetic, called on tensors: the oracle of the loss and of the advantages.

No formula of TRL stands here: `GRPOTrainer._compute_loss` and `GRPOTrainer._generate_and_score_completions` run
unbound on a stub that has the attributes they read, set from a real `GRPOConfig`. The stub replaces what is not under
test: model forward (its log-probs and entropies are the leaves), generation, rewards, and the other ranks.
"""

from __future__ import annotations

import warnings
from collections import defaultdict
from contextlib import contextmanager, nullcontext
from functools import partial
from types import SimpleNamespace

import torch
from padded_windows import MAX_COMPLETION_LENGTH, Outcome, Window
from torch import Tensor

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # about the version of vLLM, which is not used
    from trl import GRPOConfig
    from trl.trainer.grpo_trainer import GRPOTrainer


class Accelerator:
    """One rank of `num_processes`; what is reduced is what was given, what is gathered too, or `everywhere`."""

    device = torch.device("cpu")
    process_index, sync_gradients = 0, True

    def __init__(self, num_processes: int = 1, everywhere: Tensor | None = None) -> None:
        self.num_processes = num_processes
        self.everywhere = everywhere

    def reduce(self, tensor: Tensor, reduction: str = "sum") -> Tensor:
        return tensor

    def gather(self, tensor: Tensor) -> Tensor:
        return tensor if self.everywhere is None else self.everywhere

    def pad_across_processes(self, tensor: Tensor, dim: int, pad_index: float) -> Tensor:
        return tensor

    def autocast(self):
        return nullcontext()


def make_config(settings: dict, *, batch: int = 2, accumulation: int = 3, **more: object) -> GRPOConfig:
    """A real configuration, so that names and defaults are TRL's."""
    return GRPOConfig(
        output_dir="nowhere",
        use_cpu=True,
        bf16=False,
        report_to=[],
        per_device_train_batch_size=batch,
        gradient_accumulation_steps=accumulation,
        num_generations=2,
        max_completion_length=MAX_COMPLETION_LENGTH,
        **settings,
        **more,
    )


def loss_stub(config: GRPOConfig, *, weighted: bool = False, num_processes: int = 1) -> SimpleNamespace:
    """What `_compute_loss` reads of its trainer, as `GRPOTrainer.__init__` sets it."""
    own = {
        "args": config,
        "accelerator": Accelerator(num_processes),
        "model": SimpleNamespace(training=True),
        "aux_loss_enabled": False,
        "epsilon_low": config.epsilon,
        "epsilon_high": config.epsilon if config.epsilon_high is None else config.epsilon_high,
        "use_vllm": weighted,
        "vllm_importance_sampling_correction": weighted,
        "current_gradient_accumulation_steps": config.gradient_accumulation_steps,
        "_entropy_bonus_enabled": config.entropy_coef != 0.0 or config.use_adaptive_entropy,
        "_last_world_entropy": float("inf"),
        "_entropy_window_stats": None,
        "_metrics": {"train": defaultdict(list)},
        "get_gamma_weights": GRPOTrainer.get_gamma_weights,
        "get_off_policy_mask": GRPOTrainer.get_off_policy_mask,
    }
    return SimpleNamespace(**{**vars(config), **own})  # the others are those of the configuration


def run_loss(
    window: Window,
    settings: dict,
    *,
    batch: int = 3,
    weights: Tensor | None = None,
    with_old: bool = True,
    with_sampler: bool = False,
    num_processes: int = 1,
    num_items: float | None = None,
    quantile_of_window: bool = True,
    stub: SimpleNamespace | None = None,
    **config: object,
) -> Outcome:
    """Sum of TRL's losses of the micro-batches of `batch` sequences of one rank, and its gradient.

    Args:
        window: one rank's part of a window.
        settings: fields of GRPOConfig.
        batch: sequences of a micro-batch; accumulation follows.
        weights: `importance_sampling_ratio`, [S, LENGTH] or [S, 1].
        with_old: False is TRL's on-policy case, where old log-probs are not computed.
        with_sampler: hand over the sampler's log-probs.
        num_processes: ranks of the run.
        num_items: trained tokens of the generation batch on all ranks; None means those of the window.
        quantile_of_window: the entropy threshold looks at the window, not at each micro-batch (TRL's rule), by
            pretending that the other micro-batches are other ranks.
        stub: go on with this trainer.
        config: further fields of GRPOConfig.
    """
    accumulation = len(window) // batch
    if stub is None:
        made = make_config(settings, batch=batch, accumulation=accumulation, **config)
        stub = loss_stub(made, weighted=weights is not None, num_processes=num_processes)
    ranks = Accelerator(everywhere=window.entropies[window.mask.bool()].float() if quantile_of_window else None)
    stub.get_high_entropy_mask = partial(GRPOTrainer.get_high_entropy_mask, SimpleNamespace(accelerator=ranks))
    policy = window.policy.clone().requires_grad_()
    entropies = window.entropies.clone().requires_grad_()
    total = 0.0
    for start in range(0, len(window), batch):
        rows = slice(start, start + batch)
        stub.accelerator.sync_gradients = start + batch >= len(window)
        stub._get_per_token_logps_and_entropies = lambda *_, rows=rows, **__: (policy[rows], entropies[rows], None)
        inputs = {
            "prompt_ids": torch.zeros(batch, 1, dtype=torch.long),
            "prompt_mask": torch.ones(batch, 1, dtype=torch.long),
            "completion_ids": torch.zeros_like(window.completion_mask[rows]),
            "completion_mask": window.completion_mask[rows],
            "advantages": window.advantages[rows],
            "ref_per_token_logps": window.ref[rows],
            "num_items_in_batch": window.mask.sum() if num_items is None else torch.tensor(num_items),
        }
        if not window.tool_mask.all():
            inputs["tool_mask"] = window.tool_mask[rows]
        if with_old:
            inputs["old_per_token_logps"] = window.old[rows]
        if with_sampler:
            inputs["sampling_per_token_logps"] = window.sampler[rows]
        if weights is not None:
            inputs["importance_sampling_ratio"] = weights[rows].clone()
        with _float64():
            loss = GRPOTrainer._compute_loss(stub, stub.model, inputs)
        loss.backward()
        total += loss.item()
    zeros = torch.zeros_like(window.policy)
    return Outcome(
        total,
        zeros if policy.grad is None else policy.grad,
        zeros if entropies.grad is None else entropies.grad,
        stub._metrics["train"],
    )


@contextmanager
def _float64():
    """TRL divides int64 counts and makes tensors of floats, both of which take the default dtype."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


class _NoModel:
    training, is_gradient_checkpointing = True, False


def generation_stub(config: GRPOConfig, rewards: Tensor, weights: Tensor, group_size: int) -> SimpleNamespace:
    """What `_generate_and_score_completions` reads of its trainer; two-token completions without engine."""
    count, functions = rewards.shape
    names = [f"function{index}" for index in range(functions)]
    ids = [[1, 2]] * count
    own = {
        "args": config,
        "accelerator": Accelerator(),
        "model": _NoModel(),
        "environment_factories": None,
        "environments": None,
        "tools": None,
        "_tokenizer": SimpleNamespace(pad_token_id=0),
        "use_vllm": False,
        "num_generations": group_size,
        "num_generations_eval": group_size,
        "reward_weights": weights,
        "reward_funcs": names,
        "reward_func_names": names,
        "log_multimodal": False,
        "_is_vlm": False,
        "_generate": lambda prompts: (ids, ids, None, ["text"] * count, None, {}, None, []),
        "_calculate_rewards": lambda *_: rewards.clone(),
        "_metrics": {"train": defaultdict(list)},
        "_logs": defaultdict(list, rewards=defaultdict(list), extra=defaultdict(list)),
        "_pending_extra_logs": {},
        "_pending_metrics": {},
    }
    return SimpleNamespace(**{**vars(config), **own})


def run_advantages(rewards: Tensor, weights: Tensor, settings: dict, *, group_size: int = 4) -> dict[str, Tensor]:
    """What TRL makes of rewards [S, K], groups of `group_size`; among it `advantages` and `num_items_in_batch`."""
    stub = generation_stub(make_config(settings), rewards, weights, group_size)
    return _generate(stub, len(rewards))


def run_correction(window: Window, settings: dict) -> Tensor:
    """TRL's `importance_sampling_ratio` of a window, [S, LENGTH] or [S, 1], from its old and sampler log-probs."""
    count = len(window)
    stub = generation_stub(make_config(settings), torch.zeros(count, 1), torch.ones(1), count)
    stub.use_vllm = True
    lengths = window.completion_mask.sum(1).tolist()
    ids = [[1] * length for length in lengths]
    tools = [row[:length] for row, length in zip(window.tool_mask.tolist(), lengths, strict=True)]
    sampled = [
        [None if value != value else value for value in row[:length]]
        for row, length in zip(window.sampler.tolist(), lengths, strict=True)
    ]
    stub._generate = lambda prompts: (ids, ids, tools, ["text"] * count, sampled, {}, None, [])
    stub._get_per_token_logps_and_entropies = lambda *_, **__: (window.old, None, None)
    return _generate(stub, count)["importance_sampling_ratio"]


def _generate(stub: SimpleNamespace, count: int) -> dict[str, Tensor]:
    with _float64():
        return GRPOTrainer._generate_and_score_completions(stub, [{"prompt": "text"} for _ in range(count)])


def get_off_policy_mask(*arguments) -> Tensor:
    """TRL's, [S, 1]."""
    return GRPOTrainer.get_off_policy_mask(*arguments)
