"""The books of a run that was ended and resumed many times: is each launched group trained once, or left out for a
reason? Read from the files of the run's folder, of each step the highest attempt.

A group is `<prompt>-<launch>`: the n-th launch of a prompt belongs to epoch n. So a lost group is a gap in the numbers
of its prompt, or a prompt that is behind the others; a doubled one has two steps, or more completions than its size.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from swift.observability.jsonl import read_jsonl, read_log
from swift.observability.rollout_record import read_rollouts
from swift.trainers.checkpoint import list_checkpoints

Row = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What the run was told.

    prompts: rows of its data set, a multiple of `groups`, which are those of a step. completions: of a group. dynamic:
    whether groups of equal rewards are replaced (`--dynamic_sample`). wait_s: bound on a step and on each of its waits.
    """

    prompts: int
    groups: int
    completions: int
    dynamic: bool = False
    wait_s: float = math.inf


@dataclass
class Books:
    """problems: none if the books balance; totals: what was counted."""

    problems: list[str] = field(default_factory=list)
    totals: Counter[str] = field(default_factory=Counter)


def audit(folder: Path, plan: Plan) -> Books:
    """The books of a run that has ended with a checkpoint of its last step."""
    log = read_log(folder / "logging.jsonl")
    rows = [row for row in read_log(folder / "completions.jsonl") if row["split"] == "train"]
    books = Books()
    books.totals.update(attempts=len(list(read_jsonl(folder / "attempts.jsonl"))), steps=len(log))
    for check in (_groups, _epochs, _reasons, _record, _state, _steps):
        books.problems += check(folder, plan, log, rows, books.totals)
    books.totals = +books.totals  # without zeros
    return books


Totals = Counter[str]


