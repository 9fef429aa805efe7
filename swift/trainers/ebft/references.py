"""References of structured EBFT: the column `ground_truth` as token ids, made once, and what follows from their length.

Ids are those of the text alone, without special tokens and without a final stop token; they stand behind the ids of the
prompt as completions do.
"""

from __future__ import annotations

import functools
import json
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from swift.data.prompts import Tokenizer
from swift.errors import ConfigError, counted
from swift.trainers.ebft.turns import COLUMN as TURNS
from swift.trainers.ebft.turns import conversation, remaining_turns

if TYPE_CHECKING:
    from swift.data.loading import Example
    from swift.models.template import Template
    from swift.types import Prompt

COLUMN = "ground_truth"

LEAST_TOKENS = 64
"""Of a completion whose length adapts to its reference."""

MOST_KEPT = 4096
"""References whose token ids stay in memory; those of others are made again."""


@dataclass(eq=False)
class References:
    """Token ids of references.

    template: of the policy. max_tokens: `--max_completion_length`. multiplier: completions are at most so many times as
    long as their reference; None leaves them at `max_tokens`. conversations: whether any row so far has further turns;
    None until one has, or `settle` was called.
    """

    template: Template
    max_tokens: int
    multiplier: float | None = None
    conversations: bool | None = None

    def __post_init__(self) -> None:
        self._kept = functools.lru_cache(MOST_KEPT)(self._encoded)

    def of(self, row: Prompt | Example) -> list[int]:
        """The reference of a row, with its further turns.

        Raises:
            ConfigError: there is none.
        """
        return self._made(row)[0].tolist()

    def learnt(self, row: Prompt | Example) -> list[bool]:
        """Which of its tokens the assistant wrote."""
        return [bool(flag) for flag in self._made(row)[1]]

    def settle(self) -> None:
        """The rows seen so far decide whether samples answer further turns; later ones of a stream must be alike."""
        self.conversations = bool(self.conversations)

    def _made(self, row: Prompt | Example) -> tuple[array[int], bytes]:
        text, turns = row.columns.get(COLUMN), remaining_turns(row.columns)
        if turns and self.conversations is False:
            raise ConfigError(
                f"--dataset: {TURNS}: not in the first rows of a stream, which tell whether samples answer further "
                "turns; put a row with them first, or leave --streaming out"
            )
        self.conversations = bool(turns) or self.conversations
        if not isinstance(text, str) or not text:
            raise ConfigError(
                f"--dataset: {COLUMN}: {'missing' if text is None else 'not a text, or empty'}: EBFT compares "
                f"completions with it; give each row the text, or name its column: "
                f"""--columns '{{"answer": "{COLUMN}"}}'"""
            )
        return self._kept(text, json.dumps([row.messages, turns] if turns else [[], []]))

    def _encoded(self, text: str, rest: str) -> tuple[array[int], bytes]:
        """Token ids of an answer and the turns after it, and which of them the assistant wrote."""
        messages, turns = json.loads(rest)
        ids, own = conversation(self.template, messages, text, turns)
        ids = self.without_stop(ids)
        if not ids:
            raise ConfigError(f"--dataset: {COLUMN}: {text!r}: is nothing but a stop token; give a text")
        return array("i", ids), bytes(own[: len(ids)])

    def without_stop(self, ids: Sequence[int]) -> list[int]:
        """Token ids without a final stop token."""
        return list(ids[:-1] if ids and ids[-1] in self.template.stop_token_ids else ids)

    def max_new_tokens(self, prompt: Prompt) -> int:
        """Length limit of the completions of a prompt: `min(max_tokens, max(64, floor(multiplier * reference)))`."""
        if self.multiplier is None:
            return self.max_tokens
        return min(self.max_tokens, max(LEAST_TOKENS, int(self.multiplier * len(self.of(prompt)))))


@dataclass(frozen=True, slots=True)
class ReferenceTokenizer(Tokenizer):
    """Also leaves out rows whose reference is longer than a completion can be."""

    deleted_for: ClassVar[str] = "the length of the prompt (--max_length) or of the reference (--max_completion_length)"

    strategy: str = "delete"
    references: References | None = None

    @property
    def deletes(self) -> bool:
        """See `Tokenizer`."""
        return True

    def none_left(self, examples: Sequence[Example], all_ids: Sequence[Sequence[int]]) -> str:
        """See `Tokenizer`."""
        assert self.references is not None
        limits = self.limit, self.references.max_tokens
        lengths = [(len(ids), len(self.references.of(example))) for example, ids in zip(examples, all_ids, strict=True)]
        names = ("--max_length", "prompt"), ("--max_completion_length", "reference")
        longer = [
            f"{name} {limit}: {counted(sum(length > limit for length in of), noun)} longer, the shortest has "
            f"{counted(min(of), 'token')}"
            for (name, noun), limit, of in zip(names, limits, zip(*lengths, strict=True), strict=True)
            if limit is not None and max(of) > limit
        ]
        return (
            f"--dataset: none of {counted(len(lengths), 'row')} is left: {'; '.join(longer)}; raise it, or shorten them"
        )

    def too_long(self, example: Example, ids: Sequence[int]) -> bool:
        """See `Tokenizer`."""
        assert self.references is not None
        try:
            reference = self.references.of(example)
        except ConfigError as error:
            raise ConfigError(*(f"{example.origin}: {problem}" for problem in error.problems)) from error
        return len(reference) > self.references.max_tokens or Tokenizer.too_long(self, example, ids)
