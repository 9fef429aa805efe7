"""Environments that wait, fail, hang and end the run: what becomes of the samples of a rollout of several turns."""

import asyncio
import contextlib
import statistics
import threading
import time
from dataclasses import replace

import numpy
import pytest
import torch
from small_runs import SmallRun
from trajectories import Once, requests, run, sleepy

from swift.errors import EngineError
from swift.rollout.multi_turn import loop as loop_module
from swift.rollout.multi_turn.environments import of_envs
from swift.rollout.multi_turn.loop import Loop
from swift.rollout.multi_turn.trajectory import Excluded, OutOfRoom
from swift.rollout.round_result import fault
from swift.types import Prompt


def test_an_environment_that_waits_holds_nobody_up(template, engine_of):
    began = time.monotonic()
    assert len(run(engine_of(of_envs({"slow": sleepy(0.3)}, "slow")), requests(template, 20))) == 20
    assert time.monotonic() - began < 3.0, "one after the other they take six seconds"


def asking(wait):
    """Two answers, with `wait` between them."""

    async def play(trajectory):
        await trajectory.answer()
        await wait()
        trajectory.say({"role": "user", "content": "and?"})
        await trajectory.answer()

    return play


def on_a_thread(seconds):
    return lambda: asyncio.to_thread(time.sleep, seconds)


def test_what_a_thread_does_at_once_meets_the_engine_at_the_same_step(template, engine_of):
    steps = set()
    for _ in range(5):
        engine = engine_of(asking(on_a_thread(0.0)))
        run(engine, requests(template, 8))
        steps.add(engine.engine.counters.decode_steps)
    assert len(steps) == 1


@pytest.mark.long
@pytest.mark.parametrize("wait", [on_a_thread, lambda seconds: lambda: asyncio.sleep(seconds)], ids=["sync", "async"])
def test_64_trajectories_with_a_slow_tool_take_hardly_longer(template, engine_of, wait):
    wanted = requests(template, 64)
    sized = [replace(one.sampling, max_new_tokens=20 + 5 * number) for number, one in enumerate(wanted)]
    wanted = [replace(request, sampling=sampling) for request, sampling in zip(wanted, sized, strict=True)]

    def seconds(asked):
        engine = engine_of(asking(wait(asked)))
        began = time.monotonic()
        run(engine, wanted)
        return time.monotonic() - began

    seconds(0.0)
    pairs = [(seconds(0.0), seconds(0.2)) for _ in range(5)]
    print(pairs)
    assert statistics.median(slow / fast for fast, slow in pairs) < 1.3


async def raising(error):
    raise error


@pytest.mark.parametrize("error", [KeyError, SystemExit, TimeoutError])
def test_a_sample_whose_environment_fails_is_left_out_alone(template, engine_of, error, caplog):
    class Shaky(Once):
        async def step(self, messages):
            if self.config["worth"] == "bad":
                async with asyncio.timeout(0.01):  # of its own
                    await (asyncio.sleep(1) if error is TimeoutError else raising(error))
            return "", 1.0, True, {}

    wanted = requests(template, 4)
    for request, worth in zip(wanted, ["good", "bad", "good", "bad"], strict=True):
        object.__setattr__(
            request, "prompt", Prompt("p", request.prompt.messages, [1], {"env_config": {"worth": worth}})
        )
    engine = engine_of(of_envs({"shaky": Shaky}, "shaky"))
    assert [fault(one) for one in run(engine, wanted)] == [None, f"environment: {error.__name__}"] * 2
    assert (engine.late, Once.closed) == (0, 4)


REWARDS = [(1, None), (True, None), (None, None), (numpy.float32(0.5), None), (torch.tensor(2.0), None)]
NONE = [("1.0", "TypeError"), (b"1", "TypeError"), ({1.0}, "TypeError"), (numpy.ones(1), "TypeError")]
INFINITE = [(float("nan"), "ValueError"), (float("-inf"), "ValueError"), (10**400, "ValueError"), (1e39, "ValueError")]


@pytest.mark.parametrize(("value", "error"), REWARDS + NONE + INFINITE)
def test_the_reward_of_a_step_is_a_number_or_its_sample_is_left_out(template, engine_of, value, error):
    class Giving(Once):
        async def step(self, messages):
            return "", value, True, {}

    [one] = run(engine_of(of_envs({"giving": Giving}, "giving")), requests(template, 1))
    assert fault(one) == (error and f"environment: {error}")
    assert error or one.episode.rewards == [None if value is None else float(value)]


