"""Parameters that are sharded over processes, and how to gather them.

DeepSpeed's ZeRO-3 leaves an empty tensor in the module and keeps a partition beside it; torch's FSDP2 puts a DTensor
into the module. A whole parameter exists only while it is gathered, which is a collective: every rank gathers the same
parameters in the same order. Parameters that are not sharded are returned as they are. Neither library is imported
before the first of its parameters.
"""

from __future__ import annotations

import contextlib
import copy
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn


def quiet_accelerator() -> None:
    """Suppress a warning of DeepSpeed, which searches for a device when transformers imports it."""
    if not torch.accelerator.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")


def is_zero3(tensor: Tensor) -> bool:
    """Whether ZeRO-3 holds a partition of this parameter."""
    return hasattr(tensor, "ds_id")


def is_dtensor(tensor: Any) -> bool:
    """Whether FSDP2 (or tensor parallelism) holds a shard of this parameter."""
    if not torch.distributed.is_available():
        return False
    from torch.distributed.tensor import DTensor

    return isinstance(tensor, DTensor)


def device_of(module: nn.Module) -> torch.device:
    """The device that a module computes on, which its shards need not be on (`--fsdp_offload_params`)."""
    parameter: Any = next(module.parameters())
    kind = parameter.device_mesh.device_type if is_dtensor(parameter) else parameter.device.type
    if kind == parameter.device.type:
        return parameter.device  # type: ignore[no-any-return]
    return torch.device(kind, torch.accelerator.current_device_index())


def is_sharded(module: nn.Module) -> bool:
    """Whether a forward pass of `module` is a collective, because it gathers parameters on its way."""
    return any(is_zero3(parameter) or is_dtensor(parameter) for parameter in module.parameters())


def is_sharding(accelerator: Any) -> bool:
    """Whether accelerate's configuration shards the parameters of models: with FSDP2 and ZeRO-3."""
    plugin = accelerator.state.deepspeed_plugin
    return accelerator.is_fsdp2 or (plugin is not None and plugin.zero_stage == 3)


def shard(module: nn.Module, accelerator: Any) -> None:
    """Shard a model over the ranks, layer by layer: the device never holds more than its shards and one layer.

    Accelerate, TRL and DeepSpeed would move the whole model to the device first, and accelerate all of it in float32.
    They leave a model that is already sharded as it is.

    Args:
        module: whole, with the same values on all ranks, best in the memory of the host.
        accelerator: accelerate's, with FSDP2 or ZeRO-3 (`is_sharding`).
    """
    if not accelerator.is_fsdp2:
        _partition(module, accelerator)
        return
    from accelerate.utils.fsdp_utils import fsdp2_prepare_model
    from torch.distributed.fsdp import CPUOffloadPolicy

    from swift.models.attention.interface import decoder_of

    plugin = accelerator.state.fsdp_plugin
    # the layers of a tower stay in the shards of the whole model; a text model may name them
    parts = {type(part).__name__ for part in decoder_of(module).modules()}
    named: Iterable[str] = getattr(module, "_no_split_modules", None) or ()
    plugin.transformer_cls_names_to_wrap = [name for name in named if name in parts]
    if isinstance(plugin.cpu_offload, CPUOffloadPolicy):
        plugin.cpu_offload = CPUOffloadPolicy(pin_memory=torch.accelerator.is_available())
    trained = {name for name, parameter in module.named_parameters() if parameter.requires_grad}
    module.requires_grad_(False)  # what is trained would become float32 before it is cut
    fsdp2_prepare_model(accelerator, module)
    if not trained:
        module.set_reshard_after_forward(True)  # type: ignore[operator]  # no backward pass will do it
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(name in trained)
    if accelerator.mixed_precision != "no":
        for submodule in module.modules():
            if any(parameter.requires_grad for parameter in submodule.parameters(recurse=False)):
                submodule.to(torch.float32)
    for number, parameter in enumerate(module.parameters(), 1):
        own = parameter._local_tensor  # type: ignore[attr-defined]
        if own.numel() == 0:  # accelerate distinguishes them by their address, which is 0
            own.data_ptr = lambda address=-number: address
    _gather_head_before_passes(module)


def _gather_head_before_passes(module: nn.Module) -> None:
    """Let losses read the weight of an output layer that they never call, as TRL's do.

    Accelerate shards it together with the last norm, whose call gathers both, unless it does not find that norm, as
    beside a tower. TRL would gather the weight by itself, and not sum its gradient over the ranks.
    """
    from torch.distributed.fsdp import FSDPModule

    from swift.models.attention.interface import decoder_of, transformers_model

    decoder, head = decoder_of(module), transformers_model(module).get_output_embeddings()
    parts = [part for part in decoder.children() if part is not decoder.get_input_embeddings()]
    alone = isinstance(head, FSDPModule) and not any(isinstance(part, FSDPModule) for part in parts)
    if alone and any(parameter.requires_grad for parameter in head.parameters()):
        module.register_forward_pre_hook(lambda *_: head.unshard())


def shard_frozen(module: nn.Module, accelerator: Any) -> None:
    """`shard` for a model that is not trained, ready for forward passes."""
    shard(module, accelerator)
    if not accelerator.is_fsdp2:
        import deepspeed

        config = copy.deepcopy(accelerator.state.deepspeed_plugin.deepspeed_config)
        config["zero_optimization"].pop("offload_optimizer", None)  # it would make an optimizer
        deepspeed.initialize(model=module, config=config)


