"""Images of prompts: found again in the dataset's files, as they were in the run, and nothing else is served."""

import base64
import json
import os

import pytest
from fastapi.testclient import TestClient
from hostile_images import encoded
from run_folders import completion

from swift.data.arguments import DataArguments
from swift.data.image_store import images_in
from swift.data.images import digest_of
from swift.data.loading import load_rows
from swift.observability.completions_log import completion_rows
from swift.rollout.round_result import ScoredRound
from swift.types import Completion, GroupScores, Prompt, RolloutGroup
from swift.viewing.app import make_app

PNG, JPEG = encoded(), encoded(kind="JPEG")
TOKEN = "secret-token"


def logged(dataset):
    """The rows of completions.jsonl about the prompts of a dataset."""
    rows = []
    for example in load_rows(DataArguments(dataset=[str(dataset)]), "train", purpose="prompt", images=True).examples:
        prompt = Prompt("p0", example.messages, [1], example.columns)
        scores = GroupScores([[1.0]], [None])
        group = RolloutGroup("p0-1", 0, 0, prompt, [Completion("p0-1/0", [1], [0.0], "stop", "a")], scores)
        scored = ScoredRound("train", len(rows) + 1, [group], [1.0], [0.0], [None], 0, {}, [True])
        rows += completion_rows(scored, attempt=1, reward_names=["accuracy"], images_in=images_in)
    return rows


@pytest.fixture
def ask(folder):
    """Asks for an image of the completion of a step, once it is logged."""

    def asked(rows, digest, step=1):
        folder.completions(*rows)
        client = TestClient(make_app([folder.run()], TOKEN), base_url=f"http://127.0.0.1/{TOKEN}/")
        place = {"step": step, "split": "train", "group_id": "p0-1", "index": 0, "digest": digest}
        return client.get("image", params=place)

    return asked


def url_of(content):
    return "data:;base64," + base64.b64encode(content).decode()


def as_jsonl(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


FORMS = {
    "a data URL": lambda content: {"query": "What?", "images": [url_of(content)]},
    "an OpenAI part": lambda content: {
        "messages": [
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": url_of(content)}}]},
        ]
    },
    "base64": lambda content: {
        "messages": [{"role": "user", "content": [{"type": "image", "base64": base64.b64encode(content).decode()}]}]
    },
}


@pytest.mark.parametrize("form", FORMS)
def test_an_image_in_a_row_is_read_from_its_row_again(tmp_path, ask, form):
    file = as_jsonl(tmp_path / "rows.jsonl", FORMS[form](PNG), FORMS[form](JPEG))
    rows = logged(file)
    assert rows[1]["images"] == [{"digest": digest_of(JPEG), "row": f"{file}:2"}]
    assert f"<image {digest_of(JPEG)}>" in rows[1]["prompt"]
    reply = ask(rows, digest_of(JPEG), step=2)
    assert (reply.status_code, reply.content, reply.headers["content-type"]) == (200, JPEG, "image/jpeg")
    assert reply.headers["x-content-type-options"] == "nosniff"


def test_bytes_of_a_parquet_file_are_read_again(tmp_path, ask):
    pa = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    table = pa.table({"query": ["What?"], "images": [[{"bytes": PNG, "path": None}]]})
    parquet.write_table(table, tmp_path / "rows.parquet")
    rows = logged(tmp_path / "rows.parquet")
    assert ask(rows, digest_of(PNG)).content == PNG


def test_a_file_is_read_again_and_a_text_has_no_images(tmp_path, ask, monkeypatch):
    (tmp_path / "a.png").write_bytes(PNG)
    as_jsonl(tmp_path / "rows.jsonl", {"query": "<image>What?", "images": ["a.png"]}, {"query": "Why?"})
    monkeypatch.chdir(tmp_path)
    rows = logged("rows.jsonl")
    assert rows[0]["images"] == [{"digest": digest_of(PNG), "path": str(tmp_path / "a.png")}]
    assert "images" not in rows[1]
    reply = ask(rows, digest_of(PNG))
    assert (reply.status_code, reply.content, reply.headers["content-type"]) == (200, PNG, "image/png")


def test_a_relative_dataset_is_found_from_anywhere(tmp_path, ask, monkeypatch):
    as_jsonl(tmp_path / "rows.jsonl", FORMS["a data URL"](PNG))
    monkeypatch.chdir(tmp_path)
    rows = logged("rows.jsonl")
    monkeypatch.chdir("/")
    assert ask(rows, digest_of(PNG)).content == PNG


def remove(path):
    path.unlink()


def replace(path):
    path.write_bytes(JPEG)


def link_out(path):
    secret = path.parent.parent / "secret.png"
    secret.write_bytes(PNG)
    path.unlink()
    path.symlink_to(secret)


def pipe(path):
    path.unlink()
    os.mkfifo(path)


@pytest.mark.parametrize("change", [remove, replace, link_out, pipe])
def test_a_file_that_is_another_one_now_is_not_served(tmp_path, ask, change):
    path = tmp_path / "data" / "a.png"
    path.parent.mkdir()
    path.write_bytes(PNG)
    row = completion(1, group_id="p0-1", images=[{"digest": digest_of(PNG), "path": str(path)}])
    change(path)
    reply = ask([row], digest_of(PNG))
    assert reply.status_code == 422 and str(path) in reply.json()["detail"]


@pytest.mark.parametrize(
    ("content", "name"),
    [(b"root:x:0:0", "passwd"), (b"<svg><script/></svg>", "a.svg"), (b'{"images": "data:,x"}\n', "rows.jsonl")],
)
@pytest.mark.parametrize("kind", ["path", "row"])
def test_what_is_no_image_is_not_served_whatever_the_log_says(tmp_path, ask, content, name, kind):
    (tmp_path / name).write_bytes(content)
    place = str(tmp_path / name) + (":1" if kind == "row" else "")
    row = completion(1, group_id="p0-1", images=[{"digest": digest_of(content), kind: place}])
    reply = ask([row], digest_of(content))
    assert reply.status_code == 422 and content not in reply.content


@pytest.mark.parametrize("digest", ["../../etc/passwd", "", digest_of(JPEG)])
def test_only_images_of_the_completion_are_served(tmp_path, ask, digest):
    (tmp_path / "a.png").write_bytes(PNG)
    (tmp_path / "b.jpg").write_bytes(JPEG)
    other = completion(2, group_id="p0-1", images=[{"digest": digest_of(JPEG), "path": str(tmp_path / "b.jpg")}])
    row = completion(1, group_id="p0-1", images=[{"digest": digest_of(PNG), "path": str(tmp_path / "a.png")}])
    assert ask([row, other], digest).status_code == 422
