"""Completions that are whole trajectories of an environment, each turn sampled by an engine.

    generate -> play(trajectory)      a coroutine on the environments' own loop
                 answer()  -> generate(turn) of the engine, on the rollout loop
                 say(...)      meanwhile others are sampled
    completion <- with its mask, when the coroutine is done

Code of the user runs apart from the engine, so one that blocks holds no other up. A trajectory that waits for its
environment holds nothing: its next turn joins the running batch when it comes. Before a step the engine waits until the
environments have nothing left to run, so that those that answer at once meet it at the same step in every run; one that
takes its time is waited for `SETTLE_S` at most. One that blocks its loop for longer than the limit of a trajectory ends
all trajectories there, and the next ones get another loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import traceback
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial

from swift.errors import EngineError, SwiftError, first_line
from swift.models.template import Template
from swift.rollout.engines.awaited import AwaitedEngine
from swift.rollout.multi_turn.loop import Loop
from swift.rollout.multi_turn.trajectory import Excluded, Limits, OutOfRoom, Trajectory
from swift.rollout.source import Source
from swift.types import Completion, Episode, Request

logger = logging.getLogger("swift.rollout")

SETTLE_S = 0.05
"""How long the engine waits for environments that are at work, once."""
LOOK_S = 1.0
"""How often it is seen whether an environment blocks the others."""
MOST_TURNS = 32
"""Answers of a sample where nothing else is said."""
FIRST_FAILURES = 32
"""When so many trajectories failed and none has come to an end before, the environment is broken."""

Play = Callable[[Trajectory], Awaitable[None]]
"""Drives one trajectory to its end; see `swift.rollout.multi_turn.environments`."""


@dataclass(eq=False)
class TrajectorySource(Source):
    """See the module's docstring.

    Attributes:
        inner: samples each turn.
        template: the policy's.
        limits: of each trajectory.
        play: drives one.
        name: of the environment, for messages.
        limit_s: bound on one trajectory (`--rollout_timeout`); a late one is left out.
    """

    inner: AwaitedEngine
    template: Template
    limits: Limits
    play: Play
    name: str
    limit_s: float = 600.0
    _running: dict[str, asyncio.Future[Completion]] = field(default_factory=dict)
    _tasks: dict[asyncio.Future[Completion], asyncio.Task[None]] = field(default_factory=dict)  # on the other loop
    _turns: dict[asyncio.Task[None], tuple[str, Loop]] = field(default_factory=dict)  # of which trajectory, on which
    _late: int = 0
    _failures: int = 0
    _worked: bool = False
    _environments: Loop | None = None
    _watch: asyncio.Task[None] | None = None

    def __post_init__(self) -> None:
        self.inner.settle = self._settle

    @property
    def late(self) -> int:
        return self._late + super().late

    def close(self) -> None:
        if self._environments is not None:
            self._environments.close()
            self._environments = None

    async def generate(self, request: Request) -> Completion:
        name, rollout = request.request_id, asyncio.get_running_loop()
        self.inner.engine.check_length(request)
        if name in self._running:
            raise EngineError(f"request: {name}: is outstanding already; give each an id of its own")
        if self._environments is None:
            self._environments = Loop()
        environments, ended = self._environments, rollout.create_future()
        self._running[name] = ended
        if self._watch is None:
            self._watch = rollout.create_task(self._watch_the_loop())
        environments.call(self._begin, environments, request, rollout, ended)
        try:
            return await ended
        except asyncio.CancelledError:
            environments.call(self._cancel, ended)
            raise
        finally:
            self._running.pop(name, None)

    # --- on the rollout loop --------------------------------------------------------------------------------------

    async def _sampled(self, environments: Loop, request: Request, answer: asyncio.Future[Completion]) -> None:
        """A turn, whose answer an environment waits for."""
        this = asyncio.current_task()
        assert this is not None
        self._turns[this] = request.request_id.rpartition("#")[0], environments
        try:
            outcome: Completion | Exception = await self.inner.generate(request)
        except Exception as error:
            outcome = error
        finally:
            del self._turns[this]
        environments.call(_end, answer, outcome)

    async def free(self) -> None:
        """Also until turns of trajectories that have ended are over."""
        while ending := [turn for turn, (name, _) in self._turns.items() if name not in self._running]:
            await asyncio.wait(ending)
        await super().free()

    def _settle(self) -> None:
        if self._environments is not None:
            self._environments.settle(SETTLE_S)

    async def _watch_the_loop(self) -> None:
        """Exclude all trajectories of a loop that one of them has blocked for too long."""
        try:
            while self._running:
                await asyncio.sleep(LOOK_S)
                place = self._environments.give_up(self.limit_s) if self._environments is not None else None
                if place is not None:
                    self._leave_loop(f"{place}: blocks the event loop for over --rollout_timeout {self.limit_s:g} s")
        finally:
            self._watch = None

    def _leave_loop(self, told: str) -> None:
        for turn in [turn for turn, (_, loop) in self._turns.items() if loop is self._environments]:
            turn.cancel()
        self._environments, self._tasks = None, {}
        if self._worked:
            logger.warning(
                "warning: %s: %s; use asyncio.to_thread; %d samples are excluded", self.name, told, len(self._running)
            )
        for name, ended in self._running.items():
            if not ended.done():
                self._late += 1
                done = Completion(name, [], [], "stop", episode=Episode([], 0, 0, problem="timeout"))
                _end(ended, self._failed(f"{told}; use asyncio.to_thread") or done)

    # --- on the environments' loop --------------------------------------------------------------------------------

    def _begin(
        self,
        environments: Loop,
        request: Request,
        rollout: asyncio.AbstractEventLoop,
        ended: asyncio.Future[Completion],
    ) -> None:
        played = self._run(environments, request, rollout, ended)
        self._tasks[ended] = asyncio.get_running_loop().create_task(played)

    def _cancel(self, ended: asyncio.Future[Completion]) -> None:
        if (task := self._tasks.get(ended)) is not None:
            asyncio.get_running_loop().call_soon(task.cancel)  # after its first step, so that it has an end

    async def _run(
        self,
        environments: Loop,
        request: Request,
        rollout: asyncio.AbstractEventLoop,
        ended: asyncio.Future[Completion],
    ) -> None:
        """A trajectory from its request to its completion, or to what ends the run."""
        try:
            outcome: Completion | Exception = await self._played(environments, request, rollout)
        except Exception as error:
            outcome = error
        if not environments.given_up:
            del self._tasks[ended]
            with contextlib.suppress(RuntimeError):  # the rollout loop is closed: nobody waits any more
                rollout.call_soon_threadsafe(_end, ended, outcome)

    async def _played(self, environments: Loop, request: Request, rollout: asyncio.AbstractEventLoop) -> Completion:
        """The completion of a request, with the reason where it is not to be trained on."""
        assert request.prompt is not None, "a round sends requests with their rows"
        messages = [dict(one) for one in request.prompt.messages]
        tools = request.prompt.columns.get("tools")
        problem, limit = "", asyncio.timeout(self.limit_s)
        sample = partial(self._answered, environments, rollout)
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
            problem = "cancelled"
        except SwiftError:  # a broken contract, not a sample that failed
            raise
        except BaseException as error:  # of the environment, whatever it raises; its sample is left out
            problem = "timeout" if limit.expired() else type(error).__name__
            if not environments.given_up:
                self._late += limit.expired()
                told = f"took over --rollout_timeout {self.limit_s:g} s" if limit.expired() else _told(error)
                if (broken := self._failed(told)) is not None:
                    raise broken from error
        return trajectory.completion(problem)

    async def _answered(self, environments: Loop, rollout: asyncio.AbstractEventLoop, request: Request) -> Completion:
        """Have the engine sample a turn; one that nobody waits for any more is aborted."""
        if environments.given_up:
            raise asyncio.CancelledError
        answer: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        turn: list[asyncio.Task[None]] = []
        sampled = partial(self._sampled, environments, request, answer)
        rollout.call_soon_threadsafe(lambda: turn.append(rollout.create_task(sampled())))
        try:
            return await answer
        except asyncio.CancelledError:
            with contextlib.suppress(RuntimeError):  # the rollout loop is closed, and has cancelled it
                rollout.call_soon_threadsafe(lambda: rollout.call_soon(turn[0].cancel))  # after its first step
            raise

    def _failed(self, told: str) -> EngineError | None:
        """The first failure is told in full; that of an environment that has never worked ends the run."""
        if self._worked:
            return None
        if self._failures == 0:
            logger.warning("warning: %s: %s; samples whose environment fails take no part in training", self.name, told)
        self._failures += 1
        if self._failures < FIRST_FAILURES:
            return None
        return EngineError(
            f"{self.name}: {told}; the first {FIRST_FAILURES} samples all failed: correct the environment"
        )


def _told(error: BaseException) -> str:
    """What the environment raised, and where."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"raised {type(error).__name__}: {first_line(error)} ({frame.filename}:{frame.lineno})"


def _end(ended: asyncio.Future[Completion], outcome: Completion | Exception) -> None:
    if ended.done():
        return
    if isinstance(outcome, Exception):
        ended.set_exception(outcome)
    else:
        ended.set_result(outcome)
