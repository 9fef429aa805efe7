"""Local files as records: jsonl, json, csv, parquet, and folders of them.

Every reader is a generator, so a file may be larger than memory when it is streamed (json arrays excepted).
A row that parses but is no row is a `BadRow`. Where the file itself stops making sense the record is
`damaged`: jsonl goes on at the next line, so that all such lines are reported, the other formats end there.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from swift.data.records import BadRow, RawRow, Record, plain_row
from swift.data.spec import DATA_SUFFIXES, DatasetSpec
from swift.errors import ConfigError

_NOT_ROWS = {"dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json", "configuration.json"}
_MAX_CELL_CHARS = 2**31 - 1
_DECODER = json.JSONDecoder()


def read_local(spec: DatasetSpec) -> Iterator[Record]:
    """The records of all files of a local spec, file by file in the order of their names."""
    for file in data_files(spec):
        yield from read_file(file)


def data_files(spec: DatasetSpec) -> list[Path]:
    """The files of a local spec: itself, or those below the folder or its subsets; hidden ones are left out.

    Raises:
        ConfigError: an unknown suffix, or a folder without a data file.
    """
    root = Path(spec.target)
    parts = [root / subset for subset in spec.subsets] or [root]
    files = [file for part in parts for file in (_below(part) if part.is_dir() else [part])]
    unknown = [file for file in files if file.suffix.lower() not in DATA_SUFFIXES]
    if unknown:
        raise ConfigError(
            f"{spec.flag}: {spec.text}: cannot read files ending in {unknown[0].suffix or 'nothing'!r}; "
            f"valid: {', '.join(DATA_SUFFIXES)} and folders of them"
        )
    if not files:
        raise ConfigError(
            f"{spec.flag}: {spec.text}: the folder has no {', '.join(DATA_SUFFIXES)} file; check the path"
        )
    return files


def read_file(file: Path) -> Iterator[Record]:
    """The records of one file, by its suffix.

    Raises:
        ConfigError: the file cannot be opened.
    """
    readers = {".jsonl": _read_jsonl, ".json": _read_json, ".csv": _read_csv, ".parquet": _read_parquet}
    try:
        yield from readers[file.suffix.lower()](file)
    except OSError as error:
        raise ConfigError(f"--dataset: {file}: cannot be read: {error.strerror or error}; check the file") from error


def _below(folder: Path) -> list[Path]:
    return sorted(
        file
        for file in folder.rglob("*")
        if file.is_file()
        and file.suffix.lower() in DATA_SUFFIXES
        and file.name not in _NOT_ROWS
        and not any(part.startswith(".") for part in file.relative_to(folder).parts)
    )


def _row(value: Any, origin: str) -> Record:
    if isinstance(value, dict):
        return RawRow(value, origin)
    return BadRow(origin, f"a row must be a JSON object, not {_json_type(value)}")


def _json_type(value: Any) -> str:
    if value is None:
        return "null"
    names: dict[type, str] = {list: "a list", str: "a string", bool: "true or false"}
    return names.get(type(value), "a number")


def _damaged(file: Path, line: int, what: str) -> BadRow:
    return BadRow(f"{file}:{line}", what, damaged=True)


def _read_jsonl(file: Path) -> Iterator[Record]:
    with file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if number == 1:
                line = line.removeprefix(b"\xef\xbb\xbf")
            if line.strip():
                yield _json_line(file, number, line)


def _json_line(file: Path, number: int, line: bytes) -> Record:
    try:
        return _row(json.loads(line.decode("utf-8")), f"{file}:{number}")
    except UnicodeDecodeError as error:
        return _damaged(file, number, f"not UTF-8 text: byte {error.start}; save the file as UTF-8")
    except json.JSONDecodeError as error:
        return _damaged(file, number, f"broken JSON: {error.msg} at column {error.colno}; correct or delete the line")
    except RecursionError:
        return _damaged(file, number, "broken JSON: nested too deeply; correct or delete the line")


def _read_json(file: Path) -> Iterator[Record]:
    """An array of objects; a file of JSON lines that is merely called .json is read as such."""
    text, bad = _decoded(file)
    if bad:
        yield bad
        return
    start = _skip(text, 0)
    if text[start : start + 1] == "[":
        yield from _json_array(file, text, start + 1)
    elif text[start:].strip():
        yield from _json_values(file, text, start)


def _json_values(file: Path, text: str, index: int) -> Iterator[Record]:
    """Objects one after the other; an object around the list of rows is refused with its fix."""
    line = 1
    scanned = 0
    while index < len(text):
        line, scanned = line + text.count("\n", scanned, index), index
        found = _value_at(file, text, index, line)
        if isinstance(found, BadRow):
            yield found
            return
        value, end = found
        nested = _rows_inside(value)
        if nested and scanned == _skip(text, 0) and _skip(text, end) == len(text):
            yield _damaged(file, line, f"one object around the rows; save the list under {nested!r} as the whole file")
            return
        yield _row(value, f"{file}:{line}")
        index = _skip(text, end)


def _value_at(file: Path, text: str, index: int, line: int) -> tuple[Any, int] | BadRow:
    try:
        return _DECODER.raw_decode(text, index)
    except json.JSONDecodeError as error:
        return _damaged(file, error.lineno, f"broken JSON: {error.msg} at column {error.colno}; correct the file")
    except RecursionError:
        return _damaged(file, line, "broken JSON: nested too deeply; correct the file")


def _rows_inside(value: Any) -> str | None:
    """The key of a list of objects in an object that has no other value, as in {"data": [{...}]}."""
    if not isinstance(value, dict) or len(value) != 1:
        return None
    key, inner = next(iter(value.items()))
    is_rows = isinstance(inner, list) and inner and all(isinstance(item, dict) for item in inner)
    return key if is_rows and key != "messages" else None


def _json_array(file: Path, text: str, index: int) -> Iterator[Record]:
    line, scanned = 1, 0
    index = _skip(text, index)
    while text[index : index + 1] != "]":
        line, scanned = line + text.count("\n", scanned, index), index
        found = _value_at(file, text, index, line)
        if isinstance(found, BadRow):
            yield found
            return
        value, end = found
        yield _row(value, f"{file}:{line}")
        index = _skip(text, end)
        following = text[index : index + 1]
        if following == ",":
            index = _skip(text, index + 1)
        elif following != "]":
            line += text.count("\n", scanned, index)
            yield _damaged(file, line, "broken JSON: expected ',' or ']' after the row; correct the file")
            return
    rest = _skip(text, index + 1)
    if rest < len(text):
        yield _damaged(
            file, line + text.count("\n", scanned, rest), "broken JSON: text after the array; correct the file"
        )


def _skip(text: str, index: int) -> int:
    while index < len(text) and text[index] in " \t\r\n":
        index += 1
    return index


def _decoded(file: Path) -> tuple[str, BadRow | None]:
    content = file.read_bytes()
    try:
        return content.decode("utf-8-sig"), None
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        return "", _damaged(file, line, "not UTF-8 text; save the file as UTF-8")


def _read_csv(file: Path) -> Iterator[Record]:
    """Cells stay text; an empty cell is null. The line is that on which the row begins."""
    csv.field_size_limit(_MAX_CELL_CHARS)
    with file.open(encoding="utf-8-sig", newline="") as lines:
        reader = csv.reader(lines, strict=True)
        line = 1
        header: list[str] | None = None
        while True:
            line = reader.line_num + 1
            try:
                cells = next(reader)
            except StopIteration:
                return
            except UnicodeDecodeError:
                yield _damaged(file, line, "not UTF-8 text; save the file as UTF-8")
                return
            except csv.Error as error:
                yield _damaged(file, line, f"broken CSV: {error}; correct the file")
                return
            if not cells:
                continue
            if header is None:
                header = [cell.strip() for cell in cells]
                problem = _header_problem(header)
                if problem:
                    yield _damaged(file, line, problem)
                    return
            else:
                yield _csv_row(header, cells, f"{file}:{line}")


def _header_problem(header: list[str]) -> str | None:
    twice = sorted({name for name in header if header.count(name) > 1})
    if not all(header):
        return "a column without a name in the header; the first line must name every column"
    return f"the header names {', '.join(twice)} twice; rename one" if twice else None


def _csv_row(header: list[str], cells: list[str], origin: str) -> Record:
    if len(cells) != len(header):
        return BadRow(origin, f"{len(cells)} cells where the header has {len(header)}; quote cells that hold commas")
    return RawRow({name: cell or None for name, cell in zip(header, cells, strict=True)}, origin)


def _read_parquet(file: Path) -> Iterator[Record]:
    import pyarrow
    import pyarrow.parquet

    number = 0
    try:
        with pyarrow.parquet.ParquetFile(file) as table:
            for batch in table.iter_batches(batch_size=1024):
                for values in batch.to_pylist():
                    number += 1
                    yield plain_row(values, f"{file}:{number}")
    except pyarrow.ArrowException as error:
        reason = str(error).splitlines()[0]
        yield _damaged(file, number + 1, f"broken parquet: {reason}; write the file again")
