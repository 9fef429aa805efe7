"""Sources of completions: an engine, or code that samples with an engine.

`await generate(request)` returns one sample: of the engine (`EngineSource`), of an environment of several turns, of a
rollout function of the user, or of environments in other processes. Cancelling the caller aborts its request.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from swift.rollout.engines.base import InferenceEngine
from swift.types import Completion, Request


class Source(ABC):
    """Provides completions, on the thread of the rollout loop. engine: the engine that samples."""

    engine: InferenceEngine

    @abstractmethod
    async def generate(self, request: Request) -> Completion:
        """One sample. Raises EngineError, or another SwiftError that stops the run."""

    @property
    def late(self) -> int:
        """Number of attempts of requests that exceeded their time limit."""
        return self.engine.counters.late

    def drain_metrics(self) -> dict[str, float]:
        """Metrics of the sampling since the last call, by the name in the log."""
        return self.engine.drain_metrics()

    async def free(self) -> None:
        """Wait until the engine has no request of a cancelled caller. Raises an error that no caller has received."""
        await self.engine.free()

    def hold(self) -> None:
        """Submit no request until `release`, before a pause of the engine. Raises Unsupported: it cannot be paused."""
        self.engine.hold()

    def release(self) -> None:
        """Continue after `hold`."""
        self.engine.release()

    def close(self) -> None:  # noqa: B027 - most sources have no resources of their own
        """Release resources of the source; the owner of the engine closes it."""


@dataclass(eq=False)
class EngineSource(Source):
    """Samples each request once with an engine."""

    engine: InferenceEngine

    async def generate(self, request: Request) -> Completion:
        return await self.engine.generate(request)
