"""Sources of prompts for the scheduler: a dataset in memory, or a stream of rows.

Both are endless and save a position of a few numbers. `IndexedPrompts` jumps to a position; `StreamingPrompts` reads up
to it without tokenising the rows before it.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from typing import TYPE_CHECKING, Any

from swift.data.arguments import PromptArguments
from swift.data.curriculum import curriculum_stages
from swift.data.loading import Example
from swift.data.prompts import PromptDataset, Tokenizer, load_prompts
from swift.data.records import BadRow
from swift.data.report import SHOWN, DataReport
from swift.data.sampler import RowOrder
from swift.data.stream import ExampleStream
from swift.errors import RefusedChat
from swift.types import Prompt

if TYPE_CHECKING:
    import numpy as np

logger = logging.getLogger(__name__)


class IndexedPrompts(RowOrder):
    """The prompts of a dataset in memory, without end; `size` per epoch.

    Args:
        dataset: at least one prompt, else a ConfigError.
        seed: of the epochs' permutations.
        shuffle: False keeps the order of the dataset.
        stages: of a curriculum; see `RowOrder`.
        strict: whether a row that the chat template refuses is an error; otherwise it is skipped and counted.
    """

    def __init__(
        self,
        dataset: PromptDataset,
        seed: int,
        shuffle: bool,
        stages: np.ndarray | None = None,
        *,
        strict: bool = False,
    ) -> None:
        super().__init__(len(dataset), seed=seed, shuffle=shuffle, stages=stages)
        self.dataset, self.report, self._strict = dataset, dataset.report, strict

    def next(self) -> Prompt:
        """The next prompt. Raises RefusedChat: `strict`, or there is none in as many rows as an epoch has."""
        for left in reversed(range(self.size)):
            index = self.draw()
            try:
                prompt: Prompt = self.dataset[index]
            except RefusedChat as error:
                if self._strict or not left:
                    raise
                _skip_refused(self.report, self.dataset.examples[index], error)
            else:
                return prompt
        raise AssertionError("there are rows")

    def _settings(self) -> dict[str, Any]:
        return {**super()._settings(), "fingerprint": self.dataset.fingerprint}


class StreamingPrompts(ExampleStream[Prompt]):
    """Prompts of rows that are read as they are needed; those over the limit are cut, or with `delete` skipped.

    Each epoch reads the same rows, so the report has the largest number of any epoch.
    """

    size: int | None = None
    """The length of a stream is not known."""

    def __init__(self, args: PromptArguments, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        super().__init__(args, self._prompt, purpose=tokenizer.purpose, images=tokenizer.sees)
        self.report.deleted_for = tokenizer.deleted_for

    def state_dict(self) -> dict[str, Any]:
        """Position, and the numbers of rows over the limit."""
        most = {"deleted": self.report.num_deleted, "truncated": self.report.num_truncated}
        return {**super().state_dict(), **most, "in_epoch": dict(self._in_epoch)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See `ExampleStream.load_state_dict`.

        A checkpoint may hold prompts of an earlier epoch, whose images are those of rows that this one has not reached:
        in a later epoch than the first all rows are read once.
        """
        if self._tokenizer.sees and state["epoch"]:
            for index in range(len(self._specs)):
                deque(self._examples_of(index), maxlen=0)
        super().load_state_dict(state)
        self.report.num_deleted, self.report.num_truncated = state.get("deleted", 0), state.get("truncated", 0)
        self._in_epoch.update(state.get("in_epoch", {}))

    def _enter(self, epoch: int, drawn: int) -> None:
        super()._enter(epoch, drawn)
        self._in_epoch = Counter[str]()

    def _prompt(self, example: Example) -> Prompt | None:
        try:
            ids = self._tokenizer.ids(example)
        except RefusedChat as error:
            if self._args.strict:
                raise
            _skip_refused(self.report, example, error)
            return None
        if self._tokenizer.too_long(example, ids):
            self._in_epoch["deleted" if self._tokenizer.deletes else "truncated"] += 1
            self.report.num_deleted = max(self.report.num_deleted, self._in_epoch["deleted"])
            self.report.num_truncated = max(self.report.num_truncated, self._in_epoch["truncated"])
            if self._tokenizer.deletes:
                return None
            ids = self._tokenizer.cut(ids)
        return Prompt(example.digest, example.messages, ids, example.columns, example.is_chat)


def _skip_refused(report: DataReport, example: Example, error: RefusedChat) -> None:
    """Counts a row that the chat template refuses during the run, and warns of the first few."""
    before = report.num_skipped
    report.skip(BadRow(example.origin, error.problems[0].removeprefix(f"{example.origin}: ")))
    if before < report.num_skipped <= SHOWN:
        logger.warning("%s: passed over, as --strict is false", error.problems[0])


class PlaceholderPrompts:
    """Always the same prompt, for runs whose environment chooses the prompts and saves its own position.

    The scheduler launches it, and start-up checks sample from it.
    """

    size: int | None = None
    """There are no epochs."""

    def __init__(self, prompt: Prompt) -> None:
        self.report = DataReport()
        self._prompt = prompt

    def next(self) -> Prompt:
        """The prompt."""
        return self._prompt

    def skip_to_epoch_end(self) -> None:
        """There are no epochs."""

    def state_dict(self) -> dict[str, Any]:
        """Nothing."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing."""


PromptSource = IndexedPrompts | StreamingPrompts | PlaceholderPrompts
"""An endless, deterministic, resumable supply of prompts."""


def open_prompts(args: PromptArguments, tokenizer: Tokenizer) -> PromptSource:
    """The source that `--streaming` selects, in the order of `--data_seed` and `--dataset_shuffle`."""
    if args.streaming:
        return StreamingPrompts(args, tokenizer)
    dataset = load_prompts(args, tokenizer)
    stages = None if args.curriculum_column is None else curriculum_stages(args, dataset.examples)
    return IndexedPrompts(dataset, args.data_seed, args.dataset_shuffle, stages, strict=args.strict)
