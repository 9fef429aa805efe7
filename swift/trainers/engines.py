"""Makes the engines of a run: which of them this rank owns, on which device, and how weights are sent to them.

    in_process   every rank samples with the trainer's own model
    colocate     every rank (or tensor-parallel group of ranks) owns an engine on its own device
    dedicated    rank 0 owns the engines of all nodes, each in a Ray actor of its own; the nodes form one Ray cluster
    server       rank 0 owns the connections to `swift rollout` servers

All that depends on the placement is decided here.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import secrets
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from swift.devices import allowed_cores, cache_room, count_accelerators, is_worker, own_device
from swift.errors import ConfigError, SwiftError, end_process
from swift.rollout.engines.guided import require as require_guidance
from swift.rollout.engines.spec import OWN_SHARE, EngineSpec, build_engine, factory, spec_from
from swift.rollout.placement import (
    OWN_SERVER,
    Placement,
    check_transport,
    has_own_engine,
    place,
    request_from,
)
from swift.rollout.round import EngineShare
from swift.trainers.recorded_engine import RecordedEngine

if TYPE_CHECKING:
    from swift.rollout.engines.base import InferenceEngine
    from swift.rollout.engines.cluster import Cluster
    from swift.rollout.engines.events import Timeouts
    from swift.rollout.sources.atropos.launch import AtroposProcesses
    from swift.trainers.distributed import Collectives
    from swift.trainers.grpo.prepare import Parts


COLOCATED_SHARE = 0.45
"""Share of a device's memory for vLLM beside a trainer, whose weights are there when the engine starts."""


@dataclass(slots=True)
class EngineSetup:
    """The engine of this rank (None if another rank samples for it) and what follows from its placement.

    share: its part of each round. placement: of the node. engine_logs: folder of the engines' own output. limit_s: see
    `EngineSpec`. own_limit_s: time without progress that the engine's own time limits allow: of an engine in another
    process, a restart included, or of completions that environments make; 0 without such a limit. node: the part of the
    run's Ray cluster that this process started. sources: the servers that environments sample from and report to, on
    rank 0. begin: called after the parity check, before the first rollout.
    """

    engine: InferenceEngine | None
    share: EngineShare | None
    placement: Placement
    engine_logs: Path | None = None
    limit_s: float = 300.0
    own_limit_s: float = 0.0
    node: Cluster | None = None
    sources: AtroposProcesses | None = None
    begin: Callable[[], None] = lambda: None

    def close(self) -> None:
        """End the engines; repeatable."""
        if self.engine is not None:
            self.engine.close()
        if self.sources is not None:
            self.sources.close()
        if self.node is not None:
            self.node.close()
        self.engine = self.node = self.sources = None

    @contextlib.contextmanager
    def logs_in(self, folder: Path) -> Iterator[None]:
        """Show the engines' logs in the run's folder; at the end the engines are closed, and links become files."""
        made = self.engine_logs
        if self.sources is not None:
            self.sources.processes.log_to(folder)
        links = {folder / log.name: log for log in sorted(made.glob("*.log"))} if made is not None else {}
        links = {link: log for link, log in links.items() if not link.exists() and not link.is_symlink()}
        for link, log in links.items():
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(log)
        try:
            yield
        finally:
            self.close()
            for link, log in links.items():
                link.unlink()
                if log.exists():
                    shutil.move(str(log), str(link))
            if made is not None:
                shutil.rmtree(made, ignore_errors=True)


def find_placement(args: Any, *, local_ranks: int | None = None, prefetch_given: bool = False) -> Placement:
    """The placement of this node, from the settings, the launch variables and the machine.

    Args:
        args: the settings.
        local_ranks: training processes of the node; None asks the variables of a worker.
        prefetch_given: whether the user gave `prefetch_depth`.

    Raises:
        ConfigError: the numbers do not fit together.
    """
    accelerators, kind = count_accelerators()
    ranks = local_ranks or int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    by_scheduler = is_worker(os.environ) and "TORCHELASTIC_RUN_ID" not in os.environ
    if accelerators == 1 and by_scheduler:  # which shows each process a device of its own
        ranks = 1
    if accelerators and getattr(args, "ray_address", None):  # engines have devices of other nodes, after those here
        accelerators += args.num_infer_workers or 1
    placement = place(
        request_from(
            args,
            local_ranks=ranks,
            accelerators=accelerators,
            accelerator_kind=kind,
            cores=allowed_cores(),
            prefetch_given=prefetch_given,
            heads=lambda: attention_heads(args),
        )
    )
    nodes = int(os.environ.get("WORLD_SIZE", "1")) // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    several = max(int(os.environ.get("NNODES", "1")), nodes) > 1 or getattr(args, "ray_address", None)
    if placement.mode == "dedicated" and getattr(args, "use_lmdeploy", False) and several:
        raise ConfigError(
            "--use_lmdeploy: true: in a Ray cluster it waits for devices that its own engine holds; "
            "use --use_vllm true, or engines on this machine alone"
        )
    check_transport(
        placement.mode,
        weight_transport=getattr(args, "weight_transport", "auto"),
        ray_address=getattr(args, "ray_address", None),
        ray_token_file=getattr(args, "ray_token_file", None),
    )
    return placement


