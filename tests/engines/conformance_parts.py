"""Every backend under one roof: how it is started, which weights it should have, and what it leaves behind.

A `Subject` owns one engine, started when it is first used and shared by all cases of a session, because some starts
cost half a minute. A case gets it whole, with the weights it was built with, and may leave it in any state.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import importlib.util
import os
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

from swift.errors import EngineError
from swift.rollout.engines.spec import EngineSpec, build_engine

MAX_MODEL_LEN = 512
START_LIMIT_S = 240.0
GONE_LIMIT_S = 20.0


@dataclass(frozen=True)
class Backend:
    """A way to run an engine.

    inner: whose engine it is. place: "here", in an "actor", in the two actors of a "pool", or behind the HTTP of a
    "server". arch: qwen2 ties its head to the embedding, llama does not. lora: the engine is made for adapters,
    which some must know at the start.
    """

    name: str
    inner: str
    place: str
    arch: str
    lora: bool = False


BACKENDS = [
    Backend("transformers", "transformers", "here", "qwen2"),
    Backend("vllm", "vllm", "here", "qwen2"),
    Backend("actor-transformers", "transformers", "actor", "llama"),
    Backend("actor-vllm", "vllm", "actor", "llama", lora=True),
    Backend("pool", "transformers", "pool", "qwen2"),
    Backend("remote", "transformers", "server", "qwen2"),
    Backend("lmdeploy", "lmdeploy", "here", "qwen2"),
]


def transport(case):
    """Marks a case that a way to an engine in another process can break: it runs on all backends."""
    case.transport = True
    return case


@functools.cache
def missing(backend):
    """Why a backend cannot run on this machine; None when it can."""
    import torch

    if importlib.util.find_spec(backend.inner) is None:
        return f"{backend.inner} is not installed"
    if backend.inner == "lmdeploy" and not torch.cuda.is_available():
        return "lmdeploy needs a GPU"
    return None


class Subject:
    """An engine under test.

    Attributes:
        model: a plain transformers model with the weights that the engine was built with: the oracle.
        whole: version under which the engine has these weights.
    """

    def __init__(self, backend, folder, logs):
        from transformers import AutoModelForCausalLM, AutoTokenizer

        self.backend = backend
        self.folder = folder
        self.logs = logs
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.model = AutoModelForCausalLM.from_pretrained(folder).eval()
        self.eos = self.tokenizer.eos_token_id
        self.version = self.whole = 0
        self.spec = EngineSpec(
            backend=backend.inner,
            model=str(folder),
            eos_token_ids=(self.eos,),
            max_model_len=MAX_MODEL_LEN,
            max_num_seqs=64,
            lora=backend.lora,
            sleep=True,
            enforce_eager=True,
        )
        self.traces = Traces()
        self._engine = None
        self._server = None

    @property
    def engine(self):
        """The engine, started when it is not running."""
        if self._engine is None:
            self._use_cluster()
            self.traces = Traces()
            self._engine = self._start()
            self.version = self.whole = self._engine.version
            self.traces.look()
        return self._engine

    def _use_cluster(self):
        """Ray is up before anything is looked at, and stays: its processes are no traces of an engine."""
        if self.backend.place in ("actor", "pool") and not _cluster:
            from swift.rollout.engines import cluster

            _cluster.append(cluster.use())
            atexit.register(_cluster[0].close)

    def _start(self):
        if self.backend.place == "here":
            return build_engine(self.spec)
        from swift.rollout.engines.pool import EnginePool
        from swift.rollout.engines.remote import server_engine
        from swift.rollout.engines.transport import Timeouts

        if self.backend.place == "actor":
            return EnginePool([self._actor(self.backend.name)])
        if self.backend.place == "pool":
            return EnginePool([self._actor("engine 0"), self._actor("engine 1")])

        self._server = Server(self.spec, self.logs / f"{self.backend.name}-{time.monotonic_ns()}.log")
        timeouts = Timeouts(server_s=2.0, poll_s=0.5)
        return EnginePool([server_engine(self._server.url, spec=self.spec, timeouts=timeouts)])

    def _actor(self, name):
        from swift.rollout.engines import cluster
        from swift.rollout.engines.actor_transport import actor_engine

        log = self.logs / f"{name}-{time.monotonic_ns()}.log"
        return actor_engine(self.spec, name=name, log_file=log, uses=cluster.use(), restarts=0)

    def kill(self, victim):
        """Kill the engine's first process, or the one that holds the model; in a pool those of both engines."""
        engines = 2 if self.backend.place == "pool" else 1
        self.traces.look()
        alive = [process for process in self.traces.started if process.is_running()]
        if victim == "first process":
            ours = self.backend.place == "server"
            first = [
                one
                for one in alive
                if (one.ppid() == os.getpid() if ours else "EngineActor" in " ".join(one.cmdline()))
            ]
            chosen = first[:engines]
        else:
            chosen = sorted(alive, key=lambda one: one.memory_info().rss)[-engines:]
        assert len(chosen) == engines
        for process in chosen:
            process.kill()

    def next_version(self):
        self.version = max(self.version, self.engine.version) + 1
        return self.version

    def publish(self, model):
        """Bring a model's weights to the engine."""
        from swift.rollout.weights.policy import PolicyWeights

        return self.engine.load_weights(PolicyWeights(model), self.next_version())

    def make_whole(self):
        """After a case: the engine of before, its own weights included, or none."""
        if self._engine is None:
            return
        try:
            self._engine.abort()
            self._engine.resume()
            for _ in self._engine.stream():
                pass
            self._engine.wake()
            if self._engine.capabilities.lora:
                self._engine.drop_adapter()
            if self._engine.version not in (0, self.whole):
                self.publish(self.model)
                self.whole = self._engine.version
        except EngineError:
            self.close()

    def close(self):
        """End the engine, and the server around it."""
        engine, self._engine = self._engine, None
        try:
            if engine is not None:
                engine.close()
        finally:
            server, self._server = self._server, None
            if server is not None:
                server.close()
            gc.collect()


