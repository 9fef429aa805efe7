"""`swift reward-test`: what reward functions pay for, without a model.

Every row is scored with its ground truth in three forms and with texts that deserve nothing; completions of
an old run can be scored again. The report shows per function what right and wrong answers earn, how long
calls take, and the rows where something is suspicious.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from swift.errors import ConfigError, suggest
from swift.rewards.adversarial import adversarial_texts
from swift.rewards.payload import Outcome
from swift.rewards.pipeline import RewardPipeline
from swift.rewards.selfcheck import truth_forms, truth_of
from swift.types import Completion, Prompt, RolloutGroup, TrainerProgress

if TYPE_CHECKING:
    from swift.arguments import Resolved

_SHOWN_SUSPICIOUS = 20
_TOLERANCE = 1e-9


@dataclass(frozen=True)
class Sample:
    """One text to score: `kind` is "truth", "adversarial" or "given"; `form` says which of its kind."""

    row: int
    kind: str
    form: str
    text: str


@dataclass
class FunctionReport:
    """What one function did; None where nothing was measured. Latencies are seconds per call."""

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
    """The whole result: one report per function, what to know about it, and the verdict."""

    functions: list[FunctionReport]
    notes: list[str]
    problems: list[str]

    @property
    def exit_code(self) -> int:
        """0, or 5 when a function broke its contract, crashed, timed out or missed `--min_gold`."""
        return 5 if self.problems else 0


def run(resolved: Resolved) -> int:
    """Runs the mode with resolved arguments, prints the report and returns the exit code.

    Raises:
        ConfigError: wrong flags, data sets or completion files.
    """
    args: Any = resolved.args
    rows = load_prompts(args)
    report = examine(args, rows, read_completions(args.completions, rows) if args.completions else [])
    text = json.dumps(to_json(report), indent=2) if args.json else "\n".join(to_text(report))
    sys.stdout.write(text + "\n")
    return report.exit_code


def load_prompts(args: Any) -> list[Prompt]:
    """The first `rows` rows of the data set, as prompts without tokens; [] without a data set.

    Raises:
        ConfigError: as `swift.data.loading.load_rows`; a `gold_column` that the rows lack.
    """
    from swift.data.loading import load_rows

    if not args.dataset:
        return []
    rows = load_rows(args, "train", purpose="prompt")
    prompts = [Prompt(one.digest, list(one.messages), [], dict(one.columns)) for one in rows.examples[: args.rows]]
    seen = sorted({name for prompt in prompts for name in prompt.columns})
    if args.gold_column not in (None, "solution", *seen):
        raise ConfigError(f"--gold_column: {args.gold_column}: no such column; {suggest(args.gold_column, seen)}")
    return prompts


def read_completions(given: str, rows: Sequence[Prompt]) -> list[tuple[Prompt, str]]:
    """Completions of an old run (`--completions`), each with its row: by prompt_id, else by its own columns.

    Raises:
        ConfigError: a missing file, or a line that is no object with a `completion`.
    """
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
    """Scores true, adversarial and given texts of `rows` with the functions of `args`.

    Raises:
        ConfigError: functions, plugins or columns that do not fit.
    """
    truths = [truth_of(prompt, args.gold_column) for prompt in rows]
    prompts = [*rows, *(prompt for prompt, _ in given)]
    samples = row_samples(rows, truths)
    samples += [Sample(len(rows) + index, "given", "given", text) for index, (_, text) in enumerate(given)]
    tokenize = _tokenizer(args.tokenizer)
    pipeline = RewardPipeline(
        args, seed=args.seed, max_completion_length=args.max_completion_length, tokenizer_path=args.tokenizer
    )
    with pipeline:
        pipeline.check_columns(prompts)
        groups = [_group(prompts[one.row], one.text, index, tokenize) for index, one in enumerate(samples)]
        results = pipeline.probe_each(groups, TrainerProgress(global_step=0, max_steps=0, epoch=0.0))
    reports = [summarise(name, samples, outcomes, prompts, truths) for name, outcomes in results.items()]
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
            samples += [Sample(index, "truth", form, text) for form, text in truth_forms(truth).items()]
        other = next((item for item in truths if item and item != truth), None)
        texts = adversarial_texts(_question(prompt), truth, other)
        samples += [Sample(index, "adversarial", form, text) for form, text in texts.items()]
    return samples


def _question(prompt: Prompt) -> str:
    said = [message["content"] for message in prompt.messages if message.get("role") == "user"]
    return str(said[-1]) if said else ""


def _tokenizer(folder: str | None) -> Callable[[str], list[int]]:
    if folder is None:
        return lambda text: [0] * len(text.split())
    from swift.models.source import find_folder
    from swift.models.tokenizer import read_tokenizer

    tokenizer = read_tokenizer(find_folder(folder, flag="--tokenizer", require_weights=False))
    return lambda text: list(tokenizer(text, add_special_tokens=False)["input_ids"])


def _group(prompt: Prompt, text: str, index: int, tokenize: Callable[[str], list[int]]) -> RolloutGroup:
    ids = tokenize(text)
    completion = Completion(f"reward-test-{index}", ids, [0.0] * len(ids), "stop", text)
    return RolloutGroup(f"reward-test-{index}", index, 0, prompt, [completion])


def summarise(
    name: str,
    samples: Sequence[Sample],
    results: Sequence[Outcome],
    prompts: Sequence[Prompt],
    truths: Sequence[str],
) -> FunctionReport:
    """The report of one function from its results, one per sample."""
    pairs = list(zip(samples, results, strict=True))
    best_truth, best_bad = _best_per_row(pairs, "truth"), _best_per_row(pairs, "adversarial")
    seconds = sorted(result.seconds for _, result in pairs)
    given = [result.value for sample, result in pairs if sample.kind == "given" and result.value is not None]
    failed = (
        f"{result.kind}: {result.detail}: prompt_id {prompts[sample.row].prompt_id}, {sample.kind} text ({sample.form})"
        for sample, result in pairs
        if result.kind != "ok"
    )
    return FunctionReport(
        name,
        rows=len({sample.row for sample in samples}),
        gold_mean=_mean(best_truth.values()),
        gold_max=max(best_truth.values(), default=None),
        adversarial_max=max(best_bad.values(), default=None),
        given_mean=_mean(given),
        none=sum(result.kind == "ok" and result.value is None for _, result in pairs),
        failures=sum(result.kind not in ("ok", "timeout") for _, result in pairs),
        timeouts=sum(result.kind == "timeout" for _, result in pairs),
        latency_p50_s=_quantile(seconds, 0.5),
        latency_p99_s=_quantile(seconds, 0.99),
        gold_share=_truth_share(pairs, best_truth, truths),
        first_failure=next(failed, None),
        suspicious=_suspicious(pairs, best_truth, best_bad, prompts),
    )


def _best_per_row(pairs: Iterable[tuple[Sample, Outcome]], kind: str) -> dict[int, float]:
    best: dict[int, float] = {}
    for sample, result in pairs:
        if sample.kind == kind and result.value is not None:
            best[sample.row] = max(best.get(sample.row, -math.inf), result.value)
    return best


def _truth_share(
    pairs: Sequence[tuple[Sample, Outcome]], best_truth: dict[int, float], truths: Sequence[str]
) -> float | None:
    """Share of the rows with a ground truth whose best form of it earns the most the function ever gave."""
    with_truth = sum(1 for truth in truths if truth)
    values = [result.value for _, result in pairs if result.value is not None]
    if not with_truth or not values:
        return None
    return sum(value >= max(values) - _TOLERANCE for value in best_truth.values()) / with_truth


def _suspicious(
    pairs: Sequence[tuple[Sample, Outcome]],
    best_truth: dict[int, float],
    best_bad: dict[int, float],
    prompts: Sequence[Prompt],
) -> list[str]:
    values = {result.value for _, result in pairs if result.kind == "ok"}
    lines = []
    if len(values) == 1 and len(pairs) > 1:
        lines.append(f"constant output: {next(iter(values))} for every text")
    for row, earned in sorted(best_truth.items()):
        bad = best_bad.get(row, -math.inf)
        if earned < bad:
            form = next(s.form for s, r in pairs if (s.row, s.kind) == (row, "adversarial") and r.value == bad)
            lines.append(
                f"row {row} (prompt_id {prompts[row].prompt_id}): the ground truth earns {earned:g}, less than "
                f"{bad:g} for an adversarial text ({form})"
            )
    unparsed = {s.row: next(iter(r.counters)) for s, r in pairs if s.kind != "given" and r.counters}
    lines += [
        f"row {row} (prompt_id {prompts[row].prompt_id}): {counter.replace('gold_', 'ground truth ')}"
        for row, counter in sorted(unparsed.items())
    ]
    return lines


def _mean(values: Iterable[float]) -> float | None:
    numbers = list(values)
    return statistics.fmean(numbers) if numbers else None


def _quantile(ordered: Sequence[float], share: float) -> float | None:
    """The smallest entry that at least `share` of the ascending entries do not exceed; None without any."""
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)] if ordered else None


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


def to_json(report: Report) -> dict[str, Any]:
    """The report as plain values."""
    return asdict(report) | {"exit_code": report.exit_code}


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
