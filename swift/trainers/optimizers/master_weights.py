"""Updates of 16-bit weights that are not lost: the optimizer works on float32 copies.

A bfloat16 number has 8 significant bits, so a weight of 0.02 only moves in steps of 1e-4: at a learning rate of
1e-5 nearly every update of Adam would round to nothing. The optimizer therefore holds a float32 master of each
16-bit weight, updates the master, and the weight is the master rounded. Costs 8 bytes more per trained 16-bit
weight with Adam (4 for the master, 8 instead of 4 for its two moments). The masters are part of the optimizer's
state, so a resumed run goes on exactly.

A master may also live on another device than its weight (`swift.trainers.optimizers.adamw_cpu`): then the update takes
place there, and only gradients and new weights travel.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

MASTER = "master"
"""Where a master stands in the optimizer's state."""


def keep_master_weights(optimizer: Optimizer, *, on: torch.device | None = None) -> int:
    """Let `optimizer`, which has not stepped yet, update 16-bit weights through float32 masters.

    With `on`, masters live on that device, and weights of any precision that are elsewhere have one. Returns how many
    parameters have a master; 0 leaves the optimizer as it was.
    """
    masters: list[tuple[Tensor, Tensor]] = []  # (weight, master)
    for group in optimizer.param_groups:
        group["params"] = [_with_master(weight, masters, on) for weight in group["params"]]
    if not masters:
        return 0

    def before(optimizer: Optimizer, *_: Any) -> None:
        for weight, master in masters:
            saved = optimizer.state[master].get(MASTER) if master in optimizer.state else None
            if saved is None and weight.grad is not None:  # never stepped: weights may have been loaded since
                master.data.copy_(weight.data)
            elif saved is not None and saved.data_ptr() != master.data_ptr():  # a loaded checkpoint
                master.data.copy_(saved)
                optimizer.state[master][MASTER] = master.data
            master.grad = None if weight.grad is None else weight.grad.to(master.device).float()

    @torch.no_grad()
    def after(optimizer: Optimizer, *_: Any) -> None:
        for weight, master in masters:
            if master.grad is not None:
                weight.copy_(master)
                optimizer.state[master][MASTER] = master.data
                master.grad = None

    optimizer.register_step_pre_hook(before)
    optimizer.register_step_post_hook(after)
    return len(masters)


def _with_master(weight: Tensor, masters: list[tuple[Tensor, Tensor]], on: torch.device | None) -> Tensor:
    if not _needs_master(weight, on):
        return weight
    master = torch.nn.Parameter(weight.detach().to(on or weight.device, torch.float32, copy=True))
    masters.append((weight, master))
    return master


def _needs_master(weight: Tensor, on: torch.device | None) -> bool:
    return weight.dtype in (torch.bfloat16, torch.float16) or (on is not None and weight.device.type != on.type)
