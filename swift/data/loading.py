"""All rows of `--dataset` or `--val_dataset`: read, understood, sampled, split.

A bad row never decides anything: it is skipped and counted, or with `--strict true` it stops the run before a
model is loaded. A file that does not parse is never skipped over. What comes out depends on the files, the
arguments and `data_seed` only, so every process of a run loads the same rows in the same order.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, overload

from swift.data.columns import ColumnPlan, Purpose, check_renames, plan_columns
from swift.data.files import read_local
from swift.data.hub import load_hub
from swift.data.interleave import interleave
from swift.data.messages import Message
from swift.data.procedural import read_procedural
from swift.data.records import BadRow, Record, RowError, Table, table_of
from swift.data.report import SHOWN, DataReport
from swift.data.sampler import generator
from swift.data.spec import DatasetSpec, parse_specs
from swift.data.system import resolve_system
from swift.errors import ConfigError

if TYPE_CHECKING:
    from swift.data.arguments import DataArguments

Split = Literal["train", "val"]

_MIX_COUNTER = 2**32 - 2
_SPLIT_COUNTER = 2**32 - 1  # keeps the split's random numbers apart from those of any dataset's sampling


@dataclass(slots=True, frozen=True)
class Example:
    """A row that was understood: the chat, every other column, and `file:line`."""

    messages: list[Message]
    columns: dict[str, Any]
    origin: str

    @property
    def digest(self) -> str:
        """16 hex digits of messages and columns: equal rows share it, on any machine and in any order."""
        content = json.dumps([self.messages, self.columns], sort_keys=True, separators=(",", ":"))
        return hashlib.blake2b(content.encode(), digest_size=8).hexdigest()


@dataclass(slots=True)
class Rows(Sequence[dict[str, Any]]):
    """Rows as dicts: `messages` and the other columns under their own names. `report` tells what was left out."""

    examples: list[Example]
    report: DataReport = field(default_factory=DataReport)

    def __len__(self) -> int:
        return len(self.examples)

    @overload
    def __getitem__(self, index: int) -> dict[str, Any]: ...
    @overload
    def __getitem__(self, index: slice) -> list[dict[str, Any]]: ...
    def __getitem__(self, index: int | slice) -> dict[str, Any] | list[dict[str, Any]]:
        if isinstance(index, slice):
            return [as_row(example) for example in self.examples[index]]
        return as_row(self.examples[index])

    @property
    def column_names(self) -> list[str]:
        """The names of all columns other than `messages`, in order of appearance."""
        return list(dict.fromkeys(name for example in self.examples for name in example.columns))

    def write_jsonl(self, path: str | Path) -> None:
        """Writes the rows so that loading the file gives the same rows (and ids) again."""
        write_examples(self.examples, path)


def load_rows(args: DataArguments, split: Split, *, purpose: Purpose = "chat") -> Rows:
    """The rows of one split.

    Args:
        args: the data settings.
        split: "val" means `--val_dataset`, else the part that `--split_dataset_ratio` splits off; without
            either the result is empty.
        purpose: "chat" gives messages that end with the assistant's answer (supervised training); "prompt"
            gives messages to be answered, with a final assistant turn dropped and `answer` and the like left
            among the columns (reinforcement learning, reward-test, infer).

    Returns:
        at least one row, except for an empty "val".

    Raises:
        ConfigError: anything wrong with a dataset, file, column, or (strict) row.
        ResourceError: a hub does not answer or a package is missing.
    """
    if getattr(args, "streaming", False):
        raise ConfigError("--streaming: true: this mode needs all rows at once; drop --streaming")
    if split == "val" and not args.val_dataset:
        return _split_off(args, purpose, keep="val") if args.split_dataset_ratio else Rows([], DataReport("val"))
    if split == "train" and args.split_dataset_ratio and not args.val_dataset:
        return _split_off(args, purpose, keep="train")
    return _load(args, split, purpose)


def split_examples(examples: Sequence[Example], ratio: float, seed: int) -> tuple[list[Example], list[Example]]:
    """Training and evaluation rows, each in the order of `examples`.

    About `ratio` of the rows (at least one) go to evaluation; rows of equal content stay together, so that
    nothing is evaluated that was trained on.

    Raises:
        ConfigError: fewer than two different rows.
    """
    digests = [example.digest for example in examples]
    distinct = list(dict.fromkeys(digests))
    if not 0 < ratio < 1:
        raise ConfigError(f"--split_dataset_ratio: {ratio}: not a share of the rows; valid: 0 <= ratio < 1")
    if len(distinct) < 2:
        raise ConfigError(
            f"--split_dataset_ratio: {ratio}: {len(distinct)} different rows cannot be split in two; "
            "give --val_dataset or more rows"
        )
    count = min(max(1, round(ratio * len(distinct))), len(distinct) - 1)
    order = generator(seed, _SPLIT_COUNTER).permutation(len(distinct))
    chosen = {distinct[index] for index in order[:count]}
    train = [example for example, digest in zip(examples, digests, strict=True) if digest not in chosen]
    val = [example for example, digest in zip(examples, digests, strict=True) if digest in chosen]
    return train, val


def as_row(example: Example) -> dict[str, Any]:
    """`messages` and the other columns in one dict."""
    return {"messages": example.messages, **example.columns}


def write_examples(examples: Iterable[Example], path: str | Path) -> None:
    """One JSON object per line, UTF-8."""
    with Path(path).open("wb") as lines:
        for example in examples:
            lines.write(_json_line(as_row(example)) + b"\n")


def _json_line(row: dict[str, Any]) -> bytes:
    try:
        return json.dumps(row, ensure_ascii=False).encode()
    except UnicodeEncodeError:  # half of a surrogate pair, which only JSON's escapes can carry
        return json.dumps(row).encode()


def open_table(spec: DatasetSpec, split: Split, seed: int) -> Table:
    """All records of one spec.

    Raises:
        ConfigError: a file that does not parse: the first places as `file:line`.
    """
    if spec.kind == "hub":
        parts = load_hub(spec, split=split)
        columns = list(dict.fromkeys(name for part in parts for name in part.columns))
        records: Sequence[Record] = parts[0] if len(parts) == 1 else [record for part in parts for record in part]
        return Table(spec.name, records, columns, [])
    found = list(read_local(spec) if spec.kind == "local" else read_procedural(spec, seed=seed))
    damaged = [record for record in found if isinstance(record, BadRow) and record.damaged]
    if damaged:
        raise ConfigError(*first_few(damaged))
    return table_of(spec.name, found)


def first_few(bad: Sequence[BadRow]) -> list[str]:
    """The first bad rows as problems, and how many more there are."""
    more = [f"--dataset: {len(bad)} bad rows: the first {SHOWN} are listed; correct all of them"]
    return [str(row) for row in bad[:SHOWN]] + (more if len(bad) > SHOWN else [])


def data_seed(args: DataArguments) -> int:
    """`--data_seed` as a number."""
    return 42 if args.data_seed is None else int(args.data_seed)


def renames_of(args: DataArguments) -> dict[str, str]:
    """`--columns` as a checked dict.

    Raises:
        ConfigError: not a JSON object of names.
    """
    value: Any = args.columns
    if not value:
        return {}
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except json.JSONDecodeError as error:
            raise ConfigError(
                f'--columns: {value}: not JSON: {error.msg}; write --columns \'{{"answer":"solution"}}\''
            ) from error
    if not isinstance(value, Mapping) or not all(isinstance(new, str) and new for new in value.values()):
        raise ConfigError(f'--columns: {value}: must map names to names; write --columns \'{{"answer":"solution"}}\'')
    return {str(old): str(new) for old, new in value.items()}


def _load(args: DataArguments, split: Split, purpose: Purpose) -> Rows:
    flag = "--dataset" if split == "train" else "--val_dataset"
    texts = list(args.dataset if split == "train" else args.val_dataset)
    if not texts:
        raise ConfigError(f"{flag}: none: no dataset is named; give files, folders, hub ids or reasoning_gym:<task>")
    system, notes = resolve_system(args.system)
    report = DataReport(split, notes=notes)
    specs = parse_specs(texts, use_hf=args.use_hf, flag=flag)
    seed = data_seed(args)
    tables = _each(specs, lambda spec: open_table(spec, split, seed))
    renames = renames_of(args)
    _each(list(zip(specs, tables, strict=True)), lambda pair: _check_not_empty(*pair))
    check_renames(renames, _columns_seen(tables, renames, split))
    plans = _each(
        list(zip(specs, tables, strict=True)),
        lambda pair: plan_columns(pair[1].columns, renames, purpose=purpose, flag=flag, name=pair[0].name),
    )
    report.notes += _procedural_notes(specs, split)
    parts: list[list[Example]] = []
    bad: list[BadRow] = []
    for index, (spec, table, plan) in enumerate(zip(specs, tables, plans, strict=True)):
        report.mappings[spec.name] = plan.line
        found, refused = _examples(spec, table, plan, system, _order(spec, table, args, seed, index))
        bad += refused
        if not found:
            raise _no_rows(spec, table, refused)
        parts.append(_oversampled(found, spec, args, seed, index))
    if bad and args.strict:
        raise ConfigError(*first_few(bad))
    for row in bad:
        report.skip(row)
    if split == "train" and len(parts) > 1 and args.interleave_prob:
        examples = _mixed(parts, specs, args, report)
    else:
        examples = [example for part in parts for example in part]
    report.num_rows = len(examples)
    return Rows(examples, report)


def _mixed(
    parts: Sequence[Sequence[Example]], specs: Sequence[DatasetSpec], args: DataArguments, report: DataReport
) -> list[Example]:
    """Rows of several datasets in the shares of `--interleave_prob`; each in random order unless that is off."""
    seed = data_seed(args)
    places = interleave([len(part) for part in parts], args.interleave_prob, seed=seed, strategy=args.stopping_strategy)
    orders = [
        generator(seed, index, _MIX_COUNTER).permutation(len(part)) if args.dataset_shuffle else range(len(part))
        for index, part in enumerate(parts)
    ]
    taken = [sum(source == index for source, _ in places) for index in range(len(parts))]
    of_each = zip(taken, specs, parts, strict=True)
    counts = ", ".join(f"{count} of {spec.name} ({len(part)} rows)" for count, spec, part in of_each)
    report.notes.append(f"mixture: {len(places)} rows: {counts}; ended with {args.stopping_strategy}")
    return [parts[source][int(orders[source][place])] for source, place in places]


def _check_not_empty(spec: DatasetSpec, table: Table) -> None:
    if not table.columns:
        raise _no_rows(spec, table, [record for record in table.records if isinstance(record, BadRow)])


def _each(items: Sequence[Any], function: Callable[[Any], Any]) -> list[Any]:
    """`function` of every item; a ConfigError lists the problems of all."""
    results, problems = [], []
    for item in items:
        try:
            results.append(function(item))
        except ConfigError as error:
            problems += error.problems
    if problems:
        raise ConfigError(*problems)
    return results


def _columns_seen(tables: Sequence[Table], renames: Mapping[str, str], split: Split) -> list[str]:
    """Columns that `--columns` may name; evaluation data may already use the new names."""
    seen = [name for table in tables for name in [*table.columns, *table.empty_columns]]
    if split == "val":
        seen += [old for old, new in renames.items() if new in seen]
    return list(dict.fromkeys(seen))


def _order(spec: DatasetSpec, table: Table, args: DataArguments, seed: int, index: int) -> Iterable[int]:
    """The order in which rows are looked at: random for `#n`, else that of the file."""
    if spec.count is None or spec.kind == "procedural" or not args.dataset_shuffle:
        return range(len(table.records))
    return (int(row) for row in generator(seed, index).permutation(len(table.records)))


def _examples(
    spec: DatasetSpec, table: Table, plan: ColumnPlan, system: str | None, order: Iterable[int]
) -> tuple[list[Example], list[BadRow]]:
    """Rows in `order` until `#n` good ones are found, and the bad ones met on the way."""
    found: list[Example] = []
    bad: list[BadRow] = []
    for index in order:
        example = understood(table.records[index], plan, system)
        if isinstance(example, BadRow):
            bad.append(example)
            continue
        found.append(example)
        if len(found) == spec.count:
            break
    return found, bad


def understood(record: Record, plan: ColumnPlan, system: str | None) -> Example | BadRow:
    """A record read by its dataset's plan."""
    if isinstance(record, BadRow):
        return record
    try:
        messages, columns = plan.read(record.values, system)
    except RowError as error:
        return BadRow(record.origin, str(error))
    return Example(messages, columns, record.origin)


