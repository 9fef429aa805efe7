"""Conversion of an agent's output to a trajectory: token ids, masks and log-probs of each call of the policy."""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from swift.data.responses import chat_of_items
from swift.rollout.engines.wire import ReturnedCompletion
from swift.rollout.sources.multi_turn.trajectory import Excluded, Trajectory
from swift.types import Completion

Item = Mapping[str, Any]


@dataclass(slots=True)
class Call:
    """One call of the policy."""

    prompt_ids: list[int]
    token_ids: list[int]
    logprobs: list[float]

    @property
    def key(self) -> ReturnedCompletion:
        """Key of this call for `versions_of` of the policy server."""
        return self.prompt_ids, self.token_ids, self.logprobs


def calls_of(output: Sequence[Item], vocab_size: int) -> list[Call]:
    """The calls in an agent's output; the last item of each has its ids, and tool results have none.

    Raises Excluded: "ids_missing", "empty" or "misaligned".
    """
    with_ids = [item for item in output if item.get("generation_token_ids") is not None]
    if not with_ids:
        raise Excluded("ids_missing" if output else "empty")
    calls = [_call(item, vocab_size) for item in with_ids]
    if not any(call.token_ids for call in calls):
        raise Excluded("empty")
    return [call for call in calls if call.token_ids]


def _call(item: Item, vocab_size: int) -> Call:
    prompt, ids, logprobs = (
        item.get(name) for name in ("prompt_token_ids", "generation_token_ids", "generation_log_probs")
    )
    if not isinstance(prompt, list) or not prompt or not isinstance(logprobs, list) or not isinstance(ids, list):
        raise Excluded("ids_missing")
    tokens = all(type(token) is int and 0 <= token < vocab_size for token in [*prompt, *ids])
    numbers = all(isinstance(value, int | float) and -sys.float_info.max <= value <= 0 for value in logprobs)
    if len(logprobs) != len(ids) or not tokens or not numbers:
        raise Excluded("misaligned")
    return Call(prompt, ids, [float(value) for value in logprobs])


def assemble(
    trajectory: Trajectory,
    output: Sequence[Item],
    calls: Sequence[Call],
    versions: Sequence[list[tuple[int, int, int]] | None],
    end_token_ids: Collection[int],
) -> None:
    """Fill a new trajectory with the turns of these calls.

    Args:
        trajectory: the new trajectory.
        output: all items, recorded as messages.
        calls: calls of the policy, in order.
        versions: spans of policy versions per call; None is unknown.
        end_token_ids: end tokens; an answer without one at its end is truncated.

    Raises:
        Excluded, OutOfRoom: see `Trajectory.add_turn`; "too_long".
    """
    trajectory.messages += chat_of_items(output)
    for call, spans in zip(calls, versions, strict=True):
        reason = "stop" if call.token_ids[-1] in end_token_ids else "length"
        answer = Completion("", call.token_ids, call.logprobs, reason, versions=spans or [])  # type: ignore[arg-type]
        trajectory.add_turn(call.prompt_ids, answer)
    if len(trajectory.prompt_ids) + len(trajectory.token_ids) > trajectory.limits.max_model_len:
        raise Excluded("too_long")
