"""Which of several engines gets a request.

A group (consecutive requests "<group>/<sample>" with the same prompt) goes to one engine, which prefills its prompt
once: the one with the fewest outstanding tokens. The turns of a trajectory ("<group>/<sample>#<turn>") stay with the
engine that has their beginning in its prefix cache, unless it has over `OVERLOAD` times the tokens of another.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from swift.rollout.engines.client import EngineClient, tokens_of
from swift.types import Request

TURN = re.compile(r"(?:\d+:)?(.+)#(\d+)")
"""The id of a turn, with its trajectory; the queue of a server puts a number in front."""
OVERLOAD = 2
"""A trajectory leaves an engine with more than this times the outstanding tokens of another, its own turn included."""
TRAJECTORIES = 1 << 16
"""Maximum number of trajectories whose engine is kept."""


class EngineChoice:
    """See the module's docstring."""

    def __init__(self) -> None:
        self._group: tuple[str, tuple[int, ...]] | None = None  # group of the last request
        self._engine_of_group: EngineClient | None = None
        self._engine_of: dict[str, EngineClient] = {}  # by trajectory, least recently used first

    def __call__(self, request: Request, usable: Sequence[EngineClient]) -> EngineClient:
        least = min(usable, key=lambda client: client.load)
        turn = TURN.fullmatch(request.request_id)
        chosen = self._engine_of.pop(turn[1], None) if turn else None
        if turn and turn[2] == "0":  # a new trajectory: evaluations reuse ids
            chosen = None
        if chosen is None or chosen not in usable or chosen.load > OVERLOAD * (least.load + tokens_of(request)):
            chosen = self._of_group(request, usable, least)
        if turn:
            self._engine_of[turn[1]] = chosen
            if len(self._engine_of) > TRAJECTORIES:
                del self._engine_of[next(iter(self._engine_of))]
        return chosen

    def _of_group(self, request: Request, usable: Sequence[EngineClient], least: EngineClient) -> EngineClient:
        group = (request.request_id.rpartition("/")[0], tuple(request.prompt_ids))
        if group != self._group or self._engine_of_group not in usable:
            self._group, self._engine_of_group = group, least
        assert self._engine_of_group is not None
        return self._engine_of_group
