"""One round of rollouts on one rank: launches go in, groups come out. A fixed round is one that replaces nothing.

Every rank begins with the same launches; each engine samples a consecutive part of their completions. A group goes to
the reward workers the moment rank 0 has all of its completions. In a round of dynamic sampling rank 0 coordinates: its
group filter (`swift.rollout.dynamic_sampling`) gets the scored groups, and it launches replacements on the engine with
the least to do.

    engine e, rank r                       mailbox                     rank 0
    first launches of e  -> sample
    part complete        -> post  "done"   (index, completions)  ->  score -> filter -> launch
    sample               <- read  "work/e" (indexes)             <-  post
    leave                <- read  "work/e" end                   <-  nothing in flight, nothing due

`run` is the whole of it, one task per completion: nothing there runs a collective or touches the trainer's model.
Prompts do not travel: each rank draws them from its own scheduler, which is at the same place on all of them. Ranks
that hold parts of one engine must ask for the same requests at the same step: such an engine gets more only when it has
nothing left to do.

A rank that waits for others counts as waiting in a collective: one that stands still ends itself, and with it the run
(`swift.trainers.supervision`).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from swift.errors import EngineError
from swift.rollout.dynamic_sampling import GroupFilter
from swift.rollout.mailbox import End, Failed, Mailbox, Sample, Sampled
from swift.rollout.round_result import RoundResult, lost, set_scores
from swift.rollout.scheduler import Launch, LaunchLog
from swift.types import Completion, GroupScores, RolloutGroup, TrainerProgress

if TYPE_CHECKING:
    from swift.rollout.batches import PartialBatch
    from swift.rollout.collector import RolloutCollector

READ_S = 0.02
"""Time between two looks at the mailbox."""

NO_PROGRESS = TrainerProgress(0, 0, 0.0)


class OtherRankFailed(EngineError):
    """Another rank has failed; its own error says why."""


@dataclass(frozen=True, slots=True)
class EngineShare:
    """Which part of every round the engine of this rank samples: part `index` of `count` equal ones.

    reports: this rank hands the completions on; with tensor parallelism over ranks only one of an engine's ranks does.
    lockstep: other ranks hold parts of this engine, so all of them must give it the same requests at the same step.
    """

    index: int = 0
    count: int = 1
    reports: bool = True
    lockstep: bool = False


@dataclass(slots=True, eq=False)
class Round:
    """A round from its first launch to its result, on one rank.

    Args:
        home: the collector of this rank.
        log: what it took from the scheduler; the launches of a fixed round are in it from the start.
        num_generations: G.
        progress: what reward functions see as `trainer_state`.
        seed_namespace: keeps the seeds of evaluation apart from those of training.
        group_filter: decides what is dropped and replaced; None replaces nothing. Used by rank 0 after the start.
        draw: the next launches of a round with a filter.
        informative, failed: whether a scored group is informative, and whether all of its completions failed.

    Attributes:
        groups: those of which this rank has every completion, by launch index. parts: launch index -> sample ->
            completion that this rank has.
        failure: why it will not be completed.
        partial_batch: what was computed for its batch while it was scored.
        result: its scored groups once they are on every rank. settled: it has a result, or its failure was raised.
    """

    home: RolloutCollector
    log: LaunchLog
    num_generations: int = 0
    progress: TrainerProgress = NO_PROGRESS
    seed_namespace: str = ""
    group_filter: GroupFilter | None = None
    draw: Callable[[int], Sequence[Launch]] = lambda count: ()
    informative: Callable[[RolloutGroup], bool] = lambda group: True
    failed: Callable[[RolloutGroup], bool] = lambda group: False
    groups: dict[int, RolloutGroup] = field(default_factory=dict)
    parts: dict[int, dict[int, Completion]] = field(default_factory=dict)
    futures: dict[int, Future[GroupScores]] = field(default_factory=dict)
    failure: Exception | None = None
    partial_batch: PartialBatch | None = None
    result: RoundResult | None = None
    settled: bool = False
    _leads: bool = field(init=False)
    _share: EngineShare | None = field(init=False)
    _mailbox: Mailbox | None = field(init=False)  # between the ranks of a round with a filter
    _began: bool = False
    _closed: bool = False  # nothing further will be sampled here
    _launches: dict[int, Launch] = field(default_factory=dict)
    _due: list[tuple[int, int]] = field(default_factory=list)  # launch index, sample
    _left: Counter[int] = field(default_factory=Counter)  # launch index -> completions that this rank's engine owes
    _engines_of: dict[int, set[int]] = field(default_factory=dict)
    _unsent: dict[int, list[int]] = field(default_factory=dict)
    _news: asyncio.Event = field(default_factory=asyncio.Event)
    _loop: asyncio.AbstractEventLoop | None = None

    def __post_init__(self) -> None:
        self._leads, self._share = self.home.collectives.rank == 0, self.home.share
        self._mailbox = self.home.mailbox if self.group_filter is not None else None

    # --- the story ----------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Sample what falls to this rank's engine, until nothing more will; then the engine is free.

        Raises the first thing that goes wrong here; what goes wrong with rewards or another rank is kept in `failure`.
        """
        assert self.home.source is not None
        self._loop = asyncio.get_running_loop()
        try:
            async with asyncio.TaskGroup() as tasks:
                self.begin()
                self._sample_due(tasks)
                while not self._closed:
                    self._decide() if self._leads else self._follow()
                    self._sample_due(tasks)
                    if not self._closed:
                        await self._something_new()
        except BaseExceptionGroup as errors:
            with contextlib.suppress(Exception):  # the first error is the one to show
                await self.home.source.free()
            raise _first(errors) from None
        await self.home.source.free()

    @property
    def samples_here(self) -> bool:
        """Whether this rank has an engine, and anything to sample or the prospect of it."""
        return self.home.source is not None and self._share is not None and bool(self._due or not self._closed)

    @property
    def complete(self) -> bool:
        """Whether this rank has nothing more to do."""
        return self._closed and not self._due and not +self._left

    def _sample_due(self, tasks: asyncio.TaskGroup) -> None:
        """One task for each completion that was assigned to this rank's engine."""
        due, self._due = self._due, []
        for index, sample in due:
            tasks.create_task(self._sample(index, sample))

    async def _sample(self, index: int, sample: int) -> None:
        assert self.home.source is not None
        request = self.home.request(self._launches[index], sample, self.seed_namespace)
        completion = await self.home.source.generate(request)
        self.home.progress()
        if completion.episode is None:
            completion.text = self.home.decode(completion.token_ids)
        self._take(index, sample, completion)

    async def _something_new(self) -> None:
        """Until a group is scored or sampled here; with other ranks, a moment at most."""
        for_others = not +self._left and (not self._leads or bool(self._engines_of))
        with self.home.collectives.waiting() if for_others else contextlib.nullcontext():
            limit_s = READ_S if self._mailbox is not None else None
            await _until(self._news, limit_s)
        self._news.clear()

    def begin(self) -> None:
        """Draw the first launches, the same on every rank, and share them out; a second call does nothing."""
        if self._began:
            return
        self._began = True
        if self.group_filter is not None:
            self.draw(self.group_filter.due())
        launches, size, share = self.log.launches, self.num_generations, self._share
        self._launches = {launch.index: launch for launch in launches}
        engines = share.count if share is not None else 0
        for engine in range(engines):
            samples: dict[int, list[int]] = defaultdict(list)
            for i in _slice(len(launches) * size, engine, engines):
                samples[launches[i // size].index].append(i % size)
            for index, numbers in samples.items():
                self._assign(engine, index, numbers)
        if self.group_filter is None:
            self._closed = True
        elif self._leads:
            for launch in launches:
                self.group_filter.launch(launch.index)
            if self.group_filter.complete:
                self._end()

    def _take(self, index: int, sample: int, completion: Completion) -> None:
        self.parts.setdefault(index, {})[sample] = completion
        self._left[index] -= 1
        if self._left[index]:
            return
        assert self._share is not None
        if self._leads:
            self._arrived(index, self._share.index)
        elif self._mailbox is not None and self._share.reports:
            own = self.parts[index]
            for number, (sample, one) in enumerate(own.items(), 1):
                self._mailbox.post("done", Sampled(index, self._share.index, sample, one, number == len(own)))

    def fail(self, error: Exception) -> None:
        """This rank cannot go on; the others learn of it now, and why in the collective that ends the round."""
        self.failure = self.failure or error
        if self._mailbox is not None and not self._closed and not self._leads:
            self._mailbox.post("done", Failed(self.home.collectives.rank))
        if self._leads:
            self._end()
        self._closed = True
        self._due.clear()
        self._left.clear()

    # --- while and after it is sampled --------------------------------------------------------------------------

    def scored(self) -> list[RolloutGroup]:
        """Scored groups in launch order, up to the first that is not scored; on the main thread of a rank with all."""
        found: list[RolloutGroup] = []
        for launch in list(self.log.launches):
            group, future = self.groups.get(launch.index), self.futures.get(launch.index)
            fixed = self.group_filter is None
            if fixed and group is not None and group.scores is None and future is not None and future.done():
                if future.exception() is not None:
                    break
                set_scores(group, future.result())
            if group is None or group.scores is None:
                break
            found.append(group)
        return found

    @property
    def all_scored(self) -> bool:
        """Whether nothing that was given to the reward workers so far is still with them; rank 0 only."""
        return all(future.done() for future in list(self.futures.values()))

    def complete_groups(self, parts: Mapping[int, Mapping[int, Completion]]) -> None:
        """Make every group of a fixed round from the completions of all ranks. Raises EngineError: one is missing."""
        for launch in self.log.launches:
            done = parts.get(launch.index, {})
            for sample in range(self.num_generations):
                if sample not in done:
                    raise lost(f"{launch.group_id}/{sample}")
            if launch.index not in self.groups:
                self.groups[launch.index] = self.group(launch.index, [done[i] for i in range(self.num_generations)])

    def catch_up(self, count: int) -> None:
        """Draw what rank 0 has drawn: `count` launches in all."""
        self.begin()
        while len(self.log.launches) < count:
            self._draw_one()

    def group(self, index: int, completions: list[Completion]) -> RolloutGroup:
        launch = self._launches[index]
        return RolloutGroup(launch.group_id, launch.index, launch.launch, launch.prompt, completions)

    # --- inside -------------------------------------------------------------------------------------------------

    def _draw_one(self) -> int:
        [launch] = self.draw(1)
        self._launches[launch.index] = launch
        return launch.index

    def _assign(self, engine: int, index: int, samples: Sequence[int]) -> None:
        """An engine samples these completions of a launch; this rank queues them if the engine is its own."""
        if self._leads:
            self._engines_of.setdefault(index, set()).add(engine)
        if self._share is None or engine != self._share.index:
            return
        self._due += [(index, sample) for sample in samples]
        self._left[index] += len(samples)

    def _arrived(self, index: int, engine: int) -> None:
        """Rank 0 has what an engine sampled of a launch; a group with all of its completions is scored."""
        self._engines_of[index].discard(engine)
        part = self.parts[index]
        if len(part) < self.num_generations:
            return
        del self._engines_of[index]
        group = self.groups[index] = self.group(index, [part[i] for i in range(self.num_generations)])
        scorer = self.home.scorer
        if self.failure is not None or (self.group_filter is None and scorer.needs_whole_batch):
            return
        try:
            self.futures[index] = scorer.submit(group, self.progress)
        except Exception as error:  # see `_decide`
            self._give_up(error)
        else:
            self.futures[index].add_done_callback(self._has_news)
        self._news.set()

    def _has_news(self, future: Future[GroupScores]) -> None:
        """From any thread."""
        assert self._loop is not None
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            self._loop.call_soon_threadsafe(self._news.set)

    def _decide(self) -> None:
        """Move the round along; what goes wrong with rewards or another rank ends it, and is raised when all have met.

        Not here: ranks that hold parts of this rank's engine would be left alone in the middle of its step.
        """
        try:
            self._advance()
        except Exception as error:  # raised by the collective that ends the round
            self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        """Nothing more is launched or scored; what the engines have is sampled to its end."""
        self.failure = self.failure or error
        self.futures.clear()
        self._end()

    def _advance(self) -> None:
        self._collect()
        assert self.group_filter is not None
        for index in sorted(index for index, future in self.futures.items() if future.done()):
            group = self.groups[index]
            [scores] = self.home.scorer.add_model_scores([group], [self.futures.pop(index).result()])
            set_scores(group, scores)
            self.group_filter.scored(index, informative=self.informative(group))
        for _ in range(self.group_filter.due()):
            index, engine = self._draw_one(), self._least_loaded()
            self.group_filter.launch(index)
            self._unsent.setdefault(engine, []).append(index)
            self._engines_of[index] = {engine}
        self._send()
        if self.group_filter.complete:
            self._end()

    def _collect(self) -> None:
        if self._mailbox is None:
            return
        while (message := self._mailbox.read("done")) is not None:
            if isinstance(message, Failed):
                raise OtherRankFailed(f"engine: rank {message.rank} cannot go on with this round")
            assert isinstance(message, Sampled)
            self.parts.setdefault(message.index, {})[message.sample] = message.completion
            if message.last:
                self._arrived(message.index, message.engine)

    def _least_loaded(self) -> int:
        assert self._share is not None
        loads = Counter(engine for engines in self._engines_of.values() for engine in engines)
        return min(range(self._share.count), key=lambda engine: loads[engine])

    def _send(self) -> None:
        """Give the engines what was assigned to them; one in lockstep only when it has finished what it had."""
        assert self._share is not None
        for engine, indexes in self._unsent.items():
            busy = any(engine in engines and index not in indexes for index, engines in self._engines_of.items())
            if not indexes or (self._share.lockstep and busy):
                continue
            if self._mailbox is not None:
                self._mailbox.post(f"work/{engine}", Sample(list(indexes)))
            for index in indexes:
                self._assign(engine, index, range(self.num_generations))
            indexes.clear()

    def _end(self) -> None:
        if not self._closed and self._mailbox is not None and self._share is not None:
            for engine in range(self._share.count):
                self._mailbox.post(f"work/{engine}", End())
        self._closed = True

    def _follow(self) -> None:
        """Read what to sample next; in lockstep one message, and only with nothing left to do."""
        assert self._mailbox is not None and self._share is not None
        if self._share.lockstep and +self._left:
            return
        while (message := self._mailbox.read(f"work/{self._share.index}")) is not None:
            if isinstance(message, End):
                self._closed = True
                return
            assert isinstance(message, Sample)
            for index in message.indexes:
                while index not in self._launches:
                    self._draw_one()
                self._assign(self._share.index, index, range(self.num_generations))
            if self._share.lockstep:
                return


async def _until(event: asyncio.Event, limit_s: float | None) -> None:
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(event.wait(), limit_s)


def _first(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    """The first failure of a group, however deep."""
    first = errors.exceptions[0]
    return _first(first) if isinstance(first, BaseExceptionGroup) else first


def _slice(total: int, part: int, parts: int) -> range:
    """The consecutive part of `total` items that is number `part`; parts differ by at most one item."""
    base, extra = divmod(total, parts)
    start = part * base + min(part, extra)
    return range(start, start + base + (part < extra))
