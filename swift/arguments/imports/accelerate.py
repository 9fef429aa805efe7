"""The configuration file of `accelerate launch`: processes, nodes and sharding."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

VARIABLES = {
    "num_machines": "NNODES", "machine_rank": "NODE_RANK", "main_process_ip": "MASTER_ADDR",
    "main_process_port": "MASTER_PORT",
}  # fmt: skip
"""Settings that matter with several nodes -> our variables."""


def read_settings(path: str) -> Mapping[str, Any]:
    """The file's settings; none if it cannot be read."""
    try:
        found = yaml.safe_load(Path(path).read_text(encoding="utf-8"))  # JSON is YAML, too
    except (OSError, ValueError, yaml.YAMLError):
        return {}
    return found if isinstance(found, dict) else {}


def environment(settings: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Our variables; its `num_processes` are those of all nodes."""
    nodes = int(settings.get("num_machines") or 1)
    if processes := settings.get("num_processes"):
        yield "NPROC_PER_NODE", str(max(1, int(processes) // nodes))
    if nodes > 1:
        yield from ((ours, str(settings[name])) for name, ours in VARIABLES.items() if settings.get(name) is not None)


def sharding(settings: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Our flags of DeepSpeed or FSDP2."""
    kind, zero = settings.get("distributed_type"), settings.get("deepspeed_config") or {}
    if kind == "DEEPSPEED" and "deepspeed_config_file" in zero:
        yield "deepspeed", str(zero["deepspeed_config_file"])
    elif kind == "DEEPSPEED" and (stage := int(zero.get("zero_stage") or 0)):
        offloads = "cpu" in (zero.get("offload_optimizer_device"), zero.get("offload_param_device"))
        yield "deepspeed", f"zero{stage}{'_offload' if offloads else ''}"
    elif kind == "FSDP":
        fsdp = settings.get("fsdp_config") or {}
        strategy = str(fsdp.get("fsdp_sharding_strategy", "FULL_SHARD")).lower()
        keeps = strategy == "shard_grad_op" or fsdp.get("fsdp_reshard_after_forward") in (False, "false")
        yield "fsdp", "shard_grad_op" if keeps else "full_shard"
        if fsdp.get("fsdp_offload_params"):
            yield "fsdp_offload_params", "true"
