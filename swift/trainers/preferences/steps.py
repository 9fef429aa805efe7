"""Process reward models: token classification with transformers' Trainer, which TRL has no trainer for any more.

Right (1) or wrong (0) is learnt at the last token of the separator after each step; all other tokens are ignored.
Source: Let's Verify Step by Step (arXiv:2305.20050); stepwise rows as of Math-Shepherd (arXiv:2312.08935).
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from swift.devices import own_device
from swift.errors import ConfigError, counted
from swift.models.step_scores import SEPARATOR, encode_steps
from swift.models.template import RefusedChat, Template
from swift.trainers.atomic_trainer import AtomicTrainer
from swift.trainers.preferences.rows import IGNORED, TOO_LONG
from swift.trainers.trl.method import Method

if TYPE_CHECKING:
    import torch
    from datasets import Dataset

    from swift.data.loading import Rows, Split


def encode(args: Any, template: Template) -> tuple[Dataset, Dataset | None, list[str]]:
    """Rows of `input_ids` and `labels`, for training and evaluation, and lines to print about both.

    Raises:
        ConfigError: wrong data, or no usable row.
    """
    from swift.data.loading import load_rows
    from swift.models.policy import context_length

    if not template.encode_text(args.step_separator):
        raise ConfigError(
            f"--step_separator: {args.step_separator!r}: the model's tokenizer has no token for it; give another"
        )
    length = args.max_length or context_length(args)
    tables: dict[str, Dataset] = {}
    lines: list[str] = []
    splits: list[tuple[Split, str]] = [("train", "--dataset"), ("val", "--val_dataset")]
    for split, flag in splits:
        rows = load_rows(args, split, purpose="steps")
        lines += rows.report.lines()
        if len(rows):
            tables[split], left_out = encode_rows(rows, template, args, length)
            num_steps = sum(label != IGNORED for labels in tables[split]["labels"] for label in labels)
            lines.append(f"{split}: {counted(len(tables[split]), 'row')}, {counted(num_steps, 'step')} to judge")
            if left_out:
                reasons = ", ".join(f"{count} ({reason})" for reason, count in left_out.most_common())
                lines.append(f"{split}: left out {counted(sum(left_out.values()), 'row')}: {reasons}")
            if not len(tables[split]):
                raise ConfigError(f"{flag}: no usable row for --max_length {length}; {lines[-1]}")
    return tables["train"], tables.get("val"), lines


def encode_rows(rows: Rows, template: Template, args: Any, length: int | None) -> tuple[Dataset, Counter[str]]:
    """The rows as token ids and labels of equal length, and the reasons for which others are left out."""
    from datasets import Dataset

    table: dict[str, list[list[int]]] = {"input_ids": [], "labels": []}
    left_out: Counter[str] = Counter()
    for row in rows:
        try:
            steps, tools = row["completions"], row.get("tools")
            ids, ends = encode_steps(template, row["messages"], steps, args.step_separator, tools)
        except RefusedChat as error:
            left_out[str(error)] += 1
            continue
        if length is not None and len(ids) > length:
            left_out[TOO_LONG] += 1
            continue
        judged = list(zip(ends, row["labels"], strict=True))
        labels = [IGNORED] * len(ids)
        for end, label in judged[-1:] if args.train_on_last_step_only else judged:
            labels[end] = int(label)
        table["input_ids"].append(ids)
        table["labels"].append(labels)
    return Dataset.from_dict(table), left_out


def step_metrics(prediction: Any) -> dict[str, float]:
    """Share of steps judged rightly, and F1 of finding the wrong ones, over all steps of an evaluation set."""
    kept = prediction.label_ids != IGNORED
    found, truth = prediction.predictions[kept] == 0, prediction.label_ids[kept] == 0
    both = int((found & truth).sum())
    wrong = int(found.sum()) + int(truth.sum())
    return {"accuracy": float((found == truth).mean()), "f1": 2 * both / wrong if wrong else 1.0}


def _likelier(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return logits.argmax(dim=-1)


class StepTrainer(AtomicTrainer):
    """Pads rows as token classification does, and evaluates by steps."""

    def __init__(self, **arguments: Any) -> None:
        from transformers import DataCollatorForTokenClassification

        super().__init__(
            data_collator=DataCollatorForTokenClassification(arguments["processing_class"]),
            compute_metrics=step_metrics,
            preprocess_logits_for_metrics=_likelier,
            **arguments,
        )


def _load_model(args: Any) -> Any:
    from swift.models import load_policy

    model = load_policy(args, device=own_device(), reward_head="step")
    setattr(model.config, SEPARATOR, args.step_separator)
    return model


PRM = Method(
    trainer="transformers:Trainer",
    config="transformers:TrainingArguments",
    encode=encode,
    load_model=_load_model,
    options=lambda args: {"train_sampling_strategy": "random" if args.dataset_shuffle else "sequential"},
    overrides=(StepTrainer,),
    shown=(("accuracy", "accuracy"), ("f1", "F1 of wrong steps")),
)
