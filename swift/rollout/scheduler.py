"""The order in which prompts are sampled, and counts of how launches ended. Pure: no engine, clock or device.

Each launch takes the next launch index and, without re-rolls, the next prompt of the stream. An index ends exactly
once: trained, excluded, or dropped because its group has zero variance (dynamic sampling, replay). Dynamic sampling
carries surplus informative groups over: they are kept here until the next round. Invariant:

    launched == trained + excluded + dropped + carried + in flight

A round samples the groups of one rollout batch: one generation batch, or several if one optimizer step needs several.
Rows that do not fill the last batch of an epoch are dropped; with dynamic sampling, whose rounds draw a variable number
of prompts, epochs follow each other without a gap.

Re-roll (`RerollConfig`): prompts on which every completion failed are kept in a bounded queue without duplicates. They
take the last of the first launches of a later round; the prompts that they displace come next.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec

from swift.rollout.saved_state import require_plain
from swift.types import Prompt, RolloutGroup

if TYPE_CHECKING:
    from swift.data.source import PromptSource

REROLL_QUEUE = 1024
"""Capacity of the re-roll queue; the oldest prompt is removed if it is full."""


@dataclass(frozen=True, slots=True)
class Launch:
    """A group to sample. `launch`: number of earlier launches of this prompt, part of the seeds."""

    index: int
    launch: int
    prompt: Prompt

    @property
    def group_id(self) -> str:
        return f"{self.prompt.prompt_id}-{self.launch}"


@dataclass(frozen=True, slots=True, kw_only=True)
class RerollConfig:
    """Schedule of re-rolls: at most `max_groups` per round, from optimizer step `start_step` (counted from 1) on."""

    start_step: int
    max_groups: int = 1


@dataclass(slots=True)
class LaunchLog:
    """Prompts and groups that one round took from the scheduler, so that the round can be undone.

    carried: groups of earlier rounds. rerolls: prompts to sample again. launches: in launch order. source: state of the
    prompt stream before the first launch; None without launches.
    """

    carried: list[RolloutGroup] = field(default_factory=list)
    rerolls: list[Prompt] = field(default_factory=list)
    launches: list[Launch] = field(default_factory=list)
    source: dict[str, Any] | None = None


class SchedulerState(msgspec.Struct):
    """State of a scheduler in a checkpoint."""

    source: dict[str, Any]
    rounds: int
    launched: int
    trained: int
    excluded: int
    dropped: int
    launches_of: dict[str, int]
    carried: list[RolloutGroup]
    rerolls: list[Prompt]
    rate: float


@dataclass(kw_only=True, eq=False)
class RolloutScheduler:
    """Draws the launches of rounds, and counts how they end.

    source: the prompt stream. groups_per_batch: groups of one rollout batch. batches_per_epoch: number of full rollout
    batches; None without epochs (streaming data, dynamic sampling). reroll: schedule of re-rolls; None is off.
    saves_prompts: whether checkpoints may hold prompts, so that their columns must be plain data. rate: moving average
    of the share of informative groups.
    """

    source: PromptSource = field(kw_only=False)
    groups_per_batch: int
    batches_per_epoch: int | None
    reroll: RerollConfig | None = None
    saves_prompts: bool = True
    rounds: int = 0
    launched: int = 0
    trained: int = 0
    excluded: int = 0
    dropped: int = 0
    carried: deque[RolloutGroup] = field(default_factory=deque)
    rate: float = 1.0
    _rerolls: dict[str, Prompt] = field(default_factory=dict)
    _launches_of: Counter[str] = field(default_factory=Counter)

    @property
    def in_flight(self) -> int:
        """Number of launches that have not ended and are not carried."""
        return self.launched - self.trained - self.excluded - self.dropped - len(self.carried)

    def begin_round(self, step: int) -> LaunchLog:
        """Begin the next round, for optimizer step `step` (counted from 1): its carried groups and re-rolls."""
        self.rounds += 1
        carried = [self.carried.popleft() for _ in range(min(len(self.carried), self.groups_per_batch))]
        rerolls: list[Prompt] = []
        if self.reroll is not None and step >= self.reroll.start_step:
            room = min(self.reroll.max_groups, self.groups_per_batch - len(carried))
            rerolls = [self._rerolls.pop(name) for name in list(self._rerolls)[:room]]
        return LaunchLog(carried, rerolls)

    def launch_batch(self, log: LaunchLog) -> list[Launch]:
        """All launches of a round of fixed size, in launch order."""
        log.source = self.source.state_dict()
        if self.batches_per_epoch and self.rounds > 1 and (self.rounds - 1) % self.batches_per_epoch == 0:
            self.source.skip_to_epoch_end()
        return self.launch(log, self.groups_per_batch)

    def launch(self, log: LaunchLog, count: int) -> list[Launch]:
        """The next launches of a round in launch order; re-rolls are the last of the first ones."""
        if log.source is None:
            log.source = self.source.state_dict()
        rerolls = [] if log.launches else log.rerolls[:count]
        prompts = [self.source.next() for _ in range(count - len(rerolls))]
        if self.saves_prompts:
            for prompt in prompts:
                require_plain(prompt)
        new = []
        for prompt in [*prompts, *rerolls]:
            new.append(Launch(self.launched, self._launches_of[prompt.prompt_id], prompt))
            self._launches_of[prompt.prompt_id] += 1
            self.launched += 1
        log.launches += new
        return new

    def end_round(self, *, trained: int, excluded: int, dropped: int = 0) -> None:
        self.trained += trained
        self.excluded += excluded
        self.dropped += dropped
        assert self.in_flight >= 0, "a launch ended twice"

    def queue_reroll(self, prompt: Prompt) -> None:
        """Queue a prompt on which every completion failed; a prompt in the queue keeps its place."""
        if self.reroll is None or prompt.prompt_id in self._rerolls:
            return
        if len(self._rerolls) >= REROLL_QUEUE:
            del self._rerolls[next(iter(self._rerolls))]
        self._rerolls[prompt.prompt_id] = prompt

    @property
    def rerolls_waiting(self) -> int:
        return len(self._rerolls)

    def state(self, without: Sequence[LaunchLog] = ()) -> SchedulerState:
        """A copy of the state before the last rounds, those of `without`; launches that have ended stay ended."""
        undone = [launch for log in without for launch in log.launches]
        launches_of = Counter(self._launches_of)
        launches_of.subtract(launch.prompt.prompt_id for launch in undone)
        carried = [group for log in without for group in log.carried] + list(self.carried)
        rerolls = {prompt.prompt_id: prompt for log in without for prompt in log.rerolls} | self._rerolls
        sources = [log.source for log in without if log.source is not None]
        return SchedulerState(
            source=sources[0] if sources else self.source.state_dict(),
            rounds=self.rounds - len(without),
            launched=self.launched - len(undone),
            trained=self.trained,
            excluded=self.excluded,
            dropped=self.dropped,
            launches_of=dict(+launches_of),
            carried=carried,
            rerolls=list(rerolls.values()),
            rate=self.rate,
        )

    def load(self, state: SchedulerState) -> None:
        self.source.load_state_dict(state.source)
        self.rounds, self.launched = state.rounds, state.launched
        self.trained, self.excluded, self.dropped = state.trained, state.excluded, state.dropped
        self.carried = deque(state.carried)
        self._rerolls = {prompt.prompt_id: prompt for prompt in state.rerolls} if self.reroll is not None else {}
        self.rate = state.rate
        self._launches_of = Counter(state.launches_of)
