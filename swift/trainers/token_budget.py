"""The token budget of a micro-batch, and micro-batches within it.

`--max_tokens_per_micro_batch` is the budget where it is given. Else it is what the device's free memory holds before
the first update, when the engine has made room, and at most what runs at full speed: `MOST_TOKENS`, and on a CPU
`CPU_BYTES` of activations, as larger matrix products are no faster there. On an accelerator it is at most the device
batch, too: `--per_device_train_batch_size` completions as long as the longest, prompts included.

Free memory differs from start to start, and a cut rounds sums differently. So what was found goes into checkpoints, and
a resumed run keeps it unless the memory of now is less than half of what it needs.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn

from swift.errors import counted
from swift.models.activation_memory import ModelShape, activation_bytes
from swift.models.attention.interface import is_packed
from swift.models.checkpoint_tensors import computing_dtype
from swift.models.sharded import is_dtensor, is_zero3
from swift.observability.memory import measure
from swift.rollout.samples import TrainSample
from swift.trainers.distributed import Collectives
from swift.trainers.micro_batches import Limits, MicroBatchPlan, Work, plan_micro_batches

SHARE_OF_FREE = 0.8
"""Of the free memory that may be counted on; the rest is for fragments and what the estimate leaves out."""

LEAST_SHARE = 0.25
"""Of the free memory that activations get in any case, whatever gradients and optimizer are expected to take."""

STATE_BYTES = 8
"""Of a trained parameter in an optimizer that has taken no step yet: two moments. Masters are there from the start."""

MOST_TOKENS = 16384
"""Tokens of a micro-batch where memory allows more."""

CPU_BYTES, CPU_TOKENS = 1 << 30, 1280
"""On a CPU: activations of a micro-batch, or so many tokens if these take more."""


class MicroBatchPlanner:
    """Plans the micro-batches of one trainer, whose unwrapped policy is `model`.

    `limits` without tokens means the budget that is found, `fitting_tokens`; it is None before memory was measured.
    `per_device` are the completions of a device batch, and of a micro-batch until then.
    """

    def __init__(
        self,
        model: nn.Module,
        collectives: Collectives,
        limits: Limits,
        *,
        per_device: int,
        device: torch.device,
        say: Callable[[str], None],
    ) -> None:
        self.model, self.collectives, self.device = model, collectives, device
        self.limits, self.per_device = limits, per_device
        self.fitting_tokens: int | None = None
        self._measured = False
        self._say = say
        self._said = False
        self._shape = shape = ModelShape.of(model.config)
        self._work = Work(
            completion=1 + shape.head_flops / shape.linear_flops,
            attention=shape.attention_flops / shape.linear_flops,
        )

    def plan(
        self, samples: Sequence[TrainSample], chosen: Sequence[int], useful: Sequence[bool] | None = None
    ) -> MicroBatchPlan:
        """The plan of a global batch, the same on every rank; see `plan_micro_batches`.

        `useful` are by default the samples with trained tokens.
        """
        tokens = self.limits.tokens
        if tokens is None:
            tokens = self.fitting_tokens
            if tokens is not None and chosen and self.device.type != "cpu":
                longest = max(samples[i].prompt_ids.size + samples[i].token_ids.size for i in chosen)
                tokens = min(tokens, self.per_device * longest)
        plan = plan_micro_batches(
            samples,
            chosen,
            world_size=self.collectives.world_size,
            limits=Limits(self.limits.samples or (self.per_device if tokens is None else None), tokens),
            useful=[samples[i].num_trained > 0 for i in chosen] if useful is None else useful,
            packed=is_packed(self.model),
            work=self._work,
        )
        if plan.too_long and self.limits.tokens is not None and not self._said:
            self._said = True
            self._say(
                f"micro-batches: {counted(len(plan.too_long), 'completion')} over {self.limits.tokens} tokens with the "
                "prompt: each has a micro-batch of its own"
            )
        return plan

    @property
    def ready(self) -> bool:
        """Whether the budget is known: a given one, or one that this attempt has measured."""
        return self.limits.tokens is not None or self._measured

    def measure(self, *, whole_logits: bool, has_state: bool) -> None:
        """Take what fits on the rank that has least; collective. What a checkpoint brought stays if it nearly fits.

        whole_logits: the head makes all logits of a micro-batch at once. has_state: the optimizer has its state.
        """
        self._measured = True
        least = min(self.collectives.all_gather(self.budget(whole_logits=whole_logits, has_state=has_state)))
        if self.fitting_tokens is None or self.fitting_tokens > 2 * least:
            self.fitting_tokens = least

    def budget(self, *, whole_logits: bool, has_state: bool) -> int:
        """Tokens of a micro-batch that this rank's free memory holds now, as far as more are faster."""
        dtype = computing_dtype(self.model) or next(one.dtype for one in self.model.parameters())
        per_token = activation_bytes(
            self._shape,
            element=dtype.itemsize,
            checkpointing=bool(getattr(self.model, "is_gradient_checkpointing", False)),
            whole_logits=whole_logits,
        )
        fitting = tokens_that_fit(
            free_bytes(self.device),
            expected=expected_bytes(self.model.parameters(), has_state=has_state),
            per_token=per_token,
        )
        most = max(CPU_TOKENS, CPU_BYTES // per_token) if self.device.type == "cpu" else MOST_TOKENS
        return min(fitting, most)


def tokens_that_fit(free: int, *, expected: int, per_token: int) -> int:
    """Tokens of a micro-batch, at least 1, in `free` bytes of which gradients and optimizer will take `expected`."""
    return max(1, int(max(SHARE_OF_FREE * free - expected, LEAST_SHARE * free)) // per_token)


def expected_bytes(parameters: Iterable[nn.Parameter], *, has_state: bool) -> int:
    """What gradients and, before the first step, an AdamW's state take on this rank.

    In a step, the master of one 16-bit weight after the other has a gradient in float32, too.
    """
    state = 0 if has_state else STATE_BYTES
    sizes = [(_own_elements(one), one.dtype.itemsize) for one in parameters if one.requires_grad]
    largest = max((elements for elements, itemsize in sizes if itemsize == 2), default=0)
    return sum(elements * (itemsize + state) for elements, itemsize in sizes) + 4 * largest


def _own_elements(parameter: Any) -> int:
    """Elements that this rank holds of a parameter, sharded or not."""
    if is_zero3(parameter):
        return int(parameter.ds_tensor.numel())
    return int(parameter.to_local().numel() if is_dtensor(parameter) else parameter.numel())


def free_bytes(device: torch.device) -> int:
    """What this process may still take: of its device; of main memory, its share among the processes here."""
    figures = measure(device)
    if figures.alloc is None or figures.reserved is None:
        return figures.free // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return figures.free + figures.reserved - figures.alloc
