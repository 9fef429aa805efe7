"""completions.jsonl as columns: where each line is, and the values that filters need; the texts stay in the file.

A line takes about 100 bytes of memory plus 8 per reward function. Rows of a step that a later attempt logged again do
not count, as in `read_log`. A `Table` is a snapshot: it does not change while the file grows.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np

from swift.errors import parse_json
from swift.viewing.columns import Column, current
from swift.viewing.tail import Tail

COMPLETIONS = "completions.jsonl"
_PROMPT, _COMPLETION, _TURNS, _AFTER = b'"prompt": "', b'", "completion": "', b'", "turns": ', b', "prompt_tokens": '
"""What is around the texts of a line. None of it occurs in a text, in which quotes are escaped."""
BACKSLASH = ord("\\")
ESCAPE_BYTES = 6
"""Of the longest escape, \\uXXXX."""
SEARCH_BYTES = 1 << 20
"""Bytes that are searched at a time."""


Natural = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]


class Line(msgspec.Struct):
    """What is indexed of a row."""

    attempt: Natural
    step: Natural
    split: str
    prompt_id: str
    group_id: str
    index: Natural
    completion_tokens: Natural
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
    "attempt": np.int32, "step": np.int32, "index": np.int32, "completion_tokens": np.int32, "reward": np.float64,
    "advantage": np.float64, "used": np.bool_,
}  # fmt: skip
_PLACES = ("offset", "size", "prompt", "completion", "turns", "end")
_CODED = ("split", "prompt_id", "finish_reason", "excluded")
GroupKey = tuple[int, int, str, str]
"""Attempt, step, split and group_id."""


@dataclass(eq=False)
class Table:
    """The rows that were indexed so far, R of them.

    columns: name -> [R]; `offset` and `size` of a line in bytes, and what `texts_at` tells; `group` numbers `groups`;
    the columns of `codes` hold numbers of words. rewards: function -> [R], NaN where null. unreadable: lines that are
    no rows of swift. cache: of `filters`. `codes` and `groups` may have further entries, of rows that came later.
    """

    path: Path
    columns: Mapping[str, np.ndarray]
    rewards: Mapping[str, np.ndarray]
    codes: Mapping[str, Mapping[str | None, int]]
    groups: Mapping[GroupKey, int]
    unreadable: int = 0
    cache: dict[Any, Any] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.columns["step"])

    @cached_property
    def current(self) -> np.ndarray:
        """[R] Whether a row counts."""
        return current(self.columns["step"], self.columns["attempt"])

    def code(self, column: str, word: str | None) -> int:
        """The number of a word in a column; -1 if no row has it."""
        return self.codes[column].get(word, -1)

    def words(self, column: str) -> list[str]:
        """The words that a column has, without null."""
        return [word for word in list(self.codes[column]) if word is not None]

    def rows_of(self, step: int, split: str, group_id: str) -> list[int]:
        """The rows of a group, in the order of their indexes; [] if there is no such group."""
        attempt = self.columns["attempt"][self.columns["step"] == step].max(initial=0)
        group = self.groups.get((int(attempt), step, split, group_id), -1)
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
        offsets, ends = self.columns["offset"], self.columns["offset"] + self.columns["size"]
        with self.path.open("rb") as file:
            first = 0
            while first < len(self):
                last = int(np.searchsorted(offsets, offsets[first] + SEARCH_BYTES))
                if wanted[first:last].any():
                    data = os.pread(file.fileno(), int(ends[last - 1] - offsets[first]), int(offsets[first]))
                    for form in forms:
                        if form in data:
                            found[first:last] |= self._found(first, last, data, form, text)
                first = last
        return np.asarray(found & wanted)

    def _found(self, first: int, last: int, data: bytes, form: bytes, text: str) -> list[bool]:
        """Which of the rows [first, last), whose lines are `data`, contain `form`, the text in JSON."""
        starts = self.columns["offset"][first:last] - self.columns["offset"][first]
        names = ("prompt", "completion", "turns", "end", "size")
        places = [(starts + self.columns[name][first:last]).tolist() for name in names]
        find, gap, found = data.find, len(_COMPLETION), []
        for prompt, completion, turns, end, size, start in zip(*places, starts.tolist(), strict=True):
            hit = find(form, prompt, completion)
            if hit < 0:
                hit = find(form, completion + gap, end)
            if hit >= 0 and (hit >= turns or BACKSLASH in data[hit - ESCAPE_BYTES + 1 : hit]):  # perhaps no text
                sure = unescaped(data, form, prompt, completion) or unescaped(data, form, completion + gap, turns)
                hit = 0 if sure or (turns < end and decoded(_texts, data[start:size]).have(text)) else -1
            found.append(hit >= 0)
        return found


def texts_at(line: bytes) -> tuple[int, int, int, int]:
    """Where the prompt begins, where prompt and completion end, and where the turns end.

    Of a line in another order of keys, all is taken for turns.
    """
    prompt = line.find(_PROMPT)
    completion = line.find(_COMPLETION, prompt)
    turns = line.find(_TURNS, completion)
    end = line.find(_AFTER, turns)
    if not 0 <= prompt < completion < turns < end:
        return 0, 0, 0, len(line)
    return prompt + len(_PROMPT), completion, turns, turns if line.startswith(b"null", turns + len(_TURNS)) else end


def unescaped(data: bytes, form: bytes, begin: int, end: int) -> bool:
    """Whether a text in JSON occurs between two places without beginning inside of an escape.

    The quote of a key's name is before the first of these places, and no backslash close to it.
    """
    place = data.find(form, begin, end)
    while place >= 0:
        near = data[place - ESCAPE_BYTES + 1 : place]
        if BACKSLASH not in near:
            return True
        code = near.rfind(b"\\u")
        inside = place - len(near) + code + 1 if code >= 0 else place  # \uXXXX, if that backslash begins an escape
        before = inside
        while data[before - 1] == BACKSLASH:
            before -= 1
        if (inside - before) % 2 == 0:
            return True
        place = data.find(form, place + 1, end)
    return False


class Index:
    """Reads completions.jsonl as it grows; `table` is what was read."""

    def __init__(self, folder: Path) -> None:
        self.tail = Tail(folder / COMPLETIONS)
        self._empty()

    def _empty(self) -> None:
        kinds = {"offset": np.int64, **dict.fromkeys((*_PLACES[1:], *_CODED, "group"), np.int32), **_NUMBERS}
        self._columns: dict[str, Column] = {name: Column(kind) for name, kind in kinds.items()}
        self._rewards: dict[str, Column] = {}
        self._codes: dict[str, dict[Any, int]] = {name: {} for name in (*_CODED, "group")}
        self._count = self._unreadable = 0
        self.table = self._table()

    def refresh(self) -> Iterator[None]:
        """Read what is new; a step of the iterator is a block of lines, after which `table` has them."""
        if self.tail.replaced():
            self._empty()
        for start, data in self.tail.blocks():
            self._add(start, data)
            self.table = self._table()
            yield

    def _add(self, start: int, data: bytes) -> None:
        lines: list[Line] = []
        places: list[tuple[int, ...]] = []
        position = 0
        while position < len(data):
            end = data.index(b"\n", position)
            raw = data[position:end]
            try:
                lines.append(decoded(_line, raw))
            except ValueError:  # no JSON, no UTF-8, or another object
                self._unreadable += bool(raw.strip())
            else:
                places.append((start + position, end - position, *texts_at(raw)))
            position = end + 1
        if lines:
            self._append(lines, places)

    def _append(self, lines: list[Line], places: list[tuple[int, ...]]) -> None:
        values: dict[str, Any] = dict(zip(_PLACES, np.array(places, np.int64).T, strict=True))
        values |= {name: np.array([getattr(line, name) for line in lines], kind) for name, kind in _NUMBERS.items()}
        for name in _CODED:
            codes = self._codes[name]
            values[name] = [codes.setdefault(getattr(line, name), len(codes)) for line in lines]
        groups = self._codes["group"]
        keys = [(line.attempt, line.step, line.split, line.group_id) for line in lines]
        values["group"] = [groups.setdefault(key, len(groups)) for key in keys]
        for name, found in values.items():
            self._columns[name].put(self._count, found)
        for name in {name: None for line in lines for name in line.rewards}:
            column = self._rewards.setdefault(name, Column(np.float64, np.nan))
            column.put(self._count, np.array([line.rewards.get(name) for line in lines], np.float64))
        self._count += len(lines)

    def _table(self) -> Table:
        return Table(
            self.tail.path,
            {name: column.view(self._count) for name, column in self._columns.items()},
            {name: column.view(self._count) for name, column in self._rewards.items()},
            self._codes,
            self._codes["group"],
            self._unreadable,
        )
