"""What a run takes: bytes of one device in each phase, and seconds of each step."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from swift.errors import counted
from swift.planning.cost import StepCost
from swift.planning.devices import GIB, Device
from swift.rollout.placement import Placement

if TYPE_CHECKING:
    from swift.planning.images import DrawnImages
    from swift.planning.measured import Measured

CONTEXT_BYTES = int(0.6 * GIB)
"""Of a process on a GPU, beside its tensors: CUDA's context and workspaces of its libraries."""
ASLEEP_BYTES = int(1.5 * GIB)
"""Of a vLLM engine that sleeps: its process's context and CUDA graphs."""
SLACK = 0.05
"""Of what the trainer allocates, in blocks that its allocator cannot use."""
HOST_S = {"transformers": 1.0e-3, "eager": 0.84e-3, "graphs": 0.1e-3}
"""Least seconds of a decode step for each layer, which the host takes to start its kernels: by the transformers engine
and by vLLM without CUDA graphs as measured on an H100 machine (benchmarks/results), with CUDA graphs as estimated."""
ENGINE_BYTES = int(1.0 * GIB)
"""Of vLLM's share, for activations."""
MOST_SEQUENCES = 256
"""That are decoded at a time, unless `--vllm_max_num_seqs` says otherwise."""
PROMPT_TOKENS = 512
"""Of a prompt, if nothing says."""


@dataclass(frozen=True, slots=True)
class Phase:
    """The most that is on a device during a phase, in bytes by what it is for."""

    name: str
    held: dict[str, int]

    @property
    def total(self) -> int:
        """Bytes in all."""
        return sum(self.held.values())


@dataclass(frozen=True, slots=True)
class Rollout:
    """Generation on one device.

    weights, cache: bytes of the engine's weights, and for keys and values. engine: of its whole share; 0 if it samples
    with the trainer's weights. at_a_time: completions that are decoded together. seconds: for an optimizer step.
    problem: why it cannot sample, or "". devices: over which an engine is spread.
    """

    weights: int
    engine: int
    cache: int
    at_a_time: int
    seconds: float
    problem: str = ""
    devices: int = 1


@dataclass(frozen=True, slots=True)
class Plan:
    """What `swift plan` found.

    devices, engine_devices: how many train, and how many only sample. step_s: seconds by phase of an optimizer step.
    rows: of such a step, each a `noun`. ahead: the next rollout takes place while this one is trained on. problem: why
    rollouts are impossible, or "". heads: of the model's attention. measured: a step of such a run, if there was one.
    """

    title: str
    device: Device
    devices: int
    cost: StepCost
    phases: list[Phase]
    step_s: dict[str, float]
    steps: int | None
    rows: int
    noun: str
    tokens_per_step: int
    ahead: bool = False
    engine_devices: int = 0
    problem: str = ""
    price_per_hour: float | None = None
    heads: int = 1
    advice: list[str] = field(default_factory=list)
    measured: Measured | None = None

    @property
    def fits(self) -> bool:
        """Whether every phase does."""
        return not self.problem and all(phase.total <= self.device.memory for phase in self.phases)

    @property
    def peak(self) -> Phase:
        """The phase that needs most."""
        return max(self.phases, key=lambda phase: phase.total)

    def as_json(self) -> dict[str, object]:
        """For programs: bytes and seconds."""
        return {
            "title": self.title,
            "device": self.device.name,
            "devices": self.devices,
            "engine_devices": self.engine_devices,
            "memory_bytes": self.device.memory,
            "parameters": self.cost.parameters,
            "trained_parameters": self.cost.trained,
            "micro_batches": self.cost.micro_batches,
            "micro_batch_tokens": self.cost.tokens,
            "flops": self.cost.flops,
            "phases": {phase.name: {"total": phase.total, **phase.held} for phase in self.phases},
            "host_bytes": self.cost.host,
            "fits": self.fits,
            "problem": self.problem,
            "step_seconds": self.step_s if self.measured is None else dict(self.measured.phases),
            "seconds": self.seconds,
            "measured": self.measured is not None,
            "tokens_per_second": self.tokens_per_second,
            "steps": self.steps,
            "hours": self.hours,
            "cost": self.price,
            "advice": self.advice,
        }

    @property
    def seconds(self) -> float:
        """Of an optimizer step."""
        if self.measured is not None:
            return self.measured.step_s
        whole = sum(self.step_s.values())
        return max(self.step_s["rollout"], whole - self.step_s["rollout"]) if self.ahead else whole

    @property
    def tokens_per_second(self) -> float:
        """Tokens of prompts and completions, or rows."""
        return (self.tokens_per_step if self.measured is None else self.measured.tokens) / self.seconds

    @property
    def hours(self) -> float | None:
        """Of the whole run; None if its steps are not known."""
        return None if self.steps is None else self.steps * self.seconds / 3600

    @property
    def price(self) -> float | None:
        """Of the whole run, in the currency of the price of an hour."""
        if self.hours is None or self.price_per_hour is None:
            return None
        return self.hours * (self.devices + self.engine_devices) * self.price_per_hour

    def lines(self) -> list[str]:
        """For people."""
        cost, device = self.cost, self.device
        columns = [name for name in COLUMNS if any(phase.held.get(name) for phase in self.phases)]
        width = max(len(phase.name) for phase in self.phases)
        rows = [f"  {'GiB':<{width}}  " + "  ".join(f"{name:>11}" for name in (*columns, "in all", "free"))]
        for phase in self.phases:
            numbers = [phase.held.get(name, 0) for name in columns] + [phase.total, device.memory - phase.total]
            cells = "  ".join(f"{number / GIB:>11.1f}" if number else f"{'-':>11}" for number in numbers)
            rows.append(f"  {phase.name:<{width}}  {cells}")
        phases = self.step_s if self.measured is None else self.measured.phases
        parts = ", ".join(f"{name} {seconds:.3g} s" for name, seconds in phases.items())
        source = f"estimated by a roofline, {REMARK}" if self.measured is None else "measured"
        lines = [
            self.title,
            f"parameters: {cost.parameters:,}, of which {cost.trained:,} are trained",
            f"device: {device.name}, {device.memory / GIB:.1f} GiB; {counted(self.devices, 'training process')}"
            + (f", {counted(self.engine_devices, 'device')} for engines" if self.engine_devices else ""),
            f"step: {counted(self.rows, self.noun)}; on each device "
            f"{counted(cost.micro_batches, 'micro-batch')} of at most {cost.tokens:,} tokens",
            "memory of one device, at its fullest:",
            *rows,
            self._verdict(),
            *([f"memory of the host: {cost.host / GIB:.1f} GiB for each device"] if cost.host > GIB / 20 else []),
            *self.advice,
            f"time of a step ({source}): {self.seconds:.3g} s: {parts}"
            f"{', at the same time' if self.ahead else ''}; {self.tokens_per_second:,.0f} tokens/s",
        ]
        if self.hours is not None:
            price = (
                f"; {self.price:,.2f} at {self.price_per_hour:g} an hour and device" if self.price is not None else ""
            )
            lines.append(f"run: {counted(self.steps or 0, 'step')}, {self.hours:,.2f} hours{price}")
        return lines

    def _verdict(self) -> str:
        peak = self.peak
        left = (self.device.memory - peak.total) / GIB
        if left >= 0 and self.problem:
            return f"does not fit: {self.problem}"
        if left >= 0:
            return f"fits: {peak.name} needs most, and leaves {left:.1f} GiB"
        return f"does not fit: {peak.name} needs {-left:.1f} GiB more than there are"


