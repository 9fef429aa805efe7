"""What a badly behaved reward function costs: its own samples, and nothing else."""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest
from processes import alive, wait_for

import swift
from swift.errors import ConfigError, RewardError
from swift.rewards import worker
from swift.rewards.payload import call_seed

IMPORTS = [str(Path(swift.__file__).parents[1]), str(Path(__file__).parent)]

NASTY = """
import ctypes, os, subprocess, sys, tempfile, time

def nasty(completions, **kwargs):
    for text in completions:
        if text == "loop":
            while True:
                pass
        if text == "sleep":
            time.sleep(1000)
        if text == "exit":
            os._exit(3)
        if text == "leave":
            os._exit(0)
        if text == "leave by C":
            ctypes.CDLL(None)._exit(0)
        if text == "sysexit":
            sys.exit(4)
        if text == "segfault":
            ctypes.string_at(0)
        if text == "own":
            raise type("Own", (BaseException,), {})("of mine")
        if text == "file":
            with tempfile.TemporaryFile() as file:
                file.truncate(1 << 50)
        if text == "raise":
            raise ValueError("bad sample")
        if text == "memory":
            block = []
            while True:
                block.append(bytearray(1 << 28))
        if text == "children":
            subprocess.Popen(["sleep", "1000"])
            subprocess.Popen(["sleep", "1000"], start_new_session=True)
            time.sleep(1000)
        if text.startswith("detach"):
            between = os.fork()
            if between == 0:
                os.setsid()
                if os.fork() == 0:
                    time.sleep(1000)
                os._exit(0)
            os.waitpid(between, 0)
            subprocess.Popen(["sleep", "1000"], start_new_session=True)
            time.sleep(1)
            if text != "detach":
                os._exit(3)
        if text == "fork":
            if os.fork() == 0:
                time.sleep(0.2)
                return [9.0] * len(completions)
        if text == "closes":
            os.closerange(3, 4096)
        if text == "print":
            line = "x" * 99 + "\\n"
            for _ in range(100_000):
                sys.stdout.write(line)
    return [float(len(text)) for text in completions]
orms["nasty"] = nasty
"""


def descendants(pid):
    return [child.pid for child in psutil.Process(pid).children(recursive=True)]


def workers():
    return [process.pid for process in multiprocessing.active_children()]


def test_bad_samples_exclude_themselves_and_nothing_else(pipeline, group, progress):
    rewards = pipeline(["nasty"], NASTY, reward_timeout=30.0)  # before it exits, a worker looks for its family
    texts = ["a", "exit", "sysexit", "segfault", "raise", "closes", "own", "file", "dddd"]
    (scores,) = rewards.score([group(texts)], progress)
    assert scores.values == [[1.0], *[[None]] * 7, [4.0]]
    kinds = ["crash", "exception", "crash", "exception", "crash", "exception", "exception"]
    assert scores.excluded == [None, *(f"{kind}: nasty" for kind in kinds), None]


@pytest.mark.parametrize("text", ["leave", "leave by C"])
def test_a_function_that_leaves_with_status_0_is_no_time_out(pipeline, group, progress, caplog, text):
    rewards = pipeline(["nasty"], NASTY, reward_timeout=30.0)
    (scores,) = rewards.score([group(["a", text])], progress)
    assert scores.excluded == [None, "crash: nasty"]
    assert "worker exited with status 0; worker replaced" in caplog.text


def test_a_memory_blow_up_costs_its_sample_only(pipeline, group, progress, monkeypatch):
    monkeypatch.setattr("swift.rewards.pipeline.memory_limit", lambda: 1 << 30)
    rewards = pipeline(["nasty"], NASTY, reward_timeout=20.0)
    (scores,) = rewards.score([group(["a", "memory", "ccc"])], progress)
    assert [row[0] for row in scores.values] == [1.0, None, 3.0]
    assert scores.excluded[1] in ("exception: nasty", "crash: nasty")


def test_forking_and_printing_are_harmless_and_the_log_may_move(pipeline, group, progress, tmp_path):
    rewards = pipeline(["nasty"], NASTY, reward_timeout=10.0)
    for number, text in enumerate(["fork", "print"]):
        (scores,) = rewards.score([group([text, "bb"], group_id=f"g{number}")], progress)
        assert scores.values == [[float(len(text))], [2.0]]
        time.sleep(0.3)
    assert (tmp_path / "workers.log").stat().st_size >= 10_000_000
    new = tmp_path / "run" / "rewards.log"
    rewards.log_to(new)
    rewards.score([group(["print", "b"], group_id="g9")], progress)
    assert wait_for(lambda: new.stat().st_size == 100 * 100_000)


