"""The process of `swift rollout`: plan, engines in Ray actors, a port, and an end that leaves nothing behind.

The port is taken before a model is loaded and listens only when everything is there. SIGTERM and SIGINT stop the
listening, give what runs `DRAIN_S` seconds, and end the engines; a second one does not wait. If this process is killed,
its engines end by themselves.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import shutil
import signal
import socket
import sys
import tempfile
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import uvicorn

from swift.errors import ConfigError, EngineDead, ResourceError
from swift.models import context_length, load_chat
from swift.models.policy import load_config
from swift.models.source import locate
from swift.models.template import Template
from swift.rollout.engines.client import EngineClient
from swift.rollout.engines.guided import require as require_guidance
from swift.rollout.engines.pool import EnginePool
from swift.rollout.engines.spec import EngineSpec, factory, spec_from
from swift.rollout.engines.transport import Timeouts
from swift.rollout.placement import PlacementRequest, place
from swift.rollout.server.app import make_app
from swift.rollout.server.service import Service, Settings
from swift.types import SamplingParams

DRAIN_S = 10
"""How long requests in flight may take to end after a signal."""
HEAD_BYTES = 64 << 10
"""Longest request line and headers together."""
CONNECTIONS = 4096
"""Connections at the same time; further ones are answered 503."""

SAMPLING = {
    "temperature": "temperature", "top_p": "top_p", "top_k": "top_k", "min_p": "min_p",
    "repetition_penalty": "repetition_penalty", "max_completion_length": "max_new_tokens", "stop_words": "stop",
}  # fmt: skip
"""Flag -> field of `SamplingParams`: what the server was told beats the API's own default."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What will be started. specs: one per engine."""

    settings: Settings
    template: Template
    specs: tuple[EngineSpec, ...]
    notes: tuple[str, ...] = field(default=())

    def lines(self) -> list[str]:
        """The plan in words."""
        width, count = self.specs[0].tensor_parallel_size, len(self.specs)
        devices = ", ".join(device for spec in self.specs for device in spec.devices)
        engines = f"{count} {'engine' if count == 1 else 'engines'}"
        wide = f", tensor parallel {width}" if width > 1 else ""
        model = f"{self.settings.model} in {self.settings.dtype}, {self.specs[0].backend}"
        return [f"server: {model}, {engines} on {devices}{wide}", *self.notes]


class Stopped(BaseException):
    """A signal came before the server was up; no library's `except Exception` keeps it."""


def check(args: Any, given: Collection[str]) -> Plan:
    """Everything that can be wrong before weights are loaded.

    Args:
        args: `RolloutServerArguments`.
        given: names of the settings that the user wrote.

    Raises:
        ConfigError: settings, model or devices.
        ResourceError: the backend's package is missing.
    """
    _require(args)
    regex = args.vllm_guided_decoding_regex
    if regex is not None:
        require_guidance(args.infer_backend, regex)
    source = locate(args)
    template = load_chat(args)
    config = load_config(source.base, args)
    heads = getattr(config.get_text_config(), "num_attention_heads", None)
    width, count = args.vllm_tensor_parallel_size, args.vllm_data_parallel_size
    if heads is not None and heads % width:
        raise ConfigError(f"--vllm_tensor_parallel_size: {width}: does not divide the model's {heads} attention heads")
    limit = (args.lmdeploy_session_len if args.use_lmdeploy else None) or args.vllm_max_model_len
    context = context_length(args)
    if limit and context and limit > context:
        raise ConfigError(
            f"--vllm_max_model_len: {limit}: longer than the model's context of {context} tokens; lower it"
        )
    folder = _weights_folder(args.weights_folder)
    devices, notes = _devices(args, width, count)
    settings = Settings(
        model=args.model or str(source.base),
        folder=source.base,
        dtype=args.torch_dtype,
        tensor_parallel_size=width,
        data_parallel_size=count,
        stop_token_ids=tuple(template.stop_token_ids),
        defaults=_sampling_defaults(args, given),
        api_key=args.api_key,
        weights_folder=folder,
    )
    spec = spec_from(
        args,
        model=str(source.base),
        adapters=tuple(map(str, source.adapters)),
        max_model_len=limit,
        tensor_parallel_size=width,
        sleep=args.sleep_level > 0,
    )
    specs = tuple(replace(spec, devices=own, cores=cores) for own, cores in devices)
    return Plan(settings, template, specs, tuple(notes))


