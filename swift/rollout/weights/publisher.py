"""When the sampler gets new weights, under which version, and what happens when they do not arrive.

A version is +1 per publication; 0 are the weights that the run started with. The rule is looked at after every
optimizer step: a publication is due when at least `interval` steps passed since the last one. It takes place at once
where the engine is free, and otherwise before the next batch is asked for.

A checkpoint does not hold the weights of the last publication, so the first generation after it gets those of then,
whether `interval` is over or not: the run that went on and the one that was resumed sample with the same weights.

`publish` is a collective: every rank calls it at the same step, the ranks with an engine send, the others take part in
the gathers. It either ends with an `Ack` from every engine, or raises on every rank: sampling never goes on with
weights that nobody confirmed. One failed update is repeated on a rebuilt engine.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Protocol

from swift.errors import EngineDead, SwiftError, SyncFailed
from swift.rollout.engines.base import Ack, InferenceEngine
from swift.rollout.weights.base import AdapterWeights, Live, WeightSource, WeightUpdate

logger = logging.getLogger(__name__)

KEPT_VERSIONS = 4096
"""Versions whose step is remembered, for staleness in steps."""

REHEARSAL = 1 << 30
"""Number of weights that are not the policy's; no run publishes so often, so no cache or adapter has it by chance."""


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
        live: the policy's own memory. When given, engine and policy become one memory with the first `publish`, where
            the engine can do that. Only for an engine in this process that rests whenever the weights change. Ignored
            with an `interval` above 1, which asks for older weights than those of now.
        interval: optimizer steps between publications (`--vllm_sync_interval`); 1 for an engine that shares the
            trainer's weights, since it never samples with older ones.
        ranks: the collectives.
        timer: context manager factory; publications count as "sync", with "rebuild" inside where that is needed.
        progress: called after each bucket.
    """

    def __init__(
        self,
        engine: InferenceEngine | None,
        *,
        source: Callable[[], WeightSource],
        adapter: Callable[[], AdapterWeights] | None = None,
        live: Callable[[], Live] | None = None,
        interval: int = 1,
        ranks: Ranks,
        timer: Callable[[str], AbstractContextManager[Any]] = lambda phase: contextlib.nullcontext(),
        progress: Callable[[], None] = lambda: None,
    ) -> None:
        self.engine = engine
        self.source = source
        self.adapter = adapter
        self.live = live if interval == 1 and adapter is None else None
        self.interval = 1 if engine is not None and engine.capabilities.shares_weights else interval
        self.ranks = ranks
        self.timer = timer
        self.progress = progress
        self.version = 0
        self.last_step = 0
        self.last_ack: Ack | None = None
        self._step_of = {0: 0}
        self._lost = True
        self._saved = False

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
        self._lost = self._saved = False
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

    def rehearse(self) -> Ack | None:
        """Send the weights of now as `REHEARSAL`, which is no version of the run; `refresh` ends it.

        For the parity check, which publishes changed weights to see whether they arrive.
        """
        self._lost = True
        return self._everywhere(REHEARSAL)

    def separate(self) -> None:
        """End the sharing of memory until the next publication, so that either side may be changed alone."""
        if self.engine is not None:
            self.engine.separate()

    def update(self, step: int, *, current: bool = False, lost: bool = False) -> Ack | None:
        """What a generation phase calls: publish if due, else send again what the engine has lost, else nothing.

        Args:
            step: optimizer steps done.
            current: weights older than `step` will not do (evaluation).
            lost: the engine has dropped its weights (level-2 sleep).
        """
        behind = step != self.last_step
        if self.due(step) or (behind and (current or lost or self._lost or self._saved)):
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
        failures = self._failures(failure)
        if failures and all(isinstance(one, SyncFailed | EngineDead) for one in failures):
            ack, failure = self._attempt(version, rebuild=failure is not None or self._spans_ranks())
            failures = self._failures(failure)
        if failures:
            raise failure or failures[0]
        return ack

    def _failures(self, mine: SwiftError | None) -> list[SwiftError]:
        """Those of all ranks, in rank order; the same everywhere."""
        return [one for one in self.ranks.all_gather(mine) if one is not None]

    def _spans_ranks(self) -> bool:
        """Whether other ranks hold parts of this rank's engine: then all of them make it anew, or none."""
        return self.engine is not None and self.engine.capabilities.tensor_parallel_size > 1

    def _attempt(self, version: int, *, rebuild: bool = False) -> tuple[Ack | None, SwiftError | None]:
        """One try on this rank; it takes part in every gather even when its engine has failed."""
        if rebuild and self.engine is not None:
            with self.timer("rebuild"):
                failure = _failure_of(version, self.engine.rebuild)
            if failure is not None:
                return self._send(version, None)[0], failure
        return self._send(version, self.engine)

    def _send(self, version: int, engine: InferenceEngine | None) -> tuple[Ack | None, SwiftError | None]:
        return self._send_adapter(version, engine) if self.adapter is not None else self._send_all(version, engine)

    def _send_adapter(self, version: int, engine: InferenceEngine | None) -> tuple[Ack | None, SwiftError | None]:
        assert self.adapter is not None
        adapter = self.adapter()
        if engine is None:
            return None, None
        receipts: list[Ack] = []
        failure = _failure_of(version, lambda: receipts.append(engine.load_adapter(adapter, version)))
        return (receipts[0] if receipts else None), failure

    def _send_all(self, version: int, engine: InferenceEngine | None) -> tuple[Ack | None, SwiftError | None]:
        if engine is None or self.live is None or version == REHEARSAL:
            return self._send_buckets(version, engine)
        live = self.live()
        taken: list[Ack | None] = []
        failure = _failure_of(version, lambda: taken.append(engine.take_shared(live, version)))
        if failure is not None:
            return self._send_buckets(version, None)[0], failure
        if taken[0] is not None:  # of plain parameters nothing is gathered, so no other rank waits for this one
            return taken[0], None
        ack, failure = self._send_buckets(version, engine)
        if failure is None and version > self.version:  # before the first step the trainer may still be put together
            failure = _failure_of(version, lambda: self._share(engine, live))
        return ack, failure

    def _share(self, engine: InferenceEngine, live: Live) -> None:
        """Make one memory of both, or say once why they stay two."""
        obstacle = engine.share(live) if live else "the trainer's weights are spread, merged, cast or rearranged"
        if obstacle:
            logger.info("weights: engine and trainer keep memory of their own: %s", obstacle)
            self.live = None

    def _send_buckets(self, version: int, engine: InferenceEngine | None) -> tuple[Ack | None, SwiftError | None]:
        source = self.source()
        updates: list[WeightUpdate] = []
        failure = None
        if engine is not None:
            failure = _failure_of(version, lambda: updates.append(engine.begin_update(source.manifest(), version)))
        for bucket in source.buckets():  # to the end in any case: the other ranks gather along
            if updates and failure is None:
                failure = _failure_of(version, partial(updates[0].send, bucket))
            self.progress()
        receipts: list[Ack] = []
        if updates and failure is None:
            failure = _failure_of(version, lambda: receipts.append(updates[0].commit()))
        if updates and failure is not None:
            updates[0].abort()
        return (receipts[0] if receipts else None), failure

    def state_dict(self) -> dict[str, Any]:
        """A JSON-safe state; see the module's docstring for what taking it means for the next `update`."""
        self._saved = True
        return {"version": self.version, "last_step": self.last_step, "step_of": list(self._step_of.items())}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue the count; the next `update` sends the weights, which the engine does not have yet."""
        self.version, self.last_step = state["version"], state["last_step"]
        self._step_of = dict(state["step_of"])
        self._lost = True


def _failure_of(version: int, work: Callable[[], Any]) -> SwiftError | None:
    """What goes wrong in `work`, so that this rank can stay with the others until all of them know."""
    try:
        work()
    except SwiftError as error:
        return error
    except Exception as error:
        failure = SyncFailed(f"weights: version {version}: {type(error).__name__}: {error}")
        failure.__cause__ = error
        return failure
    return None
