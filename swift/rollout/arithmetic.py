"""Batch and step arithmetic: sizes of batches in completions, and of epochs in steps.

All batch sizes count completions. With b = per_device_train_batch_size, N = world size,
a = gradient_accumulation_steps, s = steps_per_generation, u = num_iterations, G = num_generations and R rows:

    global batch      C = b N a     completions of one optimizer step; G divides it; P = C / G prompts
    generation batch  B = b N s     completions sampled together; G divides it
    rollout batch     max(C, B)     completions collected before training continues
    steps per epoch   floor(floor(R G / B) u s / a)

Pure functions: no files, no devices, no arguments object.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from swift.errors import ConfigError, counted, join_problems

MOST_BATCHES_CARRIED = 2
"""Maximum number of rollout batches over which a group is carried; usually one (`swift.rollout.dynamic_sampling`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchPlan:
    """The batches of a run. Sizes are in completions unless the name has another unit.

    global_batch_prompts = global_batch / num_generations. global_batches_per_rollout is s/a if s >= a (else 1) and
    generation_batches_per_step is a/s if s < a (else 1). A rollout batch is one generation batch, or all of those of
    one optimizer step. updates_per_rollout = global_batches_per_rollout * num_iterations.
    micro_batches_per_step: forward/backward passes of one rank; None if they depend on the lengths of completions,
    with a limit of tokens.

    num_rows, steps_per_epoch and batches_per_epoch are None for streaming data of unknown size. dropped_rows: rows at
    the end of each epoch that do not fill a rollout batch. max_steps: optimizer steps of the run.
    """

    per_device_train_batch_size: int
    world_size: int
    gradient_accumulation_steps: int
    num_generations: int
    steps_per_generation: int
    num_iterations: int
    global_batch: int
    global_batch_prompts: int
    generation_batch: int
    global_batches_per_rollout: int
    generation_batches_per_step: int
    rollout_prompts: int
    updates_per_rollout: int
    micro_batches_per_step: int | None
    max_tokens_per_micro_batch: int | None
    num_rows: int | None
    batches_per_epoch: int | None
    steps_per_epoch: int | None
    dropped_rows: int
    max_steps: int


def plan_batches(
    *,
    per_device_train_batch_size: int,
    world_size: int,
    gradient_accumulation_steps: int,
    num_generations: int,
    steps_per_generation: int | None = None,
    generation_batch_size: int | None = None,
    num_iterations: int = 1,
    mini_batch_size: int | None = None,
    max_tokens_per_micro_batch: int | None = None,
    num_rows: int | None,
    num_train_epochs: float = 1.0,
    max_steps: int = -1,
) -> BatchPlan:
    """The batches and steps of a run, from the settings of these names.

    `steps_per_generation` or `generation_batch_size` sets s, which is a by default. `num_rows` counts rows after
    filtering; None is streaming data, which needs `max_steps`. A part of an epoch is rounded up to whole steps;
    `max_steps` > 0 overrides `num_train_epochs`.

    Raises:
        ConfigError: one line per violated rule.

    Example:
        5000 rows, b=4, N=8, a=1, G=8: C=32, P=4, 1250 steps per epoch.
    """
    b, n, a = per_device_train_batch_size, world_size, gradient_accumulation_steps
    g, u = num_generations, num_iterations
    s = steps_per_generation or a
    if generation_batch_size is not None:
        s = _generation_steps(generation_batch_size, b * n, steps_per_generation)
    join_problems(_broken_rules(b, n, a, s, g, u, mini_batch_size))

    rollout_prompts = b * n * max(a, s) // g
    updates = max(1, s // a) * u
    batches = None if num_rows is None else num_rows // rollout_prompts
    per_epoch = None if batches is None else batches * updates
    return BatchPlan(
        per_device_train_batch_size=b,
        world_size=n,
        gradient_accumulation_steps=a,
        num_generations=g,
        steps_per_generation=s,
        num_iterations=u,
        global_batch=b * n * a,
        global_batch_prompts=b * n * a // g,
        generation_batch=b * n * s,
        global_batches_per_rollout=max(1, s // a),
        generation_batches_per_step=max(1, a // s),
        rollout_prompts=rollout_prompts,
        updates_per_rollout=updates,
        micro_batches_per_step=a * (b // (mini_batch_size or b)) if max_tokens_per_micro_batch is None else None,
        max_tokens_per_micro_batch=max_tokens_per_micro_batch,
        num_rows=num_rows,
        batches_per_epoch=batches,
        steps_per_epoch=per_epoch,
        dropped_rows=0 if num_rows is None else num_rows % rollout_prompts,
        max_steps=max_steps if max_steps > 0 else _steps_of(num_train_epochs, per_epoch, num_rows, rollout_prompts),
    )


def describe(plan: BatchPlan, *, most_launches: int = 1, every_row: bool = False) -> str:
    """The plan in one line, for messages.

    Args:
        plan: plan of the run.
        most_launches: maximum number of groups sampled per trained group; dynamic sampling draws rows for replacements.
        every_row: whether batches continue from one epoch to the next, so that no row is dropped.
    """
    p = plan
    parts = [
        f"{counted(p.global_batch, 'completion')} per step ({p.per_device_train_batch_size} per device x "
        f"{counted(p.world_size, 'process')} x {p.gradient_accumulation_steps} accumulation)"
        f" = {counted(p.global_batch_prompts, 'prompt')} x {counted(p.num_generations, 'completion')}"
    ]
    if p.generation_batch != p.global_batch:
        parts.append(f"{p.generation_batch} completions per generation batch")
    if p.updates_per_rollout > 1:
        parts.append(f"{p.updates_per_rollout} updates per rollout")
    if p.micro_batches_per_step is None:
        parts.append(f"micro-batches of at most {p.max_tokens_per_micro_batch} tokens")
    elif p.micro_batches_per_step > 1:
        parts.append(f"{p.micro_batches_per_step} micro-batches per step and process")
    if p.num_rows is None:
        parts.append(f"streaming, {counted(p.max_steps, 'step')}")
    else:
        per_epoch = f"{counted(p.steps_per_epoch or 0, 'step')} per epoch"
        if most_launches > 1:
            least = p.num_rows // (p.rollout_prompts * most_launches) * p.updates_per_rollout
            per_epoch = f"{least} to {per_epoch}, because replaced groups draw rows too"
        parts.append(f"{counted(p.num_rows, 'row')}, {per_epoch}, {counted(p.max_steps, 'step')} in all")
    if p.dropped_rows and p.batches_per_epoch and not every_row:
        parts.append(f"the last {counted(p.dropped_rows, 'row')} of each epoch left out")
    return "batch: " + "; ".join(parts)


def _generation_steps(batch: int, per_micro_step: int, steps: int | None) -> int:
    """The steps s of a generation batch size; per_micro_step: b N. steps: s of `--steps_per_generation`, if given."""
    if batch < 1 or batch % per_micro_step:
        lower = max(1, batch // per_micro_step) * per_micro_step
        raise ConfigError(
            f"--generation_batch_size: {batch}: not a multiple of the {per_micro_step} completions of one micro-step "
            f"over all processes; nearest: {lower}, {lower + per_micro_step}"
        )
    if steps is not None and steps * per_micro_step != batch:
        raise ConfigError(
            f"--generation_batch_size: {batch}: disagrees with --steps_per_generation {steps}, which makes "
            f"{steps * per_micro_step}; give one of them, or --steps_per_generation {batch // per_micro_step}"
        )
    return batch // per_micro_step


def _valid(b: int, n: int, a: int, s: int, g: int, mini: int | None) -> bool:
    return b * n * a % g == 0 and b * n * s % g == 0 and (s % a == 0 or a % s == 0) and b % (mini or b) == 0


def _broken_rules(b: int, n: int, a: int, s: int, g: int, u: int, mini: int | None) -> list[str]:
    problems = []
    if b * n * a % g or (b * n * s % g and not (s % a and a % s)):
        problems.append(_bad_generations(b, n, a, s, g, mini))
    if s % a and a % s:
        divisors = _divisors(a)
        below = max(value for value in [*divisors, s // a * a] if 0 < value < s)
        above = min(value for value in [*divisors, (s // a + 1) * a] if value > s)
        problems.append(
            f"--steps_per_generation: {s}: neither a multiple nor a divisor of --gradient_accumulation_steps {a}; "
            f"nearest: {below}, {above}"
        )
    if u > 1 and s < a:
        problems.append(
            f"--num_iterations: {u}: needs --steps_per_generation {s} to be at least "
            f"--gradient_accumulation_steps {a}; --num_iterations 1 or --steps_per_generation {a}"
        )
    if mini is not None and b % mini:
        problems.append(
            f"--mini_batch_size: {mini}: does not divide --per_device_train_batch_size {b}; "
            f"valid: {', '.join(map(str, _divisors(b)))}"
        )
    return problems


def _bad_generations(b: int, n: int, a: int, s: int, g: int, mini: int | None) -> str:
    """The message for a G that does not divide the global batch or the generation batch."""
    window, batch = b * n * a, b * n * s
    total = f"global batch of C={window} completions" if window % g else f"generation batch of B={batch} completions"
    made_of = f"{b} per device x {counted(n, 'process')} x {a if window % g else s}"
    choices = _divisors(math.gcd(window, batch))[1:]
    fixes = [f"valid G: {', '.join(map(str, choices)) or 'none'}"]
    values = range(1, g * s * (mini or 1) + 1)  # the rules are periodic in both values, with this period
    by_a = next((value for value in values if _valid(b, n, value, value if s == a else s, g, mini)), None)
    by_b = next((value for value in values if _valid(value, n, a, s, g, mini)), None)
    fixes += [f"a={by_a} (--gradient_accumulation_steps {by_a})"] * (by_a is not None)
    fixes += [f"b={by_b} (--per_device_train_batch_size {by_b})"] * (by_b is not None)
    return f"--num_generations: {g}: does not divide the {total} ({made_of}); " + "; or ".join(fixes)


def _divisors(value: int) -> list[int]:
    return [divisor for divisor in range(1, value + 1) if value % divisor == 0]


def _steps_of(epochs: float, per_epoch: int | None, rows: int | None, rollout_prompts: int) -> int:
    """The steps of a run without `max_steps`."""
    if per_epoch is None:
        raise ConfigError("--max_steps: none: streaming data has no known end; give --max_steps")
    if per_epoch == 0:
        raise ConfigError(
            f"--dataset: {counted(rows or 0, 'row')}: fewer than the {counted(rollout_prompts, 'prompt')} of one "
            "rollout batch: no step fits; "
            "add rows, lower --per_device_train_batch_size or --gradient_accumulation_steps, or give --max_steps"
        )
    return math.ceil(per_epoch * epochs)


def most_stale(depth: int, *, updates: int, interval: int) -> int:
    """The maximum age of a token at its last use, in optimizer steps.

    A rollout batch feeds U updates. Sampled `depth` batches ahead, with a weight sync every `interval` updates, its
    first update comes at most `depth * U + interval - 1` updates after the weights that sampled it, its last update
    U - 1 later.
    """
    return depth * updates + interval - 1 + updates - 1


def deepest_prefetch(depth: int, *, updates: int, interval: int, max_staleness: int | None) -> int | None:
    """The maximum depth, up to `depth`, with which no token exceeds `max_staleness`; None if even 0 exceeds it."""
    if max_staleness is None:
        return depth
    possible = (max_staleness - most_stale(0, updates=updates, interval=interval)) // updates
    return min(depth, possible) if possible >= 0 else None
