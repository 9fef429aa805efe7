"""Rows of preferences as the token ids that TRL's trainers take.

Prompt and answer are rendered together with the model's chat template and tokenised once, as TRL does. An answer begins
where that differs from the prompt alone, ready for the assistant. A row is used whole or not at all: left out and
counted are rows that the template refuses, and those longer than `max_length`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from swift.errors import ConfigError, counted
from swift.models.template import RefusedChat, Template

if TYPE_CHECKING:
    from datasets import Dataset

    from swift.data.loading import Example

IGNORED = -100
"""The label of a token that takes no part in the loss."""

Ids = list[int]
Layout = Literal["pair", "labelled pair", "verdict", "scored pair"]
COLUMNS: dict[Layout, tuple[str, ...]] = {
    "pair": ("prompt_ids", "chosen_ids", "rejected_ids"),
    "labelled pair": tuple(
        f"{answer}_{name}" for answer in ("chosen", "rejected") for name in ("input_ids", "attention_mask", "labels")
    ),
    "verdict": ("prompt_ids", "completion_ids"),
    "scored pair": ("chosen_ids", "rejected_ids"),
}
"""Columns of a row. The first and the third split it into prompt and answers, the others hold whole sequences. A
verdict has its `label` too, and a scored pair may have a `margin`."""

TOO_LONG = "longer than max_length"
EMPTY = "an empty answer"


@dataclass(frozen=True)
class AnswerEncoder:
    """Turns a prompt with its answers into a row; picklable, so that worker processes can run it."""

    template: Template
    layout: Layout
    max_length: int | None

    def __call__(self, prompt: list[dict[str, Any]], answers: list[list[dict[str, Any]]], tools: Any) -> dict[str, Any]:
        """The columns of the layout but the label, `num_tokens`, and `problem`: why the row is left out, else "".

        `moved` tells that the template writes the prompt alone in another way than before an answer.
        """
        encode = self.template.encode_finished if self.layout == "scored pair" else self._encode
        try:
            alone = self.template.encode_prompt(prompt, tools)
            wholes = [encode([*prompt, *answer], tools) for answer in answers]
        except RefusedChat as error:
            return self._left_out(str(error))
        start = min(_num_shared(alone, whole) for whole in wholes)
        if any(len(whole) == start for whole in wholes):
            return self._left_out(EMPTY)
        moved = start < len(alone)
        if self.layout == "labelled pair":
            wholes, start = self._with_ends(wholes, start)
        if self.max_length is not None and max(map(len, wholes)) > self.max_length:
            return self._left_out(TOO_LONG)
        columns = zip(COLUMNS[self.layout], self._values(wholes, start), strict=True)
        return {**dict(columns), "num_tokens": sum(map(len, wholes)), "moved": moved, "problem": ""}

    def from_json(self, row: dict[str, str]) -> dict[str, Any]:
        """The same for a table row whose column `row` is JSON text (Arrow needs one type per column)."""
        return self(*json.loads(row["row"]))

    def _encode(self, messages: list[dict[str, Any]], tools: Any) -> Ids:
        return self.template.encode_text(self.template.render(messages, tools=tools))

    def _with_ends(self, wholes: list[Ids], start: int) -> tuple[list[Ids], int]:
        """As TRL's trainers of CPO and ORPO have it, which make sure of the tokens of begin and end."""
        begin, end = self.template.tokenizer.bos_token_id, self.template.tokenizer.eos_token_id
        if begin is not None and wholes[0][:1] != [begin]:
            wholes, start = [[begin, *whole] for whole in wholes], start + 1
        return [whole if whole[-1] == end else [*whole, end] for whole in wholes], start

    def _values(self, wholes: list[Ids], start: int) -> Iterator[Ids]:
        if self.layout == "labelled pair":
            for whole in wholes:
                yield from (whole, [1] * len(whole), [IGNORED] * start + whole[start:])
        elif self.layout == "scored pair":
            yield from wholes
        else:
            yield wholes[0][:start]
            yield from (whole[start:] for whole in wholes)

    def _left_out(self, problem: str) -> dict[str, Any]:
        empty: Ids = []
        return {**dict.fromkeys(COLUMNS[self.layout], empty), "num_tokens": 0, "moved": False, "problem": problem}


