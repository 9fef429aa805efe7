"""Settings that make a run fit, and placements of trainer and engines compared."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from swift.errors import ConfigError
from swift.planning.report import CONTEXT_BYTES, ENGINE_BYTES, Plan

MOST_CHANGES = 16

Change = tuple[str, str]
"""A flag and its value."""


def advice(plan: Plan, args: Any) -> list[str]:
    """A line with what makes room in the fullest phase, if it does not fit."""
    if plan.fits:
        return []
    known = " or ".join(shown(change) for change in changes(plan, args))
    return [f"to make room: {known}" if known else "to make room: shorter completions, or another GPU"]


def shown(change: Sequence[Change]) -> str:
    """Flags as they are typed."""
    return " ".join(f"--{name} {value}" for name, value in change)


def changes(plan: Plan, args: Any) -> list[list[Change]]:
    """What makes room in the fullest phase, what costs least time first, and last what changes the numbers."""
    colocated, awake = "start" in [phase.name for phase in plan.phases], not getattr(args, "sleep_level", 0)
    if plan.problem:
        share = plan.phases[0].held.get("engine", 0) / plan.device.memory + 0.1
        choices = [([("vllm_gpu_memory_utilization", f"{share:.2f}")], share < 1)]
    elif plan.peak.name in ("start", "weight sync", "rollout"):
        choices = [
            ([("sleep_level", "1")], colocated and awake and plan.peak.name == "weight sync"),
            ([("offload_optimizer", "true"), ("gc_collect_after_offload", "true")], not args.offload_optimizer),
            ([("offload_model", "true"), ("gc_collect_after_offload", "true")], not args.offload_model),
            ([("vllm_gpu_memory_utilization", f"{_share_left(plan):.2f}")], _share_left(plan) > _least_share(plan)),
        ]
        if plan.peak.name == "start":  # nothing is offloaded yet
            choices = choices[-1:]
    else:
        choices = [
            ([("sleep_level", "1")], colocated and awake),
            ([("gradient_checkpointing", "true")], not args.gradient_checkpointing),
            *_smaller_micro_batches(plan, args),
            ([("fsdp", "full_shard")], plan.devices > 1 and not args.fsdp),
            (_shared(args), _can_share(plan, args)),
            ([("optim", "adamw_cpu")], _may_leave(args)),
            ([("master_weights", "bf16_stochastic")], _may_leave(args) and args.torch_dtype == "bfloat16"),
            ([("fsdp_offload_params", "true")], bool(args.fsdp) and not args.fsdp_offload_params),
        ]
        if plan.peak.name == "update":  # which tokens do not change
            choices = [choices[0], choices[3], *choices[-3:]]
    choices.append(([("tuner_type", "lora")], args.tuner_type == "full"))
    return [change for change, helps in choices if helps]


def _may_leave(args: Any) -> bool:
    """Whether the state of the optimizer, with masters, is on the device and could be on the host."""
    fp32 = args.master_weights == "fp32" and args.optim != "adamw_cpu"
    return bool(fp32 and args.tuner_type == "full" and not args.fsdp)


def _shared(args: Any) -> list[Change]:
    """Twice as many processes compute the same rows; of these a step has as many as before."""
    change = [("sequence_parallel_size", str(2 * args.sequence_parallel_size))]
    if not hasattr(args, "max_tokens_per_micro_batch"):
        change.append(("gradient_accumulation_steps", str(2 * args.gradient_accumulation_steps)))
    return change


def _smaller_micro_batches(plan: Plan, args: Any) -> list[tuple[list[Change], bool]]:
    """The same rows in more passes."""
    if hasattr(args, "max_tokens_per_micro_batch"):
        longest = args.max_completion_length
        return [([("max_tokens_per_micro_batch", str(plan.cost.tokens // 2))], plan.cost.tokens > 2 * longest)]
    rows, passes = args.per_device_train_batch_size, args.gradient_accumulation_steps
    least = 2 if getattr(args, "loss_type", None) == "kto" else 1  # whose KL needs another row
    fewer = next((number for number in range(rows // 2, least - 1, -1) if rows % number == 0), rows)
    batches = ("gradient_accumulation_steps", str(passes * rows // fewer))
    return [([("per_device_train_batch_size", str(fewer)), batches], fewer < rows)]


def _can_share(plan: Plan, args: Any) -> bool:
    """Whether twice as many processes may compute the same rows, and no micro-batch can be smaller."""
    size = 2 * args.sequence_parallel_size
    smaller = any(helps for _, helps in _smaller_micro_batches(plan, args))
    return size <= plan.heads and plan.devices % size == 0 and not smaller


def _share_left(plan: Plan) -> float:
    """Of the device's memory, beside what the trainer holds in the fullest phase, rounded down."""
    beside = plan.peak.total - plan.peak.held.get("engine", 0)
    return int(100 * (plan.device.memory - beside) / plan.device.memory) / 100


