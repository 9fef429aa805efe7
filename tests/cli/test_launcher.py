"""Worker processes: their variables, their codes, their signals, and that none is left behind."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from processes import alive, wait_for

from swift.arguments.derived import Machine
from swift.cli.crew import Crew
from swift.cli.launcher import LaunchPlan, launch, plan_launch, world_size
from swift.errors import ConfigError, ResourceError


def worker(tmp_path, body):
    """A command that runs `body`, which knows `rank` and `folder`."""
    script = tmp_path / "worker.py"
    head = ["import os, sys, time, signal, pathlib", "rank = int(os.environ['RANK'])", f"folder = pathlib.{tmp_path!r}"]
    script.write_text("\n".join([*head, textwrap.dedent(body)]))
    return [sys.executable, str(script)]


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"NPROC_PER_NODE": "1"},
        {"RANK": "0", "WORLD_SIZE": "2"},
        {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "NPROC_PER_NODE": "2", "NNODES": "1"},
    ],
)
def test_a_single_process_and_a_worker_start_nothing(environ):
    assert plan_launch(environ) is None


def test_two_nodes_need_rank_and_address():
    with pytest.raises(ConfigError) as caught:
        plan_launch({"NNODES": "2"})
    assert [line.partition(":")[0] for line in caught.value.problems] == ["NODE_RANK", "MASTER_ADDR"]
    plan = plan_launch({"NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "10.0.0.1", "NPROC_PER_NODE": "4"})
    assert plan == LaunchPlan(4, 2, 1, "10.0.0.1", 29500)
    assert plan.world_size == 8


@pytest.mark.parametrize("given", [{}, {"NNODES": "2", "NODE_RANK": "1"}])
def test_a_platform_that_starts_a_process_per_node_names_the_nodes(given):
    platform = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "23456"}
    environ = {**platform, "NPROC_PER_NODE": "8", **given}
    assert plan_launch(environ) == LaunchPlan(8, 2, 1, "10.0.0.1", 23456)
    assert world_size(environ) == Machine.detect(environ).processes == 16


@pytest.mark.parametrize(
    ("environ", "line"),
    [
        ({"NPROC_PER_NODE": "two"}, "NPROC_PER_NODE: two: not a whole number; at least 1"),
        ({"NPROC_PER_NODE": "0"}, "NPROC_PER_NODE: 0: too small; at least 1"),
        ({"NPROC_PER_NODE": "2", "MASTER_PORT": "70000"}, "MASTER_PORT: 70000: no port; 1 to 65535"),
        ({"NODE_RANK": "1"}, "NODE_RANK: 1: not below NNODES=1; 0 to 0"),
    ],
)
def test_a_wrong_variable_is_one_line(environ, line):
    with pytest.raises(ConfigError) as caught:
        plan_launch(environ)
    assert caught.value.problems == [line]


def test_the_world_is_known_before_and_after_the_start():
    assert world_size({}) == 1
    assert world_size({"NPROC_PER_NODE": "3"}) == 3
    assert world_size({"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "5", "NPROC_PER_NODE": "3"}) == 5


def test_workers_see_their_place(tmp_path):
    names = "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT OMP_NUM_THREADS"
    command = worker(
        tmp_path, f"(folder / f'seen-{{rank}}').write_text(' '.join(os.environ[n] for n in {names!r}.split()))"
    )
    environ = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    assert launch(command, LaunchPlan(2), environ=environ) == 0
    seen = [(tmp_path / f"seen-{rank}").read_text().split() for rank in (0, 1)]
    assert [words[:5] for words in seen] == [["0", "0", "2", "2", "127.0.0.1"], ["1", "1", "2", "2", "127.0.0.1"]]
    assert seen[0][5] == seen[1][5]
    assert int(seen[0][6]) == max(1, len(os.sched_getaffinity(0)) // 2)


def test_ranks_of_a_second_node_follow_those_of_the_first(tmp_path):
    command = worker(tmp_path, "(folder / f'seen-{rank}').write_text(os.environ['MASTER_PORT'])")
    assert launch(command, LaunchPlan(2, 2, 1, "10.0.0.1", 29511), environ=os.environ) == 0
    assert [(tmp_path / f"seen-{rank}").read_text() for rank in (2, 3)] == ["29511", "29511"]


def test_the_code_of_the_first_failing_worker_is_returned_and_the_others_are_told(tmp_path):
    body = """
        def stop(*_):
            (folder / "told").write_text("TERM")
            sys.exit(1)
        if rank == 0:
            signal.signal(signal.SIGTERM, stop)
            (folder / "ready").touch()
            time.sleep(60)
        while not (folder / "ready").exists():
            time.sleep(0.01)
        sys.exit(4)
    """
    assert launch(worker(tmp_path, body), LaunchPlan(2), environ=os.environ) == 4
    assert (tmp_path / "told").read_text() == "TERM"


def test_a_worker_that_ignores_the_end_is_killed_after_the_grace_time(tmp_path):
    body = """
        if rank == 0:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            (folder / "ready").touch()
            time.sleep(60)
        while not (folder / "ready").exists():
            time.sleep(0.01)
        sys.exit(6)
    """
    begun = time.monotonic()
    assert launch(worker(tmp_path, body), LaunchPlan(2), environ=os.environ, grace_s=0.3) == 6
    assert time.monotonic() - begun < 30


def test_the_error_lines_of_the_failed_worker_are_printed_once(tmp_path, capsys):
    body = """
        from swift.cli.boundary import run_command
        from swift.errors import EngineError
        def fail():
            if rank == 1:
                raise EngineError("engine: cuda:1: died")
            time.sleep(60)
        sys.exit(run_command(fail, debug=lambda: False))
    """
    assert launch(worker(tmp_path, body), LaunchPlan(2), environ=os.environ) == 4
    assert capsys.readouterr().err == "swift: error: engine: cuda:1: died\n"


SHORT_OF_MEMORY = """
    from swift.cli.boundary import run_command
    from swift.errors import EngineError, Unfinished, note_smaller, note_unfinished
    def train():
        if "40" in sys.argv:
            (folder / f"words-{rank}").write_text(" ".join(sys.argv[1:]))
            return 0
        going_on = ["--resume_from_checkpoint", "checkpoint-7"]
        note_unfinished(Unfinished(folder / "log", lambda: "run x", lambda: going_on))
        if rank == 0:  # which loses the other one, and may be seen to fail first
            while not pathlib.Path(os.environ["SWIFT_EXIT_DIR"], "rank-1.json").exists():
                time.sleep(0.01)
            raise EngineError("rank 1: lost")
        note_smaller("--max_tokens", "40")
        raise MemoryError("out of memory")
    sys.exit(run_command(train, debug=lambda: False))
