"""Rows as prompts with token ids, ready to be sampled.

A prompt is tokenised when it is first used, and its ids are kept in four bytes a token; only `truncation_strategy
delete` needs all lengths at the start. A prompt's id depends on its content alone, never on lengths or order.
"""

from __future__ import annotations

import hashlib
import multiprocessing
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from swift.data.loading import Example, Purpose, Rows, Split, load_rows
from swift.errors import ConfigError, RefusedChat, counted
from swift.types import Prompt

if TYPE_CHECKING:
    from swift.data.arguments import DataArguments

Tokenize = Callable[..., list[int]]
"""Maps a chat, and a row's `tools` if it has any, to the token ids of the prompt, generation prompt included."""

_PARALLEL_FROM = 1000  # rows; below this, starting processes costs more than it saves


@dataclass(frozen=True, slots=True)
class Tokenizer:
    """Token ids of a prompt under a length limit.

    tokenize: see `Tokenize`. limit: in tokens; None means none. strategy: "left" drops the first tokens of a longer
    prompt, "right" the last, "delete" the row. sees: whether prompts may have images, which are never cut.
    """

    deleted_for: ClassVar[str] = "the length of the prompt"
    """The reason why rows are left out, for the report."""
    purpose: ClassVar[Purpose] = "prompt"
    """How rows are read."""

    tokenize: Tokenize
    limit: int | None = None
    strategy: str = "left"
    sees: bool = False

    def ids(self, example: Example) -> list[int]:
        """All token ids of the row's prompt, not cut. Raises RefusedChat, ConfigError: at `file:line`."""
        try:
            return self.tokenize(example.messages, *([tools] if (tools := example.columns.get("tools")) else []))
        except ConfigError as error:
            raise type(error)(*(f"{example.origin}: {problem}" for problem in error.problems)) from error

    @property
    def deletes(self) -> bool:
        """Whether rows over the limit are left out."""
        return self.strategy == "delete" and self.limit is not None

    def too_long(self, example: Example, ids: Sequence[int]) -> bool:
        """Whether a row whose prompt has these ids is over the limit."""
        return self.limit is not None and len(ids) > self.limit

    def none_left(self, examples: Sequence[Example], all_ids: Sequence[Sequence[int]]) -> str:
        """The error message for a dataset whose rows are all left out. all_ids: of their prompts, uncut."""
        return (
            f"--max_length: {self.limit}: all of {counted(len(all_ids), 'prompt')} longer, the shortest has "
            f"{counted(min(map(len, all_ids)), 'token')}; raise --max_length or use --truncation_strategy left"
        )

    def cut(self, ids: list[int]) -> list[int]:
        """`ids`, cut to the limit. Raises RefusedChat: they stand for images, too."""
        if self.limit is None or len(ids) <= self.limit:
            return ids
        if any(token < 0 for token in ids):
            raise RefusedChat(
                f"--max_length: {self.limit}: a prompt with images of {len(ids)} tokens cannot be cut; raise it, or "
                "use --truncation_strategy delete"
            )
        return ids[: self.limit] if self.strategy == "right" else ids[-self.limit :]


class PromptDataset(Sequence[Prompt]):
    """The prompts of one split, by index.

    Args:
        rows: with purpose "prompt".
        tokenizer: makes the ids and has the limit.
        num_proc: number of processes that tokenise if all lengths are needed at the start.

    Raises:
        ConfigError: `delete` leaves no row of a dataset that had some.
    """

    def __init__(self, rows: Rows, tokenizer: Tokenizer, *, num_proc: int = 1) -> None:
        self.report = rows.report
        self.report.deleted_for = tokenizer.deleted_for
        self.examples = rows.examples
        self._tokenizer = tokenizer
        self._ids: list[array[int] | None] = [None] * len(rows.examples)
        if tokenizer.deletes:
            self._delete_long(num_proc)
        self._digests = [example.digest for example in self.examples]

    def __len__(self) -> int:
        return len(self.examples)

    def __getitem__(self, index: Any) -> Any:
        example, ids = self.examples[index], self._ids[index]
        if ids is None:
            found = self._tokenizer.ids(example)
            if self._tokenizer.too_long(example, found):
                self.report.num_truncated += 1
                found = self._tokenizer.cut(found)
            ids = self._ids[index] = array("i", found)
        return Prompt(self._digests[index], example.messages, ids.tolist(), example.columns, example.is_chat)

    @property
    def fingerprint(self) -> str:
        """Digest of all rows in their order: two datasets with the same one result in the same run."""
        return hashlib.blake2b("".join(self._digests).encode(), digest_size=8).hexdigest()

    def _delete_long(self, num_proc: int) -> None:
        all_ids = _tokenize_all(self._tokenizer, self.examples, num_proc)
        pairs = zip(self.examples, all_ids, strict=True)
        kept = [
            index for index, (row, ids) in enumerate(pairs) if ids is None or not self._tokenizer.too_long(row, ids)
        ]
        if all_ids and not kept:
            raise ConfigError(self._tokenizer.none_left(self.examples, [ids for ids in all_ids if ids is not None]))
        self.examples = [self.examples[index] for index in kept]
        self._ids = [all_ids[index] for index in kept]
        self.report.num_deleted = len(all_ids) - len(kept)


def load_prompts(args: DataArguments, tokenizer: Tokenizer, split: Split = "train") -> PromptDataset:
    """The prompts of `--dataset` ("train") or of `--val_dataset` or the split-off part ("val", may be empty)."""
    rows = load_rows(args, split, purpose=tokenizer.purpose, images=tokenizer.sees)
    return PromptDataset(rows, tokenizer, num_proc=args.dataset_num_proc)


_inherited: tuple[Tokenizer, Sequence[Example]]


def _tokenize_all(tokenizer: Tokenizer, examples: Sequence[Example], num_proc: int) -> list[array[int] | None]:
    """The uncut ids of every row, in order; None of one that the template refuses, which is found when it is drawn.

    `num_proc` only changes how long it takes.
    """
    global _inherited
    _inherited = tokenizer, examples
    if num_proc < 2 or len(examples) < _PARALLEL_FROM:
        return [_inherited_ids(index) for index in range(len(examples))]
    # Forked processes inherit tokenizer and rows: chat templates and fast tokenizers do not always pickle.
    with multiprocessing.get_context("fork").Pool(num_proc) as pool:
        return pool.map(_inherited_ids, range(len(examples)))


def _inherited_ids(index: int) -> array[int] | None:
    tokenizer, examples = _inherited
    try:
        return array("i", tokenizer.ids(examples[index]))
    except RefusedChat:
        return None
