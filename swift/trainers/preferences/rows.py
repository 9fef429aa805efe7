"""Rows of preferences as token ids for TRL's trainers.

Prompt and answer are rendered together with the model's chat template and tokenised once, as in TRL. An answer begins
at the first token that differs from the prompt alone (with its generation prompt).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from swift.errors import RefusedChat
from swift.models.template import Template
from swift.trainers.rows import IGNORED, Encoder, counts
from swift.trainers.splits import encode_splits
from swift.trainers.trl.method import Encoded

if TYPE_CHECKING:
    from swift.data.loading import Example, Purpose
    from swift.trainers.preferences.packing import PairPacking

Ids = list[int]
Layout = Literal["pair", "labelled pair", "unpaired", "scored pair", "turn"]
COLUMNS: dict[Layout, dict[str, str]] = {
    "pair": dict.fromkeys(("prompt_ids", "chosen_ids", "rejected_ids"), "ids"),
    "labelled pair": {
        f"{answer}_{name}": "ids"
        for answer in ("chosen", "rejected")
        for name in ("input_ids", "attention_mask", "labels")
    },
    "unpaired": {"prompt_ids": "ids", "completion_ids": "ids", "label": "bool"},
    "scored pair": {"chosen_ids": "ids", "rejected_ids": "ids", "margin": "float64"},
    "turn": {"input_ids": "ids", "completion_mask": "ids", "prompt": "string"},
}
"""Columns of a row. "pair" and "unpaired" split it into prompt and answers, the others hold whole sequences. GKD's
collator requires the prompt's text, which is not used."""

PURPOSES: dict[Layout, Purpose] = {"unpaired": "label", "turn": "chat"}

EMPTY = "an empty answer"
NO_PROMPT = "no prompt before the answer"
NO_LOSS = 'an answer with "loss": false'


@dataclass(frozen=True)
class AnswerEncoder(Encoder):
    """Encodes a prompt with its answers as a row; see `Encoder`."""

    layout: Layout

    def encode(
        self, prompt: list[dict[str, Any]], answers: list[list[dict[str, Any]]], tools: Any, more: Any
    ) -> dict[str, Any]:
        """The columns of the layout; `more` is the label of an unpaired answer, or the margin of a scored pair."""
        if not prompt:
            raise RefusedChat(NO_PROMPT)
        if any(not turn.get("loss", True) for answer in answers for turn in answer):
            raise RefusedChat(NO_LOSS)
        render = self.template.encode_finished if self.layout == "scored pair" else self._rendered
        alone = self.template.encode_prompt(prompt, tools)
        sequences = [render([*prompt, *answer], tools) for answer in answers]
        start = min(num_shared(alone, sequence) for sequence in sequences)
        if any(len(sequence) == start for sequence in sequences):
            raise RefusedChat(EMPTY)
        moved = start < len(alone) and self.layout != "scored pair"
        if self.layout == "labelled pair":
            sequences, start = self._with_ends(sequences, start)
        size = sum(map(len, sequences))
        self.check_length(max(map(len, sequences)))
        columns = zip(self.columns, self._values(sequences, start, more), strict=True)
        return {**dict(columns), **counts(size, size - start * len(sequences), moved=moved)}

    @property
    def columns(self) -> Mapping[str, str]:  # type: ignore[override]
        """See `Encoder`."""
        return COLUMNS[self.layout]

    def inputs(self, example: Example) -> Iterator[list[Any]]:
        """One row for each rejected or unpaired answer; see `Encoder`."""
        columns, prompt = example.columns, example.messages
        tools = columns.get("tools")
        if self.layout == "turn":
            yield [prompt[:-1], [prompt[-1:]], tools, None]
        elif "completion" in columns:
            yield [prompt, [columns["completion"]], tools, columns["label"]]
        elif self.layout == "unpaired":
            yield [prompt, [columns["chosen"]], tools, True]
            for rejected in columns["rejected"]:
                yield [prompt, [rejected], tools, False]
        else:
            for rejected in columns["rejected"]:
                yield [prompt, [columns["chosen"], rejected], tools, columns.get("margin")]

    def _rendered(self, messages: list[dict[str, Any]], tools: Any) -> Ids:
        return self.template.encode_pieces([self.template.render(messages, tools=tools)], messages)[0]

    def _with_ends(self, sequences: list[Ids], start: int) -> tuple[list[Ids], int]:
        """The sequences with begin and end tokens, which TRL's trainers of CPO and ORPO add if they are missing."""
        begin, end = self.template.tokenizer.bos_token_id, self.template.tokenizer.eos_token_id
        if begin is not None and sequences[0][:1] != [begin]:
            sequences, start = [[begin, *sequence] for sequence in sequences], start + 1
        return [sequence if sequence[-1] == end else [*sequence, end] for sequence in sequences], start

    def _values(self, sequences: list[Ids], start: int, more: Any) -> Iterator[Any]:
        if self.layout == "labelled pair":
            for sequence in sequences:
                yield from (sequence, [1] * len(sequence), [IGNORED] * start + sequence[start:])
        elif self.layout == "scored pair":
            yield from (*sequences, more or 0.0)
        elif self.layout == "turn":
            yield from (sequences[0], [0] * start + [1] * (len(sequences[0]) - start), "")
        else:
            yield sequences[0][:start]
            yield from (sequence[start:] for sequence in sequences)
            if self.layout == "unpaired":
                yield more


def num_shared(first: Ids, second: Ids) -> int:
    """The number of equal leading tokens."""
    return next(
        (n for n, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), min(len(first), len(second))
    )


def encoding(layout: Layout, packing: PairPacking | None = None) -> Callable[[Any, Template], Encoded]:
    """The `encode` of a `Method` with this layout of rows. packing: how those of training are packed."""

    def encode(args: Any, template: Template) -> Encoded:
        from swift.models.policy import context_length

        encoder = AnswerEncoder(template, args.max_length or context_length(args), layout)
        return encode_splits(args, encoder, PURPOSES.get(layout, "pair"), packing=packing)

    return encode
