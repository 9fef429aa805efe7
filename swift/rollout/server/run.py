"""`swift rollout`: checks the settings, starts the engines, serves, and ends all processes it has started.

The port is bound before the model is loaded; it accepts connections when the engines are ready. If this process is
killed, its engines end.

A single engine runs in this process. If it hangs or fails, the process restarts, at most `--engine_restarts` times an
hour, and trainers send their weights and requests again. Several engines are Ray actors, which are replaced one by one.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import secrets
import shutil
import sys
import tempfile
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from swift.data.system import resolve_system
from swift.devices import allowed_cores, count_accelerators
from swift.errors import ConfigError, counted
from swift.models import context_length, load_chat
from swift.models.policy import load_config
from swift.models.source import locate
from swift.models.template import Template
from swift.models.trained import take_trained
from swift.rollout.arguments import request_limit_s
from swift.rollout.engines import guard
from swift.rollout.engines.base import InferenceEngine
from swift.rollout.engines.events import Timeouts
from swift.rollout.engines.guided import require as require_guidance
from swift.rollout.engines.images import require_images
from swift.rollout.engines.pool import EnginePool
from swift.rollout.engines.spec import EngineSpec, build_engine, factory, spec_from
from swift.rollout.placement import PlacementRequest, place
from swift.rollout.server.process import MARKER, Signals, Stopped, bind, listen, may_start_again, start_again
from swift.rollout.server.service import RestartWanted, Service, Settings
from swift.startup import collector_resting
from swift.types import SamplingParams

SAMPLING = {
    "temperature": "temperature", "top_p": "top_p", "top_k": "top_k", "min_p": "min_p",
    "repetition_penalty": "repetition_penalty", "max_completion_length": "max_new_tokens", "stop_words": "stop",
}  # fmt: skip
"""Flag -> field of `SamplingParams`; flags of the server override the defaults of OpenAI's API."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Checked settings of a server. notes: lines for the log."""

    settings: Settings
    template: Template
    notes: tuple[str, ...]

    def lines(self) -> list[str]:
        specs = self.settings.specs
        first, devices = specs[0], ", ".join(device for spec in specs for device in spec.devices)
        parallel = f", tensor parallel {first.tensor_parallel_size}" if first.tensor_parallel_size > 1 else ""
        model = f"{self.settings.model} in {first.dtype}, {first.backend}"
        return [f"server: {model}, {counted(len(specs), 'engine')} on {devices}{parallel}", *self.notes]


def check(args: Any, given: Collection[str]) -> Plan:
    """Check settings, model and devices, without loading weights. given: names of the settings that the user wrote.

    Raises:
        ConfigError: a wrong setting, or an unsuitable model or device.
        ResourceError: the backend's package is missing.
    """
    _require_backend(args)
    regex = args.vllm_guided_decoding_regex
    if regex is not None:
        require_guidance(args.infer_backend, regex)
    trained = take_trained(args, given)
    source = locate(args)
    config = load_config(source.base, args)
    heads = getattr(config.get_text_config(), "num_attention_heads", None)
    limit = (args.lmdeploy_session_len if args.use_lmdeploy else None) or args.vllm_max_model_len
    context = context_length(args)
    if limit and context and limit > context:
        raise ConfigError(
            f"--vllm_max_model_len: {limit}: longer than the model's context of {context} tokens; lower it"
        )
    folder = _weights_folder(args.weights_folder)
    template = load_chat(args)
    if template.vision is not None:
        require_images(args.infer_backend, template.vision.model_type)
    spec = spec_from(
        args,
        model=str(source.base),
        adapters=tuple(map(str, source.adapters)),
        max_model_len=limit,
        tensor_parallel_size=args.vllm_tensor_parallel_size,
        sleep=args.sleep_level > 0,
        sees=template.vision is not None,
    )
    specs, notes = _placed(spec, args, heads)
    names = args.served_model_name or [args.model or str(source.base)]
    settings = Settings(
        model=names[0],
        names=tuple(names[1:]),
        specs=specs,
        defaults=_sampling_defaults(args, given),
        system=resolve_system(args.system)[0],
        api_key=args.api_key,
        weights_folder=folder,
        stall_s=args.stall_timeout,
        request_s=args.rollout_timeout or request_limit_s(args.vllm_max_model_len or context or 0),
    )
    return Plan(settings, template, (*trained, *notes))


def run(resolved: Any) -> int:
    """Run `swift rollout` with resolved settings; returns the exit status."""
    with collector_resting():
        plan = check(resolved.args, resolved.given)
    return serve(resolved.args, plan)


