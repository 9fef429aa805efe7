"""An actor that dies, hangs, lies or stands still: what the trainer sees, and that nothing is left."""

import os
import signal
import subprocess
import sys
import time

import pytest
from actor_parts import PATHS, expected_tokens, facts_of, kill, pid_of, requests, tokens
from processes import alive, wait_for
from scripted_engine import CountingSource, two_layers, weights_of
from sources import asking

from swift.errors import EngineDead, SyncFailed
from swift.rollout.engines import actor_client
from swift.rollout.engines.pool import EnginePool
from swift.rollout.weights import object_store

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("ray_cluster")]


class Interfering:
    """Weights; does something before bucket `at`."""

    def __init__(self, tensors, at, action):
        self.source, self.at, self.action = CountingSource(tensors), at, action

    def manifest(self):
        return self.source.manifest()

    def buckets(self):
        for number, bucket in enumerate(self.source.buckets()):
            if number == self.at:
                self.action()
            yield bucket


def test_a_plugin_backend_runs_in_its_process_on_its_cores(start):
    core = max(os.sched_getaffinity(0))
    worker = start(cores=(core,))
    wanted = requests(12)
    assert tokens(worker.sample(wanted)) == expected_tokens(wanted)
    facts = facts_of(worker)
    assert (facts["affinity"], facts["omp"]) == ([core], "1")
    assert facts["pid"] == pid_of(worker) != os.getpid()
    assert worker.counters.decode_steps > 0


@pytest.mark.long
def test_calls_are_answered_while_it_samples(start):
    worker = start(step_s=0.2)
    with asking(worker, *requests(6)) as caller:
        stream = caller.completions()
        next(stream)
        began = time.monotonic()
        assert all(worker.health().alive for _ in range(10))
        assert time.monotonic() - began < 1.5, "each waits for a step"
        caller.ask(*requests(1, group="joins"))
        assert "joins/0" in tokens(stream)


@pytest.mark.long
def test_200_requests_whose_actor_is_killed_twice_come_back_once_as_if_nothing_had_happened(start):
    worker = start(step_s=0.05)
    wanted, tensors = requests(200), two_layers(3)
    worker.load_weights(CountingSource(tensors), 1)
    undisturbed = tokens(worker.sample(wanted))
    assert undisturbed == expected_tokens(wanted, weights_of(tensors))
    came, killed = [], set()
    for completion in worker.sample(wanted):
        came.append(completion)
        if len(killed) < 2 and len(came) >= 20 and pid_of(worker) not in killed and worker.health().alive:
            killed.add(pid_of(worker))
            kill(worker)
    assert tokens(came) == undisturbed
    assert worker.counters.restarts == len(killed) == 2
    assert {one.versions[0][0] for one in came} == {1}


@pytest.mark.long
def test_an_actor_that_the_kernel_kills_for_memory_is_named_and_replaced_or_the_run_gets_advice(
    start, monkeypatch, caplog
):
    worker, wanted = start(step_s=0.05, restarts=1), requests(20)
    assert worker.capabilities
    count, came = [actor_client.oom_kills()], []
    monkeypatch.setattr(actor_client, "oom_kills", lambda: count[0])  # as /proc/vmstat says
    for completion in worker.sample(wanted):
        came.append(completion)
        if len(came) == 5:
            count[0] += 1
            kill(worker)
    assert tokens(came) == expected_tokens(wanted)
    said = "was killed by the kernel, because this machine ran out of memory; free memory on its node: fewer engines"
    assert [line for line in caplog.messages if line.startswith(f"engine 0 (cpu:0): lost ({said}")]
    count[0] += 1
    kill(worker)
    with pytest.raises(EngineDead, match=r"its actor was killed by the kernel.*--engine_restarts 1 within an hour"):
        list(worker.sample(wanted))


MONITORED = """
import os, sys
from pathlib import Path
os.environ["RAY_memory_usage_threshold"] = "0.01"  # this machine is always above it
os.environ["RAY_memory_monitor_refresh_ms"] = "100"
from swift.errors import EngineDead
from actor_parts import requests, scripted_engine_in_actor
if __name__ == "__main__":
    worker = scripted_engine_in_actor(Path(sys.argv[1]), step_s=0.5, restarts=1)
    try:
        list(worker.sample(requests(3)))
    except EngineDead as error:
        print(error)
    worker.close()
"""


@pytest.mark.long
def test_an_actor_that_rays_memory_monitor_kills_ends_the_run_with_advice(tmp_path):
    ran = subprocess.run(
        [sys.executable, "-c", MONITORED, str(tmp_path)], env={**os.environ, "PYTHONPATH": PATHS}, text=True,
        capture_output=True, timeout=200, check=False,
    )  # fmt: skip
    assert "was killed by Ray's memory monitor, because its node has nearly no memory left; free" in ran.stdout, ran


def test_killed_while_it_loads_weights_the_update_fails_and_can_be_repeated_on_a_rebuilt_engine(start):
    worker = start()
    worker.load_weights(CountingSource(two_layers(1)), 1)
    source = Interfering(two_layers(2), 1, lambda: (kill(worker), wait_for(lambda: not worker.health().alive)))
    with pytest.raises(SyncFailed, match=r"version 2 for engine 0 \(cpu:0\): (bucket [12]|commit): ended unexpectedly"):
        worker.load_weights(source, 2)
    with pytest.raises(SyncFailed, match="invalid"):
        list(worker.sample(requests(1)))
    worker.rebuild()
    assert worker.version == 0
    worker.load_weights(CountingSource(two_layers(2)), 2)
    wanted = requests(4)
    assert tokens(worker.sample(wanted)) == expected_tokens(wanted, weights_of(two_layers(2)))


