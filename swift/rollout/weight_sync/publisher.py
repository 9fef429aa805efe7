"""When the sampler gets new weights, under which version, and what happens when they do not arrive.

A version is +1 per publication; 0 are the weights that the run started with. The rule is looked at after every
optimizer step: a publication is due when at least `interval` steps passed since the last one. It takes place at once
where the engine is free, and otherwise before the next batch is asked for.

`publish` is a collective: every rank calls it at the same step, the ranks with an engine send, the others take part in
the gathers. It either ends with an `Ack` from every engine, or raises on every rank: sampling never goes on with
weights that nobody confirmed. One failed update is repeated on a rebuilt engine.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

from swift.errors import EngineDead, SwiftError, SyncFailed, Unsupported
from swift.rollout.engines.base import Ack, InferenceEngine
from swift.rollout.weight_sync.base import AdapterWeights, WeightSource

KEPT_VERSIONS = 4096
"""Versions whose step is remembered, for staleness in steps."""


class Ranks(Protocol):
    """The collective that a publication needs; see `swift.trainers.distributed`."""

    def all_gather(self, value: Any) -> list[Any]:
        """Values of all ranks, everywhere."""
        ...


class WeightPublisher:
    """Publishes the policy of one run.

    Args:
        engine: this rank's engine, or None.
        source: makes a source of the current weights; on every rank.
        adapter: reads the current adapter alone (a collective); when given, only the adapter is sent.
        interval: optimizer steps between publications (`--vllm_sync_interval`).
        ranks: the collectives.
        timer: context manager factory; publications count as "sync".
    """

    def __init__(
        self,
        engine: InferenceEngine | None,
        *,
        source: Callable[[], WeightSource],
        adapter: Callable[[], AdapterWeights] | None = None,
        interval: int = 1,
        ranks: Ranks,
        timer: Callable[[str], AbstractContextManager[Any]] = lambda phase: contextlib.nullcontext(),
    ) -> None:
        self.engine = engine
        self.source = source
        self.adapter = adapter
        self.interval = interval
        self.ranks = ranks
        self.timer = timer
        self.version = 0
        self.last_step = 0
        self.last_ack: Ack | None = None
        self._step_of = {0: 0}
        self._lost = True

    def due(self, step: int) -> bool:
        """Whether `interval` steps have passed since the last publication."""
        return step - self.last_step >= self.interval

    def step_of(self, version: int) -> int:
        """The optimizer step after which `version` was published."""
        return self._step_of.get(version, min(self._step_of.values()))

    def publish(self, step: int) -> Ack | None:
        """Bring the weights of now to every engine; returns this rank's receipt.

        Raises:
            SyncFailed, EngineDead: on every rank, when an engine could not be brought to these weights.
        """
        ack = self._everywhere(self.version + 1)
        self.version += 1
        self.last_step = step
        self._lost = False
        self._step_of[self.version] = step
        while len(self._step_of) > KEPT_VERSIONS:
            del self._step_of[min(self._step_of)]
        self.last_ack = ack or self.last_ack
        return ack

    def refresh(self) -> Ack | None:
        """Send the weights of now under the present version: at the start, or after level-2 sleep."""
        ack = self._everywhere(self.version)
        self.last_ack = ack or self.last_ack
        self._lost = False
        return ack

    def update(self, step: int, *, current: bool = False, lost: bool = False) -> Ack | None:
        """What a generation phase calls: publish if due, else send again what the engine has lost, else nothing.

        Args:
            step: optimizer steps done.
            current: weights older than `step` will not do (evaluation).
            lost: the engine has dropped its weights (level-2 sleep).
        """
        behind = step != self.last_step
        if self.due(step) or (behind and (current or lost or self._lost)):
            return self.publish(step)
        return self.refresh() if lost or self._lost else None

    def _everywhere(self, version: int) -> Ack | None:
        if self.engine is not None and self.engine.capabilities.shares_weights:
            self.engine.version = version
            return None
        with self.timer("sync"):
            return self._to_all(version)

    def _to_all(self, version: int) -> Ack | None:
        ack, failure = self._attempt(version)
        failures = [one for one in self.ranks.all_gather(failure) if one is not None]
        if failures and all(isinstance(one, SyncFailed | EngineDead) for one in failures):
            ack, failure = self._attempt(version, rebuild=failure is not None)
            failures = [one for one in self.ranks.all_gather(failure) if one is not None]
        if failures:
            raise failure or failures[0]
        return ack

    def _attempt(self, version: int, *, rebuild: bool = False) -> tuple[Ack | None, SwiftError | None]:
        """One try on this rank; it takes part in every gather even when its engine has failed."""
        try:
            if rebuild and self.engine is not None:
                self.engine.rebuild()
        except SwiftError as error:
            return self._send(version, None)[0], error
        return self._send(version, self.engine)

    def _send(self, version: int, engine: InferenceEngine | None) -> tuple[Ack | None, SwiftError | None]:
        if self.adapter is not None:
            adapter = self.adapter()
            try:
                return (engine.load_adapter(adapter, version), None) if engine is not None else (None, None)
            except Unsupported:
                raise
            except SwiftError as error:
                return None, error
        source, update, failure = self.source(), None, None
        try:
            update = engine.begin_update(source.manifest(), version) if engine is not None else None
        except SwiftError as error:
            failure = error
        for bucket in source.buckets():  # to the end in any case: the other ranks gather along
            if update is None or failure is not None:
                continue
            try:
                update.send(bucket)
            except SwiftError as error:
                failure = error
        if update is None or failure is not None:
            if update is not None:
                update.abort()
            return None, failure
        try:
            return update.commit(), None
        except SwiftError as error:
            update.abort()
            return None, error

    def state_dict(self) -> dict[str, Any]:
        """A JSON-safe state."""
        return {"version": self.version, "last_step": self.last_step, "step_of": list(self._step_of.items())}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue the count; the next `update` sends the weights, which the engine does not have yet."""
        self.version, self.last_step = state["version"], state["last_step"]
        self._step_of = dict(state["step_of"])
        self._lost = True
