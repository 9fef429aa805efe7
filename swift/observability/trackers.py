"""Sample completions as text in the experiment trackers of `--report_to` (numbers get there through transformers).

Each tracker shows a small table per log step: prompt, completion, the value of each reward function, reward,
advantage. Long texts are cut. All completions are in completions.jsonl, whole, whatever the trackers show.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from swift.errors import first_line, printable
from swift.observability.completions_log import shortened

logger = logging.getLogger(__name__)

SHOWN_ROWS = 8
"""Completions per log step."""

SHOWN_CHARS = 4000
"""Characters of a text."""


@contextlib.contextmanager
def short_failures() -> Iterator[None]:
    """Report a thread of TensorBoard that cannot write in one line; the run's own next write fails in the same way."""
    before = threading.excepthook

    def report(failure: threading.ExceptHookArgs) -> None:
        if type(failure.thread).__module__.startswith("tensorboard") and isinstance(failure.exc_value, OSError):
            logger.warning("tensorboard: %s; no more is written there", first_line(failure.exc_value))
        else:
            before(failure)

    threading.excepthook = report
    try:
        yield
    finally:
        threading.excepthook = before


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
        table = [
            {
                "step": row["step"],
                "prompt": shortened(row["prompt"], SHOWN_CHARS),
                "completion": shortened(row["completion"], SHOWN_CHARS),
                **{f"rewards/{name}": value for name, value in row["rewards"].items()},
                "reward": row["reward"],
                "advantage": row["advantage"],
            }
            for row in rows[:SHOWN_ROWS]
        ]
        for name in self._names:
            send = getattr(self, f"_to_{name}", None)
            if send is not None and table:
                send(step, table)

    def _to_tensorboard(self, step: int, table: list[dict[str, Any]]) -> None:
        from torch.utils.tensorboard import SummaryWriter

        if self._writer is None:
            self._writer = SummaryWriter(log_dir=str(self._tensorboard_dir))
        self._writer.add_text("completions", as_markdown(table), step)

    def _to_wandb(self, step: int, table: list[dict[str, Any]]) -> None:
        import wandb

        if wandb.run is not None:
            rows = [list(map(_cell, row.values())) for row in table]
            wandb.log({"completions": wandb.Table(columns=list(table[0]), data=rows)}, commit=False)

    def _to_swanlab(self, step: int, table: list[dict[str, Any]]) -> None:
        import swanlab

        if swanlab.get_run() is not None:
            swanlab.log({"completions": swanlab.Text(as_markdown(table))}, step=step)

    def _to_mlflow(self, step: int, table: list[dict[str, Any]]) -> None:
        import mlflow

        if mlflow.active_run() is not None:
            mlflow.flush_async_logging()  # a store of files reads the run's metrics, which may be half written
            mlflow.log_text(as_markdown(table), f"completions/step-{step}.md")

    def _to_trackio(self, step: int, table: list[dict[str, Any]]) -> None:
        import trackio

        if trackio.context_vars.current_run.get() is not None:
            trackio.log({"completions": trackio.Markdown(as_markdown(table))})

    def close(self) -> None:
        """Write what is left."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None


def as_markdown(table: Sequence[Mapping[str, Any]]) -> str:
    """A Markdown table of rows by column, with newlines and bars escaped, so that a completion stays in its cell."""
    lines = ["| " + " | ".join(_escaped(name) for name in table[0]) + " |", "|" + " --- |" * len(table[0])]
    lines += ["| " + " | ".join(_escaped(cell) for cell in row.values()) + " |" for row in table]
    return "\n".join(lines)


def _cell(value: Any) -> Any:
    return value if isinstance(value, int | float | str) else str(value)


def _escaped(value: Any) -> str:
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    return printable(text.replace("|", "\\|").replace("\r", " ").replace("\n", "<br>"))
