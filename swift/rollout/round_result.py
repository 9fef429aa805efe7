"""Result of a round: its scored groups, and counts of the groups that were dropped."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from swift.errors import EngineError
from swift.types import Completion, GroupScores, Prompt, RolloutGroup


@dataclass(slots=True)
class RoundResult:
    """Result of a round, equal on every rank except `dropped`; part of checkpoints.

    groups: groups to train on, in launch order; the first `carried_in` of them were scored in an earlier round.
    carried: groups for the next round. dropped: rank 0 only, for the log; `num_dropped` of them were scored,
    `num_excluded` had no score. failed: prompts of dropped groups on which every completion failed.
    launched, informative: number of groups of this round; 0 without dynamic sampling.
    num_samples: completions of this round, including those of dropped groups; `reasons`: number of excluded ones for
    each reason.
    """

    groups: list[RolloutGroup]
    metrics: dict[str, float]
    carried: list[RolloutGroup] = field(default_factory=list)
    dropped: list[RolloutGroup] = field(default_factory=list)
    failed: list[Prompt] = field(default_factory=list)
    launched: int = 0
    informative: int = 0
    num_dropped: int = 0
    num_excluded: int = 0
    carried_in: int = 0
    num_samples: int = 0
    reasons: dict[str, int] = field(default_factory=dict)


@dataclass(slots=True)
class ScoredRound:
    """Groups with their rewards and advantages, for logs: one per round of training or evaluation.

    rewards, advantages: one per completion; None for excluded completions.
    excluded: reason of an exclusion other than faults of reward functions ("overlong"), or None.
    used: False for completions of replaced groups.
    """

    split: str
    step: int
    groups: list[RolloutGroup]
    rewards: list[float | None]
    advantages: list[float | None]
    excluded: list[str | None]
    version: int
    metrics: dict[str, float]
    used: list[bool]


def set_scores(group: RolloutGroup, scores: GroupScores) -> None:
    """Set the scores of a group, and exclude completions with a fault of the engine or environment."""
    pairs = zip(group.completions, scores.excluded, strict=True)
    scores.excluded = [fault(completion) or reason for completion, reason in pairs]
    group.scores = scores


def fault(completion: Completion) -> str | None:
    """Reason why a completion cannot be trained on, whatever its reward; None if it can.

    Either it was aborted, or its log-probs are not finite or not one per token.
    """
    if completion.episode is not None and completion.episode.problem:
        return f"environment: {completion.episode.problem}"
    if completion.finish_reason in ("error", "abort"):
        return f"engine: {completion.finish_reason}"
    known = completion.episode is None or completion.episode.logprobs_known
    finite = not known or all(map(math.isfinite, completion.logprobs))
    if len(completion.logprobs) != len(completion.token_ids) or not finite:
        return "engine: log-probs"
    return None


def missing(request_id: str) -> EngineError:
    """The error of a request without a completion."""
    return EngineError(f"engine: request {request_id}: it never came back; this is a defect of the engine")


def is_scored(group: RolloutGroup) -> bool:
    """Whether any completion of a group has a score."""
    return group.scores is not None and any(reason is None for reason in group.scores.excluded)
