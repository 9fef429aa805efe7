"""What the page asks for: the answers, and what nobody gets."""

import json
import time

import numpy as np
import pytest
from fastapi.testclient import TestClient
from run_folders import completion, logged, read, recorded

from swift.viewing import diagnosis
from swift.viewing.app import make_app

TOKEN = "secret-token"
HOSTILE = "<img src=x onerror=alert(1)><script>alert(2)</script>"


@pytest.fixture
def client(folder):
    folder.completions(
        *(completion(step, group, index) for step in (1, 2) for group in (0, 1) for index in (0, 1)),
        completion(
            3, reward=None, advantage=None, excluded="no_reward", rewards={"accuracy": None}, completion=HOSTILE
        ),
        completion(3, index=1, completion="é\ud800", turns=[{"role": "tool", "content": "x"}]),
    )
    folder.write("logging.jsonl", logged(1), logged(2))
    folder.record(1, recorded(sampler_logprobs=np.array([np.nan, -1, -1], np.float32)))
    made = TestClient(make_app([folder.run()], TOKEN), base_url=f"http://127.0.0.1/{TOKEN}/")
    return made


def get(client, path, **parameters):
    reply = client.get(path, params=parameters)
    assert reply.status_code == 200, reply.text
    return reply.json()


def test_the_page_holds_all_that_it_needs(client):
    reply = client.get("")
    assert reply.status_code == 200 and "swift view" in reply.text
    for foreign in ("http://", "https://", "//cdn", "@import", "innerHTML", "document.write", "eval("):
        assert foreign not in reply.text.replace("http://www.w3.org/2000/svg", "")
    policy = reply.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "unsafe" not in policy
    assert reply.headers["referrer-policy"] == "no-referrer"


@pytest.mark.parametrize(
    "path",
    [
        *("/", "/runs", "/wrong/", "/wrong/runs", f"/{TOKEN}x/runs", f"/{TOKEN[:-1]}/runs", "//", "/docs"),
        *(f"/{TOKEN}/{path}" for path in ("../../etc/passwd", "..%2f..%2fetc/passwd", "args.json", "%2e%2e/args.json")),
    ],
)
def test_other_paths_do_not_exist(client, path):
    reply = client.get(f"http://127.0.0.1{path}")
    assert reply.status_code == 404
    assert "content-security-policy" in reply.headers and "root:" not in reply.text


@pytest.mark.parametrize("path", ["", "runs", "groups", "completion", "export"])
@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH"])
def test_nothing_is_written(client, path, method):
    assert client.request(method, path).status_code == 405


@pytest.mark.parametrize(
    ("path", "status", "message"),
    [
        ("groups?run=1", 404, "run: 1: there are 1"),
        ("groups?run=-1", 404, "run: -1: there are 1"),
        ("groups?run=../x", 422, ""),
        ("groups?order=size", 422, ""),
        ("groups?page=-1", 422, ""),
        ("groups?function=absent&least=1", 422, "function: absent: not a reward of this run; valid: accuracy, format"),
        ("group?step=9&split=train&group_id=p0-1", 404, "group p0-1 of step 9: not in completions.jsonl"),
        ("group?step=1&split=train&group_id=../../etc/passwd", 404, "not in completions.jsonl"),
        ("completion?step=1&split=train&group_id=p0-1&index=9", 404, "completion 9 of group p0-1, step 1"),
    ],
)
def test_what_is_not_there_is_told_in_a_line(client, path, status, message):
    reply = client.get(path)
    assert reply.status_code == status and message in str(reply.json()["detail"])


def test_runs_are_told_with_what_their_filters_choose_from(client):
    (run,) = get(client, "runs")
    expected = {
        "name": "run", "last_step": 2, "completions": 10, "groups": 5, "steps": [1, 3], "splits": ["train"],
        "functions": ["accuracy", "format"], "finish_reasons": ["stop"], "excluded": ["no_reward"], "problem": "",
        "unreadable": 0, "reason": None, "keys": ["reward", "rewards/accuracy/mean"],
    }  # fmt: skip
    assert expected.items() <= run.items() and run["bytes"] == run["read_bytes"]


def test_curves_and_groups_come_as_they_are_asked_for(client):
    found = get(client, "curves", key=["reward", "absent"], first=2)
    assert found == {"series": {"reward": [[2], [0.2]], "absent": [[], []]}, "marks": []}
    found = get(client, "groups", text="answer 1", order="step", descending=False)
    assert (found["completions"], found["count"]) == (4, 4)
    assert found["groups"][0] == {
        "step": 1, "split": "train", "group_id": "p0-1", "prompt_id": "p0", "prompt": "[user]\nquestion 0?",
        "matches": 1, "size": 2, "excluded": 0, "mean": 1.0, "least": 0.5, "greatest": 1.5, "spread": 0.5,
        "length": 4.5,
    }  # fmt: skip
    assert get(client, "groups", page=1)["groups"] == []
    assert get(client, "prompt", prompt_id="p1")["step"] == [1, 2]


