"""What completions are asked of: an engine, or something that makes them with one.

`await generate(request)` is one sample, whoever makes it: the engine (`EngineSource`), an environment of several turns,
a function of the user, or environments of other processes. A caller that is cancelled takes its request back.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from swift.rollout.engines.awaited import AwaitedEngine
from swift.types import Completion, Request


class Source(ABC):
    """Makes completions, on the thread of the rollout loop. inner: the engine that samples."""

    inner: AwaitedEngine

    @abstractmethod
    async def generate(self, request: Request) -> Completion:
        """One sample. Raises EngineError, or another SwiftError that ends the run."""

    @property
    def late(self) -> int:
        """Requests that took too long, once for each try."""
        return self.inner.late + self.inner.engine.late

    def drain_metrics(self) -> dict[str, float]:
        """What there is to log of the sampling since the last call; by name as logged."""
        return self.inner.engine.drain_metrics()

    async def free(self) -> None:
        """Until the engine has nothing of those who have left. Raises what nobody was told."""
        await self.inner.free()

    def hold(self) -> None:
        """Ask nothing of the engine until `release`, which is about to be paused. Raises Unsupported: not now."""
        self.inner.hold()

    def release(self) -> None:
        """Go on after `hold`."""
        self.inner.release()

    def close(self) -> None:  # noqa: B027 - most have nothing of their own
        """End what it started; its engine is closed by its owner."""


class EngineSource(Source):
    """An engine samples each request once."""

    def __init__(self, inner: AwaitedEngine) -> None:
        self.inner = inner

    async def generate(self, request: Request) -> Completion:
        return await self.inner.generate(request)
