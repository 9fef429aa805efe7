"""Rows of preferences as the token ids that TRL's trainers take.

Prompt and answer are rendered together with the model's chat template and tokenised once, as TRL does. An answer begins
where that differs from the prompt alone, ready for the assistant.
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

Ids = list[int]
Layout = Literal["pair", "labelled pair", "verdict", "scored pair", "turn"]
COLUMNS: dict[Layout, dict[str, str]] = {
    "pair": dict.fromkeys(("prompt_ids", "chosen_ids", "rejected_ids"), "ids"),
    "labelled pair": {
        f"{answer}_{name}": "ids"
        for answer in ("chosen", "rejected")
        for name in ("input_ids", "attention_mask", "labels")
    },
    "verdict": {"prompt_ids": "ids", "completion_ids": "ids", "label": "bool"},
    "scored pair": {"chosen_ids": "ids", "rejected_ids": "ids", "margin": "float64"},
    "turn": {"input_ids": "ids", "completion_mask": "ids", "prompt": "string"},
}
"""Columns of a row. A pair and a verdict split it into prompt and answers, the others hold whole sequences. GKD's
collator asks for the prompt's text, which nobody reads."""

PURPOSES: dict[Layout, Purpose] = {"verdict": "label", "turn": "chat"}

EMPTY = "an empty answer"
NO_PROMPT = "no prompt before the answer"
NO_LOSS = 'an answer with "loss": false'


@dataclass(frozen=True)
class AnswerEncoder(Encoder):
    """Turns a prompt with its answers into a row; see `Encoder`."""

    layout: Layout

    def encode(
        self, prompt: list[dict[str, Any]], answers: list[list[dict[str, Any]]], tools: Any, more: Any
    ) -> dict[str, Any]:
        """The columns of the layout; `more` is the label of a verdict, or the margin of a scored pair."""
        if not prompt:
            raise RefusedChat(NO_PROMPT)
        if any(not turn.get("loss", True) for answer in answers for turn in answer):
            raise RefusedChat(NO_LOSS)
        whole_of = self.template.encode_finished if self.layout == "scored pair" else self._rendered
        alone = self.template.encode_prompt(prompt, tools)
        wholes = [whole_of([*prompt, *answer], tools) for answer in answers]
        start = min(_num_shared(alone, whole) for whole in wholes)
        if any(len(whole) == start for whole in wholes):
            raise RefusedChat(EMPTY)
        moved = start < len(alone) and self.layout != "scored pair"
        if self.layout == "labelled pair":
            wholes, start = self._with_ends(wholes, start)
        size = sum(map(len, wholes))
        self.check_length(max(map(len, wholes)))
        columns = zip(self.columns, self._values(wholes, start, more), strict=True)
        return {**dict(columns), **counts(size, size - start * len(wholes), moved=moved)}

    @property
    def columns(self) -> Mapping[str, str]:  # type: ignore[override]
        """See `Encoder`."""
        return COLUMNS[self.layout]

    def given(self, example: Example) -> Iterator[list[Any]]:
        """One row for each rejected answer or verdict; see `Encoder`."""
        columns, prompt = example.columns, example.messages
        tools = columns.get("tools")
        if self.layout == "turn":
            yield [prompt[:-1], [prompt[-1:]], tools, None]
        elif "completion" in columns:
            yield [prompt, [columns["completion"]], tools, columns["label"]]
        elif self.layout == "verdict":
            yield [prompt, [columns["chosen"]], tools, True]
            for rejected in columns["rejected"]:
                yield [prompt, [rejected], tools, False]
        else:
            for rejected in columns["rejected"]:
                yield [prompt, [columns["chosen"], rejected], tools, columns.get("margin")]

    def _rendered(self, messages: list[dict[str, Any]], tools: Any) -> Ids:
        return self.template.encode_text(self.template.render(messages, tools=tools))

    def _with_ends(self, wholes: list[Ids], start: int) -> tuple[list[Ids], int]:
        """As TRL's trainers of CPO and ORPO have it, which make sure of the tokens of begin and end."""
        begin, end = self.template.tokenizer.bos_token_id, self.template.tokenizer.eos_token_id
        if begin is not None and wholes[0][:1] != [begin]:
            wholes, start = [[begin, *whole] for whole in wholes], start + 1
        return [whole if whole[-1] == end else [*whole, end] for whole in wholes], start

    def _values(self, wholes: list[Ids], start: int, more: Any) -> Iterator[Any]:
        if self.layout == "labelled pair":
            for whole in wholes:
                yield from (whole, [1] * len(whole), [IGNORED] * start + whole[start:])
        elif self.layout == "scored pair":
            yield from (*wholes, more or 0.0)
        elif self.layout == "turn":
            yield from (wholes[0], [0] * start + [1] * (len(wholes[0]) - start), "")
        else:
            yield wholes[0][:start]
            yield from (whole[start:] for whole in wholes)
            if self.layout == "verdict":
                yield more


def _num_shared(first: Ids, second: Ids) -> int:
    """How many leading tokens are the same."""
    return next(
        (n for n, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), min(len(first), len(second))
    )


def encoding(layout: Layout) -> Callable[[Any, Template], Encoded]:
    """What a `Method` encodes its rows with."""

    def encode(args: Any, template: Template) -> Encoded:
        from swift.models.policy import context_length

        encoder = AnswerEncoder(template, args.max_length or context_length(args), layout)
        return encode_splits(args, encoder, PURPOSES.get(layout, "pair"))

    return encode
