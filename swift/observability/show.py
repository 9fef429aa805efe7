"""`swift show DIR`: the best and the worst completions of a step, as text."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from swift.errors import ConfigError, counted, printable
from swift.observability.doctor import checked_rows, newest_run

if TYPE_CHECKING:
    from swift.arguments import Resolved

COMPLETIONS = "completions.jsonl"
_KINDS: dict[str, type] = {
    "step": int, "attempt": int, "split": str, "prompt": str, "completion": str, "rewards": dict, "columns": dict,
}  # fmt: skip


def run(resolved: Resolved) -> int:
    """The mode: prints completions of a step, the best ones first; returns 0."""
    args: Any = resolved.args
    folder = newest_run(args.run, COMPLETIONS)
    rows = step_rows(folder / COMPLETIONS, args.step, args.split)
    if not rows:
        of = f"step {args.step}" if args.step is not None else "any step"
        raise ConfigError(f"--run: {folder}: no completion of {of} for --split {args.split}; choose another one")
    scored = sorted((row for row in rows if _is_number(row.get("reward"))), key=lambda row: -row["reward"])
    best = (scored or rows)[: args.num_completions]
    worst = scored[max(len(best), len(scored) - args.num_completions) :]
    if args.json:
        print(json.dumps({"best": best, "worst": worst}, indent=2, ensure_ascii=False))
        return 0
    for line in (f"run: {folder}", summary(rows), *texts("best", best), *texts("worst", worst)):
        print(printable(line))
    return 0


def step_rows(path: Path, step: int | None, split: str) -> list[dict[str, Any]]:
    """The rows of a step in the last attempt that has it; of the newest step for None."""
    kept: list[dict[str, Any]] = []
    for row in checked_rows(path, _KINDS):
        if row["split"] != split or step not in (None, row["step"]):
            continue
        place, before = ((one["step"], one["attempt"]) for one in (row, kept[0] if kept else row))
        if place > before:
            kept = [row]
        elif place == before:
            kept.append(row)
    return kept


def summary(rows: Sequence[dict[str, Any]]) -> str:
    """A line about a step."""
    rewards = [row["reward"] for row in rows if _is_number(row.get("reward"))]
    line = f"step {rows[0]['step']}: {counted(len(rows), 'completion')}"
    if not rewards:
        return line
    return f"{line}, reward {statistics.fmean(rewards):.3f}, from {min(rewards):.3f} to {max(rewards):.3f}"


def texts(name: str, rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """The lines of completions."""
    for row in rows:
        values = ", ".join(f"{key} {_number(value)}" for key, value in row["rewards"].items())
        facts = [
            f"{name}: reward {_number(row.get('reward'))} ({values})",
            f"advantage {_number(row.get('advantage'))}",
        ]
        facts += [f"{row.get('completion_tokens')} tokens", str(row.get("excluded") or row.get("finish_reason"))]
        yield ""
        yield f"=== {', '.join(facts)}"
        yield from row["prompt"].splitlines()
        turns = row["turns"] if isinstance(row.get("turns"), list) else []
        for turn in turns or [{"role": "completion", "content": row["completion"]}]:
            role, content = (turn.get("role"), turn.get("content")) if isinstance(turn, dict) else ("turn", turn)
            yield f"[{role}]"
            yield from str(content).splitlines()
        yield from (f"{key}: {value}" for key, value in row["columns"].items())


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float)


def _number(value: Any) -> str:
    return f"{value:.3f}" if _is_number(value) else "none"
