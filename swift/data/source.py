"""Where the scheduler takes its next prompt from: a dataset in memory, or a stream of rows.

Both give (prompt, epoch, cursor) without end and save a position of a few numbers. `IndexedPrompts` jumps to
a position. `StreamingPrompts` reads its files again up to that row, without tokenising what it passes: the
shuffle buffer is a function of (seed, epoch, rows read so far), so it is rebuilt rather than saved.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from swift.data.arguments import PromptArguments
from swift.data.columns import ColumnPlan, check_renames, plan_columns
from swift.data.curriculum import curriculum_stages
from swift.data.files import read_local
from swift.data.hub import stream_hub
from swift.data.interleave import mixed_stream, mixture_name
from swift.data.loading import Example, Split, data_seed, first_few, iterate_understood, renames_of
from swift.data.procedural import read_procedural
from swift.data.prompts import PromptDataset, Tokenize, Tokenizer, load_prompts
from swift.data.records import BadRow, Record, filled_columns
from swift.data.report import DataReport
from swift.data.sampler import PromptStream, check_same, generator
from swift.data.spec import DatasetSpec, parse_specs
from swift.data.system import resolve_system
from swift.errors import ConfigError
from swift.types import Prompt

if TYPE_CHECKING:
    import numpy as np

    from swift.data.arguments import PromptArguments

PEEKED_ROWS = 64
"""Rows of a streamed dataset that are looked at to learn its columns."""


class SourceItem(NamedTuple):
    """`cursor` is the place (from 0) in the order of `epoch` (from 0)."""

    prompt: Prompt
    epoch: int
    cursor: int


class PromptSource(Protocol):
    """An endless, deterministic, resumable supply of prompts."""

    report: DataReport

    @property
    def size(self) -> int | None:
        """Prompts per epoch; None when only reading to the end would tell."""
        ...

    @property
    def column_names(self) -> list[str]:
        """The columns that reach rewards."""
        ...

    def next(self) -> SourceItem:
        """The next prompt; epochs follow each other without end."""
        ...

    def skip_to_epoch_end(self) -> None:
        """Gives up the rest of an epoch that has begun; between epochs it does nothing."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """The position, as plain values."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes to a position; ConfigError when it belongs to other data or settings."""
        ...


