"""What a run answers to SIGTERM and SIGINT: a checkpoint where there is something to save, and how to go on."""

import contextlib
import os
import select
import signal
import threading
import time
from pathlib import Path

import pytest
from cli_runs import assert_gone, assert_same_run, attempts, log_rows, printed_command, terminate

pytestmark = pytest.mark.slow


FLAGS = {"max_steps": 30, "save_steps": 100, "logging_steps": 4, "steps_per_generation": 4, "num_iterations": 2}


@pytest.fixture(scope="module")
def straight(finished):
    """A run that nobody stops."""
    return finished(**FLAGS)


@pytest.mark.parametrize("signum", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.long)])
def test_a_signal_saves_and_the_printed_command_continues_the_same_run(cli, straight, signum):
    run = cli.start("stopped", **FLAGS)
    run.reach(4)
    err = run.ends(75, lambda: terminate(run, signum))
    assert (run.folder / "images" / "reward.png").exists()
    (line,) = [line for line in err.splitlines() if line.startswith("swift: ")]
    end = attempts(run.folder)[-1]
    step = end["end_step"]
    assert 4 <= step < 30
    assert end["exit_code"] == 75
    saved = f"{run.folder}/checkpoint-{step} is saved; resume: swift rlhf"
    assert line.startswith(f"swift: signal: {signum.name}: stopped at step {step}, {saved}")
    err = cli.start_printed(printed_command(err), "stopped").ends(0)
    assert_same_run(run.folder, straight)


@pytest.mark.long
def test_a_terminal_that_closes_ends_a_run_with_a_checkpoint_and_the_log_says_how_to_go_on(cli):
    ours, theirs = os.openpty()
    with os.fdopen(ours, "rb", buffering=0) as terminal:
        threading.Thread(target=drain, args=(terminal,), daemon=True).start()
        run = cli.start("closed", max_steps=500, save_steps=1000, output=Path(os.ttyname(theirs)))
        os.close(theirs)
        run.reach(3)
        family = run.family()
    assert run.process.wait(60) == 75
    assert_gone(family)
    assert attempts(run.folder)[-1]["exit_code"] == 75
    log = (run.folder / "logs" / "attempt-1" / "rank-0.log").read_text()
    assert "swift: signal: SIGHUP: stopped at step" in log
    flags = {"max_steps": run.step + 2, "resume_from_checkpoint": "last"}
    assert printed_command(log).endswith(f"{run.folder}/checkpoint-{run.step}")
    folder = cli.finish("closed", **flags)
    assert [row["step"] for row in log_rows(folder)] == list(range(1, flags["max_steps"] + 1))


def drain(terminal):
    with contextlib.suppress(OSError, ValueError):  # it is closed
        while terminal.read(4096):
            pass


CLOSED = """
import os, sys
os.close(1), os.close(2)
sys.stdout = sys.__stdout__ = sys.stderr = sys.__stderr__ = None
from swift.cli.main import main
sys.exit(main())
"""


@pytest.mark.parametrize("console", ["full", "pipe", "closed"])
def test_a_console_that_is_gone_does_not_end_a_run(cli, console):
    where = Path("/dev/full")
    if console == "pipe":
        where = cli.folder / "pipe"
        os.mkfifo(where)
        reader = os.open(where, os.O_RDONLY | os.O_NONBLOCK)
    script = cli.folder / "closed.py"
    script.write_text(CLOSED)
    run = cli.start("gone", max_steps=2, output=where, program=[script] if console == "closed" else None)
    if console == "pipe":
        run.until(lambda: select.select([reader], [], [], 0)[0])
        os.close(reader)
    assert run.process.wait(60) == 0
    assert attempts(run.folder)[-1]["exit_code"] == 0
    log = (run.folder / "logs" / "attempt-1" / "rank-0.log").read_text()
    assert "step 2/2 | reward" in log and "Everything lies in" in log


def test_a_signal_before_the_first_step_says_that_there_is_no_checkpoint(cli):
    mark = cli.folder / "imported"
    run = cli.start("early", max_steps=4, variables={"MARK_IMPORT": mark})
    assert run.until(mark.exists)
    err = run.ends(75, lambda: terminate(run))
    (line,) = [line for line in err.splitlines() if line.startswith("swift: ")]
    assert "signal: SIGTERM: stopped before the first step, there is no checkpoint yet; start again: swift rlhf" in line
    assert "step 1/4" not in err
    assert not run.folder.exists()
    err = cli.start_printed(printed_command(err), "early").ends(0)
    assert run.step == 4


def test_a_signal_while_a_resumed_run_starts_names_its_checkpoint(cli):
    folder = cli.finish("resumed", max_steps=2)
    mark = cli.folder / "imported"
    run = cli.start("resumed", max_steps=4, resume_from_checkpoint="last", variables={"MARK_IMPORT": mark})
    assert run.until(mark.exists)
    terminate(run)
    err = run.ends(75)
    assert f"{folder}/checkpoint-2 is the last checkpoint" in err
    assert printed_command(err).endswith(f"--resume_from_checkpoint {folder}/checkpoint-2")


@pytest.mark.long
def test_a_second_interrupt_does_not_wait_for_the_step(cli):
    run = cli.start("hasty", max_steps=30, variables={"SLOW_FROM_STEP": "2"}, save_steps=1)
    run.reach(2)
    family = run.family()
    for _ in range(2):
        terminate(run, signal.SIGINT)
        time.sleep(1)  # two at once are one
    begun = time.monotonic()
    code, _, err = run.wait()
    assert time.monotonic() - begun < 10  # the reward of this step takes 20 s
    assert code == 130
    last = f"checkpoint-{attempts(run.folder)[-1]['end_step']} is its last checkpoint; resume: swift rlhf"
    assert "\nswift: interrupted\nswift: run " in err and last in err
    assert attempts(run.folder)[-1]["exit_code"] == 130
    assert_gone(family)
    folder = cli.finish("hasty", max_steps=30, save_steps=10, resume_from_checkpoint="last")
    assert [row["step"] for row in log_rows(folder)] == list(range(1, 31))


def test_a_signal_in_the_last_step_ends_the_run_as_usual(cli):
    run = cli.start("ending", max_steps=3)
    run.reach(3)
    terminate(run)
    err = run.ends(0)
    assert "Everything lies in" in err
