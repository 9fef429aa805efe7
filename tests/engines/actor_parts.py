"""Actors with the scripted backend, and a look at the processes of this test."""

import contextlib
import os
import signal
import sys
from dataclasses import replace
from pathlib import Path

import psutil
from scripted_engine import CountingSource, ScriptedEngine, two_layers

from swift.rollout.engines import cluster
from swift.rollout.engines.actor_client import ActorClient
from swift.rollout.engines.events import Timeouts
from swift.rollout.engines.pool import EnginePool
from swift.rollout.engines.ray_actor import MARKER
from swift.rollout.engines.spec import EngineSpec
from swift.types import Request, SamplingParams

FAKES = Path(__file__).parent.parent / "fakes"
PATHS = os.pathsep.join([*sys.path, str(FAKES), str(Path(__file__).parent)])
"""PYTHONPATH of a process that uses this file."""
QUICK = Timeouts(start_s=120, heartbeat_s=0.5, close_s=3.0)


def scripted_spec(**kwargs):
    cores = kwargs.pop("cores", ())
    return EngineSpec(
        backend="scripted",
        model="none",
        plugins=(str(FAKES / "scripted_backend.py"),),
        cores=cores,
        engine_kwargs=kwargs,
    )


def scripted_engine_in_actor(folder, *, name="engine 0 (cpu:0)", timeouts=None, restarts=3, options=None, **kwargs):
    client = ActorClient(
        scripted_spec(**kwargs),
        name=name,
        log_file=folder / "logs" / f"{name.split()[1]}.log",
        uses=cluster.use(),
        timeouts=replace(QUICK, **(timeouts or {})),
        restarts=restarts,
        **(options or {}),
    )
    return EnginePool([client])


def working_pool(folder, clusters, places):
    """Scripted engines on places of clusters, after a look at whether they sample and take weights."""
    clients = [
        ActorClient(
            scripted_spec(), name=f"engine {n}", log_file=folder / f"{n}.log", uses=one, timeouts=QUICK, options=where
        )
        for n, (one, where) in enumerate(zip(clusters, places, strict=True))
    ]  # fmt: skip
    pool, wanted = EnginePool(clients), requests(12)
    assert tokens(pool.sample(wanted)) == expected_tokens(wanted)
    assert pool.load_weights(CountingSource(two_layers(2)), 1).version == 1
    return pool


def pid_of(engine):
    """The process that hosts the engine now."""
    assert engine.capabilities
    return engine.engines[0].instance.pid


def facts_of(engine):
    """What the scripted backend knows of its process."""
    import ray

    return ray.get(engine.engines[0].instance.actor.do.remote("facts"))["result"]


def requests(count, *, group="g", start=0):
    return [Request(f"{group}/{i}", [1, 2, 3], SamplingParams(max_new_tokens=40, seed=start + i)) for i in range(count)]


def tokens(completions):
    done = {}
    for completion in completions:
        assert completion.request_id not in done, "came twice"
        done[completion.request_id] = completion.token_ids
    return done


def expected_tokens(wanted, weights=b""):
    """What the scripted backend samples, without any process."""
    engine = ScriptedEngine()
    engine.weights = weights
    return tokens(engine.sample(wanted))


def family(parent=None):
    """Live processes of engines in actors below a process: the actors, and what has their marker."""
    found = []
    for process in (parent or psutil.Process()).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            named = "EngineActor" in " ".join(process.cmdline())  # whose title may have overwritten the environment
            if (named or MARKER in process.environ()) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def open_descriptors():
    found = []
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the one that lists them
            found.append(str(entry.readlink()))
    return sorted(found)


def kill(worker, number=signal.SIGKILL):
    os.kill(pid_of(worker), number)
