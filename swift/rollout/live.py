"""One round of dynamic sampling on its way: groups are judged while others decode, and replaced at once.

Rank 0 coordinates. Every rank begins with the same launches, dealt out to the engines in turn. A rank whose engine has
finished a group posts it on the board; rank 0 has it scored, judges it (`swift.rollout.admission`), and posts the
launches that take the place of dropped groups for the engine with the least to do:

    engine e, rank r                       board                       rank 0
    first launches of e  -> sample
    group complete       -> post  "done"   (index, completions)  ->  score -> judge -> launch
    submit               <- read  "work/e" (indexes)             <-  post
    leave                <- read  "work/e" end                   <-  nothing in flight, nothing due

`due` is called between the decode steps of the engine, so nothing here waits, runs a collective or touches the
trainer's model; the board is not a collective (`swift.trainers.board`). Prompts do not travel: each rank draws them
from its own scheduler, which is at the same place on all of them. Where ranks hold parts of one engine they must submit
the same requests at the same step: such an engine gets more only when it has nothing left to do.

A rank with nothing to do waits for as long as any other one gets on, which they say with `beat`; where none does, its
own stall watch ends the wait (`swift.trainers.stall`), and `awaited` says for whom it waited.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Protocol

from swift.errors import EngineError
from swift.rollout.admission import Admission
from swift.rollout.scheduler import Intake, Launch, RolloutScheduler
from swift.types import Completion, GroupScores, Request, RolloutGroup, TrainerProgress

READ_S = 0.02
"""Least time between two looks at the board."""
ALIVE_S = 0.2
"""Time between two beats of a rank that gets on, and between two looks at those of the others."""

END = "end"
FAILED = "failed"


class OtherRankFailed(EngineError):
    """Another rank has failed; its own error says why."""


class Board(Protocol):
    """Messages between ranks outside of collectives, each channel in order."""

    def post(self, channel: str, message: Any) -> None:
        """Add a message."""
        ...

    def read(self, channel: str) -> Any | None:
        """The next message that this rank has not read, or None."""
        ...

    def sweep(self) -> None:
        """Forget the messages that this rank posted; all have been read."""
        ...

    def beat(self) -> None:
        """Say that this rank gets on."""
        ...

    def beats(self) -> int:
        """How often the other ranks have said so."""
        ...


class GroupScorer(Protocol):
    """What is needed of the reward pipeline while groups are sampled."""

    def submit(self, group: RolloutGroup, progress: TrainerProgress) -> Future[GroupScores]:
        """Score a finished group off the main thread."""
        ...

    def add_model_scores(self, groups: Sequence[RolloutGroup], scores: Sequence[GroupScores]) -> list[GroupScores]:
        """Fill in what reward models say."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Seat:
    """Where a rank sits: which of `engines` engines it drives (None: none), and whether it hands completions on.

    lockstep: other ranks hold parts of the same engine.
    """

    rank: int = 0
    engine: int | None = 0
    engines: int = 1
    reports: bool = True
    lockstep: bool = False


@dataclass(slots=True)
class _Part:
    """A group whose completions this rank's engine samples."""

    launch: Launch
    completions: dict[int, Completion] = field(default_factory=dict)