def test_capacity_is_intact_after_three_hung_samples_per_worker(pipeline, group, progress):
    rewards = pipeline(["nasty"], NASTY, num_workers=2, reward_timeout=0.5)
    began = time.monotonic()
    (scores,) = rewards.score([group(["sleep"] * 5 + ["loop"] + ["fine"] * 2)], progress)
    elapsed = time.monotonic() - began
    assert scores.excluded == ["timeout: nasty"] * 6 + [None] * 2
    assert elapsed < 2 * 3 * 0.5 + 7 * 1.5  # the promised bound, and the worker starts
    assert wait_for(lambda: len(workers()) == 2)
    (scores,) = rewards.score([group(["a", "bb"], group_id="next")], progress)
    assert scores.excluded == [None, None]


def test_children_of_a_killed_worker_die_with_it(pipeline, group, progress):
    rewards = pipeline(["nasty"], NASTY, reward_timeout=0.5, num_workers=1)
    rewards.score([group(["warm"])], progress)
    (worker,) = workers()
    [future] = rewards.submit([group(["children"])], progress)

    assert wait_for(lambda: len(descendants(worker)) == 2, 3)
    children = descendants(worker)
    assert future.result(10).excluded == ["timeout: nasty"]
    assert wait_for(lambda: not any(alive(pid) for pid in [worker, *children]))


@pytest.mark.parametrize(("text", "left"), [("detach", 2), ("detach and crash", 1)])
def test_what_a_function_has_detached_ends_with_its_worker(pipeline, group, progress, text, left):
    rewards = pipeline(["nasty"], NASTY, num_workers=1)
    rewards.score([group(["warm"])], progress)
    (worker,) = workers()
    [future] = rewards.submit([group([text])], progress)
    assert wait_for(lambda: len(descendants(worker)) == 2, 5), "a daemon, and a child in a session of its own"
    detached = [psutil.Process(pid) for pid in descendants(worker)]
    future.result(10)
    if text == "detach":
        assert len(descendants(worker)) == 2
        rewards.close()
    else:  # a worker that has ended cannot tell of a daemon that runs its own program
        detached = [one for one in detached if one.name() == "sleep"]
    assert len(detached) == left
    assert wait_for(lambda: not any(alive(one.pid) for one in detached))


def test_workers_see_no_accelerator_and_import_no_torch(pipeline, group, progress):
    source = """
import os, sys
def look(completions, **kwargs):
    return [float(os.environ["CUDA_VISIBLE_DEVICES"] == "" and "torch" not in sys.modules)] * len(completions)
orms["look"] = look
"""
    rewards = pipeline(["look", "accuracy", "format", "cosine"], source)
    (scores,) = rewards.score([group(["a"], solution="1")], progress)
    assert scores.values[0][0] == 1.0


def test_calls_run_on_the_main_thread_so_signal_timers_work(pipeline, group, progress):
    source = """
import signal, time
def timed(completions, **kwargs):
    def ring(number, frame):
        raise TimeoutError
    signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, 0.05)
    try:
        time.sleep(3)
    except TimeoutError:
        return [1.0] * len(completions)
    return [0.0] * len(completions)
orms["timed"] = timed
"""
    assert pipeline(["timed"], source).score([group(["a"])], progress)[0].values == [[1.0]]


def test_start_returns_at_once_and_the_clock_does_not_run_while_calls_wait(pipeline, group, progress):
    source = """
import time
time.sleep(1.5)
def slow(completions, **kwargs):
    time.sleep(0.4)
    return [1.0] * len(completions)
orms["slow"] = slow
"""
    rewards = pipeline(["slow"], source, reward_timeout=0.8, num_workers=1)
    began = time.monotonic()
    rewards.start()
    assert time.monotonic() - began < 1.0
    groups = [group(["a"], group_id=f"g{index}") for index in range(4)]
    assert [item.excluded for item in rewards.score(groups, progress)] == [[None]] * 4


def test_a_clock_that_jumps_is_no_time_out(pipeline, group, progress, monkeypatch):
    source = """
import time
def slow(completions, **kwargs):
    time.sleep(0.5)
    return [1.0] * len(completions)
orms["slow"] = slow
"""
    rewards = pipeline(["slow"], source, reward_timeout=60, num_workers=1)
    hours = itertools.count(time.time(), 3600)
    monkeypatch.setattr(time, "time", lambda: next(hours))
    assert rewards.score([group(["a"])], progress)[0].excluded == [None]