"""


def test_a_run_that_can_go_on_in_less_memory_is_started_again(tmp_path, capsys):
    assert launch(worker(tmp_path, SHORT_OF_MEMORY), LaunchPlan(2), environ=os.environ) == 0
    words = "--max_tokens 40 --resume_from_checkpoint checkpoint-7"
    assert [(tmp_path / f"words-{rank}").read_text() for rank in (0, 1)] == [words, words]
    first, second = capsys.readouterr().err.splitlines()
    assert first.startswith("swift: error: memory: out of memory")
    assert second == f"swift: note: the run starts again: {words}"


@pytest.mark.parametrize(("going_on", "code"), [("[]", 0), ("None", 3)])
def test_a_run_without_a_checkpoint_begins_anew_and_one_with_weights_alone_ends(tmp_path, capsys, going_on, code):
    body = SHORT_OF_MEMORY.replace('["--resume_from_checkpoint", "checkpoint-7"]', going_on)
    assert launch(worker(tmp_path, body), LaunchPlan(2), environ=os.environ) == code
    last = "swift: note: the run starts again, from its beginning, as there is no checkpoint yet: --max_tokens 40"
    assert capsys.readouterr().err.splitlines()[-1] == ("swift: run x" if code else last)


def test_on_several_nodes_it_ends(tmp_path, capsys):
    assert launch(worker(tmp_path, SHORT_OF_MEMORY), LaunchPlan(2, 2, 0, "127.0.0.1"), environ=os.environ) == 3
    assert capsys.readouterr().err.endswith("swift: run x\n")


ELASTIC = """
    from swift.elastic import note_checkpoint, note_start
    world = int(os.environ["WORLD_SIZE"])
    if rank == 0:
        with (folder / "starts").open("a") as file:
            file.write(" ".join([str(world), os.environ["SWIFT_BATCH_PROCESSES"], *sys.argv[1:]]) + "\\n")
    if "--resume_from_checkpoint" in sys.argv:
        sys.exit(int(os.environ["LAST"]) if world == 4 else 0)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(75 if world == 2 else 1))
    if rank == 0:
        note_start(None, 4)
    if (world, rank) in ((4, 1), (3, 0)):
        os.kill(os.getpid(), signal.SIGKILL)
    (folder / f"ready-{world}-{rank}").touch()
    if world == 2 and rank == 0:
        while not (folder / "ready-2-1").exists():
            time.sleep(0.01)
        (folder / "checkpoint-2").mkdir()
        note_checkpoint(folder / "checkpoint-2")
    time.sleep(60)
