"""Rows as documents of strided EBFT: token ids, labels, and where blocks begin.

    text                   the tokenizer's ids; a longer text than `max_length` is several documents
    prompt, completion     the completion is cut first, then the end of the prompt, so that one token of it stays
    messages               labels on the assistant's turns; a longer chat is left out

Blocks begin every `stride` tokens from the context length on, in a document with a prompt at the earliest
`min_completion_prefix` tokens behind it, and lie within labels. A document without one is left out and counted.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any, ClassVar

from swift.data.transforms import THOUGHTS
from swift.errors import ConfigError, counted
from swift.models.attention.strided import block_anchors
from swift.rollout.seeds import seed_of
from swift.trainers.rows import IGNORED, counts
from swift.trainers.sft_data import ChatEncoder

if TYPE_CHECKING:
    from swift.arguments.ebft_strided import StridedArguments
    from swift.data.loading import Example
    from swift.models.template import Template
    from swift.trainers.trl.method import Encoded

NO_BLOCK = "no block fits behind the context (--ebft_context_length, --ebft_generate_max_len)"


@dataclass(frozen=True, kw_only=True)
class DocumentEncoder(ChatEncoder):
    """Turns rows into documents; see `Encoder`."""

    max_length: int
    context_length: int
    stride: int
    length: int
    min_completion_prefix: int = 0
    masks_thoughts: bool = False

    columns: ClassVar = {"input_ids": "ids", "labels": "ids", "anchors": "ids", "digest": "string"}

    def inputs(self, example: Example) -> Iterator[list[Any]]:
        """See `Encoder`.

        Raises:
            ConfigError: a chat, and no template.
        """
        if example.messages and not self.template.tokenizer.chat_template:
            name = self.template.tokenizer.name_or_path
            raise ConfigError(f"--template: missing: the tokenizer of {name} has no chat template; name one")
        yield [example.row]

    def rows(self, row: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """The documents of a row."""
        if "text" in row:
            ids = list(self.template.tokenizer(row["text"])["input_ids"])
            for start in range(0, len(ids), self.max_length):
                part = ids[start : start + self.max_length]
                yield self._with_blocks(part, part)
        elif "prompt" in row:
            prompt = list(self.template.tokenizer(row["prompt"])["input_ids"])[: self.max_length - 1]
            completion = self.template.encode_text(row["completion"])[: self.max_length - len(prompt)]
            yield self._with_blocks(prompt + completion, [IGNORED] * len(prompt) + completion)
        else:
            chat = self(row["messages"])
            yield chat if chat["problem"] else self._with_blocks(chat["input_ids"], chat["labels"])

    def anchors(self, labels: Sequence[int]) -> list[int]:
        """Where blocks begin; what comes before the first label is the prompt."""
        prompt = next((place for place, label in enumerate(labels) if label != IGNORED), len(labels))
        first = max(self.context_length, prompt + self.min_completion_prefix) if prompt else self.context_length
        found = block_anchors(len(labels), length=self.length, stride=self.stride, first=first)
        return [anchor for anchor in found if IGNORED not in labels[anchor : anchor + self.length]]

    def without_thoughts(self, ids: Sequence[int], labels: Sequence[int]) -> list[int]:
        """The labels without tokens of thoughts, their tags included; a thought may begin before the turn."""
        found, start = list(labels), 0
        for learnt, run in groupby(labels, lambda label: label != IGNORED):
            size = len(list(run))
            if learnt:
                turn = ids[start : start + size]
                for first, last in self._thoughts(turn):
                    found[start + first : start + last] = [IGNORED] * (last - first)
            start += size
        return found

    def _thoughts(self, ids: Sequence[int]) -> Iterator[tuple[int, int]]:
        """Tokens [first, last) of a turn that hold thoughts."""

        def before(character: int) -> int:
            """How many tokens it takes to spell so many characters."""
            return bisect_left(
                range(len(ids) + 1),
                character,
                key=lambda n: len(self.template.decode(ids[:n], skip_special_tokens=False)),
            )

        text = self.template.decode(ids, skip_special_tokens=False)
        for opening, closing in THOUGHTS:
            end = text.find(closing)
            while end >= 0:
                start = max(0, text.rfind(opening, 0, end))
                yield max(0, before(start + 1) - 1), before(end + len(closing))
                end = text.find(closing, end + 1)

    def _with_blocks(self, ids: list[int], labels: list[int]) -> dict[str, Any]:
        anchors = self.anchors(labels)
        if not anchors:
            return self.excluded_row(NO_BLOCK)
        labels = self.without_thoughts(ids, labels) if self.masks_thoughts else labels
        num_trained = sum(label != IGNORED for label in labels)
        row = {"input_ids": ids, "labels": labels, "anchors": anchors, "digest": str(seed_of(*ids))}
        return {**row, **counts(len(ids), num_trained)}


def encode(args: StridedArguments, template: Template) -> Encoded:
    """Training documents, evaluation documents (None without any), and lines to print about both.

    Raises:
        ConfigError: wrong data, or no document with a block.
    """
    from swift.models.policy import context_length
    from swift.trainers.sft import training_template
    from swift.trainers.splits import encode_splits

    template.training_template = training_template(template)
    encoder = DocumentEncoder(
        template=template,
        max_length=args.max_length or context_length(args) or 2**31,
        context_length=args.ebft_context_length,
        stride=args.ebft_stride,
        length=args.ebft_generate_max_len,
        min_completion_prefix=args.ebft_min_completion_prefix,
        masks_thoughts=args.ebft_mask_thinking_ce,
    )
    train, val, lines = encode_splits(args, encoder, "document")
    return train, val, [*lines, f"train: {counted(sum(map(len, train['anchors'])), 'block')}"]
