"""The Ray cluster of a run.

    one node        the run starts the cluster; it listens at loopback only
    several nodes   node 0 starts the head, local rank 0 of every other node starts a Ray node that joins it
    --ray_address   the run joins an existing cluster, and leaves it running

A cluster that the run starts requires a token, has no dashboard and keeps its files in a temporary folder with a short
path. On each node a guard process ends the cluster's processes when the process that started them ends in any way. All
engines of a process use one cluster: the first `use` starts it, the last `close` ends it.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from swift.errors import ConfigError, EngineError, ResourceError, first_line
from swift.rollout.engines import guard
from swift.rollout.engines.spec import EngineSpec, visible_devices
from swift.signals import kept_from_children

MARKER = "SWIFT_CLUSTER"
"""Environment variable of all processes of a cluster that the run starts."""
MIN_STORE_BYTES = 160 << 20
REACH_S = 10.0
PLACE_S = 60.0
"""Maximum wait for the placement of the engines, in seconds."""

_token = secrets.token_hex(16)  # Ray reads it once per process
_lock = threading.RLock()
_current: Cluster | None = None


@dataclass(eq=False)
class Cluster:
    """One cluster, shared within this process.

    address: of the head. token: of a cluster that the run started. folder, guard: of the Ray node that this process
    started. nodes: names of the run's nodes if it has several. users: number of `use` calls without a `close`.
    """

    address: str
    token: str = ""
    folder: Path | None = None
    guard: subprocess.Popen[bytes] | None = None
    nodes: Sequence[str] = ()
    users: int = 0

    @property
    def is_local(self) -> bool:
        """Whether the cluster has this node only, and ends with this process."""
        return self.folder is not None and not self.nodes

    def close(self) -> None:
        """Give the cluster up; the last `close` ends what this process started, or leaves a joined cluster."""
        global _current
        with _lock:
            self.users -= 1
            if self.users > 0 or _current is not self:
                return
            _current = None
            if "ray" in sys.modules:
                import ray

                with contextlib.suppress(Exception):  # the guard ends the rest
                    ray.shutdown()
            if self.guard is not None and self.folder is not None:
                _end(self.folder, self.guard)


@dataclass(frozen=True, slots=True)
class NodeSpec:
    """A node of a cluster of several: its name and address, inference devices, and size of its object store."""

    name: str
    host: str
    devices: Sequence[str]
    store_bytes: int

    def resources(self) -> dict[str, Any]:
        """Resources for Ray; the node's name is a resource of this node only, for placement."""
        on_gpu, count = self.devices[0].startswith("cuda"), len(self.devices)
        return {"num_cpus": 0 if on_gpu else count, "num_gpus": count if on_gpu else 0, "resources": {self.name: 1}}

    def variables(self) -> dict[str, str]:
        """Environment variables that make only the inference devices visible."""
        return {"CUDA_VISIBLE_DEVICES": visible_devices(self.devices)}


def use(address: str | None = None, token_file: Path | None = None, *, store_bytes: int = 0) -> Cluster:
    """The cluster of this process, which the first call starts or joins; every call needs its own `close`.

    Args:
        address: of a cluster to join, "auto" or host:port; None starts a local one.
        token_file: file with the token of a cluster to join.
        store_bytes: size of the object store of a local cluster, for weights.

    Raises:
        ResourceError: no cluster can be started.
        EngineError: the cluster to join cannot be reached.
    """
    local = NodeSpec("", "127.0.0.1", (), store_bytes)
    return _shared(lambda: _join(address, token_file) if address else _start(local))


def start_head(node: NodeSpec) -> Cluster:
    """Start the head of a cluster of several nodes; like `use`. The caller sets `nodes` when the others have joined."""
    return _shared(lambda: _start(node))


def start_node(address: str, token: str, node: NodeSpec, timeout_s: float) -> Cluster:
    """Start a Ray node and wait until it has joined the cluster at `address`; like `use`.

    Raises EngineError: it has not joined within `timeout_s`.
    """
    return _shared(lambda: _start_node(address, token, node, timeout_s))


def _shared(make: Callable[[], Cluster]) -> Cluster:
    global _current
    with _lock:
        if _current is None:
            _current = make()
        _current.users += 1
        return _current


