"""Weighs what the rules find in a run against each other, and tells its most likely cause first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from swift.observability import causes_of_rewards, causes_of_training, time_spent
from swift.observability.evidence import Evidence
from swift.observability.findings import Finding

SICK = 0.5
"""Confidence from which a run is sick."""
WEAKER = 0.4
"""A cause explains an effect that is at most so much surer than itself."""
CANDIDATE = 0.2
NEXT = 2
"""Candidates that are told beside the most likely cause."""

EXPLAINS = {
    "reward_failing": ("zero_variance_hard", "reward_constant", "slow_reward", "non_finite", "zero_variance_easy"),
    "reward_unparsed": ("zero_variance_hard", "zero_variance_easy", "reward_constant"),
    "reward_constant": ("zero_variance_hard", "zero_variance_easy"),
    "rewards_cancel": (
        "zero_variance_hard",
        "zero_variance_easy",
        "reward_hacked",
        "learning_rate_low",
        "reward_constant",
    ),
    "template_wrong": ("never_stops", "truncation", "zero_variance_hard", "reward_constant"),
    "never_stops": ("truncation", "zero_variance_hard", "reward_constant"),
    "truncation": ("zero_variance_hard", "reward_constant"),
    "length_hacking": ("truncation", "never_stops"),
    "learning_rate_high": (
        "entropy_collapse",
        "reference_drift",
        "non_finite",
        "never_stops",
        "truncation",
        "zero_variance_hard",
    ),
    "dead_adapter": ("learning_rate_low", "sampler_mismatch"),
    "stale_weights": ("sampler_mismatch", "learning_rate_high"),
    "sampler_mismatch": ("learning_rate_high",),
    "reward_hacked": ("entropy_collapse", "zero_variance_easy"),
    "entropy_collapse": ("zero_variance_hard", "zero_variance_easy"),
    "non_finite": ("learning_rate_low",),
    "engine_flapping": ("slow_engine",),
    "slow_rank": ("slow_engine",),
    "data_repeated": (),
}
"""Cause -> what follows from it. If both are found, the cause comes first."""

RULES = (*causes_of_rewards.RULES, *causes_of_training.RULES, *time_spent.RULES)


def diagnose(e: Evidence) -> list[Finding]:
    """The causes, most likely first; [] for a healthy run."""
    best: dict[str, Finding] = {}
    for rule in RULES:
        for finding in rule(e):
            if finding.confidence > best.get(finding.cause, Finding("", 0.0, (), "")).confidence:
                best[finding.cause] = finding
    ranked = sorted(weighed(best), key=lambda finding: -finding.confidence)
    if not ranked or ranked[0].confidence < SICK:
        return []
    return [
        replace(finding, steps=region(finding, e)) for finding in ranked[: NEXT + 1] if finding.confidence >= CANDIDATE
    ]


def region(finding: Finding, e: Evidence) -> Sequence[int]:
    """The first and the last step of a finding's evidence; () for a run without any step."""
    steps = finding.steps or [row["step"] for row in e.log or e.completions]
    return (min(steps), max(steps)) if steps else ()


def weighed(found: dict[str, Finding]) -> list[Finding]:
    """The findings, those lowered that another one explains."""
    confidence = {cause: finding.confidence for cause, finding in found.items()}
    for cause, effects in EXPLAINS.items():
        sure = found[cause].confidence if cause in found else 0.0
        for effect in effects:
            if effect in confidence and sure >= max(SICK, found[effect].confidence - WEAKER):
                confidence[effect] = min(confidence[effect], 0.8 * sure)
    return [replace(finding, confidence=round(confidence[cause], 2)) for cause, finding in found.items()]
