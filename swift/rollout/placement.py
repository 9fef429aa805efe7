"""Placement of training processes and engines on the devices of a node. Pure: callers count devices and cores.

    in_process   no engine: each training process generates with its own model
    colocate     rank r and its engine share device r; TP consecutive ranks form one engine
    dedicated    ranks on the first L devices, engines on other devices (the last W unless named)
    server       engines of other processes, addressed by URLs

D = devices of the node, L = training processes of the node (NPROC_PER_NODE), W = num_infer_workers (devices for
inference), TP = vllm_tensor_parallel_size; W/TP engines. Without an accelerator the allowed CPU cores are divided into
D contiguous groups `cpu:k`, so that every mode runs on a laptop.
"""

from __future__ import annotations

import contextlib
import ipaddress
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal
from urllib.parse import urlsplit

from swift.errors import ConfigError, counted, join_problems

Mode = Literal["in_process", "colocate", "dedicated", "server"]
OWN_SERVER = "a server of this run"
"""Placeholder for the address of a server that is not started yet."""
OFFLOADS = ("offload_model", "offload_optimizer", "gc_collect_after_offload")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementRequest:
    """Settings of the user, and devices of the machine.

    use_vllm: whether an engine of any backend generates, not the trainer's model. accelerators: number of visible
    devices of the node; 0 selects the CPU rules. cores: ids of the allowed CPU cores. vllm_mode, num_infer_workers:
    None infers them. vllm_device: ["auto"] or one entry per inference device. servers: addresses of servers.
    prefetch_given: whether the user has set `prefetch_depth`. num_attention_heads: None if unknown. shares_ranks:
    whether the backend can shard one engine over training processes. offloads: flags in use that offload the trainer.
    """

    use_vllm: bool
    local_ranks: int = 1
    accelerators: int = 0
    accelerator_kind: str = "cuda"
    cores: Sequence[int] = (0,)
    cpu_devices: int | None = None
    vllm_mode: Literal["colocate", "dedicated", "server"] | None = None
    num_infer_workers: int | None = None
    vllm_device: Sequence[str] = ("auto",)
    tensor_parallel_size: int = 1
    servers: Sequence[str] = ()
    async_generate: bool = False
    prefetch_given: bool = False
    sleep_level: Literal[0, 1, 2] = 0
    num_attention_heads: int | None = None
    shares_ranks: bool = True
    offloads: Sequence[str] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Devices of all processes and engines of one node.

    trainer_devices[r]: device of local rank r. engines[e]: devices of engine e; () for in_process and server. cores[k]:
    CPU cores of `cpu:k`; () with accelerators. spare_devices: unused devices. sleep_level: the level in effect. notes:
    remarks and warnings for the user, one line each.
    """

    mode: Mode
    local_ranks: int
    tensor_parallel_size: int
    trainer_devices: tuple[str, ...]
    engines: tuple[tuple[str, ...], ...] = ()
    servers: tuple[str, ...] = ()
    cores: tuple[tuple[int, ...], ...] = ()
    spare_devices: tuple[str, ...] = ()
    sleep_level: Literal[0, 1, 2] = 0
    notes: tuple[str, ...] = field(default=())


TRANSPORTS: dict[str, tuple[str, ...]] = {
    "dedicated": ("object_store", "broadcast"),
    "server": ("disk", "http", "broadcast"),
}
"""`--weight_transport` by mode; engines of other modes run in the trainer's processes."""


def check_transport(mode: Mode, *, weight_transport: str, ray_address: str | None, ray_token_file: str | None) -> None:
    """Raises ConfigError for a weight transport or a Ray cluster that does not fit the placement."""
    problems = []
    transports = TRANSPORTS.get(mode, ())
    if weight_transport not in ("auto", *transports):
        problems.append(
            f"--weight_transport: {weight_transport}: not for engines that run {mode}; valid: "
            + ", ".join(("auto", *transports))
        )
    if ray_address is not None and mode != "dedicated":
        problems.append(f"--ray_address: {ray_address}: engines run {mode} here; --vllm_mode dedicated")
    host = (ray_address or "").rpartition(":")[0]
    if ray_token_file is None and host and host not in ("127.0.0.1", "localhost", "[::1]"):
        problems.append(f"--ray_address: {ray_address}: another host without a token; give --ray_token_file")
    join_problems(problems)


