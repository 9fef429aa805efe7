"""`swift sft --task_type seq_cls`: classifiers and regression with transformers' Trainer and a head of labels.

A text is a prompt as the model would be asked to continue it, or a finished chat; without a chat template, the contents
of its messages as they are. A decoder reads its label off the last token that is no padding, an encoder off its first.
With `--packing` or `--padding_free`, a decoder computes rows as one stream, in which they do not attend to each other.

The losses are transformers': cross-entropy, binary cross-entropy of each label, mean squared error. They are divided by
the labels of the whole optimizer step, so that neither accumulation nor processes change the gradient.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from swift.data.labels import LABEL
from swift.errors import ConfigError, RefusedChat
from swift.models.attention.interface import transformers_model
from swift.models.labels import Labels
from swift.models.template import Template
from swift.models.vision import vision_of
from swift.trainers.atomic_trainer import AtomicTrainer
from swift.trainers.images import ImageCollator
from swift.trainers.rows import IGNORED, Encoder, counts
from swift.trainers.sft_packing import Packing, best_fit, keeps_apart, layout_of, packed_length
from swift.trainers.splits import encode_splits
from swift.trainers.trl.method import Encoded, Method

if TYPE_CHECKING:
    from swift.data.loading import Example


@dataclass(frozen=True)
class LabelEncoder(Encoder):
    """Encodes a text as token ids, and its label as numbers: a class, classes, or values; see `Encoder`."""

    labels: Labels
    cut: str = "delete"

    columns: ClassVar = {"input_ids": "ids", "labels": "numbers"}

    def inputs(self, example: Example) -> Iterator[list[Any]]:
        """See `Encoder`."""
        yield [example.messages, example.columns[LABEL], example.columns.get("tools")]

    def encode(self, messages: list[dict[str, Any]], label: list[float], tools: Any = None) -> dict[str, Any]:
        """See `Encoder`; a row trains one label."""
        if problem := wrong_label(label, self.labels):
            raise RefusedChat(problem)
        ids = self.template.encode_judged(messages, tools)
        if not ids:
            raise RefusedChat("an empty text")
        if self.cut == "delete" or min(ids) < 0:  # an image is never cut
            self.check_length(len(ids))
        else:
            ids = self.shortened(ids, self.cut)
        return {"input_ids": ids, "labels": label, **counts(len(ids), 1)}


def wrong_label(label: Sequence[float], labels: Labels) -> str | None:
    """What is wrong with the label of a row.

    >>> wrong_label([2.0], Labels(2, "single_label_classification"))
    'label 2: not one of 0 to 1 (--num_labels 2)'
    """
    if labels.problem == "regression" and IGNORED in label:
        return f"label {IGNORED}: transformers ignores this number; scale the labels"
    if labels.problem == "regression":
        return f"{len(label)} numbers as label, not {labels.num}" if len(label) != labels.num else None
    if labels.problem == "single_label_classification" and len(label) != 1:
        return f"{len(label)} labels; several need --problem_type multi_label_classification"
    wrong = next((number for number in label if number not in range(labels.num)), None)
    return wrong if wrong is None else f"label {wrong:g}: not one of 0 to {labels.num - 1} (--num_labels {labels.num})"


def encode(args: Any, template: Template) -> Encoded:
    """Rows for training and evaluation, and lines to print about both.

    Raises:
        ConfigError: wrong data, or no usable row.
    """
    from swift.models.policy import context_length

    lines = [] if template.tokenizer.chat_template or args.use_chat_template is False else [WITHOUT_TEMPLATE]
    length, packing = args.max_length or context_length(args), None
    if args.packing:
        packing = LabelPacking("bfd", packed_length(args, length))
        length = min(length or packing.length, packing.length)
    encoder = LabelEncoder(template, length, args.labels, args.truncation_strategy)
    train, val, more = encode_splits(args, encoder, "class", packing=packing)
    return train, val, [*lines, *more]


WITHOUT_TEMPLATE = "rows: texts as they are, for the tokenizer has no chat template"


def load_template(args: Any) -> Template:
    """The chat template, or texts as they are.

    Raises:
        ConfigError: see `load_chat`; also a model that has a head of other labels.
    """
    from swift.models.source import labels_of, locate
    from swift.models.tokenizer import load_chat, load_tokenizer

    source = locate(args)
    if (own := labels_of(source.base, *source.adapters)) not in (None, args.labels):
        raise ConfigError(
            f"--num_labels: {args.labels.num} ({args.labels.problem}): the model has a head of {own.num} "
            f"({own.problem}); use --num_labels {own.num} --problem_type {own.problem}, or the model without its head"
        )
    rendered = args.use_chat_template
    if rendered is None:
        rendered = bool(load_tokenizer(args).chat_template)
    return load_chat(args, plain=not rendered, ends=False)


@dataclass(frozen=True, slots=True)
class LabelPacking(Packing):
    """Rows of at most `length` tokens together; each column of a packed row has a list for each of them."""

    def __call__(self, table: Any, options: Mapping[str, Any] | None = None) -> Any:
        """As `Packing`."""
        from datasets import Features, List, Value

        features = Features({"input_ids": List(List(Value("int64"))), "labels": List(List(Value("float64")))})
        return table.map(self.pack, batched=True, features=features, **(options or {}))

    def pack(self, rows: Mapping[str, Sequence[Any]]) -> dict[str, list[list[Any]]]:
        """A batch of rows, packed.

        >>> LabelPacking("bfd", 4).pack({"input_ids": [[1, 2, 3], [4], [5]], "labels": [[0.0], [1.0], [2.0]]})
        {'input_ids': [[[1, 2, 3], [4]], [[5]]], 'labels': [[[0.0], [1.0]], [[2.0]]]}
        """
        packs = best_fit(list(map(len, rows["input_ids"])), self.length)
        return {name: [[values[index] for index in pack] for pack in packs] for name, values in rows.items()}


class LabelCollator:
    """Pads rows on the right; labels as the loss needs them: int64 [B] of classes, else float32 [B, labels].

    packed: whether a row has several. streams: whether they become a stream [1, T] instead, with `bounds` [B + 1] of
    rows as `cu_seq_lens_q`, and as `read` [B] the places that labels are read off.
    """

    def __init__(self, pad_token_id: int, labels: Labels, *, packed: bool = False, streams: bool = False) -> None:
        self.pad_token_id, self.labels, self.packed, self.streams = pad_token_id, labels, packed, streams

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
        """The batch."""
        if self.packed and isinstance(rows[0]["input_ids"][0], list):  # not of evaluation
            pairs = [zip(row["input_ids"], row["labels"], strict=True) for row in rows]
            rows = [{"input_ids": ids, "labels": label} for ids, label in chain.from_iterable(pairs)]
        if self.streams:
            return self._stream([row["input_ids"] for row in rows], self._labels([row["labels"] for row in rows]))
        width = max(len(row["input_ids"]) for row in rows)
        ids = torch.full((len(rows), width), self.pad_token_id)
        mask = torch.zeros_like(ids)
        for index, row in enumerate(rows):
            ids[index, : len(row["input_ids"])] = torch.tensor(row["input_ids"])
            mask[index, : len(row["input_ids"])] = 1
        return {"input_ids": ids, "attention_mask": mask, "labels": self._labels([row["labels"] for row in rows])}

    def _stream(self, rows: Sequence[list[int]], labels: Tensor) -> dict[str, Tensor]:
        bounds = torch.tensor([0, *accumulate(map(len, rows))])
        last = [max((at for at, token in enumerate(row) if token != self.pad_token_id), default=0) for row in rows]
        return {
            "labels": labels,  # first: Trainer takes the number of rows from it
            "input_ids": torch.tensor([list(chain.from_iterable(rows))]),
            "position_ids": torch.cat([torch.arange(len(row)) for row in rows])[None],
            "cu_seq_lens_q": bounds,
            "read": bounds[:-1] + torch.tensor(last),
        }

    def _labels(self, given: Sequence[Sequence[float]]) -> Tensor:
        if self.labels.problem == "regression":
            return torch.tensor(given)
        if self.labels.problem == "single_label_classification":
            return torch.tensor([int(label) for (label,) in given])
        chosen = torch.zeros(len(given), self.labels.num)
        for index, label in enumerate(given):
            chosen[index, [int(number) for number in label]] = 1.0
        return chosen


def loss_of(output: Any, labels: Tensor, num_items_in_batch: Any = None, *, problem: str) -> Tensor:
    """The mean loss over labels, of this batch or of `num_items_in_batch` in all batches of a step."""
    logits, labels = output.logits.float(), labels.to(output.logits.device)
    if problem == "single_label_classification":
        total = functional.cross_entropy(logits, labels, reduction="sum")
    elif problem == "multi_label_classification":
        total = functional.binary_cross_entropy_with_logits(logits, labels, reduction="sum")
    else:
        total = functional.mse_loss(logits, labels, reduction="sum")
    return total / (labels.numel() if num_items_in_batch is None else num_items_in_batch)


def metrics_of(prediction: Any, *, problem: str) -> dict[str, float]:
    """Mean squared error, or accuracy of whole rows; with several labels also F1 over all of them."""
    logits, labels = prediction.predictions, prediction.label_ids
    if problem == "regression":
        return {"mse": float(np.square(logits - labels).mean())}
    if problem == "single_label_classification":
        return {"accuracy": float((logits.argmax(-1) == labels).mean())}
    found, truth = logits >= 0, labels > 0.5  # a probability of at least 0.5
    total = int(found.sum() + truth.sum())
    f1 = 2 * int((found & truth).sum()) / total if total else 1.0
    return {"accuracy": float((found == truth).all(-1).mean()), "f1": f1}


class LabelTrainer(AtomicTrainer):
    """Trainer with the batches, loss and metrics of a classifier; its head skips padding by the token of batches.

    packed, streams: see `LabelCollator`.
    """

    def __init__(self, *, labels: Labels, packed: bool = False, streams: bool = False, **arguments: Any) -> None:
        pad_token_id = arguments["processing_class"].pad_token_id
        config = arguments["model"].config
        config.pad_token_id = config.get_text_config().pad_token_id = pad_token_id
        collator = LabelCollator(pad_token_id, labels, packed=packed, streams=streams)
        vision = vision_of(arguments["model"])
        super().__init__(
            data_collator=collator if vision is None else ImageCollator(collator, vision),
            compute_loss_func=functools.partial(loss_of, problem=labels.problem),
            compute_metrics=functools.partial(metrics_of, problem=labels.problem),
            **arguments,
        )

    def compute_loss(self, model: Any, inputs: dict[str, Any], *arguments: Any, **named: Any) -> Any:
        """As Trainer's; the head's values for all tokens of a stream become those of its rows."""
        if "cu_seq_lens_q" not in inputs:
            return super().compute_loss(model, inputs, *arguments, **named)
        bounds, read = inputs.pop("cu_seq_lens_q"), inputs.pop("read")
        layout = layout_of(bounds, inputs["input_ids"], vision_of(self.model))
        values: list[Tensor] = []
        hook = transformers_model(model).score.register_forward_hook(lambda _, ids, made: values.append(made))

        def streamed(**given: Any) -> Any:
            output = model(**given, attention_layout=layout, use_cache=False)
            output["logits"] = values.pop()[0, read]
            return output

        try:
            return super().compute_loss(streamed, inputs, *arguments, **named)
        finally:
            hook.remove()


def _parts(args: Any, model: Any) -> dict[str, Any]:
    streams = (args.packing or args.padding_free) and keeps_apart(model, args)
    return {"labels": args.labels, "packed": args.packing, "streams": streams}


SEQ_CLS = Method(
    trainer="transformers:Trainer",
    config="transformers:TrainingArguments",
    encode=encode,
    template=load_template,
    reward_head="label",
    model_dropout=True,
    shares_rows=False,
    parts=_parts,
    overrides=(LabelTrainer,),
    measured=("accuracy", "f1", "mse"),
    shown=(("accuracy", "accuracy"), ("f1", "F1"), ("mse", "mean squared error")),
)
