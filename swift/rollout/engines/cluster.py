"""The Ray cluster of a run.

    one node        started here; it listens at loopback only
    several nodes   node 0 starts the head, local rank 0 of every other node starts a Ray node that joins it
    --ray_address   one that exists is joined, and left running

A cluster of ours demands a token, has no dashboard and keeps its files in a short temporary folder. On each node a
guard process ends what runs there when the process that started it ends in any way. One cluster serves all engines of
a process; it is started by the first that needs it and ended by the last `close`.
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
"""Variable that all processes of a cluster of ours have."""
MIN_STORE_BYTES = 160 << 20
REACH_S = 10.0
PLACE_S = 60.0
"""How long a joined cluster may take to make room for the engines."""

_token = secrets.token_hex(16)  # Ray reads it once per process
_lock = threading.RLock()
_present: Cluster | None = None


@dataclass(eq=False)
class Cluster:
    """One cluster, shared within this process.

    address: of the head. token: its secret, where it is ours. folder, guard: of what this process started. nodes:
    their names, where the run has several. users: engines and runs.
    """

    address: str
    token: str = ""
    folder: Path | None = None
    guard: subprocess.Popen[bytes] | None = None
    nodes: Sequence[str] = ()
    users: int = 0

    @property
    def is_local(self) -> bool:
        """Whether everything is on this node, and ends with this process."""
        return self.folder is not None and not self.nodes

    def close(self) -> None:
        """One user less; the last one ends what was started here, and leaves a joined cluster."""
        global _present
        with _lock:
            self.users -= 1
            if self.users > 0 or _present is not self:
                return
            _present = None
            if "ray" in sys.modules:
                import ray

                with contextlib.suppress(Exception):  # the guard sees to the rest
                    ray.shutdown()
            if self.guard is not None and self.folder is not None:
                _end(self.folder, self.guard)


@dataclass(frozen=True, slots=True)
class Offer:
    """What a node gives to a cluster of several: name and address there, inference devices, room for weights."""

    name: str
    host: str
    devices: Sequence[str]
    store_bytes: int

    def resources(self) -> dict[str, Any]:
        """What Ray counts; the name is a resource that this node alone has."""
        on_gpu, count = self.devices[0].startswith("cuda"), len(self.devices)
        return {"num_cpus": 0 if on_gpu else count, "num_gpus": count if on_gpu else 0, "resources": {self.name: 1}}

    def variables(self) -> dict[str, str]:
        """Hides the trainer's devices."""
        return {"CUDA_VISIBLE_DEVICES": visible_devices(self.devices)}


def use(address: str | None = None, token_file: Path | None = None, *, store_bytes: int = 0) -> Cluster:
    """The cluster of this process, started or joined if need be; every call needs a `close` of its own.

    address: of a cluster to join, "auto" or host:port; None starts a local one. token_file: the shared secret of a
    cluster that is joined. store_bytes: room for weights in the object store of a local one.

    Raises:
        ResourceError: no cluster can be started.
        EngineError: the one to join cannot be reached.
    """
    local = Offer("", "127.0.0.1", (), store_bytes)
    return _shared(lambda: _join(address, token_file) if address else _start(local))


def start_head(offer: Offer) -> Cluster:
    """The head of a cluster of several nodes; like `use`. `nodes` is to be completed when the others have joined."""
    return _shared(lambda: _start(offer))


def start_node(address: str, token: str, offer: Offer, timeout_s: float) -> Cluster:
    """A Ray node that joins the cluster at `address`; returns when it has; like `use`.

    Raises EngineError: it has not joined within `timeout_s`.
    """
    return _shared(lambda: _start_node(address, token, offer, timeout_s))


def _shared(make: Callable[[], Cluster]) -> Cluster:
    global _present
    with _lock:
        if _present is None:
            _present = make()
        _present.users += 1
        return _present


@contextlib.contextmanager
def _home(token: str) -> Iterator[tuple[Path, subprocess.Popen[bytes], dict[str, str]]]:
    """A folder, its guard, and the variables of the processes to be started; they end if the block fails."""
    folder = Path(tempfile.mkdtemp(prefix="swift-ray-", dir=_short_folder()))
    watch = guard.start(f"{MARKER}={folder}", str(folder))
    try:
        file = folder / "token"
        file.touch(mode=0o600)
        file.write_text(token, encoding="utf-8")
        yield folder, watch, {MARKER: str(folder), **ray_variables(file)}
    except BaseException:
        _end(folder, watch)
        raise


