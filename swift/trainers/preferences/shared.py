"""What several methods of `swift.methods` share: their options, metrics, mixins, and the defaults of TRL."""

from __future__ import annotations

import functools
from typing import Any

from swift.trainers.trl.method import Method

REFERENCE = (
    "beta", "router_aux_loss_coef", "precompute_ref_log_probs", "precompute_ref_batch_size", "sync_ref_model",
    "ref_model_sync_steps", "ref_model_mixup_alpha",
)  # fmt: skip
DIVERGENCE = (*REFERENCE, "ld_alpha", "f_divergence_type", "f_alpha_divergence_coef")
CONTRASTIVE = ("beta", "cpo_alpha", "simpo_gamma", "label_smoothing", "alpha")

MARGINS = ("rewards/chosen", "rewards/rejected", "rewards/margins", "logps/chosen", "logps/rejected")
LOGITS = ("logits/chosen", "logits/rejected")
ACCURACY = ("rewards/accuracies", "accuracy")
MARGIN = ("rewards/margins", "margin")

TRL_PREFERENCES: dict[str, Any] = {"learning_rate": 1e-6, "max_length": 1024, "beta": 0.1}
TRL_CONTRASTIVE = {**TRL_PREFERENCES, "cpo_alpha": 1.0, "simpo_gamma": 0.5, "label_smoothing": 0.0}


class PreparedRows:
    """Mixin before trainers that prepare rows: keeps the token ids that `encode` has made."""

    def _prepare_dataset(self, dataset: Any, *_: Any) -> Any:
        return dataset


class UnmappedRows:
    """Mixin before trainers whose constructor maps all rows, which streams and several sets do not allow."""

    def __init__(self, *, train_dataset: Any, eval_dataset: Any, **arguments: Any) -> None:
        from datasets import Dataset

        empty = Dataset.from_list([])
        evaluated = None if eval_dataset is None else empty
        super().__init__(train_dataset=empty, eval_dataset=evaluated, **arguments)  # type: ignore[call-arg]
        self.train_dataset, self.eval_dataset = train_dataset, eval_dataset


def options_of(*names: str, **fixed: Any) -> Any:
    """Options of a method: settings under the names of its config class, and fixed ones."""

    def options(args: Any) -> dict[str, Any]:
        chosen = {name: getattr(args, name) for name in names}
        # rows over the limit are left out already, never cut
        return {"disable_dropout": False, "max_length": None, **chosen, **fixed}

    return options


PAIRS = functools.partial(
    Method,
    trainer="trl:DPOTrainer",
    config="trl:DPOConfig",
    rows="pair",
    encode="swift.trainers.preferences.packing:encode",
    collator="trl.trainer.dpo_trainer:DataCollatorForPreference",
    fuses_head=True,
    parts="swift.trainers.preferences.reference:reference_parts",
    overrides=(
        "swift.trainers.preferences.shared:PreparedRows",
        "swift.trainers.preferences.packing:PackedPairs",
        "swift.trainers.preferences.reference:ReferenceInCheckpoint",
    ),
    logged=("entropy", "mean_token_accuracy", *MARGINS, ACCURACY[0], "aux_loss"),
    measured=(*LOGITS, "num_tokens"),
    shown=(ACCURACY, MARGIN),
)
"""Methods of TRL's DPOTrainer."""

WITHOUT_REFERENCE = functools.partial(
    Method,
    rows="labelled pair",
    overrides=("swift.trainers.images:SeesPairs", "swift.trainers.preferences.shared:UnmappedRows"),
    measured=LOGITS,
    shown=(ACCURACY, MARGIN),
)
"""Methods of pairs without a reference."""

CONTRASTS = functools.partial(
    WITHOUT_REFERENCE,
    trainer="trl.experimental.cpo:CPOTrainer",
    config="trl.experimental.cpo:CPOConfig",
    parting=lambda args: "" if args.cpo_alpha else "rows",  # a mean over the tokens of a batch
    logged=(*MARGINS, ACCURACY[0], "nll_loss"),
)
"""Methods of TRL's CPOTrainer."""
