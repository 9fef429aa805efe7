"""All rows of `--dataset` or `--val_dataset`: read, validated, sampled, split.

A bad row is skipped and counted. Too many of them (`--max_skipped_fraction`), or one with `--strict true`, stop the run
before a model is loaded. A file that does not parse is never skipped. The result depends on the files, the arguments
and `data_seed` only, so every process loads the same rows in the same order.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from swift.data.chats import TaughtPlan
from swift.data.columns import ColumnPlan
from swift.data.documents import DocumentPlan
from swift.data.files import read_local
from swift.data.hub import load_hub
from swift.data.image_store import remember, with_contents
from swift.data.images import ImageSource
from swift.data.interleave import interleave
from swift.data.labels import LabelPlan, maybe_labelled
from swift.data.media import read_media
from swift.data.messages import MEDIA, TEXTS_ONLY, Message, chat_in, check_media, is_chat
from swift.data.pairs import PairPlan, pairs_or_labels
from swift.data.placeholders import PLACEHOLDERS, fill_placeholders, notes_on_unused_names
from swift.data.preprocessed import is_registered, preprocessed
from swift.data.procedural import read_procedural
from swift.data.records import BadRow, RawRow, Record, RowError, filled_columns
from swift.data.report import DataReport, first_few
from swift.data.sampler import generator
from swift.data.spec import DatasetSpec, map_collecting_problems, parse_specs
from swift.data.steps import StepPlan, steps_or_chats
from swift.data.system import resolve_system
from swift.data.texts import TextPlan, chats_or_texts
from swift.data.transforms import transformed
from swift.errors import ConfigError, counted, join_problems, suggest

if TYPE_CHECKING:
    from swift.data.arguments import DataArguments

logger = logging.getLogger(__name__)

Split = Literal["train", "val"]

Purpose = Literal[
    "prompt", "chat", "text", "pair", "label", "steps", "judged", "class", "classified", "document", "taught"
]  # fmt: skip
"""`prompt`: prompts of completions; a final assistant turn is dropped, `answer` and the like stay columns. `chat`:
prompt and answer, for supervised training. `text`: documents, each an assistant turn. `pair`, `label`: prompts, their
answers in columns, see `swift.data.pairs`. `steps`, `judged`: see `swift.data.steps`. `class`, `classified`: texts with
labels, or perhaps without (`swift.data.labels`). `document`: documents of strided EBFT. `taught`: prompts, their answer
in a column, for distillation."""

PLANS: Mapping[str, Callable[..., ColumnPlan]] = {
    "prompt": ColumnPlan,
    "chat": chats_or_texts,
    "text": TextPlan,
    "pair": PairPlan,
    "label": pairs_or_labels,
    "steps": StepPlan,
    "judged": steps_or_chats,
    "class": LabelPlan,
    "classified": maybe_labelled,
    "document": DocumentPlan,
    "taught": TaughtPlan,
}
"""How rows are read for each purpose."""

_MIX_COUNTER = 2**32 - 2
_SPLIT_COUNTER = 2**32 - 1  # keeps the split's random numbers apart from those of any dataset's sampling


@dataclass(slots=True, frozen=True)
class Example:
    """A valid row: the chat, every other column, `file:line`; `is_chat` as of `Prompt`."""

    messages: list[Message]
    columns: dict[str, Any]
    origin: str
    is_chat: bool = True

    @property
    def digest(self) -> str:
        """16 hex digits of messages and columns: equal rows share it, on any machine and in any order."""
        content = json.dumps([self.messages, self.columns], sort_keys=True, separators=(",", ":"))
        return hashlib.blake2b(content.encode(), digest_size=8).hexdigest()

    @property
    def row(self) -> dict[str, Any]:
        """`messages` and the other columns in one dict."""
        return {"messages": self.messages, **self.columns}


@dataclass(slots=True)
class Rows:
    """Rows as dicts: `messages` and the other columns under their own names. `report` counts the rows left out.

    sizes: names of the datasets and their numbers of rows, in the order of the rows unless they are mixed or split.
    """

    examples: list[Example]
    report: DataReport = field(default_factory=DataReport)
    sizes: list[tuple[str, int]] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.examples)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (example.row for example in self.examples)


@dataclass(slots=True)
class Table:
    """All records of one dataset. `columns` hold a value in at least one row, `empty_columns` in none."""

    records: Sequence[Record]
    columns: list[str]
    empty_columns: list[str]


def load_rows(args: DataArguments, split: Split, *, purpose: Purpose = "chat", images: bool = False) -> Rows:
    """The rows of one split.

    Args:
        args: the data settings.
        split: "val" means `--val_dataset`, else the part that `--split_dataset_ratio` splits off; without
            either the result is empty.
        purpose: "chat" returns messages that end with the assistant's answer (supervised training); "text" one
            assistant turn that is a document (pre-training); "prompt" returns messages to be answered, with a final
            assistant turn dropped and `answer` and the like left among the columns (reinforcement learning,
            reward-test, infer); "pair" and "label" return prompts, and their answers in columns (preferences);
            "steps" prompts, and the steps of their answers.
        images: whether prompts may have images; otherwise rows with images are bad.

    Returns:
        at least one row, except for an empty "val".

    Raises:
        ConfigError: anything wrong with a dataset, file, column, or (strict) row.
        ResourceError: a hub does not answer or a package is missing.
    """
    splits_off = bool(args.split_dataset_ratio) and not args.val_dataset
    if split == "val" and not splits_off and not args.val_dataset:
        return Rows([], DataReport("val"))
    if not splits_off:
        return _load(args, split, purpose, images)
    rows = _load(args, "train", purpose, images)
    train, val = split_examples(rows.examples, args.split_dataset_ratio, args.data_seed)
    if split == "val":  # the notes are in the report of the training split
        return Rows(val, DataReport("val", mappings=rows.report.mappings))
    rows.report.notes.append(
        f"split: {counted(len(train), 'row')} to train on, {len(val)} to evaluate (--split_dataset_ratio)"
    )
    return Rows(train, rows.report)


def split_examples(examples: Sequence[Example], ratio: float, seed: int) -> tuple[list[Example], list[Example]]:
    """Training and evaluation rows, each in the order of `examples`.

    About `ratio` of the rows (at least one) go to evaluation; rows of equal content stay together, so that no row is
    both trained on and evaluated.
    """
    digests = [example.digest for example in examples]
    distinct = list(dict.fromkeys(digests))
    if len(distinct) < 2:
        raise ConfigError(
            f"--split_dataset_ratio: {ratio}: {counted(len(distinct), 'different row')} cannot be split in two; "
            "give --val_dataset or more rows"
        )
    count = min(max(1, round(ratio * len(distinct))), len(distinct) - 1)
    order = generator(seed, _SPLIT_COUNTER).permutation(len(distinct))
    chosen = {distinct[index] for index in order[:count]}
    train = [example for example, digest in zip(examples, digests, strict=True) if digest not in chosen]
    val = [example for example, digest in zip(examples, digests, strict=True) if digest in chosen]
    return train, val


def write_examples(examples: Iterable[Example], path: str | Path) -> None:
    """One JSON object per line, UTF-8, so that loading the file gives the same rows (and ids, images) again."""
    with Path(path).open("wb") as lines:
        for example in examples:
            row = {**example.row, "messages": with_contents(example.messages)}
            try:
                line = json.dumps(row, ensure_ascii=False).encode()
            except UnicodeEncodeError:  # half of a surrogate pair, which only JSON's escapes can represent
                line = json.dumps(row).encode()
            lines.write(line + b"\n")


def read_record(record: Record, plan: ColumnPlan, system: str | None, args: DataArguments) -> Example | BadRow:
    """A record read by its dataset's plan."""
    if isinstance(record, BadRow):
        return record
    values, text = record.values, str(record.values)
    if any(placeholder in text for placeholder in PLACEHOLDERS):
        values = fill_placeholders(values, record.origin, args)
    try:
        messages, columns = plan.read(values, system)
        if plan.images is None:
            check_media(plan.renamed(values), messages)
        else:
            media = read_media(plan.renamed(values), messages, plan.images, document=plan.documents)
            messages = media.messages
            row = str(Path(record.origin).absolute()) if plan.images.folder is not None else None
            remember([image if image.path else replace(image, row=row) for image in media.images])
            for note in media.notes:
                _say_once(note)
    except RowError as error:
        return BadRow(record.origin, str(error))
    return Example(messages, columns, record.origin, plan.holds_chat(values))