def test_a_group_comes_as_it_was_logged_and_html_in_it_is_text(client):
    rows = get(client, "group", step=3, split="train", group_id="p0-3")["completions"]
    assert rows[0]["completion"] == HOSTILE and rows[0]["reward"] is None
    assert rows[1]["completion"] == "é\ud800"
    pieces = get(client, "difference", step=1, split="train", group_id="p0-1", first=0, second=1)
    assert pieces == [["equal", "answer "], ["first", "0"], ["second", "1"], ["equal", " of step 1"]]
    pieces = get(client, "difference", step=3, split="train", group_id="p0-3", first=0, second=1)
    assert "".join(text for kind, text in pieces if kind != "first") == "[tool]\nx"


def test_a_completion_comes_with_its_tokens_where_they_are_on_record(client):
    found = get(client, "completion", step=1, split="train", group_id="p0-1", index=0)
    assert found["row"] == completion(1)
    assert found["tokens"]["steps"][0]["sampler_logprobs"] == [None, -1.0, -1.0]
    assert get(client, "completion", step=2, split="train", group_id="p0-2", index=0)["tokens"] is None


def test_an_export_has_the_lines_of_the_filter(client, folder):
    reply = client.get("export", params={"first_step": 2, "excluded": "no"})
    assert reply.headers["content-disposition"] == 'attachment; filename="run-completions.jsonl"'
    lines = (folder.path / "completions.jsonl").read_bytes().splitlines(keepends=True)
    assert reply.content == b"".join(lines[4:8] + lines[9:])


def test_a_live_run_grows(folder):
    run = folder.run()
    client = TestClient(make_app([run], TOKEN), base_url=f"http://127.0.0.1/{TOKEN}/")
    assert get(client, "groups")["count"] == 0 and get(client, "runs")[0]["steps"] is None
    folder.completions(completion(1))
    folder.write("logging.jsonl", logged(1))
    read(run)
    assert get(client, "groups")["count"] == 1
    assert get(client, "curves", key="reward")["series"] == {"reward": [[1], [0.1]]}


def test_nothing_of_the_folder_is_changed(client, folder):
    before = {path: path.read_bytes() for path in folder.path.rglob("*") if path.is_file()}
    for path in ("", "runs", "groups", "curves?key=reward", "export", "group?step=1&split=train&group_id=p0-1"):
        assert client.get(path).status_code == 200
    assert {path: path.read_bytes() for path in folder.path.rglob("*") if path.is_file()} == before


def test_a_file_that_is_no_record_of_swift_is_told(folder):
    folder.completions(completion(1))
    (folder.path / "alerts.jsonl").write_text("nonsense\n")
    client = TestClient(make_app([folder.run()], TOKEN), base_url=f"http://127.0.0.1/{TOKEN}/")
    reply = client.get("curves")
    assert reply.status_code == 422 and "alerts.jsonl:1:" in json.loads(reply.text)["detail"]


def diagnosed(client):
    """The diagnosis of the run, once it is there."""
    while (found := get(client, "runs")[0]["diagnosis"])["waits"]:
        assert found["causes"] == []
        time.sleep(0.02)
    return found


def test_the_causes_of_a_run_come_with_their_steps_and_sentences(client, folder):  # its losses are null
    before = set(folder.path.rglob("*"))
    (cause, *_) = diagnosed(client)["causes"]
    assert (cause["cause"], cause["steps"]) == ("non_finite", [1, 2])
    assert cause["sentence"] == "Updates are not finite and are skipped." and cause["evidence"] and cause["fix"]
    assert set(folder.path.rglob("*")) == before


def test_a_run_that_cannot_be_diagnosed_says_why(folder):
    folder.write("logging.jsonl", logged(1))
    folder.write("completions.jsonl", {"step": 1, "attempt": 1})
    client = TestClient(make_app([folder.run()], TOKEN), base_url=f"http://127.0.0.1/{TOKEN}/")
    assert "no line of swift's" in diagnosed(client)["problem"]


def test_a_live_run_is_diagnosed_again_after_a_rest(folder, monkeypatch):
    folder.write("logging.jsonl", logged(1))

    def starts(*last_steps):
        diagnose, children = diagnosis.Diagnosis(folder.path), []
        for last_step in last_steps:
            diagnose(last_step)
            children += [diagnose._child] if diagnose._child is not None else []
            while diagnose._child is not None:
                diagnose(last_step)
                time.sleep(0.02)
        diagnose.close()
        return len(children)

    assert starts(None) == 0 and starts(1, 1, 2) == 1
    monkeypatch.setattr(diagnosis, "REST", 0)
    assert starts(1, 1, 2) == 2


def test_a_diagnosis_that_is_killed_is_a_problem_and_an_end_leaves_no_process(folder):
    folder.write("logging.jsonl", logged(1))
    diagnose = diagnosis.Diagnosis(folder.path)
    assert diagnose(1)["waits"]
    diagnose._child.kill()
    while (found := diagnose(1))["waits"]:
        time.sleep(0.01)
    assert found["problem"] == f"exit code -9; run `swift doctor {folder.path}`"
    diagnose = diagnosis.Diagnosis(folder.path)
    diagnose(1)
    child = diagnose._child
    diagnose.close()
    assert child.returncode == -9
