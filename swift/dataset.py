"""ms-swift's names for datasets that plugins register: `register_dataset(DatasetMeta(..., preprocess_func=...))`."""

from __future__ import annotations

import ast
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from swift.plugin.datasets import register_preprocessor

ROLES = ("user", "assistant")


class RowPreprocessor:
    """Turns a row into one with columns that swift reads, such as `messages`; None leaves it out."""

    def __init__(self, *, columns: dict[str, str] | None = None, **kwargs: Any) -> None:
        self.columns = dict(columns or {})

    def preprocess(self, row: dict[str, Any]) -> dict[str, Any] | None:
        """The row to use."""
        return row

    def __call__(self, row: dict[str, Any]) -> dict[str, Any] | None:
        """`preprocess` of a row under the names that `columns` gives."""
        return self.preprocess({self.columns.get(name, name): value for name, value in row.items()})


MEANINGS = {
    "system": "system system_prompt",
    "query": "query prompt input instruction question problem",
    "response": "response answer output targets target answer_key answers solution text completion content",
}
"""Column of a chat -> names of it in the rows of others."""


class ResponsePreprocessor(RowPreprocessor):
    """Turns a row with a question and an answer into `messages`, with `history` and `system` if it has them.

    Names of `MEANINGS` in upper case count as well. Of two columns with the same meaning, one of them by `columns`
    perhaps, none is renamed but for that.
    """

    def __call__(self, row: dict[str, Any]) -> dict[str, Any] | None:
        """See `RowPreprocessor`."""
        columns = self.columns.copy()
        for meaning, names in MEANINGS.items():
            given = {name for name, target in self.columns.items() if target == meaning and name in row}
            present = given | {name for name in row if name.lower() in names.split()}
            columns |= dict.fromkeys(present, meaning) if len(present) == 1 else {}
        return self.preprocess({columns.get(name, name): value for name, value in row.items()})

    def preprocess(self, row: dict[str, Any]) -> dict[str, Any] | None:
        """The row with its chat; the first of several answers."""
        system, query, answer, history = (row.pop(name, None) for name in ("system", "query", "response", "history"))
        answer = answer[0] if isinstance(answer, list) else answer
        history = ast.literal_eval(history) if isinstance(history, str) else history
        turns = [("system", system), *(pair for turn in history or [] for pair in zip(ROLES, turn, strict=True))]
        turns += [("user", query), ("assistant", answer)]
        return {**row, "messages": [{"role": role, "content": text} for role, text in turns if text is not None]}


def load_dataset(*_: Any, **__: Any) -> Any:
    """For files that import it; they run inside of commands, which read rows themselves."""
    raise NotImplementedError("swift.dataset.load_dataset: rows are read by commands; give --dataset to swift sft")


@dataclass
class DatasetMeta:
    """A dataset of ModelScope, of Hugging Face, or of a file, and what its rows become; other fields are not used."""

    ms_dataset_id: str | None = None
    hf_dataset_id: str | None = None
    dataset_path: str | None = None
    dataset_name: str | None = None
    preprocess_func: Callable[[dict[str, Any]], dict[str, Any] | None] = field(default_factory=RowPreprocessor)
    subsets: Sequence[Any] = ("default",)
    split: Sequence[str] = ("train",)
    tags: Sequence[str] = ()
    help: str | None = None
    huge_dataset: bool = False


def register_dataset(dataset_meta: DatasetMeta, *, exist_ok: bool = True) -> None:
    """Let `preprocess_func` read the rows of a dataset, by any of its names."""
    meta = dataset_meta
    names = (meta.ms_dataset_id, meta.hf_dataset_id, meta.dataset_path, meta.dataset_name)
    register_preprocessor([name for name in names if name], meta.preprocess_func)
