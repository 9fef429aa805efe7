"""The client of an engine in a Ray actor, and the actor's instances.

An actor is one instance of the engine; when it ends, the client starts another, at most `restarts` per hour. It is lost
if Ray reports its end, `misses` heartbeats are not answered, or it makes no progress for `stall_s` while it has
requests. A failed start is not repeated.
"""

from __future__ import annotations

import contextlib
import functools
import os
import secrets
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from swift.devices import allowed_cores
from swift.errors import EngineDead, SwiftError, first_line, shortened
from swift.rollout.engines import cluster, guard, wire
from swift.rollout.engines.base import Capabilities, EngineCounters, Health
from swift.rollout.engines.client import EngineClient
from swift.rollout.engines.events import Late, Lost, Timeouts
from swift.rollout.engines.ray_actor import GROUPS, MARKER, EngineActor
from swift.rollout.engines.spec import EngineSpec, visible_devices
from swift.rollout.weights import object_store
from swift.rollout.weights.base import Bucket
from swift.types import Request

RESTART_WINDOW_S = 3600.0
"""Window in which `restarts` are counted, in seconds."""
LOOK_S = 1.0
"""Interval at which the cluster is looked at while an actor starts, in seconds."""
LAST_LINES = 6
"""Number of lines of the log in error messages."""
HEALTH_S = 5.0
"""Timeout of a health check, in seconds."""
ENGINE_METHODS = ("load_adapter", "drop_adapter", "sleep", "wake", "leave_broadcast")
"""Calls that the actor forwards to the method of its engine with the same name."""
TOLERATED = ("health", "pause", "resume")
"""Calls whose timeout does not end the actor."""
MEMORY_ADVICE = (
    "free memory on its node: fewer engines (--num_infer_workers), a smaller cache (--vllm_gpu_memory_utilization, "
    "VLLM_CPU_KVCACHE_SPACE) or a smaller --vllm_max_model_len"
)


@functools.cache
def _remote_class() -> Any:
    import ray

    remote: Any = ray.remote
    return remote(max_restarts=0, max_task_retries=0, concurrency_groups=GROUPS)(EngineActor)


@dataclass(eq=False)
class _Instance:
    """One actor of the client.

    log_start: size of the log before its start. started: reference to the result of its start. receivers: see
    `InferenceEngine`. on_this_node: whether it runs on this node. lost: how it was lost, or "". oom_kills: of this
    machine before its start.
    """

    actor: Any
    log_start: int
    started: Any
    pid: int = 0
    receivers: int = 1
    on_this_node: bool = False
    lost: str = ""
    oom_kills: int = field(default_factory=lambda: oom_kills())  # noqa: PLW0108 - defined below