def test_awaited_calls_of_different_groups_overlap_in_one_worker(pipeline, group, progress):
    source = """
import asyncio
class Judge(AsyncORM):
    async def __call__(self, completions, **kwargs):
        await asyncio.sleep(0.5)
        return [0.5] * len(completions)
orms["judge"] = Judge
"""
    rewards = pipeline(["judge"], source, num_workers=1)
    rewards.score([group(["warm"])], progress)
    began = time.monotonic()
    scores = rewards.score([group(["a", "b"], group_id=f"g{index}") for index in range(8)], progress)
    assert time.monotonic() - began < 1.5  # one after the other would take 4 s
    assert all(item.values == [[0.5], [0.5]] for item in scores)


def test_an_awaited_call_that_is_late_is_cancelled_without_losing_the_others(pipeline, group, progress):
    source = """
import asyncio
async def judge(completions, **kwargs):
    await asyncio.sleep(100 if "late" in completions else 0.1)
    return [0.5] * len(completions)
orms["judge"] = judge
"""
    rewards = pipeline(["judge"], source, num_workers=1, reward_timeout=0.6)
    scores = rewards.score([group(["a", "late"], group_id="g0"), group(["b"], group_id="g1")], progress)
    assert scores[0].excluded == [None, "timeout: judge"]
    assert scores[1].excluded == [None]
    assert rewards._pool.replaced == 0


RUDE = """
import asyncio
async def rude(completions, **kwargs):
    for text in completions:
        if text == "exit":
            raise SystemExit(0)
        if text == "interrupt":
            raise KeyboardInterrupt
        if text == "own":
            raise type("Own", (BaseException,), {})()
        if text == "stop":
            asyncio.get_running_loop().stop()
            await asyncio.sleep(1)
        if text == "close":
            asyncio.get_running_loop().close()
        if text == "nested":
            asyncio.run(asyncio.sleep(0))
    return [float(len(text)) for text in completions]
orms["rude"] = rude
"""


def test_an_awaited_function_that_ends_its_loop_or_raises_anything_costs_only_its_samples(pipeline, group, progress):
    rewards = pipeline(["rude"], RUDE)
    texts = ["exit", "interrupt", "own", "stop", "close", "nested"]
    (scores,) = rewards.score([group(["a", *texts, "bb"])], progress)
    assert scores.excluded == [None, *["exception: rude"] * len(texts), None]
    assert [scores.values[0], scores.values[-1]] == [[1.0], [2.0]]


def test_an_awaited_function_that_blocks_costs_only_its_own_samples(pipeline, group, progress):
    source = """
import asyncio, time
async def judge(completions, **kwargs):
    await asyncio.sleep(0.1)
    if "block" in completions:
        time.sleep(100)
    await asyncio.sleep(0.1)
    return [0.5] * len(completions)
orms["judge"] = judge
"""
    rewards = pipeline(["judge"], source, num_workers=1, reward_timeout=0.5)
    groups = [group(["block"], group_id="g0"), group(["a", "b"], group_id="g1")]
    scores = rewards.score(groups, progress)
    assert [item.excluded for item in scores] == [["timeout: judge"], [None, None]]


def test_sync_functions_may_run_their_own_event_loop(pipeline, group, progress):
    source = """
import asyncio
def runs(completions, **kwargs):
    async def work():
        await asyncio.sleep(0)
        return 0.25
    return [asyncio.run(work())] * len(completions)
async def awaits(completions, **kwargs):
    await asyncio.sleep(0.05)
    return [0.5] * len(completions)
orms["runs"], orms["awaits"] = runs, awaits
"""
    rewards = pipeline(["runs", "awaits"], source, num_workers=1)
    scores = rewards.score([group(["a"], group_id=f"g{index}") for index in range(3)], progress)
    assert [item.values for item in scores] == [[[0.25, 0.5]]] * 3


RANDOM = """
import random
def draws(completions, **kwargs):
    return [random.random() for _ in completions]
orms["draws"] = draws
"""


def test_random_functions_give_the_same_values_whatever_the_number_of_workers(pipeline, group, progress):
    groups = [group(["a", "b"], group_id=f"g{index}", prompt_id=f"p{index}") for index in range(6)]
    runs = []
    for num_workers in (1, 3):
        rewards = pipeline(["draws"], RANDOM, num_workers=num_workers)
        runs.append([item.values for item in rewards.score(groups, progress)])
    assert runs[0] == runs[1]
    random.seed(call_seed(7, "p0", "g0"))
    assert runs[0][0] == [[random.random()], [random.random()]]