def serve(args: Any, plan: Plan) -> int:
    """Until a signal comes; returns the exit code.

    Raises:
        ResourceError: the port is taken, or memory does not suffice.
        EngineDead: no engine is left, and none may be started again.
        SwiftError: an engine does not start.
    """
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(name)s: %(message)s", stream=sys.stderr)
    for line in plan.lines():
        print(f"swift: {line}", file=sys.stderr, flush=True)
    logs = Path(tempfile.mkdtemp(prefix="swift-rollout-"))
    with contextlib.ExitStack() as stack:
        stack.callback(shutil.rmtree, logs, ignore_errors=True)
        listener = stack.enter_context(contextlib.closing(bind(args.host, args.port)))
        signals = stack.enter_context(_Signals())
        try:
            service = _start(args, plan, logs, stack)
            _listen(service, listener, args.host, signals)
        except Stopped:
            print("swift: stopped before it was ready", file=sys.stderr)
        finally:
            signals.closing = True
    return 0


def bind(host: str, port: int) -> socket.socket:
    """The socket that will listen.

    Raises:
        ResourceError: somebody else has the port.
        ConfigError: no such address here.
    """
    try:
        family, kind, number, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except socket.gaierror as error:
        raise ConfigError(f"--host: {host}: no such address ({error.strerror}); use 127.0.0.1 or 0.0.0.0") from error
    made = socket.socket(family, kind, number)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        made.bind(address)
    except OSError as error:
        made.close()
        raise _taken(host, port, error) from error
    return made


def _taken(host: str, port: int, error: OSError) -> ResourceError:
    return ResourceError(
        f"--port: {port}: cannot be used on {host} ({error.strerror}); use another one, or 0 for a free one"
    )


def _start(args: Any, plan: Plan, logs: Path, stack: contextlib.ExitStack) -> Service:
    from swift.rollout.engines import cluster
    from swift.rollout.engines.actor_transport import actor_engine

    timeouts = Timeouts(request_s=args.rollout_timeout, stall_s=args.stall_timeout)
    workers: list[EngineClient] = []
    for index, spec in enumerate(plan.specs):
        worker = actor_engine(
            spec,
            name=f"engine {index} ({', '.join(spec.devices)})",
            log_file=logs / f"engine-{index}.log",
            uses=cluster.use(store_bytes=cluster.store_bytes(spec)),
            timeouts=timeouts,
            restarts=args.engine_restarts,
        )
        stack.callback(worker.close)
        workers.append(worker)
    pool = EnginePool(workers)
    stack.callback(pool.close)
    _ = pool.capabilities  # once the engines are there
    service = Service(pool, plan.template, plan.settings)
    stack.callback(service.close)
    return service


def _listen(service: Service, listener: socket.socket, host: str, signals: _Signals) -> None:
    port = listener.getsockname()[1]
    shown = f"[{host}]" if ":" in host else host
    ended: list[EngineDead] = []

    def give_up(error: EngineDead) -> None:
        ended.append(error)
        server.should_exit = True

    server = WebServer(service, f"ready http://{shown}:{port} model={service.settings.model} weight_version=0", give_up)
    try:
        listener.listen(server.config.backlog)
    except OSError as error:  # a server that was started at the same time was faster
        raise _taken(host, port, error) from error
    signals.server = server
    server.run([listener])
    if ended:
        raise ended[0]


