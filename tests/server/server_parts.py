"""A `swift rollout` process on a free port, and what tests ask of it."""

import socket
import threading
import time
from functools import partial
from types import SimpleNamespace

import httpx
from local_engines import local_pool
from oracle import PROMPT, ask
from rollout_process import END_LIMIT_S, Reachable, RolloutProcess
from scripted_engine import ScriptedEngine

from swift.models import load_chat
from swift.models.arguments import CheckpointArguments, SeeingArguments
from swift.rollout.engines.events import Timeouts
from swift.rollout.engines.pool import EnginePool
from swift.rollout.engines.server_client import ServerClient
from swift.rollout.engines.spec import EngineSpec, build_engine
from swift.rollout.server.app import make_app
from swift.rollout.server.process import WebServer
from swift.rollout.server.service import Service, Settings

KEY = "a key for tests"
SHORT = Timeouts(server_s=2.0, poll_s=0.2, reply_s=3.0, heartbeat_s=0.5)
PATIENT = Timeouts(server_s=120.0, poll_s=0.2, reply_s=5.0, heartbeat_s=1.0)
QUICK = Timeouts(server_s=60, poll_s=0.2, heartbeat_s=1.0)


class Trained:
    """A server that a trainer's end can be had of."""

    def engine(self, **options):
        return EnginePool([link_to(self, **options)])


class LocalServer(Trained, Reachable):
    """A server on a free port of this process: the application, a thread of uvicorn, one engine."""

    def __init__(self, model, *, key=None, weights_folder=None, max_model_len=512, port=0, sees=False):
        self.model, self.key = str(model), key
        template = load_chat((SeeingArguments if sees else CheckpointArguments)(model=self.model))
        spec = EngineSpec(
            backend="transformers", model=self.model, max_model_len=max_model_len, lora=True, sleep=True, sees=sees
        )
        engine = build_engine(spec)
        self.holding, self._gave, self._kept = False, False, []
        engine.advance = partial(self._held, engine.advance)
        self.service = Service(
            engine,
            template,
            Settings(model=self.model, specs=(spec,), api_key=key, weights_folder=weights_folder),
        )
        self.listener = socket.create_server(("127.0.0.1", port), backlog=2048)
        self.port = self.listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.uvicorn = WebServer(self.service, "", lambda error: None)
        self.thread = threading.Thread(target=self.uvicorn.run, args=([self.listener],), daemon=True)
        self.thread.start()
        while not self.uvicorn.started:
            time.sleep(0.005)

    def stop(self):
        self.uvicorn.should_exit = True
        self.thread.join(END_LIMIT_S)
        self.service.close()

    def _held(self, advance):
        """A step; one that gives a completion while it is `holding` is the last until the server has ended."""
        if self._gave:
            self.thread.join()
        ended, self._kept = self._kept or advance(), []
        self._gave = self.holding and bool(ended)
        if self._gave:
            ended, self._kept = ended[:1], ended[1:]
        return ended

    def kill(self):
        """Cut off all connections; nothing of it is left in memory."""
        self.uvicorn.force_exit = True
        self.stop()


def link_to(server, *, spec=None, timeouts=None, **options):
    """The client of the engine behind a server."""
    spec = spec or spec_of(server.model)
    return ServerClient(server.url, spec=spec, api_key=server.key, timeouts=timeouts or QUICK, **options)


class Server(Trained, RolloutProcess):
    """A server process."""


BACKEND = """
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

from swift.plugin import inference_backends
from swift.rollout.engines.transformers import build


def own(spec):
    {body}


inference_backends["own"] = own
"""


def own_backend(folder, body):
    """Flags of a backend that a plugin builds with this body, from a `spec`."""
    plugin = folder / "own_backend.py"
    plugin.write_text(BACKEND.replace("{body}", body.strip()))
    return "--infer_backend", "own", "--external_plugins", str(plugin)


class Wakeful(ScriptedEngine):
    """One that servers can wake."""

    def wake(self, tags=()):
        return True

    def reset_caches(self):
        pass


def client_of_service(service, **headers):
    transport = httpx.ASGITransport(make_app(service))
    return httpx.AsyncClient(transport=transport, base_url="http://server", headers=headers)


def three_tokens(text, add_special_tokens):
    return {"input_ids": [1, 2, 3]}


three_tokens.get_vocab = lambda: {"a token": 1}


def scripted_service(engines, folder, **settings):
    """What the routes share, over engines of this process."""
    template = SimpleNamespace(
        tokenizer=three_tokens,
        decode=lambda ids, skip_special_tokens: "".join(f"<{one}>" for one in ids),
        stop_token_ids=(),
    )
    specs = tuple(spec_of(folder) for _ in engines)
    return Service(local_pool(*engines), template, Settings(model="scripted", specs=specs, **settings))


def spec_of(model, **fields):
    return EngineSpec(
        **{"backend": "transformers", "model": str(model), "eos_token_ids": (256,), "max_model_len": 256, **fields}
    )


def many(count=24):
    return [ask(f"g{i // 4}/{i}", [*PROMPT, i // 4], seed=i, max_new_tokens=200) for i in range(count)]
