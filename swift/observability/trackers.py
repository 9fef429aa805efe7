"""Sample completions as text in the experiment trackers of `--report_to` (numbers get there through transformers).

Each tracker shows a small table per log step: prompt, completion, reward, advantage. All completions are in
completions.jsonl whatever the trackers show.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

SHOWN_ROWS = 8
"""Completions per log step."""

COLUMNS = ("step", "prompt", "completion", "reward", "advantage")


class CompletionTrackers:
    """Sends sample completions to the trackers in `names`, of `--report_to`; unknown ones are left alone.

    unique_prompts: show the first completion of each prompt only.
    """

    def __init__(self, names: Sequence[str], tensorboard_dir: Path, *, unique_prompts: bool = False) -> None:
        self._names = list(names)
        self._tensorboard_dir = tensorboard_dir
        self._unique_prompts = unique_prompts
        self._writer: Any = None

    def show(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Send the first few rows of completions.jsonl's form."""
        if self._unique_prompts:
            firsts: dict[str, Mapping[str, Any]] = {}
            for row in rows:
                firsts.setdefault(row["prompt"], row)
            rows = list(firsts.values())
        table = [[row[name] for name in COLUMNS] for row in rows[:SHOWN_ROWS]]
        for name in self._names:
            send = getattr(self, f"_to_{name}", None)
            if send is not None:
                send(step, table)

    def _to_tensorboard(self, step: int, table: list[list[Any]]) -> None:
        from torch.utils.tensorboard import SummaryWriter

        if self._writer is None:
            self._writer = SummaryWriter(log_dir=str(self._tensorboard_dir))
        self._writer.add_text("completions", as_markdown(table), step)

    def _to_wandb(self, step: int, table: list[list[Any]]) -> None:
        import wandb

        if wandb.run is not None:
            rows = [list(map(_cell, row)) for row in table]
            wandb.log({"completions": wandb.Table(columns=list(COLUMNS), data=rows)}, commit=False)

    def _to_swanlab(self, step: int, table: list[list[Any]]) -> None:
        import swanlab

        if swanlab.get_run() is not None:
            swanlab.log({"completions": swanlab.Text(as_markdown(table))}, step=step)

    def close(self) -> None:
        """Write what is left."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None


def as_markdown(table: Sequence[Sequence[Any]]) -> str:
    """A Markdown table with newlines and bars escaped, so that a completion stays in its cell."""
    lines = ["| " + " | ".join(COLUMNS) + " |", "|" + " --- |" * len(COLUMNS)]
    lines += ["| " + " | ".join(_escaped(cell) for cell in row) + " |" for row in table]
    return "\n".join(lines)


def _cell(value: Any) -> Any:
    return value if isinstance(value, int | float | str) else str(value)


def _escaped(value: Any) -> str:
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    return text.replace("|", "\\|").replace("\r", " ").replace("\n", "<br>")
