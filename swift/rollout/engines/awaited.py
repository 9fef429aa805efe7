"""`await generate(request)` of an engine that is driven by `submit` and `advance`.

    generate(request) -> waits for its completion; a caller that is cancelled aborts it
    the pump             a coroutine: submits what is new, has the engine advance, brings completions to their callers

In a process of its own an engine advances on a thread; here it is one step of the loop, before which everything else
that is ready has run (`swift.rollout.loop`).

A request that takes longer than its limit is aborted and sampled once more, with the same seed; then it ends with
"error", which leaves it out of training. Its time begins with its first token: waiting for room counts against nobody.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable

from swift.errors import EngineDead, EngineError, RequestRefused, SwiftError
from swift.rollout.engines.base import InferenceEngine
from swift.rollout.engines.process import on_thread
from swift.rollout.loop import idle
from swift.types import Completion, Request

LOOK_S = 1.0
"""Longest time between two looks at the clock while the engine gets on."""
RETRY_S = 1.0
"""Pause before an engine is asked again after a failure that lost no request."""
MAX_TRIES = 2
"""How often a request that takes too long is sampled."""


class AwaitedEngine:
    """See the module's docstring; its methods belong to the thread of the loop.

    Args:
        engine: is driven by nobody else meanwhile.
        limit_s: bound on each request; None where the engine has one of its own.
        patient: requests that are still there after a failure wait until the engine can go on; otherwise they fail too.

    Attributes:
        late: requests that took longer, once for each try.
        settle: called before each step; returns when what runs on other threads has asked for what it can.
        stepped: called after each step.
    """

    def __init__(self, engine: InferenceEngine, *, limit_s: float | None = None, patient: bool = False) -> None:
        self.engine, self.patient = engine, patient
        self.late = 0
        self.settle: Callable[[], None] | None = None
        self.stepped: Callable[[], None] | None = None
        self._clock = _Clock(limit_s) if limit_s is not None else None
        self._new: deque[Request] = deque()
        self._asked: dict[str, asyncio.Future[Completion]] = {}  # a cancelled one until the engine has let go of it
        self._to_abort: list[str] = []
        self._came = asyncio.Event()  # of the pump: something was asked for
        self._submitted_beside = False
        self._leaving: asyncio.Future[None] | None = None  # done when the pump has made a step
        self._pumping: asyncio.Task[None] | None = None
        self._held = False
        self._error: Exception | None = None  # that no caller has been told

    async def generate(self, request: Request) -> Completion:
        """One sample.

        Raises:
            PromptTooLong, RequestRefused, Unsupported: the engine does not take it.
            EngineError: the engine failed, or the id is outstanding.
        """
        self.engine.check_length(request)
        for tries in range(MAX_TRIES):
            completion = await self._sampled(request)
            if self._clock is None or not self._clock.has_expired(completion):
                return completion
            self.late += 1
            if tries == MAX_TRIES - 1:
                completion.finish_reason = "error"
        return completion

    def abort(self, names: Collection[str]) -> None:
        """End requests, whose completions then are what they have; unknown ids are ignored."""
        for request in [one for one in self._new if one.request_id in names]:
            self._new.remove(request)
            self._deliver(Completion(request.request_id, [], [], "abort"))
        if running := [name for name in names if name in self._asked]:
            self.engine.abort(running)

    async def free(self) -> None:
        """Until the engine is left alone, unless others keep it busy. Raises what nobody was told."""
        while self._pumping is not None and not self._asked:
            await asyncio.wait([self._pumping])
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def hold(self) -> None:
        """Submit nothing until `release`; for an engine that is about to be paused."""
        self._held = True

    async def rest(self) -> None:
        """Until a held engine is left alone."""
        if self._pumping is not None:
            await asyncio.wait([self._pumping])

    def release(self) -> None:
        """Go on."""
        self._held = False
        self._pump_on()

    # --- one request ----------------------------------------------------------------------------------------------

    async def _sampled(self, request: Request) -> Completion:
        name = request.request_id
        if name in self._asked:
            raise EngineError(f"request: {name}: is outstanding already; give each an id of its own")
        self._asked[name] = asyncio.get_running_loop().create_future()
        self._new.append(request)
        self._pump_on()
        try:
            return await self._asked[name]
        except asyncio.CancelledError:
            self._leave(request)
            while name in self._asked and self._pumping is not None:  # until the engine has let go of it
                self._leaving = self._leaving or asyncio.get_running_loop().create_future()
                await asyncio.shield(self._leaving)
            raise

    def _leave(self, request: Request) -> None:
        """Nobody waits for a request any more."""
        if request in self._new:
            self._new.remove(request)
            del self._asked[request.request_id]
        elif request.request_id in self._asked:
            if not self._to_abort:
                asyncio.get_running_loop().call_soon(self._abort)
            self._to_abort.append(request.request_id)

    def _abort(self) -> None:
        names, self._to_abort = self._to_abort, []
        with contextlib.suppress(SwiftError):  # an engine that is gone has nothing to abort
            self.engine.abort(names)

    # --- the pump -------------------------------------------------------------------------------------------------

    def _pump_on(self) -> None:
        if self._held or not self._asked:
            return
        if self._pumping is None:
            self._pumping = asyncio.get_running_loop().create_task(self._pump())
        self._came.set()

    async def _all_is_asked(self) -> None:
        """Until whatever can ask for something has done so."""
        await idle()
        if self.settle is not None:
            self.settle()
            await idle()

    async def _pump(self) -> None:
        """The only coroutine that submits, advances and empties."""
        self._came = asyncio.Event()
        try:
            await self._pump_steps()
        finally:
            self._pumping = None
            self._tell_leaving()
        self._pump_on()  # for what was asked for meanwhile

    async def _pump_steps(self) -> None:
        """Steps of the engine until nothing is outstanding."""
        while not self._held:
            await self._all_is_asked()
            try:
                if not self._held and await self._step():
                    return
            except Exception as error:
                await self._fail(error)
                if not self._asked:
                    return
            self._tell_leaving()

    def _tell_leaving(self) -> None:
        leaving, self._leaving = self._leaving, None
        if leaving is not None and not leaving.done():
            leaving.set_result(None)

    async def _step(self) -> bool:
        """One step with what is new; whether nothing is outstanding any more."""
        self._submit()
        done = await self._advanced()
        for completion in done or ():
            self._deliver(completion)
        if self.stepped is not None:
            self.stepped()
        if done is not None or self._new or self._held or self._submitted_beside:
            self._submitted_beside = False
            return False
        self._check_nothing_is_lost()
        return True

    def _submit(self) -> None:
        """What is new goes to the engine; one that it does not take fails alone."""
        with self.engine.together():
            while self._new:
                request = self._new.popleft()
                try:
                    self.engine.submit(request)
                except Exception as error:
                    _raise_in(self._asked.pop(request.request_id), error)
        late = self._clock.look(self.engine, self._asked) if self._clock is not None else []
        if late:
            self.engine.abort(late)

    async def _advanced(self) -> list[Completion] | None:
        """What the next step ends; requests that come while it waits for other processes are submitted beside it."""
        if self.engine.in_process:
            return self.engine.advance()
        advancing = self._advancing()
        advancing.add_done_callback(lambda _: self._came.set())
        while not advancing.done():
            self._came.clear()
            await self._came.wait()
            if self._new and not self._held and not advancing.done():
                await self._all_is_asked()
                self._submitted_beside = True
                self._submit()
        return advancing.result()

    def _advancing(self) -> asyncio.Future[list[Completion] | None]:
        return asyncio.wrap_future(on_thread(self.engine.advance, "engines"))

    def _deliver(self, completion: Completion) -> None:
        waiting = self._asked.pop(completion.request_id, None)
        if waiting is None:
            raise EngineError(
                f"engine: request {completion.request_id}: it came back twice, or nobody asked for it; "
                "this is a defect of the engine"
            )
        if not waiting.done():
            waiting.set_result(completion)

    def _check_nothing_is_lost(self) -> None:
        lost = [name for name, waiting in self._asked.items() if not waiting.done()]
        if lost:
            raise EngineError(f"engine: request {lost[0]}: it never came back; this is a defect of the engine")
        self._asked.clear()

    async def _fail(self, error: Exception) -> None:
        """Tell those whose requests are lost; those that the engine does not have yet, or still has, stay."""
        if isinstance(error, RequestRefused) and (refused := self._asked.pop(error.request_id, None)) is not None:
            _raise_in(refused, error)
            return
        left: Collection[str] = ()
        if isinstance(error, SwiftError) and not isinstance(error, EngineDead):
            try:
                left = self.engine.recover()
            except Exception as worse:
                error = worse
        had = self._asked.keys() - {request.request_id for request in self._new}
        lost = [name for name in self._asked if name in had and name not in left]
        if left and not lost and self.patient:
            await asyncio.sleep(RETRY_S)
            return
        if not left or not lost:
            lost = [name for name in self._asked if name in had]
            await self._empty()
        told = [_raise_in(self._asked.pop(name), error) for name in lost]
        if not any(told):
            self._error = error

    async def _empty(self) -> None:
        """Nothing is left in the engine."""
        with contextlib.suppress(Exception):  # the first error is the one to show
            self.engine.abort()
            while (self.engine.advance() if self.engine.in_process else await self._advancing()) is not None:
                pass


def _raise_in(waiting: asyncio.Future[Completion], error: Exception) -> bool:
    """Whether anybody waited."""
    if waiting.done():
        return False
    waiting.set_exception(error)
    return True


class _Clock:
    """When requests have taken too long; a look counts a tenth of the limit at most, as the process may have stood."""

    def __init__(self, limit_s: float) -> None:
        self.limit_s = limit_s
        self._now, self._looked_at = 0.0, time.monotonic()
        self._begun: dict[str, float] = {}
        self._expired: set[str] = set()

    def look(self, engine: InferenceEngine, names: Iterable[str]) -> list[str]:
        """Requests to abort now."""
        passed = time.monotonic() - self._looked_at
        if passed < min(LOOK_S, self.limit_s / 10):
            return []
        self._looked_at += passed
        self._now += min(passed, self.limit_s / 10)
        begun = {name for name in names if name in self._begun or engine.so_far(name)[0]}
        self._begun = {name: self._begun.get(name, self._now) for name in begun}
        late = [name for name, since in self._begun.items() if self._now - since > self.limit_s]
        self._expired.update(late)
        for name in late:
            del self._begun[name]
        return late

    def has_expired(self, completion: Completion) -> bool:
        """Whether it ended for its time."""
        expired = completion.request_id in self._expired
        self._expired.discard(completion.request_id)
        self._begun.pop(completion.request_id, None)
        return expired and completion.finish_reason == "abort"