@functools.lru_cache
def _say_once(note: str) -> None:
    logger.warning("%s", note)


def check_undamaged(records: Iterable[Record]) -> None:
    """Raises ConfigError if files do not parse, with the first places as `file:line`."""
    if damaged := [record for record in records if isinstance(record, BadRow) and record.damaged]:
        join_problems(bad_rows(damaged))


def bad_rows(bad: Sequence[BadRow]) -> list[str]:
    """The first bad rows as problems, and their number."""
    return first_few([str(row) for row in bad], f"--dataset: {counted(len(bad), 'bad row')}")


def too_many_bad(bad: Sequence[BadRow], num_rows: int, spec: DatasetSpec, args: DataArguments) -> list[str]:
    """The problems of a dataset with `bad` among `num_rows` rows, if that is more than `args` allow."""
    most = 0.0 if args.strict else args.max_skipped_fraction
    if len(bad) <= most * num_rows:
        return []
    shares = f"{len(bad)} of {counted(num_rows, 'row')} bad, more than a share of {most:g} (--max_skipped_fraction)"
    total = [] if args.strict else [f"{spec.subject}: {shares}; correct them, or raise it"]
    return [*total, *bad_rows(bad)]


def plan_datasets(
    specs: Sequence[DatasetSpec],
    tables: Sequence[Table],
    renames: Mapping[str, str],
    purpose: Purpose,
    report: DataReport,
    images: Callable[[DatasetSpec], ImageSource] | None = None,
) -> list[ColumnPlan]:
    """How the rows of each dataset are read; adds the mappings to `report`.

    renames: `--columns`. images: where those of a dataset may come from; None: rows have none.
    """
    problems: list[str] = []
    for spec, table in zip(specs, tables, strict=True):
        if not table.columns:
            bad = [record for record in table.records if isinstance(record, BadRow)]
            problems += _no_rows(spec, table, bad).problems
    join_problems(problems)
    _check_names(tables, renames, report)
    plans: list[ColumnPlan] = []
    for spec, table in zip(specs, tables, strict=True):
        first = next((record.values for record in table.records if isinstance(record, RawRow)), {})
        chats = [name for name, value in first.items() if is_chat(chat_in(value))]
        media = [name for name, value in first.items() if value and renames.get(name, name) in MEDIA]
        try:
            if media and images is None:
                raise spec.wrong(f"column {media[0]}: {TEXTS_ONLY}, or rename it with --columns")
            sees = {} if images is None else {"images": images(spec)}
            plans.append(PLANS[purpose](table.columns, renames, flag=spec.flag, name=spec.name, chats=chats, **sees))
        except ConfigError as error:
            problems += error.problems
    join_problems(problems)
    report.notes += dict.fromkeys(f"note: {doubt}" for plan in plans for doubt in plan.doubts)
    report.mappings = {spec.name: plan.line for spec, plan in zip(specs, plans, strict=True)}
    return plans


