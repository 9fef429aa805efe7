"""The last words of a run: what it reached, where its time went, where everything lies. Pure text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from swift.errors import counted
from swift.observability.jsonl import series

PHASES = ("generate", "reward", "train", "sync", "memory")
_FILES = (
    ("logging.jsonl", "all numbers"),
    ("completions.jsonl", "all completions"),
    ("images", "curves"),
    ("runs", "TensorBoard"),
    ("logs", "log files"),
)


def summarise(
    rows: Sequence[Mapping[str, Any]],
    *,
    run_dir: Path,
    best_checkpoint: Path | None = None,
    last_checkpoint: Path | None = None,
) -> str:
    """The summary shown when a run ends, several lines.

    Args:
        rows: of logging.jsonl, those that count.
        run_dir: the run's folder; only what exists in it is listed.
        best_checkpoint: by the metric the run was told to watch.
        last_checkpoint: the newest.
    """
    parts = [_headline(rows), *_rewards(rows), *_sampler(rows), *_time_table(rows)]
    return "\n".join([*parts, *_places(run_dir, best_checkpoint, last_checkpoint)])


def _headline(rows: Sequence[Mapping[str, Any]]) -> str:
    steps, _ = series(rows, "step")
    _, totals = series(rows, "max_steps")
    if not steps:
        return "No step was logged."
    of = f" of {totals[-1]:.0f}" if totals else ""
    return f"Steps logged: up to {steps[-1]}{of}"


def _rewards(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """First, last and best value of the reward, of each function and of the evaluation."""
    names = [key for key in ("reward", "eval_reward") if any(key in row for row in rows)]
    names += dict.fromkeys(k for row in rows for k in row if k.startswith("rewards/") and k.endswith("/mean"))
    if not names:
        return []
    labels = {name: name.removeprefix("rewards/").removesuffix("/mean") for name in names}
    width = max(len(label) for label in labels.values())
    lines = ["", f"{'':{width}}  {'first':>8}  {'last':>8}  {'best':>8}"]
    for name in names:
        steps, values = series(rows, name)
        if values:
            best = max(range(len(values)), key=values.__getitem__)
            row = f"{labels[name]:{width}}  {values[0]:8.4f}  {values[-1]:8.4f}  {values[best]:8.4f}"
            lines.append(f"{row}  (step {steps[best]})")
    return lines


def _sampler(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """How far the log-probs of sampler and trainer were apart, and what may explain it."""
    key = "mismatch/logp_abs_diff_max"
    _, gaps = series([row for row in rows if not row.get("mismatch/biased")], key)
    if not gaps:
        return []
    _, ages = series(rows, "off_policy/max")
    _, restarts = series(rows, "health/engine_restarts")
    lines = ["", "sampler against trainer", f"  {key}  {max(gaps):.1e}"]
    if ages and max(ages) > 0:
        lines[-1] += f"  (tokens were up to {counted(max(ages), 'step')} old)"
    if sum(restarts):
        lines.append(f"  health/engine_restarts  {sum(restarts):.0f}")
    return lines


def _time_table(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Mean seconds per step by phase, with shares, and tokens per second."""
    timed = [row for row in rows if isinstance(row.get("step_time"), int | float)]
    if not timed:
        return []
    covered = steps_covered(timed)
    total = sum(covered)
    per_step = sum(row["step_time"] * steps for row, steps in zip(timed, covered, strict=True)) / total
    lines = ["", "time per step"]
    known = 0.0
    for phase in PHASES:
        key = f"time/{phase}"
        seconds = [row[key] * steps for row, steps in zip(timed, covered, strict=True) if key in row]
        if seconds:
            mean = sum(seconds) / total
            known += mean
            lines.append(_time_line(phase, mean, per_step))
    lines.append(_time_line("other", max(0.0, per_step - known), per_step))
    lines.append(f"  {'all':<9} {per_step:8.3f} s")
    speeds = [(row, steps) for row, steps in zip(timed, covered, strict=True) if "tokens/trained" in row]
    seconds_of_speeds = sum(row["step_time"] * steps for row, steps in speeds)
    if seconds_of_speeds > 0:
        speed = sum(row["tokens/trained"] * steps for row, steps in speeds) / seconds_of_speeds
        lines.append(f"  {speed:.0f} trained tokens per second")
    return lines


def steps_covered(rows: Sequence[Mapping[str, Any]]) -> list[int]:
    """How many optimizer steps each row stands for: those since the row before it."""
    steps = [int(row["step"]) for row in rows]
    return [max(1, step - before) for before, step in zip([0, *steps], steps, strict=False)]


def _time_line(phase: str, seconds: float, all_seconds: float) -> str:
    share = seconds / all_seconds if all_seconds else 0.0
    return f"  {phase:<9} {seconds:8.3f} s  {share:4.0%}"


def _places(run_dir: Path, best: Path | None, last: Path | None) -> list[str]:
    lines = ["", f"Everything lies in {run_dir}"]
    if last is not None:
        lines.append(f"  {last.name:<18} last checkpoint")
    if best is not None:
        lines.append(f"  {best.name:<18} best checkpoint")
    return lines + [f"  {name:<18} {what}" for name, what in _FILES if (run_dir / name).exists()]