@contextlib.contextmanager
def _node_folder(token: str) -> Iterator[tuple[Path, subprocess.Popen[bytes], dict[str, str]]]:
    """Context with a new folder, its guard, and the environment variables of Ray's processes; an error ends them."""
    folder = Path(tempfile.mkdtemp(prefix="swift-ray-", dir=_short_folder()))
    process = guard.start(f"{MARKER}={folder}", str(folder))
    try:
        file = folder / "token"
        file.touch(mode=0o600)
        file.write_text(token, encoding="utf-8")
        yield folder, process, {MARKER: str(folder), **ray_variables(file)}
    except BaseException:
        _end(folder, process)
        raise


def _end(folder: Path, process: subprocess.Popen[bytes]) -> None:
    """End the processes of a node folder with its guard process, and remove the folder."""
    guard.finish(process, f"{MARKER}={folder}")
    shutil.rmtree(folder, ignore_errors=True)


def _start(node: NodeSpec) -> Cluster:
    local = not node.devices
    more = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"} if local else node.variables()  # "0": listen at loopback only
    resources = {"num_cpus": max(1, os.cpu_count() or 1)} if local else node.resources()
    with _node_folder(_token) as (folder, guard_process, variables):
        try:
            with _environment({**variables, **more}):
                _init(
                    include_dashboard=False,
                    object_store_memory=max(MIN_STORE_BYTES, node.store_bytes),
                    _temp_dir=str(folder),
                    _node_ip_address=node.host,
                    **resources,
                )
        except Exception as error:
            raise ResourceError(f"ray: a cluster cannot be started at {node.host} ({first_line(error)})") from error
        import ray

        address = ray.get_runtime_context().gcs_address
        return Cluster(address, _token, folder, guard_process, () if local else (node.name,))


