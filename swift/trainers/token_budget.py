"""The token budget of a micro-batch, and micro-batches within it.

If `--max_tokens_per_micro_batch` is given, it is the budget. Otherwise the budget is measured: the tokens that fit into
the device's free memory before the first update, when the engine has released its own, up to `MOST_TOKENS`; on a CPU,
up to `CPU_BYTES` of activations, as larger matrix products are no faster there. On an accelerator it is at most the
device batch, too: `--per_device_train_batch_size` completions as long as the longest, prompts included. What a token
takes there is counted in the trainer's own passes without numbers (`swift.trainers.memory.traced`); on a CPU, and for
policies that cannot be traced, a formula has to do.

Free memory differs from start to start, and another cut rounds sums differently. So checkpoints hold the measured
budget, and a resumed run keeps it unless it needs more than twice the free memory.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import nn

from swift.errors import counted, is_out_of_memory, note_smaller
from swift.models.activation_memory import ModelShape, activation_bytes
from swift.models.attention.forked import forks
from swift.models.attention.interface import is_packed
from swift.models.attention.sequence_parallel import SequenceGroup
from swift.models.checkpoint_tensors import computing_dtype
from swift.models.sharded import is_dtensor, is_zero3
from swift.observability.memory import collect_garbage, measure
from swift.rollout.samples import TrainSample
from swift.trainers.distributed import Collectives
from swift.trainers.memory.traced import TracedActivations
from swift.trainers.micro_batches import Arrangement, Limits, MicroBatchPlan, Work, plan_micro_batches

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

T = TypeVar("T")


class MicroBatchPlanner:
    """Plans the micro-batches of one trainer, whose unwrapped policy is `model`.

    `limits` without tokens means the measured budget, `fitting_tokens`; it is None before memory is measured.
    `per_device` are the completions of a device batch, and of a micro-batch until then. group: the ranks that share
    micro-batches; these have that many times the tokens. survived: most tokens of a micro-batch whose gradient was
    made. traced: counts, on rank 0, what a token takes (`per_token`); None leaves it to a formula.
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
        group: SequenceGroup | None = None,
    ) -> None:
        self.model, self.collectives, self.device = model, collectives, device
        self.limits, self.per_device = limits, per_device
        self.group_size = group.size if group is not None else 1
        self.fitting_tokens: int | None = None
        self.traced: TracedActivations | None = None
        self.per_token: int | None = None
        self.survived = 0
        self._agreed: Exception | None = None
        self._last: MicroBatchPlan | None = None
        self._measured = False
        self._report = say
        self._has_reported = False
        self._shape = shape = ModelShape.of(model.config)
        linear_flops, attention_flops, head_flops = shape.forward_flops()
        self._work = Work(completion=1 + head_flops / linear_flops, attention=attention_flops / linear_flops)

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
                tokens = min(tokens, self.per_device * longest * self.group_size)
        plan = plan_micro_batches(
            samples,
            chosen,
            world_size=self.collectives.world_size // self.group_size,
            limits=Limits(self.limits.samples or (self.per_device if tokens is None else None), tokens),
            useful=[samples[i].num_trained > 0 for i in chosen] if useful is None else useful,
            arrangement=arrangement_of(self.model),
            work=self._work,
        ).repeated(self.group_size)
        self._last = plan
        if plan.too_long and self.limits.tokens is not None and not self._has_reported:
            self._has_reported = True
            self._report(
                f"micro-batches: {counted(len(plan.too_long), 'completion')} over {self.limits.tokens} tokens with the "
                "prompt: each has a micro-batch of its own"
            )
        return plan

    def surviving(
        self, attempt: Callable[[], T], undo: Callable[[], object] = lambda: None, *, alone: bool = True
    ) -> T:
        """What `attempt` returns; whenever it runs out of memory, `undo`, and again with smaller micro-batches.

        With several ranks, only where all of them fail alike: with an error that has left `agreed`. Otherwise the
        error ends the process, and the run may be started again with smaller micro-batches (`note_smaller`).

        alone: no pass of `attempt` waits for another rank, so that it may fail in the middle.
        """
        while True:
            try:
                return attempt()
            except Exception as error:
                alike = not self.collectives.active or error is self._agreed
                self._agreed = None
                if not is_out_of_memory(error) or (tokens := self._half()) is None:
                    raise
                if not (alone and alike):
                    note_smaller("--max_tokens_per_micro_batch", str(tokens))
                    raise
            self._set(tokens)
            undo()  # here the traceback, which holds what the failed pass had made, is gone
            collect_garbage(self.device)

    @contextlib.contextmanager
    def agreed(self) -> Iterator[None]:
        """Around passes without a collective: the failure of one rank becomes that of all."""
        try:
            with self.collectives.together():
                yield
        except Exception as error:
            self._agreed = error
            raise

    def _half(self) -> int | None:
        """Half of the budget, whoever set it; None if the last plan's micro-batches have one completion each."""
        if self._last is None or not self._last.can_be_finer:
            return None
        had = min(filter(None, (self._last.tokens, self.limits.tokens or self.fitting_tokens)))
        return max(1, had // 2)

    def _set(self, tokens: int) -> None:
        """Go on with a smaller budget than that of the last plan."""
        self.survived = 0
        if self.limits.tokens is None:
            self.fitting_tokens = tokens
        else:
            self.limits = replace(self.limits, tokens=tokens)
        had = self._last.tokens if self._last is not None else 0
        self._report(f"memory: ran out in a micro-batch of {had} tokens; again, with {tokens} at most from here on")

    @property
    def own_tokens(self) -> int | None:
        """Tokens of a micro-batch that this rank computes alone; None before memory is measured."""
        tokens = self.limits.tokens or self.fitting_tokens
        return None if tokens is None else max(1, tokens // self.group_size)

    @property
    def wants_count(self) -> bool:
        """Whether the budget will be measured on an accelerator."""
        return self.limits.tokens is None and self.device.type not in ("cpu", "meta")

    @property
    def ready(self) -> bool:
        """Whether the budget is given, or this attempt has measured it."""
        return self.limits.tokens is not None or self._measured

    def measure(self, *, whole_logits: bool, has_state: bool) -> None:
        """Set the budget to that of the rank with least memory; collective.

        The budget of a checkpoint is kept if it needs at most twice the memory.

        whole_logits: the head makes all logits of a micro-batch at once. has_state: the optimizer has its state.
        """
        self._measured = True
        self.per_token = self.collectives.broadcast(self._count())
        least = min(self.collectives.all_gather(self.budget(whole_logits=whole_logits, has_state=has_state)))
        if self.fitting_tokens is None or self.fitting_tokens > 2 * least:
            self.fitting_tokens = least

    def _count(self) -> int | None:
        if self.traced is None:
            return None
        per_token, reason = self.traced.result()
        if per_token is None:
            self._report(f"memory: activations are estimated by a formula ({reason})")
        return per_token

    def budget(self, *, whole_logits: bool, has_state: bool, free: int | None = None) -> int:
        """Tokens of a micro-batch that fit into `free` bytes, by default this rank's; no more than are fastest.

        A rank that shares micro-batches has its part of those tokens.
        """
        per_token = self.per_token
        if per_token is None or whole_logits:
            dtype = computing_dtype(self.model) or next(parameter.dtype for parameter in self.model.parameters())
            per_token = activation_bytes(
                self._shape,
                element=dtype.itemsize,
                checkpointing=bool(getattr(self.model, "is_gradient_checkpointing", False)),
                whole_logits=whole_logits,
            )
        fitting = tokens_that_fit(
            free_bytes(self.device) if free is None else free,
            expected=expected_bytes(self.model.parameters(), has_state=has_state, copies=1 + forks(self.model)),
            per_token=per_token,
        )
        most = max(CPU_TOKENS, CPU_BYTES // per_token) if self.device.type == "cpu" else MOST_TOKENS
        return min(fitting, most) * self.group_size


def arrangement_of(model: nn.Module) -> Arrangement:
    """How a model takes the sequences of a micro-batch."""
    return "packed" if is_packed(model) else "forked" if forks(model) else "padded"


def tokens_that_fit(free: int, *, expected: int, per_token: int) -> int:
    """Tokens of a micro-batch, at least 1, in `free` bytes of which gradients and optimizer will take `expected`."""
    return max(1, int(max(SHARE_OF_FREE * free - expected, LEAST_SHARE * free)) // per_token)


def expected_bytes(parameters: Iterable[nn.Parameter], *, has_state: bool, copies: int = 1) -> int:
    """Bytes of gradients and, before the first step, of an AdamW's state on this rank.

    copies: of the gradients; where states are forked, those of a micro-batch are there beside their sum.

    In a step, the master of one 16-bit weight after the other has a gradient in float32, too.
    """
    state = 0 if has_state else STATE_BYTES
    sizes = []
    for parameter in parameters:
        if parameter.requires_grad:
            shard: Any = parameter  # what this rank holds of it
            if is_zero3(parameter):
                shard = shard.ds_tensor
            elif is_dtensor(parameter):
                shard = shard.to_local()
            sizes.append((int(shard.numel()), parameter.dtype.itemsize))
    largest = max((elements for elements, itemsize in sizes if itemsize == 2), default=0)
    return sum(elements * (copies * itemsize + state) for elements, itemsize in sizes) + 4 * largest


def free_bytes(device: torch.device) -> int:
    """Bytes that this process may still allocate: of its device, or its share of main memory among local processes."""
    figures = measure(device)
    if figures.alloc is None or figures.reserved is None:
        return figures.free // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return figures.free + figures.reserved - figures.alloc