class IndexedPrompts:
    """A `PromptSource` over a dataset in memory.

    Args:
        dataset: at least one prompt.
        seed: of the epochs' permutations.
        shuffle: False keeps the order of the dataset.
        stages: of a curriculum; see `PromptStream`.

    Raises:
        ConfigError: the dataset is empty.
    """

    def __init__(self, dataset: PromptDataset, seed: int, shuffle: bool, stages: np.ndarray | None = None) -> None:
        self.dataset, self.report = dataset, dataset.report
        self._stream = PromptStream(len(dataset), seed=seed, shuffle=shuffle, stages=stages)

    def __len__(self) -> int:
        return len(self.dataset)

    @property
    def size(self) -> int | None:
        """Prompts per epoch."""
        return len(self.dataset)

    @property
    def remaining(self) -> int:
        """Prompts left in the current epoch."""
        return self._stream.remaining

    @property
    def column_names(self) -> list[str]:
        """The columns that reach rewards."""
        return self.dataset.column_names

    def next(self) -> SourceItem:
        """The next prompt."""
        row, epoch, cursor = self._stream.next()
        return SourceItem(self.dataset[row], epoch, cursor)

    def skip_to_epoch_end(self) -> None:
        """Gives up the rest of an epoch that has begun; `remaining` tells how many prompts that would be."""
        self._stream.skip_to_epoch_end()

    def state_dict(self) -> dict[str, Any]:
        """Position and the dataset's fingerprint."""
        return {**self._stream.state_dict(), "fingerprint": self.dataset.fingerprint}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes to a position; ConfigError when rows, order or settings are not those of the saved run."""
        check_same(state, {"size": len(self.dataset), "fingerprint": self.dataset.fingerprint})
        self._stream.load_state_dict(state)


class StreamingPrompts:
    """A `PromptSource` that reads rows as they are needed and keeps only its shuffle buffer.

    `#n` takes the first n rows of a dataset. Prompts over the limit are cut, or with `delete` passed over.
    Files must not change between a run and its continuation.

    Args:
        args: the data settings; `shuffle_buffer_size` rows are mixed when `dataset_shuffle` is on.
        tokenize, max_prompt_length, truncation_strategy: as for `load_prompts`.
        split: "train" reads `--dataset`, "val" `--val_dataset`.
        seed: of the shuffle buffer; None means the data seed.

    Raises:
        ConfigError, ResourceError: as `load_prompts`, for what the first rows show; later rows raise from `next`.
    """

    def __init__(
        self,
        args: PromptArguments,
        *,
        tokenize: Tokenize,
        max_prompt_length: int | None,
        truncation_strategy: str = "left",
        split: Split = "train",
        seed: int | None = None,
    ) -> None:
        if args.split_dataset_ratio and not args.val_dataset:
            raise ConfigError(
                f"--split_dataset_ratio: {args.split_dataset_ratio}: a stream cannot be split; "
                "give --val_dataset or drop --streaming"
            )
        system, notes = resolve_system(args.system)
        self.report = DataReport(split, notes=notes)
        self._args, self._system, self._split = args, system, split
        self._tokenizer = Tokenizer(tokenize, max_prompt_length, truncation_strategy)
        self._seed = data_seed(args) if seed is None else seed
        self._buffer = int(args.shuffle_buffer_size) if args.dataset_shuffle else 0
        flag, texts = ("--dataset", args.dataset) if split == "train" else ("--val_dataset", args.val_dataset)
        if not texts:
            raise ConfigError(f"{flag}: none: no dataset is named; give files, folders or hub ids")
        self._specs = parse_specs(texts, use_hf=args.use_hf, flag=flag)
        self._plans = self._plan()
        self._epoch, self._drawn, self._given = 0, 0, 0
        self._rows = self._ordered(0)

    @property
    def size(self) -> int | None:
        """None: the length of a stream is not known."""
        return None

    @property
    def column_names(self) -> list[str]:
        """The columns that reach rewards, as far as the first rows show them."""
        return list(dict.fromkeys(name for plan in self._plans for name in plan.others))

    def next(self) -> SourceItem:
        """The next prompt that fits; a new epoch begins where the rows end.

        Raises:
            ConfigError: an epoch has no usable row, a file is damaged, or (strict) a row is bad.
        """
        while True:
            example = next(self._rows, None)
            if example is None:
                self._next_epoch()
                continue
            cursor = self._drawn
            self._drawn += 1
            ids = self._tokenizer.ids(example)
            if self._tokenizer.too_long(ids):
                if self._tokenizer.strategy == "delete":
                    self.report.num_deleted += 1
                    continue
                self.report.num_truncated += 1
            self._given += 1
            prompt = Prompt(example.digest, example.messages, self._tokenizer.cut(ids), example.columns)
            return SourceItem(prompt, self._epoch, cursor)

    def skip_to_epoch_end(self) -> None:
        """Goes to the next epoch unless one has just begun."""
        if self._drawn:
            self._enter(self._epoch + 1, 0)

    def state_dict(self) -> dict[str, Any]:
        """Position and the settings that decide the order."""
        return {
            "epoch": self._epoch,
            "cursor": self._drawn,
            "given": self._given,
            "seed": self._seed,
            "shuffle": self._args.dataset_shuffle,
            "buffer": self._buffer,
            "mixture": mixture_name(self._args),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Reads up to a saved position.

        Raises:
            ConfigError: other settings, or fewer rows than the saved run had read.
        """
        mine = self.state_dict()
        check_same(state, {name: mine[name] for name in ("seed", "shuffle", "buffer", "mixture")})
        self._enter(int(state["epoch"]), int(state["cursor"]))
        self._given = int(state["given"])

    def _next_epoch(self) -> None:
        if not self._given:
            first = f"; the first: {self.report.first_bad[0]}" if self.report.first_bad else ""
            raise ConfigError(
                f"{self._specs[0].flag}: {', '.join(spec.text for spec in self._specs)}: no usable row in the stream "
                f"({self.report.num_skipped} bad, {self.report.num_deleted} too long){first}"
            )
        self._enter(self._epoch + 1, 0)

    def _enter(self, epoch: int, drawn: int) -> None:
        self._epoch, self._drawn, self._given = epoch, drawn, 0
        self._rows = self._ordered(epoch)
        if drawn and sum(1 for _ in itertools.islice(self._rows, drawn)) < drawn:
            raise ConfigError(
                f"--resume_from_checkpoint: epoch {epoch}, row {drawn}: the stream has fewer rows than the saved "
                "run had read; resume with the same files"
            )

    def _ordered(self, epoch: int) -> Iterator[Example]:
        rows = self._examples(epoch)
        return shuffled(rows, self._buffer, self._seed, epoch) if self._buffer > 1 else rows

    def _examples(self, epoch: int) -> Iterator[Example]:
        """The rows of an epoch: one dataset after the other, or mixed."""
        shares = self._args.interleave_prob
        if self._split != "train" or len(self._specs) < 2 or not shares:
            return itertools.chain.from_iterable(map(self._examples_of, range(len(self._specs))))
        return mixed_stream(
            self._examples_of, shares, seed=self._seed, epoch=epoch, strategy=self._args.stopping_strategy
        )

    def _examples_of(self, index: int) -> Iterator[Example]:
        rows = iterate_understood(self._records(self._specs[index]), self._plans[index], self._system, self._on_bad)
        return itertools.islice(rows, self._specs[index].count)

    def _records(self, spec: DatasetSpec) -> Iterator[Record]:
        if spec.kind == "local":
            return read_local(spec)
        if spec.kind == "hub":
            return stream_hub(spec, split=self._split)
        return read_procedural(spec, seed=data_seed(self._args))

    def _on_bad(self, bad: BadRow) -> None:
        if bad.damaged or self._args.strict:
            raise ConfigError(*first_few([bad]))
        self.report.skip(bad)

    def _plan(self) -> list[ColumnPlan]:
        renames = renames_of(self._args)
        peeked = [list(itertools.islice(self._records(spec), PEEKED_ROWS)) for spec in self._specs]
        damaged = [row for rows in peeked for row in rows if isinstance(row, BadRow) and row.damaged]
        if damaged:
            raise ConfigError(*first_few(damaged))
        columns = [filled_columns(rows) for rows in peeked]
        check_renames(renames, [name for filled, empty in columns for name in [*filled, *empty]])
        plans = []
        for spec, rows, (filled, _) in zip(self._specs, peeked, columns, strict=True):
            if not rows:
                raise ConfigError(f"{spec.flag}: {spec.text}: no rows: the dataset is empty; check the file")
            plan = plan_columns(filled, renames, purpose="prompt", flag=spec.flag, name=spec.name)
            self.report.mappings[spec.name] = plan.line
            plans.append(plan)
        return plans


