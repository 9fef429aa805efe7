"""An engine in this process that decodes step by step, between which other coroutines of the loop run.

    generate(request) -> waits for its completion
    the pump             a coroutine: submits what is new, makes a step, brings completions to their callers

Everything else that is ready runs before a step (`swift.rollout.loop`), so that runs repeat. The time limit of a
request begins with its first token: time in the queue is not counted.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from abc import abstractmethod
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass

from swift.errors import EngineError, RequestRefused, SwiftError
from swift.rollout.engines.base import InferenceEngine
from swift.rollout.loop import idle
from swift.types import Completion, Request

CHECK_S = 0.05
"""Least interval between two checks of time limits, in seconds."""
MAX_TRIES = 2
"""How often a request that exceeds its time limit is sampled."""


@dataclass(slots=True, eq=False)
class _Pending:
    """A request that is outstanding.

    elapsed_s: since its first token. late: it was aborted for its time. withdrawn: `abort` has named it.
    """

    request: Request
    completion: asyncio.Future[Completion]  # a cancelled one until the engine has let go of the request
    elapsed_s: float | None = None
    late: bool = False
    withdrawn: bool = False


class SteppedEngine(InferenceEngine):
    """See the module's docstring. A backend has `submit`, `advance` and `abort_submitted`."""

    def __init__(self) -> None:
        self._new: deque[Request] = deque()
        self._pending: dict[str, _Pending] = {}
        self._to_abort: list[str] = []
        self._step_done: asyncio.Future[None] | None = None  # done when the pump has made a step
        self._pumping: asyncio.Task[None] | None = None
        self._held = False
        self._error: Exception | None = None  # that no caller has been told
        self._checked_at = time.monotonic()

    # --- what a backend has ---------------------------------------------------------------------------------------

    @abstractmethod
    def submit(self, request: Request) -> None:
        """Begin one sample with the next step. Raises as `generate`; the engine stays usable."""

    @abstractmethod
    def advance(self) -> list[Completion] | None:
        """The completions that end with one more step; None when nothing is outstanding, or it is paused."""

    @abstractmethod
    def abort_submitted(self, request_ids: Collection[str] | None) -> None:
        """End what was submitted with the next step, from any thread; see `abort`."""

    # --- one request ----------------------------------------------------------------------------------------------

    async def generate(self, request: Request) -> Completion:
        self.check_length(request)
        name = request.request_id
        tries = MAX_TRIES if request.sampling.exact else 1  # another completion would more often be a short one
        for tries_left in reversed(range(tries)):
            if name in self._pending:
                raise EngineError(f"request: {name}: is outstanding already; give each an id of its own")
            asked = self._pending[name] = _Pending(request, asyncio.get_running_loop().create_future())
            self._new.append(request)
            self._ensure_pump()
            try:
                completion = await asked.completion
            except asyncio.CancelledError:
                self._abandon(request)
                await self._wait_removed(asked)
                raise
            if asked.withdrawn or not asked.late or completion.finish_reason != "abort":
                break
            self.counters.late += 1
            if not tries_left:
                completion.finish_reason = "error"
        return completion

    async def _wait_removed(self, asked: _Pending) -> None:
        """Wait until the engine has removed a cancelled request, or is held."""
        while self._pending.get(asked.request.request_id) is asked:
            self._ensure_pump()
            if self._pumping is None:
                return
            self._step_done = self._step_done or asyncio.get_running_loop().create_future()
            await asyncio.shield(self._step_done)

    def _abandon(self, request: Request) -> None:
        """Withdraw a request that was cancelled."""
        if request in self._new:
            self._new.remove(request)
            del self._pending[request.request_id]
        elif request.request_id in self._pending:
            if not self._to_abort:
                asyncio.get_running_loop().call_soon(self._abort_abandoned)
            self._to_abort.append(request.request_id)

    def _abort_abandoned(self) -> None:
        names, self._to_abort = self._to_abort, []
        with contextlib.suppress(SwiftError):  # an engine that is gone has nothing to abort
            self.abort_submitted(names)

    def abort(self, request_ids: Collection[str] | None = None) -> None:
        chosen = None if request_ids is None else set(request_ids)
        for name, asked in list(self._pending.items()):
            asked.withdrawn = asked.withdrawn or chosen is None or name in chosen
        self.abort_submitted(chosen)

    # --- one after the other --------------------------------------------------------------------------------------

    def hold(self) -> None:
        self._held = True

    async def rest(self) -> None:
        if self._pumping is not None:
            await asyncio.wait([self._pumping])

    def release(self) -> None:
        self._held = False
        self._ensure_pump()

    async def free(self) -> None:
        while self._pumping is not None and all(asked.completion.done() for asked in self._pending.values()):
            await asyncio.wait([self._pumping])
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def empty(self) -> None:
        with contextlib.suppress(Exception):  # what failed before is the one to show
            self.abort_submitted(None)
            while self.advance() is not None:
                pass
        for name in [name for name, asked in self._pending.items() if asked.completion.done()]:
            del self._pending[name]

    # --- the pump -------------------------------------------------------------------------------------------------

    def _ensure_pump(self) -> None:
        if self._pumping is None and self._pending and not self._held:
            self._pumping = asyncio.get_running_loop().create_task(self._pump())
            self._pumping.add_done_callback(_retrieved)

    async def _pump(self) -> None:
        """The only coroutine that submits, advances and empties."""
        try:
            await self._make_steps()
        finally:
            self._pumping = None
            self._tell_step_done()
        self._ensure_pump()  # for what was asked for meanwhile

    async def _make_steps(self) -> None:
        """Steps until nothing is outstanding, or it is held."""
        while not self._held:
            await idle()
            try:
                if self.before_step is not None:
                    self.before_step()
                    await idle()
                if not self._held and self._make_step():
                    return
            except Exception as error:
                self._fail(error)
                if not self._pending:
                    return
            self._tell_step_done()

    def _tell_step_done(self) -> None:
        leaving, self._step_done = self._step_done, None
        if leaving is not None and not leaving.done():
            leaving.set_result(None)

    def _make_step(self) -> bool:
        """One step with what is new; whether nothing is outstanding any more."""
        self._submit_new()
        if late := self._mark_late():
            self.abort_submitted(late)
        done = self.advance()
        for completion in done or ():
            self._deliver(completion)
        if self.after_step is not None:
            self.after_step()
        if done is not None or self._new or self._held:
            return False
        self._check_nothing_is_lost()
        return True

    def _submit_new(self) -> None:
        """What is new goes to the engine; one that it does not take fails alone."""
        while self._new:
            request = self._new.popleft()
            name = request.request_id
            asked = self._pending[name]
            if asked.withdrawn:
                self._deliver(Completion(name, [], [], "abort"))
                continue
            try:
                self.submit(request)
            except Exception as error:
                _raise_in(self._pending.pop(name), error)
            if asked.withdrawn:  # meanwhile, by another thread
                self.abort_submitted([name])

    def _mark_late(self) -> list[str]:
        """Mark the requests that have exceeded their limit since the last check; their ids.

        Each check counts at most a tenth of a limit, so a process that was suspended times out none.
        """
        passed = time.monotonic() - self._checked_at
        if passed < CHECK_S:
            return []
        self._checked_at += passed
        names = []
        for name, asked in self._pending.items():
            if asked.elapsed_s is None:
                asked.elapsed_s = 0.0 if self.so_far(name)[0] else None
                continue
            asked.elapsed_s += min(passed, asked.request.limit_s / 10)
            if asked.elapsed_s > asked.request.limit_s and not asked.late:
                asked.late = True
                names.append(name)
        return names

    def _deliver(self, completion: Completion) -> None:
        asked = self._pending.pop(completion.request_id, None)
        if asked is None:
            raise EngineError(
                f"engine: request {completion.request_id}: it came back twice, or nobody asked for it; "
                "this is a defect of the engine"
            )
        if not asked.completion.done():
            asked.completion.set_result(completion)

    def _check_nothing_is_lost(self) -> None:
        lost = [name for name, asked in self._pending.items() if not asked.completion.done()]
        if lost:
            raise EngineError(f"engine: request {lost[0]}: it never came back; this is a defect of the engine")
        self._pending.clear()

    def _fail(self, error: Exception) -> None:
        """Raise in the callers of submitted requests; requests that were not submitted yet stay."""
        if isinstance(error, RequestRefused) and (refused := self._pending.pop(error.request_id, None)) is not None:
            _raise_in(refused, error)
            return
        self.empty()
        new = {request.request_id for request in self._new}
        told = [_raise_in(self._pending.pop(name), error) for name in list(self._pending) if name not in new]
        if not any(told):
            self._error = error


def _retrieved(pump: asyncio.Task[None]) -> None:
    """Mark the exception of an interrupted step as retrieved: the loop raises it, asyncio need not print it."""
    if not pump.cancelled():
        pump.exception()


def _raise_in(asked: _Pending, error: Exception) -> bool:
    """Whether a caller waited for it."""
    if asked.completion.done():
        return False
    asked.completion.set_exception(error)
    return True
