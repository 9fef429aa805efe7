"""Whatever stands in a file, loading it gives rows or an error of the user's; 600 files from a seed."""

import gzip
import json
import os
import random
import socket

import pyarrow
import pyarrow.parquet
import pytest
from row_files import settings

from swift.data import files
from swift.data.arguments import PromptArguments
from swift.data.loading import load_rows
from swift.data.prompts import Tokenizer
from swift.data.source import StreamingPrompts
from swift.errors import SwiftError

FILES = 100
NAMES = ("query", "messages", "conversations", "history", "system", "tools", "input", "answer", "completions", "", " ")
TURNS = [{"role": "user", "content": "q"}, {"from": "gpt", "value": "a"}, {"role": 3}, {"role": "tool_call"}]
VALUES = (
    None, 1, 2.5, True, "", "x", "漢", "\ud800", "\x00", "[1", "[]", json.dumps(TURNS), [], {}, TURNS, TURNS[:1], [[]],
    ["a", "b"], [["a", "b"]], 10**400, "9" * 5000, float("nan"), {"a": [1]}, " ",
)  # fmt: skip
ENCODINGS = ("utf-8", "utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "utf-32", "latin-1")


def row(rng):
    if rng.random() < 0.05:
        return rng.choice(VALUES)
    usual = {"query": str(rng.random()), "solution": "1"} if rng.random() < 0.9 else {}
    return usual | ({rng.choice(NAMES): rng.choice(VALUES)} if rng.random() < 0.2 else {})


def content(rng, suffix):
    rows = [row(rng) for _ in range(rng.randint(0, 6))]
    cells = "\n".join(rng.choice(["a,b", '"a\n,b",c', "x", "1,2,3", '"q","a"']) for _ in range(4))
    text = rng.choice(["\n".join(map(json.dumps, rows)), json.dumps(rows, indent=1), json.dumps({"data": rows})])
    data = f"query,solution\n{cells}" if "csv" in suffix and rng.random() < 0.8 else text
    data = bytearray(data.encode(rng.choice(ENCODINGS), "replace"))
    for _ in range(rng.randint(1, 4) if data and rng.random() < 0.2 else 0):
        data[rng.randrange(len(data))] = rng.randrange(256)
    if suffix.endswith(".gz") and rng.random() < 0.9:
        data = gzip.compress(data)
    return bytes(data[: rng.randint(0, len(data))] if rng.random() < 0.1 else data)


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".csv", ".parquet", ".jsonl.gz", ".csv.gz"])
def test_hostile_files(tmp_path, suffix):
    rng = random.Random(suffix)
    path = tmp_path / f"data{suffix}"
    read = 0
    for _ in range(FILES):
        path.write_bytes(content(rng, suffix))
        chosen = {"strict": rng.random() < 0.1, "max_skipped_fraction": rng.choice([0.2, 1.0])}
        args = PromptArguments(dataset=[str(path) + rng.choice(["", "#2", "#9"])], **chosen)
        try:
            if rng.random() < 0.3:
                stream = StreamingPrompts(args, Tokenizer(lambda *chat: [1]))
                read += len([stream.next() for _ in range(9)])
            else:
                rows = load_rows(args, "train", purpose=rng.choice(["prompt", "chat"]))
                read += len([example.digest for example in rows.examples])
        except SwiftError as error:
            assert error.exit_code == 2
    assert read or suffix == ".parquet"


ROW = json.dumps({"query": "q", "solution": "1"}) + "\n"


def packed(text):
    return lambda path: path.with_name(f"{path.name}.gz").write_bytes(gzip.compress(text.encode()))


def text(content):
    return lambda path: path.write_text(content)


def listening(path):
    with socket.socket(socket.AF_UNIX) as one:
        os.chdir(path.parent)
        one.bind(path.name)


