"""Sampling in this process from a policy whose parameters are sharded over ranks (ZeRO-3, FSDP2).

Every forward pass of such a model gathers parameters, which is a collective, but ranks sample completions of different
lengths and so make different numbers of passes. There are two solutions:

    gathered_for_generation    gather everything once: fast, and each rank holds the whole model meanwhile
    forwards_in_step           before each pass the ranks announce it to each other, and a rank that has finished makes
                               passes over one token until all have: slow, with the memory of training

Both are collective: every rank enters, also one that has nothing to sample.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from swift.models import tower_passes
from swift.models.attention.interface import is_packed
from swift.models.forward import TokenSequence, completion_logits, pack, pad
from swift.models.sharded import device_of, is_dtensor, is_sharded, is_zero3, zero3_gathered

_ZERO3, _FSDP = "deepspeed.", "torch.distributed.fsdp."


def sampling_from(model: nn.Module, *, gather: bool, any_rank: Callable[[bool], bool]) -> AbstractContextManager[None]:
    """The context to sample in, by `--ds3_gather_for_generation`; it does nothing for a model that is not sharded.

    Args:
        model: the policy as the trainer holds it.
        gather: gather once, or sample from the sharded parameters.
        any_rank: whether the flag is set on any rank, a collective.
    """
    if not is_sharded(model):
        return contextlib.nullcontext()
    return gathered_for_generation(model) if gather else forwards_in_step(model, any_rank)


@contextlib.contextmanager
def gathered_for_generation(model: nn.Module) -> Iterator[None]:
    """All parameters whole inside the block; forward passes are local there."""
    parameters = list(model.parameters())
    with contextlib.ExitStack() as stack:
        zero = [parameter for parameter in parameters if is_zero3(parameter)]
        if zero:
            stack.enter_context(zero3_gathered(zero))
            stack.enter_context(_without_hooks(model, _ZERO3))
        stack.enter_context(_without_hooks(model, tower_passes.__name__))
        if any(map(is_dtensor, parameters)):
            stack.enter_context(_unsharded(model))
            stack.enter_context(_without_hooks(model, _FSDP))
        yield


@contextlib.contextmanager
def forwards_in_step(model: nn.Module, any_rank: Callable[[bool], bool]) -> Iterator[None]:
    """The same number of forward passes of `model` on every rank inside the block.

    Args:
        model: the module whose calls are counted, as the sampler calls it.
        any_rank: whether the flag is set on any rank, a collective.
    """
    filling = False

    def announce(*_: Any) -> None:
        if not filling:
            any_rank(True)

    handle = model.register_forward_pre_hook(announce, prepend=True)
    try:
        yield
    finally:  # also after a failure: the other ranks need these passes to come to their end
        filling = True
        was_training = model.training
        model.eval()
        while any_rank(False):
            _pass_over_one_token(model)
        model.train(was_training)
        handle.remove()


@torch.no_grad()
def _pass_over_one_token(model: nn.Module) -> None:
    arrange = pack if is_packed(model) else pad  # one pass, as a step of sampling is
    completion_logits(model, arrange([TokenSequence([0], [0])], device=device_of(model)))


@contextlib.contextmanager
def _without_hooks(model: nn.Module, origin: str) -> Iterator[None]:
    """Remove the forward hooks of a library, which would release what the caller has gathered, or of a module."""
    former = [(module, module._forward_pre_hooks, module._forward_hooks) for module in model.modules()]
    for module, before, after in former:
        module._forward_pre_hooks = _others(before, origin)
        module._forward_hooks = _others(after, origin)
    try:
        yield
    finally:
        for module, before, after in former:
            module._forward_pre_hooks, module._forward_hooks = before, after


def _others(hooks: Any, origin: str) -> Any:
    return OrderedDict((key, hook) for key, hook in hooks.items() if not str(hook.__module__).startswith(origin))


@contextlib.contextmanager
def _unsharded(model: nn.Module) -> Iterator[None]:
    from torch.distributed.fsdp import FSDPModule

    modules = [module for module in model.modules() if isinstance(module, FSDPModule)]
    for module in modules:
        module.unshard()
    try:
        yield
    finally:
        for module in modules:
            module.reshard()
