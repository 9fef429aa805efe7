"""`--weight_bridge`: one name for several settings of weight syncs, as in trainers for Atropos.

shared_vllm     one copy of the weights: the engine in the trainer's process, on its device
lora_only       adapters alone; they are swapped while the server runs
lora_restart    the same; with `--force_restart true` the server starts anew before each
none            merged weights, by file where both sides see the same folder
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from swift.flags import typed
from swift.rollout.placement import has_own_engine

if TYPE_CHECKING:
    from swift.arguments.derived import Machine
    from swift.arguments.parse import Reader

BRIDGES: dict[str, dict[str, Any]] = {
    "shared_vllm": {"vllm_mode": "colocate", "vllm_enable_lora": False, "vllm_sync_interval": 1},
    "lora_only": {"vllm_enable_lora": True},
    "lora_restart": {"vllm_enable_lora": True},
    "none": {"vllm_enable_lora": False},
}
INTERVAL = 3
"""Optimizer steps between two weight syncs if neither the bridge nor the user sets the interval."""


def apply_bridge(reader: Reader, _: Machine) -> None:
    """Derives the settings that `--weight_bridge` stands for; a given setting with another value is a problem."""
    bridge = reader.args.weight_bridge
    usual = {} if "vllm_sync_interval" in reader.origins else {"vllm_sync_interval": INTERVAL}
    wanted = {**usual, **BRIDGES[bridge]}
    for name, value in wanted.items():
        seen = getattr(reader.args, name)
        if name in reader.origins and seen != value:
            reader.problems.append(
                f"--{name}: {typed(seen)}: --weight_bridge {bridge} is --{name} {typed(value)}; leave one of them out"
            )
        reader.derive(name, value, f"with weight_bridge {bridge}")
    shown = " ".join(f"--{name} {typed(value)}" for name, value in wanted.items())
    reader.notes.append(f"--weight_bridge: {bridge}: stands for {shown}")


def bridge_problems(args: Any) -> Iterator[str]:
    """Settings that contradict the bridge, one line each."""
    bridge = args.weight_bridge
    shared = bridge == "shared_vllm"
    obstacles = {
        "no engine of its own gets weights; give --vllm_server_host, or leave it out": (
            bridge is not None and not has_own_engine(args)
        ),
        "weights that are merged are a second copy; use --tuner_type full": shared and args.tuner_type != "full",
        "an engine over several devices has a copy of its own; use --vllm_tensor_parallel_size 1": (
            shared and args.vllm_tensor_parallel_size > 1
        ),
        "what moves to the CPU cannot be shared; use --offload_model false": shared and args.offload_model,
        "an engine that sleeps gives its weights up; use --sleep_level 0": shared and args.sleep_level > 0,
        "sharded weights cannot be shared; leave --deepspeed and --fsdp out": (
            shared and bool(args.deepspeed or args.fsdp)
        ),
        "servers have a copy of their own; leave --vllm_server_host and --atropos_env out": (
            shared and bool(args.vllm_server_host or args.vllm_server_base_url or args.atropos_env)
        ),
    }
    for problem, applies in obstacles.items():
        if applies:
            yield f"--weight_bridge: {bridge}: {problem}"
    if args.force_restart and (bridge != "lora_restart" or args.vllm_mode != "server"):
        yield "--force_restart: true: only servers with --weight_bridge lora_restart start anew; leave it out"
