"""An engine whose completions are those that Atropos environments made with the policy server.

    submit      the requests of a launch wait for a group; their prompts are placeholders
    stream   <- the next group of the message API, as the completions of the launch that has waited longest

The engine around which it stands is the policy server: weight syncs, sleep and health are its own.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field

from swift.errors import NumericError, SwiftError, first_line
from swift.rollout.atropos.api import Group, MessageAPI
from swift.rollout.atropos.groups import GroupReader
from swift.rollout.engines.around import EngineAround
from swift.rollout.engines.base import InferenceEngine
from swift.rollout.engines.wire import Versions
from swift.types import Completion, Request

logger = logging.getLogger("swift.rollout")

LOOK_S = 0.5
"""How often a waiting stream looks around."""
IDLE_LOOK_S = 1.0
"""How often, while nothing is waited for, it is seen whether environments have made enough."""
LEAKED_FRAC, LEAKED_ROWS = 0.01, 2
"""Share and least number of sequences with positive log-probs that end the run."""


@dataclass(eq=False)
class AtroposEngine(EngineAround):
    """See the module's docstring.

    Nothing is too old to be trained on. With `max_batches` the policy server holds back what environments ask for while
    nothing is waited for and so many batches are there already; weights are newer when it goes on.

    Attributes:
        engine: the policy server's client.
        api: of the environments.
        reader: makes completions of groups.
        check: raises if a process that this run needs has died.
        versions: the policy server's memory of what sampled which tokens.
        hold_back: has the policy server keep requests of environments waiting, or not.
        max_batches: batches that may be there; None for any number.
    """

    engine: InferenceEngine
    api: MessageAPI
    reader: GroupReader
    check: Callable[[], None] = lambda: None
    versions: Versions = lambda asked: [None] * len(asked)
    hold_back: Callable[[bool], None] = lambda held: None
    max_batches: int | None = None
    _held: bool = False
    _holding: threading.Lock = field(default_factory=threading.Lock)
    _watching: threading.Thread | None = None
    _closed: threading.Event = field(default_factory=threading.Event)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _waiting: dict[str, list[str]] = field(default_factory=dict)
    """Launch -> its requests that have no completion yet."""
    _aborted: list[str] = field(default_factory=list)

    def close(self) -> None:
        """End the connection to the API; the engine is closed by its owner."""
        self._closed.set()
        if self._watching is not None:
            self._watching.join(2 * IDLE_LOOK_S)
        self.api.close()

    def check_length(self, request: Request) -> None:
        """Environments have prompts and distributions of their own."""

    def submit(self, request: Request) -> None:
        launch = request.request_id.rpartition("/")[0]
        with self._lock:
            self._refuse_again(request, self._waiting.get(launch, ()))
            if not self._waiting:
                self.api.begin_wait()
            self._waiting.setdefault(launch, []).append(request.request_id)

    def stream(self) -> Iterator[Completion]:
        while True:
            self._between()
            with self._lock:
                aborted, self._aborted = self._aborted, []
            yield from (Completion(name, [], [], "abort") for name in aborted)
            if self._paused or not self._waiting:
                self._hold(not self._paused)
                self._watch()
                return
            self._hold(False)
            self.check()
            group = self.api.next(self._patience(LOOK_S))
            if group is not None:
                yield from self._made(group)

    def abort(self, request_ids: Collection[str] | None = None) -> None:
        with self._lock:
            for launch, names in list(self._waiting.items()):
                ended = [name for name in names if request_ids is None or name in request_ids]
                self._waiting[launch] = [name for name in names if name not in ended]
                self._aborted += ended
                if not self._waiting[launch]:
                    del self._waiting[launch]

    def drain_metrics(self) -> dict[str, float]:
        counted, self.api.counters = self.api.counters, type(self.api.counters)()
        return {
            "atropos/queue_groups": float(self.api.queue_size),
            **{name: float(count) for name, count in counted.items()},
            **{f"atropos/groups/{name}": float(count) for name, count in self.api.received.copy().items()},
        }

    def _made(self, group: Group) -> list[Completion]:
        """The completions of the launch that has waited longest."""
        with self._lock:
            if not self._waiting:  # aborted while the API was asked
                self.api.give_back(group)
                return []
            names = self._waiting.pop(next(iter(self._waiting)))
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
        """Hold requests of environments back, or let them go on; a server that was restarted has to be told again."""
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
                self._hold(True)  # a stream that has begun since lets them go on
            except SwiftError as error:  # the trainer's next call finds an engine that is lost
                logger.warning("warning: atropos: environments are not held back: %s", first_line(error))