class LiveRound:
    """A round that draws groups until enough of them teach something, on one rank.

    Args:
        admission: decides; the same on every rank at the start, used by rank 0 afterwards.
        scheduler: where launches come from.
        intake: what the round begins with.
        num_generations: G.
        progress: what reward functions see.
        request: (launch, sample) -> the request.
        informative, failed: whether a scored group teaches something, and whether it failed altogether; rank 0 only.
        scorer: scores groups; rank 0 only.
        seat: of this rank.
        board: between ranks; None in a single process.
        pulse: changes while this rank gets on. heard: called when another one does, while this one waits.

    Attributes:
        failure: why it will not be completed.
        before: where launching stood before the first launch, or None.
    """

    def __init__(
        self,
        *,
        admission: Admission,
        scheduler: RolloutScheduler,
        intake: Intake,
        num_generations: int,
        progress: TrainerProgress,
        request: Callable[[Launch, int], Request],
        informative: Callable[[RolloutGroup], bool],
        failed: Callable[[RolloutGroup], bool],
        scorer: GroupScorer,
        seat: Seat,
        board: Board | None = None,
        pulse: Callable[[], Any] = lambda: None,
        heard: Callable[[], None] = lambda: None,
    ) -> None:
        self.admission, self.scheduler, self.intake = admission, scheduler, intake
        self.num_generations, self.progress = num_generations, progress
        self.seat, self.board = seat, board
        self.failure: Exception | None = None
        self.before: dict[str, Any] | None = None
        self.failed = failed
        self.groups: dict[int, RolloutGroup] = {}
        self._request, self._informative, self._scorer = request, informative, scorer
        self._pulse, self._heard = pulse, heard
        self._launches: dict[int, Launch] = {}
        self._parts: dict[str, _Part] = {}
        self._submit: list[Request] = []
        self._open = 0
        self._ended = False
        self._leads = seat.rank == 0
        self._futures: dict[int, Future[GroupScores]] = {}
        self._engine_of: dict[int, int] = {}
        self._queued: dict[int, list[int]] = {engine: [] for engine in range(seat.engines)}
        self._read_at = self._told_at = self._listened_at = 0.0
        self._told: Any = None
        self._beats = 0

    # --- what the one who drives the engine calls ---------------------------------------------------------------

    @property
    def samples_here(self) -> bool:
        """Whether this rank drives an engine."""
        return self.seat.engine is not None

    @property
    def complete(self) -> bool:
        """Whether this rank has nothing more to do."""
        return self._ended and not self._open

    @property
    def outstanding(self) -> list[str]:
        """Requests that the engine was given and that have not come back."""
        waiting = {one.request_id for one in self._submit}
        ids = (f"{name}/{i}" for name, part in self._parts.items() for i in self._missing(part))
        return [one for one in ids if one not in waiting]

    def _missing(self, part: _Part) -> list[int]:
        return [i for i in range(self.num_generations) if i not in part.completions]

    def begin(self) -> None:
        """Draw the first launches, the same on every rank; `due` gives this engine's requests."""
        self.before = self.scheduler.launch_state()
        for position, launch in enumerate(self.scheduler.launch(self.admission.due(), self.intake.rerolls)):
            self._launches[launch.index] = launch
            engine = position % self.seat.engines
            if self._leads:
                self.admission.launch(launch.index)
                self._engine_of[launch.index] = engine
            if engine == self.seat.engine:
                self._add(launch)
        if self._leads and self.admission.complete:
            self._end()

    def due(self) -> list[Request]:
        """What to submit to the engine now; also moves the round along."""
        self._beat()
        if self._leads:
            self._coordinate()
        else:
            self._follow()
        requests, self._submit = self._submit, []
        self._open += len(requests)
        return requests

    def expects(self, request_id: str) -> bool:
        """Whether this rank asked for it and does not have it yet."""
        group_id, _, sample = request_id.rpartition("/")
        part = self._parts.get(group_id)
        return part is not None and sample.isdigit() and int(sample) not in part.completions

    def take(self, completion: Completion) -> None:
        """Add a finished completion."""
        group_id, _, sample = completion.request_id.rpartition("/")
        part = self._parts[group_id]
        part.completions[int(sample)] = completion
        self._open -= 1
        if len(part.completions) == self.num_generations:
            completions = [part.completions[i] for i in range(self.num_generations)]
            self._hand_on(part.launch.index, completions)

    def rest(self) -> None:
        """Wait a moment for scores or other ranks; only with nothing in the engine."""
        now = time.monotonic()
        if self.board is not None and now - self._listened_at >= ALIVE_S:
            self._listened_at = now
            beats = self.board.beats()
            if beats != self._beats:
                self._beats = beats
                self._heard()
        time.sleep(READ_S / 2)

    def _beat(self) -> None:
        """Let the other ranks know, from time to time, that this one gets on."""
        now = time.monotonic()
        if self.board is None or now - self._told_at < ALIVE_S:
            return
        self._told_at = now
        pulse = self._pulse()
        if pulse != self._told:
            self._told = pulse
            self.board.beat()

    def awaited(self) -> str:
        """For whom this rank waits, "" where it has work of its own or the round is over."""
        if self._open or self._ended:
            return ""
        if not self._leads:
            return "the round of dynamic sampling waits for rank 0"
        waiting = Counter(list(self._engine_of.values()))  # asked by another thread than the one that samples
        if waiting:
            parts = (f"{count} of engine {engine}" for engine, count in sorted(waiting.items()))
            return f"the round of dynamic sampling waits for groups: {', '.join(parts)}"
        return f"the round of dynamic sampling waits for the scores of {len(self._futures)} groups"

    def fail(self, error: Exception) -> None:
        """This rank cannot go on; the others learn of it now, and why in the collective that ends the round."""
        self.failure = self.failure or error
        if self.board is not None and not self._ended and not self._leads:
            self.board.post("done", (FAILED, self.seat.rank))
        if self._leads:
            self._end()
        self._ended, self._open = True, 0

    def judged(self) -> list[RolloutGroup]:
        """Groups in launch order, up to the first one that was not judged yet; rank 0 only, from any thread."""
        groups: list[RolloutGroup] = []
        index = self.before["launched"] if self.before is not None else 0
        while self.admission.is_judged(index):
            groups.append(self.groups[index])
            index += 1
        return groups

    def catch_up(self, launched: int) -> None:
        """Draw what other ranks have drawn: every launch below index `launched`."""
        while self.scheduler.launched < launched:
            for launch in self.scheduler.launch(1):
                self._launches[launch.index] = launch

    def group(self, index: int, completions: list[Completion]) -> RolloutGroup:
        """The group of a launch."""
        launch = self._launches[index]
        return RolloutGroup(launch.group_id, launch.index, launch.launch, launch.prompt, completions)

    # --- rank 0 -------------------------------------------------------------------------------------------------

    def _coordinate(self) -> None:
        """Move the round along; what goes wrong with rewards or another rank ends it, and is raised when all have met.

        Not here: ranks that hold parts of this rank's engine would be left alone in the middle of its step.
        """
        if self._ended:
            return
        try:
            self._advance()
        except Exception as error:  # raised by the collective that ends the round
            self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        """Nothing more is launched or scored; what the engines have is sampled to its end."""
        self.failure = self.failure or error
        self._futures.clear()
        self._end()

    def _advance(self) -> None:
        self._collect()
        for index in sorted(index for index, future in self._futures.items() if future.done()):
            group = self.groups[index]
            [group.scores] = self._scorer.add_model_scores([group], [self._futures.pop(index).result()])
            self.admission.judge(index, informative=self._informative(group))
        for launch in self.scheduler.launch(self.admission.due()) if self.admission.due() else ():
            engine = self._least_loaded()
            self._launches[launch.index] = launch
            self.admission.launch(launch.index)
            self._engine_of[launch.index] = engine
            self._queued[engine].append(launch.index)
        self._send_queued()
        if self.admission.complete:
            self._end()

    def _collect(self) -> None:
        """Groups that other ranks have finished."""
        if self.board is None or not self._looks():
            return
        while (message := self.board.read("done")) is not None:
            index, completions = message
            if index == FAILED:
                raise OtherRankFailed(f"engine: rank {completions} cannot go on with this round")
            self._hand_on(index, completions)

    def _looks(self) -> bool:
        """Whether it is time for a look at the board."""
        now = time.monotonic()
        if now - self._read_at < READ_S:
            return False
        self._read_at = now
        return True

    def _hand_on(self, index: int, completions: list[Completion]) -> None:
        """A whole group: to be scored (rank 0), or to rank 0."""
        if not self._leads:
            assert self.board is not None
            if self.seat.reports:
                self.board.post("done", (index, completions))
            return
        self.groups[index] = self.group(index, completions)
        del self._engine_of[index]
        if self.failure is not None:
            return
        try:
            self._futures[index] = self._scorer.submit(self.groups[index], self.progress)
        except Exception as error:  # see `_coordinate`: this may be in the middle of a step of the engine
            self._give_up(error)

    def _least_loaded(self) -> int:
        loads = [0] * self.seat.engines
        for engine in self._engine_of.values():
            loads[engine] += 1
        return loads.index(min(loads))

    def _send_queued(self) -> None:
        """Give the engines what was assigned to them; one in lockstep only when it has finished what it had."""
        for engine, indexes in self._queued.items():
            if not indexes or (self.seat.lockstep and self._busy(engine, indexes)):
                continue
            if self.board is not None:
                self.board.post(f"work/{engine}", list(indexes))
            if engine == self.seat.engine:
                for index in indexes:
                    self._add(self._launches[index])
            indexes.clear()

    def _busy(self, engine: int, queued: Sequence[int]) -> bool:
        return any(where == engine and index not in queued for index, where in self._engine_of.items())

    def _end(self) -> None:
        if not self._ended and self.board is not None:
            for engine in range(self.seat.engines):
                self.board.post(f"work/{engine}", END)
        self._ended = True

    # --- the other ranks ------------------------------------------------------------------------------------------

    def _follow(self) -> None:
        """Read what to sample next; in lockstep one message, and only with nothing left to do."""
        assert self.board is not None and self.seat.engine is not None
        if self._ended or (self.seat.lockstep and (self._open or self._submit)) or not self._looks():
            return
        while (message := self.board.read(f"work/{self.seat.engine}")) is not None:
            if message == END:
                self._ended = True
                return
            for index in message:
                self.catch_up(index + 1)
                self._add(self._launches[index])
            if self.seat.lockstep:
                return

    def _add(self, launch: Launch) -> None:
        """This rank's engine samples the group."""
        self._parts[launch.group_id] = _Part(launch)
        self._submit += [self._request(launch, sample) for sample in range(self.num_generations)]
