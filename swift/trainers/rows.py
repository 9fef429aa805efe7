"""Rows of a method as token ids for its trainer, in a table.

A row is never truncated. Rows that the encoder refuses (an error with `--strict`), and those longer than `max_length`,
are left out and counted.

Tokenised rows are kept in the cache of `datasets`, under a digest of the rows, the tokenizer, the template and the
settings. The first process that needs them tokenises, the others wait for it and map the file into memory.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from swift.errors import ConfigError, RefusedChat, ResourceError, counted, first_line, join_problems

if TYPE_CHECKING:
    from datasets import Dataset

    from swift.data.loading import Example
    from swift.models.template import Template
    from swift.trainers.sft_packing import Packing

IGNORED = -100
"""The label of a token that the loss ignores."""

ENCODING = 3
"""Version of the encoders, increased when the values of their columns change."""

TOO_LONG = "longer than max_length"

COUNTS = {"num_tokens": "int64", "num_trained": "int64", "moved": "bool", "problem": "string"}
"""Further columns of every encoder, and their types."""

PLACE = {"place": "int64"}
"""Column of the index of a row's inputs in the list of all inputs."""


@dataclass(frozen=True)
class Encoder:
    """Encodes examples as rows; picklable, so that worker processes can run it.

    A subclass has `columns` (names of a row's columns, and their types: "ids" and "numbers", lists of integers and of
    floats, or a type of Arrow), `inputs` and `encode`; its fields are settings that determine the encoded row.
    """

    template: Template
    max_length: int | None

    columns: ClassVar[Mapping[str, str]] = {}

    def inputs(self, example: Example) -> Iterator[list[Any]]:
        """The arguments of `encode`, as JSON values, for each row of an example."""
        raise NotImplementedError

    def encode(self, *inputs: Any) -> dict[str, Any]:
        """A row, and `COUNTS`: `moved` is whether the template renders the prompt alone in another way than before an
        answer.

        Raises:
            RefusedChat: the row cannot be used.
        """
        raise NotImplementedError

    def __call__(self, *inputs: Any) -> dict[str, Any]:
        """As `encode`; `problem` is the reason why the row is left out, or ""."""
        try:
            return self.encode(*inputs)
        except RefusedChat as error:
            return self.excluded_row(str(error))

    def rows(self, *inputs: Any) -> Iterator[dict[str, Any]]:
        """The rows of these inputs: one, or several of an encoder that overrides this."""
        yield self(*inputs)

    def check_length(self, size: int) -> None:
        """Raises RefusedChat for rows of more tokens than `max_length`."""
        if self.max_length is not None and size > self.max_length:
            raise RefusedChat(TOO_LONG)

    def shortened(self, values: list[Any], side: str) -> list[Any]:
        """At most `max_length` values of a row, cut on the left or right."""
        if self.max_length is None:
            return values
        return values[-self.max_length :] if side == "left" else values[: self.max_length]

    def from_json(self, batch: Mapping[str, Sequence[Any]]) -> dict[str, list[Any]]:
        """The rows of a table with JSON text in the column `inputs` (Arrow needs one type per column)."""
        pairs = zip(batch["place"], batch["inputs"], strict=True)
        found = [{"place": place, **row} for place, inputs in pairs for row in self.rows(*json.loads(inputs))]
        return {name: [row[name] for row in found] for name in {**self.columns, **COUNTS, **PLACE}}

    def excluded_row(self, problem: str) -> dict[str, Any]:
        """A row that is not used."""
        empty = {"ids": [], "string": "", "bool": False, "float64": 0.0, "numbers": []}
        row = {name: empty[kind] for name, kind in self.columns.items()}
        return {**row, **counts(), "problem": problem}

    @property
    def identity(self) -> str:
        """All settings and versions that determine the encoded row."""
        import tokenizers
        import transformers

        template = self.template
        tokenizer = template.tokenizer
        backend = getattr(tokenizer, "backend_tokenizer", None)
        vocabulary = backend.to_str() if backend is not None else sorted(tokenizer.get_vocab().items())
        texts = [
            tokenizer.special_tokens_map,
            tokenizer.chat_template,
            template.training_template,
            template.kwargs,
            template.stop_token_ids,
        ]
        settings = [getattr(self, item.name) for item in fields(self) if item.name != "template"]
        settings += template.vision.identity if template.vision is not None else []
        libraries = [transformers.__version__, tokenizers.__version__, ENCODING]
        return json.dumps([type(self).__name__, type(tokenizer).__name__, vocabulary, texts, settings, libraries])


def counts(num_tokens: int = 0, num_trained: int = 0, *, moved: bool = False) -> dict[str, Any]:
    """`COUNTS` of a row that is used: its tokens, and those that are trained on."""
    return {"num_tokens": num_tokens, "num_trained": num_trained, "moved": moved, "problem": ""}


