"""GRPO's own optimizer step on tensors without numbers: `GlobalBatchStep`, the optimizer, float32 masters."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer

from swift.models.attention.choice import likely_streams
from swift.models.features import FeatureNetwork
from swift.models.forward import TokenSequence
from swift.models.reference import FrozenReference, ReferenceModel
from swift.models.scoring import prepare_scoring
from swift.models.vision import vision_of
from swift.planning.cost import (
    Passes,
    StepCost,
    cost_of_step,
    forget_gradients,
    passes_of,
    recompute,
    set_experts,
)
from swift.planning.devices import Device, find_device
from swift.planning.kernels import as_on_gpu
from swift.planning.sharded import ALONE, World
from swift.planning.trace import Trace, fused_on_meta
from swift.rollout.samples import FrozenName, RolloutBatch, TrainSample
from swift.trainers.grpo.metrics import StepMetrics
from swift.trainers.grpo.settings import GRPOSettings
from swift.trainers.grpo.step import GlobalBatchStep, step_of
from swift.trainers.micro_batches import Limits, MicroBatchPlan
from swift.trainers.token_budget import MOST_TOKENS, MicroBatchPlanner

META = torch.device("meta")
TRACED_TOKENS = MOST_TOKENS // 2
"""Of a micro-batch, to find what a token costs: with few of them the gradients make the peak."""


@dataclass(frozen=True, slots=True)
class Shape:
    """The completions of one device and optimizer step, all of the same lengths, in tokens.

    EBFT learns a reference of each prompt, which is as long as its completions. images: ids with which each prompt
    begins, those that stand for images named (`swift.models.vision`).
    """

    prompts: int
    num_generations: int
    prompt_tokens: int
    completion_tokens: int
    images: tuple[int, ...] = ()

    def samples(self) -> list[TrainSample]:
        """As the trainer gets them; what they say does not matter."""
        return [self._sample(prompt) for prompt in range(self.prompts) for _ in range(self.num_generations)]

    def references(self) -> list[TrainSample]:
        """One of each prompt."""
        return [self._sample(prompt) for prompt in range(self.prompts)]

    def _sample(self, prompt: int) -> TrainSample:
        length = self.completion_tokens
        return TrainSample(
            group=prompt,
            prompt_ids=np.array([*self.images, *[prompt] * (self.prompt_tokens - len(self.images))], np.int32),
            token_ids=np.zeros(length, np.int32),
            sampler_logprobs=np.zeros(length, np.float32),
            trained=np.ones(length, bool),
            advantage=1.0,
        )


def trace_step(
    policy: nn.Module,
    beside: Mapping[FrozenName, ReferenceModel],
    settings: GRPOSettings,
    shape: Shape,
    device: Device,
    *,
    optimizer: Callable[[nn.Module], Optimizer | None],
    recomputes: bool,
    free: Any,
    features: FeatureNetwork | None = None,
    kernel: Any = "flex",
    world: World = ALONE,
) -> StepCost:
    """What one optimizer step of a policy on "meta" costs on `device`.

    Args:
        policy: in training mode, with its adapter.
        beside: frozen models, see `LogProbs`.
        settings: of the step.
        shape: its completions, of one process or of those that share them.
        device: that it runs on.
        optimizer: makes that of the policy; None if it is not on the device.
        recomputes: gradient checkpointing.
        free: gives the free bytes before the first update from the bytes that are held then, for the token budget.
        features: of EBFT.
        kernel: of packed attention.
        world: of the process.

    Raises:
        NotImplementedError: the model needs attention that is not stood in for.
    """
    with (
        world.joined(),
        Trace(device) as trace,
        trace.resizing(),
        trace.knowing() if vision_of(policy) is not None else nullcontext(),
        trace.moving() if world.offloads else nullcontext(),
        as_on_gpu(trace),
        fused_on_meta(),
    ):
        frozen = [*beside.values(), *([features.model] if features else [])]
        trace.hold(*_made_ready(policy, frozen, kernel, world, recomputes=recomputes))
        step, planner = _parts(policy, beside, settings, world)
        if world.fsdp:  # whose first pass lets go of what was whole
            _pass_of(16, step, planner, policy, trace)
            forget_gradients(policy)
        weights, more = trace.live, world.of_zero(policy)
        made = optimizer(policy)
        if planner.limits.tokens is None:
            planner.per_token = _slope(step, planner, policy, trace)
            planner.fitting_tokens = planner.budget(
                whole_logits=False, has_state=made is None, free=free(trace.live + more[1])
            )
        samples = shape.samples()
        references = shape.references() if settings.ce_coef else []
        plan, learnt = (planner.plan(chosen, range(len(chosen))) for chosen in (samples, references))

        def passes() -> Passes:
            return _passes(step, policy, references, learnt, trace, learns=True) + _passes(
                step, policy, samples, plan, trace
            )

        cost = cost_of_step(
            trace,
            policy,
            made,
            passes,
            weights=weights,
            micro_batches=len(plan.micro_batches[0]) + len(learnt.micro_batches[0]),
            tokens=max(plan.tokens, learnt.tokens),
            more=more,
        )
        if features is not None:
            cost = _with_features(cost, features, shape, planner, trace)
        return cost


def _with_features(
    cost: StepCost, features: FeatureNetwork, shape: Shape, planner: MicroBatchPlanner, trace: Trace
) -> StepCost:
    """And the passes over the completions of each prompt and its reference, of as many tokens as a micro-batch."""
    prompt, completion = [0] * shape.prompt_tokens, [0] * shape.completion_tokens
    at_a_time = max(1, ((planner.own_tokens or MOST_TOKENS) - len(prompt)) // (len(completion) + 1))
    count = 1 + shape.num_generations
    trace.reset_peak()
    began = trace.seconds
    features.of_sequences([TokenSequence(prompt, completion)] * min(count, at_a_time), device=META)
    of_prompt = (trace.seconds - began) * max(1.0, count / at_a_time)
    return replace(cost, features=trace.peak, features_s=of_prompt * shape.prompts / planner.group_size)


def bytes_per_token(policy: nn.Module, settings: GRPOSettings, *, recomputes: bool, kernel: Any = "flex") -> int:
    """Bytes that one more token of a micro-batch takes in the passes of a policy on "meta", in training mode.

    Raises:
        NotImplementedError: as `trace_step`.
    """
    # frozen models keep nothing; EBFT's references are tokens like others
    settings = replace(settings, loss=replace(settings.loss, beta=0.0), teacher_kl_coef=0.0, ce_coef=None)
    with Trace(find_device("h100-80gb")) as trace, as_on_gpu(trace):
        trace.hold(*_made_ready(policy, [], kernel, ALONE, recomputes=recomputes))
        return _slope(*_parts(policy, {}, settings, ALONE), policy, trace)


def _slope(step: GlobalBatchStep, planner: MicroBatchPlanner, policy: nn.Module, trace: Trace) -> int:
    """What the passes take more for each of `TRACED_TOKENS` more, an eighth of which are the prompt's.

    With gradients there, as in every micro-batch but the first.
    """
    _pass_of(16, step, planner, policy, trace)
    few, many = (_pass_of(tokens, step, planner, policy, trace) for tokens in (TRACED_TOKENS, 2 * TRACED_TOKENS))
    forget_gradients(policy)
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


def _made_ready(
    policy: nn.Module, frozen: Sequence[ReferenceModel], kernel: Any, world: World, *, recomputes: bool
) -> list[nn.Module]:
    """The models that are held, as the trainer prepares them; raises NotImplementedError: one scores whole logits."""
    own = {model.module: model.moves for model in frozen if isinstance(model, FrozenReference)}
    modules = [policy, *own]
    for module in modules:
        likely_streams(module, kernel)
        set_experts(module)
        if (obstacle := prepare_scoring(module)) is not None:
            raise NotImplementedError(obstacle)
    if recomputes:
        recompute(policy)
    for module in modules if world.fsdp else ():
        if not own.get(module, False):  # what moves is whole on each device
            world.shard(module)
    gc.collect()  # what was whole
    return modules


def _parts(
    policy: nn.Module, beside: Mapping[FrozenName, ReferenceModel], settings: GRPOSettings, world: World
) -> tuple[GlobalBatchStep, MicroBatchPlanner]:
    """The trainer's parts that make a step, for the device "meta"."""
    ranks, group = world.collectives(), world.group()
    # values would be read: of the first pass over a batch, and of the mask of the top entropies
    entropy = replace(
        settings.entropy, quantile=1.0, log=True if settings.entropy.quantile < 1 else settings.entropy.log
    )
    settings = replace(settings, keep_dropout=False, entropy=entropy)
    step = step_of(policy, settings, ranks, META, beside=beside, group=group, fsdp=world.fsdp is not None)
    return step, step.logprobs.planner


def _passes(
    step: GlobalBatchStep,
    policy: nn.Module,
    samples: Sequence[TrainSample],
    plan: MicroBatchPlan,
    trace: Trace,
    *,
    learns: bool = False,
) -> Passes:
    """The micro-batches of a plan; `learns`: the samples are references."""
    held = plan.micro_batches[0]

    def run(count: int) -> None:
        chosen = [samples[i] for indices in held[:count] for i in indices]
        own, references = ([], chosen) if learns else (chosen, [])
        batch = RolloutBatch(own, num_global_batches=1, num_iterations=1, references=references)
        step.run(policy, policy, batch, StepMetrics(), 0)

    return passes_of(trace, len(held), run) if held else Passes()
