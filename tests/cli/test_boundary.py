"""What each kind of failure prints and returns."""

import errno
import json
import re
import subprocess
import sys

import pytest

from swift.cli.boundary import EXIT_DIR, run_command
from swift.errors import (
    ConfigError,
    EngineError,
    Interrupted,
    NumericError,
    ResourceError,
    RewardError,
    Unfinished,
    first_line,
    note_unfinished,
)


def run(error, *, debug=False):
    def action():
        raise error

    return run_command(action, debug=lambda: debug)


@pytest.mark.parametrize(
    ("kind", "code"),
    [(ConfigError, 2), (ResourceError, 3), (EngineError, 4), (RewardError, 5), (NumericError, 6)],
)
def test_an_anticipated_failure_is_a_line_and_a_code(kind, code, capsys):
    assert run(kind("--x: 1: wrong; right: 2")) == code
    assert capsys.readouterr().err == "swift: error: --x: 1: wrong; right: 2\n"


def test_no_line_shows_a_password(capsys):
    assert run(ConfigError("--dataset: https://me:hunter2@host/x?token=hunter2: no such file")) == 2
    assert "hunter2" not in capsys.readouterr().err


@pytest.mark.parametrize("at", range(150, 210))
def test_no_message_is_cut_inside_a_password(at, capsys):
    told = f"{'x' * (at - 1)} https://me:hunter2@host/x?token=hunter2 is away"
    assert run(ConfigError(f"--dataset: {first_line(RuntimeError(told))}")) == 2
    assert "hunt" not in capsys.readouterr().err


def test_all_problems_are_listed(capsys):
    assert run(ConfigError("--x: 1: wrong", "--y: 2: wrong")) == 2
    assert capsys.readouterr().err.splitlines() == ["swift: error: --x: 1: wrong", "swift: error: --y: 2: wrong"]


def test_debug_adds_the_traceback(capsys):
    run(ConfigError("--x: 1: wrong"), debug=True)
    assert "Traceback" in capsys.readouterr().err


def test_success_is_zero_and_a_mode_may_return_its_own_code():
    assert run_command(lambda: None, debug=lambda: False) == 0
    assert run_command(lambda: 5, debug=lambda: False) == 5


def test_an_interruption_is_no_error_and_can_be_resumed(capsys):
    assert run(Interrupted("SIGTERM: saved; resume with --resume_from_checkpoint x")) == 75
    assert capsys.readouterr().err.startswith("swift: SIGTERM: saved")


def test_the_keyboard_ends_with_one_line(capsys):
    assert run(KeyboardInterrupt()) == 130
    assert capsys.readouterr().err == "swift: interrupted\n"


class OutOfMemoryError(RuntimeError):
    """Named like torch's."""


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        OutOfMemoryError("CUDA out of memory"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:124] . DefaultCPUAllocator: can't allocate memory"),
        RuntimeError("CUDA Error: out of memory at cumem_allocator.cpp:62"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("NCCL error: unhandled cuda error. Cuda failure 2 'out of memory'"),
    ],
)
def test_out_of_memory_names_phase_peak_and_settings(error, capsys):
    assert run(error) == 3
    line = capsys.readouterr().err
    assert line.startswith("swift: error: memory: out of memory in phase start: peak ")
    assert line.partition("; lower ")[2].count("--") >= 3
    assert "Traceback" not in line


@pytest.mark.parametrize(
    ("modules", "phase"),
    [
        (["swift.rl.losses"], "train"),
        (["swift.trainers.grpo.step", "swift.models.scoring"], "train"),
        (["swift.trainers.grpo.run", "swift.rollout.engines.transformers.batch", "swift.models.scoring"], "generate"),
        (["swift.trainers.grpo.build", "swift.models.policy"], "model"),
    ],
)
def test_the_phase_is_that_of_the_code_that_ran_out(capsys, modules, phase):
    def call(names):
        if not names:
            raise MemoryError
        code = compile("call(names)", "module.py", "exec")
        exec(code, {"__name__": names[0], "call": call, "names": names[1:]})

    assert run_command(lambda: call(modules), debug=lambda: False) == 3
    assert f"in phase {phase}" in capsys.readouterr().err


def test_a_full_disk_is_named_with_its_free_bytes(tmp_path, capsys):
    path = str(tmp_path / "not" / "there")
    assert run(OSError(errno.ENOSPC, "No space left on device", path)) == 3
    line = capsys.readouterr().err
    assert line.startswith(f"swift: error: disk: {path}: no space left, ")
    assert "bytes free" in line


@pytest.mark.parametrize(
    ("number", "fix"),
    [(errno.EROFS, "choose a folder that can be written"), (errno.EIO, "check the disk"), (errno.EMFILE, "ulimit -n")],
)
def test_a_failure_of_the_system_names_its_own_fix(number, fix, capsys):
    assert run(OSError(number, "it fails", "/data/x")) == 3
    assert re.fullmatch(rf"swift: error: \w+: /data/x: it fails; .*{fix}.*\n", capsys.readouterr().err)


