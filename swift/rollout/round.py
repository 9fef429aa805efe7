"""One round of rollouts on one rank: from launches to scored groups. A fixed round is one without replacements.

Every rank begins with the same launches; each engine samples a consecutive part of their completions. Rank 0 submits a
group to the reward workers as soon as it has all of its completions. In a round of dynamic sampling rank 0 coordinates:
its group filter (`swift.rollout.dynamic_sampling`) gets the scored groups, and it launches replacements on the engine
with the fewest outstanding parts of groups.

    engine e, rank r                       mailbox                     rank 0
    first launches of e  -> sample
    part complete        -> post  "done"   (index, completions)  ->  score -> filter -> launch
    sample               <- read  "work/e" (indexes)             <-  post
    leave                <- read  "work/e" end                   <-  nothing in flight, nothing due

`run` samples the round, one task per completion; it enters no collective and does not use the trainer's model. Prompts
are not sent: each rank draws them from its own scheduler, whose state is equal on all ranks. In lockstep the ranks of
one sharded engine must submit the same requests at the same step: such an engine gets more only when it has finished
all of its requests.

For the watchdog (`swift.trainers.supervision`) a rank that waits for other ranks counts as waiting in a collective. A
rank without progress stops itself, and with it the run.
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
from swift.rollout.round_result import RoundResult, missing, set_scores
from swift.rollout.scheduler import Launch, LaunchLog
from swift.types import Completion, GroupScores, RolloutGroup, TrainerProgress

if TYPE_CHECKING:
    from swift.rollout.batches import PartialBatch
    from swift.rollout.collector import RolloutCollector

READ_S = 0.02
"""Interval between reads of the mailbox, in seconds."""

NO_PROGRESS = TrainerProgress(0, 0, 0.0)


class OtherRankFailed(EngineError):
    """Another rank has failed; that rank raises the error with the reason."""


@dataclass(frozen=True, slots=True)
class EngineShare:
    """The part of every round that this rank's engine samples: part `index` of `count` equal ones.

    reports: whether this rank sends the completions to rank 0; one rank of a tensor-parallel engine does.
    lockstep: whether the engine is sharded over several ranks, which must submit equal requests at the same step.
    """

    index: int = 0
    count: int = 1
    reports: bool = True
    lockstep: bool = False


@dataclass(slots=True, eq=False)
class Round:
    """A round from its first launch to its result, on one rank.

    Args:
        collector: the collector of this rank.
        log: launches of the round; those of a fixed round are in it from the start.
        num_generations: completions per group, G.
        progress: `trainer_state` of reward functions.
        seed_namespace: prefix of the seeds, which differs between training and evaluation.
        group_filter: selects the groups that are dropped and replaced; None replaces none. Rank 0 only, after the
            start.
        draw: draws the next launches of a round with a filter.
        informative, failed: whether a scored group is informative, and whether all of its completions failed.

    Attributes:
        groups: complete groups on this rank, by launch index. parts: launch index -> sample -> completion on this rank.
        failure: the error that ended the round.
        partial_batch: samples of its batch, if the reference passes ran while it was scored.
        result: the scored groups, once they are on every rank. finished: whether it has a result, or has failed.
    """

    collector: RolloutCollector
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
    finished: bool = False
    _is_first_rank: bool = field(init=False)
    _share: EngineShare | None = field(init=False)
    _mailbox: Mailbox | None = field(init=False)  # between the ranks of a round with a filter
    _began: bool = False
    _closed: bool = False  # this rank samples nothing more
    _launches: dict[int, Launch] = field(default_factory=dict)
    _due: list[tuple[int, int]] = field(default_factory=list)  # launch index, sample
    _outstanding: Counter[int] = field(default_factory=Counter)  # launch index -> completions still to be sampled here
    _engines_of: dict[int, set[int]] = field(default_factory=dict)
    _unsent: dict[int, list[int]] = field(default_factory=dict)
    _changed: asyncio.Event = field(default_factory=asyncio.Event)
    _loop: asyncio.AbstractEventLoop | None = None

    def __post_init__(self) -> None:
        self._is_first_rank, self._share = self.collector.collectives.rank == 0, self.collector.share
        self._mailbox = self.collector.mailbox if self.group_filter is not None else None

    # --- sampling -----------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Sample this rank's part of the round, then wait until the engine is free.

        Raises the first error of this rank's engine; errors of rewards and of other ranks are stored in `failure`.
        """
        source = self.collector.source
        assert source is not None
        self._loop = asyncio.get_running_loop()
        try:
            async with asyncio.TaskGroup() as tasks:
                self.begin()
                while True:
                    if not self._closed:
                        self._decide() if self._is_first_rank else self._follow()
                    due, self._due = self._due, []
                    for index, sample in due:
                        tasks.create_task(self._sample(index, sample))
                    if self._closed:
                        break
                    await self._wait_for_change()
        except BaseExceptionGroup as errors:
            with contextlib.suppress(Exception):  # the first error is the one to raise
                await source.free()
            raise _first(errors) from None
        await source.free()

    @property
    def samples_here(self) -> bool:
        """Whether this rank has an engine that samples, or may sample, a part of this round."""
        return self.collector.source is not None and self._share is not None and bool(self._due or not self._closed)

    @property
    def complete(self) -> bool:
        """Whether this rank has finished its part."""
        return self._closed and not self._due and not +self._outstanding

    async def _sample(self, index: int, sample: int) -> None:
        """Sample one completion; the last one of this rank's part of a group completes the part."""
        collector, share = self.collector, self._share
        assert collector.source is not None and share is not None
        request = collector.request(self._launches[index], sample, self.seed_namespace)
        completion = await collector.source.generate(request)
        collector.progress()
        if completion.episode is None:
            completion.text = collector.decode(completion.token_ids)
        part = self.parts.setdefault(index, {})
        part[sample] = completion
        self._outstanding[index] -= 1
        if self._outstanding[index]:
            return
        if self._is_first_rank:
            self._add_part(index, share.index)
        elif self._mailbox is not None and share.reports:
            for count, (number, done) in enumerate(part.items(), 1):
                self._mailbox.post("done", Sampled(index, share.index, number, done, count == len(part)))

    async def _wait_for_change(self) -> None:
        """Wait until a group is scored or sampled here; with other ranks, for `READ_S` at most."""
        for_others = not +self._outstanding and (not self._is_first_rank or bool(self._engines_of))
        with self.collector.collectives.waiting() if for_others else contextlib.nullcontext():
            limit_s = READ_S if self._mailbox is not None else None
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), limit_s)
        self._changed.clear()

    def begin(self) -> None:
        """Draw the first launches, equal on every rank, and assign them to the engines; a second call has no effect."""
        if self._began:
            return
        self._began = True
        if self.group_filter is not None:
            self.draw(self.group_filter.due())
        launches, size, share = self.log.launches, self.num_generations, self._share
        self._launches = {launch.index: launch for launch in launches}
        engines, start = share.count if share is not None else 0, 0
        for engine in range(engines):  # consecutive parts, whose sizes differ by one completion at most
            stop = start + len(launches) * size // engines + (engine < len(launches) * size % engines)
            samples: dict[int, list[int]] = defaultdict(list)
            for i in range(start, stop):
                samples[launches[i // size].index].append(i % size)
            for index, numbers in samples.items():
                self._assign(engine, index, numbers)
            start = stop
        if self.group_filter is None:
            self._closed = True
        elif self._is_first_rank:
            for launch in launches:
                self.group_filter.launch(launch.index)
            if self.group_filter.complete:
                self._end()

    def fail(self, error: Exception) -> None:
        """End the round on this rank, and notify rank 0; the collective that ends the round sends the error."""
        self.failure = self.failure or error
        if self._mailbox is not None and not self._closed and not self._is_first_rank:
            self._mailbox.post("done", Failed(self.collector.collectives.rank))
        if self._is_first_rank:
            self._end()
        self._closed = True
        self._due.clear()
        self._outstanding.clear()

    def tally(self) -> str:
        """The completions that are sampled and scored, of those so far, for people; any thread may call it.

        Of other ranks' completions it has those that have arrived, in a fixed round none before the end.
        """
        sampled, due = sum(map(len, list(self.parts.values()))), sum(list(self._outstanding.values()))
        launched = len(self.log.launches) * self.num_generations
        if len(self.groups) == len(self.log.launches):
            sampled, due = launched, 0
        here = "" if sampled + due == launched else " on this rank"
        done = {index for index, future in list(self.futures.items()) if future.done()}
        done |= {index for index, group in list(self.groups.items()) if group.scores is not None}
        return f"sampling {sampled}/{sampled + due}{here}, rewards {len(done) * self.num_generations}/{launched}"

    # --- during and after sampling ------------------------------------------------------------------------------

    def scored(self) -> list[RolloutGroup]:
        """Scored groups in launch order, up to the first unscored one; on the main thread of rank 0."""
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
        """Whether the reward workers have finished all groups submitted so far; rank 0 only."""
        return all(future.done() for future in list(self.futures.values()))

    def complete_groups(self, parts: Mapping[int, Mapping[int, Completion]]) -> None:
        """Make every group of a fixed round from the completions of all ranks. Raises EngineError: one is missing."""
        for launch in self.log.launches:
            done = parts.get(launch.index, {})
            for sample in range(self.num_generations):
                if sample not in done:
                    raise missing(f"{launch.group_id}/{sample}")
            if launch.index not in self.groups:
                self.groups[launch.index] = self.group(launch.index, [done[i] for i in range(self.num_generations)])

    def catch_up(self, count: int) -> None:
        """Draw launches up to `count` in total, as rank 0 has done."""
        self.begin()
        while len(self.log.launches) < count:
            self._draw_one()

    def group(self, index: int, completions: list[Completion]) -> RolloutGroup:
        launch = self._launches[index]
        return RolloutGroup(launch.group_id, launch.index, launch.launch, launch.prompt, completions)

    # --- launches -----------------------------------------------------------------------------------------------

    def _draw_one(self) -> int:
        [launch] = self.draw(1)
        self._launches[launch.index] = launch
        return launch.index

    def _assign(self, engine: int, index: int, samples: Sequence[int]) -> None:
        """Assign these completions of a launch to an engine; this rank queues those of its own engine."""
        if self._is_first_rank:
            self._engines_of.setdefault(index, set()).add(engine)
        if self._share is None or engine != self._share.index:
            return
        self._due += [(index, sample) for sample in samples]
        self._outstanding[index] += len(samples)

    def _add_part(self, index: int, engine: int) -> None:
        """Record on rank 0 that an engine has sampled its part of a launch; submit a complete group for scoring."""
        self._engines_of[index].discard(engine)
        part = self.parts[index]
        if len(part) < self.num_generations:
            return
        del self._engines_of[index]
        group = self.groups[index] = self.group(index, [part[i] for i in range(self.num_generations)])
        scorer = self.collector.scorer
        if self.failure is not None or (self.group_filter is None and scorer.needs_whole_batch):
            return
        try:
            [self.futures[index]] = scorer.submit([group], self.progress)
        except Exception as error:  # see `_decide`
            self._give_up(error)
        else:
            self.futures[index].add_done_callback(self._wake)
        self._changed.set()

    def _wake(self, future: Future[GroupScores]) -> None:
        """Set `_changed`, from any thread."""
        assert self._loop is not None
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._changed.set)

    def _decide(self) -> None:
        """Filter and replace groups; an error of rewards or of another rank ends the round.

        The collective that ends the round raises the error. Raised here, it would stop this rank in the middle of a
        step of an engine that is sharded over several ranks.
        """
        try:
            self._advance()
        except Exception as error:  # raised by the collective that ends the round
            self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        """Stop launching and scoring; the engines finish their outstanding requests."""
        self.failure = self.failure or error
        self.futures.clear()
        self._end()

    def _advance(self) -> None:
        self._collect()
        assert self.group_filter is not None
        for index in sorted(index for index, future in self.futures.items() if future.done()):
            group = self.groups[index]
            [scores] = self.collector.scorer.add_model_scores([group], [self.futures.pop(index).result()])
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
                self._add_part(message.index, message.engine)

    def _least_loaded(self) -> int:
        assert self._share is not None
        loads = Counter(engine for engines in self._engines_of.values() for engine in engines)
        return min(range(self._share.count), key=lambda engine: loads[engine])

    def _send(self) -> None:
        """Send new launches to their engines; in lockstep only when the engine has finished all of its requests."""
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
        """Read the next launches of this rank's engine; in lockstep one message, once all requests are finished."""
        assert self._mailbox is not None and self._share is not None
        if self._share.lockstep and +self._outstanding:
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


def _first(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    """The first error of nested exception groups."""
    first = errors.exceptions[0]
    return _first(first) if isinstance(first, BaseExceptionGroup) else first