"""


@pytest.mark.parametrize("last", [0, 3])
def test_an_elastic_run_loses_workers_and_takes_them_back(tmp_path, capsys, last):
    crew, environ = Crew(4, lambda number: True), {**os.environ, "LAST": str(last)}
    assert launch(worker(tmp_path, ELASTIC), LaunchPlan(4), environ=environ, crew=crew) == 0
    resume = f"--resume_from_checkpoint {tmp_path / 'checkpoint-2'}"
    starts = ["4 4", "3 4", "2 4", f"4 4 {resume}"]
    anew = "the run starts again, from its beginning, as there is no checkpoint yet"
    again = f"the run starts again: {resume}"
    lines = [
        f"swift: note: lost rank 1 (SIGKILL); with 3 processes {anew}",
        f"swift: note: lost rank 0 (SIGKILL); with 2 processes {anew}",
        f"swift: note: with 4 processes {again}",
    ]
    if last:  # the trial fails by itself
        starts.append(f"2 4 {resume}")
        lines.append(f"swift: note: 4 processes ended before a checkpoint; with 2 processes {again}")
    assert (tmp_path / "starts").read_text().splitlines() == starts
    assert capsys.readouterr().err.splitlines() == lines


def test_an_error_of_its_own_ends_an_elastic_run(tmp_path):
    crew = Crew(2, lambda number: True)
    assert launch(worker(tmp_path, "sys.exit(5)"), LaunchPlan(2), environ=os.environ, crew=crew) == 5


def test_a_killed_worker_is_named(tmp_path, capsys):
    body = """
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60)
    """
    assert launch(worker(tmp_path, body), LaunchPlan(2), environ=os.environ) == 4
    assert "swift: error: worker: rank 1: killed by SIGKILL" in capsys.readouterr().err


def test_children_of_a_worker_end_with_the_run(tmp_path):
    body = """
        import subprocess
        if rank == 0:
            child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
            (folder / "child").write_text(str(child.pid))
            sys.exit(3)
        time.sleep(60)
    """
    assert launch(worker(tmp_path, body), LaunchPlan(2), environ=os.environ) == 3
    child = int((tmp_path / "child").read_text())
    assert wait_for(lambda: not alive(child))


@pytest.mark.skipif(sys.platform != "linux", reason="semaphores are files in /dev/shm on Linux")
def test_semaphores_of_a_killed_worker_are_removed(tmp_path):
    body = """
        import multiprocessing
        lock = multiprocessing.get_context("spawn").Lock()
        (folder / f"lock{rank}").write_text(lock._semlock.name)
        while len(list(folder.glob("lock*"))) < 2:
            time.sleep(0.01)
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(60)
    """
    assert launch(worker(tmp_path, body), LaunchPlan(2), environ=os.environ, grace_s=0.5) == 4
    names = [file.read_text() for file in tmp_path.glob("lock*")]
    assert len(names) == 2
    assert [name for name in names if Path(f"/dev/shm/sem.{name.strip('/')}").exists()] == []


def test_a_port_in_use_is_refused_before_anything_starts(tmp_path):
    import socket

    with socket.socket() as holder:
        holder.bind(("", 0))
        holder.listen()
        port = holder.getsockname()[1]
        with pytest.raises(ResourceError, match=f"MASTER_PORT: {port}"):
            launch(
                worker(tmp_path, "(folder / 'started').touch()"), LaunchPlan(2, master_port=port), environ=os.environ
            )
    assert not (tmp_path / "started").exists()


LAUNCHER = """
import os, sys
from swift.cli.launcher import LaunchPlan, launch
sys.exit(launch(sys.argv[1:], LaunchPlan(2), environ=os.environ))
"""


def start_launcher(command):
    """The launcher as a terminal starts it: a test run in the background inherits SIGINT as ignored."""
    return subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, *command],
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509  # no threads here
    )


SAVING_WORKER = """
    def save(*_):
        (folder / f"saved-{rank}").touch()
        sys.exit(75)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, save)
    (folder / f"pid-{rank}.tmp").write_text(str(os.getpid()))
    (folder / f"pid-{rank}.tmp").rename(folder / f"pid-{rank}")
    time.sleep(60)
"""


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1])
def test_a_signal_reaches_every_worker_so_that_each_can_save(tmp_path, signum):
    process = start_launcher(worker(tmp_path, SAVING_WORKER))
    assert wait_for(lambda: all((tmp_path / f"pid-{rank}").exists() for rank in (0, 1)))
    process.send_signal(signum)
    process.communicate(timeout=30)
    assert process.returncode == 75
    assert all((tmp_path / f"saved-{rank}").exists() for rank in (0, 1))


def test_workers_without_a_handler_end_with_the_code_of_the_signal(tmp_path):
    body = "(folder / f'pid-{rank}').touch()\ntime.sleep(60)"
    process = start_launcher(worker(tmp_path, body))
    assert wait_for(lambda: all((tmp_path / f"pid-{rank}").exists() for rank in (0, 1)))
    process.terminate()
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 128 + signal.SIGTERM
    assert "Traceback" not in errors


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs PR_SET_PDEATHSIG")
def test_no_worker_outlives_a_killed_launcher(tmp_path):
    process = start_launcher(worker(tmp_path, SAVING_WORKER))
    files = [tmp_path / f"pid-{rank}" for rank in (0, 1)]
    assert wait_for(lambda: all(file.exists() for file in files))
    pids = [int(file.read_text()) for file in files]
    process.kill()
    process.communicate(timeout=30)
    assert wait_for(lambda: not any(alive(pid) for pid in pids))
