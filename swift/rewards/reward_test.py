"""`swift reward-test`: checks reward functions without a model.

Every row is scored with its ground truth in three forms and with texts that should have no reward; completions of an
earlier run can be scored again. The report shows the rewards of right and wrong answers per function, the latency of
calls, and suspicious rows.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from swift.errors import ConfigError, printable, suggest
from swift.rewards.payload import Outcome
from swift.rewards.pipeline import RewardPipeline
from swift.rewards.selfcheck import adversarial_texts, made_up_group, truth_forms, truth_of
from swift.types import Prompt, TrainerProgress

if TYPE_CHECKING:
    from swift.arguments import Resolved

_SHOWN_SUSPICIOUS = 20
_TOLERANCE = 1e-9


@dataclass(frozen=True)
class Sample:
    """One text to score: `kind` is "truth", "adversarial" or "given"; `form` is its form among those of the kind."""

    row: int
    prompt: Prompt
    kind: str
    form: str
    text: str

    @property
    def where(self) -> str:
        """The row in messages."""
        return f"row {self.row} (prompt_id {self.prompt.prompt_id})"


Scored = Sequence[tuple[Sample, Outcome]]


@dataclass
class FunctionReport:
    """Measurements of one function; None if nothing was measured. Latencies are seconds per call."""

    name: str
    rows: int
    gold_mean: float | None
    gold_max: float | None
    adversarial_max: float | None
    given_mean: float | None
    none: int
    failures: int
    timeouts: int
    latency_p50_s: float | None
    latency_p99_s: float | None
    gold_share: float | None
    first_failure: str | None
    suspicious: list[str]


@dataclass
class Report:
    """The whole result: one report per function, notes, and problems."""

    functions: list[FunctionReport]
    notes: list[str]
    problems: list[str]

    @property
    def exit_code(self) -> int:
        """0, or 5 when a function broke its contract, crashed, timed out or missed `--min_gold`."""
        return 5 if self.problems else 0


def run(resolved: Resolved) -> int:
    """Runs the mode: prints the report and returns the exit code."""
    args: Any = resolved.args
    rows = load_prompts(args)
    report = examine(args, rows, read_completions(args.completions, rows) if args.completions else [])
    as_json = asdict(report) | {"exit_code": report.exit_code}
    text = json.dumps(as_json, indent=2) if args.json else "\n".join(map(printable, to_text(report)))
    sys.stdout.write(text + "\n")
    return report.exit_code


def load_prompts(args: Any) -> list[Prompt]:
    """The first `rows` rows of the data set, as prompts without tokens; [] without a data set."""
    from swift.data.loading import load_rows

    if not args.dataset:
        return []
    rows = load_rows(args, "train", purpose="prompt")
    prompts = [
        Prompt(row.digest, list(row.messages), [], dict(row.columns), row.is_chat) for row in rows.examples[: args.rows]
    ]
    seen = sorted({name for prompt in prompts for name in prompt.columns})
    if args.gold_column not in (None, "solution", *seen):
        raise ConfigError(f"--gold_column: {args.gold_column}: no such column; {suggest(args.gold_column, seen)}")
    return prompts


def read_completions(given: str, rows: Sequence[Prompt]) -> list[tuple[Prompt, str]]:
    """Completions of an earlier run (`--completions`), each with its row: by prompt_id, else by its own columns."""
    if not Path(given).is_file():
        raise ConfigError(f"--completions: {given}: no such file; give the completions.jsonl of a run")
    by_id = {prompt.prompt_id: prompt for prompt in rows}
    lines = enumerate(Path(given).read_text(encoding="utf-8").splitlines(), start=1)
    return [_read_completion(line, f"{given}:{number}", by_id) for number, line in lines if line.strip()]


def _read_completion(line: str, where: str, by_id: Mapping[str, Prompt]) -> tuple[Prompt, str]:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"--completions: {where}: not valid JSON: {error}") from error
    if not isinstance(record, dict) or not isinstance(record.get("completion"), str):
        raise ConfigError(f"--completions: {where}: no text under 'completion'")
    prompt_id = str(record.get("prompt_id", where))
    messages = [{"role": "user", "content": str(record.get("prompt", ""))}]
    own = Prompt(prompt_id, messages, [], dict(record.get("columns") or {}))
    return by_id.get(prompt_id, own), record["completion"]


def examine(args: Any, rows: Sequence[Prompt], given: Sequence[tuple[Prompt, str]] = ()) -> Report:
    """Scores true, adversarial and given texts of `rows` with the functions of `args`."""
    samples = row_samples(rows, [truth_of(prompt, args.gold_column) for prompt in rows])
    samples += [
        Sample(row, prompt, "given", "given", text) for row, (prompt, text) in enumerate(given, start=len(rows))
    ]
    tokenize = _tokenizer(args.tokenizer)
    groups = [made_up_group(item.prompt, [item.text], f"reward-test-{i}", tokenize) for i, item in enumerate(samples)]
    pipeline = RewardPipeline(
        args, seed=args.seed, max_completion_length=args.max_completion_length, tokenizer_path=args.tokenizer
    )
    with pipeline:
        pipeline.check_columns([*rows, *(prompt for prompt, _ in given)])
        results = pipeline.probe_each(groups, TrainerProgress(global_step=0, max_steps=0, epoch=0.0))
    reports = [summarise(name, list(zip(samples, found, strict=True))) for name, found in results.items()]
    notes = ["lengths are whitespace-separated words; give --tokenizer DIR to count tokens"]
    if args.tokenizer:
        notes = [f"lengths are tokens of {args.tokenizer}"]
    if args.reward_model:
        notes.append("reward models are not tested here: this mode loads no model")
    return Report(reports, notes, [line for report in reports for line in _problems(report, args.min_gold)])


def row_samples(rows: Sequence[Prompt], truths: Sequence[str]) -> list[Sample]:
    """The true and adversarial texts of every row; a row without a ground truth has only the latter."""
    samples = []
    for index, (prompt, truth) in enumerate(zip(rows, truths, strict=True)):
        if truth:
            samples += [Sample(index, prompt, "truth", form, text) for form, text in truth_forms(truth).items()]
        other = next((item for item in truths if item and item != truth), None)
        questions = [message["content"] for message in prompt.messages if message.get("role") == "user"]
        texts = adversarial_texts(str(questions[-1]) if questions else "", truth, other)
        samples += [Sample(index, prompt, "adversarial", form, text) for form, text in texts.items()]
    return samples


def _tokenizer(folder: str | None) -> Callable[[str], Sequence[Any]]:
    if folder is None:
        return str.split
    from swift.models.source import find_folder
    from swift.models.tokenizer import read_tokenizer

    tokenizer = read_tokenizer(find_folder(folder, flag="--tokenizer", require_weights=False))
    return lambda text: list(tokenizer(text, add_special_tokens=False)["input_ids"])


def summarise(name: str, scored: Scored) -> FunctionReport:
    """The report of one function from its results."""
    truth, bad = _best_per_row(scored, "truth"), _best_per_row(scored, "adversarial")
    values = [result.value for _, result in scored if result.value is not None]
    given = [result.value for sample, result in scored if sample.kind == "given" and result.value is not None]
    seconds = sorted(result.seconds for _, result in scored)
    failed = [
        f"{result.kind}: {result.detail}: prompt_id {sample.prompt.prompt_id}, {sample.kind} text ({sample.form})"
        for sample, result in scored
        if result.kind != "ok"
    ]
    rows_with_truth = len({sample.row for sample, _ in scored if sample.kind == "truth"})
    share = None
    if rows_with_truth and values:  # a row whose best form of the ground truth earns the most there is
        share = sum(value >= max(values) - _TOLERANCE for value in truth.values()) / rows_with_truth
    timeouts = sum(result.kind == "timeout" for _, result in scored)
    return FunctionReport(
        name,
        rows=len({sample.row for sample, _ in scored}),
        gold_mean=statistics.fmean(truth.values()) if truth else None,
        gold_max=max(truth.values(), default=None),
        adversarial_max=max(bad.values(), default=None),
        given_mean=statistics.fmean(given) if given else None,
        none=sum(result.kind == "ok" and result.value is None for _, result in scored),
        failures=len(failed) - timeouts,
        timeouts=timeouts,
        latency_p50_s=_quantile(seconds, 0.5),
        latency_p99_s=_quantile(seconds, 0.99),
        gold_share=share,
        first_failure=failed[0] if failed else None,
        suspicious=_suspicious(scored, truth, bad),
    )


def _best_per_row(scored: Scored, kind: str) -> dict[int, float]:
    best: dict[int, float] = {}
    for sample, result in scored:
        if sample.kind == kind and result.value is not None:
            best[sample.row] = max(best.get(sample.row, -math.inf), result.value)
    return best


def _quantile(ordered: Sequence[float], share: float) -> float | None:
    """The smallest entry that at least `share` of the ascending entries do not exceed; None without any."""
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)] if ordered else None


def _suspicious(scored: Scored, truth: Mapping[int, float], bad: Mapping[int, float]) -> list[str]:
    values = {result.value for _, result in scored if result.kind == "ok"}
    lines = []
    if len(values) == 1 and len(scored) > 1:
        lines.append(f"constant output: {next(iter(values))} for every text")
    reported: set[int] = set()
    for sample, result in scored:  # the first adversarial text that earns the most of its row
        if sample.row in reported or sample.kind != "adversarial" or result.value != bad.get(sample.row):
            continue
        if result.value is not None and truth.get(sample.row, math.inf) < result.value:
            reported.add(sample.row)
            lines.append(
                f"{sample.where}: the ground truth earns {truth[sample.row]:g}, less than {result.value:g} for an "
                f"adversarial text ({sample.form})"
            )
    unparsed = {s.where: next(iter(r.counters)) for s, r in scored if s.kind != "given" and r.counters}
    return lines + [f"{where}: {counter.replace('gold_', 'ground truth ')}" for where, counter in unparsed.items()]


def _problems(report: FunctionReport, min_gold: float) -> list[str]:
    problems = []
    if report.failures or report.timeouts:
        problems.append(
            f"{report.name}: {report.failures} failures, {report.timeouts} time-outs; {report.first_failure}"
        )
    if min_gold > 0 and (report.gold_share or 0.0) < min_gold:
        problems.append(
            f"{report.name}: {report.gold_share or 0.0:.2f} of the rows reach the maximum with their ground "
            f"truth; --min_gold asks for {min_gold:g}"
        )
    return problems


_COLUMNS = (
    ("function", "name"),
    ("rows", "rows"),
    ("truth mean", "gold_mean"),
    ("truth max", "gold_max"),
    ("adversarial max", "adversarial_max"),
    ("given mean", "given_mean"),
    ("None", "none"),
    ("failures", "failures"),
    ("time-outs", "timeouts"),
    ("p50 ms", "latency_p50_s"),
    ("p99 ms", "latency_p99_s"),
)


def to_text(report: Report) -> list[str]:
    """The report as lines: a table, then notes, suspicious rows and problems."""
    table = [[title for title, _ in _COLUMNS]]
    table += [[_cell(getattr(item, key), key) for _, key in _COLUMNS] for item in report.functions]
    widths = [max(len(row[column]) for row in table) for column in range(len(_COLUMNS))]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in table]
    lines += [f"note: {note}" for note in report.notes]
    for item in report.functions:
        lines += [f"suspicious: {item.name}: {line}" for line in item.suspicious[:_SHOWN_SUSPICIOUS]]
        hidden = len(item.suspicious) - _SHOWN_SUSPICIOUS
        if hidden > 0:
            lines.append(f"suspicious: {item.name}: {hidden} more; --json true shows all")
    return lines + [f"problem: {problem}" for problem in report.problems]


def _cell(value: Any, key: str) -> str:
    if value is None:
        return "-"
    if key.endswith("_s"):
        return f"{value * 1000:.1f}"
    return f"{value:.3f}" if isinstance(value, float) else str(value)