class WebServer(uvicorn.Server):
    """Prints `ready` when it listens, and leaves signals to `_Signals`.

    Args:
        service: what it serves.
        ready: the line.
        give_up: see `make_app`.
    """

    def __init__(self, service: Service, ready: str, give_up: Callable[[EngineDead], None]) -> None:
        super().__init__(
            uvicorn.Config(
                make_app(service, give_up),
                http="h11",  # bounds the length of a request's head
                h11_max_incomplete_event_size=HEAD_BYTES,
                limit_concurrency=CONNECTIONS,
                log_level="warning",
                access_log=False,
                lifespan="on",
                timeout_graceful_shutdown=DRAIN_S,
                timeout_keep_alive=75,
                server_header=False,
            )
        )
        self._ready = ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Say so once it listens."""
        await super().startup(sockets)
        print(self._ready, flush=True)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:  # type: ignore[override]
        """Leave them alone."""
        yield

    def stop(self) -> None:
        """First drain, then do not wait."""
        self.force_exit = self.should_exit
        self.should_exit = True


class _Signals(contextlib.AbstractContextManager["_Signals"]):
    """What SIGTERM and SIGINT do: before the server is up they end the start, then they end the serving.

    Attributes:
        server: once it runs.
        closing: the way out is not interrupted.
    """

    def __init__(self) -> None:
        self.server: WebServer | None = None
        self.closing = False
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> _Signals:
        for number in (signal.SIGTERM, signal.SIGINT):
            self._before[number] = signal.signal(number, self._came)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _came(self, number: int, frame: FrameType | None) -> None:
        if self.closing:
            return
        if self.server is not None:
            self.server.stop()
            return
        self.closing = True
        raise Stopped


def _require(args: Any) -> None:
    from swift.plugin import load_external_plugins

    load_external_plugins(args.external_plugins)
    make = factory(args.infer_backend)
    required = getattr(importlib.import_module(make.__module__), "require", None)
    if required is not None:
        required()


def _weights_folder(given: str | None) -> Path | None:
    if given is None:
        return None
    folder = Path(given).expanduser().resolve()
    if not folder.is_dir() or not os.access(folder, os.R_OK | os.W_OK):
        raise ConfigError(f"--weights_folder: {given}: is no folder that can be read and written; create it first")
    return folder


def _devices(args: Any, width: int, count: int) -> tuple[list[tuple[tuple[str, ...], tuple[int, ...]]], list[str]]:
    """Devices and cores of each engine; TP x DP must fit."""
    accelerators, kind = 0, "cpu"
    if torch.accelerator.is_available():
        current = torch.accelerator.current_accelerator()
        accelerators, kind = torch.accelerator.device_count(), current.type if current is not None else "cuda"
    available = accelerators or args.cpu_devices or width * count
    if width * count > available:
        raise ConfigError(
            f"--vllm_data_parallel_size: {count}: {count} engines of {width} devices need {width * count}, and "
            f"{available} are visible; lower it to {max(1, available // width)}, or --vllm_tensor_parallel_size"
        )
    placement = place(
        PlacementRequest(
            use_vllm=True,
            local_ranks=0,
            accelerators=accelerators,
            accelerator_kind=kind,
            cores=sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else [0],
            cpu_devices=None if accelerators else width * count,
            vllm_mode="dedicated",
            num_infer_workers=width * count,
            vllm_device=args.lmdeploy_device if args.use_lmdeploy else args.vllm_device,
            tensor_parallel_size=width,
        )
    )
    bound = len(placement.cores) > 1
    made = []
    for own in placement.engines:
        indexes = [int(device.partition(":")[2]) for device in own]
        cores = tuple(core for index in indexes for core in placement.cores[index]) if bound else ()
        made.append((own, cores))
    notes = [note for note in placement.notes if "cores" in note]
    spare = list(placement.spare_devices)
    return made, notes + (
        [f"warning: {', '.join(spare)}: used by nobody; raise --vllm_data_parallel_size"] if spare else []
    )


def _sampling_defaults(args: Any, given: Collection[str]) -> dict[str, Any]:
    """What the server was told about sampling, by fields of `SamplingParams`."""
    named = {*given, *args.flags_in_kwargs()}
    told = {name: _plain(getattr(args, flag)) for flag, name in SAMPLING.items() if flag in named}
    wanted, plain = args.sampling_params(), SamplingParams(max_new_tokens=1)
    more = ("frequency_penalty", "presence_penalty", "min_tokens", "regex", "stop_token_ids", "extra")
    return told | {name: getattr(wanted, name) for name in more if getattr(wanted, name) != getattr(plain, name)}


def _plain(value: Any) -> Any:
    return tuple(value) if isinstance(value, Sequence) and not isinstance(value, str) else value
