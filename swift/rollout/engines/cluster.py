"""The Ray cluster of a run: a local one that ends with this process, or one that exists and is joined.

A local cluster listens at loopback only, demands a token, has no dashboard and keeps its files in a short temporary
folder. A guard process ends it when this process ends in any way. One cluster serves all engines of a process; it is
started by the first that needs it and ended by the last `close`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import shutil
import signal
import subprocess
import tempfile
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from swift.errors import ConfigError, EngineError, ResourceError
from swift.rollout.engines import guard
from swift.rollout.engines.spec import EngineSpec

MARKER = "SWIFT_CLUSTER"
"""Variable that all processes of a local cluster have."""
MIN_STORE_BYTES = 160 << 20
CLOSE_S = 10.0
PLACE_S = 60.0
"""How long a joined cluster may take to make room for the engines."""

_token = secrets.token_hex(16)  # Ray reads it once per process
_lock = threading.RLock()
_present: Cluster | None = None


@dataclass(eq=False)
class Cluster:
    """One cluster, shared within this process. address: of the head; "" for a local one. users: engines and runs."""

    address: str
    folder: Path | None = None
    guard: subprocess.Popen[bytes] | None = None
    users: int = 0
    nodes: list[dict[str, Any]] = field(default_factory=list)

    @property
    def is_local(self) -> bool:
        """Whether it ends with this process."""
        return self.folder is not None

    def close(self) -> None:
        """One user less; the last one ends a local cluster, and leaves a joined one."""
        global _present
        with _lock:
            self.users -= 1
            if self.users > 0 or _present is not self:
                return
            _present = None
            import ray

            with contextlib.suppress(Exception):  # the guard sees to the rest
                ray.shutdown()
            if self.guard is not None and self.folder is not None:
                guard.end(f"{MARKER}={self.folder}".encode())
                self.guard.kill()
                self.guard.wait(CLOSE_S)
                shutil.rmtree(self.folder, ignore_errors=True)


def use(address: str | None = None, token_file: Path | None = None, *, store_bytes: int = 0) -> Cluster:
    """The cluster of this process, started or joined if need be; every call needs a `close` of its own.

    Args:
        address: of a cluster to join, "auto" or host:port; None starts a local one.
        token_file: the shared secret of a cluster that is joined.
        store_bytes: room for weights in the object store of a local one.

    Raises:
        ResourceError: no cluster can be started.
        EngineError: the one to join cannot be reached.
    """
    global _present
    with _lock:
        if _present is None:
            _present = _join(address, token_file) if address else _start(store_bytes)
        _present.users += 1
        return _present


def _start(store_bytes: int) -> Cluster:
    folder = Path(tempfile.mkdtemp(prefix="swift-ray-", dir=_short_folder()))
    watch = guard.start(f"{MARKER}={folder}", str(folder))
    token = folder / "token"
    token.touch(mode=0o600)
    token.write_text(_token, encoding="utf-8")
    cluster = Cluster("", folder, watch)
    variables = {MARKER: str(folder), "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}  # the latter: listen at loopback only
    try:
        with _environment({**variables, **ray_variables(token)}):
            _init(
                num_cpus=max(1, os.cpu_count() or 1),
                include_dashboard=False,
                object_store_memory=max(MIN_STORE_BYTES, store_bytes),
                _temp_dir=str(folder),
                _node_ip_address="127.0.0.1",
            )
    except BaseException as error:
        watch.kill()
        watch.wait(CLOSE_S)
        shutil.rmtree(folder, ignore_errors=True)
        if not isinstance(error, Exception):
            raise
        raise ResourceError(f"ray: a local cluster cannot be started ({_first_line(error)})") from error
    return cluster


def _join(address: str, token_file: Path | None) -> Cluster:
    if token_file is not None and not token_file.is_file():
        raise ConfigError(f"--ray_token_file: {token_file}: no such file; copy that of the cluster here")
    variables = ray_variables(token_file) if token_file is not None else {}
    try:
        with _environment(variables):
            _init(address=address)
    except Exception as error:
        raise EngineError(
            f"--ray_address: {address}: cannot be joined ({_first_line(error)}); is the cluster up, and is "
            "--ray_token_file that of the cluster?"
        ) from error
    return Cluster(address)


def ray_variables(token: Path) -> dict[str, str]:
    """What Ray's processes need in their environment."""
    return {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(token),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        "RAY_DEDUP_LOGS": "0",
        "RAY_process_group_cleanup_enabled": "0",  # the guard does it, and unlinks shared memory besides
        "RAY_kill_child_processes_on_worker_exit": "0",
    }


