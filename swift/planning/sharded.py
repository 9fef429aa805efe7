"""A process among many, on tensors without numbers: torch's group that only pretends to communicate; FSDP2 on "meta".

`swift.models.sharded.shard` and torch's own gathers, frees and reductions run as in a run, so what one of the ranks
holds is counted, not estimated.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

from swift.models.attention.sequence_parallel import SequenceGroup
from swift.models.sharded import shard
from swift.trainers.distributed import Collectives

META = torch.device("meta")
BUCKET, LIVE = 500_000_000, 1_000_000_000
"""Defaults of DeepSpeed: numbers in a bucket of gradients, and in weights that stay gathered."""


@dataclass(frozen=True, slots=True)
class World:
    """The training processes, of which the first is looked at.

    size: their number. sharing: neighbours that compute the same rows. fsdp: `--fsdp`, with so many
    `replicas`. dtype: what FSDP computes in. offloads: `--fsdp_offload_params`.
    zero: stage of ZeRO, which cuts as `fsdp` does.
    """

    size: int = 1
    sharing: int = 1
    fsdp: str | None = None
    replicas: int = 1
    dtype: torch.dtype = torch.bfloat16
    offloads: bool = False
    zero: int = 0

    @contextlib.contextmanager
    def joined(self) -> Iterator[None]:
        """The group of processes, and FSDP2 without a device, in a block."""
        from torch.distributed.fsdp._fully_shard import _fsdp_init, _fully_shard
        from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
        from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
        from torch.testing._internal.distributed.fake_pg import FakeStore

        if self.size == 1 and not self.fsdp:
            yield
            return
        dist.init_process_group("fake", rank=0, world_size=self.size, store=FakeStore())
        with contextlib.ExitStack() as stack:
            stack.callback(dist.destroy_process_group)
            stack.enter_context(mock.patch.object(torch, "meta", torch.cpu, create=True))  # whose streams do nothing
            stack.enter_context(mock.patch.object(torch.cpu.Stream, "record_event", lambda stream: torch.cpu.Event()))
            stack.enter_context(mock.patch.object(torch.accelerator, "current_stream", torch.cpu.current_stream))
            for module in (_fsdp_init, _fully_shard):
                if hasattr(module, "_get_device_from_mesh"):
                    stack.enter_context(mock.patch.object(module, "_get_device_from_mesh", lambda mesh: META))
            stack.enter_context(mock.patch.object(FSDPParamGroup, "_validate_no_meta_params", lambda group: None))
            stack.enter_context(mock.patch.object(FSDPParamGroup, "_validate_cpu_offload_params", lambda group: None))
            stack.enter_context(mock.patch.object(FSDPParam, "reset_sharded_param", _reset))
            yield

    def of_zero(self, module: nn.Module) -> tuple[int, int]:
        """Bytes that DeepSpeed has beside FSDP's: always, and in passes.

        ZeRO-2 has the weights whole, and a bucket of gradients; ZeRO-3 shards of weights and gradients in 16 bits
        beside the masters, and gathered weights that it does not let go of.
        """
        count = sum(one.numel() for one in module.parameters()) * self.dtype.itemsize
        if self.zero == 2:
            return count, BUCKET * self.dtype.itemsize
        shards = 0 if self.offloads else 2 * count // self.size
        return (shards, shards + min(count, LIVE * self.dtype.itemsize)) if self.zero == 3 else (0, 0)

    def group(self) -> SequenceGroup | None:
        """The ranks that share micro-batches."""
        return SequenceGroup.of_this_rank(self.sharing)

    def collectives(self) -> Collectives:
        """As the trainer sees the ranks that share micro-batches with this one."""
        found = Collectives.__new__(Collectives)
        found.active, found.rank, found.world_size, found.is_main = False, 0, self.sharing, True
        return found

    def shard(self, module: nn.Module) -> None:
        """See `swift.models.sharded.shard`, as accelerate configures it for `--fsdp`."""
        from accelerate.utils import FullyShardedDataParallelPlugin
        from torch.distributed.device_mesh import init_device_mesh

        mixed_precision = {torch.bfloat16: "bf16", torch.float16: "fp16"}.get(self.dtype, "no")
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2,
            reshard_after_forward=self.fsdp == "full_shard",
            auto_wrap_policy="transformer_based_wrap",
            cpu_offload=self.offloads,
            cpu_ram_efficient_loading=False,
        )
        if mixed_precision != "no":
            plugin.set_mixed_precision(mixed_precision)
            plugin.mixed_precision_policy = replace(plugin.mixed_precision_policy, output_dtype=None)
        names: tuple[str, ...] = ("dp_replicate", "dp_shard_cp")[self.replicas == 1 :]
        sizes = (self.replicas, self.size // self.replicas)[self.replicas == 1 :]
        accelerator: Any = SimpleNamespace(
            is_fsdp2=True,
            mixed_precision=mixed_precision,
            is_main_process=False,
            device=META,
            torch_device_mesh=init_device_mesh("cpu", sizes, mesh_dim_names=names),
            parallelism_config=SimpleNamespace(fsdp_dim_names=names),
            state=SimpleNamespace(fsdp_plugin=plugin, deepspeed_plugin=None),
        )
        shard(module, accelerator)


ALONE = World()
"""A process without others."""


def world_of(args: Any, processes: int) -> World:
    """Of a run with so many training processes."""
    from swift.trainers.parallel.deepspeed import stage_of

    dtype = getattr(torch, args.torch_dtype)
    return World(
        processes,
        args.sequence_parallel_size,
        args.fsdp,
        args.fsdp_replicas,
        dtype,
        offloads=args.fsdp_offload_params,
        zero=stage_of(args),
    )


def _reset(parameter: Any) -> None:
    """What FSDP does before the first pass, and leaves out on "meta": it gathers from the shard as it is now."""
    place = parameter._module_info
    parameter.sharded_param = getattr(place.module, place.param_name)
    parameter._sharded_param_data = parameter.sharded_param._local_tensor.view(-1)
    parameter._sharding_spec = parameter.sharded_param._spec
