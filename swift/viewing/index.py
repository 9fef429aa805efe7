"""completions.jsonl as columns: where each line is, and the values that filters need; the texts stay in the file.

A line takes about 100 bytes of memory plus 8 per reward function. Rows of a step that a later attempt logged again do
not count, as in `read_log`. A `Table` is a snapshot: it does not change while the file grows.
"""

from __future__ import annotations

import json
import os
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from swift.errors import parse_json
from swift.viewing.tail import BLOCK_BYTES, Tail

COMPLETIONS = "completions.jsonl"
_TEXT, _AFTER = b'"prompt": "', b', "prompt_tokens": '
"""Where the texts of a row begin and end. Neither occurs in a text, in which quotes are escaped."""
_PLAIN = b'"turns": null'
"""What ends the texts of a row without turns, whose keys are no texts."""
_BETWEEN = b'"prompt": "", "completion": "", "turns": null, "prompt_tokens": '
"""What is no text in between."""


class Line(msgspec.Struct):
    """What is indexed of a row."""

    attempt: int
    step: int
    split: str
    prompt_id: str
    group_id: str
    index: int
    completion_tokens: int
    finish_reason: str | None
    rewards: dict[str, float | None]
    reward: float | None
    advantage: float | None
    used: bool
    excluded: str | None


class Texts(msgspec.Struct):
    """The texts of a row."""

    prompt: str = ""
    completion: str = ""
    turns: list[dict[str, Any]] | None = None

    def have(self, text: str) -> bool:
        """Whether the prompt, the completion or a turn contains it."""
        if text in self.prompt or text in self.completion:
            return True
        return any(text in str(turn.get(name) or "") for turn in self.turns or [] for name in ("content", "tool_calls"))


_line, _texts = msgspec.json.Decoder(Line), msgspec.json.Decoder(Texts)


def decoded(decoder: msgspec.json.Decoder[Any], raw: bytes) -> Any:
    """A line by a decoder; the json module reads lone surrogates, which msgspec refuses."""
    try:
        return decoder.decode(raw)
    except msgspec.DecodeError:
        return msgspec.convert(parse_json(raw.decode()), decoder.type)


_NUMBERS: dict[str, type] = {
    "attempt": np.int32, "step": np.int64, "index": np.int32, "completion_tokens": np.int32, "reward": np.float64,
    "advantage": np.float64, "used": np.bool_,
}  # fmt: skip
_CODED = ("split", "prompt_id", "finish_reason", "excluded")
GroupKey = tuple[int, int, str, str]
"""Attempt, step, split and group_id."""


@dataclass(eq=False)
class Table:
    """The rows that were indexed so far, R of them.

    columns: name -> [R]; `offset`, `size`, and the place of the texts in a line, `text` and `after`, in bytes; `group`
    numbers `groups`; the columns of `codes` hold numbers of words. rewards: function -> [R], NaN where null.
    unreadable: lines that are no rows of swift. cache: of `filters.statistics`.
    """

    path: Path
    columns: Mapping[str, np.ndarray]
    rewards: Mapping[str, np.ndarray]
    codes: Mapping[str, Mapping[str | None, int]]
    groups: Mapping[GroupKey, int]
    unreadable: int = 0
    cache: dict[str, dict[str, np.ndarray]] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.columns["step"])

    @cached_property
    def attempts(self) -> dict[int, int]:
        """Step -> the attempt that counts."""
        steps, attempts = self.columns["step"], self.columns["attempt"]
        different, number = np.unique(steps, return_inverse=True)
        newest = np.zeros(len(different), attempts.dtype)
        np.maximum.at(newest, number, attempts)
        return dict(zip(different.tolist(), newest.tolist(), strict=True))

    @cached_property
    def current(self) -> np.ndarray:
        """[R] Whether a row counts."""
        attempts = self.columns["attempt"]
        if not len(attempts) or attempts[0] == attempts.max() == attempts.min():
            return np.ones(len(attempts), bool)
        steps = self.columns["step"]
        known = np.fromiter(self.attempts, np.int64, len(self.attempts))
        newest = np.fromiter(self.attempts.values(), np.int64, len(self.attempts))
        return np.asarray(attempts == newest[np.searchsorted(known, steps)])

    def code(self, column: str, word: str | None) -> int:
        """The number of a word in a column; -1 if no row has it."""
        return self.codes[column].get(word, -1)

    def word(self, column: str, row: int) -> str | None:
        """The word of a row in a column."""
        return self.words[column][int(self.columns[column][row])]

    @cached_property
    def words(self) -> dict[str, list[str | None]]:
        """Column -> its words, by their numbers."""
        return {column: list(codes) for column, codes in self.codes.items()}

    def rows_of(self, step: int, split: str, group_id: str) -> list[int]:
        """The rows of a group, in the order of their indexes; [] if there is no such group."""
        group = self.groups.get((self.attempts.get(step, 0), step, split, group_id))
        if group is None:
            return []
        rows = np.flatnonzero(self.columns["group"] == group)
        return [int(row) for row in rows[np.argsort(self.columns["index"][rows], kind="stable")]]

    def line(self, row: int) -> bytes:
        """A row's line, without its end."""
        with self.path.open("rb") as file:
            return os.pread(file.fileno(), int(self.columns["size"][row]), int(self.columns["offset"][row]))

    def read(self, row: int) -> dict[str, Any]:
        """A row as it was logged."""
        found: dict[str, Any] = parse_json(self.line(row).decode())
        return found

    def containing(self, text: str, wanted: np.ndarray) -> np.ndarray:
        """[R] Which of the `wanted` rows have the text in their prompt, completion or turns; case matters."""
        found = np.zeros(len(self), bool)
        forms = {json.dumps(text, ensure_ascii=ascii)[1:-1].encode("utf-8", "replace") for ascii in (False, True)}
        offsets, sizes = self.columns["offset"], self.columns["size"]
        with self.path.open("rb") as file:
            first = 0
            while first < len(self):
                last = int(np.searchsorted(offsets, offsets[first] + BLOCK_BYTES))
                if wanted[first:last].any():
                    begin = int(offsets[first])
                    data = os.pread(file.fileno(), int(offsets[last - 1] + sizes[last - 1]) - begin, begin)
                    for form in forms:
                        self._mark(found, first, last, data, form, text)
                first = last
        return np.asarray(found & wanted)

    def _mark(self, found: np.ndarray, first: int, last: int, data: bytes, form: bytes, text: str) -> None:
        """Mark those of the rows [first, last), whose lines are `data`, that contain `form`, the text in JSON."""
        begin = int(self.columns["offset"][first])
        starts = (self.columns["offset"][first:last] - begin).tolist()
        ends = (self.columns["size"][first:last]).tolist()
        texts, afters = self.columns["text"][first:last].tolist(), self.columns["after"][first:last].tolist()
        doubtful = form in _BETWEEN
        place = data.find(form)
        while place >= 0:
            row = bisect_right(starts, place) - 1
            start = starts[row]
            if place < start + texts[row]:
                place = data.find(form, start + texts[row])
                continue
            inside = place < start + afters[row]
            plain = data[start + afters[row] - len(_PLAIN) : start + afters[row]] == _PLAIN
            if inside and (doubtful or not plain or b"\\" in data[max(0, place - 6) : place]):
                inside = decoded(_texts, data[start : start + ends[row]]).have(text)
            found[first + row] |= inside
            place = data.find(form, start + ends[row])