def by_group(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """The completions of each group."""
    found = defaultdict(list)
    for row in rows:
        found[row["group_id"]].append(row)
    return found


def _groups(folder: Path, plan: Plan, log: list[Row], rows: list[Row], totals: Totals) -> Iterator[str]:
    """Each group is whole, and of one step."""
    groups = by_group(rows)
    totals.update(groups=len(groups), completions=len(rows))
    for name, members in groups.items():
        steps = sorted({row["step"] for row in members})
        if len(steps) > 1:
            yield f"group {name}: twice, in the steps {', '.join(map(str, steps))}"
        elif sorted(row["index"] for row in members) != list(range(plan.completions)):
            indices = sorted(row["index"] for row in members)
            yield f"group {name}: step {steps[0]} has its completions {indices}, not {plan.completions}"


def _epochs(folder: Path, plan: Plan, log: list[Row], rows: list[Row], totals: Totals) -> Iterator[str]:
    """The launches of a prompt have no gap, and no prompt is launched again before all others were."""
    launches: dict[str, set[int]] = defaultdict(set)
    for name in by_group(rows):
        prompt, _, launch = name.rpartition("-")
        launches[prompt].add(int(launch))
    latest = max((max(found) for found in launches.values()), default=0)
    totals["epochs"] = latest + 1
    if latest and len(launches) < plan.prompts:
        yield f"prompts: {plan.prompts - len(launches)} were never trained on, in {latest + 1} epochs"
    open_epochs = (latest, latest - 1) if plan.dynamic else (latest,)  # groups may wait for a later step
    for prompt, found in launches.items():
        missing = set(range(latest + 1)) - found - set(open_epochs)
        yield from (
            f"group {prompt}-{launch}: lost, although launches of epoch {latest} are there" for launch in missing
        )
    if plan.dynamic:
        return
    per_epoch = plan.prompts // plan.groups
    for epoch, steps in itertools.groupby(sorted({row["step"] for row in rows}), lambda step: (step - 1) // per_epoch):
        within = set(steps)
        prompts = Counter(name.rpartition("-")[0] for name in by_group([r for r in rows if r["step"] in within]))
        yield from (f"prompt {one}: {times} times in epoch {epoch}" for one, times in prompts.items() if times > 1)


def _reasons(folder: Path, plan: Plan, log: list[Row], rows: list[Row], totals: Totals) -> Iterator[str]:
    """What was not trained on has a reason; what was has a finite reward."""
    for name, members in by_group(rows).items():
        equal = len({row["reward"] for row in members if row["excluded"] is None}) <= 1
        for row in members:
            where = f"group {name}: completion {row['index']} of step {row['step']}"
            if row["excluded"] is not None:
                totals[f"excluded: {row['excluded']}"] += 1
            elif row["used"]:
                totals["trained"] += 1
                if row["reward"] is None:
                    yield f"{where}: trained on without a reward"
            elif plan.dynamic and equal:
                totals["dropped: equal rewards"] += 1
            else:
                yield f"{where}: left out without a reason"


def _record(folder: Path, plan: Plan, log: list[Row], rows: list[Row], totals: Totals) -> Iterator[str]:
    """The record of rollouts has, of each step, the completions of its groups that were not dropped, once."""
    recorded: dict[int, Counter[tuple[str, int]]] = defaultdict(Counter)
    for row in read_rollouts(folder):
        recorded[row["step"]][row["group_id"], row["index"]] += 1
        if row["excluded"] is None and not all(map(math.isfinite, row["sampler_logprobs"])):
            yield f"record: step {row['step']}: {row['group_id']}: log-probs of the engine that are not finite"
    wanted: dict[int, Counter[tuple[str, int]]] = defaultdict(Counter)
    for members in by_group(rows).values():
        dropped = plan.dynamic and not any(row["used"] for row in members)
        for row in () if dropped else members:
            wanted[row["step"]][row["group_id"], row["index"]] += 1
    for step in sorted(wanted | recorded):
        kept = (
            recorded[step] if not plan.dynamic else recorded[step] & wanted[step]
        )  # filler groups are of dropped ones
        if kept != wanted[step]:
            differing = sorted({name for name, _ in (kept - wanted[step]) + (wanted[step] - kept)})
            yield f"record: step {step} differs from completions.jsonl in {', '.join(differing)}"


def _state(folder: Path, plan: Plan, log: list[Row], rows: list[Row], totals: Totals) -> Iterator[str]:
    """The scheduler of the last checkpoint has counted what the files show."""
    checkpoint = list_checkpoints(folder)[-1]
    state = msgspec.msgpack.decode((checkpoint / "pipeline_state.msgpack").read_bytes())[1]["pipeline"]["scheduler"]
    ended = state["trained"] + state["excluded"] + state["dropped"]
    if ended != totals["groups"]:
        yield f"{checkpoint.name}: its scheduler has ended {ended} groups, completions.jsonl has {totals['groups']}"
    totals["launched, not ended"] = state["launched"] - ended


def _steps(folder: Path, plan: Plan, log: list[Row], rows: list[Row], totals: Totals) -> Iterator[str]:
    """Steps are logged once each, with so many groups; no wait is over its bound; each attempt has an end."""
    steps = [row["step"] for row in log]
    if steps != list(range(1, len(steps) + 1)):
        yield f"logging.jsonl: steps {sorted(set(range(1, max(steps) + 1)) ^ set(steps))} are missing or there twice"
    sizes = Counter(members[0]["step"] for members in by_group(rows).values())
    for row in log:
        size = sizes[row["step"]]
        if size < plan.groups or (size > plan.groups and not plan.dynamic):
            yield f"step {row['step']}: {size} groups instead of {plan.groups}"
        for name in ("step_time", "time/wait_rollout", "time/wait_train"):
            if (row.get(name) or 0) > plan.wait_s:
                yield f"step {row['step']}: {name} {row[name]:.0f} s, over {plan.wait_s:.0f} s"
        totals["updates skipped: not finite"] += int(row.get("health/nan_skips") or 0)
    for row in read_jsonl(folder / "attempts.jsonl"):
        if not row["reason"]:
            yield f"attempts.jsonl: attempt {row['attempt']} has no reason of its end"


def slope_per_hour(samples: Sequence[tuple[float, float]]) -> float:
    """Growth by least squares, as a share of the mean value, per hour. samples: seconds and values."""
    mean_t = sum(t for t, _ in samples) / len(samples)
    mean = sum(value for _, value in samples) / len(samples)
    spread = sum((t - mean_t) ** 2 for t, _ in samples)
    return 3600 * sum((t - mean_t) * (value - mean) for t, value in samples) / spread / mean