def _oversampled(found: list[Example], spec: DatasetSpec, args: DataArguments, seed: int, index: int) -> list[Example]:
    """`#n` beyond the number of rows: whole copies, then a remainder (random, or the first rows)."""
    if spec.count is None or len(found) >= spec.count:
        return found
    copies, rest = divmod(spec.count, len(found))
    shuffled = args.dataset_shuffle
    remainder = generator(seed, index, 1).permutation(len(found))[:rest] if shuffled else range(rest)
    return found * copies + [found[row] for row in remainder]


def _no_rows(spec: DatasetSpec, table: Table, bad: Sequence[BadRow]) -> ConfigError:
    if not bad:
        return ConfigError(f"{spec.flag}: {spec.text}: no rows: the dataset is empty; check the file")
    kinds = f"no usable row among {len(table.records)}"
    return ConfigError(f"{spec.flag}: {spec.text}: {kinds}; correct the rows listed", *first_few(bad))


def _procedural_notes(specs: Sequence[DatasetSpec], split: Split) -> list[str]:
    if split != "val":
        return []
    return [
        f"val data: {spec.name} uses the data seed, as training does: give it another, as in {spec.name}?seed=1000000"
        for spec in specs
        if spec.kind == "procedural" and "seed" not in spec.options
    ]


def _split_off(args: DataArguments, purpose: Purpose, *, keep: Split) -> Rows:
    rows = _load(args, "train", purpose)
    train, val = split_examples(rows.examples, args.split_dataset_ratio, data_seed(args))
    report = rows.report
    report.split = keep
    kept = train if keep == "train" else val
    report.num_rows = len(kept)
    if keep == "train":
        report.notes.append(f"split: {len(train)} rows to train on, {len(val)} to evaluate (--split_dataset_ratio)")
    else:  # what the training split has already told
        report.notes, report.num_skipped, report.first_bad = [], 0, []
    return Rows(kept, report)


def iterate_understood(
    records: Iterator[Record], plan: ColumnPlan, system: str | None, on_bad: Callable[[BadRow], None]
) -> Iterator[Example]:
    """Good rows as they arrive; `on_bad` is told of the others."""
    for record in records:
        example = understood(record, plan, system)
        if isinstance(example, BadRow):
            on_bad(example)
        else:
            yield example
