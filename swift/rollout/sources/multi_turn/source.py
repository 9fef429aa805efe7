"""Completions that are multi-turn trajectories of an environment, each turn sampled by an engine.

    generate -> play(trajectory)      a coroutine on the event loop of the environments
                 answer()             -> generate(turn) of the engine, on the rollout loop
                 add_messages(...)       while other trajectories are sampled
    completion <- with its mask, at the end of the coroutine

The user's code runs on another thread than the engine, which it cannot block. A trajectory that waits for its
environment uses no resources of the engine: its next turn joins the running batch. Before a step the engine waits until
the event loop of the environments is idle, so that environments without delay join at the same step in every run; it
waits for `IDLE_WAIT_S` at most. An environment that blocks the event loop for longer than the limit of a trajectory
ends all trajectories on that loop; further trajectories get a new loop.
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
from swift.rollout.engines.base import InferenceEngine
from swift.rollout.sources.base import Source
from swift.rollout.sources.multi_turn.loop import EnvironmentLoop
from swift.rollout.sources.multi_turn.trajectory import Excluded, Limits, OutOfRoom, Trajectory
from swift.types import Completion, Episode, Request

logger = logging.getLogger("swift.rollout")

IDLE_WAIT_S = 0.05
"""Maximum wait of the engine for running environments, in seconds."""
LOOK_S = 1.0
"""Interval of the check for an environment that blocks the others, in seconds."""
DEFAULT_MAX_TURNS = 32
"""Default of the maximum number of answers per sample."""
FIRST_FAILURES = 32
"""Number of failed trajectories at the start of a run that stop it if none has succeeded."""

Play = Callable[[Trajectory], Awaitable[None]]
"""Runs one trajectory to its end; see `swift.rollout.sources.multi_turn.environments`."""


@dataclass(eq=False)
class TrajectorySource(Source):
    """See the module's docstring.

    Attributes:
        engine: samples each turn.
        template: the policy's chat template.
        limits: limits of each trajectory.
        play: runs one trajectory.
        name: name of the environment, for messages.
        limit_s: time limit of a trajectory (`--rollout_timeout`); one that exceeds it is excluded.
    """

    engine: InferenceEngine
    template: Template
    limits: Limits
    play: Play
    name: str
    limit_s: float = 600.0
    _running: dict[str, asyncio.Future[Completion]] = field(default_factory=dict)
    _tasks: dict[asyncio.Future[Completion], asyncio.Task[None]] = field(default_factory=dict)
    """Completion -> task of its trajectory, on the environments' loop."""
    _turns: dict[asyncio.Task[None], tuple[str, EnvironmentLoop]] = field(default_factory=dict)
    """Task of a turn -> id of its trajectory, loop of its environment."""
    _late: int = 0
    _failures: int = 0
    _any_succeeded: bool = False
    _environments: EnvironmentLoop | None = None
    _watch: asyncio.Task[None] | None = None

    def __post_init__(self) -> None:
        self.engine.before_step = self._wait_for_environments

    @property
    def late(self) -> int:
        return self._late + super().late

    def close(self) -> None:
        if self._environments is not None:
            self._environments.close()
            self._environments = None

    async def generate(self, request: Request) -> Completion:
        name, rollout_loop = request.request_id, asyncio.get_running_loop()
        self.engine.check_length(request)
        if name in self._running:
            raise EngineError(f"request: {name}: is outstanding already; give each an id of its own")
        if self._environments is None:
            self._environments = EnvironmentLoop()
        environments, ended = self._environments, rollout_loop.create_future()
        self._running[name] = ended
        if self._watch is None:
            self._watch = rollout_loop.create_task(self._watch_the_loop())
        environments.call(self._begin, environments, request, rollout_loop, ended)
        try:
            return await ended
        except asyncio.CancelledError:
            environments.call(self._cancel, ended)
            raise
        finally:
            self._running.pop(name, None)

    # --- on the rollout loop --------------------------------------------------------------------------------------

    async def _sample_turn(
        self, environments: EnvironmentLoop, request: Request, answer: asyncio.Future[Completion]
    ) -> None:
        """Sample a turn, and set `answer` on the environments' loop."""
        task = asyncio.current_task()
        assert task is not None
        self._turns[task] = request.request_id.rpartition("#")[0], environments
        try:
            outcome: Completion | Exception = await self.engine.generate(request)
        except Exception as error:
            outcome = error
        finally:
            del self._turns[task]
        environments.call(_end, answer, outcome)

    async def free(self) -> None:
        """Also wait for turns of trajectories that have ended."""
        while ending := [turn for turn, (name, _) in self._turns.items() if name not in self._running]:
            await asyncio.wait(ending)
        await super().free()

    def _wait_for_environments(self) -> None:
        if self._environments is not None:
            self._environments.wait_until_idle(IDLE_WAIT_S)

    async def _watch_the_loop(self) -> None:
        """Exclude all trajectories of a loop that one of them blocks for longer than the limit."""
        try:
            while self._running:
                await asyncio.sleep(LOOK_S)
                place = self._environments.give_up(self.limit_s) if self._environments is not None else None
                if place is not None:
                    self._leave_loop(f"{place}: blocks the event loop for over --rollout_timeout {self.limit_s:g} s")
        finally:
            self._watch = None

    def _leave_loop(self, reason: str) -> None:
        for turn in [turn for turn, (_, loop) in self._turns.items() if loop is self._environments]:
            turn.cancel()
        self._environments, self._tasks = None, {}
        if self._any_succeeded:
            logger.warning(
                "warning: %s: %s; use asyncio.to_thread; %d samples are excluded", self.name, reason, len(self._running)
            )
        for name, ended in self._running.items():
            if not ended.done():
                self._late += 1
                done = Completion(name, [], [], "stop", episode=Episode([], 0, 0, problem="timeout"))
                _end(ended, self._count_failure(f"{reason}; use asyncio.to_thread") or done)

    # --- on the environments' loop --------------------------------------------------------------------------------

    def _begin(
        self,
        environments: EnvironmentLoop,
        request: Request,
        rollout_loop: asyncio.AbstractEventLoop,
        ended: asyncio.Future[Completion],
    ) -> None:
        running = self._run(environments, request, rollout_loop, ended)
        self._tasks[ended] = asyncio.get_running_loop().create_task(running)

    def _cancel(self, ended: asyncio.Future[Completion]) -> None:
        if (task := self._tasks.get(ended)) is not None:
            asyncio.get_running_loop().call_soon(task.cancel)  # after its first step, so that its cleanup runs

    async def _run(
        self,
        environments: EnvironmentLoop,
        request: Request,
        rollout_loop: asyncio.AbstractEventLoop,
        ended: asyncio.Future[Completion],
    ) -> None:
        """Run a trajectory, and set its completion, or the error that stops the run, on the rollout loop."""
        try:
            outcome: Completion | Exception = await self._play_request(environments, request, rollout_loop)
        except Exception as error:
            outcome = error
        if not environments.given_up:
            del self._tasks[ended]
            with contextlib.suppress(RuntimeError):  # the rollout loop is closed
                rollout_loop.call_soon_threadsafe(_end, ended, outcome)

    async def _play_request(
        self, environments: EnvironmentLoop, request: Request, rollout_loop: asyncio.AbstractEventLoop
    ) -> Completion:
        """The completion of a request, with the reason if it is excluded."""
        assert request.prompt is not None, "a request without its row"
        messages = [dict(message) for message in request.prompt.messages]
        tools = request.prompt.columns.get("tools")
        problem, limit = "", asyncio.timeout(self.limit_s)
        sample = partial(self._request_turn, environments, rollout_loop)
        trajectory = Trajectory(request, self.template, sample, self.limits, messages, tools=tools, clock=limit)
        try:
            async with limit:
                await self.play(trajectory)
            self._any_succeeded = True
        except OutOfRoom:
            self._any_succeeded = True
        except Excluded as reason:
            self._any_succeeded, problem = True, str(reason)
        except asyncio.CancelledError:
            problem = "cancelled"
        except SwiftError:  # an error of the run, not of one sample
            raise
        except BaseException as error:  # any error of the environment; its sample is excluded
            problem = "timeout" if limit.expired() else type(error).__name__
            if not environments.given_up:
                self._late += limit.expired()
                late = f"took over --rollout_timeout {self.limit_s:g} s"
                failed = self._count_failure(late if limit.expired() else _description(error))
                if failed is not None:
                    raise failed from error
        return trajectory.completion(problem)

    async def _request_turn(
        self, environments: EnvironmentLoop, rollout_loop: asyncio.AbstractEventLoop, request: Request
    ) -> Completion:
        """Sample a turn on the rollout loop; cancelling the caller aborts it."""
        if environments.given_up:
            raise asyncio.CancelledError
        answer: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        turn: list[asyncio.Task[None]] = []
        sample = partial(self._sample_turn, environments, request, answer)
        rollout_loop.call_soon_threadsafe(lambda: turn.append(rollout_loop.create_task(sample())))
        try:
            return await answer
        except asyncio.CancelledError:
            # cancel the turn after its first step; if the rollout loop is closed, the turn is cancelled already
            with contextlib.suppress(RuntimeError):
                rollout_loop.call_soon_threadsafe(lambda: rollout_loop.call_soon(turn[0].cancel))
            raise

    def _count_failure(self, reason: str) -> EngineError | None:
        """Count a failure, and log the first one. Returns an error after `FIRST_FAILURES` without a success."""
        if self._any_succeeded:
            return None
        if self._failures == 0:
            logger.warning(
                "warning: %s: %s; samples whose environment fails are excluded from training", self.name, reason
            )
        self._failures += 1
        if self._failures < FIRST_FAILURES:
            return None
        return EngineError(
            f"{self.name}: {reason}; the first {FIRST_FAILURES} samples all failed: correct the environment"
        )


def _description(error: BaseException) -> str:
    """Description of an error of an environment, with file and line."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"raised {type(error).__name__}: {first_line(error)} ({frame.filename}:{frame.lineno})"


def _end(ended: asyncio.Future[Completion], outcome: Completion | Exception) -> None:
    if ended.done():
        return
    if isinstance(outcome, Exception):
        ended.set_exception(outcome)
    else:
        ended.set_result(outcome)
