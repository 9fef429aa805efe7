"""The trainer's own optimizer step on tensors without numbers: `GlobalBatchStep`, the optimizer, float32 masters.

Kernels of attention that only CUDA has are stood in for by `_Attention`, which keeps what they keep; what it computes
is counted from the segments of the stream.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor, nn

from swift.models.attention import flex
from swift.models.attention.interface import enable_packed_attention, transformers_model
from swift.models.attention.layout import SegmentLayout
from swift.models.reference import FrozenReference, ReferenceModel
from swift.models.scoring import prepare_scoring
from swift.planning.devices import Device, find_device
from swift.planning.sharded import ALONE, World
from swift.planning.trace import Trace, fused_on_meta, local
from swift.rollout.samples import RolloutBatch, TrainSample
from swift.trainers.grpo.entropy import EntropyControl
from swift.trainers.grpo.logprobs import LogProbs
from swift.trainers.grpo.metrics import StepMetrics
from swift.trainers.grpo.settings import GRPOSettings
from swift.trainers.grpo.step import GlobalBatchStep
from swift.trainers.micro_batches import Limits, MicroBatchPlan
from swift.trainers.optimizers.master_weights import keep_master_weights
from swift.trainers.token_budget import MOST_TOKENS, MicroBatchPlanner

META = torch.device("meta")
MOST_TRACED = 2
"""Micro-batches that are computed; in the second one there are gradients already, and those after it are like it."""


TRACED_TOKENS = MOST_TOKENS // 2
"""Of a micro-batch, to find what a token costs: with few of them the gradients make the peak."""


@dataclass(frozen=True, slots=True)
class Shape:
    """The completions of one device and optimizer step, all of the same lengths, in tokens."""

    prompts: int
    num_generations: int
    prompt_tokens: int
    completion_tokens: int

    def samples(self) -> list[TrainSample]:
        """As the trainer gets them; what they say does not matter."""
        length = self.completion_tokens
        return [
            TrainSample(
                group=prompt,
                prompt_ids=np.full(self.prompt_tokens, prompt, np.int32),
                token_ids=np.zeros(length, np.int32),
                sampler_logprobs=np.zeros(length, np.float32),
                trained=np.ones(length, bool),
                advantage=1.0,
            )
            for prompt in range(self.prompts)
            for _ in range(self.num_generations)
        ]


@dataclass(frozen=True, slots=True)
class StepCost:
    """Bytes, and seconds of one device.

    weights: of policy and reference. resident: with masters and the state of the optimizer, between two steps.
    gradients: of the trained parameters. training, update: peaks of the passes and of the optimizer. micro_batches,
    tokens: how many, and tokens of the largest. flops: of the passes. training_s, update_s: seconds of the passes and
    of the optimizer.
    """

    parameters: int
    trained: int
    weights: int
    resident: int
    gradients: int
    training: int
    update: int
    micro_batches: int
    tokens: int
    flops: float
    training_s: float
    update_s: float


def trace_step(
    policy: nn.Module,
    reference: ReferenceModel | None,
    settings: GRPOSettings,
    shape: Shape,
    device: Device,
    *,
    optimizer: Any,
    recomputes: bool,
    free: Any,
    kernel: Any = "flex",
    world: World = ALONE,
) -> StepCost:
    """What one optimizer step of a policy on "meta" costs on `device`.

    Args:
        policy: in training mode, with its adapter.
        reference: of the KL.
        settings: of the step.
        shape: its completions, of one process or of those that share them.
        device: that it runs on.
        optimizer: makes the optimizer of the trained parameters; None if it is not on the device.
        recomputes: gradient checkpointing.
        free: gives the free bytes before the first update from the bytes that are held then, for the token budget.
        kernel: of packed attention.
        world: of the process.

    Raises:
        NotImplementedError: the model needs attention that is not stood in for.
    """
    with world.joined(), Trace(device) as trace, trace.resizing(), _as_on_gpu(trace), fused_on_meta():
        modules = _made_ready(policy, reference, kernel, world, recomputes=recomputes)
        trace.hold(*modules)
        step, planner = _parts(policy, reference, settings, world)
        if world.fsdp:  # whose first pass lets go of what was whole
            _pass_of(16, step, planner, policy, trace)
            _forget_gradients(policy)
        weights = trace.live
        trained = [parameter for parameter in policy.parameters() if parameter.requires_grad]
        made = optimizer(trained) if optimizer is not None else None
        if made is not None and not world.fsdp:  # whose shards are the masters
            keep_master_weights(made)
        if planner.limits.tokens is None:
            planner.per_token = _slope(step, planner, policy, trace)
            planner.fitting_tokens = planner.budget(whole_logits=False, has_state=made is None, free=free(trace.live))
        samples = shape.samples()
        plan = planner.plan(samples, range(len(samples)))
        count, before = len(plan.micro_batches[0]), trace.live
        trace.reset_peak()
        flops, seconds, traced = _passes(step, policy, samples, plan, trace)
        training = trace.peak
        if made is not None:
            made.step()  # which makes its state
        trace.reset_peak()
        began = trace.seconds
        if made is not None:
            made.step()
        _forget_gradients(policy)
        state = trace.live - before  # which the first step makes, and every later one has
        return StepCost(
            parameters=sum(parameter.numel() for parameter in policy.parameters()),
            trained=sum(parameter.numel() for parameter in trained),
            weights=weights,
            resident=trace.live,
            gradients=sum(local(parameter).nbytes for parameter in trained),
            training=training + state,
            update=trace.peak,
            micro_batches=count,
            tokens=plan.tokens,
            flops=flops * count / traced,
            training_s=seconds * count / traced,
            update_s=trace.seconds - began,
        )


def bytes_per_token(policy: nn.Module, settings: GRPOSettings, *, recomputes: bool, kernel: Any = "flex") -> int:
    """Bytes that one more token of a micro-batch takes in the passes of a policy on "meta", in training mode.

    Raises:
        NotImplementedError: as `trace_step`.
    """
    # a reference keeps nothing; EBFT's references are tokens like others
    settings = replace(settings, loss=replace(settings.loss, beta=0.0), ce_coef=None)
    with Trace(find_device("h100-80gb")) as trace, _as_on_gpu(trace):
        trace.hold(*_made_ready(policy, None, kernel, ALONE, recomputes=recomputes))
        return _slope(*_parts(policy, None, settings, ALONE), policy, trace)


def _slope(step: GlobalBatchStep, planner: MicroBatchPlanner, policy: nn.Module, trace: Trace) -> int:
    """What the passes take more for each of `TRACED_TOKENS` more, an eighth of which are the prompt's.

    With gradients there, as in every micro-batch but the first.
    """
    _pass_of(16, step, planner, policy, trace)
    few, many = (_pass_of(tokens, step, planner, policy, trace) for tokens in (TRACED_TOKENS, 2 * TRACED_TOKENS))
    _forget_gradients(policy)
    return (many - few) // TRACED_TOKENS


def _pass_of(tokens: int, step: GlobalBatchStep, planner: MicroBatchPlanner, policy: nn.Module, trace: Trace) -> int:
    """What a micro-batch of one completion takes beyond what is held before."""
    limits, planner.limits = planner.limits, Limits(1, None)
    samples = Shape(1, 1, tokens // 8, tokens - tokens // 8).samples()
    plan, before = planner.plan(samples, range(1)), trace.live
    planner.limits = limits
    trace.reset_peak()
    _passes(step, policy, samples, plan, trace)
    return trace.peak - before


def _forget_gradients(policy: nn.Module) -> None:
    for parameter in policy.parameters():
        parameter.grad = None


def _made_ready(
    policy: nn.Module, reference: ReferenceModel | None, kernel: Any, world: World, *, recomputes: bool
) -> list[nn.Module]:
    """The models that are held, as the trainer prepares them; raises NotImplementedError: one scores whole logits."""
    modules = [policy, *([reference.module] if isinstance(reference, FrozenReference) else [])]
    for module in modules:
        enable_packed_attention(module, kernel)
        if has_experts(module):
            transformers_model(module).set_experts_implementation("grouped_mm")  # as on a GPU
        if (obstacle := prepare_scoring(module)) is not None:
            raise NotImplementedError(obstacle)
    if recomputes:
        transformers_model(policy).gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        if hasattr(policy, "peft_config"):
            policy.enable_input_require_grads()  # type: ignore[operator]
    for module in modules if world.fsdp else ():
        if module is policy or not getattr(reference, "moves", False):  # which is whole on each device
            world.shard(module)
    gc.collect()  # what was whole
    return modules


def has_experts(module: nn.Module) -> bool:
    """Whether any parameter holds the weights of several experts."""
    return any(parameter.ndim == 3 for parameter in module.parameters())


def _parts(
    policy: nn.Module, reference: ReferenceModel | None, settings: GRPOSettings, world: World
) -> tuple[GlobalBatchStep, MicroBatchPlanner]:
    """The trainer's parts that make a step, for the device "meta"."""
    ranks, group = world.collectives(), world.group()
    # values would be read: of the first pass over a batch, and of the mask of the top entropies
    entropy = replace(
        settings.entropy, quantile=1.0, log=True if settings.entropy.quantile < 1 else settings.entropy.log
    )
    settings = replace(settings, keep_dropout=False, entropy=entropy)
    limits = Limits(settings.max_samples, settings.max_tokens)
    planner = MicroBatchPlanner(
        policy, ranks, limits, per_device=settings.per_device, device=META, say=lambda line: None, group=group
    )
    logprobs = LogProbs(
        settings=settings,
        collectives=ranks,
        planner=planner,
        reference=reference,
        unwrapped=lambda: policy,
        device=META,
        on_progress=lambda: None,
        timer=lambda name: nullcontext(),
        group=group,
        in_step=world.fsdp is not None,
    )
    accelerator: Any = SimpleNamespace(no_sync=lambda model: nullcontext(), backward=lambda loss: loss.backward())
    control = EntropyControl(logprobs, None)
    step = GlobalBatchStep(
        logprobs=logprobs,
        entropy=control,
        accelerator=accelerator,
        sequences=1,
        timer=lambda name: nullcontext(),
        fsdp=world.fsdp is not None,
    )
    return step, planner


