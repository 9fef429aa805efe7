"""The order in which rows are used: an infinite, deterministic stream of row indexes.

Each epoch is a permutation that depends on (seed, epoch) only, so the state is two numbers and a resumed stream yields
exactly the rows that the uninterrupted one would have yielded.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

from swift.errors import ConfigError, join_problems

if TYPE_CHECKING:
    import numpy as np


class RowOrder:
    """Row indexes without end; every row exactly once per epoch.

    Args:
        size: number of rows, at least 1.
        seed: any integer.
        shuffle: if False, every epoch is 0 .. size-1.
        stages: of a curriculum, one number per row: rows with smaller numbers come first in every epoch, and shuffling
            stays inside of a stage.

    Raises:
        ConfigError: there are no rows.
    """

    def __init__(self, size: int, *, seed: int, shuffle: bool, stages: np.ndarray | None = None) -> None:
        if size < 1:
            raise ConfigError("--dataset: 0 rows: there is nothing to train on; check the dataset and its filters")
        self.size, self.seed, self.shuffle, self.stages = size, seed, shuffle, stages
        self.epoch, self.cursor = 0, 0
        """Both from 0; the cursor is the place of the next row in the order of the epoch."""
        self._order = self._permutation(0)

    def draw(self) -> int:
        """The next row's index; the first of a new epoch if the current one is exhausted."""
        if self.cursor == self.size:
            self._enter(self.epoch + 1, 0)
        self.cursor += 1
        return int(self._order[self.cursor - 1])

    def skip_to_epoch_end(self) -> None:
        """Skips the rest of an epoch that has begun; between epochs it has no effect."""
        if self.cursor:
            self.cursor = self.size

    def state_dict(self) -> dict[str, Any]:
        """The position, as plain values."""
        return {"epoch": self.epoch, "cursor": self.cursor, **self._settings()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes to a saved position, of the same number of rows, seed, shuffle setting and curriculum."""
        check_same(state, self._settings())
        self._enter(int(state["epoch"]), int(state["cursor"]))

    def _settings(self) -> dict[str, Any]:
        stages = self.stages
        digest = None if stages is None else hashlib.blake2b(stages.astype("<i8").tobytes(), digest_size=8).hexdigest()
        return {"size": self.size, "seed": self.seed, "shuffle": self.shuffle, "curriculum": digest}

    def _enter(self, epoch: int, cursor: int) -> None:
        if epoch != self.epoch:
            self._order = self._permutation(epoch)
        self.epoch, self.cursor = epoch, cursor

    def _permutation(self, epoch: int) -> np.ndarray:
        import numpy as np

        order = generator(self.seed, epoch).permutation(self.size) if self.shuffle else np.arange(self.size)
        return order if self.stages is None else order[np.argsort(self.stages[order], kind="stable")]


def generator(seed: int, *counters: int) -> np.random.Generator:
    """A random generator that is a function of `seed` (any integer) and `counters` (>= 0)."""
    import numpy as np

    return np.random.Generator(np.random.PCG64([seed % 2**64, *counters]))


_FLAGS = {
    "size": "rows of --dataset",
    "seed": "--data_seed",
    "shuffle": "--dataset_shuffle",
    "buffer": "--shuffle_buffer_size",
    "fingerprint": "content of --dataset",
    "mixture": "--interleave_prob",
    "curriculum": "stages of --curriculum_column",
}


def check_same(state: dict[str, Any], mine: dict[str, Any]) -> None:
    """Raises ConfigError naming each setting in which a saved position differs from this run."""
    join_problems(
        [
            f"--resume_from_checkpoint: {_FLAGS[name]}: {state.get(name)} in the checkpoint, {value} now; "
            "resume with the settings of the run"
            for name, value in mine.items()
            if state.get(name) != value
        ]
    )
