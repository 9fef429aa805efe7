"""Local files as records: jsonl, json, csv (also as .gz), parquet, and folders of them.

`datasets` would read them, too, but into columns of one type each: a number among texts is an error there, keys of
tool calls are padded with nulls, and line numbers are lost. Every reader is a generator, so a file may be larger than
memory when it is streamed (json arrays excepted). Text is UTF-8, or UTF-16 as programs of Windows write it. A value
that parses but is not a row is a `BadRow`. Where the file itself does not parse the record is `damaged`: reading of
jsonl continues at the next line, that of other formats ends there.
"""

from __future__ import annotations

import codecs
import csv
import gzip
import json
import os
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO, cast

from swift.data.messages import is_chat
from swift.data.records import BadRow, RawRow, Record, plain_row
from swift.data.spec import DATA_SUFFIXES, DatasetSpec, is_data
from swift.errors import ConfigError, counted, first_line, parse_json

_NOT_ROWS = {"dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json", "configuration.json"}
_OTHER_PACKING = {".zst", ".xz", ".bz2", ".zip", ".lz4", ".br", ".z", ".7z"}
MAX_ROW_CHARS, MAX_ARRAY_CHARS, MAX_BLANK_LINES = 2**28, 2**30, 2**20
"""Limits of the text in memory before it is parsed as a row; an array of rows is read as a whole."""
_LFS_POINTER = b"version https://git-lfs.github.com/spec/"
_BETWEEN_ROWS = re.compile(r"[\s,]*")


def read_local(spec: DatasetSpec) -> Iterator[Record]:
    """The records of all files of a local spec, file by file in the order of their names."""
    for file in data_files(spec):
        yield from read_file(file)


def data_files(spec: DatasetSpec) -> list[Path]:
    """The files of a local spec: itself, or those below the folder or its subsets; hidden ones are left out."""
    root = Path(spec.target)
    parts = [root / subset for subset in spec.subsets] or [root]
    files = [file for part in parts for file in (_below(part) if part.is_dir() else [part])]
    unknown = [file for file in files if not is_data(file)]
    if unknown:
        raise spec.wrong(
            f"cannot read files ending in {unknown[0].suffix or 'nothing'!r}; "
            f"valid: {', '.join(DATA_SUFFIXES)} and folders of them"
        )
    if not files:
        raise spec.wrong(f"the folder has no {', '.join(DATA_SUFFIXES)} file; check the path")
    if special := [file for file in files if not file.is_file()]:
        raise spec.wrong(f"{special[0]}: not a regular file, or a link that leads nowhere; replace it by a file")
    return files


def read_file(file: Path) -> Iterator[Record]:
    """The records of one file, by its suffix."""
    readers = {".jsonl": _read_jsonl, ".json": _read_json, ".parquet": _read_parquet}
    try:
        if is_lfs_pointer(file):
            raise ConfigError(f"--dataset: {file}: a Git LFS pointer, not the file; run `git lfs pull` in its folder")
        suffix = Path(file.name.lower().removesuffix(".gz")).suffix
        yield from readers.get(suffix, _read_csv)(file)
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"--dataset: {file}: cannot be read: {reason}; check the file") from error


def is_lfs_pointer(file: Path) -> bool:
    """Whether the file is a pointer to one that Git LFS has not fetched yet."""
    with file.open("rb") as content:
        return content.read(len(_LFS_POINTER)) == _LFS_POINTER


def _below(folder: Path) -> list[Path]:
    """Files with the name of a data file, also behind links; each folder once, even if several links lead to it."""

    def unreadable(error: OSError) -> None:
        raise ConfigError(f"--dataset: {error.filename}: cannot be read: {error.strerror}; check the folder") from error

    found: list[Path] = []
    seen = {os.path.realpath(folder)}
    for path, folders, names in os.walk(folder, onerror=unreadable, followlinks=True):
        wanted = sorted((name for name in folders if not name.startswith(".")), reverse=True)
        inside = {os.path.realpath(Path(path, name)): name for name in wanted}
        folders[:] = [name for real, name in inside.items() if real not in seen]
        seen |= inside.keys()
        found += [Path(path, name) for name in names if not name.startswith(".") and name not in _NOT_ROWS]
    for file in found:
        if file.suffix.lower() in _OTHER_PACKING and is_data(file.with_suffix("")):
            raise ConfigError(f"--dataset: {file}: rows packed as {file.suffix} are not read; unpack it, or use .gz")
    return sorted(file for file in found if is_data(file))


