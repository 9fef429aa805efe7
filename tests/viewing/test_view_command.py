"""`swift view`: the ready line, the end, and folders that are none of a run."""

import json
import signal
import time

import httpx
import pytest
from run_folders import completion, logged
from view_process import ViewProcess

from swift.arguments import parse
from swift.errors import ConfigError
from swift.viewing import run
from swift.viewing.command import find_runs, names_of


@pytest.fixture
def runs(folder):
    folder.completions(completion(1))
    return folder


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_it_serves_at_the_ready_line_until_a_signal(runs, signum):
    with ViewProcess(runs.path) as view:
        assert view.url.startswith("http://127.0.0.1:") and len(view.url.split("/")[3]) >= 32
        assert httpx.get(view.url).status_code == 200
        assert httpx.get(view.url + "runs").json()[0]["name"] == "run"
        assert httpx.get(view.url.rsplit("/", 2)[0] + "/").status_code == 404
        code, errors = view.end(signum)
    assert (code, errors) == (0, "")


def test_the_ready_line_may_be_json(runs):
    with ViewProcess(runs.path, "--json", "true") as view:
        assert httpx.get(json.loads(view.line)["url"] + "runs").status_code == 200


def test_what_cannot_be_read_is_told_until_it_can(runs, monkeypatch):
    monkeypatch.setattr(run, "LOOK_S", 0.01)
    shown = runs.run()
    log = runs.path / "logging.jsonl"
    log.mkdir()
    with run.Reader([shown]):
        assert until(lambda: shown.problem.startswith("IsADirectoryError: "))
        log.rmdir()
        runs.write("logging.jsonl", logged(1))
        assert until(lambda: shown.problem == "" and shown.log.last_step == 1)


def until(condition):
    deadline = time.monotonic() + 20
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    return condition()


def test_a_taken_port_is_an_error_line(runs):
    with ViewProcess(runs.path) as view:
        port = view.url.split(":")[2].split("/")[0]
        with ViewProcess(runs.path, "--port", port, wait=False) as second:
            code, errors = second.wait()
    assert code == 3 and errors.startswith(f"swift: error: --port: {port}: cannot be used on 127.0.0.1")


def test_a_run_may_be_the_newest_of_a_folder(runs, tmp_path):
    for name in ("v0-20260101-000000", "v1-20260101-000000"):
        (tmp_path / "out" / name).mkdir(parents=True)
        (tmp_path / "out" / name / "attempts.jsonl").touch()
    (tmp_path / "out" / "v2-20260101-000000").mkdir()
    found = find_runs([str(tmp_path / "out"), str(runs.path), str(runs.path)])
    assert found == [tmp_path / "out" / "v1-20260101-000000", runs.path]
    assert names_of(found) == ["out/v1-20260101-000000", "run"]
    assert names_of([runs.path]) == ["run"]


def test_every_folder_without_a_run_is_named(tmp_path):
    with pytest.raises(ConfigError) as refused:
        find_runs([str(tmp_path), str(tmp_path / "absent")])
    assert [line.split(": no run in it")[0] for line in refused.value.problems] == [
        f"--run: {tmp_path}", f"--run: {tmp_path / 'absent'}",
    ]  # fmt: skip


def test_no_run_at_all_is_refused_and_another_address_is_warned_about():
    with pytest.raises(ConfigError, match="--run: missing"):
        parse("view", [], {})
    assert parse("view", ["--run", "a", "b"], {}).args.run == ["a", "b"]
    (note,) = parse("view", ["--run", "a", "--host", "0.0.0.0"], {}).notes
    assert note.startswith("warning: --host: 0.0.0.0: not encrypted")
