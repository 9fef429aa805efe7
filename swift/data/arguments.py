"""Settings of datasets: selection of rows, meaning of columns, order of use."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from swift.flags import flag


@dataclass(kw_only=True)
class HubArguments:
    """The hub of ids that are not local paths."""

    GROUP: ClassVar[str] = "Data"

    use_hf: bool = flag(False, resume="free")
    """Whether hub ids mean Hugging Face instead of ModelScope. USE_HF=1 does the same."""


@dataclass(kw_only=True)
class DataArguments(HubArguments):
    """Rows for training and evaluation."""

    GROUP: ClassVar[str] = "Data"

    dataset: list[str] = flag([], resume="fixed")
    """Training data: `[hf::|ms::]id_or_path[:subset][#n]` or `reasoning_gym:<task>[#n]`. A path is a jsonl, json, csv
    or parquet file or a folder; `#n` takes n random rows, `#:10%` or `#100:200` those of that place."""

    val_dataset: list[str] = flag([], resume="free")
    """Evaluation data, in the form of `--dataset`."""

    split: str | None = flag(everyday=False, aliases=("dataset_train_split",), unset="train", resume="fixed")
    """Split of `--dataset` entries of a hub."""

    split_dataset_ratio: float = flag(0.0, at_least=0, below=1, resume="fixed")
    """Share of training rows split off for evaluation."""

    allow_media_urls: bool = flag(False, everyday=False, resume="free")
    """Whether images of rows are fetched from public addresses of the network."""

    columns: dict[str, Any] = flag({}, secret=False, resume="fixed")
    """Columns to rename, such as `{"answer":"solution"}`."""

    model_name: list[str] = flag([], everyday=False, resume="fixed")
    """Name for `{{NAME}}` in rows about the model, such as those of swift/self-cognition. Of two names, the first is
    for rows with `tag` zh."""

    model_author: list[str] = flag([], everyday=False, resume="fixed")
    """Name of the model's author for `{{AUTHOR}}`, likewise."""

    system: str | None = flag(unset="the chat template's own", resume="fixed")
    """System prompt: text, a text file or a shipped example. A row's own has precedence."""

    drop_duplicates: bool = flag(False, everyday=False, resume="fixed")
    """Whether of rows with the same content only the first is used."""

    strict: bool = flag(False, resume="fixed")
    """Whether the first bad row stops the run."""

    max_skipped_fraction: float = flag(0.2, at_least=0, at_most=1, everyday=False)
    """Maximum share of bad rows in a dataset."""

    dataset_shuffle: bool = flag(True, resume="fixed")
    """Whether each epoch has a new random order. If false, `#n` takes the first n rows."""

    interleave_prob: list[float] = flag(
        [], above=0, at_most=1, everyday=False, unset="all rows of each", resume="fixed"
    )
    """Share of the rows from each `--dataset`; they add up to 1."""

    stopping_strategy: Literal["first_exhausted", "all_exhausted"] = flag(
        "first_exhausted", everyday=False, needs="interleave_prob", resume="fixed"
    )
    """End of mixed datasets: when the first is exhausted, or when every row was used and shorter datasets repeated."""

    dataset_num_proc: int = flag(1, at_least=1, everyday=False, resume="free")
    """Number of processes that prepare rows."""

    seed: int = flag(42, at_least=0, at_most=2**32 - 1, group="Optimization", resume="fixed")
    """Seed of weights and sampling."""

    data_seed: int = flag(42, at_least=0, at_most=2**32 - 1, group="Optimization", everyday=False, resume="fixed")
    """Seed of row selection and row order, whatever `--seed` is."""

    def notes(self) -> Iterator[str]:
        if self.val_dataset and self.split_dataset_ratio:
            yield f"--split_dataset_ratio: {self.split_dataset_ratio:g}: no effect with --val_dataset"
        if self.strict and self.max_skipped_fraction != DataArguments.max_skipped_fraction:
            yield f"--max_skipped_fraction: {self.max_skipped_fraction:g}: no effect with --strict true"

    def problems(self) -> Iterator[str]:
        if wrong := [old for old, new in self.columns.items() if not isinstance(new, str) or not new]:
            yield (
                f"--columns: {json.dumps(self.columns)}: {wrong[0]} must be renamed to a name; "
                'write --columns \'{"answer":"solution"}\''
            )
        for name in ("model_name", "model_author"):
            if len(names := getattr(self, name)) > 2:
                yield f"--{name}: {' '.join(names)}: {len(names)} names; give one, or a Chinese and an English one"
        shares = self.interleave_prob
        shown = " ".join(f"{share:g}" for share in shares)
        if shares and self.dataset and len(shares) != len(self.dataset):
            yield (
                f"--interleave_prob: {shown}: {len(shares)} shares for {len(self.dataset)} entries of --dataset; "
                "give one each"
            )
        elif shares and abs(sum(shares) - 1) > 1e-6:
            yield f"--interleave_prob: {shown}: adds up to {sum(shares):g}; shares add up to 1"


@dataclass(kw_only=True)
class StreamArguments(DataArguments):
    """Rows that may be read while training."""

    streaming: bool = flag(False, everyday=False, resume="fixed")
    """Whether rows are read while training. Needs `--max_steps`."""

    shuffle_buffer_size: int = flag(1000, at_least=1, everyday=False, needs="streaming", resume="fixed")
    """Number of rows among which a stream is shuffled."""

    def problems(self) -> Iterator[str]:
        if self.drop_duplicates and self.streaming:
            yield "--drop_duplicates: true: rows of a stream are not known before it is read; use --streaming false"

    def notes(self) -> Iterator[str]:
        if self.streaming and self.dataset_num_proc > 1:
            yield f"--dataset_num_proc: {self.dataset_num_proc}: no effect on a stream, which one process reads"
        given = self.shuffle_buffer_size != StreamArguments.shuffle_buffer_size
        if given and self.streaming and not self.dataset_shuffle:
            yield f"--shuffle_buffer_size: {self.shuffle_buffer_size}: no effect with --dataset_shuffle false"


@dataclass(kw_only=True)
class PromptArguments(StreamArguments):
    """Prompts, and the order in which they are used."""

    curriculum_column: str | None = flag(everyday=False, unset="no curriculum", resume="fixed")
    """Numeric column that orders the rows of each epoch, such as a difficulty."""

    curriculum_order: Literal["ascending", "descending"] = flag(
        "ascending", everyday=False, needs="curriculum_column", resume="fixed"
    )
    """Order of `--curriculum_column`."""

    curriculum_bins: int | None = flag(
        at_least=1, everyday=False, needs="curriculum_column", unset="one per distinct number", resume="fixed"
    )
    """Number of stages of about equal size."""

    def problems(self) -> Iterator[str]:
        if self.curriculum_column is not None and self.streaming:
            yield (
                f"--curriculum_column: {self.curriculum_column}: a stream is not known before it is read, so it cannot "
                "be ordered; use --streaming false, or sort the file and give --dataset_shuffle false"
            )