def _check_names(tables: Sequence[Table], renames: Mapping[str, str], report: DataReport) -> None:
    """Raises ConfigError if `--columns` names a column that no dataset has, with the nearest."""
    seen = [name for table in tables for name in [*table.columns, *table.empty_columns]]
    if report.split == "val":  # evaluation data may already use the new names
        seen += [old for old, new in renames.items() if new in seen]
    columns = list(dict.fromkeys(seen))
    join_problems(
        [
            f"--columns: {json.dumps({old: new})}: no dataset has a column {old!r}; {suggest(old, columns)}"
            for old, new in renames.items()
            if old not in columns
        ]
    )


def dataset_specs(args: DataArguments, split: Split) -> list[DatasetSpec]:
    """The entries of `--dataset` or `--val_dataset`."""
    if split == "val":
        return parse_specs(args.val_dataset, use_hf=args.use_hf, flag="--val_dataset")
    specs = parse_specs(args.dataset, use_hf=args.use_hf)
    if args.split is None:
        return specs
    if all(spec.kind != "hub" for spec in specs):
        raise ConfigError(f"--split: {args.split}: no --dataset is one of a hub, whose splits it chooses; leave it out")
    return [replace(spec, split=args.split) for spec in specs]


def image_source(spec: DatasetSpec, args: DataArguments) -> ImageSource:
    """Where the images of a dataset may come from: its rows, files beside its own, or, if allowed, public addresses."""
    folder = None
    if spec.kind == "local":
        folder = Path(spec.target) if Path(spec.target).is_dir() else Path(spec.target).parent
    return ImageSource(folder=folder, allow_urls=args.allow_media_urls)


def _load(args: DataArguments, split: Split, purpose: Purpose, images: bool) -> Rows:
    system, notes = resolve_system(args.system) if args.system else (None, [])
    report = DataReport(split, notes=notes)
    specs = dataset_specs(args, split)
    tables = map_collecting_problems(specs, lambda spec: _open_table(spec, split, args.data_seed))
    tables = [_preprocessed(table, spec, report) for table, spec in zip(tables, specs, strict=True)]
    renames = args.columns
    if name := getattr(args, "dataset_transform", None):
        _check_names(tables, renames, report)
        changed = [list(transformed(table.records, name, renames)) for table in tables]
        tables, renames = [Table(rows, *filled_columns(rows)) for rows in changed], {}
    plans = plan_datasets(
        specs, tables, renames, purpose, report, (lambda spec: image_source(spec, args)) if images else None
    )
    report.notes += [
        f"val data: {spec.name} uses the data seed, as training does: give it another, as in {spec.name}?seed=1000000"
        for spec in specs
        if split == "val" and spec.kind == "procedural" and "seed" not in spec.options
    ]
    if split == "train" and (args.model_name or args.model_author):
        report.notes += notes_on_unused_names([record for table in tables for record in table.records], args)
    parts: list[list[Example]] = []
    sizes: list[tuple[str, int]] = []
    problems: list[str] = []
    for index, (spec, table, plan) in enumerate(zip(specs, tables, plans, strict=True)):
        found, refused = _examples(spec, table.records, plan, system, args, index)
        if not found:
            raise _no_rows(spec, table, refused)
        problems += too_many_bad(refused, len(found) + len(refused), spec, args)
        for row in refused:
            report.skip(row)
        if spec.count is not None and len(found) < spec.count:
            found = _oversampled(found, spec.count, args, index)
        parts.append(found)
        sizes.append((spec.text, len(parts[-1])))
    join_problems(problems)
    if args.drop_duplicates:
        report.notes.append(_distinct(parts))
    if split == "train" and len(parts) > 1 and args.interleave_prob:
        examples = _mixed(parts, specs, args, report)
    else:
        examples = [example for part in parts for example in part]
    return Rows(examples, report, sizes)


