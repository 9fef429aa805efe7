"""Output of a GRPO run: logs, completions, warnings, curves, the summary. Rank 0 only.

The pipeline passes scored rounds to `RunReport`, the trainer passes logs and saves. It changes nothing in the run; its
state (that of the health monitor) is small and goes into checkpoints.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from swift.data.image_store import images_in
from swift.observability.completions_log import CompletionsLog, completion_rows, sample_line
from swift.observability.curves import ALERTS, LOGGING, Curves
from swift.observability.health import Alert, HealthMonitor
from swift.observability.jsonl import JsonlWriter, read_log
from swift.observability.metrics import MetricStore
from swift.observability.progress import Progress
from swift.observability.rollout_record import RolloutRecord
from swift.observability.summary import summarise
from swift.observability.trackers import CompletionTrackers
from swift.observability.zero_rewards import ZeroRewards
from swift.rollout.round_result import ScoredRound

COMPLETIONS = "completions.jsonl"


class RunReport(contextlib.ExitStack):
    """The output of a run; a context manager that closes files and draws the last curves at its end.

    attempt: number of this start. metrics: the trainer's; train rounds add to it. reward_names: columns of the scores.
    health: checks the training log lines. metric_names: further names of metrics. trackers: show sample completions at
    log steps. diagnosis: findings of the reward functions on their last values. record: `--record_rollouts`.
    """

    def __init__(
        self,
        run_dir: Path,
        attempt: int,
        *,
        metrics: MetricStore,
        progress: Progress,
        reward_names: Sequence[str],
        health: HealthMonitor,
        metric_names: str | None,
        trackers: CompletionTrackers | None,
        diagnosis: Callable[[], Sequence[str]],
        record: str = "off",
    ) -> None:
        super().__init__()
        self.run_dir = run_dir
        self.attempt = attempt
        self.metrics = metrics
        self.progress = progress
        self.reward_names = list(reward_names)
        self.health = health
        self.metric_names = metric_names
        self.diagnosis = diagnosis
        self.last_alert: Alert | None = None
        self.logging, self.alerts = JsonlWriter(run_dir / LOGGING), JsonlWriter(run_dir / ALERTS)
        self.completions = CompletionsLog(run_dir / COMPLETIONS)
        self.trackers = trackers
        self.curves = Curves(run_dir)
        self.record = RolloutRecord(run_dir, record, reward_names)
        self.zero_rewards = ZeroRewards(run_dir / COMPLETIONS)
        self._last_rows: list[dict[str, Any]] = []
        self.push(self.curves)  # drawn last, from complete files
        if trackers is not None:
            self.callback(trackers.close)
        self.callback(self.completions.close)
        self.callback(self.record.close)
        self.callback(self.alerts.close)
        self.callback(self.logging.close)
        self.callback(progress.close)

    def on_round(self, scored: ScoredRound) -> None:
        """A round of rollouts was scored."""
        if scored.split == "train":
            prompts = {group.prompt.prompt_id for group in scored.groups}
            self.metrics.add_many({**scored.metrics, "completions/unique_prompts": float(len(prompts))})
        names = self.reward_names
        rows = completion_rows(scored, attempt=self.attempt, reward_names=names, images_in=images_in)
        self.completions.write(rows)
        self._last_rows = rows
        for line in self.zero_rewards.update(rows) if scored.split == "train" else ():
            self.progress.line(line)

    def examined(self, step: int, logs: Mapping[str, Any]) -> dict[str, Any]:
        """A training log line, checked by the health rules, with the number of their alerts."""
        alerts = self.health.update(step, logs, diagnosis=self.diagnosis)
        for alert in alerts:
            self.last_alert = alert
            self.progress.warn(f"step {step}: {alert.sentence}")
            self.alerts.write({"attempt": self.attempt, **asdict(alert)})
        bad = sum(isinstance(value, float) and not math.isfinite(value) for value in logs.values())
        counts = {"health/alerts": float(len(alerts)), "health/nonfinite_metrics": float(bad)}
        return {**logs, **counts}

    def on_logs(self, step: int, max_steps: int, logs: Mapping[str, Any]) -> None:
        """Trainer logs: training values at log steps, evaluation values after an evaluation."""
        row = {**logs, "step": step, "max_steps": max_steps, "attempt": self.attempt}
        self.logging.write(row)
        if self.trackers is not None:
            self.trackers.show(step, self._last_rows)
        self.progress.log(step, {name: value for name, value in logs.items() if isinstance(value, int | float)})

    def on_save(self) -> None:
        """Write everything reported so far to the disk, before a checkpoint is committed."""
        self.logging.sync()
        self.alerts.sync()
        self.completions.flush()
        self.record.flush()
        if self._last_rows:
            self.progress.line(sample_line(self._last_rows[0]), cut=True)
        self.curves.draw()

    def summary(self, *, best: Path | None, last: Path | None) -> str:
        """The summary of the run, after the end of the context."""
        rows = read_log(self.run_dir / LOGGING)
        return summarise(rows, run_dir=self.run_dir, best_checkpoint=best, last_checkpoint=last)
