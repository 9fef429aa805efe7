"""What is known of a run that may be sick: its log, its completions, its record of rollouts, its settings.

`Evidence` is read once by `gather`; the rules ask it, and none of them opens a file. Series are means of log lines by
step. Of a long completions.jsonl the beginning and the end are read.
"""

from __future__ import annotations

import json
import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from swift.errors import parse_json
from swift.observability.answers import is_right
from swift.observability.jsonl import read_jsonl
from swift.observability.jsonl import series as points
from swift.plugin.registry import judging
from swift.types import EXTRACTED

EDGE_BYTES = 1 << 25
"""Bytes that are read of each end of completions.jsonl."""
LARGEST, LARGEST_STEP = 1e300, 2**53
RECORDED_STEPS = 8
"""Recorded steps that are read, spread over the record."""

Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Series:
    """A metric over the steps of a run."""

    steps: Sequence[int]
    values: Sequence[float]

    def __bool__(self) -> bool:
        return bool(self.values)

    @property
    def edge(self) -> int:
        """Number of values at each end that are averaged: a fifth, at least three."""
        return max(min(3, len(self.values)), len(self.values) // 5)

    @property
    def first(self) -> float:
        """Mean of the beginning."""
        return statistics.fmean(self.values[: self.edge])

    @property
    def last(self) -> float:
        """Mean of the end."""
        return statistics.fmean(self.values[-self.edge :])

    @property
    def mean(self) -> float:
        """Mean of all; 0 if there are none."""
        return statistics.fmean(self.values) if self.values else 0.0

    @property
    def best(self) -> float:
        """Highest mean over as many neighbours as `first` has."""
        return max(statistics.fmean(self.values[at : at + self.edge]) for at in range(len(self.values) - self.edge + 1))

    @property
    def late(self) -> Series:
        """The second half."""
        half = len(self.values) // 2
        return Series(self.steps[half:], self.values[half:])

    def where(self, holds: Callable[[float], bool]) -> list[int]:
        """The steps of the values for which something holds."""
        return [step for step, value in zip(self.steps, self.values, strict=True) if holds(value)]

    def since(self, choose: Callable[[Sequence[float]], float]) -> Sequence[int]:
        """The steps from that of a value, such as the `max`, to the last."""
        return self.steps[self.values.index(choose(self.values)) :]

    @property
    def fall(self) -> tuple[float, float]:
        """The clearest fall to a lower level that stays: Welch's statistic, and the share that is lost."""
        best = (0.0, 0.0)
        for at in range(4, len(self.values) - 7):
            before, after = self.values[:at], self.values[at:]
            drop = statistics.fmean(before) - statistics.fmean(after)
            error = math.sqrt(statistics.variance(before) / at + statistics.variance(after) / len(after))
            if drop > 0 and error > 0:
                best = max(best, (drop / error, drop / (abs(statistics.fmean(before)) or 1.0)))
        return best

    @property
    def trend(self) -> float:
        """The slope of a line through the points divided by its standard error; 0 for fewer than 6 points.

        Beyond 3 or -3 the metric has risen or fallen, whatever its unit.
        """
        count = len(self.values)
        if count < 6 or max(self.values) == min(self.values):
            return 0.0
        slope, base = statistics.linear_regression(self.steps, self.values)
        middle = statistics.fmean(self.steps)
        spread = math.fsum((step - middle) ** 2 for step in self.steps)
        rest = math.fsum((v - base - slope * s) ** 2 for s, v in zip(self.steps, self.values, strict=True))
        error = math.sqrt(rest / (count - 2) / spread)
        return slope / error if error else math.copysign(math.inf, slope)


@dataclass(frozen=True)
class Evidence:
    """A run.

    log: training lines. evals: evaluation lines. completions: rows of training completions, by step. record: rows of
    `read_rollouts` on some steps. prompts: the first of each of these steps as text, special tokens included. reasons:
    how the newest attempt ended. judges: reward functions, those of plugins too, by `ORM.judges`. command: the mode of
    the run; "" where unknown. adapter, adapter_before: the largest values of the LoRA B matrices in the newest and in
    the oldest checkpoint. context: of the model, in tokens; 0 where unknown.
    """

    log: Sequence[Row]
    evals: Sequence[Row] = ()
    completions: Sequence[Row] = ()
    record: Sequence[Row] = ()
    prompts: Sequence[str] = ()
    args: Row = field(default_factory=dict)
    reasons: Sequence[str] = ()
    judges: Mapping[str, Sequence[str]] = field(default_factory=dict)
    command: str = ""
    adapter: Sequence[float] = ()
    adapter_before: Sequence[float] = ()
    context: int = 0

    def series(self, key: str) -> Series:
        """A metric of the training lines, where it is a finite number."""
        return Series(*points(self.log, key))

    def arg(self, name: str, default: Any) -> Any:
        """A setting; `default` if it is not known, None, or of another type."""
        value = self.args.get(name)
        kind = int | float if isinstance(default, float) else type(default)
        return value if isinstance(value, kind) else default

    def judging(self, *kinds: str) -> set[str]:
        """Names of reward functions whose `ORM.judges` is one of these."""
        return judging(*kinds) | {name for kind in kinds for name in self.judges.get(kind, ())}

    def total(self, key: str) -> float:
        """The sum of a count over the run."""
        return math.fsum(self.series(key).values)

    @cached_property
    def names(self) -> list[str]:
        """The reward functions and models."""
        return list(dict.fromkeys(name for row in self.completions for name in row["rewards"]))

    @cached_property
    def weights(self) -> dict[str, float]:
        """Their weights; only of the functions whose weight is known."""
        given = self.arg("reward_weights", []) or [1.0] * len(self.names)
        return {name: weight for name, weight in zip(self.names, given, strict=False) if is_number(weight)}

    @cached_property
    def groups(self) -> list[list[Row]]:
        """The completions of each sampled group, in order."""
        found: dict[Any, list[Row]] = defaultdict(list)
        for row in self.completions:
            found[row["step"], row.get("group_id")].append(row)
        return [rows for rows in found.values() if len(rows) > 1]

    @cached_property
    def truth(self) -> str | None:
        """The column of the ground truth: that whose values completions give, and more often their own than others'."""
        names = {name for row in self.completions[:64] for name in row["columns"] if not name.endswith(EXTRACTED)}
        lifts = {name: lift for name in names if (lift := self._lift(name))[0] > 0}
        return max(lifts, key=lambda name: lifts[name][0], default=None)

    def _lift(self, column: str) -> tuple[float, int]:
        """How much more often completions give their own ground truth than that of another prompt; right ones."""
        rows = [row for row in self.completions if is_short(row["columns"].get(column))]
        if len({str(row["columns"][column]) for row in rows}) < 2:
            return 0.0, 0
        shift = len(rows) // 2
        own = [gives(row, row["columns"][column]) for row in rows]
        others = [
            gives(row, rows[(at + shift) % len(rows)]["columns"][column])
            for at, row in enumerate(rows)
            if rows[(at + shift) % len(rows)]["columns"][column] != row["columns"][column]
        ]
        by_chance = statistics.fmean(others) if others else 0.0
        lift = statistics.fmean(own) - by_chance
        error = math.sqrt(max(by_chance, 1 / len(rows)) / len(rows))
        return (lift if sum(own) >= 3 and lift > 3 * error else 0.0), sum(own)

    @cached_property
    def right(self) -> list[bool] | None:
        """Whether each completion gives its ground truth, by its text alone; None without a ground truth."""
        if self.truth is None:
            return None
        return [gives(row, row["columns"].get(self.truth)) for row in self.completions]

    def by_step(self, value: Callable[[Row], float | None]) -> Series:
        """The mean over the completions of each step of what `value` tells of one."""
        found: dict[int, list[float]] = defaultdict(list)
        for row in self.completions:
            number = value(row)
            if number is not None:
                found[row["step"]].append(number)
        return Series(list(found), [statistics.fmean(numbers) for numbers in found.values()])

    @cached_property
    def rightness(self) -> Series:
        """Share of right completions by step."""
        known = {id(row): right for row, right in zip(self.completions, self.right or (), strict=False)}
        return self.by_step(lambda row: float(known[id(row)]) if id(row) in known else None)

    @cached_property
    def num_steps(self) -> int:
        """The steps that the log covers."""
        return self.log[-1]["step"] if self.log else 0

    @cached_property
    def reward(self) -> Series:
        """The mean reward, of each step if all its completions are there."""
        logged = self.series("reward")
        scored = self.by_step(lambda row: row.get("reward") if row.get("used", True) else None)
        return scored if len(scored.values) > len(logged.values) else logged

    @property
    def learns(self) -> bool:
        """Whether the reward has risen, and has not fallen again."""
        reward = self.reward
        if reward.trend <= 3:
            return False
        return reward.last - reward.first > 0.6 * (reward.best - reward.first)


def gives(row: Row, truth: Any) -> bool:
    """Whether a completion's text gives a ground truth."""
    return is_right(row["completion"], truth, cut=row["finish_reason"] == "length")


def is_number(value: Any) -> bool:
    """Whether a value can be computed with."""
    return isinstance(value, int | float) and abs(value) < LARGEST


def sound(row: Row) -> Row:
    """The numbers of a row, and what is null in it."""
    return {key: value for key, value in row.items() if value is None or is_number(value)}


def is_short(value: Any) -> bool:
    """Whether a column's value can be a ground truth; of a solution with its steps the last line counts (GSM8K)."""
    return isinstance(value, str | int | float) and 0 < len(str(value).rpartition("####")[2].strip()) <= 200


def gather(folder: Path, log: Sequence[Row], completions: Sequence[Row]) -> Evidence:
    """The evidence in a run's folder, beside the lines of its log and the completions that count."""
    args_file, attempts = folder / "args.json", folder / "attempts.jsonl"
    args = parse_json(args_file.read_text(encoding="utf-8")) if args_file.is_file() else {}
    args = args if isinstance(args, dict) else {}
    newest = _newest(attempts)
    commands = [row["command"] for row in newest if isinstance(row.get("command"), str)]
    record, prompts = _recorded(folder)
    adapter, adapter_before = _adapters(folder)
    log = [sound(row) for row in log if abs(row["step"]) < LARGEST_STEP]
    is_eval = [any(key.startswith("eval_") for key in row) for row in log]
    return Evidence(
        log=[row for row, other in zip(log, is_eval, strict=True) if not other],
        evals=[row for row, other in zip(log, is_eval, strict=True) if other],
        completions=[
            {**row, "reward": sound({"": row.get("reward")}).get(""), "rewards": sound(row["rewards"])}
            for row in completions
            if row["split"] == "train" and abs(row["step"]) < LARGEST_STEP
        ],
        record=record,
        prompts=prompts,
        args={name: value for name, value in args.items() if is_number(value) or not isinstance(value, int | float)},
        reasons=[str(row["reason"]) for row in newest if row.get("reason")],
        judges=next((row["judges"] for row in newest if row.get("judges")), {}),
        command=next(filter(None, commands), "rlhf" if "rlhf_type" in args else ""),
        adapter=adapter,
        adapter_before=adapter_before,
        context=_context(args),
    )


def _context(args: Row) -> int:
    """`--max_model_len`, or what config.json says in the model's folder."""
    file = Path(str(args.get("model"))) / "config.json"
    config = parse_json(file.read_text(encoding="utf-8")) if file.is_file() else {}
    found = args.get("max_model_len") or (config.get("text_config") or config).get("max_position_embeddings")
    return found if isinstance(found, int) else 0


def _newest(attempts: Path) -> list[Row]:
    """Rows of the newest attempt; what ended earlier ones may have been mended since."""
    rows = list(read_jsonl(attempts)) if attempts.is_file() else []
    newest = max((row.get("attempt") or 0 for row in rows), default=0)
    return [row for row in rows if (row.get("attempt") or 0) == newest]


def ends_of(path: Path, rows: Callable[[Path], Sequence[Row]]) -> list[Row]:
    """The rows of completions.jsonl: all by `rows`, or of a large file those of its two ends."""
    if not path.is_file() or path.stat().st_size <= 2 * EDGE_BYTES:
        return list(rows(path))
    with path.open("rb") as file:
        lines = file.read(EDGE_BYTES).splitlines()[:-1]
        file.seek(-EDGE_BYTES, 2)
        lines += file.read().splitlines()[1:-1]
    return [json.loads(line) for line in lines]


def _recorded(folder: Path) -> tuple[list[Row], list[str]]:
    from swift.observability.rollout_record import read_rollouts, read_step, recorded_steps

    steps = recorded_steps(folder)
    if not steps:
        return [], []
    chosen = sorted({steps[round(at * (len(steps) - 1) / max(1, RECORDED_STEPS - 1))] for at in range(RECORDED_STEPS)})
    prompts = [str(read_step(folder, step)[1].get("prompt", "")) for step in chosen]
    return list(read_rollouts(folder, chosen)), [text for text in prompts if text]


def _adapters(folder: Path) -> tuple[list[float], list[float]]:
    """The largest absolute value of each LoRA B in the newest checkpoint, and in an older one."""
    numbers = [path.name.partition("-")[2] for path in folder.glob("checkpoint-*")]
    steps = sorted(int(number) for number in numbers if number.isdigit())
    newest, *_, oldest = [*reversed(steps), 0, 0][: max(2, len(steps))]
    return _largest_of_b(folder, newest), _largest_of_b(folder, oldest)


def _largest_of_b(folder: Path, step: int) -> list[float]:
    file = folder / f"checkpoint-{step}" / "adapter_model.safetensors"
    if not file.is_file():
        return []
    from safetensors import safe_open

    with safe_open(str(file), "pt") as weights:
        return [
            float(weights.get_tensor(name).float().abs().max()) for name in sorted(weights.keys()) if "lora_B" in name
        ]