def shuffled(rows: Iterator[Example], size: int, seed: int, epoch: int) -> Iterator[Example]:
    """Mixes a stream through a buffer of `size` rows; every row comes out exactly once."""
    random = generator(seed, epoch)
    buffer = list(itertools.islice(rows, size))
    for row in rows:
        place = int(random.integers(len(buffer)))
        yield buffer[place]
        buffer[place] = row
    for place in random.permutation(len(buffer)):
        yield buffer[place]


def open_prompts(
    args: PromptArguments,
    *,
    tokenize: Tokenize,
    max_prompt_length: int | None,
    truncation_strategy: str = "left",
    split: Split = "train",
    max_steps: int = -1,
) -> PromptSource:
    """The source that `--streaming` asks for, in the order of `--data_seed` and `--dataset_shuffle`.

    Args:
        args: the data settings.
        tokenize: a chat to the ids of its prompt, generation prompt included.
        max_prompt_length: longest prompt in tokens, None for no limit.
        truncation_strategy: what happens to longer ones: left, right or delete.
        split: which rows.
        max_steps: of the run; a stream has no length, so it must be positive with `--streaming`.

    Raises:
        ConfigError, ResourceError: as `load_prompts`; `--streaming` without `--max_steps`.
    """
    if not args.streaming:
        dataset = load_prompts(
            args,
            tokenize=tokenize,
            max_prompt_length=max_prompt_length,
            truncation_strategy=truncation_strategy,
            split=split,
        )
        stages = curriculum_stages(args, dataset) if isinstance(args, PromptArguments) else None
        return IndexedPrompts(dataset, data_seed(args), args.dataset_shuffle, stages)
    if split == "train" and max_steps < 1:
        raise ConfigError(f"--max_steps: {max_steps}: a stream has no length; give --max_steps with --streaming true")
    return StreamingPrompts(
        args,
        tokenize=tokenize,
        max_prompt_length=max_prompt_length,
        truncation_strategy=truncation_strategy,
        split=split,
    )
