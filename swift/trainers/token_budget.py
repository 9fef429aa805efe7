"""Cuts windows for the trainer, and finds out how many tokens one pass may have where nobody said so.

With `--max_tokens_per_micro_batch` the plan is `swift.trainers.micro_batches` under that limit. Without it passes are
bounded by the batch sizes, and by the memory that is free before the first update, when the engine has made room: a
pass that would need more is cut further. On a CPU products run at full speed with a thousand rows, and larger passes
save little beside the memory they take: those beyond `quick_tokens` are cut there; and as smaller ones are slower,
they are as large as that on a CPU even if the device batch is smaller, unless `--mini_batch_size` says what a pass may
hold.

Free memory differs from start to start, and a cut rounds sums differently. So what was found goes into checkpoints, and
a resumed run keeps it unless the memory of now is less than half of what it needs.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn

from swift.models.activation_memory import ModelShape, activation_bytes
from swift.models.checkpoint_tensors import computing_dtype
from swift.models.forward import is_packed
from swift.models.sharded import is_dtensor, is_zero3
from swift.observability.memory import measure
from swift.rollout.samples import TrainSample
from swift.trainers.distributed import Collectives
from swift.trainers.micro_batches import Limits, MicroBatchPlan, Work, micro_batch_tokens, plan_micro_batches

SHARE_OF_FREE = 0.8
"""Of the free memory that may be counted on; the rest is for fragments and what the estimate leaves out."""

LEAST_SHARE = 0.25
"""Of the free memory that activations get in any case, whatever gradients and optimizer are expected to take."""

STATE_BYTES = 12
"""Of a trained parameter in an optimizer that has taken no step yet: two moments and a float32 master."""


CPU_PASS_TOKENS, CPU_PASS_BYTES, CPU_TRAINER_BYTES = 1280, 1 << 30, 9 << 28
"""Tokens of a pass on a CPU, bytes of its activations, and bytes of these with weights, gradients and optimizer; what
comes to most tokens counts. Matrix products of a thousand rows run at full speed; what layers cost beside their
products is worth more rows, and memory as long as a run stays small: see docs/memory.md."""


class PassPlanner:
    """Plans the passes of one trainer.

    Args:
        model: the policy, unwrapped.
        collectives: the ranks that share a window.
        device: of the model; on a CPU packed streams are filled up, which counts.
        say: shows a line, once per kind.
    """

    def __init__(
        self, model: nn.Module, collectives: Collectives, *, device: torch.device, say: Callable[[str], None]
    ) -> None:
        self.model = model
        self.collectives = collectives
        self.device = device
        self.fitting_tokens: int | None = None
        """Tokens that fit into memory; None before it was measured, and where an explicit limit counts."""
        self.quick_tokens = CPU_PASS_TOKENS
        """Tokens of a pass on a CPU beyond which memory is worth more than what larger ones save."""
        self._say = say
        self._said: set[str] = set()
        shape = ModelShape.of(model.config)
        self._shape = shape
        self._work = Work(
            completion=1 + shape.head_flops / shape.linear_flops,
            attention=shape.attention_flops / shape.linear_flops,
        )

    def plan(
        self,
        samples: Sequence[TrainSample],
        window: Sequence[int],
        useful: Sequence[bool],
        limits: Limits,
        *,
        may_merge: bool = False,
    ) -> MicroBatchPlan:
        """The plan of a window, the same on every rank; see `plan_micro_batches`.

        Args:
            samples: those of the unit.
            window: sample indices in launch order.
            useful: per window position, whether the sample can contribute.
            limits: of one pass; without tokens, what fits and what is quick decide too.
            may_merge: the limit of completions is only what a device batch happens to be.
        """
        if limits.tokens is not None or self.fitting_tokens is None:
            plan = self._plan(samples, window, useful, limits)
        else:
            plan, limits = self._plan_freely(samples, window, useful, limits, self.fitting_tokens, may_merge)
        if plan.too_long and limits.tokens is not None:
            self._once(
                "too long",
                f"micro-batches: {len(plan.too_long)} completions are longer, with their prompt, than the "
                f"{limits.tokens} tokens of a pass; each of them has a pass of its own",
            )
        return plan

    def _plan_freely(
        self,
        samples: Sequence[TrainSample],
        window: Sequence[int],
        useful: Sequence[bool],
        limits: Limits,
        fitting: int,
        may_merge: bool,
    ) -> tuple[MicroBatchPlan, Limits]:
        """A plan without a limit of tokens that anybody gave, and the limits that memory sets."""
        on_cpu = self.device.type == "cpu"
        most = min(fitting, self.quick_tokens) if on_cpu else fitting
        merged = Limits(None if may_merge and on_cpu else limits.samples, most)
        if merged.samples is None and fitting > most:  # memory is no concern
            return self._plan(samples, window, useful, merged), limits
        plan = self._plan(samples, window, useful, limits)
        parts = (part for rank in plan.micro_batches for part in rank)
        longest = max((micro_batch_tokens(samples, part, packed=is_packed(self.model)) for part in parts), default=0)
        if longest > fitting:
            self._once(
                "cut",
                f"memory: passes are cut to {fitting} tokens, which is what fits; "
                "--max_tokens_per_micro_batch sets another limit",
            )
            limits = merged
        return (self._plan(samples, window, useful, merged) if longest > most else plan), limits

    def _plan(
        self, samples: Sequence[TrainSample], window: Sequence[int], useful: Sequence[bool], limits: Limits
    ) -> MicroBatchPlan:
        return plan_micro_batches(
            samples,
            window,
            world_size=self.collectives.world_size,
            limits=limits,
            useful=useful,
            packed=is_packed(self.model),
            work=self._work,
        )

    def _once(self, kind: str, line: str) -> None:
        if kind not in self._said:
            self._said.add(kind)
            self._say(line)

    def settle(self, measured: int) -> None:
        """Take what fits on the rank that has least; collective. What a checkpoint brought stays if it nearly fits."""
        least = min(self.collectives.all_gather(measured))
        if self.fitting_tokens is None or self.fitting_tokens > 2 * least:
            self.fitting_tokens = least

    def measured(self, *, whole_logits: bool, has_state: bool) -> int:
        """Tokens that fit into this rank's free memory now.

        Args:
            whole_logits: whether the head makes all logits of a pass at once.
            has_state: whether the optimizer has its state already.
        """
        dtype = computing_dtype(self.model) or next(one.dtype for one in self.model.parameters())
        per_token = activation_bytes(
            self._shape,
            element=dtype.itemsize,
            checkpointing=bool(getattr(self.model, "is_gradient_checkpointing", False)),
            whole_logits=whole_logits,
        )
        weights = sum(_own_elements(one) * one.dtype.itemsize for one in self.model.parameters())
        others = weights + expected_bytes(self.model.parameters(), has_state=False)
        self.quick_tokens = max(CPU_PASS_TOKENS, max(CPU_PASS_BYTES, CPU_TRAINER_BYTES - others) // per_token)
        return tokens_that_fit(
            free_bytes(self.device),
            expected=expected_bytes(self.model.parameters(), has_state=has_state),
            per_token=per_token,
        )


def tokens_that_fit(free: int, *, expected: int, per_token: int) -> int:
    """Tokens of a pass, at least 1.

    Args:
        free: bytes that are free.
        expected: bytes that gradients and optimizer will take of them.
        per_token: bytes of activations.
    """
    return max(1, int(max(SHARE_OF_FREE * free - expected, LEAST_SHARE * free)) // per_token)


def expected_bytes(parameters: Iterable[nn.Parameter], *, has_state: bool) -> int:
    """What gradients and, before the first step, an AdamW's state take on this rank."""
    total = 0
    for one in parameters:
        if one.requires_grad:
            total += _own_elements(one) * (one.dtype.itemsize + (0 if has_state else STATE_BYTES))
    return total


def _own_elements(parameter: Any) -> int:
    """Elements that this rank holds of a parameter, spread or not."""
    if is_zero3(parameter):
        return int(parameter.ds_tensor.numel())
    return int(parameter.to_local().numel() if is_dtensor(parameter) else parameter.numel())


def free_bytes(device: torch.device) -> int:
    """What this process may still take: of its device; of main memory, its share among the processes here."""
    figures = measure(device)
    if figures.alloc is None or figures.reserved is None:
        return figures.free // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return figures.free + figures.reserved - figures.alloc
