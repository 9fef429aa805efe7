"""What happens around generation: a weight sync before, and on a shared device memory changes hands.

    with phase(step):             # syncs weights when due; in colocate also: trainer out, engine awake
        ... sample ...
                                  # in colocate: engine asleep, trainer back

`SyncPhase` where engines have their own memory or share the trainer's weights,
`swift.trainers.memory.colocate.ColocateCycle` where they share a device.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Protocol

from swift.rollout.weights.sync import WeightSync


class GenerationPhase(Protocol):
    """Makes the engine ready, and leaves it."""

    def __call__(
        self, step: int, *, current: bool = False, trainer_stays: bool = False
    ) -> AbstractContextManager[None]:
        """A collective context in which the engine may sample.

        Args:
            step: optimizer steps done.
            current: the weights must be those of now, whether a weight sync is due or not (evaluation).
            trainer_stays: the trainer's model is needed inside as well.
        """


class SyncPhase:
    """Syncs weights when due; otherwise there is nothing to do around generation."""

    def __init__(self, weight_sync: WeightSync) -> None:
        self.weight_sync = weight_sync

    @contextlib.contextmanager
    def __call__(self, step: int, *, current: bool = False, trainer_stays: bool = False) -> Iterator[None]:
        """See `GenerationPhase`."""
        self.weight_sync.update(step, current=current)
        yield
