"""Settings of datasets: which rows, what their columns mean, in which order they are used."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from swift.flags import flag


@dataclass(kw_only=True)
class HubArguments:
    """Where ids that are not local paths come from."""

    GROUP: ClassVar[str] = "Data"

    use_hf: bool = flag(False)
    """Take hub ids of models and datasets from Hugging Face instead of ModelScope. The environment variable
    USE_HF=1 does the same."""


@dataclass(kw_only=True)
class DataArguments(HubArguments):
    """Rows for training and evaluation."""

    GROUP: ClassVar[str] = "Data"

    dataset: list[str] = flag([])
    """Training data, one or several of `[hf::|ms::]id_or_path[:subset][#n]` or `reasoning_gym:<task>[#n]`. A
    path is a jsonl, json, csv or parquet file or a folder of them; `#n` takes n random rows."""

    val_dataset: list[str] = flag([])
    """Evaluation data, written like `--dataset`."""

    split_dataset_ratio: float = flag(0.0, at_least=0, below=1)
    """Share of the training rows split off for evaluation when there is no `--val_dataset`. The split is
    written to val_dataset.jsonl; 3.x used 0.01."""

    columns: dict[str, Any] = flag({})
    """Columns to rename, as JSON such as `{"answer":"solution"}`. Every other column keeps its name and reaches
    the reward functions under it."""

    system: str | None = flag(unset="the chat template's own")
    """System prompt, as text or the path of a text file. A row's own system prompt wins; a missing .txt or .md
    file is looked up among the shipped examples."""

    strict: bool = flag(False)
    """Stop at the first bad row instead of skipping and counting it."""

    dataset_shuffle: bool = flag(True)
    """Visit the rows in random order, new in each epoch. false also makes `#n` take the first n rows."""

    interleave_prob: list[float] = flag([], above=0, at_most=1, everyday=False)
    """Shares of the rows that come from each `--dataset`, adding up to 1; without it all rows of all are used."""

    stopping_strategy: Literal["first_exhausted", "all_exhausted"] = flag(
        "first_exhausted", everyday=False, needs="interleave_prob"
    )
    """Where mixed datasets end: with the first one that has no row left, or once every row of all was used, the
    shorter ones repeated."""

    dataset_num_proc: int = flag(1, at_least=1, everyday=False)
    """Processes that prepare the rows."""

    seed: int = flag(42, at_least=0, group="Optimization")
    """Seed of everything random in the run: fresh weights, sampling, data order."""

    data_seed: int | None = flag(at_least=0, group="Optimization", everyday=False)
    """Seed of row selection and row order."""

    def problems(self) -> Iterator[str]:
        """What is wrong with these settings, one line each."""
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
class PromptArguments(DataArguments):
    """Rows that completions are sampled for, and the order in which they are used."""

    streaming: bool = flag(False, everyday=False)
    """Read rows while training instead of before it. Needs `--max_steps`."""

    shuffle_buffer_size: int = flag(1000, at_least=1, everyday=False, needs="streaming")
    """Rows among which a stream is shuffled."""

    curriculum_column: str | None = flag(everyday=False, unset="no curriculum")
    """Column of numbers by which the rows of each epoch are ordered, such as a difficulty. With `--dataset_shuffle`
    rows of one stage are in random order, new in each epoch."""

    curriculum_order: Literal["ascending", "descending"] = flag("ascending", everyday=False, needs="curriculum_column")
    """Whether small or large numbers of `--curriculum_column` come first."""

    curriculum_bins: int | None = flag(
        at_least=1, everyday=False, needs="curriculum_column", unset="each different number is a stage"
    )
    """Stages of about equally many rows, instead of one for each different number."""

    def problems(self) -> Iterator[str]:
        """What is wrong with these settings, one line each."""
        if self.curriculum_column is not None and self.streaming:
            yield (
                f"--curriculum_column: {self.curriculum_column}: a stream is not known before it is read, so it cannot "
                "be ordered; use --streaming false, or sort the file and give --dataset_shuffle false"
            )