class Server:
    """A `swift rollout` process on a free port of this machine."""

    def __init__(self, spec, log):
        command = [
            sys.executable, "-m", "swift", "rollout", "--model", spec.model, "--infer_backend", spec.backend,
            "--host", "127.0.0.1", "--port", "0", "--torch_dtype", spec.dtype,
            "--vllm_max_model_len", str(spec.max_model_len), "--vllm_max_num_seqs", str(spec.max_num_seqs),
            "--vllm_enforce_eager", "true", "--sleep_level", "1", "--engine_restarts", "0",
        ]  # fmt: skip
        self.log = log
        with log.open("wb") as output:
            self.process = subprocess.Popen(command, stdout=output, stderr=output, start_new_session=True)
        self.url = self._wait_until_ready()

    def _wait_until_ready(self):
        deadline = time.monotonic() + START_LIMIT_S
        while time.monotonic() < deadline:
            text = self.log.read_text(errors="replace")
            ready = next((line for line in text.splitlines() if line.startswith("ready ")), None)
            if ready is not None:
                return ready.split()[1]
            if self.process.poll() is not None:
                pytest.fail(f"the server ended with {self.process.returncode}:\n{text[-3000:]}")
            time.sleep(0.1)
        self.close()
        pytest.fail(f"no server after {START_LIMIT_S} s:\n{self.log.read_text(errors='replace')[-3000:]}")

    def close(self):
        self.process.terminate()
        try:
            self.process.wait(GONE_LIMIT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(GONE_LIMIT_S)
            pytest.fail(f"the server does not end on SIGTERM within {GONE_LIMIT_S} s")


@dataclass
class Traces:
    """What an engine's start added to this machine: processes, listening ports, shared memory, sockets in folders.

    Only what belongs to processes of this test counts; other tests run beside it.
    """

    started: list = field(default_factory=list)
    ports: set = field(default_factory=set)
    segments: set = field(default_factory=set)
    sockets: set = field(default_factory=set)

    def __post_init__(self):
        self._before = {process.pid for process in _tree()}
        self._ports_before = _ports(_tree())
        self._segments_before = _segments(_tree())
        self._sockets_before = _sockets(_tree())

    def look(self):
        """Note what is there now and was not before."""
        tree = _tree()
        known = {process.pid for process in self.started}
        self.started += [process for process in tree if process.pid not in self._before | known]
        self.ports |= _ports(tree) - self._ports_before
        self.segments |= _segments(tree) - self._segments_before
        self.sockets |= _sockets(tree) - self._sockets_before

    def left(self):
        """What of it is still there, in words."""
        alive = [process for process in self.started if process.is_running() and _status(process) != "zombie"]
        return (
            [f"process {process.pid}" for process in alive]
            + [f"port {port}" for port in self.ports & _listening()]
            + [f"segment {path}" for path in self.segments if Path(path).exists()]
            + [f"socket {path}" for path in self.sockets if Path(path).exists()]
        )

    def wait_until_gone(self, limit_s=GONE_LIMIT_S):
        """What is left after a while; the kernel needs a moment."""
        deadline = time.monotonic() + limit_s
        while self.left() and time.monotonic() < deadline:
            time.sleep(0.05)
        return self.left()


_cluster = []


def _tree():
    """This process and its descendants; of the cluster that all cases share, the engines alone."""
    me = psutil.Process()
    return [me, *(one for one in me.children(recursive=True) if not _is_shared(one))]


def _is_shared(process):
    if not _cluster:
        return False
    from swift.rollout.engines.cluster import MARKER

    with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
        name, environment = " ".join(process.cmdline()), process.environ()
        if name.startswith("ray::"):  # a title may have overwritten the environment
            return "EngineActor" not in name
        return environment.get(MARKER) == str(_cluster[0].folder) and "SWIFT_ENGINE" not in environment
    return True


def _status(process):
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.status()
    return "zombie"


def _connections(tree, kind):
    for process in tree:
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            yield from process.net_connections(kind)


def _ports(tree):
    return {one.laddr.port for one in _connections(tree, "inet") if one.status == psutil.CONN_LISTEN}


def _listening():
    return {one.laddr.port for one in psutil.net_connections("inet") if one.status == psutil.CONN_LISTEN}


def _sockets(tree):
    return {one.laddr for one in _connections(tree, "unix") if one.laddr and not one.laddr.startswith("\0")}


def _segments(tree):
    """Files in /dev/shm that a process of the tree has open or mapped."""
    found = set()
    for process in tree:
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied, OSError):
            found |= {one.path for one in process.memory_maps(grouped=False) if one.path.startswith("/dev/shm/")}
            found |= {one.path for one in process.open_files() if one.path.startswith("/dev/shm/")}
    return {path for path in found if not path.endswith(" (deleted)")}


def with_noise(model, *, seed, scale=0.02, only=""):
    """Seeded noise on the parameters whose name contains `only`, in place; returns the model."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if only in name:
                parameter.add_(scale * torch.randn(parameter.shape, generator=generator))
    return model
