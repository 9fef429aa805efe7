"""Which prompts are sampled next, and what has become of those sampled before. Pure: no engine, clock or device.

Every launch takes the next launch index and, as a rule, the next prompt of the stream. An index ends exactly once:
trained, excluded, or dropped because it teaches nothing (dynamic sampling, replay). Groups that dynamic sampling kept
beyond what a batch wanted are carried: they wait here for the next batch. At every moment

    launched == trained + excluded + dropped + carried + in flight

A unit is the groups that feed one round of training: one generation batch, or several when one optimizer step
needs several. What does not fill a last unit of an epoch is left out of that epoch; with dynamic sampling, whose units
draw as many prompts as they need, epochs follow each other without a gap.

Prompts on which every completion failed can be tried again later in the run (`RerollConfig`): they wait in a bounded
queue without duplicates and take the last of the first launches of a unit; the prompts they displace come next.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from swift.rollout.admission import InformativeRate
from swift.rollout.saved_groups import group_from_json, group_to_json, prompt_from_json, prompt_to_json
from swift.types import Prompt, RolloutGroup

REROLL_QUEUE = 1024
"""Most prompts that wait to be tried again; the oldest one makes room."""


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


@dataclass(frozen=True, slots=True, kw_only=True)
class RerollConfig:
    """When prompts are tried again: at most `max_groups` per unit, from optimizer step `start_step` (from 1) on."""

    start_step: int
    max_groups: int = 1


@dataclass(slots=True)
class Intake:
    """What a unit begins with, apart from new prompts: groups carried over, and prompts to try again."""

    carried: list[RolloutGroup] = field(default_factory=list)
    rerolls: list[Prompt] = field(default_factory=list)


class RolloutScheduler:
    """Hands out launches and keeps the books.

    Args:
        source: the prompt stream.
        groups_per_unit: groups of one unit.
        units_per_epoch: whole units in an epoch; None when the stream has no epochs (streaming data) or units
            draw as many prompts as they need (dynamic sampling).
        reroll: trying failed prompts again; None is off.
    """

    def __init__(
        self,
        source: PromptSource,
        *,
        groups_per_unit: int,
        units_per_epoch: int | None,
        reroll: RerollConfig | None = None,
    ) -> None:
        self.source = source
        self.groups_per_unit = groups_per_unit
        self.units_per_epoch = units_per_epoch
        self.reroll = reroll
        self.units = 0
        self.launched = 0
        self.trained = 0
        self.excluded = 0
        self.dropped = 0
        self.carried: deque[RolloutGroup] = deque()
        self.rate = InformativeRate()
        self._again: dict[str, Prompt] = {}
        self._launches_of: Counter[str] = Counter()

    @property
    def in_flight(self) -> int:
        """Launches that have not ended and are not carried."""
        return self.launched - self.trained - self.excluded - self.dropped - len(self.carried)

    # --- launching ----------------------------------------------------------------------------------------------

    def begin_unit(self, step: int) -> Intake:
        """What the next unit begins with.

        Args:
            step: the optimizer step that it is for, from 1.
        """
        self.units += 1
        carried = [self.carried.popleft() for _ in range(min(len(self.carried), self.groups_per_unit))]
        rerolls: list[Prompt] = []
        if self.reroll is not None and step >= self.reroll.start_step:
            room = min(self.reroll.max_groups, self.groups_per_unit - len(carried))
            rerolls = [self._again.pop(name) for name in list(self._again)[:room]]
        return Intake(carried, rerolls)

    def launch_unit(self, intake: Intake | None = None) -> list[Launch]:
        """The launches of a unit of fixed size, in launch order."""
        if self.units_per_epoch and self.units > 1 and (self.units - 1) % self.units_per_epoch == 0:
            self.source.skip_to_epoch_end()
        return self.launch(self.groups_per_unit, intake.rerolls if intake is not None else ())

    def launch(self, count: int, rerolls: Sequence[Prompt] = ()) -> list[Launch]:
        """The next launches in launch order; the last of them are those of `rerolls`."""
        rerolls = rerolls[:count]
        new = [self._next() for _ in range(count - len(rerolls))]
        return new + [self._launch(prompt, -1) for prompt in rerolls]

    def _next(self) -> Launch:
        prompt, epoch, _ = self.source.next()
        return self._launch(prompt, epoch)

    def _launch(self, prompt: Prompt, epoch: int) -> Launch:
        earlier = self._launches_of[prompt.prompt_id]
        self._launches_of[prompt.prompt_id] += 1
        launch = Launch(self.launched, earlier, prompt, epoch)
        self.launched += 1
        return launch

    # --- ends -----------------------------------------------------------------------------------------------------

    def end_unit(self, *, trained: int, excluded: int, dropped: int = 0) -> None:
        """Book the ends of a unit's groups."""
        self.trained += trained
        self.excluded += excluded
        self.dropped += dropped
        assert self.in_flight >= 0, "a launch ended twice"

    def carry(self, groups: Sequence[RolloutGroup]) -> None:
        """Keep groups for the next unit that begins."""
        self.carried.extend(groups)

    def try_again(self, prompt: Prompt) -> None:
        """Queue a prompt on which every completion failed; one that waits already keeps its place."""
        if self.reroll is None or prompt.prompt_id in self._again:
            return
        if len(self._again) >= REROLL_QUEUE:
            del self._again[next(iter(self._again))]
        self._again[prompt.prompt_id] = prompt

    @property
    def waiting_again(self) -> int:
        """Prompts that wait to be tried again."""
        return len(self._again)

    # --- states ---------------------------------------------------------------------------------------------------

    def launch_state(self) -> dict[str, Any]:
        """Where launching stands: what `state_dict(since=...)` goes back to."""
        return {
            "source": self.source.state_dict(),
            "launched": self.launched,
            "launches_of": dict(self._launches_of),
        }

    def state_dict(
        self, *, since: dict[str, Any] | None = None, units: int = 0, intakes: Sequence[Intake] = ()
    ) -> dict[str, Any]:
        """A JSON-safe state, the prompt source included.

        Args:
            since: an earlier `launch_state`: as if nothing had been launched after it. What has ended stays ended.
            units: units that were begun after it, which count as not begun.
            intakes: what these began with, which goes back to where it came from.
        """
        carried = [group for intake in intakes for group in intake.carried] + list(self.carried)
        again = {prompt.prompt_id: prompt for intake in intakes for prompt in intake.rerolls} | self._again
        return {
            **(self.launch_state() if since is None else since),
            "units": self.units - units,
            "trained": self.trained,
            "excluded": self.excluded,
            "dropped": self.dropped,
            "carried": [group_to_json(group) for group in carried],
            "again": [prompt_to_json(prompt) for prompt in again.values()],
            "rate": self.rate.value,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue exactly after `state`."""
        self.source.load_state_dict(state["source"])
        self.units = state["units"]
        self.launched = state["launched"]
        self.trained = state["trained"]
        self.excluded = state["excluded"]
        self.dropped = state["dropped"]
        self.carried = deque(group_from_json(group) for group in state["carried"])
        prompts = [prompt_from_json(prompt) for prompt in state["again"]]
        self._again = {prompt.prompt_id: prompt for prompt in prompts} if self.reroll is not None else {}
        self.rate = InformativeRate(state["rate"])
        self._launches_of = Counter(state["launches_of"])