class _RowDecoder(json.JSONDecoder):
    """Decodes JSON and finds objects with a repeated key."""

    def __init__(self) -> None:
        self._repeated: list[str] = []
        super().__init__(object_pairs_hook=self._object)

    def _object(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            names = [name for name, _ in pairs]
            self._repeated += [name for name in found if names.count(name) > 1]
        return found

    def row(self, value: Any, origin: str) -> Record:
        """The record of a value; after `decode`, also checks the value's keys."""
        repeated, self._repeated = self._repeated, []
        if repeated:
            return BadRow(origin, f"the key {repeated[0]!r} is there twice; keep one")
        if isinstance(value, dict):
            return RawRow(value, origin)
        names: dict[type, str] = {type(None): "null", list: "a list", str: "a string", bool: "true or false"}
        return BadRow(origin, f"a row must be a JSON object, not {names.get(type(value), 'a number')}")


def _damaged(file: Path, line: int, what: str) -> BadRow:
    return BadRow(f"{file}:{line}", what, damaged=True)


def _open(file: Path, *, newline: str = "\n", errors: str = "surrogateescape") -> TextIO:
    """The text of a file; by default a byte that is not text becomes half of a surrogate pair: `_undecoded_place`."""
    opener: Any = gzip.open if file.suffix.lower() == ".gz" else open
    with opener(file, "rb") as content:
        first = content.read(2)
    encoding = "utf-16-le" if first[1:] == b"\0" else "utf-16-be" if first[:1] == b"\0" else "utf-8-sig"
    if first in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):
        encoding = "utf-16"
    return cast(TextIO, opener(file, "rt", encoding=encoding, errors=errors, newline=newline))


def _lines(content: TextIO, file: Path) -> Iterator[str]:
    """The lines of a file, which may be a gzip bomb. Raises ConfigError: a line is too long, or many are blank."""
    number = blank = 0
    while line := content.readline(MAX_ROW_CHARS):
        number, blank = number + 1, blank + 1 if line.isspace() else 0
        if len(line) == MAX_ROW_CHARS or blank > MAX_BLANK_LINES:
            what = f"{blank} blank lines" if blank else f"a row of over {MAX_ROW_CHARS} characters"
            raise ConfigError(f"--dataset: {file}:{number}: {what}; correct the file")
        yield line