def test_a_defect_keeps_its_traceback_and_asks_for_a_report(capsys):
    assert run(KeyError("oops")) == 1
    text = capsys.readouterr().err
    assert "Traceback" in text
    assert "KeyError: 'oops'" in text
    assert "please report it" in text.splitlines()[-1]


def test_other_ranks_keep_quiet_about_what_rank_0_says_too(monkeypatch, capsys):
    monkeypatch.setenv("RANK", "1")
    assert run(ConfigError("--x: 1: wrong")) == 2
    assert capsys.readouterr().err == ""


def test_other_ranks_say_what_only_they_can_know(monkeypatch, capsys):
    monkeypatch.setenv("RANK", "1")
    assert run(EngineError("engine: died")) == 4
    assert capsys.readouterr().err == "[rank 1] swift: error: engine: died\n"


def test_under_the_launcher_the_lines_are_left_to_it(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv(EXIT_DIR, str(tmp_path))
    assert run(EngineError("engine: died")) == 4
    assert capsys.readouterr().err == ""
    assert json.loads((tmp_path / "rank-1.json").read_text()) == {
        "exit_code": 4,
        "text": "swift: error: engine: died\n",
        "advice": "",
        "again": [],
    }


def test_a_launcher_that_is_gone_does_not_hide_the_error(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv(EXIT_DIR, str(tmp_path / "gone"))
    assert run(EngineError("engine: died")) == 4
    assert capsys.readouterr().err == "swift: error: engine: died\n"


@pytest.mark.parametrize("error", [EngineError("engine: died"), KeyError("x"), KeyboardInterrupt()])
def test_an_error_in_a_run_is_followed_by_how_it_goes_on_and_all_of_it_is_in_its_log(error, tmp_path, capsys):
    def action():
        note_unfinished(Unfinished(tmp_path / "rank-0.log", lambda: "run x; resume: swift rlhf", list))
        raise error

    run_command(action, debug=lambda: False)
    text = capsys.readouterr().err
    assert text.splitlines()[-1] == "swift: run x; resume: swift rlhf"
    assert len(text.splitlines()) > 1
    assert (tmp_path / "rank-0.log").read_text() == text
    assert run(EngineError("of another command")) == 4
    assert "resume" not in capsys.readouterr().err


def test_a_reader_that_stops_reading_is_no_error():
    code = (
        "import sys, time; from swift.cli.boundary import run_command\n"
        "def talk():\n"
        "    for _ in range(100000): print('x' * 100)\n"
        "sys.exit(run_command(talk, debug=lambda: False))"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    process.stdout.readline()
    process.stdout.close()
    assert process.stderr.read() == ""
    assert process.wait(timeout=30) == 141
    process.stderr.close()


def test_a_broken_pipe_elsewhere_is_not_hidden(capsys):
    assert run(BrokenPipeError(errno.EPIPE, "a worker is gone")) == 1
    assert "BrokenPipeError" in capsys.readouterr().err


def test_code_that_ends_the_process_is_no_success(capsys):
    assert run(SystemExit(0)) == 1
    line = capsys.readouterr().err
    assert re.fullmatch(r"swift: error: exit: 0: .*test_boundary.py:\d+: asked for the end of the process; .*\n", line)


PLUGIN = """
import atexit, threading, time
from swift.plugin import orms
orms["fine"] = lambda completions, **kwargs: [0.0] * len(completions)
orms["wrong"] = lambda completions, **kwargs: "wrong"
{}
"""
KEEPS = {
    "threading.Thread(target=time.sleep, args=(300,), name='of mine').start()": "thread 'of mine'",
    "atexit.register(time.sleep, 300)": "an exit handler of a plugin or library",
}


@pytest.mark.parametrize("keeps", KEEPS)
@pytest.mark.parametrize(("reward", "code"), [("fine", 0), ("wrong", 5), ("none", 2)])
def test_what_a_plugin_leaves_running_keeps_no_process_and_no_code(tmp_path, keeps, reward, code):
    (tmp_path / "plugin.py").write_text(PLUGIN.format(keeps))
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1", "solution": "1"}\n')
    words = ["reward-test", "--external_plugins", "plugin.py", "--dataset", "rows.jsonl", "--reward_funcs", reward]
    source = f"""
import sys
from swift.cli import leaving, main
leaving.WARN_S, leaving.LIMIT_S = 0.2, 0.5
sys.argv[1:] = {words}
if __name__ == "__main__":
    sys.exit(main.main())
"""
    (tmp_path / "program.py").write_text(source)
    ended = subprocess.run(
        [sys.executable, "program.py"], cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False
    )
    assert ended.returncode == code, ended.stderr
    assert ended.stderr.endswith(
        f"swift: note: exit: {KEEPS[keeps]} still runs 0.2 s after the end; stopped after 0.5 s\n"
        f"swift: warning: exit: {KEEPS[keeps]} still runs 0.5 s after the end; stopped\n"
    )


def test_a_name_that_no_file_can_have_is_one_line(capsys):
    assert run(OSError(errno.ENAMETOOLONG, "File name too long", "a" * 5000)) == 2
    said = f"path: {'a' * 40}...: 5000 characters, more than a file can have; correct the setting"
    assert capsys.readouterr().err == f"swift: error: {said}\n"