def _preprocessed(table: Table, spec: DatasetSpec, report: DataReport) -> Table:
    if not is_registered(spec):
        return table
    records = list(preprocessed(table.records, spec))
    if left_out := len(table.records) - len(records):
        report.notes.append(f"{spec.name}: its preprocess_func leaves out {counted(left_out, 'row')}")
    return Table(records, *filled_columns(records))


def _open_table(spec: DatasetSpec, split: Split, seed: int) -> Table:
    if spec.kind == "hub":
        records, columns = load_hub(spec, split=split)
        return Table(records[spec.part(len(records))] if spec.bounds else records, columns, [])
    found = list(read_local(spec) if spec.kind == "local" else read_procedural(spec, seed=seed))
    check_undamaged(found)
    if spec.bounds:
        found = found[spec.part(len(found))]
    return Table(found, *filled_columns(found))


def _no_rows(spec: DatasetSpec, table: Table, bad: Sequence[BadRow]) -> ConfigError:
    if not bad:
        return spec.wrong("no rows: the dataset is empty; check the file")
    kinds = f"no usable row among {len(table.records)}"
    return spec.wrong(f"{kinds}; correct the rows listed", *bad_rows(bad))


def _examples(
    spec: DatasetSpec,
    records: Sequence[Record],
    plan: ColumnPlan,
    system: str | None,
    args: DataArguments,
    index: int,
) -> tuple[list[Example], list[BadRow]]:
    """Rows until `#n` good ones are found, and the bad ones before; in random order for `#n`, else in file order."""
    order: Iterable[int] = range(len(records))
    if spec.count is not None and spec.kind != "procedural" and args.dataset_shuffle:
        order = map(int, generator(args.data_seed, index).permutation(len(records)))
    found: list[Example] = []
    bad: list[BadRow] = []
    for row in order:
        example = read_record(records[row], plan, system, args)
        if isinstance(example, BadRow):
            bad.append(example)
            continue
        found.append(example)
        if len(found) == spec.count:
            break
    return found, bad


def _oversampled(found: list[Example], count: int, args: DataArguments, index: int) -> list[Example]:
    """`count` rows out of fewer: whole copies, then a remainder (random, or the first rows)."""
    copies, rest = divmod(count, len(found))
    remainder: Iterable[int] = range(rest)
    if args.dataset_shuffle:
        remainder = generator(args.data_seed, index, 1).permutation(len(found))[:rest]
    return found * copies + [found[row] for row in remainder]


def _distinct(parts: list[list[Example]]) -> str:
    """Leaves the first of rows with the same content, over all datasets; a line about the others."""
    seen: set[str] = set()
    total = sum(map(len, parts))
    for part in parts:
        part[:] = [row for row in part if not (row.digest in seen or seen.add(row.digest))]  # type: ignore[func-returns-value]
    return f"{counted(total - len(seen), 'duplicate')} left out (--drop_duplicates)"


def _mixed(
    parts: Sequence[Sequence[Example]], specs: Sequence[DatasetSpec], args: DataArguments, report: DataReport
) -> list[Example]:
    """Rows of several datasets in the shares of `--interleave_prob`; each shuffled unless `dataset_shuffle` is off."""
    seed = args.data_seed
    places = interleave([len(part) for part in parts], args.interleave_prob, seed=seed, strategy=args.stopping_strategy)
    orders = [
        generator(seed, index, _MIX_COUNTER).permutation(len(part)) if args.dataset_shuffle else range(len(part))
        for index, part in enumerate(parts)
    ]
    taken = [sum(source == index for source, _ in places) for index in range(len(parts))]
    of_each = zip(taken, specs, parts, strict=True)
    counts = ", ".join(f"{count} of {spec.name} ({counted(len(part), 'row')})" for count, spec, part in of_each)
    report.notes.append(f"mixture: {counted(len(places), 'row')}: {counts}; ended with {args.stopping_strategy}")
    return [parts[source][int(orders[source][place])] for source, place in places]