def _undecoded_place(text: str) -> int | None:
    """The index of the first byte that `_open` could not decode."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return error.start
    return None


def _read_jsonl(file: Path) -> Iterator[Record]:
    """A row per line; an array that is merely called .jsonl is read as such."""
    with _open(file) as lines:
        is_array = next((line for line in _lines(lines, file) if line.strip()), "").lstrip().startswith("[")
    yield from _read_json(file) if is_array else _json_lines(file)


def _json_lines(file: Path) -> Iterator[Record]:
    decoder = _RowDecoder()
    with _open(file) as lines:
        for number, line in enumerate(_lines(lines, file), start=1):
            if not line.strip():
                continue
            if (place := _undecoded_place(line)) is not None:
                yield _damaged(file, number, f"not UTF-8 text at column {place + 1}; save the file as UTF-8")
                continue
            try:
                yield decoder.row(parse_json(line, decoder), f"{file}:{number}")
            except json.JSONDecodeError as error:
                what = f"broken JSON: {error.msg} at column {error.colno}; correct or delete the line"
                yield _damaged(file, number, what)


def _read_json(file: Path) -> Iterator[Record]:
    """An array of objects, or one object; a file of JSON lines that is merely called .json is read as such."""
    with _open(file) as content:
        text = content.read(MAX_ARRAY_CHARS)
    if len(text) == MAX_ARRAY_CHARS:
        raise ConfigError(f"--dataset: {file}: over {MAX_ARRAY_CHARS} characters in one array; save it as .jsonl")
    if not text.strip():
        return
    if (place := _undecoded_place(text)) is not None:
        yield _damaged(file, text.count("\n", 0, place) + 1, "not UTF-8 text; save the file as UTF-8")
        return
    try:
        value = parse_json(text)
    except json.JSONDecodeError as error:
        if error.msg == "Extra data" and not text.lstrip().startswith("["):
            yield from _json_lines(file)
        else:
            what = f"broken JSON: {error.msg} at column {error.colno}; correct the file"
            yield _damaged(file, error.lineno, what)
    else:
        key = _key_around_rows(value)
        if key is not None:
            yield _damaged(file, 1, f"one object around the rows; save the list under {key!r} as the whole file")
        elif isinstance(value, list):
            yield from _array_rows(file, text)
        else:
            yield _RowDecoder().row(value, f"{file}:1")


def _key_around_rows(value: Any) -> str | None:
    """The key of a list of objects in an object that has no other value, as in {"data": [{...}]}."""
    if not isinstance(value, dict) or len(value) != 1:
        return None
    key, inner = next(iter(value.items()))
    is_rows = isinstance(inner, list) and inner and all(isinstance(item, dict) for item in inner)
    return key if is_rows and not is_chat(inner) else None


def _array_rows(file: Path, text: str) -> Iterator[Record]:
    """The rows of a valid array with their line numbers, which `json.loads` does not return."""
    decoder = _RowDecoder()
    line, passed, end = 1, 0, text.index("[") + 1
    while True:
        start = _BETWEEN_ROWS.match(text, end).end()  # type: ignore[union-attr]
        if text[start] == "]":
            return
        line, passed = line + text.count("\n", passed, start), start
        value, end = decoder.raw_decode(text, start)
        yield decoder.row(value, f"{file}:{line}")


def _read_csv(file: Path) -> Iterator[Record]:
    """Cells stay text, which callers convert to numbers; an empty cell is null. The line of a row is its first."""
    csv.field_size_limit(MAX_ROW_CHARS)
    line = 1
    with _open(file, newline="", errors="strict") as lines:
        delimiter = "\t" if file.name.lower().endswith((".tsv", ".tsv.gz")) else ","
        reader = csv.reader(_lines(lines, file), delimiter=delimiter, strict=True)
        header: list[str] = []
        try:
            for cells in reader:
                origin, line = f"{file}:{line}", reader.line_num + 1
                if not cells:
                    continue
                if header:
                    yield _csv_row(header, cells, origin)
                    continue
                header = [cell.strip() for cell in cells]
                if problem := _header_problem(header):
                    yield BadRow(origin, problem, damaged=True)
                    return
        except UnicodeDecodeError:
            yield _damaged(file, line, "not UTF-8 text; save the file as UTF-8")
        except csv.Error as error:
            yield _damaged(file, line, f"broken CSV: {error}; correct the file")


def _header_problem(header: list[str]) -> str | None:
    twice = sorted({name for name in header if header.count(name) > 1})
    if not all(header):
        return "a column without a name in the header; the first line must name every column"
    return f"the header names {', '.join(twice)} twice; rename one" if twice else None


def _csv_row(header: list[str], cells: list[str], origin: str) -> Record:
    if len(cells) != len(header):
        return BadRow(
            origin, f"{counted(len(cells), 'cell')} where the header has {len(header)}; quote cells that hold commas"
        )
    return RawRow({name: cell or None for name, cell in zip(header, cells, strict=True)}, origin)


def _read_parquet(file: Path) -> Iterator[Record]:
    """A text that many rows share, which may be long in a small file, is held once."""
    import pyarrow
    import pyarrow.parquet

    number, known = 0, dict[str, str]()
    try:
        with pyarrow.parquet.ParquetFile(file) as table:
            for batch in table.iter_batches(batch_size=_batch_rows(table.metadata)):
                texts: dict[str, str] = {}
                for values in batch.to_pylist():
                    number += 1
                    yield plain_row(_shared(values, known, texts), f"{file}:{number}")
                known = texts
    except pyarrow.ArrowException as error:
        yield _damaged(file, number + 1, f"broken parquet: {first_line(error)}; write the file again")


def _batch_rows(metadata: Any) -> int:
    """As many rows as fit into `MAX_ARRAY_CHARS` if each holds all that a row group has in a column."""
    chunks = (
        metadata.row_group(group).column(column).total_uncompressed_size
        for group in range(metadata.num_row_groups)
        for column in range(metadata.num_columns)
    )
    return min(1024, max(1, MAX_ARRAY_CHARS // max([1, *chunks])))


def _shared(value: Any, known: dict[str, str], texts: dict[str, str]) -> Any:
    """The value with equal texts replaced by one object: that in `texts`, or in `known`, of the batch before."""
    if isinstance(value, str):
        return texts.setdefault(value, known.get(value, value))
    if isinstance(value, dict):
        return {name: _shared(item, known, texts) for name, item in value.items()}
    return [_shared(item, known, texts) for item in value] if isinstance(value, list) else value