@pytest.mark.long
def test_an_abort_that_arrives_after_the_rebuild_harms_nothing(start):
    import ray

    worker, source, wanted = start(), CountingSource(two_layers(1)), requests(3)
    client = worker.engines[0]
    number = client.call("begin_update", 60, manifest=source.manifest(), version=1)
    bucket = next(source.buckets())
    client.send_bucket(number, "object_store", client.payload("object_store", bucket, 1), 60)()
    worker.rebuild()
    ray.get(worker.engines[0].instance.actor.abort_update.remote(1))
    assert tokens(worker.sample(wanted)) == expected_tokens(wanted)


@pytest.mark.long
def test_beyond_its_restarts_the_engine_is_dead_and_shows_its_log(start):
    worker = start(restarts=1, step_s=0.05, crash_on=["g/3"])
    with pytest.raises(EngineDead) as caught:
        list(worker.sample(requests(6)))
    (line,) = caught.value.problems
    assert line.startswith("engine 0 (cpu:0): its actor failed (")
    assert "--engine_restarts 1" in line
    assert "RuntimeError: scripted: crash, as told" in line
    assert not worker.health().alive
    with pytest.raises(EngineDead):
        list(worker.sample(requests(1)))


@pytest.mark.long
def test_a_worker_that_is_stopped_is_replaced_in_bounded_time(start):
    worker = start(step_s=0.05, timeouts={"misses": 3})
    wanted, came = requests(12), []
    for completion in worker.sample(wanted):
        came.append(completion)
        if len(came) == 3:
            stopped = pid_of(worker)
            kill(worker, signal.SIGSTOP)
            began = time.monotonic()
    assert tokens(came) == expected_tokens(wanted)
    assert time.monotonic() - began < 60
    assert worker.counters.restarts == 1
    assert wait_for(lambda: not alive(stopped))


@pytest.mark.long
def test_an_update_that_takes_too_long_fails_and_says_where_it_is(start):
    worker = start(timeouts={"sync_s": 1.0}, bucket_s=30.0)
    assert worker.capabilities
    with pytest.raises(SyncFailed, match=r"bucket 1: did not answer bucket in time; its thread is in take"):
        worker.load_weights(CountingSource(two_layers(1)), 1)


@pytest.mark.long
def test_an_engine_that_stands_still_is_replaced_while_the_others_go_on(start, caplog):
    hung = start(timeouts={"stall_s": 1.5}, frozen=["a/2"])
    pool = EnginePool([*hung.engines, *start(name="engine 1 (cpu:1)").engines])
    first, wanted = pid_of(hung), [*requests(4, group="a"), *requests(4, group="b")]
    began = time.monotonic()
    assert tokens(pool.sample(wanted)) == expected_tokens(wanted)
    assert time.monotonic() - began < 60
    assert wait_for(lambda: pool.counters.restarts == 1, 60)
    assert (pool.health().alive, pool.health().detail) == (True, "")
    (line,) = [one for one in caplog.messages if "lost (" in one]
    assert line.startswith("engine 0 (cpu:0): lost (made no progress for 1.5 s; its thread is in stand_still")
    assert "scripted_backend.py" in line
    assert wait_for(lambda: not alive(first))
    assert tokens(hung.sample(requests(4))) == expected_tokens(requests(4))


@pytest.mark.long
def test_an_engine_that_stands_still_is_named_with_its_stacks(start):
    worker = start(timeouts={"stall_s": 1.5}, restarts=0, frozen=["g/2"])
    began = time.monotonic()
    with pytest.raises(EngineDead) as caught:
        list(worker.sample(requests(4)))
    assert time.monotonic() - began < 60
    (line,) = caught.value.problems
    assert line.startswith("engine 0 (cpu:0): its actor made no progress for 1.5 s; its thread is in stand_still")
    assert "scripted_backend.py" in line
    assert worker.counters.restarts == 0


@pytest.mark.long
def test_where_an_engine_is_can_be_asked_at_any_time(start):
    worker = start()
    assert worker.capabilities
    assert worker.stacks().startswith("engine 0 (cpu:0): its thread is in select")
    kill(worker)
    assert wait_for(lambda: "gone (ended unexpectedly" in worker.stacks())


@pytest.mark.long
def test_bytes_that_change_on_the_way_are_found(start, monkeypatch):
    worker = start()
    whole = object_store.byte_arrays_of

    def damaged(bucket):
        changed = [(info, array.copy()) for info, array in whole(bucket)]
        changed[0][1][1] ^= 1
        return changed

    monkeypatch.setattr(object_store, "byte_arrays_of", damaged)
    with pytest.raises(SyncFailed, match="digest"):
        worker.load_weights(CountingSource(two_layers(1)), 1)
    monkeypatch.undo()
    with pytest.raises(SyncFailed, match="invalid"):
        list(worker.sample(requests(1)))
    worker.rebuild()
    assert worker.load_weights(CountingSource(two_layers(1)), 1).version == 1


@pytest.mark.long
def test_the_next_bucket_is_gathered_while_the_worker_takes_one(start):
    bucket_s = 2.0
    worker = start(bucket_s=bucket_s)
    assert worker.capabilities
    gathered = []
    began = time.monotonic()
    source = Interfering(two_layers(1), 1, lambda: gathered.append(time.monotonic() - began))
    assert worker.load_weights(source, 1).version == 1
    assert gathered[0] < bucket_s < time.monotonic() - began
