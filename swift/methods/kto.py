"""KTO (arXiv:2402.01306): unpaired answers, each with a label."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from swift.errors import counted
from swift.flags import flag
from swift.plugin.registry import methods
from swift.trainers.arguments import ActivationArguments, RouterArguments
from swift.trainers.preferences.arguments import ReferenceArguments
from swift.trainers.preferences.shared import LOGITS, MARGIN, MARGINS, REFERENCE, TRL_PREFERENCES, options_of
from swift.trainers.trl.method import Encoded, Method

if TYPE_CHECKING:
    from swift.models.template import Template

IDEAL_RATIO = 4 / 3
"""Largest ratio of the total weights of desirable and undesirable answers, equation 8 of the paper."""


@dataclass(kw_only=True)
class KTOParameters(ReferenceArguments, RouterArguments, ActivationArguments):
    """Settings of KTO."""

    loss_type: Literal["kto", "apo_zero_unpaired"] = flag("kto")
    """Loss. apo_zero_unpaired (arXiv:2408.06266) has no KL term."""

    desirable_weight: float = flag(1.0, above=0)
    """Weight of good answers."""

    undesirable_weight: float = flag(1.0, above=0)
    """Weight of bad answers."""

    per_device_train_batch_size: int = flag(2, at_least=1, group="Optimization", resume="fixed")
    """Number of rows per process and accumulation step. The KL term pairs the prompts of a batch with each other's
    answers, with 1 those of the accumulation steps."""

    def problems(self) -> Iterator[str]:
        """Problems of these settings, one line each."""
        rows = self.per_device_train_batch_size * (getattr(self, "gradient_accumulation_steps", None) or 1)
        if self.loss_type == "kto" and rows < 2:
            yield (
                "--per_device_train_batch_size: 1: the KL term of kto pairs rows, and there is one in a step; use 2 or "
                "more here or in --gradient_accumulation_steps, or --loss_type apo_zero_unpaired"
            )

    def notes(self) -> Iterator[str]:
        """Remarks about settings that work but should be known about."""
        if self.loss_type == "kto" and self.per_device_train_batch_size == 1:
            yield (
                "--per_device_train_batch_size: 1: the KL of a pass is that of a single row, as in ms-swift; larger "
                "batches estimate it better"
            )


class SingleRows:
    """Mixin before KTOTrainer, which refuses batches of one row because it would pair it with its own answer.

    Here rows have the answers of others already; see `with_others_answers`.
    """

    def __init__(self, *, args: Any, **arguments: Any) -> None:
        size, args.per_device_train_batch_size = args.per_device_train_batch_size, 2
        super().__init__(args=args, **arguments)  # type: ignore[call-arg]
        args.per_device_train_batch_size = self._train_batch_size = size


def encode(args: Any, template: Template) -> Encoded:
    """Rows of KTO, shuffled here, because its trainer keeps their order; see `with_others_answers`."""
    from swift.trainers.preferences.rows import encoding

    train, val, lines = encoding("unpaired")(args, template)
    if not args.streaming:
        lines += balance_lines(train["label"], args.desirable_weight, args.undesirable_weight)
        if args.dataset_shuffle:
            train = train.shuffle(seed=args.data_seed)
    if args.loss_type == "kto":
        # with the same number of rows in evaluation, whose batches may have one row
        size = args.per_device_train_batch_size
        rotated = functools.partial(
            with_others_answers, batch_size=size if size > 1 else args.gradient_accumulation_steps
        )
        train = rotated(train)
        val = {name: rotated(part) for name, part in val.items()} if isinstance(val, dict) else val and rotated(val)
    return train, val, lines


def with_others_answers(rows: Any, batch_size: int) -> Any:
    """The rows, each with the answer of the previous row of its batch, for KTO's estimate of the KL."""

    def rotated(batch: Mapping[str, list[Any]]) -> dict[str, list[Any]]:
        answers = batch["completion_ids"]
        return {"KL_completion_ids": [answers[-1], *answers[:-1]]}

    return rows.map(rotated, batched=True, batch_size=batch_size)


def balance_lines(labels: list[bool], desirable_weight: float, undesirable_weight: float) -> list[str]:
    """The numbers of desirable and undesirable answers, and weights that balance them if the given ones do not.

    >>> balance_lines([True, False, False, False], 1.0, 1.0)[1].split("; ")[1]
    'use --desirable_weight 3 to 4, or --undesirable_weight 0.25 to 0.333'
    """
    good = sum(labels)
    bad = len(labels) - good
    lines = [f"train: {counted(good, 'desirable answer')}, {bad} undesirable"]
    if not good or not bad:
        return [*lines, "warning: train: only one kind of answers; KTO learns from both"]
    ratio = good * desirable_weight / (bad * undesirable_weight)
    if 0.99 <= ratio <= 1.01 * IDEAL_RATIO:
        return lines
    wanted = bad * undesirable_weight / good, good * desirable_weight / bad
    return [
        *lines,
        f"warning: --desirable_weight: {desirable_weight:g}: desirable answers weigh {ratio:.3g} times the undesirable "
        f"ones, outside of 1 to 4/3; use --desirable_weight {wanted[0]:.3g} to {wanted[0] * IDEAL_RATIO:.3g}, or "
        f"--undesirable_weight {wanted[1] / IDEAL_RATIO:.3g} to {wanted[1]:.3g}",
    ]


methods["kto"] = Method(
    parameters=KTOParameters,
    summary="single answers, each good or bad",
    trainer="trl:KTOTrainer",
    config="trl:KTOConfig",
    rows="unpaired",
    encode=encode,
    collator="trl.trainer.kto_trainer:DataCollatorForUnpairedPreference",
    fuses_head=True,
    options=options_of(
        *REFERENCE, "loss_type", "desirable_weight", "undesirable_weight", train_sampling_strategy="sequential"
    ),
    parts="swift.trainers.preferences.reference:reference_parts",
    overrides=(
        "swift.methods.kto:SingleRows",
        "swift.trainers.images:SeesVerdicts",
        "swift.trainers.preferences.shared:PreparedRows",
        "swift.trainers.preferences.reference:ReferenceInCheckpoint",
    ),
    logged=("entropy", "kl", *MARGINS, "aux_loss"),
    measured=(*LOGITS, "num_tokens"),
    shown=(MARGIN,),
    in_trl={**TRL_PREFERENCES, "loss_type": "kto", "desirable_weight": 1.0, "undesirable_weight": 1.0},
    commands_of_trl=("kto",),
)
