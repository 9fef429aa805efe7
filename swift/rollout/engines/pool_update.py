"""One weight update on its way to all engines of a pool."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

from swift.errors import EngineDead
from swift.rollout.engines.base import Ack, TensorInfo, WeightUpdate
from swift.rollout.engines.joint import first_failure, in_parallel, joint_ack
from swift.rollout.weights.base import Bucket
from swift.rollout.weights.sending import share_broadcast

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

    def send(self, bucket: Bucket) -> None:
        """Deliver a bucket to all; its checksums are computed once. See `WeightUpdate.send`."""
        bucket.checksums()  # before threads ask for them
        super().send(bucket)

    def _deliver(self, bucket: Bucket) -> None:
        self._pool.spoil(f"the update to version {self.version} has not reached every engine")
        if self.sent == len(bucket.tensors):
            share_broadcast([update for _, update in self._updates], bucket)
        self._everywhere(lambda update: update.send(bucket))

    def _finish(self) -> Ack:
        return joint_ack(self._everywhere(lambda update: update.commit()))

    def _everywhere(self, work: Callable[[WeightUpdate], T]) -> list[T]:
        """On all engines at the same time; one that turns out to be dead is left out."""
        outcomes = in_parallel([lambda update=update: work(update) for _, update in self._updates])  # type: ignore[misc]
        for (member, _), outcome in zip(list(self._updates), outcomes, strict=True):
            if isinstance(outcome, EngineDead):
                self._pool.bury(member, outcome)
        self._updates = [
            pair for pair, outcome in zip(self._updates, outcomes, strict=True) if not isinstance(outcome, EngineDead)
        ]
        first_failure([one for one in outcomes if not isinstance(one, EngineDead)])
        return [one for one in outcomes if not isinstance(one, Exception)]

    def commit(self) -> Ack:
        """All engines switch; see `WeightUpdate.commit`."""
        ack = super().commit()
        self._pool.arrived(self.version)
        return ack

    def abort(self) -> None:
        """Give up everywhere."""
        for _, update in self._updates:
            update.abort()
