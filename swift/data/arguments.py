"""Settings of datasets: which rows, what their columns mean, in which order they are used."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

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

    streaming: bool = flag(False, everyday=False)
    """Read rows while training instead of before it. Needs `--max_steps`."""

    shuffle_buffer_size: int = flag(1000, at_least=1, everyday=False, needs="streaming")
    """Rows among which a stream is shuffled."""

    dataset_num_proc: int = flag(1, at_least=1, everyday=False)
    """Processes that prepare the rows."""

    seed: int = flag(42, at_least=0, group="Optimization")
    """Seed of everything random in the run: fresh weights, sampling, data order."""

    data_seed: int | None = flag(at_least=0, group="Optimization", everyday=False)
    """Seed of row selection and row order."""
