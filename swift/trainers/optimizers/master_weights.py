"""Float32 master weights: the optimizer updates float32 copies of 16-bit weights, so that small updates are not lost.

A bfloat16 number has 8 significant bits, so a weight of 0.02 only moves in steps of 1e-4: at a learning rate of
1e-5 nearly every update of Adam would round to nothing. The optimizer therefore holds a float32 master of each
16-bit weight, updates the master, and the weight is the master rounded. Costs 8 bytes more per trained 16-bit
weight with Adam (4 for the master, 8 instead of 4 for its two moments): 16 bytes in all. So it is during a step, too:
masters step one after the other, and one at a time has a float32 gradient. The masters are part of the optimizer's
state, so a resumed run goes on exactly.

A master may also live on another device than its weight (`swift.trainers.optimizers.adamw_cpu`): then the update takes
place there, and only gradients and new weights travel.

With stochastic rounding (`swift.trainers.optimizers.stochastic_rounding`) a master is there during its own step only,
made of the weight and rounded back: 12 bytes in all, and the optimizer still computes in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from inspect import unwrap
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Adam, AdamW, Optimizer
from transformers import Adafactor

from swift.models.transfer import copy_to, to_host
from swift.trainers.optimizers.stochastic_rounding import StochasticRounding

MASTER = "master"
"""Where a master stands in the optimizer's state."""

GRADIENT_FACTOR = "gradient_factor"
"""Attribute of an optimizer, if it is there: a tensor by which 16-bit gradients are multiplied in float32."""

AT_A_TIME = 256 << 20
"""Bytes of gradients that are on the way to the host together."""

ONE_BY_ONE = {unwrap(kind.step) for kind in (Adam, AdamW, SGD, Adafactor)}
"""Steps that update each parameter by itself, so that one float32 gradient exists at a time."""

ONE_BY_ONE_IN = ("bitsandbytes.optim.", "torchao.optim.")
"""Modules whose steps do so, too."""


def keep_master_weights(
    optimizer: Optimizer, *, on: torch.device | None = None, rounding: StochasticRounding | None = None
) -> int:
    """Let `optimizer`, which has not stepped yet, update 16-bit weights through float32 masters.

    With `on`, masters live on that device, and weights of any precision that are elsewhere have one. With `rounding`,
    masters are there during a step only; the optimizer is one that steps one by one. Returns how many parameters have
    a master; 0 leaves the optimizer as it was.
    """
    step = unwrap(type(optimizer).step)
    alone = step in ONE_BY_ONE or step.__module__.startswith(ONE_BY_ONE_IN)
    assert alone or rounding is None, "all masters would be there at once"
    how = rounding or KeptMasters(on)
    masters: dict[Tensor, Tensor] = {
        weight: how.master_of(weight)
        for group in optimizer.param_groups
        for weight in group["params"]
        if _needs_master(weight, on)
    }
    if not masters:
        return 0
    for group in optimizer.param_groups:
        group["params"] = [masters.get(weight, weight) for weight in group["params"]]
    weights = {master: weight for weight, master in masters.items()}
    places = {master: place for place, master in enumerate(weights)}

    @torch.no_grad()
    def before(optimizer: Optimizer, *_: Any) -> None:
        groups = {master: group for group in optimizer.param_groups for master in group["params"] if master in weights}
        factor: Tensor | None = getattr(optimizer, GRADIENT_FACTOR, None)
        how.begin_step(optimizer)
        for master, gradient in _gradients({master: weights[master] for master in groups}):
            how.begin(optimizer, master, weights[master])
            master.grad = gradient.float()
            if factor is not None and gradient.dtype != torch.float32:
                master.grad *= factor.to(gradient.device)
            if alone:
                _step_alone(optimizer, step, {**groups[master], "params": [master]})
                finish(optimizer, master)

    @torch.no_grad()
    def finish(optimizer: Optimizer, master: Tensor) -> None:
        master.grad = None
        how.finish(optimizer, master, weights[master], places[master])

    def after(optimizer: Optimizer, *_: Any) -> None:
        for master in weights:
            if master.grad is not None:
                finish(optimizer, master)

    optimizer.register_step_pre_hook(before)
    optimizer.register_step_post_hook(after)
    return len(weights)


@dataclass(frozen=True, slots=True)
class KeptMasters:
    """Masters that stay, as part of the optimizer's state; on the device of their weights, or another."""

    on: torch.device | None

    def master_of(self, weight: Tensor) -> Tensor:
        """A copy in float32."""
        return torch.nn.Parameter(weight.detach().to(self.on or weight.device, torch.float32, copy=True))

    def begin_step(self, optimizer: Optimizer) -> None:
        """Nothing to do."""

    def begin(self, optimizer: Optimizer, master: Tensor, weight: Tensor) -> None:
        """Let the master be what it was after its last step."""
        saved = optimizer.state[master].get(MASTER) if master in optimizer.state else None
        if saved is None:  # never stepped: weights may have been loaded since
            master.copy_(weight)
        elif saved.data_ptr() != master.data_ptr():  # a loaded checkpoint
            master.copy_(saved)
            optimizer.state[master][MASTER] = master.data

    def finish(self, optimizer: Optimizer, master: Tensor, weight: Tensor, place: int) -> None:
        """Let the weight be the rounded master."""
        copy_to(weight, master)
        optimizer.state[master][MASTER] = master.data


def _gradients(weights: dict[Tensor, Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    """Each master that has a gradient, and this on its device, in the precision of the weight.

    From a GPU to the host gradients go a few at a time (`AT_A_TIME`), with one wait for them.
    """
    found = [(master, weight.grad) for master, weight in weights.items() if weight.grad is not None]
    while found:
        count, size = 0, 0
        while count < len(found) and (not count or size < AT_A_TIME):
            size += found[count][1].nbytes
            count += 1
        masters, gradients = zip(*found[:count], strict=True)
        found = found[count:]
        there = to_host(gradients) if masters[0].device != gradients[0].device else gradients
        yield from zip(masters, there, strict=True)


def _step_alone(optimizer: Optimizer, step: Callable[[Optimizer], Any], group: dict[str, Any]) -> None:
    """The step of the parameters of `group` only."""
    groups, optimizer.param_groups = optimizer.param_groups, [group]
    try:
        step(optimizer)
    finally:
        optimizer.param_groups = groups


def _needs_master(weight: Tensor, on: torch.device | None) -> bool:
    return weight.dtype in (torch.bfloat16, torch.float16) or (on is not None and weight.device.type != on.type)