COLUMNS = ("process", "trainer", "engine", "allocator")
REMARK = "kernels at the rates that large ones reach"


def described(args: Any) -> str:
    """Tuning, model, precision and sharding of a run."""
    from swift.trainers.parallel.sharding import describe

    dtype = f"{args.torch_dtype}, products in {args.autocast}" if args.autocast else args.torch_dtype
    sharing = f", micro-batches of {args.sequence_parallel_size} processes" if args.sequence_parallel_size > 1 else ""
    return f"{args.tuner_type} tuning of {args.model} in {dtype}{describe(args)}{sharing}"


def shown_in(images: DrawnImages | None) -> str:
    """The images of each prompt, for a title."""
    return f"; {images.title}" if images else ""


def buckets_of(args: Any, cost: StepCost, processes: int) -> int:
    """Bytes of DDP, which has the gradients a second time, in buckets that stay."""
    return cost.gradients if processes > 1 and not args.fsdp else 0


def trained_in(cost: StepCost, buckets: int, *, engine: int = 0) -> list[Phase]:
    """The phases of every trainer; `engine`: bytes of one on the same device."""
    return [
        Phase(
            name,
            {"process": CONTEXT_BYTES, "trainer": held + buckets, "engine": engine, "allocator": int(SLACK * held)},
        )
        for name, held in (("forward, backward", cost.training), ("update", cost.update))
    ]


def engine_in_training(placed: Placement, share: float, device: Device) -> int:
    """Bytes of a colocated engine while the trainer computes."""
    if placed.mode != "colocate":
        return 0
    return ASLEEP_BYTES if placed.sleep_level else int(share * device.memory)


def decode_seconds(
    device: Device,
    *,
    least_s: float,
    parameters: int,
    weights: int,
    cache_per_token: int,
    states: int,
    cache: int,
    most: int,
    completions: int,
    prompts: int,
    prompt_tokens: int,
    completion_tokens: int,
) -> tuple[int, float]:
    """How many completions are decoded at a time, and the seconds that all of them take.

    A step of decoding reads the weights and what is kept of every sequence once (`states`: bytes beside its keys and
    values), or computes 2 FLOPs for each parameter and sequence, whichever takes longer; `least_s` in any case.
    """
    longest = prompt_tokens + completion_tokens
    at_a_time = max(1, min(completions, most, cache // max(1, cache_per_token * longest + states)))
    mean = prompt_tokens + completion_tokens / 2
    moved = weights + at_a_time * (mean * cache_per_token + states)
    one = max(least_s, device.seconds(2 * parameters * at_a_time, moved, half=True))
    prefill = device.seconds(2 * parameters * prompts * prompt_tokens, weights, half=True)
    return at_a_time, prefill + math.ceil(completions / at_a_time) * completion_tokens * one