def request_from(
    args: Any,
    *,
    local_ranks: int,
    accelerators: int,
    accelerator_kind: str,
    cores: Sequence[int],
    prefetch_given: bool = False,
    heads: Callable[[], int | None] = lambda: None,
) -> PlacementRequest:
    """The request of resolved arguments; modes without an engine (sft) need none.

    heads: returns the number of the model's attention heads; called with tensor parallelism only.
    """
    machine: dict[str, Any] = {
        "local_ranks": local_ranks,
        "accelerators": accelerators,
        "accelerator_kind": accelerator_kind,
        "cores": cores,
        "offloads": [name for name in OFFLOADS if getattr(args, name, False)],
    }
    if not has_own_engine(args):
        ahead = bool(getattr(args, "async_generate", False))
        return PlacementRequest(use_vllm=False, async_generate=ahead, prefetch_given=prefetch_given, **machine)
    return PlacementRequest(
        use_vllm=True,
        cpu_devices=args.cpu_devices,
        vllm_mode=args.vllm_mode,
        num_infer_workers=args.num_infer_workers,
        vllm_device=args.lmdeploy_device if args.use_lmdeploy else args.vllm_device,
        tensor_parallel_size=args.vllm_tensor_parallel_size,
        servers=server_urls(args.vllm_server_base_url, args.vllm_server_host, args.vllm_server_port)
        or ([OWN_SERVER] if getattr(args, "atropos_env", None) else []),
        async_generate=args.async_generate,
        prefetch_given=prefetch_given,
        sleep_level=args.sleep_level,
        shares_ranks=not args.use_lmdeploy,
        num_attention_heads=heads() if args.vllm_tensor_parallel_size > 1 else None,
        **machine,
    )


def has_own_engine(args: Any) -> bool:
    """Whether an engine generates, not the trainer's model: another backend, or another mode."""
    backend = getattr(args, "infer_backend", None)
    is_requested = getattr(args, "use_vllm", False) or getattr(args, "use_lmdeploy", False)
    return bool(is_requested or getattr(args, "vllm_mode", None) or backend not in (None, "transformers"))


def _is_url(text: str) -> bool:
    try:
        parts = urlsplit(text)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False


def _is_host(text: str) -> bool:
    with contextlib.suppress(ValueError):
        return bool(ipaddress.ip_address(text))
    return bool(re.fullmatch(r"[\w.-]+", text))


def server_urls(base_urls: Sequence[str], hosts: Sequence[str], ports: Sequence[int]) -> list[str]:
    """The addresses of the servers; base URLs take precedence, and one port applies to all hosts.

    Raises ConfigError: neither one port nor one per host, or an invalid URL or host.
    """
    if base_urls:
        join_problems(
            [
                f"--vllm_server_base_url: {url}: not the URL of a server; give one such as http://10.0.0.1:8000"
                for url in base_urls
                if not _is_url(url)
            ]
        )
        return list(base_urls)
    join_problems(
        [
            f"--vllm_server_host: {host}: not the name or address of a machine; its port is --vllm_server_port, and a "
            "whole URL --vllm_server_base_url"
            for host in hosts
            if not _is_host(host)
        ]
    )
    if len(ports) not in (1, len(hosts)) and hosts:
        raise ConfigError(
            f"--vllm_server_port: {' '.join(map(str, ports))}: {len(ports)} ports for {len(hosts)} hosts; "
            f"one for all, or {len(hosts)}"
        )
    if len(ports) == 1:
        ports = [*ports] * len(hosts)
    names = [f"[{host}]" if ":" in host else host for host in hosts]  # an IPv6 address
    return [f"http://{name}:{port}" for name, port in zip(names, ports, strict=False)]