def test_the_call_seed_depends_on_run_prompt_and_group():
    seeds = {call_seed(seed, prompt, name) for seed in (1, 2) for prompt in "ab" for name in "cd"}
    assert len(seeds) == 8
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_close_leaves_no_process_and_is_repeatable(pipeline, group, progress):
    rewards = pipeline(["nasty"], NASTY, num_workers=2, reward_timeout=60)
    rewards.score([group(["a"])], progress)
    [pending] = rewards.submit([group(["sleep"], group_id="late")], progress)
    pids = workers()
    rewards.close()
    rewards.close()
    assert not any(alive(pid) for pid in pids)
    with pytest.raises(RewardError, match="closed"):
        pending.result(1)


def test_a_worker_that_is_replaced_while_the_pool_closes_prints_nothing(pipeline, group, progress, monkeypatch, capfd):
    begun, family = threading.Event(), worker.family

    @contextlib.contextmanager
    def slowly():
        begun.set()
        time.sleep(0.3)  # meanwhile the pool closes
        yield

    def family_of_a_busy_machine(trainer, pid):
        time.sleep(1.0)
        return family(trainer, pid)

    rewards = pipeline(["nasty"], NASTY, num_workers=1)
    rewards.score([group(["a"])], progress)
    monkeypatch.setattr("swift.rewards.workers.kept_from_children", slowly)
    (scores,) = rewards.score([group(["exit"])], progress)
    assert scores.excluded == ["crash: nasty"]
    monkeypatch.setattr(worker, "family", family_of_a_busy_machine)
    assert begun.wait(30)
    capfd.readouterr()  # the warning of the crash
    rewards.close()
    assert capfd.readouterr().err == ""
    assert wait_for(lambda: not workers())


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("    def __init__(self):\n        raise RuntimeError('no judge here')\n", "no judge here"),
        (
            """
import os, signal, sys
if os.environ.get("CUDA_VISIBLE_DEVICES") == "" and "pytest" not in sys.modules:
    os.kill(os.getpid(), signal.SIGKILL)
""",
            "killed by SIGKILL",  # and not tried again for ever
        ),
    ],
)
def test_a_plugin_that_breaks_or_kills_its_worker_breaks_the_run(pipeline, group, progress, source, said):
    rewards = pipeline(["judge"], f"class Judge(ORM):\n    pass\n{source}\norms['judge'] = Judge\n")
    with pytest.raises(RewardError, match=said):
        rewards.score([group(["a"])], progress)


def test_a_constructor_that_raises_a_config_error_keeps_its_exit_code(pipeline, group, progress):
    rewards = pipeline(["cosine"], cosine_max_len=-1)
    with pytest.raises(ConfigError, match="cosine_max_len"):
        rewards.score([group(["a"], solution="1")], progress)


TRAINER = """
import psutil, sys, time
sys.path[:0] = {path}
from conftest import PROGRESS, make_args, make_group
from swift.rewards.pipeline import RewardPipeline
args = make_args(reward_funcs=["nasty"], external_plugins=["plugin.py"], reward_timeout=600.0)
rewards = RewardPipeline(args, seed=1, max_completion_length=10)
rewards.submit([make_group([{text!r}])], PROGRESS)
"""


@pytest.fixture
def trainer(tmp_path):
    """Starts a process that has submitted a text to the nasty function, and then does what `then` says."""

    def start(text, then):
        loop = 'if text == "loop":\n            subprocess.Popen(["sleep", "1000"])'
        source = "from swift.plugin import orms\n" + NASTY.replace('if text == "loop":', loop)
        (tmp_path / "plugin.py").write_text(source)
        command = [sys.executable, "-c", TRAINER.format(path=IMPORTS, text=text) + then]
        return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=tmp_path)

    return start


@pytest.mark.parametrize("stuck", ["a", "loop", "detach"])
def test_workers_and_their_children_end_when_the_trainer_is_killed(trainer, stuck):
    process = trainer(stuck, """
rewards.score([make_group(["a"])], PROGRESS)
time.sleep(1.0)
print(*(one.pid for one in psutil.Process().children(recursive=True)), flush=True)
time.sleep(1000)
""")  # fmt: skip
    pids = [int(pid) for pid in process.stdout.readline().split()]
    assert len(pids) >= {"a": 3, "loop": 4, "detach": 5}[stuck]
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert wait_for(lambda: not any(alive(pid) for pid in pids))


def test_the_pool_never_keeps_the_interpreter_from_ending(trainer):
    began = time.monotonic()
    assert trainer("loop", "raise SystemExit(17)").wait(30) == 17
    assert time.monotonic() - began < 10