def _passes(
    step: GlobalBatchStep, policy: nn.Module, samples: Sequence[TrainSample], plan: MicroBatchPlan, trace: Trace
) -> tuple[float, float, int]:
    """FLOPs and seconds of the first micro-batches, and how many these are."""
    held = plan.micro_batches[0][:MOST_TRACED]
    chosen = [samples[i] for indices in held for i in indices]
    batch = RolloutBatch(chosen, num_global_batches=1, num_iterations=1)
    flops, seconds = trace.flops, trace.seconds
    step.run(policy, policy, batch, StepMetrics(), 0)
    return trace.flops - flops, trace.seconds - seconds, len(held)


# --- what only CUDA has -----------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _as_on_gpu(trace: Trace) -> Iterator[None]:
    """Stand-ins for kernels of attention; and no autocast, which the device "meta" does not have."""
    layouts: list[SegmentLayout] = []
    made = SegmentLayout.__init__

    def init(self: SegmentLayout, *args: Any, **kwargs: Any) -> None:
        made(self, *args, **kwargs)
        layouts[:] = [self]

    def pairs() -> float:
        return sum(
            seen.length * span.length + span.length**2 / 2 if span is not group.prompt else span.length**2 / 2
            for group in layouts[0].groups
            for seen, span in [(group.prompt, group.prompt), *group.seen()]
        )

    def of_flash(query: Tensor, key: Tensor, value: Tensor, **settings: Any) -> Tensor:
        states = (state.transpose(1, 2) for state in (query, key, value))
        return _Attention.apply(*states, trace, pairs(), True).transpose(1, 2)  # type: ignore[no-any-return]

    def of_flex(query: Tensor, key: Tensor, value: Tensor, **settings: Any) -> Tensor:
        return _Attention.apply(query, key, value, trace, pairs(), False)  # type: ignore[no-any-return]

    def of_sdpa(
        query: Tensor, key: Tensor, value: Tensor, attn_mask: Any = None, is_causal: bool = False, **settings: Any
    ) -> Tensor:
        seen = query.shape[0] * query.shape[2] * key.shape[2] / (2 if is_causal else 1)
        return _Attention.apply(query, key, value, trace, seen, False)  # type: ignore[no-any-return]

    flash = "transformers.modeling_flash_attention_utils._flash_attention_forward"
    with (
        mock.patch.object(SegmentLayout, "__init__", init),
        mock.patch(flash, of_flash),
        mock.patch.object(nn.functional, "scaled_dot_product_attention", of_sdpa),
        mock.patch.object(flex, "_flex_attention", lambda device_type: of_flex),
        mock.patch.object(flex, "_block_mask_of", lambda *numbers: None),
        mock.patch.object(torch, "is_autocast_enabled", lambda *device_type: False),
        mock.patch.object(torch, "autocast", lambda *settings, **named: nullcontext()),
    ):
        yield


class _Attention(torch.autograd.Function):
    """Attention that keeps its inputs, its output and one float32 number per query and head, as fused kernels do.

    Of query [R, H, T, D], key [R, K, C, D] and value [R, K, C, E]; `pairs` of query and key are visible. sums: the
    backward pass adds up the queries' gradient in float32 (flash-attn).
    """

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, trace: Trace, pairs: float, sums: bool) -> Tensor:
        output = query.new_empty(*query.shape[:3], value.shape[3])
        logsumexp = query.new_empty(query.shape[:3], dtype=torch.float32)
        ctx.save_for_backward(query, key, value, output, logsumexp)
        ctx.trace, ctx.pairs, ctx.sums = trace, pairs, sums
        trace.kernel(4 * pairs * query.shape[1] * query.shape[3], (query, key, value, output))
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        query, key, value, output, logsumexp = ctx.saved_tensors
        delta = torch.empty_like(logsumexp)
        total = torch.empty_like(query, dtype=torch.float32) if ctx.sums else None
        gradients = torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
        moved = (query, key, value, output, gradient, *gradients)
        ctx.trace.kernel(10 * ctx.pairs * query.shape[1] * query.shape[3], moved)
        del delta, total
        return (*gradients, None, None, None)
