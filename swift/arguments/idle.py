"""Settings that change nothing beside others: one row per reason, for the notes at the start of a run.

Where a single switch decides, the setting says it itself (`swift.flags.flag(needs=...)`); here is what depends on more.
A note is due only where the user wrote the setting: values of a preset fit each other.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Idle:
    """The settings `names` do nothing when `when(args)`; `why` says so, with `{args}` filled in."""

    names: tuple[str, ...]
    why: str
    when: Callable[[Any], bool]


def _loss(*types: str) -> Callable[[Any], bool]:
    return lambda args: args.loss_type in types


ROWS: tuple[Idle, ...] = (
    Idle(
        ("epsilon", "epsilon_high"),
        "no effect with --loss_type {args.loss_type}, which does not clip the ratio",
        _loss("sapo", "vespo"),
    ),
    Idle(
        ("epsilon",),
        "no effect with --loss_type cispo, which caps the ratio at --epsilon_high and has no lower bound",
        _loss("cispo"),
    ),
    Idle(
        ("importance_sampling_level",),
        "no effect with --loss_type vespo, which weighs by the ratio of whole sequences",
        _loss("vespo"),
    ),
    Idle(
        ("kl_in_reward",),
        "no effect with --beta 0, which weighs the KL",
        lambda args: bool(args.kl_in_reward) and args.beta == 0,
    ),
    Idle(("ref_model",), "no effect with --beta 0, which needs no reference", lambda args: args.beta == 0),
    Idle(
        ("rollout_importance_sampling_threshold", "rollout_importance_sampling_lower"),
        "no effect with --rollout_importance_sampling_mode none, but on the metric rollout_ratio/clipped_frac",
        lambda args: args.rollout_importance_sampling_mode == "none",
    ),
    Idle(
        ("rollout_importance_sampling_ratio",),
        "no effect with --rollout_importance_sampling_mode {args.rollout_importance_sampling_mode}, which has no ratio "
        "of sequences",
        lambda args: not args.rollout_importance_sampling_mode.startswith("sequence_"),
    ),
    Idle(
        ("reroll_max_groups", "reroll_fail_reward"),
        "no effect without --reroll_start_fraction below 1",
        lambda args: args.reroll_start_fraction >= 1,
    ),
)


def reason(name: str, args: Any) -> str:
    """Why the setting `name` changes nothing with these settings, "" when it changes something."""
    return next((row.why.format(args=args) for row in ROWS if name in row.names and row.when(args)), "")


__all__ = ["ROWS", "Idle", "reason"]