SPECIAL = {
    "pipe": (os.mkfifo, "not a regular file"),
    "device": (lambda path: path.symlink_to("/dev/zero"), "not a regular file"),
    "socket": (listening, "not a regular file"),
    "link to nothing": (lambda path: path.symlink_to("nothing"), "a link that leads nowhere"),
    "link loop": (lambda path: path.symlink_to(path.name), "a link that leads nowhere"),
    "pipe in a folder": (lambda path: (path.mkdir(), os.mkfifo(path / "a.jsonl")), "not a regular file"),
    "broken link in a folder": (lambda path: (path.mkdir(), (path / "a.csv").symlink_to("b")), "leads nowhere"),
    "long line": (text(f'{{"query": "{"a" * 3000}"}}\n'), "d.jsonl:1: a row of over 2000 characters"),
    "bomb of one line": (packed("a" * 10**6), "d.jsonl.gz:1: a row of over 2000 characters"),
    "bomb of blank lines": (packed("\n" * 10**4), "d.jsonl.gz:101: 101 blank lines"),
    "bomb of an array": (packed("[1]\n" + " \n" * 10**4), "over 9000 characters in one array"),
    "open quote": (lambda path: path.with_suffix(".csv").write_text('q\n"' + "a\n" * 2000), "field larger than"),
    "key twice": (text('{"query": "a", "query": "b"}'), "d.jsonl:1: the key 'query' is there twice"),
    "key twice in a turn": (text('[{"query": [{"role": "user", "role": "a"}]}]'), "the key 'role' is there twice"),
    "carriage returns": (text(ROW.replace("\n", "\r") * 3), "broken JSON"),
    "nesting": (text('{"query": "a", "x": ' + "[" * 10**5 + "]" * 10**5 + "}"), "nested too deeply"),
    "long integer": (text('{"query": "a", "x": ' + "9" * 5000 + "}"), "an integer of too many digits"),
    "late bytes": (lambda path: path.write_bytes(ROW.encode() * 999 + b"\xff\n"), "d.jsonl:1000: not UTF-8"),
    "null byte": (text('{"query": "\0"}'), "broken JSON"),
}


@pytest.mark.parametrize("name", SPECIAL)
def test_what_is_no_file_of_rows_is_one_line_of_the_right_size(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    for limit, value in (("ROW_CHARS", 2000), ("ARRAY_CHARS", 9000), ("BLANK_LINES", 100)):
        monkeypatch.setattr(files, f"MAX_{limit}", value if name not in ("nesting", "long integer") else 10**6)
    make, says = SPECIAL[name]
    make(tmp_path / "d.jsonl")
    (path,) = tmp_path.iterdir()
    with pytest.raises(SwiftError, match=says) as refused:
        load_rows(settings(path), "train", purpose="prompt")
    assert refused.value.exit_code == 2 and all("\n" not in problem for problem in refused.value.problems)


def test_folders_behind_links_are_read_once_and_unreadable_ones_are_an_error(tmp_path, monkeypatch):
    (tmp_path / "rows" / "inner").mkdir(parents=True)
    (tmp_path / "other").mkdir()
    for folder in ("rows", "rows/inner", "other"):
        (tmp_path / folder / "a.jsonl").write_text(ROW)
    (tmp_path / "rows" / "inner" / "up").symlink_to("..")
    for link in ("link", "again"):
        (tmp_path / "rows" / link).symlink_to("../other")
    assert len(load_rows(settings(tmp_path / "rows"), "train", purpose="prompt")) == 3
    scan = os.scandir

    def refuse(path):
        if str(path).endswith("inner"):
            raise PermissionError(13, "Permission denied", str(path))
        return scan(path)

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(SwiftError, match="inner: cannot be read: Permission denied"):
        load_rows(settings(tmp_path / "rows"), "train", purpose="prompt")


def test_a_text_that_all_rows_of_a_parquet_file_share_is_held_once(tmp_path, monkeypatch):
    text, rows = "a" * 10**6, 3000
    column = pyarrow.DictionaryArray.from_arrays(pyarrow.array([0] * rows, pyarrow.int32()), pyarrow.array([text]))
    turns = pyarrow.array([[{"role": "user", "content": "b"}]] * rows)
    path = tmp_path / "d.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"query": column, "turns": turns}), path, compression="zstd")
    assert path.stat().st_size < 5000
    before = pyarrow.default_memory_pool().max_memory()
    monkeypatch.setattr(files, "MAX_ARRAY_CHARS", 10**8)
    records = list(files.read_file(path))
    assert pyarrow.default_memory_pool().max_memory() < max(before, 4 * 10**8)
    assert len(records) == rows and {id(record.values["query"]) for record in records} == {
        id(records[0].values["query"])
    }
    assert records[0].values == {"query": text, "turns": [{"role": "user", "content": "b"}]}