@dataclass
class EncodingReport:
    """Numbers of rows: `num_kept` trained on, `dropped` by reason; `num_packed` if they were packed.

    firsts: the first place of each reason. num_moved: see `Encoder`.
    """

    num_kept: int = 0
    num_tokens: int = 0
    num_trained_tokens: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    firsts: dict[str, str] = field(default_factory=dict)
    num_moved: int = 0
    num_packed: int | None = None

    def drop(self, problem: str, origin: str) -> None:
        """Counts a row that is left out."""
        self.dropped[problem] += 1
        self.firsts.setdefault(problem, origin)

    def lines(self, split: str) -> list[str]:
        """The report as lines to print: one, and more if rows were dropped or `moved`."""
        rows, tokens = counted(self.num_kept, "row"), counted(self.num_tokens, "token")
        lines = [f"{split}: {rows}, {tokens}, {self.num_trained_tokens} of them trained on"]
        if self.num_packed is not None:
            lines[0] += f"; packed into {counted(self.num_packed, 'row')}"
        if self.dropped:
            reasons = ", ".join(f"{n} ({why}; the first: {self.firsts[why]})" for why, n in self.dropped.most_common())
            lines.append(f"{split}: left out {counted(self.dropped.total(), 'row')}: {reasons}")
        if self.num_moved:
            lines.append(
                f"{split}: {counted(self.num_moved, 'row')}: the chat template writes the prompt alone in another way "
                "than before its answer; the answer begins where they differ"
            )
        return lines


def encode_table(
    examples: Sequence[Example],
    encoder: Encoder,
    *,
    num_proc: int = 1,
    split: str = "train",
    cached: bool = False,
    strict: bool = False,
    packing: Packing | None = None,
) -> tuple[Dataset, EncodingReport]:
    """The rows of examples in their order as a datasets table; packed ones have seq_lengths, too.

    Args:
        examples: the rows of the dataset.
        encoder: encodes them.
        num_proc: number of processes that tokenise.
        split: name of the rows in errors.
        cached: whether the result is written to the cache of `datasets`, and read from it the next time.
        strict: whether rows that the encoder refuses are an error.
        packing: how rows are packed.

    Raises:
        ConfigError: not a single row can be used, or (strict) some cannot.
        ResourceError: the cache cannot be written.
    """
    from datasets import Dataset, disable_progress_bars

    disable_progress_bars()
    origins, texts = [], []
    for example in examples:
        for inputs in encoder.inputs(example):
            origins.append(example.origin)
            texts.append(json.dumps(inputs))
    with cache_of(texts, encoder.identity) if cached else contextlib.nullcontext() as file:
        encoded = Dataset.from_dict({"inputs": texts, "place": range(len(texts))}).map(
            encoder.from_json,
            batched=True,
            remove_columns=["inputs"],
            num_proc=num_proc if num_proc > 1 else None,
            features=features_of({**encoder.columns, **COUNTS, **PLACE}),
            **cache_options(file),
        )
        problems = list(encoded["problem"])
        kept = encoded.select([index for index, problem in enumerate(problems) if not problem])
        report = EncodingReport(
            num_kept=len(kept),
            num_tokens=sum(encoded["num_tokens"]),
            num_trained_tokens=sum(encoded["num_trained"]),
            num_moved=sum(encoded["moved"]),
        )
        for place, problem in zip(encoded["place"], problems, strict=True):
            if problem:
                report.drop(problem, origins[place])
        join_problems([f"{origin}: {why}" for why, origin in report.firsts.items() if strict and why != TOO_LONG])
        if not report.num_kept:
            flag = "--dataset" if split == "train" else "--val_dataset"
            raise ConfigError(f"{flag}: no usable row for training; {_main_reason(report, encoder)}")
        table = kept.select_columns(list(encoder.columns))
        if packing is not None:
            place = file.with_name(f"{file.stem}-{packing.strategy}-{packing.length}.arrow") if file else None
            table = packing(table, cache_options(place))
            report.num_packed = len(table)
    return table, report


def features_of(columns: Mapping[str, str]) -> Any:
    """The columns as features of `datasets`."""
    from datasets import Features, List, Value

    lists = {"ids": List(Value("int64")), "numbers": List(Value("float64"))}
    return Features({name: lists.get(kind) or Value(kind) for name, kind in columns.items()})


@contextlib.contextmanager
def cache_of(rows: Sequence[str], identity: str) -> Iterator[Path]:
    """The cache file of these rows and the encoder of this identity, locked for one process at a time.

    Raises:
        ResourceError: the cache cannot be written.
    """
    from datasets import config
    from filelock import FileLock

    digest = hashlib.blake2b("\n".join([identity, *rows]).encode(), digest_size=16).hexdigest()
    file = Path(config.HF_DATASETS_CACHE) / "swift" / f"{digest}.arrow"
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{file}.lock"):
            yield file
    except ConnectionError:  # an error of the processes that encode
        raise
    except OSError as error:
        raise ResourceError(
            f"HF_DATASETS_CACHE: {file.parent}: tokenised rows cannot be kept there: {first_line(error)}; set "
            "HF_DATASETS_CACHE to another folder, or use --load_from_cache_file false"
        ) from error


def cache_options(file: Path | None) -> dict[str, Any]:
    """Arguments of `Dataset.map` with which its result is read from `file`, or written to it."""
    if file is None:
        return {}
    return {"cache_file_name": str(file), "new_fingerprint": file.stem, "load_from_cache_file": True}


def _main_reason(report: EncodingReport, encoder: Encoder) -> str:
    if not report.dropped:
        return "the data set is empty"
    (reason, count), *_ = report.dropped.most_common(1)
    limit = f" (--max_length {encoder.max_length})" if reason == TOO_LONG else ""
    return f"all were left out, {count} of them: {reason}{limit}; the first: {report.firsts[reason]}"