def _least_share(plan: Plan) -> float:
    """Of the device's memory, which an engine needs for its weights and some keys and values."""
    return float((2 * plan.cost.parameters + 2 * ENGINE_BYTES + CONTEXT_BYTES) / plan.device.memory)


def with_flags(spellings: Mapping[str, str], words: Sequence[str], change: Sequence[Change]) -> list[str]:
    """The words of a command with these flags instead of its own of the same names, whatever their spelling."""
    names = {name for name, _ in change}
    kept: list[str] = []
    drops = False
    for word in words:
        if word.startswith("--"):
            name = word[2:].partition("=")[0].replace("-", "_")
            drops = spellings.get(name, name) in names
        if not drops:
            kept.append(word)
    return [*kept, *(part for name, value in change for part in (f"--{name}", value))]


def fitted(
    plan: Plan,
    args: Any,
    words: Sequence[str],
    spellings: Mapping[str, str],
    planned: Callable[[Sequence[str]], tuple[Plan, Any]],
) -> tuple[list[str], Plan]:
    """The words of a command that fits, or of the last one that was tried, and its plan; `spellings`: of its flags.

    In turn, the first change that makes room in the fullest phase, and goes with the other settings, is made; in the
    end those that later ones have made needless are taken back.
    """
    made: list[list[Change]] = []
    for _ in range(MOST_CHANGES):
        for change in [] if plan.fits else [one for one in changes(plan, args) if one not in made]:
            with contextlib.suppress(ConfigError):
                plan, resolved = planned(_changed(spellings, words, [*made, change]))
                made, args = [*made, change], resolved.args
                break
        else:
            break
    for change in made[:-1] if plan.fits else []:
        rest = [one for one in made if one is not change]
        with contextlib.suppress(ConfigError):
            without, _ = planned(_changed(spellings, words, rest))
            if without.fits:
                made, plan = rest, without
    return _changed(spellings, words, made), plan


def _changed(spellings: Mapping[str, str], words: Sequence[str], made: Sequence[Sequence[Change]]) -> list[str]:
    return functools.reduce(functools.partial(with_flags, spellings), made, list(words))


def require_rollouts(args: Any) -> None:
    """Raises ConfigError: there are no placements of vLLM to compare."""
    if not hasattr(args, "use_vllm"):
        raise ConfigError("--compare: true: compares placements of vLLM, and this run has no rollouts; leave it out")
    if not args.use_vllm:
        raise ConfigError("--compare: true: compares placements of vLLM; add --use_vllm true")


def compared(
    args: Any,
    words: Sequence[str],
    devices: int,
    spellings: Mapping[str, str],
    planned: Callable[[Sequence[str], int], tuple[Plan, Any]],
) -> list[dict[str, Any]]:
    """Colocated vLLM, and vLLM on 1, 2, ... of the devices of its own, which samples ahead; the fastest first."""
    rows = []
    for apart in range(devices):
        if apart:
            change = [("vllm_mode", "dedicated"), ("num_infer_workers", str(apart)), ("async_generate", "true")]
        else:
            change = [("vllm_mode", "colocate"), ("num_infer_workers", str(devices)), ("async_generate", "false")]
            change += [("sleep_level", str(args.sleep_level or 1))]
        row: dict[str, Any] = {"trainers": devices - apart, "engines": apart or devices, "flags": shown(change)}
        try:
            plan, _ = planned(with_flags(spellings, words, change), devices - apart)
        except ConfigError as error:
            rows.append({**row, "problem": str(error), "tokens_per_second": 0.0})
            continue
        rows.append(
            {
                **row,
                "step_completions": plan.rows,
                "step_seconds": plan.seconds,
                "tokens_per_second": plan.tokens_per_second,
                "fits": plan.fits,
            }
        )
    return sorted(rows, key=lambda row: (-bool(row.get("fits")), -row["tokens_per_second"]))


def table(rows: Sequence[dict[str, Any]]) -> list[str]:
    """For people. The batch grows with the trainers, so the rate of tokens is compared, not that of steps."""
    lines = [f"{'tokens/s':>10}  {'s/step':>8}  {'batch':>6}  {'fits':<4}  placement"]
    for row in rows:
        where = f"NPROC_PER_NODE={row['trainers']} {row['flags']}"
        if "problem" in row:
            lines.append(f"{'-':>10}  {'-':>8}  {'-':>6}  {'no':<4}  {where}: {row['problem'].splitlines()[0]}")
            continue
        fits = "yes" if row["fits"] else "no"
        numbers = f"{row['tokens_per_second']:>10,.0f}  {row['step_seconds']:>8.3g}  {row['step_completions']:>6}"
        lines.append(f"{numbers}  {fits:<4}  {where}")
    return lines
