"""Weight sync: when the rollout engines get new weights, under which version, and the retry after a failed update.

Each sync increases the version by 1; version 0 are the initial weights of the run. A sync is due when at least
`interval` optimizer steps have passed since the last one. It is made at once if the engine is idle, otherwise before
the next batch is requested.

A checkpoint does not have the weights of the last sync. So the first generation after a checkpoint gets the current
weights, also within `interval`: a continued and a resumed run sample with the same weights.

`sync` is a collective: all ranks call it at the same step. Ranks with an engine send, and all ranks take part in the
gathers. It returns an `Ack` from every engine, or raises on every rank. A failed update is repeated once, on a rebuilt
engine.
"""

from __future__ import annotations

import contextlib
import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, TypeVar

from swift.errors import EngineDead, SwiftError, SyncFailed
from swift.rollout.engines.base import Ack, InferenceEngine
from swift.rollout.weights.base import AdapterWeights, Bucket, PolicyParameters, TensorInfo, WeightSource, WeightStream

if TYPE_CHECKING:
    from swift.trainers.distributed import Collectives

logger = logging.getLogger(__name__)

KEPT_VERSIONS = 4096
"""Number of versions whose step is kept, for staleness in steps."""
TRIAL_VERSION = 1 << 30
"""Version of weights that are not the policy's, above the versions of any run."""

T = TypeVar("T")
Outcome = tuple[T | None, SwiftError | None]
"""Result of work on this rank, or its error."""


