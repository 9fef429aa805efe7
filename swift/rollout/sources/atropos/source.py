"""Completions that Atropos environments made with the policy server.

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
from swift.rollout.sources.engine import Source
from swift.types import Completion, Request

logger = logging.getLogger("swift.rollout")

LOOK_S = 0.5
"""How often a wait for a group looks around."""
IDLE_LOOK_S = 1.0
"""How often, while nothing is waited for, it is seen whether environments have made enough."""
LEAKED_FRAC, LEAKED_ROWS = 0.01, 2
"""Share and least number of sequences with positive log-probs that end the run."""


@dataclass(eq=False)
class AtroposSource(Source):
    """See the module's docstring.

    Nothing is too old to be trained on. With `max_batches` the policy server holds back what environments ask for while
    nothing is waited for and so many batches are there already; weights are newer when it goes on.

    Attributes:
        inner: the policy server's client.
        api: of the environments.
        reader: makes completions of groups.
        check: raises if a process that this run needs has died.
        versions: the policy server's memory of what sampled which tokens.
        hold_back: has the policy server keep requests of environments waiting, or not.
        max_batches: batches that may be there; None for any number.
    """

    inner: InferenceEngine
    api: MessageAPI
    reader: GroupReader
    check: Callable[[], None] = lambda: None
    versions: Versions = lambda asked: [None] * len(asked)
    hold_back: Callable[[bool], None] = lambda held: None
    max_batches: int | None = None
    _paused: bool = False
    _held: bool = False
    _holding: threading.Lock = field(default_factory=threading.Lock)
    _watching: threading.Thread | None = None
    _closed: threading.Event = field(default_factory=threading.Event)
    _waiting: dict[str, dict[str, asyncio.Future[Completion]]] = field(default_factory=dict)
    """Launch -> its requests that have no completion yet."""
    _reading: asyncio.Task[None] | None = None

    def close(self) -> None:
        """End the connection to the API."""
        self._closed.set()
        if self._watching is not None:
            self._watching.join(2 * IDLE_LOOK_S)
        self.api.close()

    async def generate(self, request: Request) -> Completion:
        """A sequence of the group for its launch: environments have prompts and distributions of their own."""
        launch, loop = request.request_id.rpartition("/")[0], asyncio.get_running_loop()
        if request.request_id in self._waiting.get(launch, {}):
            raise EngineError(f"request: {request.request_id}: is outstanding already; give each an id of its own")
        if not self._waiting:
            self.api.begin_wait()
        ended = self._waiting.setdefault(launch, {})[request.request_id] = loop.create_future()
        if self._reading is None:
            self._reading = loop.create_task(self._read_while_asked())
        try:
            return await ended
        finally:
            self._leave(launch, request.request_id)

    def hold(self) -> None:
        self._paused = True
        super().hold()

    def release(self) -> None:
        super().release()
        self._paused = False

    def _leave(self, launch: str, name: str) -> None:
        wanted = self._waiting.get(launch, {})
        wanted.pop(name, None)
        if not wanted:
            self._waiting.pop(launch, None)

    async def free(self) -> None:
        await super().free()
        if self._reading is not None and not self._waiting:
            await self._reading

    async def _read_while_asked(self) -> None:
        """Groups for the launches that wait, one after the other; then environments may have to wait."""
        try:
            while self._waiting:
                group = await asyncio.wrap_future(on_thread(self._next, "atropos"))
                if group is not None:
                    await self._take(group)
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
        """On a thread: the next group, if one comes soon."""
        if not self._paused:
            self._hold(False)
        self.check()
        return self.api.next(LOOK_S)

    async def _take(self, group: Group) -> None:
        """A group becomes the completions of the launch that has waited longest."""
        if not self._waiting:  # aborted while the API was asked
            self.api.give_back(group)
            return
        wanted = dict(next(iter(self._waiting.values())))
        made = await asyncio.wrap_future(on_thread(lambda: self._made(group, list(wanted)), "atropos"))
        for completion in made:
            if not wanted[completion.request_id].done():
                wanted[completion.request_id].set_result(completion)
        await idle()  # those who have their completions leave

    def drain_metrics(self) -> dict[str, float]:
        counted, self.api.counters = self.api.counters, type(self.api.counters)()
        return {
            "atropos/queue_groups": float(self.api.queue_size),
            **{name: float(count) for name, count in counted.items()},
            **{f"atropos/groups/{name}": float(count) for name, count in self.api.received.copy().items()},
        }

    def _made(self, group: Group, names: list[str]) -> list[Completion]:
        """On a thread: the completions of a group, for these requests."""
        made = self.reader.completions(group, names, self.versions)
        if all(one.episode is not None and one.episode.problem for one in made):
            self.api.counters["atropos/invalid_groups"] += 1
        reader = self.reader
        if reader.leaked >= LEAKED_ROWS and reader.leaked > LEAKED_FRAC * reader.rows:
            raise NumericError(
                f"atropos: {reader.leaked} of {reader.rows} sequences have log-probs above 0 at trained tokens: the "
                "environment sends the filler of masked tokens for them; correct its inference_logprobs"
            )
        return made

    def _hold(self, idle: bool) -> None:
        """Hold requests of environments back, or continue them; repeated, as a restarted server has no such state."""
        with self._holding:
            if self._closed.is_set():
                return
            held = idle and self.max_batches is not None and self.api.batches_there() >= self.max_batches
            if held or self._held:
                self.hold_back(held)
            self._held = held

    def _watch(self) -> None:
        """From the end of the first round on, see to `max_batches` while the trainer trains."""
        if self.max_batches is not None and self._watching is None:
            self._watching = threading.Thread(target=self._hold_while_idle, name="atropos", daemon=True)
            self._watching.start()

    def _hold_while_idle(self) -> None:
        while not self._closed.wait(IDLE_LOOK_S):
            if self._paused or self._waiting:
                continue
            try:
                self._hold(True)  # a round that has begun since lets them go on
            except SwiftError as error:  # the trainer's next call finds an engine that is lost
                logger.warning("warning: atropos: environments are not held back: %s", first_line(error))