def test_an_environment_that_never_works_ends_the_run(template, engine_of, caplog):
    class Broken(Once):
        async def step(self, messages):
            raise KeyError("the board")

    with pytest.raises(
        EngineError, match=r"--gym_env: mine: raised KeyError: 'the board' \(.*test_trajectory_ends.py:\d+\)"
    ):
        run(engine_of(of_envs({"broken": Broken}, "broken")), requests(template, 40))
    assert len([line for line in caplog.messages if "KeyError" in line]) == 1


@pytest.mark.parametrize("late", [False, True])
def test_an_environment_that_never_works_ends_a_run_that_takes_no_more_than_its_samples(template, engine_of, late):
    class Broken(Once):
        async def reset(self, request):
            if late:
                await asyncio.sleep(100)
            raise KeyError("the board")

    engine = engine_of(of_envs({"broken": Broken}, "broken"), limit_s=0.3 if late else 600.0)
    with pytest.raises(EngineError, match="the first 32 samples all failed"):
        for _ in range(4):
            for request in requests(template, 8):
                engine.submit(request)
            list(zip(range(8), engine.stream(), strict=False))  # as a round does that has all it waits for


class OwnError(BaseException):
    """Of a plugin."""


@pytest.mark.parametrize("error", [KeyboardInterrupt, OwnError])
@pytest.mark.parametrize("where", ["reset", "step", "close"])
def test_whatever_an_environment_raises_the_others_go_on(template, engine_of, error, where):
    class Rude(Once):
        pass

    async def rude(self, *arguments):
        raise error

    setattr(Rude, where, rude)
    engine = engine_of(of_envs({"rude": Rude, "fine": Once}, "fine"))
    wanted = [requests(template, 2, env_config={"name": name})[i] for i, name in enumerate(["rude", "fine"])]
    assert [fault(one) is None for one in run(engine, wanted)] == [False, True]
    assert [fault(one) for one in run(engine, wanted[1:])] == [None]


@pytest.mark.parametrize("worked", [False, True])
def test_a_step_that_blocks_the_loop_is_a_time_out_and_the_next_samples_get_another_loop(
    template, engine_of, caplog, worked
):
    leave = threading.Event()

    class Blocking(Once):
        async def step(self, messages):
            if self.config["blocks"]:
                leave.wait(100)
            return await super().step(messages)

    engine = engine_of(of_envs({"blocking": Blocking}, "blocking"), limit_s=0.5)
    fine, blocked = (requests(template, 3, env_config={"blocks": blocks}) for blocks in (False, True))
    if worked:
        run(engine, fine)
    began = time.monotonic()
    assert [fault(one) for one in run(engine, blocked)] == ["environment: timeout"] * 3
    assert time.monotonic() - began < 20
    assert "test_trajectory_ends.py:" in caplog.text and "blocks the event loop for over" in caplog.text
    assert engine.late == 3
    assert [fault(one) for one in run(engine, fine)] == [None] * 3
    leave.set()
    assert [fault(one) for one in run(engine, fine)] == [None] * 3
    assert engine.late == 3


def full(trajectory):
    raise OutOfRoom


def left_out(trajectory):
    raise Excluded("for a reason")


@pytest.mark.parametrize("end", [full, left_out], ids=["full", "excluded"])
def test_a_trajectory_that_came_to_any_end_shows_that_the_environment_works(template, engine_of, end):
    async def play(trajectory):
        if trajectory.request.request_id == "p-0/0":
            end(trajectory)
        await asyncio.sleep(0.01)
        raise KeyError("the board")

    assert [fault(one) for one in run(engine_of(play), requests(template, 40))][1:] == ["environment: KeyError"] * 39


@pytest.mark.parametrize("waits", ["for its environment", "for its turn"])
def test_a_trajectory_that_takes_too_long_is_left_out_and_counted(template, engine_of, waits):
    class Long(Once):
        async def step(self, messages):
            if self.config["long"]:
                await asyncio.sleep(100)
            return await super().step(messages)

    engine = engine_of(of_envs({"long": Long}, "long"), limit_s=1.0)
    wanted = [requests(template, 2, env_config={"long": bool(i)})[i] for i in range(2)]
    if waits == "for its turn":
        wanted[1] = replace(wanted[1], sampling=replace(wanted[1].sampling, max_new_tokens=900))
        engine.between_steps = lambda: time.sleep(0.005)
    assert [fault(one) for one in run(engine, wanted)] == [None, "environment: timeout"]
    assert (engine.late, Once.closed) == (1, 2)
    assert engine.engine.counters.decode_rows < 900