def _start_node(address: str, token: str, node: NodeSpec, timeout_s: float) -> Cluster:
    resources = [f"--{name.replace('_', '-')}={json.dumps(value)}" for name, value in node.resources().items()]
    with _node_folder(token) as (folder, guard_process, variables):
        command = [
            sys.executable, "-c", "from ray.scripts.scripts import main; main()", "start", "--block",
            f"--address={address}", f"--node-ip-address={node.host}", f"--temp-dir={folder}",
            f"--object-store-memory={max(MIN_STORE_BYTES, node.store_bytes)}", "--disable-usage-stats", *resources,
        ]  # fmt: skip
        log = folder / "start.log"
        with log.open("wb") as output:
            started = subprocess.Popen(
                command,
                env={**os.environ, **variables, **node.variables()},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        deadline = time.monotonic() + timeout_s
        while b"Ray runtime started" not in log.read_bytes():
            if started.poll() is not None or time.monotonic() > deadline:
                lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
                last_line = lines[-1] if lines else "ray start printed nothing"
                raise EngineError(
                    f"{node.name} ({socket.gethostname()}, {node.host}): has not joined the Ray cluster at {address} "
                    f"within {timeout_s:g} s (--vllm_server_timeout): {last_line}; "
                    "nodes must reach each other on every port and have the same versions of Python and ray"
                )
            time.sleep(0.1)
        return Cluster(address, token, folder, guard_process)


def _join(address: str, token_file: Path | None) -> Cluster:
    if token_file is not None and not token_file.is_file():
        raise ConfigError(f"--ray_token_file: {token_file}: no such file; copy the token file of the cluster here")
    variables = ray_variables(token_file) if token_file is not None else {}
    try:
        if address != "auto":  # Ray would retry for minutes
            host, _, port = address.rpartition(":")
            socket.create_connection((host, int(port)), timeout=REACH_S).close()
        with _environment(variables):
            _init(address=address)
    except Exception as error:
        raise EngineError(
            f"--ray_address: {address}: cannot be joined ({first_line(error)}); is the cluster running, and is "
            "--ray_token_file its token?"
        ) from error
    return Cluster(address)


def own_address(peer: str) -> tuple[str, str]:
    """This node's address on the route to `peer`, and the address of `peer`; sends nothing."""
    family, _, _, _, address = socket.getaddrinfo(peer, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)
        return probe.getsockname()[0], probe.getpeername()[0]


def ray_variables(token: Path) -> dict[str, str]:
    """Environment variables of Ray's processes."""
    return {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(token),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        "RAY_DEDUP_LOGS": "0",
        "RAY_process_group_cleanup_enabled": "0",  # the guard does it, and unlinks shared memory
        "RAY_kill_child_processes_on_worker_exit": "0",
    }


def _init(**options: Any) -> None:
    """`ray.init` that keeps the trainer's SIGTERM handler; the guard ends Ray's processes."""
    import ray
    from ray._raylet import AuthenticationTokenLoader, Config  # type: ignore[attr-defined]

    Config.initialize("")  # Ray reads its environment at its import, and vLLM may have imported it before
    AuthenticationTokenLoader.instance().reset_cache()
    main = threading.current_thread() is threading.main_thread()
    handler = signal.getsignal(signal.SIGTERM) if main else None
    try:
        with kept_from_children():
            ray.init(configure_logging=False, logging_level=logging.ERROR, log_to_driver=False, **options)
        # Ray prints a paragraph per lost worker also with log_to_driver off; the engine logs its own line
        ray._private.worker.print_to_stdstream = lambda *_, **__: None
    finally:
        if handler is not None:
            signal.signal(signal.SIGTERM, handler)


def store_bytes(spec: EngineSpec) -> int:
    """Size of the object store for a model: its present and its next weights, with a margin."""
    files = sum(path.stat().st_size for path in Path(spec.model).glob("*.safetensors"))
    widening = 2 if spec.dtype == "float32" else 1  # the files may be in 16 bits
    return int(2.2 * widening * files)


def places(cluster: Cluster, sizes: Sequence[int], devices: Sequence[Sequence[str]]) -> list[dict[str, Any]]:
    """Placement options of the actor of each engine.

    Args:
        cluster: where they run.
        sizes: number of devices of each engine.
        devices: device names of each engine.

    In a local cluster there are none: the engine's spec has its devices. Otherwise each engine has its own bundle in a
    placement group, which packs the devices of an engine and spreads engines over the nodes. In a cluster that the run
    started each node gets the same number of engines, in the order of `Cluster.nodes`.

    Raises EngineError: no room within `PLACE_S`.
    """
    if cluster.is_local:
        return [{} for _ in sizes]
    import ray
    from ray.util.placement_group import placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    kinds = ["GPU" if names[0].startswith("cuda") else "CPU" for names in devices]
    bundles = [{kind: float(size)} for kind, size in zip(kinds, sizes, strict=True)]
    for index, bundle in enumerate(bundles if cluster.nodes else ()):
        bundle[cluster.nodes[index * len(cluster.nodes) // len(bundles)]] = 0.001
    group = placement_group(bundles, strategy="SPREAD")
    if not group.wait(PLACE_S):
        present = ", ".join(
            f"{count:g} {name}" for name, count in ray.cluster_resources().items() if name in ("CPU", "GPU")
        )
        raise EngineError(f"ray: {cluster.address}: no room for {bundles} within {PLACE_S:g} s; it has {present}")
    return [
        {
            f"num_{kind.lower()}s": size,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index),
        }
        for index, (kind, size) in enumerate(zip(kinds, sizes, strict=True))
    ]


def this_node() -> str:
    """Ray's id of the node of this process."""
    import ray

    return str(ray.get_runtime_context().get_node_id())


def has_left() -> bool:
    """Whether the node of this process has left the cluster: Ray says nothing, and actors wait for a place for ever."""
    import ray

    return not any(node["Alive"] for node in ray.nodes() if node["NodeID"] == this_node())


@contextlib.contextmanager
def _environment(variables: dict[str, str]) -> Iterator[None]:
    """Context that sets environment variables; those of Ray (RAY_*) remain set in this process."""
    former = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in former.items():
            if value is not None:
                os.environ[name] = value
            elif not name.startswith("RAY_"):
                os.environ.pop(name, None)


def _short_folder() -> str | None:
    """Parent of the temporary folder: paths of Unix sockets have at most 107 characters, and Ray uses about 70."""
    return None if len(tempfile.gettempdir()) <= 20 else "/tmp"
