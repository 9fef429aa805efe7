"""What no wrong or random input may do: give a traceback, hang, lose a checkpoint, or leave a process behind."""

import contextlib
import os
import random
import signal
import time
import zlib

import psutil
import pytest
from cli_runs import Run, printed_command
from hostile_inputs import KINDS, Attempt, short_run

from swift.trainers.checkpoint import list_checkpoints, verify

pytestmark = [pytest.mark.long, pytest.mark.timeout(300)]

SEED = int(os.environ.get("HOSTILE_SEED", "1"))
CODES = {0, 2, 3, 4, 5, 6, 75}
LIMIT_S, STOP_S, MEMORY = 60, 30, 6 << 30
CASES = [(kind, number) for kind, count in KINDS.items() for number in range(count)]


@pytest.mark.parametrize(("kind", "number"), CASES, ids=[f"{kind.__name__}-{number}" for kind, number in CASES])
def test_a_hostile_input_ends_in_order(cli, kind, number):
    rng = random.Random(zlib.crc32(f"{SEED} {kind.__name__} {number}".encode()))
    attempt = kind(rng, cli)
    code, out, err, run = follow(cli, attempt)
    told = f"{attempt}\ncode {code}\n{out[-3000:]}\n{err[-3000:]}"
    unheard = -code == attempt.signum and (code == -signal.SIGKILL or not run.folder.exists())
    assert code in CODES or unheard, told
    assert "Traceback" not in out + err, told
    if code in CODES - {0, 75}:
        assert "swift: error: " in err, told
    saved = list_checkpoints(run.folder) if run.folder.is_dir() else []
    if attempt.signum and code == 75 and run.step:
        assert saved, told
        verify(saved[-1])
        words = printed_command(err)
    elif attempt.signum and code != 0:
        words = None
    else:
        return
    flags = {"max_steps": 30, "save_steps": 100, **({"resume_from_checkpoint": "last"} if saved else {})}
    again = cli.start_printed(words, "out") if words else cli._popen(short_run(cli, "rlhf", **flags), run.folder, {})
    code, out, err = again.wait()
    assert code == 0, told + err
    assert run.step == 30


def follow(cli, attempt: Attempt):
    """Start it, do to it what is to be done, and see that it ends in time, small, and alone."""
    mark = f"{os.getpid()}-{time.monotonic_ns()}"
    run = cli._popen(attempt.words, cli.folder / "out", {**attempt.variables, "HOSTILE_MARK": mark})
    begun, sent = time.monotonic(), False
    while run.alive:
        elapsed = time.monotonic() - begun
        if attempt.signum and not sent and run.step >= attempt.after_step:
            time.sleep(attempt.after_s)
            run.process.send_signal(attempt.signum)
            sent = True
        if elapsed > LIMIT_S and not attempt.signum and not sent:  # a run that is long by what it was told
            run.process.terminate()
            sent = True
        assert elapsed < LIMIT_S + STOP_S, f"{attempt.words}: still there after {elapsed:.0f} s"
        assert memory(run) < MEMORY, f"{attempt.words}: takes more than {MEMORY} bytes"
        time.sleep(0.02)
    code, out, err = run.wait()
    assert_alone(mark, attempt.words)
    return code, out, err, run


def memory(run: Run) -> int:
    """Bytes of the command and all below it."""
    total = 0
    for process in run.family():
        with contextlib.suppress(psutil.Error):
            total += process.memory_info().rss
    return total


def assert_alone(mark: str, words: list[str]) -> None:
    """Fails when a process that bears the mark outlives the command by ten seconds."""
    deadline = time.monotonic() + 10
    while left := [process for process in psutil.process_iter() if bears(process, mark)]:
        if time.monotonic() > deadline:
            lines = [process.cmdline() for process in left]
            for process in left:
                process.kill()
            raise AssertionError(f"{words}: left behind: {lines}")
        time.sleep(0.2)


def bears(process: psutil.Process, mark: str) -> bool:
    with contextlib.suppress(psutil.Error):
        return process.environ().get("HOSTILE_MARK") == mark and process.status() != psutil.STATUS_ZOMBIE
    return False
