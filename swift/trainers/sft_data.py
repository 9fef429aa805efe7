"""Supervised rows as token ids and labels: by default the loss covers the assistant turns.

A chat that is too long is left out: cut, it would train the model to stop in mid-sentence. `--truncation_strategy` cuts
it all the same. A document (`swift.data.texts`) has no template: its text, and the end-of-text token.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from swift.errors import RefusedChat
from swift.trainers.loss_weights import named, parts_of, with_weight
from swift.trainers.rows import Encoder, counts

if TYPE_CHECKING:
    from swift.data.loading import Example

NO_ANSWER = "no assistant turn to learn from"
TOO_SHORT = "shorter than min_length"
NOTHING_LEFT = "no token to learn from within max_length"


@dataclass(frozen=True)
class ChatEncoder(Encoder):
    """Encodes a chat or a document as a training example; see `Encoder`.

    loss: the tokens that the loss counts, in terms of `--loss_scale`. cut: what happens to rows above `max_length`, in
    terms of `--truncation_strategy`. least: tokens of a row.
    """

    loss: str = "default"
    cut: str = "delete"
    least: int = 0

    columns: ClassVar = {"input_ids": "ids", "labels": "ids"}

    def inputs(self, example: Example) -> Iterator[list[Any]]:
        """See `Encoder`."""
        yield [example.messages, example.columns.get("tools")]

    def encode(
        self, messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]] | None = None
    ) -> dict[str, Any]:
        """`input_ids` and `labels` of equal length; see `Encoder`.

        Raises:
            ConfigError: the template cannot mark assistant turns; see `Template`.
        """
        if len(messages) == 1 and messages[0]["role"] == "assistant":
            ids = self.template.encode_document(messages[0]["content"])
            mask = [1] * len(ids)
        else:
            ids, mask = self._chat(messages, tools)
        if self.cut == "delete" or min(ids) < 0:  # an image is never cut
            self.check_length(len(ids))
        elif self.cut != "split":
            ids, mask = self.shortened(ids, self.cut), self.shortened(mask, self.cut)
        if not any(mask):
            raise RefusedChat(NOTHING_LEFT)
        mask = [trained if token >= 0 else 0 for token, trained in zip(ids, mask, strict=True)]  # not of images
        labels = [with_weight(token, weight) for token, weight in zip(ids, mask, strict=True)]
        return {"input_ids": ids, "labels": labels, **counts(len(ids), sum(map(bool, mask)))}

    def rows(self, *inputs: Any) -> Iterator[dict[str, Any]]:
        """See `Encoder`; a document that is split is several rows."""
        for row in self._parts(*inputs):
            short = not row["problem"] and len(row["input_ids"]) < self.least
            yield self.excluded_row(TOO_SHORT) if short else row

    def _parts(self, *inputs: Any) -> Iterator[dict[str, Any]]:
        row = self(*inputs)
        size, limit = len(row["input_ids"]), self.max_length
        if self.cut != "split" or limit is None or size <= limit:
            yield row
            return
        for start in range(0, size, limit):
            ids, labels = (row[name][start : start + limit] for name in self.columns)
            yield {"input_ids": ids, "labels": labels, **counts(len(ids), len(ids))}

    def _chat(
        self, messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]] | None
    ) -> tuple[list[int], list[int]]:
        if "last_round" in self.loss:
            last = max((index for index, turn in enumerate(messages) if turn["role"] == "user"), default=-1)
            messages = [
                {"loss": False, **turn} if turn["role"] == "assistant" and index < last else turn
                for index, turn in enumerate(messages)
            ]
        everything = self.loss == "all"
        if not any(turn["role"] == "assistant" and turn.get("loss", True) for turn in messages) and not everything:
            raise RefusedChat(NO_ANSWER)
        weights = named(self.loss)
        return self.template.encode_chat(
            messages,
            tools,
            everything=everything,
            empty_thoughts="ignore_empty_think" not in self.loss,
            weigh=None if weights is None else functools.partial(parts_of, weights),
        )
