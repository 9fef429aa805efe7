"""Entries of `--dataset`: `[hf::|ms::]id_or_path[:subset[/subset]][#n]`, or a procedural task. In place of subsets, a
file of a repository may be named.

Instead of a number of random rows, `#first:last` takes the rows from `first` to before `last`, as Python counts, in the
order of the dataset; `10%` is a share of its rows.

A path that exists has precedence over `#` and `:`, so a file called `a#5` is a file. An entry that looks like a path
and does not exist is an error, and is never looked up on a hub.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, TypeVar
from urllib.parse import unquote

from swift.errors import ConfigError, join_problems, nearest, parse_json

DATA_SUFFIXES = (".jsonl", ".json", ".csv", ".tsv", ".parquet", ".jsonl.gz", ".json.gz", ".csv.gz", ".tsv.gz")
PROCEDURAL = "reasoning_gym:"
_OF_HUB = re.compile(r".*\.(jsonl?|csv|tsv|parquet)(\.(gz|zst|xz|bz2|zip))?")
"""A file in the repository of a dataset."""
_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
_BOUNDS = re.compile(r"(-?\d+%?)?:(-?\d+%?)?")

Hub = Literal["hf", "ms"]
Item = TypeVar("Item")
Result = TypeVar("Result")


@dataclass(slots=True, frozen=True)
class DatasetSpec:
    """One entry of `--dataset`, parsed.

    `target` is a path, a hub id or a task name. `count` is n of `#n`, None for all rows; `bounds` are the two texts of
    `#first:last`. `hub` is "hf" or "ms" when `kind` is "hub"; `split` is that of `--split`. `options` are the task
    settings of a procedural dataset, `seed` among them.
    """

    text: str
    kind: Literal["local", "hub", "procedural"]
    target: str
    subsets: tuple[str, ...] = ()
    count: int | None = None
    hub: Hub | None = None
    bounds: tuple[str, str] | None = None
    options: dict[str, Any] = field(default_factory=dict)
    flag: str = "--dataset"
    split: str | None = None

    @property
    def subject(self) -> str:
        """The beginning of error messages about this dataset."""
        return f"{self.flag}: {self.text}"

    def wrong(self, problem: str, *others: str) -> ConfigError:
        """An error about this dataset, and other problems."""
        return ConfigError(f"{self.subject}: {problem}", *others)

    @property
    def name(self) -> str:
        """The name of the dataset in messages: the text without its `#n`."""
        return self.text if self.count is None else self.text.replace(f"#{self.count}", "", 1)

    def part(self, size: int) -> slice:
        """The rows of `#first:last` among `size`.

        Raises:
            ConfigError: there are fewer rows, or none in that part.

        >>> DatasetSpec("d#:10%", "hub", "d", bounds=("", "10%")).part(200)
        slice(0, 20, None)
        """
        first, last = self.bounds or ("", "")
        start, stop = _place(first, size) if first else 0, _place(last, size) if last else size
        if not 0 <= start < stop <= size:
            raise self.wrong(f"#{first}:{last}: rows {start} to {stop} of {size}; name rows that there are")
        return slice(start, stop)


def parse_spec(text: str, *, use_hf: bool = False, flag: str = "--dataset") -> DatasetSpec:
    """Parses one entry; reads the file system, never the network.

    Args:
        text: the entry as typed.
        use_hf: ids without prefix are looked up on Hugging Face instead of ModelScope.
        flag: name of the setting in error messages.

    Raises:
        ConfigError: bad count or option, missing file (with the nearest names), not an id at all.

    >>> parse_spec("AI-MO/NuminaMath-TIR#5000").count
    5000
    """
    if not text.strip():
        raise ConfigError(f"{flag}: '': empty; give a file, a folder, a hub id or {PROCEDURAL}<task>")
    try:
        return replace(_parse(text, "hf" if use_hf else "ms"), flag=flag)
    except ValueError as error:
        raise ConfigError(f"{flag}: {text}: {error}") from None


def _parse(text: str, usual_hub: Hub) -> DatasetSpec:
    """See `parse_spec`; here and below, the problem is raised as a ValueError."""
    path = Path(text).expanduser()
    if os.path.lexists(path):  # also a broken link, which is an error when it is read
        return DatasetSpec(text, "local", str(path))
    if text.startswith(PROCEDURAL):
        return _procedural(text)
    prefix, mark, rest = text.partition("::")
    hub: Hub | None = "hf" if prefix == "hf" and mark else "ms" if prefix == "ms" and mark else None
    base, mark, number = (rest if hub else text).rpartition("#")
    base, number = (base, number) if mark else (number, "")
    bounds = _BOUNDS.fullmatch(number)
    count = _count(number) if mark and not bounds else None
    part = (bounds[1] or "", bounds[2] or "") if bounds else None
    if hub is None and (local := _local(text, base, count)) is not None:
        return replace(local, bounds=part)
    name, _, subset = base.partition(":")
    if hub is None and (_looks_like_path(name) or not _HUB_ID.fullmatch(name)):
        raise ValueError(f"no such file or folder; {beside(Path(name).expanduser())}")
    if not _HUB_ID.fullmatch(name):
        raise ValueError(f"{name!r} is not a hub id; write {hub}::owner/name[:subset][#n]")
    parts = (subset,) if names_file(subset) else _subsets(subset)
    return DatasetSpec(text, "hub", name, parts, count, hub or usual_hub, part)


def names_file(subset: str | None) -> bool:
    """Whether what stands behind an id of a hub is a file there, and no subset."""
    return bool(subset and _OF_HUB.fullmatch(subset))


def parse_specs(texts: Sequence[str], *, use_hf: bool = False, flag: str = "--dataset") -> list[DatasetSpec]:
    """All entries; a ConfigError lists the problems of all of them, or is raised if there are no entries."""
    if not texts:
        raise ConfigError(f"{flag}: none: no dataset is named; give files, folders, hub ids or {PROCEDURAL}<task>")
    return map_collecting_problems(texts, lambda text: parse_spec(text, use_hf=use_hf, flag=flag))


def map_collecting_problems(items: Iterable[Item], function: Callable[[Item], Result]) -> list[Result]:
    """`function` of every item; one ConfigError lists the problems of all items."""
    results, problems = [], []
    for item in items:
        try:
            results.append(function(item))
        except ConfigError as error:
            problems += error.problems
    join_problems(problems)
    return results


def beside(path: Path) -> str:
    """The end of an error about a missing path: the nearest names, or the part of the path that exists."""
    folder = path.parent
    if not folder.is_dir():
        while not folder.is_dir() and folder != folder.parent:
            path, folder = folder, folder.parent
        near = nearest(path.name, sorted(child.name for child in folder.iterdir() if child.is_dir()))
        end = f"; nearest: {', '.join(str(folder / name) for name in near)}" if near else ""
        return f"the folder {path} does not exist{end}"
    usable = sorted(child.name for child in folder.iterdir() if child.is_dir() or is_data(child))
    near = nearest(path.name, usable)
    if near:
        return f"nearest: {', '.join(str(folder / name) for name in near)}"
    listed = ", ".join(usable[:5]) or f"no {', '.join(DATA_SUFFIXES)} file"
    return f"{folder} holds {listed}"


def is_data(file: Path) -> bool:
    """Whether the name ends like that of a data file."""
    return file.name.lower().endswith(DATA_SUFFIXES)


def _looks_like_path(name: str) -> bool:
    """Rooted, dotted, with a data suffix, or with several slashes."""
    return name.startswith(("/", "./", "../", "~")) or name.endswith(("/", *DATA_SUFFIXES)) or name.count("/") > 1


def _subsets(text: str) -> tuple[str, ...]:
    return tuple(part for part in text.split("/") if part)


def _count(count: str) -> int:
    if not re.fullmatch(r"[0-9]+", count) or int(count) < 1:
        raise ValueError(
            f"bad row count {count!r} after '#'; write a whole number from 1, as in #500, or first rows as in #:10%"
        )
    return int(count)


def _place(bound: str, size: int) -> int:
    """A bound as a number of rows; a share is rounded, as `datasets` rounds that of `train[:10%]`."""
    place = round(int(bound[:-1]) * size / 100) if bound.endswith("%") else int(bound)
    return place + size if bound.startswith("-") else place


def _local(text: str, base: str, count: int | None) -> DatasetSpec | None:
    """The spec when `base`, or `base` up to its last colon, exists; the subsets of a folder are its folders."""
    path = Path(base).expanduser()
    if path.exists():
        return DatasetSpec(text, "local", str(path), count=count)
    head, colon, subset = base.rpartition(":")
    folder = Path(head).expanduser()
    if not colon or not folder.exists():
        return None
    if not folder.is_dir():
        raise ValueError(f"{head} is a file and has no subsets; leave out ':{subset}'")
    for part in _subsets(subset):
        if not (folder / part).exists():
            raise ValueError(f"no subset {part!r} in {head}; {beside(folder / part)}")
    return DatasetSpec(text, "local", str(folder), _subsets(subset), count)


def _procedural(text: str) -> DatasetSpec:
    body, _, query = text[len(PROCEDURAL) :].partition("?")
    task, mark, count = body.partition("#")
    if not task:
        raise ValueError(f"no task named; write {PROCEDURAL}<task>[#n][?seed=7&key=value]")
    options: dict[str, Any] = {}
    for pair in filter(None, query.split("&")):
        key, equals, value = pair.partition("=")
        if not equals or not key:
            raise ValueError(f"option {pair!r} is not key=value; write ?seed=7&key=value, #n before '?'")
        if key in options:
            raise ValueError(f"option {key} is given twice; keep one")
        options[key] = _option(unquote(value))
    return DatasetSpec(text, "procedural", task, count=_count(count) if mark else None, options=options)


def _option(text: str) -> Any:
    """A JSON value where the text is one, else the text itself: `4`, `0.5`, `true`, `["+","-"]`, `easy`."""
    try:
        return parse_json(text)
    except json.JSONDecodeError:
        return text
