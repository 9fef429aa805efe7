"""Rows as documents of strided EBFT: token ids, labels, and where blocks begin.

    text                   the tokenizer's ids; a longer text than `max_length` is several documents
    prompt, completion     the completion is cut first, then the end of the prompt, so that one token of it stays
    messages               labels on the assistant's turns; a longer chat is left out

Blocks begin every `stride` tokens from the context length on, in a document with a prompt at the earliest
`min_completion_prefix` tokens behind it, and lie within labels. A document without one is left out and counted.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any

from swift.data.transforms import THOUGHTS
from swift.errors import ConfigError, RefusedChat, counted
from swift.models.attention.strided import block_anchors
from swift.rollout.seeds import seed_of
from swift.trainers.ebft.blocks import IGNORED
from swift.trainers.rows import TOO_LONG

if TYPE_CHECKING:
    from datasets import Dataset

    from swift.arguments.ebft_strided import StridedArguments
    from swift.models.template import Template

NO_BLOCK = "no block fits behind the context"
COLUMNS = ("input_ids", "labels", "anchors", "digest", "problem")


@dataclass(frozen=True)
class DocumentEncoder:
    """Turns rows into documents; picklable, so that worker processes can run it."""

    template: Template
    max_length: int
    context_length: int
    stride: int
    length: int
    min_completion_prefix: int = 0
    masks_thoughts: bool = False

    def __call__(self, batch: Mapping[str, Sequence[str]]) -> dict[str, list[Any]]:
        """Columns of the documents of rows in JSON; those that are left out have a `problem` and no tokens."""
        found = [one for row in batch["row"] for one in self.documents(json.loads(row))]
        return {name: [one[name] for one in found] for name in COLUMNS}

    def documents(self, row: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """The documents of a row.

        Raises:
            ConfigError: the template cannot tell assistant turns apart in any row; see `Template`.
        """
        if "text" in row:
            ids = list(self.template.tokenizer(row["text"])["input_ids"])
            for start in range(0, len(ids), self.max_length):
                part = ids[start : start + self.max_length]
                yield self._document(part, part)
        elif "prompt" in row:
            prompt = list(self.template.tokenizer(row["prompt"])["input_ids"])[: self.max_length - 1]
            completion = self.template.encode_text(row["completion"])[: self.max_length - len(prompt)]
            yield self._document(prompt + completion, [IGNORED] * len(prompt) + completion)
        else:
            try:
                ids, mask = self.template.encode_chat(row["messages"])
            except RefusedChat as error:
                yield _left_out(str(error))
                return
            labels = [token if learnt else IGNORED for token, learnt in zip(ids, mask, strict=True)]
            yield self._document(ids, labels) if len(ids) <= self.max_length else _left_out(TOO_LONG)

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

    def _document(self, ids: list[int], labels: list[int]) -> dict[str, Any]:
        anchors = self.anchors(labels)
        if not anchors:
            return _left_out(NO_BLOCK)
        labels = self.without_thoughts(ids, labels) if self.masks_thoughts else labels
        return {"input_ids": ids, "labels": labels, "anchors": anchors, "digest": str(seed_of(*ids)), "problem": ""}


def encode(args: StridedArguments, template: Template) -> tuple[Dataset, Dataset | None, list[str]]:
    """Training documents, evaluation documents (None without any), and lines to print about both.

    Raises:
        ConfigError: wrong data, or no document with a block.
    """
    from datasets import Dataset, disable_progress_bars

    from swift.data.loading import load_rows
    from swift.models.policy import context_length
    from swift.trainers.sft import training_template

    disable_progress_bars()
    template.training_template = training_template(template)
    encoder = DocumentEncoder(
        template,
        args.max_length or context_length(args) or 2**31,
        args.ebft_context_length,
        args.ebft_stride,
        args.ebft_generate_max_len,
        args.ebft_min_completion_prefix,
        args.ebft_mask_thinking_ce,
    )
    tables: dict[str, Dataset | None] = {"train": None, "val": None}
    lines: list[str] = []
    for split in ("train", "val"):
        rows = load_rows(args, split, purpose="document")
        lines += rows.report.lines()
        if any(row["messages"] for row in rows) and not template.tokenizer.chat_template:
            raise ConfigError(f"--template: missing: the tokenizer of {args.model} has no chat template; name one")
        if len(rows):
            given = Dataset.from_dict({"row": [json.dumps(row) for row in rows]})
            processes = args.dataset_num_proc if args.dataset_num_proc > 1 else None
            found = given.map(encoder, batched=True, remove_columns=["row"], num_proc=processes)
            tables[split] = _kept(found, split, lines)
    assert tables["train"] is not None, "load_rows returns at least one training row"
    return tables["train"], tables["val"], lines


def _kept(found: Dataset, split: str, lines: list[str]) -> Dataset:
    """The documents with a block; `lines` gets what became of the rows."""
    problems = list(found["problem"])
    kept = found.select([index for index, problem in enumerate(problems) if not problem])
    dropped = Counter(problem for problem in problems if problem)
    reasons = ", ".join(f"{count} ({reason})" for reason, count in dropped.most_common())
    if not len(kept):
        flag = "--dataset" if split == "train" else "--val_dataset"
        raise ConfigError(
            f"{flag}: no usable document: {reasons or 'the data set is empty'}; give longer ones, or lower "
            "--ebft_context_length or --ebft_generate_max_len"
        )
    tokens, blocks = (sum(map(len, kept[name])) for name in ("input_ids", "anchors"))
    lines.append(f"{split}: {counted(len(kept), 'document')}, {counted(tokens, 'token')}, {counted(blocks, 'block')}")
    if dropped:
        lines.append(f"{split}: left out {counted(sum(dropped.values()), 'row')}: {reasons}")
    return kept.remove_columns("problem")


def _left_out(problem: str) -> dict[str, Any]:
    return {"input_ids": [], "labels": [], "anchors": [], "digest": "", "problem": problem}
