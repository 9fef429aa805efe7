"""The preference methods: one `Method` of `swift.trainers.trl` each."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from swift.errors import counted
from swift.trainers.images import SeesPairs
from swift.trainers.preferences.reference import ReferenceInCheckpoint, reference_parts
from swift.trainers.preferences.rows import encoding
from swift.trainers.trl.method import Encoded, Method

if TYPE_CHECKING:
    from swift.models.template import Template
    from swift.trainers.trl.parts import Parting

IDEAL_RATIO = 4 / 3
"""Largest ratio of the total weights of desirable and undesirable answers of KTO, equation 8 of arXiv:2402.01306."""


class PreparedRows:
    """Mixin before trainers that prepare rows: keeps the token ids that `encode` has made."""

    def _prepare_dataset(self, dataset: Any, *_: Any) -> Any:
        return dataset


class SingleRows:
    """Mixin before KTOTrainer, which refuses batches of one row because it would pair it with its own answer.

    Here rows have the answers of others already; see `with_others_answers`.
    """

    def __init__(self, *, args: Any, **arguments: Any) -> None:
        size, args.per_device_train_batch_size = args.per_device_train_batch_size, 2
        super().__init__(args=args, **arguments)  # type: ignore[call-arg]
        args.per_device_train_batch_size = self._train_batch_size = size


class UnmappedRows:
    """Mixin before trainers whose constructor maps all rows, which streams and several sets do not allow."""

    def __init__(self, *, train_dataset: Any, eval_dataset: Any, **arguments: Any) -> None:
        from datasets import Dataset

        empty = Dataset.from_list([])
        evaluated = None if eval_dataset is None else empty
        super().__init__(train_dataset=empty, eval_dataset=evaluated, **arguments)  # type: ignore[call-arg]
        self.train_dataset, self.eval_dataset = train_dataset, eval_dataset


def _options(*names: str, **fixed: Any) -> Any:
    """Options of a method: settings under the names of its config class, and fixed ones."""

    def options(args: Any) -> dict[str, Any]:
        chosen = {name: getattr(args, name) for name in names}
        # rows over the limit are left out already, never cut
        return {"disable_dropout": False, "max_length": None, **chosen, **fixed}

    return options


def _with_losses(args: Any) -> dict[str, Any]:
    """The losses of DPO with their weights; that of `--rpo_alpha` is TRL's loss sft."""
    losses, weights = list(args.loss_type), list(args.loss_weights) or [1.0] * len(args.loss_type)
    if args.rpo_alpha:
        losses, weights = [*losses, "sft"], [*weights, args.rpo_alpha]
    return {"loss_type": losses, "loss_weights": weights, **_DPO(args)}


REFERENCE = (
    "beta", "router_aux_loss_coef", "precompute_ref_log_probs", "precompute_ref_batch_size", "sync_ref_model",
    "ref_model_sync_steps", "ref_model_mixup_alpha",
)  # fmt: skip
DIVERGENCE = (*REFERENCE, "ld_alpha", "f_divergence_type", "f_alpha_divergence_coef")
_DPO = _options(*DIVERGENCE, "label_smoothing", "use_weighting", "discopop_tau")
CONTRASTIVE = ("beta", "cpo_alpha", "simpo_gamma", "label_smoothing", "alpha")

MARGINS = ("rewards/chosen", "rewards/rejected", "rewards/margins", "logps/chosen", "logps/rejected")
LOGITS = ("logits/chosen", "logits/rejected")
ACCURACY = ("rewards/accuracies", "accuracy")
MARGIN = ("rewards/margins", "margin")


_unpaired = encoding("unpaired")


def _encode_unpaired(args: Any, template: Template) -> Encoded:
    """Rows of KTO, shuffled here, because its trainer keeps their order; see `with_others_answers`."""
    train, val, lines = _unpaired(args, template)
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


OVER_BATCHES = {"aot", "aot_unpaired", "bco_pair", "sft"}
"""Losses of DPO that are no mean over pairs: they sort a batch, average over it, or count its tokens."""


def _parting_of_dpo(args: Any) -> Parting:
    return "" if args.rpo_alpha or OVER_BATCHES & set(args.loss_type) else "pairs"


def _parting_without_reference(args: Any) -> Parting:
    return "" if args.cpo_alpha else "rows"  # a mean over the tokens of a batch


_pairs = functools.partial(
    Method,
    trainer="trl:DPOTrainer",
    config="trl:DPOConfig",
    encode=encoding("pair"),
    collator="trl.trainer.dpo_trainer:DataCollatorForPreference",
    fuses_head=True,
    parts=reference_parts,
    overrides=(PreparedRows, ReferenceInCheckpoint),
    logged=("entropy", "mean_token_accuracy", *MARGINS, ACCURACY[0], "aux_loss"),
    measured=(*LOGITS, "num_tokens"),
    shown=(ACCURACY, MARGIN),
)
DPO = _pairs(options=_with_losses, parting=_parting_of_dpo)
IPO = _pairs(parting=lambda args: "pairs", options=_options(*DIVERGENCE, loss_type=["ipo"]))

KTO = Method(
    trainer="trl:KTOTrainer",
    config="trl:KTOConfig",
    encode=_encode_unpaired,
    collator="trl.trainer.kto_trainer:DataCollatorForUnpairedPreference",
    fuses_head=True,
    options=_options(
        *REFERENCE, "loss_type", "desirable_weight", "undesirable_weight", train_sampling_strategy="sequential"
    ),
    parts=reference_parts,
    overrides=(SingleRows, PreparedRows, ReferenceInCheckpoint),
    logged=("entropy", "kl", *MARGINS, "aux_loss"),
    measured=(*LOGITS, "num_tokens"),
    shown=(MARGIN,),
)

_without_reference = functools.partial(
    Method,
    encode=encoding("labelled pair"),
    overrides=(SeesPairs, UnmappedRows),
    measured=LOGITS,
    shown=(ACCURACY, MARGIN),
)
ORPO = _without_reference(
    trainer="trl.experimental.orpo:ORPOTrainer",
    config="trl.experimental.orpo:ORPOConfig",
    options=_options("beta"),
    logged=(*MARGINS, ACCURACY[0], "nll_loss", "log_odds_ratio", "log_odds_chosen"),
)
_contrastive = functools.partial(
    _without_reference,
    trainer="trl.experimental.cpo:CPOTrainer",
    parting=_parting_without_reference,
    config="trl.experimental.cpo:CPOConfig",
    logged=(*MARGINS, ACCURACY[0], "nll_loss"),
)
CPO = _contrastive(options=_options(*CONTRASTIVE, "loss_type"))
SIMPO = _contrastive(options=_options(*CONTRASTIVE, loss_type="simpo"))

RM = Method(
    trainer="trl:RewardTrainer",
    config="trl:RewardConfig",
    encode=encoding("scored pair"),
    collator="trl.trainer.reward_trainer:DataCollatorForPreference",
    reward_head="answer",
    parting=lambda args: "pairs",
    options=_options("center_rewards_coefficient"),
    overrides=(PreparedRows,),
    logged=("accuracy", "margin", "min_reward", "mean_reward", "max_reward"),
    measured=("num_tokens",),
    shown=(("accuracy", "accuracy"), ("margin", "margin")),
)
