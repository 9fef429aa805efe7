"""Names of reward functions, and where each was registered.

A registry is a dictionary: `orms["name"] = entry`. It additionally remembers the origin of each entry
(built-in, or the plugin file being loaded), so that a replaced built-in is announced and the loader can
refuse two plugin files that claim the same name instead of one silently winning.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

logger = logging.getLogger("swift.plugin")

BUILT_IN = "built-in"
SESSION = "this program"


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


class Registry(dict[str, Any]):
    """A dictionary of named parts that knows who registered what.

    Args:
        kind: what the entries are, for messages: "reward function".
    """

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.origins: dict[str, str] = {}
        self._loading = SESSION
        self._assigned: dict[str, Any] = {}

    @contextmanager
    def registering(self, origin: str) -> Iterator[dict[str, Any]]:
        """Entries assigned inside the block come from `origin` (a plugin's path, or `BUILT_IN`).

        Yields:
            The entries assigned so far inside the block, by name.
        """
        before = self._loading, self._assigned
        self._loading, self._assigned = origin, {}
        try:
            yield self._assigned
        finally:
            self._loading, self._assigned = before

    def __setitem__(self, name: str, entry: Any) -> None:
        if self.origins.get(name) == BUILT_IN and self._loading != BUILT_IN:
            what = getattr(entry, "__name__", type(entry).__name__)
            logger.warning("note: %s of %s replaces the built-in %s %r", what, self._loading, self.kind, name)
        super().__setitem__(name, entry)
        self.origins[name] = self._loading
        self._assigned[name] = entry

    def update(self, *others: Any, **entries: Any) -> None:
        """As `dict.update`, remembering origins like an assignment."""
        for name, entry in dict(*others, **entries).items():
            self[name] = entry

    def __delitem__(self, name: str) -> None:
        super().__delitem__(name)
        self.origins.pop(name, None)

    def built_ins(self) -> list[str]:
        """Names whose present entry ships with `swift`, sorted."""
        return sorted(name for name, origin in self.origins.items() if origin == BUILT_IN)

    def plugins(self) -> list[str]:
        """Names registered by plugins or by the running program, sorted."""
        return sorted(name for name, origin in self.origins.items() if origin != BUILT_IN)


orms = Registry("reward function")
"""Reward functions by name: classes, instances, functions or async functions."""

inference_backends = Registry("inference backend")
"""Inference backends by name: functions that take an `EngineSpec` and return an `InferenceEngine`."""

rollout_funcs = Registry("rollout function")
"""Rollout functions by name: `function(prompts, rollout)`; see `swift.rollout.rollout_function`."""