class ActorClient(EngineClient):
    """See the module's docstring. The constructor starts the first actor and does not wait for it.

    The client keeps the last weights if `restarts` is not 0.

    Args:
        spec: the engine, with devices as this process numbers them.
        name: for messages and logs.
        log_file: of the engine's output.
        uses: the cluster; closed with the engine.
        timeouts: see `Timeouts`.
        restarts: maximum number of restarts per hour.
        weight_transport: see `EngineClient`.
        options: placement options of the actor, see `cluster.places`; None: on this node.
    """

    instance: _Instance
    restartable = True
    stored = "object_store"

    def __init__(
        self,
        spec: EngineSpec,
        *,
        name: str,
        log_file: Path,
        uses: cluster.Cluster,
        timeouts: Timeouts | None = None,
        restarts: int = 3,
        weight_transport: str | None = None,
        options: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(name, timeouts or Timeouts(), weight_transport=weight_transport, keeps_weights=restarts > 0)
        self.spec, self.log_file, self.devices = spec, Path(log_file), spec.devices
        self.restarts, self.options, self.cluster = restarts, options or {}, uses
        self._restarted: deque[float] = deque()
        self._listeners: list[threading.Thread] = []
        self._released = False
        self.instance = self._launch()

    # --- instances ------------------------------------------------------------------------------------------------

    def _launch(self) -> _Instance:
        marker = secrets.token_hex(8)
        self.log_file.parent.mkdir(parents=True, exist_ok=True)
        start = self.log_file.stat().st_size if self.log_file.exists() else 0
        spec = replace(self.spec, cores=()) if self.options else self.spec  # cores number those of this node
        variables = _variables(spec, marker, ray_places=bool(self.options))
        options = {"num_cpus": 0, **self.options, "runtime_env": {"env_vars": variables}}
        remote = _remote_class().options(**options)
        actor = remote.remote(_renumbered(spec), str(self.log_file), marker)
        return _Instance(actor, start, actor.start.remote())

    def connect(self) -> Capabilities:
        """Wait for the engine of the first instance."""
        instance = self.instance
        try:
            capabilities = self._await_start(instance)
        except Lost as lost:
            self._kill(instance)
            raise EngineDead(f"{self.name}: its actor {lost} while it started; {self.last_lines(instance)}") from lost
        except SwiftError:
            self._kill(instance)
            raise
        return replace(capabilities, devices=self.spec.devices, shares_weights=False)

    def _await_start(self, instance: _Instance) -> Capabilities:
        """Wait for the engine of an instance, and start the thread that reads its events."""
        import ray

        capabilities: Capabilities
        deadline = time.monotonic() + self.timeouts.start_s
        while not ray.wait([instance.started], timeout=LOOK_S)[0] and time.monotonic() < deadline:
            if cluster.has_left():
                raise EngineDead(
                    f"{self.name}: ray: its raylet has ended (terminated, or its node is taken away), so no engine can "
                    "be started; resume from the last checkpoint (--resume_from_checkpoint last)"
                )
        try:
            capabilities, instance.receivers, instance.pid, node = self._result(
                instance, instance.started, "start", LOOK_S
            )
        except Late:
            raise Lost(f"did not start within {self.timeouts.start_s:g} s; {self._stacks_of(instance)}") from None
        instance.on_this_node = node == cluster.this_node()
        listener = threading.Thread(target=self._listen, args=(instance,), name=f"events of {self.name}", daemon=True)
        self._listeners.append(listener)
        listener.start()
        return capabilities

    def replace(self, how: str) -> EngineCounters:
        dead = self.instance
        self._lose(dead, how)
        now = time.monotonic()
        while self._restarted and now - self._restarted[0] > RESTART_WINDOW_S:
            self._restarted.popleft()
        if len(self._restarted) >= self.restarts:
            raise EngineDead(
                f"{self.name}: its actor {how}; --engine_restarts {self.restarts} within an hour are used up; "
                f"{self.last_lines(dead)}"
            )
        self._restarted.append(now)
        self.check_alive()
        instance = self.instance = self._launch()
        try:
            self._await_start(instance)
        except SwiftError as error:  # another restart would fail too
            self._kill(instance)
            raise EngineDead(f"{self.name}: its actor {how}, and cannot be replaced ({error.problems[0]})") from error
        return EngineCounters(restarts=1)

    def _lose(self, instance: _Instance, how: str) -> None:
        """End an instance, and deliver `Lost` to its outstanding requests."""
        if instance.lost:
            return
        instance.lost = how
        self._kill(instance)
        self.deliver(instance, Lost(how))

    def _kill(self, instance: _Instance) -> None:
        import ray

        with contextlib.suppress(Exception):  # the actor may have ended
            ray.kill(instance.actor, no_restart=True)
        if instance.on_this_node:  # a process that hangs does not react to Ray's first signal
            guard.kill_titled(instance.pid, b"ray::EngineActor")

    def _listen(self, instance: _Instance) -> None:
        """Thread that repeats `take` until the instance ends."""
        import ray
        from ray.exceptions import GetTimeoutError

        misses, pending = 0, None
        while not instance.lost and not self.ended:
            try:
                if pending is None:
                    pending = instance.actor.take.remote(self.timeouts.heartbeat_s / 2)
                arrivals, counters = ray.get(pending, timeout=self.timeouts.heartbeat_s)
            except GetTimeoutError:
                misses += 1
                if misses >= self.timeouts.misses:
                    self._lose(instance, f"gave no sign of life for {misses * self.timeouts.heartbeat_s:g} s")
                continue
            except Exception as error:
                self._lose(instance, how_ended(error, instance))
                return
            misses, pending = 0, None
            self._count(instance, EngineCounters(**counters), arrived=bool(arrivals))
            self.deliver(instance, *arrivals)
            if not self.outstanding or self._paused:
                self.progress_at = time.monotonic()
            elif time.monotonic() - self.progress_at > self.timeouts.stall_s:
                self._lose(instance, f"made no progress for {self.timeouts.stall_s:g} s; {self._stacks_of(instance)}")

    def _count(self, instance: _Instance, counters: EngineCounters, *, arrived: bool) -> None:
        """Store the counters of the present instance; a change is progress."""
        if self.instance is not instance:
            return
        former, self.instance_counters = self.instance_counters, counters
        if arrived or counters != former:
            self.progress_at = time.monotonic()

    # --- calls ------------------------------------------------------------------------------------------------

    def post(self, instance: object, requests: Sequence[Request]) -> None:
        assert isinstance(instance, _Instance)
        if instance.lost:
            raise Lost(instance.lost)
        instance.actor.submit.remote([replace(request, prompt=None) for request in requests])

    def abort(self, request_ids: Sequence[str]) -> None:
        if not self.instance.lost:
            self.instance.actor.abort.remote(list(request_ids))

    def call(self, name: str, timeout_s: float, **fields: Any) -> Any:
        return self._start_call(name, timeout_s, **fields)()

    def _start_call(self, name: str, timeout_s: float, **fields: Any) -> Callable[[], Any]:
        """Begin a call; returns a function that waits for its result and raises as `call`."""
        instance = self.instance
        if instance.lost:
            raise Lost(instance.lost)
        deadline = time.monotonic() + timeout_s
        if name in ENGINE_METHODS:
            pending = instance.actor.do.remote(name, **fields)
        else:
            pending = getattr(instance.actor, name).remote(**fields)
        return lambda: self._result(instance, pending, name, max(0.0, deadline - time.monotonic()))

    def _result(self, instance: _Instance, pending: Any, name: str, timeout_s: float) -> Any:
        """The result of a call `name`; a failure that ends the actor raises Lost."""
        import ray
        from ray.exceptions import GetTimeoutError, RayError, RayTaskError

        try:
            return ray.get(pending, timeout=timeout_s)
        except GetTimeoutError:
            if instance.lost:
                raise Lost(instance.lost) from None
            where = self._stacks_of(instance) if name != "health" else ""
            late = Late(f"did not answer {name} in time; {where}".rstrip("; "))
            if name not in TOLERATED:
                self._lose(instance, str(late))
            raise late from None
        except RayTaskError as error:
            cause = error.cause
            if isinstance(cause, SwiftError) and not isinstance(cause, EngineDead):
                raise wire.error_in_name(self.name, type(cause), cause.problems, vars(cause)) from None
            if name == "start":  # a restart would fail too
                raise EngineDead(f"{self.name}: {type(cause).__name__}: {first_line(cause)}") from None
            of_type = "" if isinstance(cause, SwiftError) else f"{type(cause).__name__}: "
            how = f"failed ({of_type}{first_line(cause)})"
            self._lose(instance, how)
            raise Lost(how) from None
        except RayError as error:
            self._lose(instance, instance.lost or how_ended(error, instance))
            raise Lost(instance.lost) from None

    # --- weights ----------------------------------------------------------------------------------------------

    def default_transport(self, device: torch.device) -> str:
        on_gpus = device.type == "cuda" and all(name.startswith("cuda") for name in self.devices)
        return "broadcast" if on_gpus else "object_store"

    def receivers(self) -> int:
        return self.instance.receivers

    def payload(self, way: str, bucket: Bucket, version: int) -> Any:
        return object_store.put(bucket)

    def send_bucket(self, update: int, way: str, payload: Any, timeout_s: float) -> Callable[[], Any]:
        return self._start_call("bucket", timeout_s, update=update, way=way, payload=payload)

    def abort_update(self, update: int) -> None:
        if not self.instance.lost:
            self.instance.actor.abort_update.remote(update)

    def address(self) -> str:
        if self.cluster.is_local:
            return "127.0.0.1"
        import ray

        return str(ray.util.get_node_ip_address())

    # --- watching ---------------------------------------------------------------------------------------------

    def ask_health(self) -> Health:
        instance = self.instance
        if instance.lost:
            return Health(False, f"{self.name}: its actor {instance.lost}")
        if not instance.pid:
            return Health(False, f"{self.name} is starting")
        try:
            state: Health = self.call("health", HEALTH_S)
        except (Lost, SwiftError) as error:
            return Health(False, f"{self.name}: its actor {error}" if isinstance(error, Lost) else str(error))
        return state

    def stacks(self) -> str:
        return f"gone ({self.instance.lost})" if self.instance.lost else self._stacks_of(self.instance)

    def _stacks_of(self, instance: _Instance) -> str:
        import ray

        try:
            return str(ray.get(instance.actor.stacks.remote(), timeout=3.0))
        except Exception:  # callers ask for stacks when the actor hangs
            return "it does not answer"

    def last_lines(self, instance: _Instance) -> str:
        """The last lines of the log of an instance."""
        if not self.log_file.exists():
            return f"its log is {self.log_file} on its node"
        with self.log_file.open("rb") as log:
            log.seek(instance.log_start)
            lines = log.read()[-(64 << 10) :].decode(errors="replace").splitlines()
        shown = " | ".join(line.strip() for line in lines[-LAST_LINES:] if line.strip())
        return f"log {self.log_file}{': | ' + shown if shown else ' is empty'}"

    def end(self) -> None:
        instance = self.instance
        if not instance.lost and instance.pid:
            import ray

            with contextlib.suppress(Exception):  # `_lose` kills the actor
                ray.get(instance.actor.close.remote(), timeout=self.timeouts.close_s)
        self._lose(instance, "is closed")

    def free_shared(self) -> None:
        """Leave the cluster. Ray ends a process of which one thread calls it after another one has left."""
        recovered = self._replacing.acquire(timeout=self.timeouts.close_s)
        for listener in self._listeners:
            listener.join(2 * self.timeouts.heartbeat_s)
        first, self._released = not self._released, True
        if first:
            self.cluster.close()
        if recovered:
            self._replacing.release()


def _variables(spec: EngineSpec, marker: str, *, ray_places: bool) -> dict[str, str]:
    """Environment variables of an actor, set before its imports. ray_places: whether Ray chooses the devices."""
    cores = len(spec.cores) or len(allowed_cores())
    inherited = None if spec.cores else os.environ.get("OMP_NUM_THREADS")
    variables = {
        MARKER: marker,
        "PYTHONPATH": os.pathsep.join(entry or str(Path.cwd()) for entry in sys.path),
        "PYTHONUNBUFFERED": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "OMP_NUM_THREADS": inherited or str(cores),
    }
    if not ray_places:
        variables["CUDA_VISIBLE_DEVICES"] = visible_devices(spec.devices)
    return variables


def _renumbered(spec: EngineSpec) -> EngineSpec:
    """The spec with devices as the actor numbers them: only its own are visible to it."""
    if all(device.startswith("cuda") for device in spec.devices):
        return replace(spec, devices=tuple(f"cuda:{index}" for index in range(len(spec.devices))))
    return spec


def oom_kills() -> int:
    """Number of processes that the kernel of this machine has killed because memory ran out."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        return int(Path("/proc/vmstat").read_text().partition("\noom_kill ")[2].split()[0])
    return 0


def how_ended(error: BaseException, instance: _Instance) -> str:
    """Description of an actor's end, for messages."""
    text = " ".join(str(error).split())
    if "OutOfMemory" in type(error).__name__ or "memory monitor" in text or "running low on memory" in text:
        return f"was killed by Ray's memory monitor, because its node has nearly no memory left; {MEMORY_ADVICE}"
    if instance.on_this_node and oom_kills() > instance.oom_kills:
        return f"was killed by the kernel, because this machine ran out of memory; {MEMORY_ADVICE}"
    if type(error).__name__ == "ActorDiedError" and "SIGKILL" not in text and "connection error code" not in text:
        return f"ended ({shortened(text, 300)})"
    return "ended unexpectedly (killed, out of memory, or crashed)"