def shard_alone(module: nn.Module, device: torch.device, *, offload: bool) -> None:
    """Shard a model that is not trained over all processes with FSDP2, whatever the policy is sharded with.

    offload: whether the shards are in the memory of the hosts.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard

    mesh = init_device_mesh(device.type, (torch.distributed.get_world_size(),))
    policy = CPUOffloadPolicy(pin_memory=torch.accelerator.is_available()) if offload else OffloadPolicy()
    named: Iterable[str] = getattr(module, "_no_split_modules", None) or ()
    layers = [part for part in module.modules() if type(part).__name__ in set(named)]
    for part in [*layers, module]:
        fully_shard(part, mesh=mesh, reshard_after_forward=True, offload_policy=policy)


def _partition(module: nn.Module, accelerator: Any) -> None:
    """ZeRO-3's partitions of each parameter, in the type that DeepSpeed computes in."""
    import deepspeed

    config = accelerator.state.deepspeed_plugin.deepspeed_config
    for name, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
        if config.get(name, {}).get("enabled"):
            for parameter in module.parameters():
                parameter.data = parameter.data.to(dtype)
    for buffer in module.buffers():
        buffer.data = buffer.data.to(accelerator.device)
    group = deepspeed.utils.groups._get_zero_param_intra_parallel_group()  # of the first model, with ZeRO++
    deepspeed.zero.Init(module=module, config_dict_or_path=config, zero_param_parallel_group=group)


def whole_shape(tensor: Tensor) -> tuple[int, ...]:
    """The shape of the gathered parameter; no collective."""
    return tuple(tensor.ds_shape) if is_zero3(tensor) else tuple(tensor.shape)  # type: ignore[attr-defined]


_copies: dict[int, Tensor] = {}


@contextlib.contextmanager
def reading_from(copies: Mapping[int, Tensor]) -> Iterator[None]:
    """Let `gathered` return these tensors in the block, for parameters whose own memory is released.

    Args:
        copies: id of a parameter that is not sharded -> its values.
    """
    former = dict(_copies)
    _copies.update(copies)
    try:
        yield
    finally:
        _copies.clear()
        _copies.update(former)


def _copy_of(tensor: Tensor) -> Tensor:
    """The copy of a parameter whose memory is released (`reading_from`), else the parameter itself, detached."""
    released = tensor.numel() > 0 and not is_zero3(tensor) and tensor.untyped_storage().nbytes() == 0
    return _copies.get(id(tensor), tensor.detach()) if released else tensor.detach()


@contextlib.contextmanager
def gathered(tensors: Iterable[Tensor]) -> Iterator[Callable[[Tensor], Tensor]]:
    """Gather parameters for the time of the block; a collective when any of them is sharded.

    Yields:
        function from a parameter to its whole, detached tensor, which is valid in the block only unless cloned.
    """
    unique = list({id(tensor): tensor for tensor in tensors}.values())
    whole = {id(tensor): _whole(tensor.detach()) for tensor in unique if is_dtensor(tensor)}
    zero = [tensor for tensor in unique if is_zero3(tensor)]
    with zero3_gathered(zero) if zero else contextlib.nullcontext():
        yield lambda tensor: whole[id(tensor)] if id(tensor) in whole else _copy_of(tensor)


def _whole(tensor: Any) -> Tensor:
    """A DTensor gathered on the device of its mesh, which shards of the host come to first."""
    kind = tensor.device_mesh.device_type
    return (tensor if tensor.device.type == kind else tensor.to(kind)).full_tensor()  # type: ignore[no-any-return]


@contextlib.contextmanager
def exchanged(model: nn.Module, values: dict[str, Tensor]) -> Iterator[None]:
    """Replace values of parameters of a model for the time of the block; a collective when any of them is sharded.

    Args:
        model: whose parameters.
        values: whole tensors for some of their names, equal on all ranks.
    """
    # FSDP2 may keep parameters whole after a forward pass: copies that an exchange of shards would miss
    resharded: list[Any] = [module for module in model.modules() if callable(getattr(module, "reshard", None))]
    for module in resharded:
        module.reshard()
    parameters = dict(model.named_parameters())
    chosen = [(parameters[name], value) for name, value in values.items()]
    sharded = [(parameter, value) for parameter, value in chosen if is_zero3(parameter) or is_dtensor(parameter)]
    plain = [(parameter, value) for parameter, value in chosen if not (is_zero3(parameter) or is_dtensor(parameter))]
    former = [parameter.data for parameter, _ in plain]
    with gathered([parameter for parameter, _ in sharded]) as whole:
        held = [(parameter, whole(parameter).clone()) for parameter, _ in sharded]
    try:
        for parameter, value in plain:
            parameter.data = value.to(parameter.device)
        if sharded:
            _overwrite(sharded)
        yield
    finally:
        for (parameter, _), data in zip(plain, former, strict=True):
            parameter.data = data
        if sharded:
            _overwrite(held)
        for module in resharded:
            module.reshard()


@torch.no_grad()
def _overwrite(pairs: list[tuple[nn.Parameter, Tensor]]) -> None:
    """Write whole values into sharded parameters."""
    for parameter, value in pairs:
        if is_dtensor(parameter):
            from torch.distributed.tensor import distribute_tensor

            local: Any = parameter
            local.copy_(distribute_tensor(value.to(parameter.device), local.device_mesh, local.placements))
    zero = [(parameter, value) for parameter, value in pairs if is_zero3(parameter)]
    if not zero:
        return
    with zero3_gathered([parameter for parameter, _ in zero], modifier_rank=0):
        for parameter, value in zero:
            parameter.data.copy_(value)


def zero3_gathered(parameters: Sequence[Tensor], *, modifier_rank: int | None = None) -> Any:
    """DeepSpeed's own context manager around parameters of ZeRO-3.

    Args:
        parameters: to gather.
        modifier_rank: the rank whose changes are kept; None keeps none.
    """
    import deepspeed

    return deepspeed.zero.GatheredParameters(list(parameters), modifier_rank=modifier_rank)
