"""Where the time of a run goes, the causes among it, and the one setting that would save most."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from swift.observability.evidence import Evidence
from swift.observability.findings import Finding, between, percent, steps_of
from swift.observability.metrics import HELD_UP
from swift.observability.summary import PHASES, steps_covered

WAITS = ("wait_rollout", "wait_train")
ONE_RANK = 0.8
"""Share of all waiting that is for one rank, if it is slow; less where the work is uneven, now here, now there."""


def seconds_of(e: Evidence, key: str) -> list[float]:
    """Seconds of all steps that the lines with a step time cover, by line; `key` is a mean of steps."""
    timed = [row for row in e.log if isinstance(row.get("step_time"), int | float)]
    return [
        row[key] * steps
        for row, steps in zip(timed, steps_covered(timed), strict=True)
        if isinstance(row.get(key), int | float)
    ]


def shares(e: Evidence) -> dict[str, float]:
    """Share of the step time by phase, waiting included; {} if nothing was timed."""
    whole = math.fsum(seconds_of(e, "step_time"))
    found = {phase: seconds_of(e, f"time/{phase}") for phase in (*PHASES, *WAITS)}
    return {phase: math.fsum(seconds) / whole for phase, seconds in found.items() if seconds and whole}


def time_of(e: Evidence) -> dict[str, Any]:
    """Seconds per step, shares of the phases, and the setting that would save most, with its reason."""
    parts = shares(e)
    if not parts:
        return {}
    step_s = e.series("step_time").mean
    setting, why = _advice(e, parts)
    rounded = {name: round(share, 3) for name, share in sorted(parts.items(), key=lambda item: -item[1])}
    return {"step_s": round(step_s, 3), "shares": rounded, "setting": setting, "why": why}


def _advice(e: Evidence, parts: dict[str, float]) -> tuple[str, str]:
    flat = e.series("frac_reward_zero_std")
    largest = max(parts, key=parts.__getitem__)
    drawn = e.arg("dynamic_sample", False) or bool(e.series("teacher_kl"))
    if flat and flat.mean > 0.5 and flat.mean > parts[largest] and not drawn:
        return "--dynamic_sample true", f"{percent(flat.mean)} of the groups have equal rewards and teach nothing"
    if largest == "reward":
        workers = int(e.arg("reward_workers", 1))
        return (
            f"--reward_workers {2 * workers}",
            f"rewards take {percent(parts[largest])} of a step with {workers} workers",
        )
    if largest in ("generate", "wait_rollout"):
        if not e.arg("use_vllm", False) and not e.arg("use_lmdeploy", False):
            return (
                "--use_vllm true",
                f"generation takes {percent(parts[largest])} of a step with the transformers engine",
            )
        saved = min(parts.get("generate", 0.0), parts.get("train", 0.0))
        if e.arg("async_generate", False):
            return "--num_infer_workers 2", f"training waits for samples in {percent(parts[largest])} of a step"
        return (
            "--vllm_mode dedicated --async_generate true",
            f"sampling beside training saves up to {percent(saved)} of a step",
        )
    if largest == "train" and e.arg("gradient_checkpointing", False):
        saved = parts[largest] / 4
        return (
            "--gradient_checkpointing false",
            f"about {percent(saved)} of a step is a second forward pass, if memory allows",
        )
    if largest == "sync":
        return "--vllm_sync_interval 2", f"weight sync takes {percent(parts[largest])} of a step"
    return (
        "--max_tokens_per_micro_batch 16384",
        f"{largest} takes {percent(parts[largest])} of a step; larger micro-batches, if memory allows",
    )


def slow_parts(e: Evidence) -> Iterator[Finding]:
    """Rewards or an engine that take most of the time."""
    parts = shares(e)
    if (reward := parts.get("reward", 0.0)) > 0.4:
        each = {
            key.rpartition("/")[2]: e.series(key).mean
            for row in e.log[:1]
            for key in row
            if key.startswith("time/reward/")
        }
        slowest = max(each, key=each.__getitem__, default="")
        evidence = [f"time/reward is {percent(reward)} of step_time, {e.series('time/reward').mean:.2f} s a step"]
        evidence += [f"{slowest}: {each[slowest]:.2f} s"] if slowest else []
        more = f"--reward_workers {4 * int(e.arg('reward_workers', 1))}"
        yield Finding(
            "slow_reward",
            between(reward, 0.4, 0.7, 0.55, 0.92),
            evidence,
            f"{more}, or an async function that waits for its answers together",
            settings=more,
        )
    yield from _slow_engine(e, parts)


def _slow_engine(e: Evidence, parts: dict[str, float]) -> Iterator[Finding]:
    """Generation that becomes slower, or is slower than decoding can be against training on the same tokens."""
    share = max(parts.get("generate", 0.0), parts.get("wait_rollout", 0.0))
    seconds, length = e.series("time/generate"), e.series("completions/mean_length")
    if not seconds or share < 0.6:
        return
    said = (
        f"generation takes {percent(share)} of a step, {seconds.mean:.2f} s for completions of {length.mean:.0f} tokens"
    )
    steps = [a / b for a, b in _pairs(e, "time/generate", "completions/max_length")]
    third = len(steps) // 3
    grown = statistics.median(steps[-third:]) / statistics.median(steps[:third]) if third > 2 else 1.0
    if grown > 2:
        slower = f"a decode step takes {grown:.1f} times as long at the end as at the beginning"
        fix = "read logs/attempt-<k>/engine-<n>.log; look for other programs on its device"
        yield Finding("slow_engine", between(grown, 2, 5, 0.55, 0.9), [said, slower], fix)
        return
    ratios = [a / b for a, b in _pairs(e, "time/generate", "time/train")]
    ratio = statistics.median(ratios) if len(ratios) > 4 else 0.0
    has_backend = e.arg("use_vllm", False) or e.arg("use_lmdeploy", False)
    usual = 15 if has_backend else 5  # a GPU trains far faster than it decodes
    if ratio > usual:
        longer = f"{ratio:.0f} times as long as training on the same completions"
        fix = "--use_vllm true, larger batches, more engines (--num_infer_workers); --vllm_enforce_eager false"
        yield Finding("slow_engine", between(ratio, usual, 3 * usual, 0.45, 0.9), [said, longer], fix)


def _pairs(e: Evidence, first: str, second: str) -> list[tuple[float, float]]:
    """Two metrics above 0 in the lines in which most groups are trained on: else training has nothing to do."""
    rows = [row for row in e.log if (row.get("frac_reward_zero_std") or 0.0) < 0.5]
    pairs = [(row.get(first) or 0.0, row.get(second) or 0.0) for row in rows]
    return [(a, b) for a, b in pairs if a > 0 and b > 0]


def slow_rank(e: Evidence) -> Iterator[Finding]:
    """A rank that the others wait for, step after step, or that made no progress in the end."""
    ended = [reason for reason in e.reasons if "made no progress" in reason or "ddp_timeout" in reason]
    if ended:
        fix = "read the stacks in logs/attempt-<k>/rank-<r>.log of the rank that is named"
        yield Finding("slow_rank", 0.9, ended[:1], fix)
    keys = dict.fromkeys(key for row in e.log for key in row if key.startswith(HELD_UP))
    waited = {key: e.total(key) for key in keys}
    by_rank: dict[str, float] = defaultdict(float)
    for key, seconds in waited.items():
        by_rank[key.rpartition("-")[2]] += seconds
    duration = math.fsum(seconds_of(e, "step_time"))
    if not by_rank or not duration or e.num_steps < 5:
        return
    rank, seconds = max(by_rank.items(), key=lambda item: item[1])
    of_all = seconds / math.fsum(by_rank.values())
    key = max((key for key in keys if key.endswith(f"-{rank}")), key=waited.__getitem__)
    phase, steps = key.removeprefix(HELD_UP).partition("/")[0], e.series(key).steps
    if of_all < ONE_RANK or len(steps) < len(e.log) / 2:
        return
    said = f"the others wait for rank {rank} in {percent(seconds / duration)} of the time, most of it in phase {phase}"
    yield Finding(
        "slow_rank",
        between(seconds / duration, 0.15, 0.5, 0.5, 0.92),
        [f"{said} ({steps_of(steps)})", f"{percent(of_all)} of all such waiting is for this rank"],
        f"look for other programs on the device and the cores of rank {rank}, and for its clock rates",
        steps,
    )


RULES = (slow_parts, slow_rank)
