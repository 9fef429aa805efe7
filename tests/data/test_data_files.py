"""Files as records with line numbers."""

import gzip
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from swift.data.files import data_files, read_file
from swift.data.records import BadRow, RawRow
from swift.data.spec import parse_spec
from swift.errors import ConfigError


def records(path, content):
    if isinstance(content, str):
        content = content.encode()
    path.write_bytes(content)
    return [
        (
            r.origin.removeprefix(f"{path}:"),
            r.values if isinstance(r, RawRow) else r.reason,
            isinstance(r, BadRow) and r.damaged,
        )
        for r in read_file(path)
    ]


ROW = {"query": "1 + 1?", "solution": "2"}


def test_jsonl_counts_blank_lines_and_reads_a_byte_order_mark(tmp_path):
    text = "\ufeff" + json.dumps(ROW) + "\n\n" + json.dumps(ROW) + "\r\n"
    assert records(tmp_path / "a.jsonl", text) == [("1", ROW, False), ("3", ROW, False)]


def test_broken_json_at_line_17_is_reported_there_and_reading_goes_on(tmp_path):
    lines = [json.dumps(ROW)] * 20
    lines[16] = '{"query": "q", "solution" 2}'
    found = records(tmp_path / "a.jsonl", "\n".join(lines))
    assert len(found) == 20
    assert found[16][0] == "17"
    assert found[16][1].startswith("broken JSON: Expecting ':' delimiter at column 27")
    assert [line for line, _, damaged in found if damaged] == ["17"]


@pytest.mark.parametrize(
    ("line", "kind"),
    [("[1]", "a list"), ("3", "a number"), ('"x"', "a string"), ("null", "null"), ("true", "true or false")],
)
def test_a_line_that_is_no_object_is_a_bad_row_of_a_sound_file(tmp_path, line, kind):
    found = records(tmp_path / "a.jsonl", "{}\n" + line)
    assert found[1:] == [("2", f"a row must be a JSON object, not {kind}", False)]


def test_bytes_that_are_not_text_are_damage(tmp_path):
    assert records(tmp_path / "a.jsonl", b'{"a": 1}\n{"a": "\xff"}\n')[1][2]
    assert records(tmp_path / "a.json", b'[{"a": 1},\n{"a": "\xff"}]')[0][0] == "2"
    assert records(tmp_path / "a.csv", b"a,b\n\xff,2\n")[-1][2]


def test_nesting_without_end_is_damage_not_a_crash(tmp_path):
    assert records(tmp_path / "a.jsonl", "[" * 200_000)[0][2]
    assert records(tmp_path / "a.json", "[" * 200_000)[0][2]


def test_a_json_array_knows_the_line_of_every_row(tmp_path):
    text = "[\n" + json.dumps(ROW, indent=1) + ",\n" + json.dumps(ROW) + ", 5\n]\n"
    found = records(tmp_path / "a.json", text)
    assert found[0] == ("2", ROW, False)
    assert found[1] == ("6", ROW, False)
    assert found[2][:2] == ("6", "a row must be a JSON object, not a number")


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ('[{"a": 1},\n {"a" 2}]', "2"),
        ('[{"a": 1}\n {"a": 2}]', "2"),
        ('[{"a": 1},\n', "2"),
        ('[{"a": 1}]\n[]', "2"),
        ('{"a": 1}\n{"a": ', "2"),
    ],
)
def test_broken_json_arrays(tmp_path, text, line):
    last = records(tmp_path / "a.json", text)[-1]
    assert last[2]
    assert last[0] == line
    assert last[1].startswith("broken JSON")


def test_json_lines_may_be_called_json_and_an_array_jsonl(tmp_path):
    text = json.dumps(ROW) + "\n" + json.dumps(ROW)
    assert [line for line, _, _ in records(tmp_path / "a.json", text)] == ["1", "2"]
    for indent in (None, 1):
        found = records(tmp_path / "a.jsonl", "\n" + json.dumps([ROW, ROW], indent=indent))
        assert [row for _, row, _ in found] == [ROW, ROW]


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.csv"])
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-16-be"])
@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_encodings_and_compression_are_recognised(tmp_path, name, encoding, suffix):
    row = {"query": "2 漢 é", "solution": "4"}
    text = "query,solution\n2 漢 é,4\n" if name == "a.csv" else json.dumps([row], ensure_ascii=False)
    content = text.encode(encoding)
    found = records(tmp_path / f"{name}{suffix}", gzip.compress(content) if suffix else content)
    assert [values for _, values, _ in found] == [row]