class WeightSync:
    """Sends the policy of a run to its engines.

    Args:
        engine: this rank's engine, or None.
        source: makes a source of the current weights; on every rank.
        adapter: reads the current adapter (a collective); if given, only the adapter is sent.
        parameters: reads the policy's parameters. If given, engine and policy share one memory from the first `sync`
            on, if the engine supports it. Only for an engine in this process that is idle whenever the weights change.
            Ignored with an `interval` above 1, which needs older weights than the current ones.
        interval: optimizer steps between syncs (`--vllm_sync_interval`); 1 for an engine that shares the trainer's
            weights, since it always samples with the current ones.
        ranks: the collectives.
        timer: context manager factory; syncs count as "sync", with "rebuild" inside.
        progress: called after each bucket.
    """

    def __init__(
        self,
        engine: InferenceEngine | None,
        *,
        source: Callable[[], WeightSource],
        adapter: Callable[[], AdapterWeights] | None = None,
        parameters: Callable[[], PolicyParameters] | None = None,
        interval: int = 1,
        ranks: Collectives,
        timer: Callable[[str], AbstractContextManager[Any]] = lambda phase: contextlib.nullcontext(),
        progress: Callable[[], None] = lambda: None,
    ) -> None:
        self.engine = engine
        self.source = source
        self.adapter = adapter
        self.parameters = parameters if interval == 1 and adapter is None else None
        self.interval = 1 if engine is not None and engine.capabilities.shares_weights else interval
        self.ranks = ranks
        self.timer = timer
        self.progress = progress
        self.version = 0
        self.last_step = 0
        self._step_of = {0: 0}
        self._must_send = True  # whether the engine does not have the weights of `version`
        self._saved = False  # whether a checkpoint was saved after the last sync
        self._gather_error: Exception | None = None

    def due(self, step: int) -> bool:
        return step - self.last_step >= self.interval

    def step_of(self, version: int) -> int:
        """The optimizer step after which `version` was sent."""
        return self._step_of.get(version, min(self._step_of.values()))

    def sync(self, step: int) -> Ack | None:
        """Send the current weights to every engine as the next version; returns the ack of this rank's engine.

        Raises SyncFailed or EngineDead on every rank: an engine did not get the weights.
        """
        ack = self._send_on_all_ranks(self.version + 1)
        self.version += 1
        self.last_step = step
        self._must_send = self._saved = False
        self._step_of[self.version] = step
        while len(self._step_of) > KEPT_VERSIONS:
            del self._step_of[min(self._step_of)]
        return ack

    def refresh(self) -> Ack | None:
        """Send the current weights without a new version: at the start, or after level-2 sleep."""
        ack = self._send_on_all_ranks(self.version)
        self._must_send = False
        return ack

    def send_trial(self) -> Ack | None:
        """Send the current weights as `TRIAL_VERSION`; `refresh` restores the version of the run.

        For the parity check, which sends changed weights to test whether they arrive.
        """
        self._must_send = True
        return self._send_on_all_ranks(TRIAL_VERSION)

    def separate(self) -> None:
        """End the sharing of memory until the next sync, so that trainer or engine can change its weights alone."""
        if self.engine is not None:
            self.engine.separate()

    def update(self, step: int, *, current: bool = False, lost: bool = False) -> Ack | None:
        """Before a generation phase: sync if due, or send the weights again if the engine does not have them.

        Args:
            step: number of optimizer steps so far.
            current: whether the weights must be those of `step` (evaluation).
            lost: whether the engine has dropped its weights (level-2 sleep).
        """
        behind = step != self.last_step
        if self.due(step) or (behind and (current or lost or self._must_send or self._saved)):
            return self.sync(step)
        return self.refresh() if lost or self._must_send else None

    def _send_on_all_ranks(self, version: int) -> Ack | None:
        """Send the current weights as `version` to the engines of all ranks; see `sync`."""
        if self.engine is not None and self.engine.capabilities.shares_weights:
            self.engine.version = version
            return None
        with self.timer("sync"):
            ack, failure = self._send(version, self.engine)
            failures = self._failures(failure)
            if failures and all(isinstance(error, SyncFailed | EngineDead) for error in failures):
                ack, failure = self._send_again(version, rebuild=failure is not None or self._spans_ranks())
                failures = self._failures(failure)
        if failures:
            raise failure or failures[0]
        return ack

    def _failures(self, own: SwiftError | None) -> list[SwiftError]:
        """The failures of all ranks, in rank order; equal on all ranks."""
        return [failure for failure in self.ranks.all_gather(own) if failure is not None]

    def _spans_ranks(self) -> bool:
        """Whether this rank's engine is sharded over several ranks, which must rebuild it together."""
        return self.engine is not None and self.engine.capabilities.tensor_parallel_size > 1

    def _send_again(self, version: int, *, rebuild: bool) -> Outcome[Ack]:
        """The second try on this rank; it takes part in every gather also if its engine has failed."""
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
        if engine is None or self.parameters is None or version == TRIAL_VERSION:
            return self._send_buckets(version, engine)
        parameters = self.parameters()
        ack, failure = _outcome(version, lambda: engine.take_shared(parameters, version))
        if failure is not None:
            self._send_buckets(version, None)
            return None, failure
        if ack is not None:  # plain parameters are not gathered, so no other rank waits for this one
            return ack, None
        ack, failure = self._send_buckets(version, engine)
        # in a `sync` only: at the first `refresh` the trainer may not be complete
        if failure is None and version > self.version:
            _, failure = _outcome(version, lambda: self._share(engine, parameters))
        return ack, failure

    def _share(self, engine: InferenceEngine, parameters: PolicyParameters) -> None:
        """Let engine and policy share one memory, or log once why they cannot."""
        obstacle = "the trainer's weights are sharded, merged, cast or rearranged"
        if parameters:
            obstacle = engine.share(parameters)
        if obstacle:
            logger.info("weights: engine and trainer keep memory of their own: %s", obstacle)
            self.parameters = None

    def _send_buckets(self, version: int, engine: InferenceEngine | None) -> Outcome[Ack]:
        source = self.source()
        buckets = self._gathered(source)
        outcome: Outcome[Ack] = (None, None)
        if engine is not None:
            outcome = _outcome(version, lambda: _send_and_check(engine, source.manifest(), buckets, version))
        deque(buckets, maxlen=0)  # also after a failure: the other ranks take part in the gathers
        if self._gather_error is not None:  # not a failure of an engine, so none is rebuilt
            raise self._gather_error
        return outcome

    def _gathered(self, source: WeightSource) -> Iterator[Bucket]:
        """The buckets; errors of the trainer are stored in `_gather_error`, apart from failures of engines."""
        self._gather_error = None
        try:
            for bucket in source.buckets():
                yield bucket
                del bucket  # before the next one is gathered
                self.progress()
        except Exception as error:
            self._gather_error = error
            raise

    def state_dict(self) -> dict[str, Any]:
        """A JSON-safe state. The next `update` syncs if there were optimizer steps since the last sync."""
        self._saved = True
        return {"version": self.version, "last_step": self.last_step, "step_of": list(self._step_of.items())}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the version; the next `update` sends the weights, which the engine does not have yet."""
        self.version, self.last_step = state["version"], state["last_step"]
        self._step_of = dict(state["step_of"])
        self._must_send = True


def _send_and_check(
    engine: InferenceEngine, manifest: Sequence[TensorInfo], buckets: Iterator[Bucket], version: int
) -> Ack:
    """Send the buckets; the ack of the engine. Raises as `InferenceEngine.update`."""
    stream = WeightStream(manifest, buckets, version, from_trainer=True)
    ack = engine.update(stream)
    stream.check(ack, engine.capabilities.name)  # also of engines that users bring
    return ack


def _outcome(version: int, work: Callable[[], T]) -> Outcome[T]:
    """The result of `work`, or its error: this rank raises it only after a collective with the others."""
    try:
        return work(), None
    except SwiftError as error:
        return None, error
    except Exception as error:
        failure = SyncFailed(f"weights: version {version}: {type(error).__name__}: {error}")
        failure.__cause__ = error
        return None, failure
