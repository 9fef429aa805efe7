"""Which prompts are sampled next, and what has become of those sampled before. Pure: no engine, clock or device.

Every launch takes the next launch index and the next prompt of the stream. An index ends exactly once: trained,
excluded, or (with dynamic sampling) dropped. At every moment

    launched == trained + excluded + dropped + in flight

A unit is the groups that feed one round of training: one generation batch, or several when one optimizer step
needs several. What does not fill a last unit of an epoch is left out of that epoch.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any, Protocol

from swift.types import Prompt


class PromptSource(Protocol):
    """An endless, resumable stream of prompts; `swift.data` provides it."""

    def next(self) -> tuple[Prompt, int, int]:
        """The next prompt with its epoch and its position in that epoch."""
        ...

    def skip_to_epoch_end(self) -> None:
        """Leave the rest of the current epoch out."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """A JSON-safe state."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue after the last prompt of that state."""
        ...


@dataclass(frozen=True, slots=True)
class Launch:
    """A group to sample. `launch` counts the earlier launches of this prompt (it goes into the seeds)."""

    index: int
    launch: int
    prompt: Prompt
    epoch: int

    @property
    def group_id(self) -> str:
        """Unique over the run."""
        return f"{self.prompt.prompt_id}-{self.launch}"


class RolloutScheduler:
    """Hands out units of launches and keeps the books.

    Args:
        source: the prompt stream.
        groups_per_unit: groups of one unit.
        units_per_epoch: whole units in an epoch; None when the stream has no epochs (streaming data).
    """

    def __init__(self, source: PromptSource, *, groups_per_unit: int, units_per_epoch: int | None) -> None:
        self.source = source
        self.groups_per_unit = groups_per_unit
        self.units_per_epoch = units_per_epoch
        self.units = 0
        self.launched = 0
        self.trained = 0
        self.excluded = 0
        self.dropped = 0
        self._launches_of: Counter[str] = Counter()

    @property
    def in_flight(self) -> int:
        """Launches that have not ended."""
        return self.launched - self.trained - self.excluded - self.dropped

    def launch_unit(self) -> list[Launch]:
        """The next unit, in launch order."""
        if self.units_per_epoch and self.units and self.units % self.units_per_epoch == 0:
            self.source.skip_to_epoch_end()
        self.units += 1
        return [self._launch() for _ in range(self.groups_per_unit)]

    def _launch(self) -> Launch:
        prompt, epoch, _ = self.source.next()
        earlier = self._launches_of[prompt.prompt_id]
        self._launches_of[prompt.prompt_id] += 1
        launch = Launch(self.launched, earlier, prompt, epoch)
        self.launched += 1
        return launch

    def end_unit(self, *, trained: int, excluded: int) -> None:
        """Book the ends of a unit's groups."""
        self.trained += trained
        self.excluded += excluded
        assert self.in_flight >= 0, "a launch ended twice"

    def state_dict(self) -> dict[str, Any]:
        """A JSON-safe state, the prompt source included."""
        return {
            "source": self.source.state_dict(),
            "units": self.units,
            "launched": self.launched,
            "trained": self.trained,
            "excluded": self.excluded,
            "dropped": self.dropped,
            "launches_of": dict(self._launches_of),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue exactly after `state`."""
        self.source.load_state_dict(state["source"])
        self.units = state["units"]
        self.launched = state["launched"]
        self.trained = state["trained"]
        self.excluded = state["excluded"]
        self.dropped = state["dropped"]
        self._launches_of = Counter(state["launches_of"])