def _init(**options: Any) -> None:
    """`ray.init` without its handler of SIGTERM, which is the trainer's."""
    import ray
    from ray._raylet import AuthenticationTokenLoader, Config  # type: ignore[attr-defined]

    Config.initialize("")  # Ray reads its environment when it is imported, which vLLM may have done long ago
    AuthenticationTokenLoader.instance().reset_cache()
    main = threading.current_thread() is threading.main_thread()
    handler = signal.getsignal(signal.SIGTERM) if main else None
    try:
        ray.init(configure_logging=False, logging_level=logging.ERROR, log_to_driver=False, **options)
        # Ray prints a paragraph for every lost worker, also with log_to_driver off; the engine's own line says it
        ray._private.worker.print_to_stdstream = lambda *_, **__: None
    finally:
        if handler is not None:
            signal.signal(signal.SIGTERM, handler)


def store_bytes(spec: EngineSpec) -> int:
    """Room for the weights of a model: the present ones and those that replace them, with a margin."""
    files = sum(path.stat().st_size for path in Path(spec.model).glob("*.safetensors"))
    widest = 2 if spec.dtype == "float32" else 1  # stored in 16 bits, sent in 32
    return int(2.2 * widest * files)


def places(cluster: Cluster, sizes: Sequence[int], devices: Sequence[Sequence[str]]) -> list[dict[str, Any]]:
    """Where Ray is to put each engine, as options of its actor.

    In a local cluster everywhere is here, and the engine's spec names its devices. In one that was joined, each engine
    gets a bundle of its own in a placement group: packed within the engine, spread over the nodes.

    Args:
        cluster: to place them in.
        sizes: devices of each engine.
        devices: their names, which say of what kind they are.

    Raises:
        EngineError: the cluster has no room for them.
    """
    if cluster.is_local:
        return [{} for _ in sizes]
    import ray
    from ray.util.placement_group import placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    kinds = ["GPU" if names[0].startswith("cuda") else "CPU" for names in devices]
    bundles = [{kind: float(size)} for kind, size in zip(kinds, sizes, strict=True)]
    group = placement_group(bundles, strategy="SPREAD")
    if not group.wait(PLACE_S):
        has = ", ".join(
            f"{count:g} {name}" for name, count in ray.cluster_resources().items() if name in ("CPU", "GPU")
        )
        raise EngineError(f"--ray_address: {cluster.address}: no room for {bundles} within {PLACE_S:g} s; it has {has}")
    return [
        {
            f"num_{kind.lower()}s": size,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index),
        }
        for index, (kind, size) in enumerate(zip(kinds, sizes, strict=True))
    ]


def this_node() -> str:
    """Id of the node that this process belongs to."""
    import ray

    return str(ray.get_runtime_context().get_node_id())


@contextlib.contextmanager
def _environment(variables: dict[str, str]) -> Iterator[None]:
    """Variables for the processes that are started inside; this process keeps those of Ray itself."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is not None:
                os.environ[name] = value
            elif not name.startswith("RAY_"):
                os.environ.pop(name, None)


def _short_folder() -> str | None:
    """Unix sockets have 107 characters, and Ray needs about 70 of them."""
    return None if len(tempfile.gettempdir()) <= 20 else "/tmp"


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
