"""When the rollout engine gets new weights, under which version, and what happens when they do not arrive.

A version is +1 per weight sync; 0 are the weights that the run started with. A sync is due when at least `interval`
optimizer steps passed since the last one. It takes place at once where the engine is free, and otherwise before the
next batch is asked for.

A checkpoint does not hold the weights of the last sync, so the first generation after it gets those of then, whether
`interval` is over or not: the run that went on and the one that was resumed sample with the same weights.

`sync` is a collective: every rank calls it at the same step, the ranks with an engine send, the others take part in
the gathers. It either ends with an `Ack` from every engine, or raises on every rank. One failed update is repeated on a
rebuilt engine.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, TypeVar

from swift.errors import EngineDead, SwiftError, SyncFailed
from swift.rollout.engines.base import Ack, InferenceEngine
from swift.rollout.weights.base import AdapterWeights, Bucket, Live, WeightSource, WeightStream

if TYPE_CHECKING:
    from swift.trainers.distributed import Collectives

logger = logging.getLogger(__name__)

KEPT_VERSIONS = 4096
"""Versions whose step is remembered, for staleness in steps."""
REHEARSAL = 1 << 30
"""Number of weights that are not the policy's; no run syncs so often, so no cache or adapter has it by chance."""

T = TypeVar("T")
Outcome = tuple[T | None, SwiftError | None]
"""What came of work on this rank, or why nothing did."""


