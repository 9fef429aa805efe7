"""`--optim adamw_cpu`: AdamW whose state lies in the host's memory and whose update the CPU computes.

Adam needs 8 bytes per trained weight for its moments and 4 for a float32 master; with full tuning that is more than
the model itself. Here they live on the CPU while the model stays on its device: after each backward pass the gradients
travel to the host, the CPU updates float32 masters, and the rounded weights travel back. A step takes longer (a copy
each way, and the CPU's arithmetic); the device holds weights, gradients and activations only.

torch's fused kernel for CPUs does the update, one pass over memory instead of ten. On a machine without accelerator
there is nothing to move, and the numbers are those of `adamw_torch_fused`, which is `adamw`, bit for bit.
Clipping and schedule act as ever, because they see the gradients of the model and the groups of this optimizer.
Masters and moments are its state, so a resumed run goes on exactly. Each process keeps a copy of its own.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch.optim import AdamW
from torch.optim.optimizer import ParamsT
from transformers import Trainer, TrainingArguments
from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME

from swift.plugin.registry import optimizers
from swift.trainers.checkpoint import loading
from swift.trainers.optimizers.master_weights import keep_master_weights

HOST = torch.device("cpu")


@optimizers.register("adamw_cpu")
class CPUAdamW(AdamW):
    """torch's AdamW, always `fused`, on float32 masters in the host's memory.

    Parameters of the device and those of 16 bits get a master; float32 weights on the CPU are updated in place.
    """

    def __init__(self, params: ParamsT, **options: Any) -> None:
        super().__init__(params, **options)
        keep_master_weights(self, on=HOST)
        for group in self.param_groups:
            group["fused"] = True

    @staticmethod
    def options(arguments: TrainingArguments) -> dict[str, Any]:
        """Those of transformers' AdamW."""
        return dict(Trainer.get_optimizer_cls_and_kwargs(arguments)[1])

    @staticmethod
    def attach(trainer: Trainer) -> None:
        """Let `trainer` read a checkpoint's state into the host's memory.

        Trainer reads it onto the device where several processes train, and there is no room for it.
        """

        def load(checkpoint: str | None) -> None:
            if checkpoint is None:
                return
            with loading(checkpoint):
                state = torch.load(Path(checkpoint, OPTIMIZER_NAME), map_location=HOST, weights_only=True, mmap=True)
                trainer.optimizer.load_state_dict(state)
                trainer.lr_scheduler.load_state_dict(torch.load(Path(checkpoint, SCHEDULER_NAME), weights_only=True))

        trainer._load_optimizer_and_scheduler = load
