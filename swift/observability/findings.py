"""What a rule finds: a cause by its stable id, how sure it is, the evidence, and what mends it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from swift.errors import counted

CAUSES = {
    "reward_constant": "The reward does not depend on the completion: its function, column or parser is at fault.",
    "reward_unparsed": "Right answers get no reward: the function does not read them.",
    "reward_failing": "The reward function fails.",
    "reward_hacked": "The reward rises while what it stands for falls: it is gamed.",
    "rewards_cancel": "Reward functions work against each other, or a weight has the wrong sign.",
    "zero_variance_easy": "Most groups are all right, so nothing is learned.",
    "zero_variance_hard": "Most groups are all wrong, so nothing is learned.",
    "learning_rate_high": "The learning rate is too high: updates destroy the policy.",
    "learning_rate_low": "The learning rate is too low: the policy does not move.",
    "dead_adapter": "The LoRA adapter has no effect.",
    "entropy_collapse": "The policy has collapsed: it samples the same again and again.",
    "length_hacking": "Completions grow without being better.",
    "truncation": "Completions are cut at --max_completion_length before they answer, or prompts at --max_length.",
    "template_wrong": "The chat template is wrong for this model.",
    "never_stops": "Completions do not end: the end token is not sampled, or is not the right one.",
    "sampler_mismatch": "Engine and trainer disagree about the log-probs of the same tokens.",
    "stale_weights": "Completions are sampled with old weights.",
    "reference_drift": "The KL to the reference dominates the update.",
    "data_repeated": "The run sees few different prompts again and again.",
    "non_finite": "Updates are not finite and are skipped.",
    "slow_reward": "Most of the time goes to reward functions.",
    "slow_rank": "One process keeps the others waiting.",
    "slow_engine": "Generation is far slower than it should be.",
    "engine_flapping": "Engines die and restart.",
    "memory_growth": "Main memory grows steadily.",
}
"""Stable ids, and the verdict in a sentence."""


@dataclass(frozen=True, slots=True)
class Finding:
    """A cause that a rule has found.

    confidence: 0 to 1; from `diagnosis.SICK` on the run is called sick. steps: of the evidence; () for the whole run.
    settings: flags of a run that is mended, if flags alone do it.
    """

    cause: str
    confidence: float
    evidence: Sequence[str]
    fix: str
    steps: Sequence[int] = ()
    settings: str = ""


def between(value: float, low: float, high: float, at_low: float, at_high: float) -> float:
    """The confidence for a number: 0 before `low`, then a line to `at_high` at `high`; `low` may be the larger one."""
    share = (value - low) / (high - low)
    return 0.0 if share < 0 else at_low + (at_high - at_low) * min(1.0, share)


def percent(share: float) -> str:
    """A share for people."""
    return f"{share:.0%}"


def steps_of(steps: Iterable[int]) -> str:
    """The steps of some evidence."""
    found = sorted(set(steps))
    return (
        counted(0, "step")
        if not found
        else f"step {found[0]}"
        if len(found) == 1
        else f"steps {found[0]} to {found[-1]}"
    )
