"""Rows of a method as the token ids that its trainer takes, in a table.

A row is used whole or not at all. Left out and counted are rows that the encoder refuses (`--strict` makes those an
error), and those longer than `max_length`.

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
"""The label of a token that takes no part in the loss."""

ENCODING = 3
"""Version of the encoders as far as the values of their columns depend on them."""

TOO_LONG = "longer than max_length"

COUNTS = {"num_tokens": "int64", "num_trained": "int64", "moved": "bool", "problem": "string"}
"""What an encoder gives beside its columns, and its type."""

PLACE = {"place": "int64"}
"""What a row was made from: a place in the list of all `given`."""


@dataclass(frozen=True)
class Encoder:
    """Turns examples into rows; picklable, so that worker processes can run it.

    A subclass has `columns` (names of a row's columns, and their types: a list of integers, "ids", or one of Arrow),
    `given` and `encode`; its fields are settings that decide what a row becomes.
    """

    template: Template
    max_length: int | None

    columns: ClassVar[Mapping[str, str]] = {}

    def given(self, example: Example) -> Iterator[list[Any]]:
        """The arguments, in terms of JSON, of each row that an example gives."""
        raise NotImplementedError

    def encode(self, *given: Any) -> dict[str, Any]:
        """A row, and `COUNTS`: `moved` tells that the template writes the prompt alone in another way than before an
        answer. A RefusedChat tells why there is none.
        """
        raise NotImplementedError

    def __call__(self, *given: Any) -> dict[str, Any]:
        """The same; `problem` tells why it is left out, else ""."""
        try:
            return self.encode(*given)
        except RefusedChat as error:
            return self.left_out(str(error))

    def rows(self, *given: Any) -> Iterator[dict[str, Any]]:
        """All rows of what is given, for an encoder that knows their number only then; the others make one."""
        yield self(*given)

    def check_length(self, size: int) -> None:
        """Refuses rows of more tokens than `max_length`."""
        if self.max_length is not None and size > self.max_length:
            raise RefusedChat(TOO_LONG)

    def from_json(self, batch: Mapping[str, Sequence[Any]]) -> dict[str, list[Any]]:
        """The same for rows of a table with JSON text in the column `given` (Arrow needs one type per column)."""
        pairs = zip(batch["place"], batch["given"], strict=True)
        found = [{"place": place, **row} for place, given in pairs for row in self.rows(*json.loads(given))]
        return {name: [row[name] for row in found] for name in {**self.columns, **COUNTS, **PLACE}}

    def left_out(self, problem: str) -> dict[str, Any]:
        """A row that is not used."""
        nothing = {"ids": [], "string": "", "bool": False, "float64": 0.0}
        row = {name: nothing[kind] for name, kind in self.columns.items()}
        return {**row, **counts(), "problem": problem}

    @property
    def identity(self) -> str:
        """All that decides what a row becomes, beside the row."""
        import tokenizers
        import transformers

        template = self.template
        tokenizer = template.tokenizer
        backend = getattr(tokenizer, "backend_tokenizer", None)
        vocabulary = backend.to_str() if backend is not None else sorted(tokenizer.get_vocab().items())
        texts = [tokenizer.chat_template, template.training_template, template.kwargs, template.stop_token_ids]
        settings = [getattr(self, one.name) for one in fields(self) if one.name != "template"]
        libraries = [transformers.__version__, tokenizers.__version__, ENCODING]
        return json.dumps([type(self).__name__, type(tokenizer).__name__, vocabulary, texts, settings, libraries])


def counts(num_tokens: int = 0, num_trained: int = 0, *, moved: bool = False) -> dict[str, Any]:
    """What an encoder tells of a row that is used: all tokens, and those trained on."""
    return {"num_tokens": num_tokens, "num_trained": num_trained, "moved": moved, "problem": ""}


@dataclass
class EncodingReport:
    """What became of the rows: `num_kept` trained on, `dropped` counted by reason; `num_packed` if they were packed.

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
        """The report in words: one line, and more if rows were dropped or prompts moved."""
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
        examples: what was read.
        encoder: makes rows of them.
        num_proc: processes that tokenise.
        split: the rows' name in errors.
        cached: whether the result is kept in the cache of `datasets`, and used again.
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
        for given in encoder.given(example):
            origins.append(example.origin)
            texts.append(json.dumps(given))
    with cache_of(texts, encoder.identity) if cached else contextlib.nullcontext() as file:
        encoded = Dataset.from_dict({"given": texts, "place": range(len(texts))}).map(
            encoder.from_json,
            batched=True,
            remove_columns=["given"],
            num_proc=num_proc if num_proc > 1 else None,
            features=features_of({**encoder.columns, **COUNTS, **PLACE}),
            **kept_in(file),
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
            raise ConfigError(f"{flag}: no usable row for training; {_why(report, encoder)}")
        table = kept.select_columns(list(encoder.columns))
        if packing is not None:
            place = file.with_name(f"{file.stem}-{packing.strategy}-{packing.length}.arrow") if file else None
            table = packing(table, kept_in(place))
            report.num_packed = len(table)
    return table, report


def features_of(columns: Mapping[str, str]) -> Any:
    """Columns in terms of `datasets`."""
    from datasets import Features, List, Value

    return Features({name: List(Value("int64")) if kind == "ids" else Value(kind) for name, kind in columns.items()})


@contextlib.contextmanager
def cache_of(rows: Sequence[str], identity: str) -> Iterator[Path]:
    """The file of these rows as an encoder of this identity makes them, for one process at a time.

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
    except ConnectionError:  # of the processes that encode
        raise
    except OSError as error:
        raise ResourceError(
            f"HF_DATASETS_CACHE: {file.parent}: tokenised rows cannot be kept there: {first_line(error)}; set "
            "HF_DATASETS_CACHE to another folder, or use --load_from_cache_file false"
        ) from error


def kept_in(file: Path | None) -> dict[str, Any]:
    """What `Dataset.map` is told so that its result is read from `file`, or written into it."""
    if file is None:
        return {}
    return {"cache_file_name": str(file), "new_fingerprint": file.stem, "load_from_cache_file": True}


def _why(report: EncodingReport, encoder: Encoder) -> str:
    if not report.dropped:
        return "the data set is empty"
    (reason, count), *_ = report.dropped.most_common(1)
    limit = f" (--max_length {encoder.max_length})" if reason == TOO_LONG else ""
    return f"all were left out, {count} of them: {reason}{limit}; the first: {report.firsts[reason]}"
