"""What the optimizer step of any trainer costs: its passes and its optimizer, traced without numbers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.optim import AdamW, Optimizer

from swift.models.attention.interface import transformers_model
from swift.models.quantisation import count_of
from swift.planning.devices import host_update_seconds
from swift.planning.trace import Trace, local
from swift.trainers.optimizers.master_weights import keep_master_weights
from swift.trainers.optimizers.stochastic_rounding import StochasticRounding

HOST_BYTES = 16
"""Of a trained parameter with `adamw_cpu`: master, two moments and gradient in float32."""
MOST_TRACED = 2
"""Micro-batches that are computed; in the second one there are gradients already, and those after it are like it."""


@dataclass(frozen=True, slots=True)
class Passes:
    """FLOPs and seconds of the micro-batches of a step."""

    flops: float = 0.0
    seconds: float = 0.0

    def __add__(self, other: Passes) -> Passes:
        return Passes(self.flops + other.flops, self.seconds + other.seconds)


@dataclass(frozen=True, slots=True)
class StepCost:
    """Bytes, and seconds of one device.

    weights: of policy and reference. resident: with masters and the state of the optimizer, between two steps.
    gradients: of the trained parameters. training, update: peaks of the passes and of the optimizer. micro_batches,
    tokens: how many, and tokens of the largest. flops: of the passes. training_s, update_s: seconds of the passes and
    of the optimizer. features, features_s: peak and seconds of EBFT's passes for features. host: in its memory.
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
    features: int = 0
    features_s: float = 0.0
    host: int = 0


def optimizer_of(args: Any, policy: nn.Module) -> Optimizer | None:
    """That of `--optim`, with the masters of 16-bit weights; None where it is on the host.

    FSDP's shards are their own masters.
    """
    if args.optim == "adamw_cpu":
        return None
    trained = [parameter for parameter in policy.parameters() if parameter.requires_grad]
    fused = args.optim != "adamw_torch"
    made = AdamW(trained, lr=1e-6, fused=fused, foreach=not fused and not args.fsdp)  # torch's choice on a GPU
    if not args.fsdp:
        keep_master_weights(
            made, rounding=StochasticRounding(args.seed) if args.master_weights == "bf16_stochastic" else None
        )
    return made


def passes_of(trace: Trace, count: int, run: Callable[[int], None]) -> Passes:
    """`count` micro-batches, of which `run` computes those that it is told, the first `MOST_TRACED` at most."""
    flops, seconds, traced = trace.flops, trace.seconds, min(count, MOST_TRACED)
    run(traced)
    share = count / traced if traced else 0.0
    return Passes((trace.flops - flops) * share, (trace.seconds - seconds) * share)


def cost_of_step(
    trace: Trace,
    policy: nn.Module,
    optimizer: Optimizer | None,
    passes: Callable[[], Passes],
    *,
    weights: int,
    micro_batches: int,
    tokens: int,
    more: tuple[int, int] = (0, 0),
) -> StepCost:
    """Runs the passes and two updates; in the first one the optimizer makes its state.

    Args:
        trace: around it.
        policy: whose parameters are trained.
        optimizer: None if it is not on the device.
        passes: makes the gradients.
        weights: bytes that were held before the optimizer was made.
        micro_batches: of the step.
        tokens: of the largest of them.
        more: bytes that are there besides, always and in passes.
    """
    trained = [parameter for parameter in policy.parameters() if parameter.requires_grad]
    before = trace.live
    trace.reset_peak()
    found = passes()
    training, on_host = trace.peak, trace.host_peak
    if optimizer is not None:
        optimizer.step()
    trace.reset_peak()
    began = trace.seconds
    if optimizer is not None:
        optimizer.step()
    forget_gradients(policy)
    on_host = max(on_host, trace.host_peak)
    gradients, number = sum(local(one).nbytes for one in trained), sum(one.numel() for one in trained)
    update_s = trace.seconds - began if optimizer is not None else host_update_seconds(gradients, number)
    state = trace.live - before  # which the first step makes, and every later one has
    return StepCost(
        parameters=sum(map(count_of, policy.parameters())),
        trained=number,
        weights=weights + more[0],
        resident=trace.live + more[0],
        gradients=gradients,
        training=training + state + more[1],
        update=trace.peak + more[0],
        micro_batches=micro_batches,
        tokens=tokens,
        flops=found.flops,
        training_s=found.seconds,
        update_s=update_s,
        host=on_host if optimizer is not None else HOST_BYTES * number,
    )


def forget_gradients(policy: nn.Module) -> None:
    """As `zero_grad` of an optimizer."""
    for parameter in policy.parameters():
        parameter.grad = None


def set_experts(module: nn.Module) -> None:
    """Experts, if there are any, are computed as on a GPU."""
    if (model := transformers_model(module))._can_set_experts_implementation():
        model.set_experts_implementation("grouped_mm")


def recompute(policy: nn.Module) -> None:
    """Gradient checkpointing, as the trainers turn it on."""
    transformers_model(policy).gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if hasattr(policy, "peft_config"):
        policy.enable_input_require_grads()  # type: ignore[operator]
