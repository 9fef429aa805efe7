"""An engine whose completions are whole trajectories of an environment, around the engine that samples each turn.

    submit -> play(trajectory)     a coroutine on the loop's thread
                answer()  -> request of one turn -> the inner engine, in the thread that streams
                say(...)     meanwhile others are sampled
    stream <- Completion with its mask, when the coroutine is done

A trajectory that waits for its environment holds nothing: its next turn joins the running batch when it comes. After
an answer the stream waits until the loop has nothing left to run, so that environments that answer at once meet the
engine at the same step in every run; one that takes its time is waited for `SETTLE_S` at most. One that blocks the loop
for longer than the limit of a trajectory ends all trajectories there, and the next ones get another loop.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import threading
import traceback
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Iterator
from dataclasses import dataclass, field

from swift.errors import EngineError, SwiftError, first_line
from swift.models.template import Template
from swift.rollout.engines.around import EngineAround
from swift.rollout.engines.base import InferenceEngine
from swift.rollout.multi_turn.loop import Loop
from swift.rollout.multi_turn.trajectory import Excluded, Limits, OutOfRoom, Trajectory
from swift.types import Completion, Episode, Request

logger = logging.getLogger("swift.rollout")

SETTLE_S = 0.05
"""How long a stream waits for environments that are at work, once."""
LOOK_S = 1.0
"""How often a waiting stream looks around."""
MOST_TURNS = 32
"""Answers of a sample where nothing else is said."""
FIRST_FAILURES = 32
"""When so many trajectories failed and none has come to an end before, the environment is broken."""

Play = Callable[[Trajectory], Awaitable[None]]
"""Drives one trajectory to its end; see `swift.rollout.multi_turn.environments`."""


@dataclass(slots=True, eq=False)
class _Turn:
    """A turn that was asked for and has not come back."""

    request: Request
    answer: asyncio.Future[Completion]
    loop: Loop


@dataclass(eq=False)
class TrajectoryEngine(EngineAround):
    """An engine of trajectories; weights, sleep and end of `engine` are its owner's business.

    Attributes:
        template: the policy's.
        limits: of each trajectory.
        play: drives one.
        name: of the environment, for messages.
        limit_s: bound on one trajectory (`--rollout_timeout`); a late one is left out.
    """

    engine: InferenceEngine
    template: Template
    limits: Limits
    play: Play
    name: str
    limit_s: float = 600.0
    _running: dict[str, asyncio.Task[None] | None] = field(default_factory=dict)  # by request id; None is not begun
    _asked: deque[_Turn] = field(default_factory=deque)
    _turns: dict[str, _Turn] = field(default_factory=dict)  # in the inner engine
    _ready: deque[Completion] = field(default_factory=deque)
    _late: int = 0
    _failures: int = 0
    _worked: bool = False
    _broken: Exception | None = None
    _news: threading.Event = field(default_factory=threading.Event)
    _loop: Loop | None = None

    @property
    def late(self) -> int:  # type: ignore[override]
        """Completions that were given up because they took too long."""
        return self._late + self.engine.late

    def close(self) -> None:
        """End what runs; the engine is closed by its owner."""
        if self._loop is not None:
            self._loop.close()
            self._loop = None

    # --- sampling -------------------------------------------------------------------------------------------------

    def submit(self, request: Request) -> None:
        self.check_length(request)
        self._refuse_again(request, self._running)
        if self._loop is None:
            self._loop = Loop()
        self._running[request.request_id] = None
        self._loop.call(self._begin, self._loop, request)

    def stream(self) -> Iterator[Completion]:
        while True:
            self._between()
            self._settle()
            self._news.clear()
            busy = bool(self._running or self._turns)  # before what is ready, or the last may come in between
            yield from self._come()
            if self._paused or not busy:
                return
            self._feed()
            if self._turns:
                yield from self._sample()
            elif not self._ready:
                self._news.wait(self._patience(LOOK_S))
                self._leave_blocked_loop()

    def abort(self, request_ids: Collection[str] | None = None) -> None:
        for name in list(self._running):
            if self._loop is not None and (request_ids is None or name in request_ids):
                self._loop.call(self._cancel, name)

    # --- in the thread that streams -------------------------------------------------------------------------------

    def _sample(self) -> Iterator[Completion]:
        """Sample the turns that are asked for, and those that come meanwhile."""

        def hook() -> None:
            self._between()
            self._feed()

        self.engine.between_steps = hook
        try:
            for done in self.engine.stream():
                self._deliver(done)
                self._settle()
                yield from self._come()
        finally:
            self.engine.between_steps = None

    def _come(self) -> Iterator[Completion]:
        """What is finished; raises what ends the run, before the caller has all that it waits for."""
        while True:
            if self._broken is not None:
                error, self._broken = self._broken, None
                raise error
            if not self._ready:
                return
            yield self._ready.popleft()

    def _feed(self) -> None:
        """Give the inner engine the turns that were asked for."""
        while self._asked:
            turn = self._asked.popleft()
            if turn.answer.cancelled():
                continue
            self._turns[turn.request.request_id] = turn
            self.engine.submit(turn.request)

    def _deliver(self, done: Completion) -> None:
        """Hand an answer to its trajectory."""
        turn = self._turns.pop(done.request_id)
        turn.loop.call(_resolve, turn.answer, done)

    def _settle(self) -> None:
        if self._loop is not None:
            self._loop.settle(SETTLE_S)

    def _leave_blocked_loop(self) -> None:
        """Exclude all trajectories of a loop that one of them has blocked for too long."""
        place = self._loop.give_up(self.limit_s) if self._loop is not None else None
        if place is None:
            return
        self._loop, running, self._running = None, self._running, {}
        told = f"{place}: blocks the event loop for over --rollout_timeout {self.limit_s:g} s; use asyncio.to_thread"
        if self._worked:
            logger.warning("warning: %s: %s; %d samples are excluded", self.name, told, len(running))
        for name in running:
            self._late += 1
            self._failed(told)
            self._ready.append(Completion(name, [], [], "stop", episode=Episode([], 0, 0, problem="timeout")))

    # --- in the thread of the loop --------------------------------------------------------------------------------

    def _begin(self, loop: Loop, request: Request) -> None:
        self._running[request.request_id] = asyncio.get_running_loop().create_task(self._run(loop, request))

    def _cancel(self, name: str) -> None:
        if (task := self._running.get(name)) is not None:
            asyncio.get_running_loop().call_soon(task.cancel)  # after its first step, so that it has an end

    async def _run(self, loop: Loop, request: Request) -> None:
        """A trajectory from its request to its completion; whatever is raised, there is one."""
        completion = Completion(request.request_id, [], [], "error")
        try:
            completion = await self._played(loop, request)
        except Exception as error:  # a defect, raised in the thread that streams
            self._broken = self._broken or error
        finally:
            if not loop.given_up:
                self._ready.append(completion)
                del self._running[request.request_id]
                self._news.set()

    async def _played(self, loop: Loop, request: Request) -> Completion:
        """The completion of a request, with the reason where it is not to be trained on."""
        assert request.prompt is not None, "the collector sends requests with their rows"
        messages = [dict(one) for one in request.prompt.messages]
        tools = request.prompt.columns.get("tools")
        problem, aborted, limit = "", False, asyncio.timeout(self.limit_s)
        sample = functools.partial(self._answered, loop)
        trajectory = Trajectory(request, self.template, sample, self.limits, messages, tools=tools, clock=limit)
        try:
            async with limit:
                await self.play(trajectory)
            self._worked = True
        except OutOfRoom:
            self._worked = True
        except Excluded as reason:
            self._worked, problem = True, str(reason)
        except asyncio.CancelledError:
            aborted = True
        except SwiftError as error:  # a broken contract, not a sample that failed
            self._broken, problem = self._broken or error, "error"
        except BaseException as error:  # of the environment, whatever it raises; its sample is left out
            problem = "timeout" if limit.expired() else type(error).__name__
            if not loop.given_up:
                self._late += limit.expired()
                self._failed(f"took over --rollout_timeout {self.limit_s:g} s" if limit.expired() else _told(error))
        completion = trajectory.completion(problem)
        if aborted:
            completion.finish_reason = "abort"
        return completion

    async def _answered(self, loop: Loop, request: Request) -> Completion:
        """Have the thread that streams sample a turn; one that nobody waits for any more is aborted."""
        if loop.given_up:
            raise asyncio.CancelledError
        turn = _Turn(request, asyncio.get_running_loop().create_future(), loop)
        self._asked.append(turn)
        self._news.set()
        try:
            return await turn.answer
        except asyncio.CancelledError:
            if not loop.given_up:  # else the id may be that of another turn by now
                self.engine.abort([request.request_id])
            raise

    def _failed(self, told: str) -> None:
        """The first failure is told in full; an environment that has never worked ends the run."""
        if self._worked:
            return
        if self._failures == 0:
            logger.warning("warning: %s: %s; samples whose environment fails take no part in training", self.name, told)
        self._failures += 1
        if self._failures >= FIRST_FAILURES:
            self._broken = self._broken or EngineError(
                f"{self.name}: {told}; the first {FIRST_FAILURES} samples all failed: correct the environment"
            )


def _told(error: BaseException) -> str:
    """What the environment raised, and where."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"raised {type(error).__name__}: {first_line(error)} ({frame.filename}:{frame.lineno})"


def _resolve(answer: asyncio.Future[Completion], done: Completion) -> None:
    if not answer.cancelled():
        answer.set_result(done)
