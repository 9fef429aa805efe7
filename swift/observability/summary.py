"""The summary at the end of a run: rewards, time per phase, and the paths of its files. Pure text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from swift.errors import counted
from swift.observability.jsonl import series

PHASES = ("generate", "reward", "train", "sync", "memory")
_FILES = (
    ("logging.jsonl", "all numbers"),
    ("completions.jsonl", "all completions; `swift show` prints the best and worst"),
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
        best_checkpoint: by `--metric_for_best_model`.
        last_checkpoint: the newest.
    """
    steps, _ = series(rows, "step")
    _, totals = series(rows, "max_steps")
    of = f" of {totals[-1]:.0f}" if totals else ""
    headline = f"Steps logged: up to {steps[-1]}{of}" if steps else "No step was logged."
    checkpoints = ((last_checkpoint, "last"), (best_checkpoint, "best"))
    places = [(path.name, f"{which} checkpoint") for path, which in checkpoints if path is not None]
    places += [(name, what) for name, what in _FILES if (run_dir / name).exists()]
    return "\n".join(
        [
            headline,
            *_rewards(rows),
            *_sampler(rows),
            *_time_table(rows),
            "",
            f"Everything lies in {run_dir}",
            *(f"  {name:<18} {what}" for name, what in places),
        ]
    )


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
    """The largest gap between the log-probs of sampler and trainer, with its possible causes."""
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
    means: dict[str, float] = {}
    known = 0.0
    for phase in PHASES:
        key = f"time/{phase}"
        seconds = [row[key] * steps for row, steps in zip(timed, covered, strict=True) if key in row]
        if seconds:
            means[phase] = sum(seconds) / total
            known += means[phase]
    means["other"] = max(0.0, per_step - known)
    lines = ["", "time per step"]
    for phase, mean in means.items():
        lines.append(f"  {phase:<9} {mean:8.3f} s  {mean / per_step if per_step else 0.0:4.0%}")
    lines.append(f"  {'all':<9} {per_step:8.3f} s")
    speeds = [(row, steps) for row, steps in zip(timed, covered, strict=True) if "tokens/trained" in row]
    seconds_of_speeds = sum(row["step_time"] * steps for row, steps in speeds)
    if seconds_of_speeds > 0:
        speed = sum(row["tokens/trained"] * steps for row, steps in speeds) / seconds_of_speeds
        lines.append(f"  {speed:.0f} trained tokens per second")
    return lines


def steps_covered(rows: Sequence[Mapping[str, Any]]) -> list[int]:
    """The number of optimizer steps that each row covers: those since the row before it."""
    steps = [int(row["step"]) for row in rows]
    return [max(1, step - before) for before, step in zip([0, *steps], steps, strict=False)]