class WeightSync:
    """Brings the policy of one run to its engines.

    Args:
        engine: this rank's engine, or None.
        source: makes a source of the current weights; on every rank.
        adapter: reads the current adapter alone (a collective); when given, only the adapter is sent.
        live: the policy's own memory. When given, engine and policy become one memory with the first `sync`, where
            the engine can do that. Only for an engine in this process that rests whenever the weights change. Ignored
            with an `interval` above 1, which asks for older weights than those of now.
        interval: optimizer steps between syncs (`--vllm_sync_interval`); 1 for an engine that shares the trainer's
            weights, since it never samples with older ones.
        ranks: the collectives.
        timer: context manager factory; syncs count as "sync", with "rebuild" inside where that is needed.
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
        ranks: Collectives,
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
        self._step_of = {0: 0}
        self._lost = True
        self._saved = False
        self._gather_error: Exception | None = None

    def due(self, step: int) -> bool:
        return step - self.last_step >= self.interval

    def step_of(self, version: int) -> int:
        """The optimizer step after which `version` was sent."""
        return self._step_of.get(version, min(self._step_of.values()))

    def sync(self, step: int) -> Ack | None:
        """Bring the weights of now to every engine as the next version; returns the ack of this rank's engine.

        Raises SyncFailed or EngineDead on every rank, when an engine could not be brought to these weights.
        """
        ack = self._everywhere(self.version + 1)
        self.version += 1
        self.last_step = step
        self._lost = self._saved = False
        self._step_of[self.version] = step
        while len(self._step_of) > KEPT_VERSIONS:
            del self._step_of[min(self._step_of)]
        return ack

    def refresh(self) -> Ack | None:
        """Send the weights of now under the present version: at the start, or after level-2 sleep."""
        ack = self._everywhere(self.version)
        self._lost = False
        return ack

    def rehearse(self) -> Ack | None:
        """Send the weights of now as `REHEARSAL`, which is no version of the run; `refresh` ends it.

        For the parity check, which sends changed weights to see whether they arrive.
        """
        self._lost = True
        return self._everywhere(REHEARSAL)

    def separate(self) -> None:
        """End the sharing of memory until the next sync, so that either side may be changed alone."""
        if self.engine is not None:
            self.engine.separate()

    def update(self, step: int, *, current: bool = False, lost: bool = False) -> Ack | None:
        """What a generation phase calls: sync if due, else send again what the engine has lost, else nothing.

        Args:
            step: optimizer steps done.
            current: weights older than `step` will not do (evaluation).
            lost: the engine has dropped its weights (level-2 sleep).
        """
        behind = step != self.last_step
        if self.due(step) or (behind and (current or lost or self._lost or self._saved)):
            return self.sync(step)
        return self.refresh() if lost or self._lost else None

    def _everywhere(self, version: int) -> Ack | None:
        if self.engine is not None and self.engine.capabilities.shares_weights:
            self.engine.version = version
            return None
        with self.timer("sync"):
            ack, failure = self._send(version, self.engine)
            failures = self._failures(failure)
            if failures and all(isinstance(one, SyncFailed | EngineDead) for one in failures):
                ack, failure = self._send_again(version, rebuild=failure is not None or self._spans_ranks())
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

    def _send_again(self, version: int, *, rebuild: bool) -> Outcome[Ack]:
        """The second try on this rank; it takes part in every gather even when its engine has failed."""
        if rebuild and self.engine is not None:
            with self.timer("rebuild"):
                _, failure = _outcome(version, self.engine.rebuild)
            if failure is not None:
                self._send(version, None)
                return None, failure
        return self._send(version, self.engine)

    def _send(self, version: int, engine: InferenceEngine | None) -> Outcome[Ack]:
        if self.adapter is not None:
            adapter = self.adapter()
            return _outcome(version, lambda: engine.load_adapter(adapter, version)) if engine else (None, None)
        if engine is None or self.live is None or version == REHEARSAL:
            return self._send_buckets(version, engine)
        live = self.live()
        ack, failure = _outcome(version, lambda: engine.take_shared(live, version))
        if failure is not None:
            self._send_buckets(version, None)
            return None, failure
        if ack is not None:  # of plain parameters nothing is gathered, so no other rank waits for this one
            return ack, None
        ack, failure = self._send_buckets(version, engine)
        if failure is None and version > self.version:  # before the first step the trainer may still be put together
            _, failure = _outcome(version, lambda: self._share(engine, live))
        return ack, failure

    def _share(self, engine: InferenceEngine, live: Live) -> None:
        """Make one memory of both, or say once why they stay two."""
        obstacle = engine.share(live) if live else "the trainer's weights are sharded, merged, cast or rearranged"
        if obstacle:
            logger.info("weights: engine and trainer keep memory of their own: %s", obstacle)
            self.live = None

    def _send_buckets(self, version: int, engine: InferenceEngine | None) -> Outcome[Ack]:
        source = self.source()
        buckets = self._gathered(source)
        outcome: Outcome[Ack] = (None, None)
        if engine is not None:
            stream = WeightStream(source.manifest(), buckets, version, first_hand=True)
            outcome = _outcome(version, lambda: _confirmed(engine, stream))
        for _ in buckets:  # to the end in any case: the other ranks gather along
            pass
        if self._gather_error is not None:  # no engine has failed, so none is made anew
            raise self._gather_error
        return outcome

    def _gathered(self, source: WeightSource) -> Iterator[Bucket]:
        """The buckets; what goes wrong here, in the trainer, is kept apart from failures of engines."""
        self._gather_error = None
        try:
            for bucket in source.buckets():
                yield bucket
                self.progress()
        except Exception as error:
            self._gather_error = error
            raise

    def state_dict(self) -> dict[str, Any]:
        """A JSON-safe state; see the module's docstring for what taking it means for the next `update`."""
        self._saved = True
        return {"version": self.version, "last_step": self.last_step, "step_of": list(self._step_of.items())}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue the count; the next `update` sends the weights, which the engine does not have yet."""
        self.version, self.last_step = state["version"], state["last_step"]
        self._step_of = dict(state["step_of"])
        self._lost = True


def _confirmed(engine: InferenceEngine, stream: WeightStream) -> Ack:
    ack = engine.update(stream)
    stream.check(ack, engine.capabilities.name)  # also of engines that users bring
    return ack


def _outcome(version: int, work: Callable[[], T]) -> Outcome[T]:
    """What `work` returns, or what goes wrong in it, so that this rank can stay with the others until all know."""
    try:
        return work(), None
    except SwiftError as error:
        return None, error
    except Exception as error:
        failure = SyncFailed(f"weights: version {version}: {type(error).__name__}: {error}")
        failure.__cause__ = error
        return None, failure