def test_an_environment_that_is_always_late_ends_the_run(template, engine_of):
    engine = engine_of(of_envs({"slow": sleepy(100)}, "slow"), limit_s=0.3)
    with pytest.raises(EngineError, match=r"--gym_env: mine: took over --rollout_timeout 0.3 s; the first 32"):
        run(engine, requests(template, 32))


@pytest.mark.parametrize("message", [{"role": "assistant"}, {"content": "?"}, "no message"])
def test_whatever_an_environment_makes_of_its_messages_every_request_ends(template, engine_of, message):
    async def play(trajectory):
        trajectory.messages.append(message)

    engine = engine_of(play)
    for request in requests(template, 2):
        engine.submit(request)
    ended, stream = [], engine.stream()
    with contextlib.suppress(AttributeError):
        for one in stream:
            ended.append(one.request_id)
    assert {*ended, *(one.request_id for one in engine.stream())} == {"p-0/0", "p-0/1"}


def test_the_end_of_the_pipeline_closes_environments(template, engine_of):
    engine = engine_of(of_envs({"endless": sleepy(100)}, "endless"))
    pipeline = SmallRun(engine).pipeline
    engine.submit(requests(template, 1)[0])
    stream = threading.Thread(target=list, args=(engine.stream(),))
    stream.start()
    while not Once.asleep:
        time.sleep(0.01)
    pipeline.close()
    assert Once.closed == 1
    stream.join(10)
    assert not stream.is_alive()


@pytest.mark.filterwarnings("error")
def test_an_unused_loop_closes_without_a_warning():
    Loop().close()


def test_a_loop_that_a_library_blocks_is_given_up(monkeypatch):
    monkeypatch.setattr(loop_module, "LIBRARIES", ("/",))  # as if swift and the environment were installed
    loop, begun, released = Loop(), threading.Event(), threading.Event()
    loop.call(lambda: (begun.set(), released.wait(10)))
    assert begun.wait(10)
    try:
        assert loop.give_up(0.0).startswith(threading.__file__)
    finally:
        released.set()


def test_an_abort_ends_trajectories_where_they_are(template, engine_of):
    engine = engine_of(of_envs({"endless": sleepy(100)}, "endless"))
    wanted = requests(template, 3)
    engine.between_steps = lambda: engine.abort(["p-0/1", "p-0/2"]) if time.monotonic() > begun + 0.5 else None
    begun = time.monotonic()
    for request in wanted:
        engine.submit(request)
    stream = engine.stream()
    ended = [next(stream), next(stream)]
    assert {(one.request_id, one.finish_reason) for one in ended} == {("p-0/1", "abort"), ("p-0/2", "abort")}
    engine.abort()
    assert [one.request_id for one in stream] == ["p-0/0"]
    assert Once.closed == 3
    assert not list(engine.engine.stream())


def test_an_abort_before_the_first_step_ends_every_request(template, engine_of):
    engine = engine_of(of_envs({"once": Once}, "once"))
    engine._loop = Loop()
    engine._loop.call(time.sleep, 0.2)  # all of what follows runs at once
    for request in requests(template, 3):
        engine.submit(request)
    engine.abort()
    ended = []
    stream = threading.Thread(target=lambda: ended.extend(engine.stream()), daemon=True)
    stream.start()
    stream.join(10)
    assert sorted((one.request_id, one.finish_reason) for one in ended) == [(f"p-0/{i}", "abort") for i in range(3)]


@pytest.mark.parametrize("when", ["while it is deleted", "after what is ready was taken"])
def test_the_last_sample_is_never_lost(template, engine_of, monkeypatch, when):
    """It ends while the stream looks whether anything is left."""

    class Slow(dict):
        def __delitem__(self, name):
            super().__delitem__(name)
            time.sleep(0.3)

    async def play(trajectory):
        await asyncio.sleep(0.2)

    engine = engine_of(play)
    if when == "while it is deleted":
        monkeypatch.setattr("swift.rollout.multi_turn.engine.LOOK_S", 0.01)
        engine._running = Slow()
    else:
        take = engine._come

        def come():
            yield from take()
            while engine._running:
                time.sleep(0.01)

        monkeypatch.setattr(engine, "_come", come)
    assert len(run(engine, requests(template, 1))) == 1