def place(request: PlacementRequest) -> Placement:
    """Choose the mode and assign the devices.

    Raises:
        ConfigError: no mode fits, or the numbers contradict the mode; the message lists all valid choices.

    Example:
        8 devices, NPROC_PER_NODE=7, --num_infer_workers 1: dedicated, ranks on cuda:0..6, the engine on cuda:7.
    """
    ranks = request.local_ranks
    kind = request.accelerator_kind if request.accelerators else "cpu"
    dedicated = (
        request.use_vllm and not request.servers and (request.vllm_mode == "dedicated" or request.async_generate)
    )
    engines = (request.num_infer_workers or 1) if dedicated else 0
    devices = request.accelerators or request.cpu_devices or ranks + engines
    if request.accelerators and ranks > devices:
        raise ConfigError(
            f"NPROC_PER_NODE: {ranks}: more than {counted(devices, f'visible {kind} device')}; "
            f"NPROC_PER_NODE={devices}, or make all devices visible to every process (CUDA_VISIBLE_DEVICES)"
        )
    workers = request.num_infer_workers
    if workers is None:
        workers = ranks if request.vllm_mode == "colocate" or ranks == devices else 1
    mode: Mode = _mode(request, devices, workers) if request.use_vllm else "in_process"
    join_problems(_contradictions(request, mode, devices, workers))

    names = tuple(f"{kind}:{index}" for index in range(max(devices, ranks)))
    trainers = names[:ranks]
    engine_devices: tuple[str, ...] = ()
    if mode in ("colocate", "dedicated"):
        engine_devices = _engine_devices(request, mode, names[:devices], workers)
    tp = request.tensor_parallel_size if engine_devices else 1
    notes: list[str] = []
    cores: tuple[tuple[int, ...], ...] = ()
    spare: tuple[str, ...] = ()
    if request.accelerators:
        spare = tuple(name for name in names if name not in {*trainers, *engine_devices})
    else:
        allowed = list(request.cores) or [0]
        edges = [index * len(allowed) // len(names) for index in range(len(names) + 1)]
        cores = tuple(tuple(allowed[start:end]) for start, end in pairwise(edges))
        if len(allowed) < len(names):
            notes.append(f"warning: {len(allowed)} CPU cores for {len(names)} devices: some devices share a core")
            cores = tuple((allowed[index % len(allowed)],) for index in range(len(names)))
    return Placement(
        mode=mode,
        local_ranks=ranks,
        tensor_parallel_size=tp,
        trainer_devices=trainers,
        engines=tuple(engine_devices[i : i + tp] for i in range(0, len(engine_devices), tp)),
        servers=tuple(request.servers) if mode == "server" else (),
        cores=cores,
        spare_devices=spare,
        sleep_level=request.sleep_level if mode == "colocate" else 0,
        notes=tuple(notes + _notes(request, mode, spare)),
    )


def describe(placement: Placement) -> str:
    """The placement in one line, for messages."""
    p = placement
    line = f"placement: {p.mode}; {counted(p.local_ranks, 'training process')} on {_span(p.trainer_devices)}"
    if p.mode == "in_process":
        line += "; each generates with its own model"
    elif p.mode == "server":
        line += f"; generation by {', '.join(p.servers)}"
    else:
        width = f", tensor parallel {p.tensor_parallel_size}" if p.tensor_parallel_size > 1 else ""
        devices = _span([name for engine in p.engines for name in engine])
        line += f"; {counted(len(p.engines), 'engine')} on {devices}{width}"
    if p.cores and p.engines:
        cores = {core for group in p.cores for core in group}
        line += f"; {counted(len(cores), 'CPU core')} in {counted(len(p.cores), 'group')}"
    return line


def _span(names: Sequence[str]) -> str:
    """`cuda:0..3` for consecutive devices, a list otherwise."""
    indexes = [int(name.rpartition(":")[2]) for name in names]
    if len(names) > 2 and indexes == list(range(indexes[0], indexes[0] + len(names))):
        return f"{names[0]}..{indexes[-1]}"
    return ", ".join(names)


def _mode(request: PlacementRequest, devices: int, workers: int) -> Mode:
    """The mode of an engine, as given or inferred."""
    ranks = request.local_ranks
    if request.vllm_mode is not None:
        return request.vllm_mode
    if request.servers:
        return "server"
    if workers == devices == ranks:
        return "colocate"
    if ranks + workers == devices:
        return "dedicated"
    colocate = f"--num_infer_workers {devices} (colocate)"
    choices = [colocate if ranks == devices else f"NPROC_PER_NODE={devices} {colocate}"]
    if ranks < devices:
        choices.append(f"--num_infer_workers {devices - ranks} (dedicated)")
    if workers < devices:
        choices.append(f"NPROC_PER_NODE={devices - workers} --num_infer_workers {workers} (dedicated)")
    raise ConfigError(
        f"placement: devices={devices} NPROC_PER_NODE={ranks} num_infer_workers={workers}: no mode fits; "
        f"valid: {'; '.join([*choices, '--vllm_server_host'])}"
    )


def _contradictions(request: PlacementRequest, mode: Mode, devices: int, workers: int) -> list[str]:
    problems = []
    ranks = request.local_ranks
    if mode == "colocate":
        if ranks > devices:
            problems.append(
                f"--vllm_mode: colocate: {ranks} training processes need a device each, {devices} given; "
                f"NPROC_PER_NODE={devices}"
            )
        if workers != ranks:
            problems.append(
                f"--num_infer_workers: {workers}: colocate has one per training process; leave it out, or {ranks}"
            )
    if mode == "dedicated" and ranks + workers > devices:
        fix = (
            f"NPROC_PER_NODE={devices - workers}, or --num_infer_workers {max(1, devices - ranks)}"
            if workers < devices
            else f"at least {ranks + workers} devices, or --vllm_mode colocate"
        )
        problems.append(
            f"--vllm_mode: dedicated: {counted(ranks, 'training process')} and "
            f"{counted(workers, 'inference device')} need {ranks + workers}, {devices} given; {fix}"
        )
    if mode == "server" and not request.servers:
        problems.append("--vllm_mode: server: no address; give --vllm_server_host or --vllm_server_base_url")
    if mode in ("colocate", "dedicated") and request.servers:
        problems.append(
            f"--vllm_mode: {mode}: a server address is given too ({', '.join(request.servers)}); "
            f"--vllm_mode server, or leave the address out"
        )
    if OWN_SERVER in request.servers and request.accelerators:
        problems += _no_room_for_server(request, devices)
    if mode in ("colocate", "dedicated"):
        problems += _bad_tensor_parallel(request, ranks if mode == "colocate" else workers, mode)
    if mode in ("in_process", "colocate"):
        fix = "--vllm_mode dedicated, or a server (--vllm_server_host)"
        if request.async_generate:
            problems.append(f"--async_generate: true: generation shares the device with training in {mode} mode; {fix}")
        if request.prefetch_given:
            problems.append(f"--prefetch_depth: given: nothing is generated ahead in {mode} mode; {fix}")
    return problems


def _no_room_for_server(request: PlacementRequest, devices: int) -> list[str]:
    """Problems of the server of this run, which uses the last devices or those of `--vllm_device`."""
    width, given = request.tensor_parallel_size, list(request.vllm_device)
    own = [f"{request.accelerator_kind}:{index}" for index in range(request.local_ranks)]
    if request.local_ranks + width > devices:
        fix = f"NPROC_PER_NODE={devices - width}" if width < devices else f"at least {width + 1} devices"
        return [
            f"--atropos_env: {counted(request.local_ranks, 'training process')} and the policy server need "
            f"{request.local_ranks + width} devices, {devices} given; {fix}, or --vllm_server_host"
        ]
    if taken := [name for name in given if name in own]:
        return [f"--vllm_device: {' '.join(given)}: {' '.join(taken)} belongs to a training process; name others"]
    return []


def _bad_tensor_parallel(request: PlacementRequest, group: int, mode: Mode) -> list[str]:
    tp = request.tensor_parallel_size
    name = "NPROC_PER_NODE" if mode == "colocate" else "num_infer_workers"
    if group % tp:
        valid = [value for value in range(1, group + 1) if group % value == 0]
        return [
            f"--vllm_tensor_parallel_size: {tp}: does not divide {name}={group} ({mode}); "
            f"valid: {', '.join(map(str, valid))}"
        ]
    if tp > 1 and mode == "colocate" and not request.shares_ranks:
        return [
            f"--vllm_tensor_parallel_size: {tp}: LMDeploy cannot shard an engine over training processes; 1, or "
            "--vllm_mode dedicated"
        ]
    heads = request.num_attention_heads
    if heads is not None and heads % tp:
        return [f"--vllm_tensor_parallel_size: {tp}: does not divide the {heads} attention heads of the model"]
    return []


def _engine_devices(request: PlacementRequest, mode: Mode, names: tuple[str, ...], workers: int) -> tuple[str, ...]:
    """The devices of the engines in colocate or dedicated mode."""
    own, given = names[: request.local_ranks], tuple(request.vllm_device)
    if given == ("auto",):
        return own if mode == "colocate" else names[-workers:]
    flag = f"--vllm_device: {' '.join(given)}"
    if unknown := [name for name in given if name not in names]:
        raise ConfigError(f"--vllm_device: {' '.join(unknown)}: no such device; valid: {_span(names)}")
    if len(set(given)) != len(given):
        raise ConfigError(f"{flag}: a device is named twice; name {workers} different devices, or auto")
    if len(given) != workers:
        raise ConfigError(f"{flag}: {len(given)} devices for num_infer_workers={workers}; name {workers}, or auto")
    if mode == "colocate" and given != own:
        raise ConfigError(f"{flag}: in colocate mode each process uses its own device; {' '.join(own)}, or auto")
    if mode == "dedicated" and (taken := [name for name in given if name in own]):
        free = _span(names[len(own) :])
        raise ConfigError(f"{flag}: {' '.join(taken)} belongs to a training process; valid: {free}, or auto")
    return given


def _notes(request: PlacementRequest, mode: Mode, spare: tuple[str, ...]) -> list[str]:
    notes = []
    own_server = OWN_SERVER in request.servers  # it uses devices
    if spare and not own_server:
        notes.append(f"warning: {', '.join(spare)}: unused; raise NPROC_PER_NODE or --num_infer_workers")
    if mode == "server":
        if request.num_infer_workers is not None:
            notes.append(f"--num_infer_workers: {request.num_infer_workers}: ignored with a server")
        if list(request.vllm_device) != ["auto"] and not own_server:
            notes.append(f"--vllm_device: {' '.join(request.vllm_device)}: ignored with a server")
    if request.sleep_level and mode != "colocate":
        notes.append(f"--sleep_level: {request.sleep_level}: acts in colocate mode only; 0 in {mode} mode")
    if request.offloads and mode != "colocate":
        given = ", ".join(f"--{name}" for name in request.offloads)
        notes.append(f"{given}: true: acts in colocate mode only; without effect in {mode} mode")
    return notes
