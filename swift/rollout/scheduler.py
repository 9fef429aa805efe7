"""Which prompts are sampled next, and what has become of those sampled before. Pure: no engine, clock or device.

Every launch takes the next launch index and, as a rule, the next prompt of the stream. An index ends exactly once:
trained, excluded, or dropped because its group has zero variance (dynamic sampling, replay). Groups that dynamic
sampling kept beyond what a batch wanted are carried: they wait here for the next round. At every moment

    launched == trained + excluded + dropped + carried + in flight

A round samples the groups of one rollout batch: one generation batch, or several when one optimizer step needs several.
What does not fill the last batch of an epoch is left out of that epoch; with dynamic sampling, whose rounds draw as
many prompts as they need, epochs follow each other without a gap.

Re-roll (`RerollConfig`): prompts on which every completion failed wait in a bounded queue without duplicates and take
the last of the first launches of a later round; the prompts they displace come next.
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
"""Most prompts that wait for a re-roll; the oldest one makes room."""


@dataclass(frozen=True, slots=True)
class Launch:
    """A group to sample. `launch` counts the earlier launches of this prompt (it goes into the seeds)."""

    index: int
    launch: int
    prompt: Prompt

    @property
    def group_id(self) -> str:
        return f"{self.prompt.prompt_id}-{self.launch}"


@dataclass(frozen=True, slots=True, kw_only=True)
class RerollConfig:
    """When prompts are re-rolled: at most `max_groups` per round, from optimizer step `start_step` (from 1) on."""

    start_step: int
    max_groups: int = 1


@dataclass(slots=True)
class LaunchLog:
    """What one round took from the scheduler: enough to put it back.

    carried: groups of earlier rounds. rerolls: prompts to sample again. launches: in launch order. source: state of the
    prompt stream before the first of them; None before.
    """

    carried: list[RolloutGroup] = field(default_factory=list)
    rerolls: list[Prompt] = field(default_factory=list)
    launches: list[Launch] = field(default_factory=list)
    source: dict[str, Any] | None = None


class SchedulerState(msgspec.Struct):
    """What a checkpoint holds of a scheduler."""

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
    """Hands out launches and keeps the books.

    source: the prompt stream. groups_per_batch: of one rollout batch. batches_per_epoch: whole ones; None without
    epochs (streaming data, dynamic sampling). reroll: sampling failed prompts again; None is off. saves_prompts:
    prompts can get into checkpoints, so their columns must be plain data. rate: moving average of the share of
    informative groups.
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
        """Launches that have not ended and are not carried."""
        return self.launched - self.trained - self.excluded - self.dropped - len(self.carried)

    def begin_round(self, step: int) -> LaunchLog:
        """What the next round, for optimizer step `step` (from 1), begins with."""
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
        new = [self._launch(self._next_prompt()) for _ in range(count - len(rerolls))]
        new += [self._launch(prompt) for prompt in rerolls]
        log.launches += new
        return new

    def _next_prompt(self) -> Prompt:
        prompt = self.source.next()
        if self.saves_prompts:
            require_plain(prompt)
        return prompt

    def _launch(self, prompt: Prompt) -> Launch:
        earlier = self._launches_of[prompt.prompt_id]
        self._launches_of[prompt.prompt_id] += 1
        launch = Launch(self.launched, earlier, prompt)
        self.launched += 1
        return launch

    def end_round(self, *, trained: int, excluded: int, dropped: int = 0) -> None:
        self.trained += trained
        self.excluded += excluded
        self.dropped += dropped
        assert self.in_flight >= 0, "a launch ended twice"

    def carry(self, groups: Sequence[RolloutGroup]) -> None:
        """Keep groups for the next round that begins."""
        self.carried.extend(groups)

    def queue_reroll(self, prompt: Prompt) -> None:
        """Queue a prompt on which every completion failed; one that waits already keeps its place."""
        if self.reroll is None or prompt.prompt_id in self._rerolls:
            return
        if len(self._rerolls) >= REROLL_QUEUE:
            del self._rerolls[next(iter(self._rerolls))]
        self._rerolls[prompt.prompt_id] = prompt

    @property
    def rerolls_waiting(self) -> int:
        return len(self._rerolls)

    def state(self, without: Sequence[LaunchLog] = ()) -> SchedulerState:
        """A copy of the state, as if the last rounds, those of `without`, had not begun; what has ended stays ended."""
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
        self._rerolls = {one.prompt_id: one for one in state.rerolls} if self.reroll is not None else {}
        self.rate = state.rate
        self._launches_of = Counter(state.launches_of)
