"""The run folder: versions, lock, attempts, and nothing on disk before it is opened."""

import errno
import json
import os
import subprocess
import sys
from datetime import datetime
from pathlib import Path

import pytest

from swift.errors import ConfigError, ResourceError
from swift.observability.files import check_writable, write_text, writing
from swift.observability.jsonl import read_jsonl
from swift.observability.rank_log import RankLog
from swift.observability.run_dir import RunDirectory, list_versions, rank_log_file
from swift.observability.secrets import is_masked, mask, mask_argv, mask_config

NOW = datetime(2026, 1, 2, 3, 4, 5)


def start(output_dir, **keywords):
    opening = {"argv": ["swift", "rlhf"], "settings": {"seed": 42}, "now": NOW}
    opening |= {key: keywords.pop(key) for key in ("changed", "start_step", "config_file", "argv") if key in keywords}
    run = RunDirectory(output_dir, **keywords)
    run.open(**opening)
    return run


def attempts(path):
    return list(read_jsonl(path / "attempts.jsonl"))


def test_nothing_is_written_before_open(tmp_path):
    RunDirectory(tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_versions_count_up_from_the_highest(tmp_path):
    first, second = start(tmp_path), start(tmp_path)
    assert [first.path.name, second.path.name] == ["v0-20260102-030405", "v1-20260102-030405"]
    (tmp_path / "v9-20250101-000000").mkdir()
    (tmp_path / "v77-notes").mkdir()
    assert start(tmp_path).path.name == "v10-20260102-030405"
    assert [path.name[:3] for path in list_versions(tmp_path)] == ["v0-", "v1-", "v9-", "v10"]


def test_without_version_the_output_dir_is_the_run(tmp_path):
    assert start(tmp_path / "out", add_version=False).path == tmp_path / "out"


def test_without_version_a_folder_with_checkpoints_is_refused(tmp_path):
    (tmp_path / "checkpoint-5").mkdir()
    with pytest.raises(ConfigError, match="--resume_from_checkpoint last"):
        start(tmp_path, add_version=False)
    assert not (tmp_path / "args.json").exists()


def test_a_folder_that_cannot_be_written_is_a_configuration_error(tmp_path):
    (tmp_path / "taken").write_text("")
    for folder, problem in ((tmp_path / "taken" / "x", "taken is a file"), (Path("/proc/x/y"), "cannot be written")):
        with pytest.raises(ConfigError, match=f"--output_dir: {folder}: .*{problem}"):
            check_writable(folder)
    check_writable(tmp_path / "not" / "there")
    assert [path.name for path in tmp_path.iterdir()] == ["taken"]


def test_a_start_and_its_end_are_recorded(tmp_path):
    config = tmp_path / "run.yaml"
    config.write_text("seed: 42\n")
    run = start(tmp_path / "out", config_file=config, argv=["swift", "--api_key", "abc"])
    assert json.loads((run.path / "args.json").read_text()) == {"seed": 42}
    assert (run.path / "run.yaml").read_text() == "seed: 42\n"
    assert rank_log_file(run.path, run.attempt, 1) == run.path / "logs/attempt-1/rank-1.log"
    (row,) = attempts(run.path)
    assert (row["attempt"], row["start_step"], row["end_step"], row["reason"]) == (1, 0, None, None)
    assert row["argv"] == ["swift", "--api_key", "***"]
    assert {"swift", "python", "torch", "transformers"} <= row["versions"].keys()
    run.finish(end_step=7, exit_code=0, reason="done")
    (row,) = attempts(run.path)
    assert (row["end_step"], row["exit_code"], row["reason"]) == (7, 0, "done")


def test_resuming_continues_in_the_same_folder_and_closes_a_killed_attempt(tmp_path):
    first = start(tmp_path)
    first.close()  # the kill frees the lock, but no end is recorded
    second = start(tmp_path, resume_run=first.path, start_step=5, changed={"learning_rate": (1e-5, 1e-6)})
    assert (second.path, second.attempt) == (first.path, 2)
    killed, now = attempts(first.path)
    assert killed["reason"].startswith("killed")
    assert (now["start_step"], now["changed"]) == (5, {"learning_rate": [1e-5, 1e-6]})


def test_a_torn_attempts_line_is_repaired(tmp_path):
    first = start(tmp_path)
    first.finish(end_step=1, exit_code=0, reason="done")
    with (first.path / "attempts.jsonl").open("a") as file:
        file.write('{"attempt": 2, "ti')
    assert start(tmp_path, resume_run=first.path).attempt == 2


def test_a_second_live_run_is_refused_naming_pid_and_host(tmp_path):
    run = start(tmp_path)
    with pytest.raises(ResourceError, match=f"in use by process {os.getpid()} on ") as caught:
        start(tmp_path, resume_run=run.path)
    assert caught.value.exit_code == 3
    (run.path / "checkpoint-1").mkdir()
    with pytest.raises(ResourceError, match="in use by process"):
        start(run.path, add_version=False)
    run.close()
    with pytest.raises(ConfigError, match="holds the checkpoints of another run"):
        start(run.path, add_version=False)
    start(tmp_path, resume_run=run.path)


def test_the_lock_of_a_killed_process_is_taken_over(tmp_path):
    script = (
        "import os, signal, sys\n"
        "from swift.observability.run_dir import RunDirectory\n"
        "run = RunDirectory(sys.argv[1], add_version=False)\n"
        "run.open(argv=['swift'], settings={})\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    dead = subprocess.run([sys.executable, "-c", script, str(tmp_path / "out")], check=False)
    assert dead.returncode == -9
    assert (tmp_path / "out" / "lock").read_text()
    run = start(tmp_path, resume_run=tmp_path / "out")
    assert run.attempt == 2


def test_a_reused_process_id_is_not_taken_for_the_holder(tmp_path):
    run = start(tmp_path)
    holder = json.loads((run.path / "lock").read_text())
    (run.path / "lock").write_text(json.dumps(holder | {"started": holder["started"] - 1000}))
    assert start(tmp_path, resume_run=run.path).attempt == 2


def test_the_lock_of_another_machine_is_respected(tmp_path):
    run = start(tmp_path)
    holder = json.loads((run.path / "lock").read_text())
    (run.path / "lock").write_text(json.dumps(holder | {"host": "elsewhere"}))
    with pytest.raises(ResourceError, match=r"on elsewhere .*delete"):
        start(tmp_path, resume_run=run.path)


def test_a_full_disk_names_the_free_bytes(tmp_path):
    with pytest.raises(ResourceError, match=r"no space left \(\d+ bytes free\)"), writing(tmp_path / "x"):
        raise OSError(errno.ENOSPC, "No space left on device")
    with pytest.raises(ResourceError, match=r"cannot be written .*ulimit -n"), writing(tmp_path / "x"):
        raise OSError(errno.EMFILE, "Too many open files")
    with pytest.raises(ResourceError, match="Input/output error"), writing(tmp_path):
        raise OSError(errno.EIO, "other")
    with pytest.raises(ValueError, match="a defect"), writing(tmp_path):
        raise ValueError("a defect")


def test_a_failed_write_leaves_the_old_content_and_no_litter(tmp_path):
    path = tmp_path / "a.json"
    write_text(path, "old")
    with pytest.raises(UnicodeEncodeError):
        write_text(path, "new \ud800")
    assert path.read_text() == "old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.json"]


@pytest.mark.parametrize(
    ("argv", "masked"),
    [
        (["--vllm-api-key", "abc", "--seed", "1"], ["--vllm-api-key", "***", "--seed", "1"]),
        (["--hub_token=abc"], ["--hub_token=***"]),
        (["--url", "http://me:pw@host/"], ["--url", "http://me:***@host/"]),
        (["--url=https://pw@host/?token=pw"], ["--url=https://***@host/?token=***"]),
        (["--kwargs", '{"hf_token": "pw"'], ["--kwargs", '{"hf_token": "***"']),
        (["HF_TOKEN=pw", "a=b"], ["HF_TOKEN=***", "a=b"]),
        (["--openai_pat", "pw", "--db-pass=pw"], ["--openai_pat", "***", "--db-pass=***"]),
        (["--nemo_gym_command", "ng_run +a.api_key=pw"], ["--nemo_gym_command", "ng_run +a.api_key=***"]),
        (["--atropos_env", "env.py --token 'p w' -n 1"], ["--atropos_env", "env.py --token *** -n 1"]),
        (["--special_tokens", '{"pad_token": "<p>"}'], ["--special_tokens", '{"pad_token": "<p>"}']),
        (["--max_tokens", "5", "--key_frames", "3"], ["--max_tokens", "5", "--key_frames", "3"]),
    ],
)
def test_secrets_are_masked(argv, masked):
    assert mask_argv(argv) == masked


SECRETS = ["HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "apiKey", "api-key", "password", "db_passwd", "Authorization"]


@pytest.mark.parametrize("name", SECRETS)
def test_every_secret_like_name_is_masked_in_every_form(tmp_path, name):
    texts = [mask_argv([f"--{name}", "pw-1"]), mask_argv([f"--{name}=pw-1"]), mask("x", {"a": [{name: "pw-1"}]})]
    for suffix, content in {
        ".yaml": f"ENV: {{{name}: pw-1}}\nmodel: m\nb:\n  - {name}: |\n      pw-2\n# {name}: pw-3\n",
        ".json": json.dumps({"ENV": {name: "pw-1"}, "b": [{name: 12345}], "c": f"http://x/?{name}=pw-2"}),
    }.items():
        file = tmp_path / f"config{suffix}"
        file.write_text(content)
        texts.append(mask_config(file))
    for text in map(str, texts):
        assert "pw-" not in text
        assert "12345" not in text
        assert "***" in text


def test_variables_of_a_config_are_masked_unless_they_are_known_to_be_harmless(tmp_path):
    names = ("PGPASSWORD", "DB_PASS", "GITHUB_PAT", "MONGO", "VLLM_API_KEY")
    lines = "".join(f"  {name}: hunter2\n" for name in names) + "  NPROC_PER_NODE: 2\n  CUDA_VISIBLE_DEVICES: 0,1\n"
    (tmp_path / "run.yaml").write_text(f"ENV:\n{lines}model: m\n")
    masked = mask_config(tmp_path / "run.yaml")
    assert masked == f"ENV:\n{lines}model: m\n".replace("hunter2", "'***'")
    variables = dict.fromkeys(names, "hunter2") | {"OMP_NUM_THREADS": 1}
    (tmp_path / "run.json").write_text(json.dumps({"ENV": variables}))
    assert json.loads(mask_config(tmp_path / "run.json"))["ENV"] == dict.fromkeys(names, "***") | {"OMP_NUM_THREADS": 1}


def test_a_config_without_secrets_is_copied_as_it_is(tmp_path):
    file = tmp_path / "config.yml"
    file.write_text("# max_tokens: 3\neval_strategy: no   # as text\nlr: 1e-6\n")
    assert mask_config(file) == file.read_text()


@pytest.mark.parametrize("value", ["***", ["***"], {"a": "***"}, "*** http://host"])
def test_stars_are_a_mask_only_where_a_secret_stands(value):
    assert not is_masked("stop_words", value)
    assert is_masked("api_key", "***")


def test_a_config_in_the_folder_of_the_run_is_not_rewritten(tmp_path):
    config = tmp_path / "out" / "run.yaml"
    config.parent.mkdir()
    config.write_text("ENV: {HF_TOKEN: abc}\n")
    start(tmp_path / "out", add_version=False, config_file=config)
    assert config.read_text() == "ENV: {HF_TOKEN: abc}\n"


def test_a_log_on_a_full_disk_costs_its_lines_only(capfd):
    log = RankLog(Path("/dev/full"))
    log.line("lost")
    log.close()
    assert capfd.readouterr() == ("", "")
