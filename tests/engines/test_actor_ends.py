"""The start and the end of an engine in an actor: refusals, prompt ends, nothing left."""

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest
import torch
from actor_parts import PATHS, facts_of, family, kill, open_descriptors, requests, scripted_engine_in_actor
from processes import alive, wait_for
from scripted_engine import CountingSource

from swift.errors import ConfigError, EngineDead

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.usefixtures("ray_cluster")]


def test_what_the_engine_refuses_at_its_start_arrives_as_it_is(start):
    worker = start(fail="config")
    with pytest.raises(ConfigError, match="scripted: is refused"):
        assert worker.capabilities
    with pytest.raises(ConfigError):
        list(worker.sample(requests(1)))


def test_an_engine_that_cannot_be_made_again_is_dead_at_once(start, tmp_path):
    worker = start(fail=str(tmp_path / "started"), step_s=0.05)
    stream = worker.sample(requests(8))
    next(stream)
    kill(worker)
    with pytest.raises(EngineDead, match=r"ended unexpectedly .*, and cannot be replaced .*starts only once, as told"):
        list(stream)
    with pytest.raises(EngineDead):
        list(worker.sample(requests(1, group="later")))
    assert not worker.health().alive


def test_a_process_that_ends_at_its_start_is_not_tried_again(start):
    worker = start(fail="crash")
    with pytest.raises(EngineDead, match=r"its actor .* while it started; log .*about to crash, as told"):
        assert worker.capabilities
    assert worker.counters.restarts == 0


def test_a_start_that_takes_too_long_is_ended(start):
    worker = start(timeouts={"start_s": 0.3})
    with pytest.raises(EngineDead, match=r"did not start within 0\.3 s"):
        assert worker.capabilities


def test_close_while_it_starts_is_prompt(start):
    worker = start()
    began = time.monotonic()
    worker.close()
    assert time.monotonic() - began < 5.0
    with pytest.raises(EngineDead, match="closed"):
        list(worker.sample(requests(1)))


def test_what_the_engine_started_ends_with_it_however_stubborn(start):
    worker = start(children=["plain", "stubborn"], timeouts={"close_s": 1.0})
    assert worker.capabilities
    children = facts_of(worker)["children"]
    assert all(alive(child) for child in children)
    kill(worker)
    assert wait_for(lambda: not any(alive(child) for child in children), 10)


def test_named_memory_of_what_was_killed_is_removed(start):
    worker = start(children=["mapped"])
    assert worker.capabilities
    (child,) = facts_of(worker)["children"]
    segment = Path(f"/dev/shm/psm_swift{child}")
    assert segment.exists()
    kill(worker)
    assert wait_for(lambda: not segment.exists(), 10)


def test_engines_leave_no_descriptor_no_segment_and_no_process(tmp_path):
    def once(number):
        worker = scripted_engine_in_actor(tmp_path, name=f"engine {number}")
        if number % 2 == 0:
            worker.load_weights(CountingSource({"a": torch.ones(3, 5)}), 1)
            kill(worker)
            assert len(list(worker.sample(requests(2)))) == 2
        worker.close()

    once(0)  # what is opened once and stays: libraries, caches
    threads, before, segments = threading.active_count(), open_descriptors(), set(Path("/dev/shm").iterdir())
    for number in (1, 2):
        once(number)
    # threads of Ray look into /proc now and then
    assert wait_for(lambda: len(open_descriptors()) <= len(before)), set(open_descriptors()) - set(before)
    assert not [path for path in set(Path("/dev/shm").iterdir()) - segments if "swift" in path.name]
    assert wait_for(lambda: threading.active_count() <= threads)
    assert wait_for(lambda: not family())


PARENT = """
import sys, time
from actor_parts import scripted_engine_in_actor, requests
from pathlib import Path
from swift.rollout.engines import cluster
if __name__ == "__main__":
    cluster.use()
    worker = scripted_engine_in_actor(Path(sys.argv[1]), step_s=0.05, endless=["g/0"], children=["plain", "stubborn"],
                             timeouts={"close_s": 1.0})
    worker.capabilities
    print("up", flush=True)
    list(worker.sample(requests(3)))
"""


def test_when_the_trainer_is_killed_no_process_is_left(tmp_path):
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(tmp_path)], env={**os.environ, "PYTHONPATH": PATHS}, stdout=subprocess.PIPE
    )
    try:
        assert parent.stdout.readline().strip() == b"up"
        started = [*psutil.Process(parent.pid).children(recursive=True)]
        assert {"gcs_server", "raylet"} <= {one.name() for one in started}
        assert len(family(psutil.Process(parent.pid))) >= 3  # the engine and its two children
    finally:
        parent.kill()
        parent.wait(10)
        parent.stdout.close()
    assert wait_for(lambda: not any(alive(one.pid) for one in started), 20), [
        one for one in started if one.is_running()
    ]


SLOW_KILL = """
import os, signal, sys, time
from pathlib import Path
from actor_parts import pid_of, scripted_engine_in_actor
from processes import wait_for
from swift.errors import EngineDead
if __name__ == "__main__":
    import ray
    worker = scripted_engine_in_actor(Path(sys.argv[1]), restarts=0)
    (client,) = worker.engines
    kill, again = client._kill, []
    ray.init = lambda *_, **__: again.append("started")  # what Ray does for a call without a cluster

    def slowly(instance):
        time.sleep(1.0)
        kill(instance)

    client._kill = slowly
    os.kill(pid_of(worker), signal.SIGKILL)
    assert wait_for(lambda: client.instance.lost)
    try:
        worker.reset_caches()
    except EngineDead:
        worker.close()
    time.sleep(1.5)
    print("clusters:", again)
"""


def test_a_thread_that_still_uses_ray_is_waited_for_before_the_cluster_is_left(tmp_path):
    """A call to Ray after `ray.shutdown` starts another cluster; one at the same time may end the process."""
    ran = subprocess.run(
        [sys.executable, "-c", SLOW_KILL, str(tmp_path)], env={**os.environ, "PYTHONPATH": PATHS}, text=True,
        capture_output=True, timeout=120, check=False,
    )  # fmt: skip
    assert (ran.returncode, ran.stdout.strip().splitlines()[-1:]) == (0, ["clusters: []"]), ran.stderr[-3000:]
