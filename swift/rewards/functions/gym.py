"""Scores of procedurally generated tasks by the scorer of reasoning-gym, which generated them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from swift.plugin.registry import ORM, orms
from swift.rewards.functions.text import answer_block

_COMPARES_TUPLES = frozenset({"arc_agi", "rearc"})
"""Tasks whose scorers compare parts of the metadata with tuples, which JSON has turned into lists."""


@orms.register("reasoning_gym")
class ReasoningGym(ORM):
    """The library's own score (usually 0 to 1) for the row's task, which `metadata` names.

    The answer is the last `<answer>` block of the completion, or the stripped completion without one.
    A row that is not a task of the library gets None.
    """

    def __init__(self) -> None:
        super().__init__()
        self._scorers: dict[str, Any] = {}

    def __call__(
        self, completions: list[str], answer: list[Any], metadata: list[Any], **kwargs: Any
    ) -> list[float | None]:
        """One score per completion; `answer` and `metadata` are the columns of the generated row."""
        rows = zip(completions, answer, metadata, strict=True)
        return [self._score(text, truth, _as_mapping(meta)) for text, truth, meta in rows]

    def _score(self, completion: str, truth: Any, metadata: Mapping[str, Any] | None) -> float | None:
        if metadata is None or not isinstance(metadata.get("source_dataset"), str):
            return None
        block = answer_block(completion)
        answer = (completion if block is None else block).strip()
        scorer = self._scorer(metadata["source_dataset"])
        if metadata["source_dataset"] in _COMPARES_TUPLES:
            metadata = {key: _tuples(value) for key, value in metadata.items()}
        return float(scorer(answer=answer, entry={"question": "", "answer": truth, "metadata": dict(metadata)}))

    def _scorer(self, task: str) -> Any:
        if task not in self._scorers:
            import reasoning_gym

            self._scorers[task] = reasoning_gym.get_score_answer_fn(task)
        return self._scorers[task]


def _as_mapping(metadata: Any) -> Mapping[str, Any] | None:
    """`metadata` as a mapping: a dictionary, or its JSON text (what csv and parquet files hold)."""
    if isinstance(metadata, str):
        try:
            metadata = json.loads(metadata)
        except ValueError:
            return None
    return metadata if isinstance(metadata, Mapping) else None


def _tuples(value: Any) -> Any:
    return tuple(_tuples(item) for item in value) if isinstance(value, list) else value
