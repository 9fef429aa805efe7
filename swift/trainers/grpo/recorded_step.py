"""A recorded step under a model: log-probs, loss and gradient again, by the code of the training.

Old log-probs are those of the policy that made the step, so that ratios under another checkpoint are those to it.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from swift.devices import own_device
from swift.errors import ConfigError
from swift.models import Template, load_chat
from swift.models.attention.choice import choose_streams
from swift.models.policy import load_config
from swift.models.scoring import prepare_scoring
from swift.models.source import is_adapter, locate
from swift.models.tuners import load_relative
from swift.rollout.samples import RolloutBatch
from swift.trainers.distributed import Collectives
from swift.trainers.grpo.build import Beside, load_beside, load_trained
from swift.trainers.grpo.metrics import StepMetrics
from swift.trainers.grpo.record import StepRecord
from swift.trainers.grpo.settings import GRPOSettings
from swift.trainers.grpo.step import step_of
from swift.trainers.optimizers.loss_scale import loss_scale_of

MOVED, CONTEXT = 10, 5
"""Tokens that are shown, and tokens before and after each of them."""

Row = Mapping[str, Any]
IDS = "prompt_ids", "token_ids"


def load_recorded(args: Any, model: str, rows: Sequence[Row], prompt: str) -> tuple[Template, tuple[nn.Module, Beside]]:
    """Template of a model for a step on record, the policy, and beside it the teacher of a distillation.

    Args:
        args: of the run.
        model: a checkpoint of it, or what it started from.
        rows: of the step.
        prompt: the text of the first one, from the record.

    Raises:
        ConfigError: no such model, one of another vocabulary, or images, which are not on record.
    """
    if any((row[name] < 0).any() for row in rows for name in IDS):
        raise ConfigError(f"--model: {model}: the images of this step are not on record; leave --model out")
    args, relative = replace(args, deepspeed=None, fsdp=None), args.changes_base and is_adapter(Path(model))
    if not relative and Path(model).resolve() != Path(args.model or "").resolve():
        args = replace(args, model=model, adapters=[])
    template = load_chat(args)
    known = load_config(locate(args).base, args).get_text_config().vocab_size
    read = template.decode(rows[0]["prompt_ids"].tolist(), skip_special_tokens=False)
    if read != prompt or any((row[name] >= known).any() for row in rows for name in IDS):
        raise ConfigError(
            f"--model: {model}: has another vocabulary than the tokens on record; give a checkpoint of the run, or "
            "the model that it started from"
        )
    policy = load_trained(args, template)
    if relative:
        load_relative(policy, Path(model))
    choose_streams(policy)
    beside = load_beside(args, policy, len(template.tokenizer)) if args.rlhf_type == "gkd" else {}
    return template, (policy, beside)


def compute(
    policy: nn.Module, beside: Beside, settings: GRPOSettings, batch: RolloutBatch, report: StepMetrics, step: int
) -> list[dict[str, Any]]:
    """Forward and backward of a recorded global batch; adds `loss` and `grad_norm` to the report.

    Returns:
        rows as the record would have of it.
    """
    made: list[dict[str, Any]] = []
    again = step_of(policy, settings, Collectives(), own_device(), beside=beside)
    whole_logits = prepare_scoring(policy) is not None
    if not again.logprobs.planner.ready:
        again.logprobs.planner.measure(whole_logits=whole_logits, has_state=True)
    again.loss_scale = loss_scale_of(policy)
    file: Any = SimpleNamespace(write=lambda step, rows, metrics: made.extend(rows))
    record = again.record = StepRecord("all", again.logprobs.collectives, file)
    record.begin(step)
    policy.zero_grad()
    report.add("loss", again.run(policy, policy, batch, report, step - 1), 0.0)
    record.copy()
    gradients = [parameter.grad for parameter in policy.parameters() if parameter.grad is not None]
    report.add("grad_norm", torch.nn.utils.get_total_norm(gradients) / again.loss_scale)
    report.collect()  # the log-probs are on the host, too
    record.write(step, batch, {})
    return made


def moved_tokens(rows: Sequence[Row], decode: Callable[..., str]) -> list[dict[str, Any]]:
    """The trained tokens whose log-probs have changed most, from the old ones, else the sampler's, to the policy's."""
    changes = []
    for row in rows:
        if row["policy_logprobs"] is not None:
            before = row["sampler_logprobs"] if row["old_logprobs"] is None else row["old_logprobs"]
            pairs = zip(before.tolist(), row["policy_logprobs"].tolist(), row["trained"].tolist(), strict=True)
            changes += [
                (old, new, place, row) for place, (old, new, trained) in enumerate(pairs) if trained and old != new
            ]
    most = heapq.nlargest(MOVED, changes, key=lambda change: abs(change[1] - change[0]))
    return [_told(*change, decode) for change in most]


def _told(before: float, after: float, place: int, row: Row, decode: Callable[..., str]) -> dict[str, Any]:
    ids = [id for name in IDS for id in row[name].tolist()]
    at = len(row["prompt_ids"]) + place
    parts = {"left": ids[max(0, at - CONTEXT) : at], "token": ids[at : at + 1], "right": ids[at + 1 : at + 1 + CONTEXT]}
    texts = {name: decode(part, skip_special_tokens=False) for name, part in parts.items()}
    where = {"group_id": row["group_id"], "index": row["index"], "position": place}
    return {**where, **texts, "before": before, "after": after}
