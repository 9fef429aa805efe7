"""What plugins register: reward functions, losses, advantage estimators, backends and rollout functions."""

from __future__ import annotations

from typing import Any

from swift.registry import BUILT_IN, SESSION, Registry
from swift.rl.estimators import advantage_estimators
from swift.rl.losses import losses


class ORM:
    """Base of a reward function written as a class; one instance lives in every reward worker.

    Subclasses define `__call__(self, completions, **kwargs) -> list[float | None]`: one entry per
    completion, None where the function does not apply. `scope` is "sample" (calls may be split down to one
    sample), "group" (never less than the completions of one prompt) or "batch" (one call per generation
    batch).
    """

    scope = "sample"

    def __init__(self, args: Any = None, **kwargs: Any) -> None:
        self.args = args

    def __call__(self, completions: list[str], *args: Any, **kwargs: Any) -> Any:
        """Scores `completions`; every keyword is a list of the same length, except `trainer_state`."""
        raise NotImplementedError(f"{type(self).__name__} does not define __call__")


class AsyncORM(ORM):
    """Base of a reward function that awaits something, for example a judge behind HTTP.

    Calls of different groups overlap in one worker; a call over its time limit is cancelled.
    """

    async def __call__(self, completions: list[str], *args: Any, **kwargs: Any) -> Any:
        """As `ORM.__call__`, awaited."""
        raise NotImplementedError(f"{type(self).__name__} does not define __call__")


orms = Registry("reward function")
"""Reward functions by name: classes, instances, functions or async functions."""

inference_backends = Registry("inference backend")
"""Inference backends by name: functions that take an `EngineSpec` and return an `InferenceEngine`."""

rollout_funcs = Registry("rollout function")
"""Rollout functions by name: `function(prompts, rollout)`; see `swift.rollout.custom_rollout`."""

__all__ = [
    "BUILT_IN",
    "ORM",
    "SESSION",
    "AsyncORM",
    "Registry",
    "advantage_estimators",
    "inference_backends",
    "losses",
    "orms",
    "rollout_funcs",
]
