"""Answers of the rows of a distillation, as completions of their prompts that nobody samples.

A chat is rendered with its answer and tokenised once, as in TRL; the answer begins at the first token that differs from
the prompt alone (with its generation prompt).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from swift.data.chats import ANSWER
from swift.data.prompts import Tokenizer
from swift.errors import RefusedChat, counted
from swift.rollout.samples import TrainSample
from swift.trainers.preferences.rows import EMPTY, NO_LOSS, num_shared
from swift.types import Completion, Episode, Prompt

if TYPE_CHECKING:
    from collections.abc import Sequence

    from swift.data.loading import Example, Purpose
    from swift.data.messages import Message
    from swift.models.template import Template

MOST_KEPT = 4096
"""Answers whose token ids stay in memory; those of others are made again."""


@dataclass(eq=False)
class Answers:
    """Token ids of prompts with their answers."""

    template: Template

    def __post_init__(self) -> None:
        self._kept: dict[str, tuple[list[int], int]] = {}

    def ids(self, row: Prompt | Example) -> tuple[list[int], int]:
        """Token ids of a row, and how many of them are the prompt.

        Raises:
            RefusedChat: the template does not take the chat, or there is no answer to learn from.
        """
        answer = row.columns[ANSWER]
        if not answer.get("loss", True):
            raise RefusedChat(NO_LOSS)
        name = row.prompt_id if isinstance(row, Prompt) else row.digest
        if name not in self._kept:
            if len(self._kept) >= MOST_KEPT:
                self._kept.clear()
            self._kept[name] = self._encoded(row.messages, answer, row.columns.get("tools"))
        return self._kept[name]

    def completion(self, request_id: str, prompt: Prompt) -> Completion:
        """The answer in place of a sample."""
        ids, start = self.ids(prompt)
        return given_completion(request_id, prompt, ids[:start], ids[start:], self.template)

    def sample(self, prompt: Prompt) -> TrainSample:
        """The answer for an evaluation."""
        ids, start = self.ids(prompt)
        unknown = np.full(len(ids) - start, np.nan, dtype=np.float32)
        split = np.asarray(ids[:start], dtype=np.int32), np.asarray(ids[start:], dtype=np.int32)
        return TrainSample(0, *split, unknown, np.ones(len(ids) - start, dtype=np.bool_), 0.0)

    def _encoded(self, messages: list[Message], answer: Message, tools: Any) -> tuple[list[int], int]:
        chat = [*messages, answer]
        ids = self.template.encode_pieces([self.template.render(chat, tools=tools)], chat)[0]
        start = num_shared(self.template.encode_prompt(messages, tools), ids)
        if start == len(ids):
            raise RefusedChat(EMPTY)
        return ids, start


def given_completion(
    request_id: str, prompt: Prompt, prompt_ids: list[int], ids: list[int], template: Template
) -> Completion:
    """Tokens that the policy has not sampled, as a completion of a prompt."""
    text = template.decode(ids)
    chat = [*prompt.messages, {"role": "assistant", "content": text}]
    episode = Episode(chat, len(prompt.messages), 1, prompt_ids=prompt_ids, logprobs_known=False)
    return Completion(request_id, ids, [math.nan] * len(ids), "stop", text=text, episode=episode)


@dataclass(frozen=True, slots=True)
class AnswerTokenizer(Tokenizer):
    """Also leaves out rows that are over a limit with their answer.

    limit: of the prompt. whole: of prompt and answer.
    """

    deleted_for: ClassVar[str] = "the length of prompt and answer (--max_length)"
    purpose: ClassVar[Purpose] = "taught"

    answers: Answers | None = None
    whole: int | None = None

    @property
    def deletes(self) -> bool:
        """See `Tokenizer`."""
        return self.limit is not None or self.whole is not None

    def ids(self, example: Example) -> list[int]:
        """See `Tokenizer`."""
        assert self.answers is not None
        try:
            self.answers.ids(example)
        except RefusedChat as error:
            raise RefusedChat(*(f"{example.origin}: {problem}" for problem in error.problems)) from error
        return Tokenizer.ids(self, example)

    def too_long(self, example: Example, ids: Sequence[int]) -> bool:
        """See `Tokenizer`."""
        assert self.answers is not None
        prompt, whole = self.limit, self.whole
        if prompt is not None and len(ids) > prompt:
            return True
        return whole is not None and len(self.answers.ids(example)[0]) > whole

    def none_left(self, examples: Sequence[Example], all_ids: Sequence[Sequence[int]]) -> str:
        """See `Tokenizer`."""
        assert self.answers is not None
        shortest = min(len(self.answers.ids(example)[0]) for example in examples)
        return (
            f"--max_length: {self.whole or self.limit}: all of {counted(len(all_ids), 'row')} longer, the shortest has "
            f"{counted(shortest, 'token')}; raise it, or shorten them"
        )
