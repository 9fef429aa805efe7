"""Process reward models: token classification with transformers' Trainer; TRL has no trainer for them any more.

The label right (1) or wrong (0) is at the last token of the separator after each step; all other tokens are ignored.
Source: Let's Verify Step by Step (arXiv:2305.20050); stepwise rows as of Math-Shepherd (arXiv:2312.08935).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from swift.errors import ConfigError
from swift.models.step_scores import SEPARATOR, encode_steps
from swift.models.template import Template
from swift.trainers.atomic_trainer import AtomicTrainer
from swift.trainers.rows import IGNORED, Encoder, counts
from swift.trainers.splits import encode_splits
from swift.trainers.trl.method import Encoded

if TYPE_CHECKING:
    import torch

    from swift.data.loading import Example


@dataclass(frozen=True)
class StepEncoder(Encoder):
    """Encodes a prompt with the steps of its answer as token ids and labels of equal length; see `Encoder`."""

    separator: str
    last_only: bool = False

    columns: ClassVar = {"input_ids": "ids", "labels": "ids"}

    def inputs(self, example: Example) -> Iterator[list[Any]]:
        """See `Encoder`."""
        columns = example.columns
        yield [example.messages, columns["completions"], columns["labels"], columns.get("tools")]

    def encode(
        self, prompt: list[dict[str, Any]], steps: Sequence[str], are_right: Sequence[bool], tools: Any = None
    ) -> dict[str, Any]:
        """See `Encoder`; the number of tokens that are trained on is that of the labelled steps."""
        ids, ends = encode_steps(self.template, prompt, steps, self.separator, tools)
        self.check_length(len(ids))
        labelled = list(zip(ends, are_right, strict=True))[-1 if self.last_only else 0 :]
        labels = [IGNORED] * len(ids)
        for end, right in labelled:
            labels[end] = int(right)
        return {"input_ids": ids, "labels": labels, **counts(len(ids), len(labelled))}


def encode(args: Any, template: Template) -> Encoded:
    """Rows for training and evaluation (of all steps), and lines to print about both.

    Raises:
        ConfigError: wrong data, or no usable row.
    """
    from swift.models.policy import context_length

    if not template.encode_text(args.step_separator):
        raise ConfigError(
            f"--step_separator: {args.step_separator!r}: the model's tokenizer has no token for it; give another"
        )
    all_steps = StepEncoder(template, args.max_length or context_length(args), args.step_separator)
    train = dataclasses.replace(all_steps, last_only=args.train_on_last_step_only)
    return encode_splits(args, train, "steps", held_out=all_steps)


def step_metrics(prediction: Any) -> dict[str, float]:
    """Accuracy of the labels of steps, and F1 of wrong steps, over all steps of an evaluation set."""
    kept = prediction.label_ids != IGNORED
    found, truth = prediction.predictions[kept] == 0, prediction.label_ids[kept] == 0
    both = int((found & truth).sum())
    wrong = int(found.sum()) + int(truth.sum())
    return {"accuracy": float((found == truth).mean()), "f1": 2 * both / wrong if wrong else 1.0}


def _predicted_labels(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return logits.argmax(dim=-1)


class StepTrainer(AtomicTrainer):
    """Pads rows as for token classification, and evaluates by steps."""

    def __init__(self, **arguments: Any) -> None:
        from transformers import DataCollatorForTokenClassification

        super().__init__(
            data_collator=DataCollatorForTokenClassification(arguments["processing_class"]),
            compute_metrics=step_metrics,
            preprocess_logits_for_metrics=_predicted_labels,
            **arguments,
        )


def keep_separator(args: Any, model: Any) -> dict[str, Any]:
    """Writes the separator into the model's config, where rewards find it."""
    setattr(model.config, SEPARATOR, args.step_separator)
    return {}
