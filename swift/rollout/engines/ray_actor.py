"""An engine in a Ray actor.

    client --submit, abort--> inbox  --+
    client --call---------->  control  +--> RequestQueue --> the one thread that drives the engine
    client --other calls--->  work   --+
    client <--completions, counters, signs of life-- `take`, a long poll that a thread of the client repeats

What the engine started ends with it, because a guard process on its node watches the actor.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import shutil
import sys
import traceback
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from swift.errors import EngineError, SwiftError, first_line
from swift.rollout.child import is_of_launch
from swift.rollout.engines import cluster, guard
from swift.rollout.engines.base import Capabilities, Health, InferenceEngine
from swift.rollout.engines.completion_stream import Arrival, CompletionStream, Failure
from swift.rollout.engines.process import stack_of
from swift.rollout.engines.request_queue import RequestQueue
from swift.rollout.engines.spec import EngineSpec, build_engine
from swift.rollout.weights import object_store
from swift.rollout.weights.base import Ack, Bucket
from swift.rollout.weights.broadcast import Announcement
from swift.startup import collector_resting
from swift.types import Request

MARKER = "SWIFT_ENGINE"
"""Variable that all processes of one instance have."""
GROUPS = {"inbox": 1, "control": 6, "events": 1}
"""Concurrency groups of the actor, and how many calls of each run at once; all other calls run one by one."""


def _in_group(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """`ray.method(concurrency_group=name)`, without importing Ray before its settings are made."""

    def mark(method: Callable[..., Any]) -> Callable[..., Any]:
        method.__ray_concurrency_group__ = name  # type: ignore[attr-defined]
        return method

    return mark


class EngineHost:
    """An engine behind a request queue, and the calls of its client; see the module's docstring."""

    _queue: RequestQueue | None = None
    _stream: CompletionStream | None = None

    def open(self, engine: InferenceEngine, notify: Callable[[], None] = lambda: None) -> None:
        """Host an engine. notify: called whenever `take` would return something."""
        self._queue, self._notify = RequestQueue(engine), notify
        self._stream = self._queue.open(notify=notify)

    @property
    def _live(self) -> RequestQueue:
        if self._queue is None:
            raise EngineError("engine: it has not started")
        return self._queue

    # --- inbox: in the order they were sent -------------------------------------------------------------------

    @_in_group("inbox")
    def submit(self, requests: list[Request]) -> None:
        """Submit requests to enter one batch, without waiting. A request that the engine refuses fails alone."""
        stream = self._stream
        assert stream is not None
        try:
            stream.submit(requests)
        except Exception:
            for request in requests:
                try:
                    stream.submit([request])
                except SwiftError as error:
                    stream.put(Failure([request.request_id], error))
                except Exception as error:
                    line = f"engine: request {request.request_id}: {type(error).__name__}: {first_line(error)}"
                    stream.put(Failure([request.request_id], EngineError(line)))

    @_in_group("inbox")
    def abort(self, request_ids: list[str]) -> None:
        self._live.abort(ids=request_ids)

    @_in_group("events")
    def take(self, wait_s: float) -> tuple[list[Arrival], dict[str, Any]]:
        """The arrivals since the last call, waiting up to `wait_s` for the first; and the counters."""
        assert self._stream is not None
        return self._stream.take(wait_s), asdict(self._live.engine.counters)

    # --- control ----------------------------------------------------------------------------------------------

    @_in_group("control")
    def pause(self) -> None:
        self._live.pause_in_flight()

    @_in_group("control")
    def resume(self) -> None:
        self._live.resume().result()

    @_in_group("control")
    def health(self) -> Health:
        return self._live.health()

    @_in_group("control")
    def stacks(self) -> str:
        faulthandler.dump_traceback(all_threads=True)
        return "its thread is in " + stack_of(self._queue.thread if self._queue is not None else None)

    @_in_group("control")
    def abort_update(self, update: int) -> None:
        self._live.updates.abort(update)

    @_in_group("control")
    def close(self) -> None:
        if self._queue is not None:
            self._queue.close()

    # --- work: one after the other, at rest -------------------------------------------------------------------

    def begin_update(self, manifest: Any, version: int) -> int:
        update = self._live.updates.begin(manifest, version)
        update.feed.ready.result()
        return update.number

    def bucket(self, update: int, way: str, payload: Any) -> None:
        """way: "object_store" for references to tensors, or "broadcast" for an announcement."""
        bucket = Announcement([], header=payload) if way == "broadcast" else Bucket(object_store.tensors_of(payload))
        self._live.updates.send(update, bucket).result()

    def commit(self, update: int) -> dict[str, Any]:
        ack: Ack = self._live.updates.commit(update).result()
        return {"ack": ack, "asleep": self._live.health().detail}

    def rebuild(self) -> None:
        """Rebuild the engine; outstanding requests are dropped."""
        assert self._stream is not None
        self._stream.close()
        self._stream = self._live.open(notify=self._notify)
        self._live.updates.abort().result()  # the client's own `abort_update` may come later
        self._live.resume().result()
        self._live.do(lambda engine: engine.rebuild()).result()

    def reset_caches(self) -> None:
        self._live.reset_caches().result()

    def do(self, name: str, **fields: Any) -> dict[str, Any]:
        """Call a method of the engine; returns its result, and the state after it."""
        result = self._live.do(lambda engine: getattr(engine, name)(**fields)).result()
        return {"result": result, "asleep": self._live.health().detail, "version": self._live.engine.version}


class EngineActor(EngineHost):
    """The process of an engine, for one instance of it."""

    def __init__(self, spec: EngineSpec, log_file: str, marker: str) -> None:
        self._log_folder: Path | None = None
        if not Path(log_file).parent.is_dir():  # on another node; there it is removed when the engine is closed
            self._log_folder = Path(log_file).parent
            self._log_folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(log_file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        os.close(descriptor)
        sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115 - for the rest of this process
        sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
        faulthandler.enable()
        logging.basicConfig(
            level=logging.INFO, format="%(asctime)s %(name)s: %(message)s", stream=sys.stderr, force=True
        )
        os.environ[MARKER] = marker
        for name in [variable for variable in os.environ if is_of_launch(variable)]:
            del os.environ[name]
        self.spec = spec
        if self.spec.cores and hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(0, self.spec.cores)
        self._guard = guard.start(f"{MARKER}={marker}")

    def start(self) -> tuple[Capabilities, int, int, str]:
        """Build the engine; returns its capabilities, number of broadcast receivers, process id and node."""
        from swift.plugin import load_external_plugins

        try:
            load_external_plugins(self.spec.plugins)
            with collector_resting():
                engine = build_engine(self.spec)
        except SwiftError:
            raise
        except Exception:
            traceback.print_exc()
            raise
        self.open(engine)
        return engine.capabilities, engine.receivers, os.getpid(), cluster.this_node()

    @_in_group("control")
    def close(self) -> None:
        super().close()
        if self._log_folder is not None:
            shutil.rmtree(self._log_folder, ignore_errors=True)