def require_backend(args: Any) -> None:
    """Checks, before any weights are loaded, that `--infer_backend` exists and its package is installed."""
    if getattr(args, "replay_from", None):
        RecordedEngine(args.replay_from)
        return
    make = factory(args.infer_backend)
    check = getattr(importlib.import_module(make.__module__), "require", None)
    if check is not None and has_own_engine(args) and args.vllm_mode != "server":
        check()
    if args.vllm_guided_decoding_regex is not None and args.vllm_mode != "server":
        require_guidance(args.infer_backend, args.vllm_guided_decoding_regex)


def bind_trainer(placement: Placement, local_rank: int) -> None:
    """Bind this process to the cores of its device, if CPU cores stand for devices; for engines with own cores."""
    if not placement.cores or len(placement.cores) == 1:
        return
    import torch

    device = placement.trainer_devices[local_rank]
    cores = placement.cores[int(device.rpartition(":")[2])]
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, cores)
    torch.set_num_threads(len(cores))


def build_engines(parts: Parts, model: Any) -> EngineSetup:
    """The engine of this rank, started, if its placement has one; collective: if one fails, all ranks raise.

    An engine with the trainer's weights has a cache of a fixed share of the device, so that batch shapes are the same
    in every run.
    """
    args, placement, template = parts.args, parts.placement, parts.template
    own_limit_s = 0.0
    if parts.rollout_func is not None or parts.play is not None:  # in addition to the time of the engine
        own_limit_s += args.rollout_timeout
    if args.rollout_source == "atropos":
        own_limit_s += args.atropos_timeout
    elif args.rollout_source == "nemo_gym":
        own_limit_s += max(args.nemo_gym_verify_timeout, args.nemo_gym_run_timeout)
    setup = EngineSetup(None, None, placement, own_limit_s=own_limit_s)
    try:
        with parts.collectives.together():
            if placement.mode == "in_process":
                recorded = args.replay_from
                setup.engine = RecordedEngine(recorded) if recorded else _with_trainers_weights(parts, model)
                setup.share = EngineShare(parts.collectives.rank, parts.collectives.world_size)
            else:
                spec = _engine_spec(parts)
                setup.limit_s = spec.limit_s
                if placement.mode in ("dedicated", "server"):
                    setup.own_limit_s += _own_limit(args, spec, placement.mode)
                if args.rollout_source == "atropos" and parts.collectives.is_main:
                    _start_sources(setup, args, spec)
                _make(setup, args, parts.collectives, spec)
            if setup.engine is not None:
                setup.engine.check_sampling(args.sampling_params())
                if args.moe_router_replay == "rollout":
                    check_routes(setup.engine)
                if template.vision is not None:
                    check_images(setup.engine)
                if args.in_flight_updates:
                    check_in_flight(setup.engine)
    except BaseException:
        setup.close()
        raise
    return setup


def _with_trainers_weights(parts: Parts, model: Any) -> InferenceEngine:
    from swift.rollout.engines.transformers import TransformersEngine

    return TransformersEngine(
        model,
        eos_token_ids=parts.template.stop_token_ids,
        tokenizer=parts.template.tokenizer,
        cache_bytes=cache_room(own_device()),
        returns_routes=parts.args.moe_router_replay == "rollout",
    )


def exact_samples(given: bool | None, setup: EngineSetup) -> bool:
    """Whether samples of the training have seeds of their own (`SamplingParams.exact`).

    vLLM launches a kernel for each seeded row of a step on a GPU. Where it takes turns with the trainer, its own
    generator would be the process's.
    """
    if given is not None or setup.engine is None:
        return given is not False
    apart = setup.placement.mode in ("dedicated", "server")
    return not (apart and setup.engine.capabilities.seeds_are_slow)


