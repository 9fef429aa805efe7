"""Seconds of a step that a run of the same command has logged, in place of estimated ones (`--measured`)."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from swift.errors import ConfigError, unusable
from swift.observability.curves import LOGGING
from swift.observability.jsonl import read_log
from swift.observability.run_dir import ARGS

SAME = (
    "model", "tuner_type", "per_device_train_batch_size", "gradient_accumulation_steps", "num_generations",
    "max_completion_length", "max_length", "packing", "packing_length", "padding_free", "sequence_parallel_size",
    "gradient_checkpointing",
)  # fmt: skip
"""Settings that must be those of the run: a step would be another amount of work."""


class Measured(NamedTuple):
    """A step of a run: its seconds, those of its phases, and its tokens, medians and means over the log."""

    step_s: float
    phases: Mapping[str, float]
    tokens: float


def measured_in(given: str, args: Any) -> Measured:
    """What the log of a run says of a step without the first line, which has warm-up and compilation in it.

    given: the run's folder, or its logging.jsonl.

    Raises ConfigError: no log of several timed lines, or of a run with other settings than `args`.
    """
    file = Path(given).expanduser()
    file = file / LOGGING if file.is_dir() else file
    with unusable(f"--measured: {given}: cannot be read", "; give the folder of a run"):
        rows = read_log(file) if file.is_file() else []
        settings = file.with_name(ARGS)
        had = json.loads(settings.read_text(encoding="utf-8")) if settings.is_file() else {}
    timed = [row for row in rows if isinstance(row.get("step_time"), int | float) and "num_tokens" in row]
    if len(timed) < 3:
        raise ConfigError(f"--measured: {given}: fewer than three log lines with times; give a longer run")
    others = [f"--{name} {had[name]}" for name in SAME if name in had and had[name] != getattr(args, name, had[name])]
    if others:
        raise ConfigError(f"--measured: {given}: its run had {', '.join(others)}; give a run of this command")
    first, later = timed[0], timed[1:]
    names = [key for key in later[-1] if key.startswith("time/") and key.count("/") == 1]
    return Measured(
        step_s=statistics.median(row["step_time"] for row in later),
        phases={key[5:]: statistics.median(row.get(key, 0.0) for row in later) for key in names},
        tokens=(later[-1]["num_tokens"] - first["num_tokens"]) / (later[-1]["step"] - first["step"]),
    )
