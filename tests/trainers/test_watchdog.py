"""A run in which nothing moves ends and says what stood still; what moves, waits or is stopped does not."""

import os
import signal
import threading
import time

import pytest
from preloaded import Program
from processes import wait_for

from swift.errors import EngineError
from swift.trainers.supervision.watchdog import Watchdog

PROCESS = """
import sys, threading, time
from pathlib import Path
from swift.cli.boundary import run_command
from swift.trainers.supervision.watchdog import Watchdog

def stand_still():
    time.sleep(60)

def main():
    watch = Watchdog(2.0, log_file=Path(sys.argv[1]), remarks=[lambda: "engine 0 was decoding"])
    watch.start()
    threading.Thread(target=time.sleep, args=(60,), name="another", daemon=True).start()
    print("ready", flush=True)
    with watch.phase("generate"):
        for _ in range(8):
            time.sleep(0.5)
            watch.touch()
        print("stands still", flush=True)
        stand_still()

sys.exit(run_command(main, debug=lambda: False))
"""


class Watch(Watchdog):
    """Ticks by hand, one second each; keeps what it would have said."""

    def __init__(self, folder, limit_s=10.0, **options):
        self.ends, self.told = [], []
        options.setdefault("farewell", self.told.append)
        super().__init__(limit_s, log_file=folder / "rank-0.log", tick_s=1.0, end=self.ends.append, **options)
        self.tick()

    def ticks(self, count):
        for _ in range(count):
            self.tick()
            if self.ends:
                break
        return bool(self.ends)


@pytest.fixture
def watch(tmp_path):
    return Watch(tmp_path)


def test_what_stands_still_ends_and_is_named(tmp_path):
    watch = Watch(tmp_path, remarks=[lambda: "engine 0 was decoding", str, lambda: "so did rank 2 in phase train"])
    with watch.phase("generate"):
        assert not watch.ticks(10)
        assert watch.ticks(1)
    (error,) = watch.ends
    assert isinstance(error, EngineError)
    (line,) = error.problems
    assert line.startswith(
        "--stall_timeout: 10: rank 0 made no progress for 10 s in phase generate: its main thread is in"
    )
    assert "; engine 0 was decoding; so did rank 2 in phase train; all stacks are in" in line
    assert watch.told == [line]
    stacks = (tmp_path / "rank-0.log").read_text()
    assert "Current thread" in stacks
    assert "test_what_stands_still_ends_and_is_named" in stacks


def test_anything_that_completes_is_progress_and_nothing_in_flight_is_no_excuse(tmp_path):
    tokens = [0]
    watch = Watch(tmp_path, meters=(lambda: tokens[0],))
    for _ in range(3):
        assert not watch.ticks(9)
        watch.touch()
        assert not watch.ticks(9)
        with watch.phase("train"):
            pass
        assert not watch.ticks(9)
        tokens[0] += 1
    assert watch.ticks(11)
    assert "10 s between the phases of a step (data, logs): its main" in str(watch.ends[0])


def test_a_phase_that_is_bounded_otherwise_is_given_that_time(tmp_path):
    watch = Watch(tmp_path, limits={"reward": 30.0, "sync": 3.0})
    with watch.phase("eval"), watch.phase("reward"):
        assert not watch.ticks(30)
        assert watch.ticks(1)
    assert "made no progress for 30 s in phase reward" in str(watch.ends[0])
    watch = Watch(tmp_path, limits={"reward": 30.0, "sync": 3.0})
    with watch.phase("sync"):
        assert not watch.ticks(10)
        assert watch.ticks(1)


def test_who_waits_for_other_ranks_is_not_to_blame(watch):
    with watch.phase("generate"), watch.waiting():
        assert not watch.ticks(100)
        assert watch.state() == ""
    assert not watch.ticks(4)
    assert watch.state().startswith("between the phases")
    assert watch.ticks(10)


def test_a_large_file_is_progress_while_it_is_written(tmp_path):
    watch = Watch(tmp_path)
    with watch.phase("save"), (tmp_path / "model.safetensors").open("wb", buffering=0) as file:
        for _ in range(5):
            assert not watch.ticks(9)
            file.write(bytes(4096))
        assert watch.ticks(11)


def test_nobody_is_hurried_in_a_debugger(watch, monkeypatch):
    space = {"__name__": "pdb", "go_on": threading.Event()}
    exec("def prompt():\n    go_on.wait(60)", space)  # its frame says that it is pdb's
    prompt = threading.Thread(target=space["prompt"], daemon=True)
    prompt.start()
    assert not watch.ticks(100)
    space["go_on"].set()
    prompt.join()
    assert watch.ticks(11)


def test_a_disk_that_stands_still_does_not_keep_it_from_ending(watch, monkeypatch):
    monkeypatch.setattr("swift.trainers.supervision.watchdog.DUMP_S", 0.2)
    monkeypatch.setattr(watch, "_dump", lambda: time.sleep(5))
    began = time.monotonic()
    assert watch.ticks(10)
    assert time.monotonic() - began < 3


def test_it_watches_between_start_and_stop_only(tmp_path):
    ends = []
    watch = Watchdog(0.3, log_file=tmp_path / "rank-0.log", end=ends.append)
    time.sleep(0.5)
    assert not ends
    watch.start()
    watch.stop()
    time.sleep(0.5)
    assert not ends
    watch.start()
    deadline = time.monotonic() + 10
    while not ends and time.monotonic() < deadline:
        time.sleep(0.02)
    watch.stop()
    assert ends


@pytest.mark.slow
def test_a_process_that_stands_still_ends_with_code_4_but_not_for_having_been_stopped(tmp_path):
    log, script, told = tmp_path / "rank-0.log", tmp_path / "stands.py", tmp_path / "out"
    script.write_text(PROCESS)
    environ = {name: value for name, value in os.environ.items() if name not in ("SWIFT_EXIT_DIR", "RANK")}
    process = Program([script, log], env=environ, output=told, errors=tmp_path / "err")
    try:
        assert wait_for(lambda: "ready" in told.read_text(), 60)
        process.send_signal(signal.SIGSTOP)
        time.sleep(3)
        process.send_signal(signal.SIGCONT)
        assert wait_for(lambda: "stands still" in told.read_text())
        _, said = process.communicate(timeout=30)
    finally:
        process.kill()
    assert process.returncode == 4
    assert said.startswith("swift: error: --stall_timeout: 2: rank 0 made no progress for 2 s in phase generate")
    assert "its main thread is in stand_still (stands.py:8) < main" in said
    assert "engine 0 was decoding" in said
    assert log.read_text().count("(most recent call first)") >= 3