def encode_rows(
    examples: Sequence[Example], encoder: AnswerEncoder, *, num_proc: int = 1, split: str = "train"
) -> tuple[Dataset, list[str]]:
    """The rows of examples in their order, one for each rejected answer or verdict, and lines that report on them.

    Raises:
        ConfigError: not a single row can be used.
    """
    from datasets import Dataset, Features, List, Value, disable_progress_bars

    disable_progress_bars()
    kinds = {**dict.fromkeys(COLUMNS[encoder.layout], List(Value("int64"))), "num_tokens": Value("int64")}
    given = [(example.origin, *one) for example in examples for one in _answers(example, encoder.layout)]
    table = Dataset.from_dict({"row": [json.dumps(one[1:4]) for one in given]})
    encoded = table.map(
        encoder.from_json,
        remove_columns=["row"],
        num_proc=num_proc if num_proc > 1 else None,
        features=Features({**kinds, "moved": Value("bool"), "problem": Value("string")}),
    )
    problems = list(encoded["problem"])
    extra = [one[4] for one in given]
    if encoder.layout == "verdict":
        encoded = encoded.add_column("label", extra)
    elif encoder.layout == "scored pair" and any(margin is not None for margin in extra):
        encoded = encoded.add_column("margin", [margin or 0.0 for margin in extra])
    kept = [index for index, problem in enumerate(problems) if not problem]
    lines = _report(split, [(one[0], problem) for one, problem in zip(given, problems, strict=True) if problem])
    if not kept:
        flag = "--dataset" if split == "train" else "--val_dataset"
        raise ConfigError(f"{flag}: no usable row for --max_length {encoder.max_length}; {lines[0]}")
    if moved := sum(encoded["moved"]):
        lines.append(
            f"{split}: {counted(moved, 'row')}: the chat template writes the prompt alone in another way than before "
            "its answer; the answer begins where they differ"
        )
    lines.insert(0, f"{split}: {counted(len(kept), 'row')}, {counted(sum(encoded['num_tokens']), 'token')}")
    return encoded.select(kept).remove_columns(["num_tokens", "moved", "problem"]), lines


def _report(split: str, left_out: Sequence[tuple[str, str]]) -> list[str]:
    """Rows that were left out, counted by reason, each with the first place."""
    firsts: dict[str, str] = {}
    for origin, problem in left_out:
        firsts.setdefault(problem, origin)
    counts = [
        f"{sum(problem == reason for _, problem in left_out)} ({reason}; the first: {origin})"
        for reason, origin in firsts.items()
    ]
    return [f"{split}: left out {counted(len(left_out), 'row')}: {', '.join(counts)}"] if counts else []


def _answers(example: Example, layout: Layout) -> Iterator[tuple[Any, Any, Any, Any]]:
    """Prompt, answers and tools of each row that an example gives, and its verdict or margin."""
    columns, prompt = example.columns, example.messages
    tools = columns.get("tools")
    if "completion" in columns:
        yield prompt, [columns["completion"]], tools, columns["label"]
        return
    if layout == "verdict":
        yield prompt, [columns["chosen"]], tools, True
    for rejected in columns["rejected"]:
        if layout == "verdict":
            yield prompt, [rejected], tools, False
        else:
            yield prompt, [columns["chosen"], rejected], tools, columns.get("margin")


def _num_shared(first: Ids, second: Ids) -> int:
    """How many leading tokens are the same."""
    return next(
        (n for n, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), min(len(first), len(second))
    )


Encode = Callable[[Any, Template], "tuple[Dataset, Dataset | None, list[str]]"]


def encoding(layout: Layout) -> Encode:
    """What a `Method` encodes its rows with."""

    def encode(args: Any, template: Template) -> tuple[Dataset, Dataset | None, list[str]]:
        from swift.data.loading import load_rows
        from swift.models.policy import context_length

        encoder = AnswerEncoder(template, layout, args.max_length or context_length(args))
        tables: dict[str, Dataset | None] = {"train": None, "val": None}
        lines: list[str] = []
        for split in ("train", "val"):
            rows = load_rows(args, split, purpose="label" if layout == "verdict" else "pair")
            lines += rows.report.lines()
            if len(rows):
                tables[split], more = encode_rows(rows.examples, encoder, num_proc=args.dataset_num_proc, split=split)
                lines += more
        assert tables["train"] is not None, "load_rows returns at least one training row"
        return tables["train"], tables["val"], lines

    return encode
