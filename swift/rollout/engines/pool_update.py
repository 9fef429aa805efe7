"""One weight update on its way to all engines of a pool."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

from swift.errors import EngineDead
from swift.rollout.engines.base import Ack, TensorInfo, WeightUpdate
from swift.rollout.engines.joint import first_failure, in_parallel, joint_ack, outcome_of
from swift.rollout.weights.base import Bucket
from swift.rollout.weights.sending import join_broadcast

if TYPE_CHECKING:
    from swift.rollout.engines.pool import EnginePool, Member

T = TypeVar("T")


class PoolUpdate(WeightUpdate):
    """One update on its way to all engines of a pool.

    Args:
        pool: the receivers.
        updates: one per engine.
        manifest: every tensor that will come.
        version: of the policy.
    """

    def __init__(
        self,
        pool: EnginePool,
        updates: Sequence[tuple[Member, WeightUpdate]],
        manifest: Sequence[TensorInfo],
        version: int,
    ) -> None:
        super().__init__(pool.capabilities.name, manifest, version)
        self._pool = pool
        self._updates = list(updates)

    def _deliver(self, bucket: Bucket) -> None:
        """Begin with every engine, then wait for each."""
        self._pool.spoil(f"the update to version {self.version} has not reached every engine")
        if self.sent == len(bucket.tensors):
            join_broadcast([update for _, update in self._updates], bucket)
        waits = self._settle([outcome_of(lambda u=update: u.start(bucket)) for _, update in self._updates])  # type: ignore[misc]
        self._settle([outcome_of(wait) if wait is not None else None for wait in waits])

    def _finish(self) -> Ack:
        commits: list[Callable[[], Ack]] = [update.commit for _, update in self._updates]
        return joint_ack(self._settle(in_parallel(commits)))

    def _settle(self, outcomes: Sequence[T | Exception]) -> list[T]:
        """What came of all engines; one that turns out to be dead is left out, another failure is raised."""
        pairs = list(zip(self._updates, outcomes, strict=True))
        for (member, _), outcome in pairs:
            if isinstance(outcome, EngineDead):
                self._pool.bury(member, outcome)
        self._updates = [pair for pair, outcome in pairs if not isinstance(outcome, EngineDead)]
        first_failure([outcome for outcome in outcomes if not isinstance(outcome, EngineDead)])
        return [outcome for outcome in outcomes if not isinstance(outcome, Exception)]

    def commit(self) -> Ack:
        """All engines switch; see `WeightUpdate.commit`."""
        ack = super().commit()
        self._pool.arrived(self.version)
        return ack

    def abort(self) -> None:
        """Give up everywhere."""
        for _, update in self._updates:
            update.abort()
