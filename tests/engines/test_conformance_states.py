"""The contract of `swift.rollout.engines.base`, case by case: sleep and ends.

Which cases run on which backends is said in test_conformance_sampling.py.
"""

from __future__ import annotations

import time

import pytest
from conformance_checks import LONG, TOLERANCE, gap, need, while_it_samples
from conformance_parts import transport
from engine_traces import GONE_LIMIT_S, Traces
from oracle import ask, noisy, run, with_adapter

from swift.errors import EngineAsleep, EngineDead, EngineError, Unsupported

KILLED_LIMIT_S = 10.0


@pytest.mark.parametrize("level", [1, 2])
@transport
def test_c18_the_same_greedy_tokens_before_and_after_sleep(subject, level):
    engine = subject.engine
    need(subject, level in engine.capabilities.sleep_levels, f"sleep level {level}")
    requests = [ask(i, [70 + i] * 9, temperature=0.0) for i in range(4)]
    before = run(engine, requests)
    report = engine.sleep(level)
    assert report.freed_bytes >= 0
    if level == 2:
        assert engine.wake(["weights"]) is False
        subject.sync(subject.model)
        assert engine.wake(["kv_cache"]) is True
    else:
        assert engine.wake() is True
    after = run(engine, requests)
    assert [completion.token_ids for completion in after] == [completion.token_ids for completion in before]
    for one, other in zip(before, after, strict=True):
        assert one.logprobs == pytest.approx(other.logprobs, abs=TOLERANCE)


@transport
def test_c19_weights_wake_first_and_a_wrong_tag_is_an_error(subject):
    engine = subject.engine
    need(subject, 1 in engine.capabilities.sleep_levels, "sleep level 1")
    assert engine.wake() is True
    engine.sleep(1)
    engine.sleep(1)
    with pytest.raises(EngineAsleep):
        engine.wake(["kv_cache"])
    with pytest.raises(Unsupported):
        engine.wake(["weights", "kv-cache"])
    assert engine.wake(["weights"]) is False
    assert engine.wake(["weights"]) is False
    with pytest.raises(EngineAsleep):
        list(engine.sample([ask("early")]))
    engine.sleep(1)  # half awake is not asleep
    with pytest.raises(EngineAsleep):
        engine.wake(["kv_cache"])
    assert engine.wake(["weights"]) is False
    assert engine.wake(["kv_cache"]) is True
    assert run(engine, [ask("r")])[0].token_ids


@pytest.mark.parametrize("level", [1, 2])
@transport
def test_c20_a_sleeping_engine_neither_samples_nor_takes_weights(subject, level):
    engine = subject.engine
    need(subject, level in engine.capabilities.sleep_levels, f"sleep level {level}")
    assert engine.health().detail == ""
    engine.sleep(level)
    assert engine.health().alive
    assert "asleep" in engine.health().detail
    with pytest.raises(EngineAsleep):
        list(engine.sample([ask("r")]))
    with pytest.raises(EngineAsleep):
        subject.sync(subject.model)
    engine.wake()
    if level == 2 and not subject.spec.lora:  # awake, with weights of no version
        assert "dropped" in engine.health().detail
        with pytest.raises(EngineAsleep):
            list(engine.sample([ask("r")]))
        subject.sync(subject.model)
    assert engine.health().detail == ""
    assert gap(subject.model, ask("r"), run(engine, [ask("r")])[0]) < TOLERANCE


@transport
def test_c20_a_sleeping_engine_takes_no_adapter(subject):
    engine = subject.engine
    need(subject, engine.capabilities.lora and 1 in engine.capabilities.sleep_levels, "LoRA adapters and sleep")
    engine.sleep(1)
    with pytest.raises(EngineAsleep):
        engine.load_adapter(with_adapter(subject.model, seed=1)[1], subject.next_version())
    engine.wake()
    subject.sync(subject.model)
    assert gap(subject.model, ask("r"), run(engine, [ask("r")])[0]) < TOLERANCE


@transport
def test_c20_an_engine_with_work_does_not_fall_asleep(subject, endless):
    need(subject, 1 in subject.engine.capabilities.sleep_levels, "sleep level 1")

    def sleep():
        with pytest.raises(EngineError):
            subject.engine.sleep(1)

    completion = while_it_samples(subject.engine, ask("r", endless, temperature=0.0), sleep)
    assert (completion.request_id, completion.finish_reason) == ("r", "length")


@transport
def test_c21_an_engine_killed_while_it_decodes_is_dead_within_seconds(subject, endless):
    if subject.backend.place == "here":
        pytest.skip(f"{subject.backend.name}: shares this process")
    engine = subject.engine
    assert engine.capabilities  # it has started
    subject.traces.look()
    long = [ask(i, endless, temperature=0.0, max_new_tokens=LONG) for i in range(8)]
    killed = None
    with pytest.raises(EngineDead) as caught:
        for _ in engine.sample([*long, ask("short", max_new_tokens=2)]):
            if killed is None:
                subject.kill()
                killed = time.monotonic()
    assert killed is not None
    assert time.monotonic() - killed < KILLED_LIMIT_S
    assert len(caught.value.problems) == 1
    assert not engine.health().alive
    with pytest.raises(EngineDead):
        list(engine.sample([ask("after")]))
    subject.close()
    assert subject.traces.wait_until_gone() == []


@transport
def test_c22_close_leaves_no_process_port_or_segment(subject):
    engine = subject.engine
    subject.sync(noisy(subject.model))
    assert run(engine, [ask("r")])[0].token_ids
    subject.traces.look()
    started = time.monotonic()
    subject.close()
    assert time.monotonic() - started < GONE_LIMIT_S
    assert subject.traces.wait_until_gone() == []
    engine.close()
    with pytest.raises(EngineDead):
        list(engine.sample([ask("after")]))
    assert not engine.health().alive


def test_c22_the_traces_of_processes_ports_and_segments_are_seen(tmp_path):
    """The check of the case above, against a process that leaves all of them behind until it is killed."""
    import subprocess
    import sys

    code = (
        "import socket, sys, time; from multiprocessing import shared_memory;"
        "memory = shared_memory.SharedMemory(create=True, size=100);"
        "port = socket.create_server(('127.0.0.1', 0)); path = socket.socket(socket.AF_UNIX);"
        f"path.bind({str(tmp_path / 's')!r}); path.listen(); print('up', flush=True); sys.stdin.read();"
        "memory.close(); memory.unlink()"
    )
    traces = Traces()
    process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert process.stdout.readline() == b"up\n"
        traces.look()
        kinds = {line.split()[0] for line in traces.left()}
        assert kinds == {"process", "port", "segment", "socket"}
    finally:
        process.communicate(timeout=30)
    assert {line.split()[0] for line in traces.wait_until_gone(1.0)} == {"socket"}
