"""What an engine around another one leaves to it."""

from __future__ import annotations

from collections.abc import Container, Sequence

from swift.errors import EngineError
from swift.rollout.engines.base import Capabilities, EngineCounters, Health, InferenceEngine, TensorInfo, WeightUpdate
from swift.types import Request


class EngineAround(InferenceEngine):
    """An engine that makes completions of those of `engine`, whose weights, sleep and end are its owner's business."""

    engine: InferenceEngine
    _paused = False

    @property
    def capabilities(self) -> Capabilities:  # type: ignore[override]
        return self.engine.capabilities

    @property
    def counters(self) -> EngineCounters:  # type: ignore[override]
        return self.engine.counters

    @property
    def version(self) -> int:  # type: ignore[override]
        return self.engine.version

    @property
    def late(self) -> int:  # type: ignore[override]
        return self.engine.late

    def health(self) -> Health:
        return self.engine.health()

    def begin_update(self, manifest: Sequence[TensorInfo], version: int) -> WeightUpdate:
        return self.engine.begin_update(manifest, version)

    def check_length(self, request: Request) -> None:
        self.engine.check_length(request)

    def pause(self) -> None:
        self._paused = True
        self.engine.pause()

    def resume(self) -> None:
        self.engine.resume()
        self._paused = False

    @staticmethod
    def _refuse_again(request: Request, outstanding: Container[str]) -> None:
        if request.request_id in outstanding:
            raise EngineError(f"request: {request.request_id}: is outstanding already; give each an id of its own")