class Index:
    """Reads completions.jsonl as it grows; `table` is what was read."""

    def __init__(self, folder: Path) -> None:
        self.tail = Tail(folder / COMPLETIONS)
        self._empty()

    def _empty(self) -> None:
        self._blocks: list[dict[str, np.ndarray]] = []
        self._codes: dict[str, dict[Any, int]] = {name: {} for name in (*_CODED, "group")}
        self._reward_names: dict[str, None] = {}
        self._unreadable = 0
        self.table = self._table()

    def refresh(self) -> Iterator[None]:
        """Read what is new; a step of the iterator is a block of lines, after which `table` has them."""
        if self.tail.replaced():
            self._empty()
        for start, data in self.tail.blocks():
            self._add(start, data)
            if self.tail.size() - self.tail.offset < BLOCK_BYTES or len(self._blocks) % 64 == 0:
                self.table = self._table()  # costs a copy of all columns
            yield

    def _add(self, start: int, data: bytes) -> None:
        lines: list[Line] = []
        places: list[tuple[int, int, int, int]] = []
        position = 0
        while position < len(data):
            end = data.index(b"\n", position)
            raw = data[position:end]
            try:
                lines.append(decoded(_line, raw))
            except ValueError:  # no JSON, no UTF-8, or another object
                self._unreadable += bool(raw.strip())
            else:
                text, after = raw.find(_TEXT), raw.find(_AFTER)
                known = 0 <= text < after
                places.append(
                    (start + position, end - position, text if known else 0, after if known else end - position)
                )
            position = end + 1
        if lines:
            self._blocks.append(self._columns(lines, places))

    def _columns(self, lines: list[Line], places: list[tuple[int, int, int, int]]) -> dict[str, np.ndarray]:
        columns = dict(zip(("offset", "size", "text", "after"), np.array(places, np.int64).T, strict=True))
        for name in ("size", "text", "after"):
            columns[name] = columns[name].astype(np.int32)
        for name, kind in _NUMBERS.items():
            values = [getattr(line, name) for line in lines]
            columns[name] = np.array(values, np.float64 if kind is np.float64 else None).astype(kind)
        for name in _CODED:
            codes = self._codes[name]
            columns[name] = np.array([codes.setdefault(getattr(line, name), len(codes)) for line in lines], np.int32)
        groups = self._codes["group"]
        keys = [(line.attempt, line.step, line.split, line.group_id) for line in lines]
        columns["group"] = np.array([groups.setdefault(key, len(groups)) for key in keys], np.int32)
        for name in {name: None for line in lines for name in line.rewards}:
            self._reward_names[name] = None
            columns[f"rewards/{name}"] = np.array([line.rewards.get(name) for line in lines], np.float64)
        return columns

    def _table(self) -> Table:
        names = ["offset", "size", "text", "after", *_NUMBERS, *_CODED, "group"]
        rewards = {name: f"rewards/{name}" for name in self._reward_names}
        if self._blocks:
            self._blocks = [{name: self._joined(name) for name in (*names, *rewards.values())}]
        whole = self._blocks[0] if self._blocks else {}
        empty = np.zeros(0, np.int64)
        return Table(
            self.tail.path,
            {name: whole.get(name, empty) for name in names},
            {name: whole[column] for name, column in rewards.items()},
            {name: dict(self._codes[name]) for name in _CODED},
            dict(self._codes["group"]),
            self._unreadable,
        )

    def _joined(self, name: str) -> np.ndarray:
        parts = [block[name] if name in block else np.full(len(block["step"]), np.nan) for block in self._blocks]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)
