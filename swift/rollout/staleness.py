"""How old a token can be when it is trained on, in optimizer steps. Pure arithmetic.

A unit feeds U updates. Sampled `depth` units ahead, with weights published every `interval` updates, its first update
comes at most `depth * U + interval - 1` updates after the weights that sampled it, its last one U - 1 later. Groups
that dynamic sampling carries over wait for up to `MOST_UNITS_CARRIED` units more.
"""

from __future__ import annotations

MOST_UNITS_CARRIED = 2
"""Units that a carried group can wait for; as a rule it is one (`swift.rollout.dynamic_sampling`)."""


def bound(depth: int, *, updates: int, interval: int) -> int:
    """The greatest age of a token at its last use.

    Example:
        one unit ahead, one update each, weights published after each: bound(1, updates=1, interval=1) == 1
    """
    return depth * updates + interval - 1 + updates - 1


def deepest(depth: int, *, updates: int, interval: int, max_staleness: int | None) -> int | None:
    """The greatest depth up to `depth` that keeps tokens within `max_staleness`; None when not even 0 does."""
    if max_staleness is None:
        return depth
    for candidate in range(depth, -1, -1):
        if bound(candidate, updates=updates, interval=interval) <= max_staleness:
            return candidate
    return None
