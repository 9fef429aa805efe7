"""Stochastic rounding: bfloat16 weights learn without float32 masters (`--master_weights bf16_stochastic`).

A float32 number lies between two neighbours in bfloat16. It becomes the upper one with the probability that is its
share of the way up, else the lower one, so that it is right on average: updates far below the distance of neighbours,
all of which rounding to nearest would lose, add up (arXiv:2010.06192, section 3.2).

The random bits of a weight follow from the run's seed, the step and the weight's place in the optimizer, so replicas on
several ranks stay equal and a resumed run goes on exactly. torchao's optimizers can round so, too, but for AdamW in 8
and 4 bits only, and with torch's global generator, which differs from rank to rank.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim import Optimizer

STEPS = "rounded_steps"
"""Where a parameter group of an optimizer, and so a checkpoint, has the number of steps so far."""

DROPPED = 16
"""Bits of float32 that bfloat16 has not."""


@dataclass(frozen=True, slots=True)
class StochasticRounding:
    """How an optimizer updates weights without masters that stay: see `master_weights.KeptMasters`.

    seed: of the run, the same on all ranks.
    """

    seed: int

    def master_of(self, weight: Tensor) -> Tensor:
        """What stands for a master between two steps: it has its device and type, and no memory."""
        assert weight.dtype == torch.bfloat16, "other types are not rounded so"
        return torch.nn.Parameter(weight.detach().new_empty(0, dtype=torch.float32))

    def begin_step(self, optimizer: Optimizer) -> None:
        """Count a step; each has random bits of its own."""
        for group in optimizer.param_groups:
            group[STEPS] = group.get(STEPS, 0) + 1

    def begin(self, optimizer: Optimizer, master: Tensor, weight: Tensor) -> None:
        """Make the master of the weight."""
        master.data = weight.float()

    def finish(self, optimizer: Optimizer, master: Tensor, weight: Tensor, place: int) -> None:
        """Round the master into the weight, and free it; `place`: of the weight in the optimizer."""
        name = f"{self.seed} {optimizer.param_groups[0][STEPS]} {place}"
        round_stochastically(master.data, generator_of(name, master.device))
        weight.copy_(master)
        master.data = self.master_of(weight).data


def round_stochastically(exact: Tensor, generator: torch.Generator | None = None) -> None:
    """Round float32 numbers in place to ones that bfloat16 has; infinities and NaN stay.

    Adding a uniform number of 16 bits to the bits of a float32 carries into those that are kept with the right
    probability, whatever the sign; what is then dropped are zeros. Example: 1 + 2**-9, a quarter of the way from 1 to
    its neighbour 1 + 2**-7, becomes 1 in three of four cases.
    """
    # a GPU's own NaN is all ones, which the addition would turn into 0
    exact.nan_to_num_(nan=math.nan, posinf=math.inf, neginf=-math.inf)
    bits = exact.view(torch.int32)
    bits += torch.randint(0, 1 << DROPPED, exact.shape, dtype=torch.int32, device=exact.device, generator=generator)
    bits &= -1 << DROPPED


def generator_of(name: str, device: torch.device) -> torch.Generator | None:
    """Random numbers that a name stands for; None on "meta", which has no numbers."""
    if device.type == "meta":
        return None
    seed = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=7).digest())
    return torch.Generator(device).manual_seed(seed)
