"""A rank that is lost ends the others with one line that names it."""

import os
import re
import signal
import socket
import time

import pytest
from preloaded import Program
from processes import wait_for

RANK = """
import sys, time
import torch, torch.distributed as dist
from swift.cli.boundary import run_command
from swift.errors import ConfigError, NumericError
from swift.trainers.distributed import Collectives
from swift.trainers.supervision.heartbeat import Heartbeat

def main():
    dist.init_process_group("gloo")
    collectives = Collectives(timeout_s=1.0 if sys.argv[1] == "works" else 60.0)
    with Heartbeat(collectives, beat_s=0.2, silent_s=2.0) as heartbeat:
        collectives.barrier()
        time.sleep(0.5)
        print("ready", flush=True)
        if sys.argv[1] == "fails" and collectives.rank == 1:
            raise RuntimeError("the disk is on fire")
        if sys.argv[1] == "refuses" and collectives.rank == 0:
            raise ConfigError("--flag: 1: is wrong")
        if sys.argv[1] == "both fail":
            try:
                with heartbeat.own_errors():
                    raise NumericError("the loss is NaN")
            finally:
                time.sleep(1.5 * (1 - collectives.rank))
        if sys.argv[1] == "ends":
            time.sleep(1.5 * collectives.rank)
            return 0
        if sys.argv[1] in ("works", "hangs"):
            if collectives.rank == 0:
                time.sleep(60 if sys.argv[1] == "hangs" else 3)
            print(collectives.all_gather(collectives.rank), collectives.broadcast(7), flush=True)
            return 0
        collectives.barrier() if collectives.rank == (sys.argv[1] == "refuses") else time.sleep(60)

sys.exit(run_command(main, debug=lambda: False))
"""


@pytest.fixture
def two_ranks(tmp_path):
    """Starts two ranks of the script with a word; ends them after the test."""
    started = []
    script = tmp_path / "rank.py"
    script.write_text(RANK)

    def start(word):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        shared = {name: value for name, value in os.environ.items() if name != "SWIFT_EXIT_DIR"}
        shared |= {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        for rank in range(2):
            env = {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            files = {"output": tmp_path / f"out-{rank}", "errors": tmp_path / f"err-{rank}"}
            started.append(Program([script, word], env=env, **files))
        for rank in range(2):
            assert wait_for(lambda said=tmp_path / f"out-{rank}": said.read_text() == "ready\n", 60)
        return started

    yield start
    for process in started:
        process.kill()


@pytest.mark.long
def test_ranks_that_are_suspended_together_go_on_and_one_that_is_stopped_is_named_in_seconds(two_ranks):
    first, second = ranks = two_ranks("waits")
    for rank in ranks:
        rank.send_signal(signal.SIGSTOP)
    time.sleep(4)  # twice what one of them may be silent
    for rank in ranks:
        rank.send_signal(signal.SIGCONT)
    time.sleep(3)
    assert [rank.poll() for rank in ranks] == [None, None]
    second.send_signal(signal.SIGSTOP)
    started = time.monotonic()
    _, said = first.communicate(timeout=20)
    assert time.monotonic() - started < 10
    assert first.returncode == 4
    assert "rank 1: gave no sign of life for 2 s" in said
    assert f"process {second.pid} on" in said


def test_a_failed_rank_ends_the_one_that_waits_for_it(two_ranks):
    first, second = two_ranks("fails")
    _, said = first.communicate(timeout=20)
    second.communicate(timeout=20)
    assert second.returncode == 1
    assert first.returncode != 0
    assert "the disk is on fire" in said or "Connection closed by peer" in said


def test_a_rank_that_ends_for_another_has_its_exit_code(two_ranks, tmp_path):
    assert [rank.wait(20) for rank in two_ranks("refuses")] == [2, 2]
    assert "swift: error: --flag: 1: is wrong\n" in (tmp_path / "err-0").read_text()


def test_ranks_wait_for_the_first_one_for_longer_than_a_collective_may_take(two_ranks, tmp_path):
    for process in two_ranks("works"):
        _, said = process.communicate(timeout=30)
        assert process.returncode == 0, said
    assert [(tmp_path / f"out-{rank}").read_text() for rank in range(2)] == ["ready\n[0, 1] 7\n"] * 2


@pytest.mark.parametrize("word", ["waits", "hangs"])
def test_the_loss_of_the_first_rank_is_noticed_too(two_ranks, word):
    first, second = two_ranks(word)
    began = time.monotonic()
    first.kill()
    _, said = second.communicate(timeout=30)
    assert second.returncode == 4
    assert re.search("rank 0: (has ended|its store cannot be reached)", said), said
    assert time.monotonic() - began < 5  # of which an interpreter with torch needs most to end


def test_a_rank_that_has_finished_is_not_missed(two_ranks):
    for process in two_ranks("ends"):
        _, said = process.communicate(timeout=30)
        assert (process.returncode, "swift: error" in said) == (0, False), said


def test_an_error_of_all_ranks_keeps_its_code_where_one_of_them_takes_long_to_end(two_ranks, tmp_path):
    assert [rank.wait(30) for rank in two_ranks("both fail")] == [6, 6]
    assert "the loss is NaN" in (tmp_path / "err-0").read_text()