@pytest.mark.parametrize("cut", [slice(0, -9), slice(1, None), slice(0, 0)])
def test_a_damaged_archive_is_one_line(tmp_path, cut):
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"query": "q"}\n' * 3)[cut])
    if not path.stat().st_size:
        assert list(read_file(path)) == []
        return
    with pytest.raises(ConfigError, match="cannot be read"):
        list(read_file(path))


def test_one_object_around_the_rows_is_refused_with_the_fix(tmp_path):
    assert "save the list under 'data'" in records(tmp_path / "a.json", json.dumps({"data": [ROW]}))[0][1]
    one = {"conversations": [{"from": "human", "value": "q"}]}
    assert records(tmp_path / "a.json", json.dumps(one)) == [("1", one, False)]


def test_an_empty_file_has_no_records(tmp_path):
    for name in ("a.json", "a.jsonl", "a.csv"):
        assert records(tmp_path / name, "") == []
    assert records(tmp_path / "a.json", "[]") == []


def test_csv_cells_are_text_empty_ones_null_and_rows_may_span_lines(tmp_path):
    text = 'question,answer\n"two\nlines",4\nshort\n,007\n'
    assert records(tmp_path / "a.csv", text) == [
        ("2", {"question": "two\nlines", "answer": "4"}, False),
        ("4", "1 cell where the header has 2; quote cells that hold commas", False),
        ("5", {"question": None, "answer": "007"}, False),
    ]


@pytest.mark.parametrize(
    ("text", "says"), [("a,a\n1,2\n", "twice"), ("a,\n1,2\n", "without a name"), ('a,b\n"x', "broken CSV")]
)
def test_broken_csv(tmp_path, text, says):
    found = records(tmp_path / "a.csv", text)
    assert says in found[-1][1]
    assert found[-1][2]


def test_parquet_rows_are_plain_json_values(tmp_path):
    path = tmp_path / "a.parquet"
    table = pa.table({"messages": [[{"role": "user", "content": "x"}]], "n": [3], "day": [pa.scalar(0, pa.date32())]})
    pq.write_table(table, path)
    (row,) = read_file(path)
    assert row == RawRow({"messages": [{"role": "user", "content": "x"}], "n": 3, "day": "1970-01-01"}, f"{path}:1")


def test_parquet_bytes_travel_as_images_only(tmp_path):
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"sound": [b"x"]}), path)
    assert "column 'sound' holds bytes" in next(iter(read_file(path))).reason
    structs = [{"bytes": b"y", "path": "y.png"}, {"bytes": None, "path": "z.png"}]
    pq.write_table(pa.table({"image": [b"x"], "photos": [structs]}), path)
    values = next(iter(read_file(path))).values
    assert values["image"] == "data:;base64,eA=="
    assert values["photos"] == [{"bytes": "data:;base64,eQ==", "path": "y.png"}, {"bytes": None, "path": "z.png"}]


def test_a_broken_parquet_file_is_damage(tmp_path):
    assert records(tmp_path / "a.parquet", "not parquet")[0][2]


def test_a_folder_is_its_data_files_in_order(tmp_path):
    for name in ("b.jsonl", "a.csv", "sub/c.json.gz", ".hidden/d.jsonl", "dataset_info.json", "README.md"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("")
    assert [f.name for f in data_files(parse_spec(str(tmp_path)))] == ["a.csv", "b.jsonl", "c.json.gz"]
    assert [f.name for f in data_files(parse_spec(f"{tmp_path}:sub"))] == ["c.json.gz"]


@pytest.mark.parametrize("name", ["b.jsonl.zst", "b.CSV.bz2", "in/b.json.zip"])
def test_packed_rows_beside_others_are_not_left_out(tmp_path, name):
    for file in (tmp_path / "a.jsonl", tmp_path / "notes.zip", tmp_path / name):
        file.parent.mkdir(exist_ok=True)
        file.write_bytes(b"{}")
    with pytest.raises(ConfigError, match=r"b\.\w+\.\w+: rows packed as \.\w+ are not read; unpack it, or use \.gz"):
        data_files(parse_spec(str(tmp_path)))


def test_unknown_suffix_and_empty_folder(tmp_path):
    (tmp_path / "a.xlsx").write_text("")
    with pytest.raises(ConfigError, match=r"cannot read files ending in '\.xlsx'; valid: \.jsonl"):
        data_files(parse_spec(str(tmp_path / "a.xlsx")))
    with pytest.raises(ConfigError, match="the folder has no"):
        data_files(parse_spec(str(tmp_path)))
