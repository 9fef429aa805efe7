"""Completions that Atropos environments sample with the policy server.

    generate    the requests of a launch wait for a group; their prompts are placeholders
             <- the next group of the message API, as the completions of the launch that has waited longest

The engine is the policy server: it samples for the environments, not for the requests.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from swift.errors import EngineError, NumericError, SwiftError, first_line
from swift.rollout.engines.base import InferenceEngine
from swift.rollout.engines.process import on_thread
from swift.rollout.engines.wire import Versions
from swift.rollout.loop import idle
from swift.rollout.sources.atropos.api import Group, MessageAPI
from swift.rollout.sources.atropos.groups import GroupReader
from swift.rollout.sources.base import Source
from swift.types import Completion, Request

logger = logging.getLogger("swift.rollout")

LOOK_S = 0.5
"""Maximum pause between two checks for a group, an abort or a dead process, in seconds."""
IDLE_LOOK_S = 1.0
"""Interval between two checks of `max_batches` while no request waits, in seconds."""
LEAKED_FRAC, LEAKED_ROWS = 0.01, 2
"""Share and minimum number of sequences with positive log-probs that end the run."""


@dataclass(eq=False)
class AtroposSource(Source):
    """See the module's docstring.

    Staleness has no limit. With `max_batches` the policy server holds requests of environments back while no request
    waits here and that many batches are ready; held requests are sampled later, with newer weights.

    Attributes:
        engine: the policy server's client.
        api: the message API.
        reader: converts groups to completions.
        check: raises if a process of this run has died.
        versions: policy versions of sampled tokens, as recorded by the policy server.
        hold_back: makes the policy server hold requests of environments back (True) or continue them (False).
        max_batches: number of ready batches at which requests are held back; None is no limit.
    """

    engine: InferenceEngine
    api: MessageAPI
    reader: GroupReader
    check: Callable[[], None] = lambda: None
    versions: Versions = lambda calls: [None] * len(calls)
    hold_back: Callable[[bool], None] = lambda held: None
    max_batches: int | None = None
    _paused: bool = False
    _held: bool = False
    _hold_lock: threading.Lock = field(default_factory=threading.Lock)
    _watching: threading.Thread | None = None
    _closed: threading.Event = field(default_factory=threading.Event)
    _waiting: dict[str, dict[str, asyncio.Future[Completion]]] = field(default_factory=dict)
    """Launch -> its requests without a completion."""
    _reading: asyncio.Task[None] | None = None

    def close(self) -> None:
        """Close the connection to the API."""
        self._closed.set()
        if self._watching is not None:
            self._watching.join(2 * IDLE_LOOK_S)
        self.api.close()

    async def generate(self, request: Request) -> Completion:
        """A sequence of the group for its launch, with the environment's prompt and sampling settings."""
        launch, loop = request.request_id.rpartition("/")[0], asyncio.get_running_loop()
        if request.request_id in self._waiting.get(launch, {}):
            raise EngineError(f"request: {request.request_id}: is outstanding already; give each an id of its own")
        if not self._waiting:
            self.api.begin_wait()
        ended = self._waiting.setdefault(launch, {})[request.request_id] = loop.create_future()
        if self._reading is None:
            self._reading = loop.create_task(self._read_while_waiting())
        try:
            return await ended
        finally:
            self._remove(launch, request.request_id)

    def hold(self) -> None:
        self._paused = True
        super().hold()

    def release(self) -> None:
        super().release()
        self._paused = False

    def _remove(self, launch: str, name: str) -> None:
        wanted = self._waiting.get(launch, {})
        wanted.pop(name, None)
        if not wanted:
            self._waiting.pop(launch, None)

    async def free(self) -> None:
        await super().free()
        if self._reading is not None and not self._waiting:
            await self._reading

    async def _read_while_waiting(self) -> None:
        """Deliver groups to the waiting launches in order; then hold environments back if enough batches are ready."""
        try:
            while self._waiting:
                group = await asyncio.wrap_future(on_thread(self._next, "atropos"))
                if group is not None:
                    await self._deliver(group)
                if not self._waiting and not self._paused:
                    await asyncio.wrap_future(on_thread(lambda: self._hold(True), "atropos"))
            self._watch()
        except Exception as error:
            waiting = [ended for wanted in self._waiting.values() for ended in wanted.values() if not ended.done()]
            for ended in waiting:
                ended.set_exception(error)
            if not waiting:
                raise
        finally:
            self._reading = None

    def _next(self) -> Group | None:
        """On a thread: the next group, or None after one poll or pause."""
        if not self._paused:
            self._hold(False)
        self.check()
        return self.api.next(LOOK_S)

    async def _deliver(self, group: Group) -> None:
        """Deliver a group as the completions of the launch that has waited longest."""
        if not self._waiting:  # aborted during the poll
            self.api.give_back(group)
            return
        wanted = dict(next(iter(self._waiting.values())))
        read = on_thread(lambda: self._completions(group, list(wanted)), "atropos")
        for completion in await asyncio.wrap_future(read):
            if not wanted[completion.request_id].done():
                wanted[completion.request_id].set_result(completion)
        await idle()  # callers with a completion remove their requests

    def drain_metrics(self) -> dict[str, float]:
        counted, self.api.counters = self.api.counters, type(self.api.counters)()
        return {
            "atropos/queue_groups": float(self.api.queue_size),
            **{name: float(count) for name, count in counted.items()},
            **{f"atropos/groups/{name}": float(count) for name, count in self.api.received.copy().items()},
        }

    def _completions(self, group: Group, names: list[str]) -> list[Completion]:
        """On a thread: the completions of a group, for these requests."""
        completions = self.reader.completions(group, names, self.versions)
        if all(completion.episode is not None and completion.episode.problem for completion in completions):
            self.api.counters["atropos/invalid_groups"] += 1
        reader = self.reader
        if reader.leaked >= LEAKED_ROWS and reader.leaked > LEAKED_FRAC * reader.rows:
            raise NumericError(
                f"atropos: {reader.leaked} of {reader.rows} sequences have log-probs above 0 at trained tokens: the "
                "environment sends the filler of masked tokens for them; correct its inference_logprobs"
            )
        return completions

    def _hold(self, idle: bool) -> None:
        """Hold requests of environments back, or continue them; sent again each time, for a restarted server."""
        with self._hold_lock:
            if self._closed.is_set():
                return
            held = idle and self.max_batches is not None and self.api.ready_batches() >= self.max_batches
            if held or self._held:
                self.hold_back(held)
            self._held = held

    def _watch(self) -> None:
        """Start the thread that applies `max_batches` during training, once."""
        if self.max_batches is not None and self._watching is None:
            self._watching = threading.Thread(target=self._hold_while_idle, name="atropos", daemon=True)
            self._watching.start()

    def _hold_while_idle(self) -> None:
        while not self._closed.wait(IDLE_LOOK_S):
            if self._paused or self._waiting:
                continue
            try:
                self._hold(True)  # if a round begins meanwhile, `_next` continues them
            except SwiftError as error:  # the trainer's next call raises for a lost engine
                logger.warning("warning: atropos: environments are not held back: %s", first_line(error))