def _end(folder: Path, watch: subprocess.Popen[bytes]) -> None:
    """Everything that was started with this folder, and the folder."""
    guard.finish(watch, f"{MARKER}={folder}")
    shutil.rmtree(folder, ignore_errors=True)


def _start(offer: Offer) -> Cluster:
    local = not offer.devices
    place = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"} if local else offer.variables()  # "0": listen at loopback only
    resources = {"num_cpus": max(1, os.cpu_count() or 1)} if local else offer.resources()
    with _home(_token) as (folder, watch, variables):
        try:
            with _environment({**variables, **place}):
                _init(
                    include_dashboard=False,
                    object_store_memory=max(MIN_STORE_BYTES, offer.store_bytes),
                    _temp_dir=str(folder),
                    _node_ip_address=offer.host,
                    **resources,
                )
        except Exception as error:
            raise ResourceError(f"ray: a cluster cannot be started at {offer.host} ({first_line(error)})") from error
        import ray

        address = ray.get_runtime_context().gcs_address
        return Cluster(address, _token, folder, watch, () if local else (offer.name,))


def _start_node(address: str, token: str, offer: Offer, timeout_s: float) -> Cluster:
    resources = [f"--{name.replace('_', '-')}={json.dumps(value)}" for name, value in offer.resources().items()]
    with _home(token) as (folder, watch, variables):
        command = [
            sys.executable, "-c", "from ray.scripts.scripts import main; main()", "start", "--block",
            f"--address={address}", f"--node-ip-address={offer.host}", f"--temp-dir={folder}",
            f"--object-store-memory={max(MIN_STORE_BYTES, offer.store_bytes)}", "--disable-usage-stats", *resources,
        ]  # fmt: skip
        log = folder / "start.log"
        with log.open("wb") as output:
            started = subprocess.Popen(
                command,
                env={**os.environ, **variables, **offer.variables()},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        deadline = time.monotonic() + timeout_s
        while b"Ray runtime started" not in log.read_bytes():
            if started.poll() is not None or time.monotonic() > deadline:
                lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
                raise EngineError(
                    f"{offer.name} ({socket.gethostname()}, {offer.host}): has not joined the Ray cluster at {address} "
                    f"within {timeout_s:g} s (--vllm_server_timeout): {lines[-1] if lines else 'ray start is silent'}; "
                    "nodes must reach each other on every port and have the same versions of Python and ray"
                )
            time.sleep(0.1)
        return Cluster(address, token, folder, watch)


def _join(address: str, token_file: Path | None) -> Cluster:
    if token_file is not None and not token_file.is_file():
        raise ConfigError(f"--ray_token_file: {token_file}: no such file; copy that of the cluster here")
    variables = ray_variables(token_file) if token_file is not None else {}
    try:
        if address != "auto":  # Ray itself would try for minutes
            host, _, port = address.rpartition(":")
            socket.create_connection((host, int(port)), timeout=REACH_S).close()
        with _environment(variables):
            _init(address=address)
    except Exception as error:
        raise EngineError(
            f"--ray_address: {address}: cannot be joined ({first_line(error)}); is the cluster up, and is "
            "--ray_token_file that of the cluster?"
        ) from error
    return Cluster(address)


def own_address(peer: str) -> tuple[str, str]:
    """This node's address on the way to `peer`, and that of `peer` itself; nothing is sent."""
    family, _, _, _, address = socket.getaddrinfo(peer, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)
        return probe.getsockname()[0], probe.getpeername()[0]


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
    """`ray.init` without its handler of SIGTERM, which is the trainer's; its processes end when the guard says so."""
    import ray
    from ray._raylet import AuthenticationTokenLoader, Config  # type: ignore[attr-defined]

    Config.initialize("")  # Ray reads its environment when it is imported, which vLLM may have done long ago
    AuthenticationTokenLoader.instance().reset_cache()
    main = threading.current_thread() is threading.main_thread()
    handler = signal.getsignal(signal.SIGTERM) if main else None
    try:
        with kept_from_children():
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

    In a local cluster everywhere is here, and the engine's spec names its devices. Otherwise each engine gets a bundle
    of its own in a placement group: packed within the engine, and spread over the nodes; in a cluster of ours each node
    gets the same number, in the order of `Cluster.nodes`.
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
        has = ", ".join(
            f"{count:g} {name}" for name, count in ray.cluster_resources().items() if name in ("CPU", "GPU")
        )
        raise EngineError(f"ray: {cluster.address}: no room for {bundles} within {PLACE_S:g} s; it has {has}")
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