def serve(args: Any, plan: Plan) -> int:
    """Until a signal comes; the exit code. Raises EngineDead: no engine is left, and none may be started again."""
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(name)s: %(message)s", stream=sys.stderr)
    for line in plan.lines():
        print(f"swift: {line}", file=sys.stderr, flush=True)
    before_restart = contextlib.ExitStack()
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(contextlib.closing(bind(args.host, args.port)))
        signals = stack.enter_context(Signals())
        try:
            service = _start(args, plan, stack, before_restart)
            if signals.closing:  # a library has caught `Stopped` in a callback
                raise Stopped
            dead, copy = listen(service, listener, args.host, signals) or (None, None)
            requested = isinstance(dead, RestartWanted)
            single = len(plan.settings.specs) == 1
            if copy is not None and single and (requested or may_start_again(args.engine_restarts)):
                print(f"swift: {dead}; the server starts again", file=sys.stderr, flush=True)
                before_restart.close()
                start_again(copy)
            if dead is not None:
                raise dead
        except BaseException:
            if not signals.closing:
                raise
            print("swift: stopped before it was ready", file=sys.stderr)  # a library may have converted `Stopped`
        finally:
            signals.closing = True
    return 0


def _start(args: Any, plan: Plan, stack: contextlib.ExitStack, before_restart: contextlib.ExitStack) -> Service:
    """Start the engines and their service. One engine runs in this process, several in Ray actors."""
    if len(plan.settings.specs) > 1:
        engine = _in_actors(args, plan, stack)
    else:
        engine = _in_this_process(plan.settings.specs[0], stack, before_restart)
    stack.callback(engine.close)
    service = Service(engine, plan.template, plan.settings)
    stack.callback(service.close)
    return service


def _in_this_process(
    spec: EngineSpec, stack: contextlib.ExitStack, before_restart: contextlib.ExitStack
) -> InferenceEngine:
    """Start the engine. A guard ends its tensor-parallel workers with this process, and before a restart."""
    if spec.tensor_parallel_size > 1:
        os.environ[MARKER] = secrets.token_hex(8)
        marker = f"{MARKER}={os.environ[MARKER]}"
        process = guard.start(marker)
        for end in (stack, before_restart):
            end.callback(guard.finish, process, marker)
    with collector_resting():
        return build_engine(spec)


def _in_actors(args: Any, plan: Plan, stack: contextlib.ExitStack) -> InferenceEngine:
    from swift.rollout.engines import cluster
    from swift.rollout.engines.actor_client import ActorClient

    logs = Path(tempfile.mkdtemp(prefix="swift-rollout-"))
    stack.callback(shutil.rmtree, logs, ignore_errors=True)
    timeouts = Timeouts.of(plan.settings.specs[0].limit_s, stall_s=args.stall_timeout)
    clients = []
    for index, spec in enumerate(plan.settings.specs):
        clients.append(
            ActorClient(
                spec,
                name=f"engine {index} ({', '.join(spec.devices)})",
                log_file=logs / f"engine-{index}.log",
                uses=cluster.use(store_bytes=cluster.store_bytes(spec)),
                timeouts=timeouts,
                restarts=args.engine_restarts,
            )
        )
        stack.callback(clients[-1].close)
    pool = EnginePool(clients)
    _ = pool.capabilities  # waits until the engines have started
    return pool


def _require_backend(args: Any) -> None:
    """Check that the packages of the backend are installed."""
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


def _placed(spec: EngineSpec, args: Any, heads: int | None) -> tuple[tuple[EngineSpec, ...], tuple[str, ...]]:
    """Assign devices and cores to the engines; returns their specs and notes. Raises ConfigError: too few devices."""
    width, count = args.vllm_tensor_parallel_size, args.vllm_data_parallel_size
    accelerators, kind = count_accelerators()
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
            cores=allowed_cores(),
            cpu_devices=None if accelerators else width * count,
            vllm_mode="dedicated",
            num_infer_workers=width * count,
            vllm_device=args.lmdeploy_device if args.use_lmdeploy else args.vllm_device,
            tensor_parallel_size=width,
            num_attention_heads=heads,
        )
    )

    def cores(devices: Sequence[str]) -> tuple[int, ...]:
        indexes = [int(device.partition(":")[2]) for device in devices] if len(placement.cores) > 1 else []
        return tuple(core for index in indexes for core in placement.cores[index])

    notes = [note for note in placement.notes if "cores" in note]
    if placement.spare_devices:
        spare = ", ".join(placement.spare_devices)
        notes.append(f"warning: {spare}: unused; raise --vllm_data_parallel_size")
    specs = tuple(replace(spec, devices=devices, cores=cores(devices)) for devices in placement.engines)
    return specs, tuple(notes)


def _sampling_defaults(args: Any, given: Collection[str]) -> dict[str, Any]:
    """Default sampling settings from the flags of the server, by field of `SamplingParams`."""
    named = {*given, *args.flags_in_kwargs()}
    flags = {name: _as_tuple(getattr(args, flag)) for flag, name in SAMPLING.items() if flag in named}
    params, defaults = args.sampling_params(), SamplingParams(max_new_tokens=1)
    more = ("frequency_penalty", "presence_penalty", "min_tokens", "regex", "stop_token_ids", "extra")
    return flags | {name: getattr(params, name) for name in more if getattr(params, name) != getattr(defaults, name)}


def _as_tuple(value: Any) -> Any:
    """A list as a tuple; other values unchanged."""
    return tuple(value) if isinstance(value, Sequence) and not isinstance(value, str) else value
