"""`swift reward-test`: what reward functions pay for, without a model.

Every row is scored with its ground truth in three forms and with texts that deserve nothing; completions of
an old run can be scored again. The report shows per function what right and wrong answers earn, how long
calls take, and the rows where something is suspicious.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from swift.errors import ConfigError, nearest
from swift.rewards.adversarial import adversarial_texts
from swift.rewards.pipeline import RewardPipeline
from swift.rewards.selfcheck import truth_forms, truth_of
from swift.rewards.worker import Outcome
from swift.types import Completion, Prompt, RolloutGroup, TrainerProgress

if TYPE_CHECKING:
    from swift.arguments import Resolved

DEFAULT_ROWS = 20
_DEFAULT_MAX_COMPLETION_LENGTH = 512
_SHOWN_SUSPICIOUS = 20
_TOLERANCE = 1e-9

Length = Callable[[str], list[int]]


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
    rows: int = 0
    gold_mean: float | None = None
    gold_max: float | None = None
    adversarial_max: float | None = None
    given_mean: float | None = None
    none: int = 0
    failures: int = 0
    timeouts: int = 0
    latency_p50_s: float | None = None
    latency_p99_s: float | None = None
    gold_share: float | None = None
    first_failure: str | None = None
    suspicious: list[str] = field(default_factory=list)


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
    args = resolved.args
    rows = load_prompts(args)
    report = examine(args, rows, read_completions(args, rows))
    text = json.dumps(to_json(report), indent=2) if getattr(args, "json", False) else "\n".join(to_text(report))
    sys.stdout.write(text + "\n")
    return report.exit_code


def load_prompts(args: Any) -> list[Prompt]:
    """The first `rows` rows of the data set, as prompts without tokens.

    Raises:
        ConfigError: as `swift.data.load_rows`; a `gold_column` that the rows lack.
    """
    from swift.data import load_rows

    rows = load_rows(args, "train", purpose="prompt")
    prompts = [
        Prompt(example.digest, list(example.messages), [], dict(example.columns))
        for example in rows.examples[: int(getattr(args, "rows", None) or DEFAULT_ROWS)]
    ]
    column = getattr(args, "gold_column", None)
    if column and column != "solution" and not any(column in prompt.columns for prompt in prompts):
        seen = sorted({name for prompt in prompts for name in prompt.columns})
        near = nearest(column, seen)
        raise ConfigError(
            f"--gold_column: {column}: no such column; "
            + (f"nearest: {', '.join(near)}" if near else f"columns seen: {', '.join(seen) or 'none'}")
        )
    return prompts


def read_completions(args: Any, rows: Sequence[Prompt]) -> list[tuple[Prompt, str]]:
    """Completions of an old run (`--completions`), each with its row: by prompt_id, else by its own columns.

    Raises:
        ConfigError: a missing file, or a line that is no object with a `completion`.
    """
    given = getattr(args, "completions", None)
    if not given:
        return []
    path = Path(given)
    if not path.is_file():
        raise ConfigError(f"--completions: {given}: no such file; give the completions.jsonl of a run")
    by_id = {prompt.prompt_id: prompt for prompt in rows}
    found = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if line.strip():
            found.append(_read_completion(line, f"{given}:{number}", by_id))
    return found


def _read_completion(line: str, where: str, by_id: dict[str, Prompt]) -> tuple[Prompt, str]:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"--completions: {where}: not valid JSON: {error}") from error
    if not isinstance(record, dict) or not isinstance(record.get("completion"), str):
        raise ConfigError(f"--completions: {where}: no text under 'completion'")
    prompt_id = str(record.get("prompt_id", where))
    if prompt_id in by_id:
        return by_id[prompt_id], record["completion"]
    messages = [{"role": "user", "content": str(record.get("prompt", ""))}]
    return Prompt(prompt_id, messages, [], dict(record.get("columns") or {})), record["completion"]


def examine(args: Any, rows: Sequence[Prompt], given: Sequence[tuple[Prompt, str]] = ()) -> Report:
    """Scores true, adversarial and given texts of `rows` with the functions of `args`.

    Raises:
        ConfigError: functions, plugins or columns that do not fit.
    """
    column = getattr(args, "gold_column", None)
    truths = [truth_of(prompt, column) for prompt in rows]
    prompts = [*rows, *(prompt for prompt, _ in given)]
    samples = row_samples(rows, truths)
    samples += [Sample(len(rows) + index, "given", "given", text) for index, (_, text) in enumerate(given)]
    tokenize, notes = _tokenizer(getattr(args, "tokenizer", None))
    pipeline = RewardPipeline(
        args,
        seed=int(getattr(args, "seed", None) or 42),
        max_completion_length=int(getattr(args, "max_completion_length", None) or _DEFAULT_MAX_COMPLETION_LENGTH),
        tokenizer_path=getattr(args, "tokenizer", None),
    )
    with pipeline:
        pipeline.check_columns(prompts)
        groups = [_group(prompts, sample, index, tokenize) for index, sample in enumerate(samples)]
        progress = TrainerProgress(global_step=0, max_steps=0, epoch=0.0)
        results = pipeline.probe_each(groups, progress)
    reports = [
        summarise(name, samples, outcomes, prompts, truths)
        for name, outcomes in zip(pipeline.names, results, strict=False)
    ]
    if getattr(args, "reward_model", None):
        notes = [*notes, "reward models are not tested here: this mode loads no model"]
    problems = [line for report in reports for line in _problems(report, float(getattr(args, "min_gold", 0.0)))]
    return Report(reports, notes, problems)


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


def _tokenizer(folder: str | None) -> tuple[Length, list[str]]:
    if folder is None:
        return lambda text: [0] * len(text.split()), [
            "lengths are whitespace-separated words; give --tokenizer DIR to count tokens"
        ]
    from swift.models.source import find_folder
    from swift.models.tokenizer import read_tokenizer

    tokenizer = read_tokenizer(find_folder(folder, flag="--tokenizer", require_weights=False))
    return lambda text: list(tokenizer(text, add_special_tokens=False)["input_ids"]), [
        f"lengths are tokens of {folder}"
    ]


def _group(prompts: Sequence[Prompt], sample: Sample, index: int, tokenize: Length) -> RolloutGroup:
    ids = tokenize(sample.text)
    completion = Completion(f"reward-test-{index}", ids, [0.0] * len(ids), "stop", sample.text)
    return RolloutGroup(f"reward-test-{index}", index, 0, prompts[sample.row], [completion])


def summarise(
    name: str,
    samples: Sequence[Sample],
    results: Sequence[Outcome],
    prompts: Sequence[Prompt],
    truths: Sequence[str],
) -> FunctionReport:
    """The report of one function from its results, one per sample."""
    pairs = list(zip(samples, results, strict=True))
    report = FunctionReport(name, rows=len({sample.row for sample in samples}))
    report.none = sum(result.kind == "ok" and result.value is None for _, result in pairs)
    report.failures = sum(result.kind not in ("ok", "timeout") for _, result in pairs)
    report.timeouts = sum(result.kind == "timeout" for _, result in pairs)
    report.first_failure = next(
        (_failure_line(sample, result, prompts) for sample, result in pairs if result.kind != "ok"), None
    )
    seconds = sorted(result.seconds for _, result in pairs)
    report.latency_p50_s, report.latency_p99_s = quantile(seconds, 0.5), quantile(seconds, 0.99)
    best_truth = _best_per_row(pairs, "truth")
    best_bad = _best_per_row(pairs, "adversarial")
    report.gold_mean = _mean(best_truth.values())
    report.gold_max = max(best_truth.values(), default=None)
    report.adversarial_max = max(best_bad.values(), default=None)
    report.given_mean = _mean(v for s, r in pairs if s.kind == "given" and (v := r.value) is not None)
    report.gold_share = _truth_share(pairs, best_truth, truths)
    report.suspicious = _suspicious(pairs, best_truth, best_bad, prompts)
    return report


def _failure_line(sample: Sample, result: Outcome, prompts: Sequence[Prompt]) -> str:
    where = f"prompt_id {prompts[sample.row].prompt_id}, {sample.kind} text ({sample.form})"
    return f"{result.kind}: {result.detail}: {where}"


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
    return math.fsum(numbers) / len(numbers) if numbers else None


def quantile(ordered: Sequence[float], share: float) -> float | None:
    """The smallest entry that at least `share` of the ascending entries do not exceed; None without any."""
    if not ordered:
        return None
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


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
    return {
        "functions": [asdict(item) for item in report.functions],
        "notes": report.notes,
        "problems": report.problems,
        "exit_code": report.exit_code,
    }


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
