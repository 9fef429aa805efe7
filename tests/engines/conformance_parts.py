"""Every backend under one roof: how it is started, which weights it should have, and what it leaves behind.

A `Subject` owns one engine, started when it is first used and shared by all cases of a session, because some starts
cost half a minute. A case gets it whole, with the weights it was built with, and may leave it in any state.
"""

from __future__ import annotations

import functools
import gc
import importlib.util
import os
import signal
import time
from dataclasses import dataclass

from engine_traces import Traces, shared_cluster
from oracle import load
from preloaded import make_ready
from rollout_process import RolloutProcess
from sources import nothing_left

from swift.errors import EngineError
from swift.rollout.engines.spec import EngineSpec, build_engine

MAX_MODEL_LEN = 512


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
        from transformers import AutoTokenizer

        self.backend = backend
        self.folder = folder
        self.logs = logs
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.model = load(folder)
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
            self._make_ready()
            self.traces = Traces()
            self._engine = self._start()
            self.version = self.whole = self._engine.version
            self.traces.look()
        return self._engine

    def _make_ready(self):
        """What engines share is up before anything is looked at, and stays: it is no trace of an engine."""
        if self.backend.place == "server":
            make_ready()
        if self.backend.place in ("actor", "pool"):
            shared_cluster()

    def _start(self):
        if self.backend.place == "here":
            return build_engine(self.spec)
        from swift.rollout.engines.events import Timeouts
        from swift.rollout.engines.pool import EnginePool
        from swift.rollout.engines.server_client import ServerClient

        if self.backend.place == "actor":
            return EnginePool([self._actor(self.backend.name)])
        if self.backend.place == "pool":
            return EnginePool([self._actor("engine 0"), self._actor("engine 1")])

        spec = self.spec
        self._server = RolloutProcess(
            spec.model, self.logs, "--infer_backend", spec.backend, "--vllm_max_model_len", str(spec.max_model_len),
            "--vllm_max_num_seqs", str(spec.max_num_seqs), "--sleep_level", "1", "--engine_restarts", "0",
        )  # fmt: skip
        timeouts = Timeouts(server_s=2.0, poll_s=0.5)
        return EnginePool([ServerClient(self._server.url, spec=self.spec, timeouts=timeouts)])

    def _actor(self, name):
        from swift.rollout.engines import cluster
        from swift.rollout.engines.actor_client import ActorClient

        log = self.logs / f"{name}-{time.monotonic_ns()}.log"
        return ActorClient(self.spec, name=name, log_file=log, uses=cluster.use(), restarts=0)

    def kill(self):
        """Kill the process of the engine, which holds the model; in a pool those of both engines."""
        if self._server is not None:
            self._server.process.kill()
        else:
            for client in self._engine.engines:
                os.kill(client.instance.pid, signal.SIGKILL)

    def next_version(self):
        self.version = max(self.version, self.engine.version) + 1
        return self.version

    def sync(self, model):
        """Bring a model's weights to the engine."""
        from swift.rollout.weights.policy import PolicyWeights

        return self.engine.load_weights(PolicyWeights(model), self.next_version())

    def make_whole(self):
        """After a case: the engine of before, its own weights included, or none."""
        if self._engine is not None and not nothing_left(self._engine):  # of a case that failed
            self.close()
        if self._engine is None:
            return
        try:
            self._engine.resume()
            self._engine.release()
            if self.backend.place != "server":
                self._engine.wake()
                if self._engine.capabilities.lora:
                    self._engine.drop_adapter()
            if self._engine.version not in (0, self.whole):
                self.sync(self.model)
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
                server.stop()
            gc.collect()