def check_in_flight(engine: InferenceEngine) -> None:
    """Raises ConfigError for in-flight updates of an engine that cannot be paused between two tokens."""
    if not engine.capabilities.in_flight_updates:
        raise ConfigError(
            f"--in_flight_updates: true: the engine {engine.capabilities.name} cannot be paused between two tokens; "
            "--in_flight_updates false"
        )


def check_routes(engine: InferenceEngine) -> None:
    """Raises ConfigError for routing replay with an engine that does not return the experts of tokens."""
    if not engine.capabilities.routes:
        raise ConfigError(
            f"--moe_router_replay: rollout: the engine {engine.capabilities.name} does not return the experts that it "
            "chooses; use trainer, or off"
        )


def check_images(engine: InferenceEngine) -> None:
    """Raises ConfigError for a model that sees images and an engine that takes none."""
    if not engine.capabilities.images:
        raise ConfigError(
            f"--infer_backend: the engine {engine.capabilities.name} takes no images; use vllm or transformers"
        )


def _make(setup: EngineSetup, args: Any, collectives: Collectives, spec: EngineSpec) -> None:
    """Set the engine, which has weights of its own, and its share of a round."""
    placement = setup.placement
    node, local_rank = divmod(collectives.rank, placement.local_ranks)
    nodes = collectives.world_size // placement.local_ranks
    if placement.mode == "colocate":
        width, per_node = placement.tensor_parallel_size, len(placement.engines)
        number = local_rank // width
        setup.engine = _build_here(_on_device(spec, placement, placement.engines[number], local_rank))
        setup.share = EngineShare(
            node * per_node + number, nodes * per_node, reports=local_rank % width == 0, lockstep=width > 1
        )
    elif placement.mode == "dedicated":
        if nodes > 1 and args.ray_address is None:
            _form_cluster(setup, spec, args, collectives)
        if collectives.is_main:
            setup.engine_logs = Path(tempfile.mkdtemp(prefix="swift-engines-"))
            setup.engine = _dedicated(setup.placement, nodes, setup.engine_logs, spec, args)
            setup.share = EngineShare()
    elif placement.mode == "server" and collectives.is_main:
        setup.engine = _servers(spec, args, placement)
        setup.share = EngineShare()


def _start_sources(setup: EngineSetup, args: Any, spec: EngineSpec) -> None:
    """Start the message API and the policy server that `--atropos_env` needs, unless their addresses are given."""
    from swift.rollout.sources.atropos.launch import AtroposProcesses

    sources = setup.sources = AtroposProcesses(args)
    if args.atropos_env and args.atropos_url is None:
        sources.start_api()
    if OWN_SERVER in setup.placement.servers:
        sources.start_server(spec.max_model_len)
        setup.placement = replace(setup.placement, servers=(sources.server_url,))
    sources.server_url = setup.placement.servers[0]


def _engine_spec(parts: Parts) -> EngineSpec:
    """The engine that the settings describe, without a device."""
    from swift.models.source import locate
    from swift.trainers.grpo.arguments import max_prompt_length

    args, placement, longest = parts.args, parts.placement, max_prompt_length(parts.args)
    given = args.lmdeploy_session_len if args.use_lmdeploy else args.vllm_max_model_len
    colocated = placement.mode == "colocate"
    turns = parts.play is not None and args.rollout_source == "engine"
    if not given:
        whole = turns and args.completion_length_limit_scope == "per_round"
        given = args.max_model_len if whole else longest and longest + args.max_completion_length
    return spec_from(
        args,
        vllm_share=COLOCATED_SHARE if colocated else OWN_SHARE,
        model=str(locate(args).base),
        eos_token_ids=tuple(parts.template.stop_token_ids),
        max_model_len=given,
        tensor_parallel_size=placement.tensor_parallel_size,
        in_ranks=colocated and placement.tensor_parallel_size > 1,
        sleep=placement.sleep_level > 0,
        sees=parts.template.vision is not None,
    )


def attention_heads(args: Any) -> int | None:
    """Number of attention heads of the model, from its config; None if the config has no such number."""
    from swift.models.policy import load_config
    from swift.models.source import locate

    return getattr(load_config(locate(args).base, args).get_text_config(), "num_attention_heads", None)


def _build_here(spec: EngineSpec) -> InferenceEngine:
    """The engine in this process. If other ranks wait for it in the engine's own start, a failure ends the process."""
    try:
        return build_engine(spec)
    except SwiftError as error:
        if spec.in_ranks:
            end_process(error)
        raise


def _on_device(spec: EngineSpec, placement: Placement, devices: tuple[str, ...], local_rank: int = 0) -> EngineSpec:
    """The same engine on given devices, with the CPU cores that stand for them."""
    own = (devices[local_rank % len(devices)],) if spec.in_ranks else devices
    cores: list[int] = []
    for kind, _, index in (device.partition(":") for device in own):
        if kind == "cpu" and len(placement.cores) > 1:
            cores += placement.cores[int(index)]
    return replace(spec, devices=devices, cores=tuple(cores))


def _form_cluster(setup: EngineSetup, spec: EngineSpec, args: Any, collectives: Collectives) -> None:
    """One Ray cluster of the inference devices of all nodes: node 0 has the head, the others join it.

    Local rank 0 of each node starts its part. The token is sent between the ranks, not over their store.
    """
    from swift.rollout.engines import cluster

    node, local_rank = divmod(collectives.rank, setup.placement.local_ranks)
    seen = collectives.all_gather(cluster.own_address(os.environ["MASTER_ADDR"]))
    host = seen[collectives.rank][0] if node else seen[-1][1]  # node 0 may resolve its own name to 127.0.1.1
    devices = tuple(name for engine in setup.placement.engines for name in engine)
    own_node = cluster.NodeSpec(f"node {node}", host, devices, cluster.store_bytes(spec))
    with collectives.together():
        if collectives.is_main:
            setup.node = cluster.start_head(own_node)
    invitation = (setup.node.address, setup.node.token) if setup.node is not None else None
    address, token = collectives.broadcast(invitation)
    with collectives.together():
        if node and local_rank == 0:
            setup.node = cluster.start_node(address, token, own_node, args.vllm_server_timeout)
    if collectives.is_main and setup.node is not None:
        setup.node.nodes = [f"node {index}" for index in range(len(seen) // setup.placement.local_ranks)]


def _dedicated(placement: Placement, nodes: int, logs: Path, spec: EngineSpec, args: Any) -> InferenceEngine:
    """The engines of all nodes, each in a Ray actor of its own, behind one."""
    from swift.rollout.engines import cluster
    from swift.rollout.engines.actor_client import ActorClient
    from swift.rollout.engines.pool import EnginePool

    engines = placement.engines * nodes
    token = Path(args.ray_token_file).expanduser() if args.ray_token_file else None
    users = [cluster.use(args.ray_address, token, store_bytes=cluster.store_bytes(spec)) for _ in engines]
    places = cluster.places(users[0], [len(devices) for devices in engines], engines)
    where = [f"{node} " for node in users[0].nodes for _ in placement.engines] or [""] * len(engines)
    started = [
        ActorClient(
            replace(_on_device(spec, placement, devices), seed=spec.seed + index),
            name=f"engine {index} ({where[index]}{', '.join(devices)})",
            log_file=logs / f"engine-{index}.log",
            uses=users[index],
            timeouts=timeouts_of(args, spec),
            restarts=args.engine_restarts,
            weight_transport=_weight_transport(args),
            options=places[index],
        )
        for index, devices in enumerate(engines)
    ]
    return EnginePool(started)


def timeouts_of(args: Any, spec: EngineSpec) -> Timeouts:
    """Limits of calls to an engine in another process."""
    from swift.rollout.engines.events import Timeouts

    return Timeouts.of(spec.limit_s, server_s=args.vllm_server_timeout, stall_s=args.stall_timeout)


def _weight_transport(args: Any) -> str | None:
    return None if args.weight_transport == "auto" else str(args.weight_transport)


def _own_limit(args: Any, spec: EngineSpec, mode: str) -> float:
    """`EngineSetup.own_limit_s` of an engine in another process: until it is restarted and has its weights."""
    own = timeouts_of(args, spec)
    again = own.start_s + own.sync_s + own.sleep_s + own.pause_s
    return again + (own.stall_s + 2 * own.close_s if mode == "dedicated" else args.rollout_timeout + own.server_s)


def _servers(spec: EngineSpec, args: Any, placement: Placement) -> InferenceEngine:
    """The servers of `--vllm_server_host`, behind one."""
    from swift.rollout.engines.events import DRAIN_S
    from swift.rollout.engines.pool import EnginePool
    from swift.rollout.engines.server_client import ServerClient

    timeouts, run_id = replace(timeouts_of(args, spec), drain_s=DRAIN_S), secrets.token_hex(8)
    return EnginePool(
        [
            ServerClient(
                url,
                spec=spec,
                api_key=args.vllm_server_api_key,
                timeouts=timeouts,
                run_id=run_id,
                weight_transport=_weight_transport(args),
                force_restart=args.force_restart,
            )
            for url in placement.servers
        ]
    )
