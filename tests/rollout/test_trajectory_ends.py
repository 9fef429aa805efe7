"""Environments that wait, fail, hang and end the run: what becomes of the samples of a rollout of several turns."""

import asyncio
import threading
import time
from dataclasses import replace

import numpy
import pytest
import torch
from small_runs import SmallRun
from sources import leave, outcomes, sampled
from trajectories import Once, requests, sleepy

from swift.errors import EngineError
from swift.rollout.round_result import fault
from swift.rollout.sources.multi_turn import loop as loop_module
from swift.rollout.sources.multi_turn.environments import of_envs
from swift.rollout.sources.multi_turn.loop import EnvironmentLoop
from swift.rollout.sources.multi_turn.trajectory import Excluded, OutOfRoom
from swift.types import Completion, Prompt


def test_an_environment_that_waits_holds_nobody_up(template, source_for):
    began = time.monotonic()
    assert len(sampled(source_for(of_envs({"slow": sleepy(0.3)}, "slow")), requests(template, 20))) == 20
    assert time.monotonic() - began < 3.0, "one after the other they take six seconds"


def asking(wait):
    """Two answers, with `wait` between them."""

    async def play(trajectory):
        await trajectory.answer()
        await wait()
        trajectory.add_messages({"role": "user", "content": "and?"})
        await trajectory.answer()

    return play


def on_a_thread(seconds):
    return lambda: asyncio.to_thread(time.sleep, seconds)


def test_what_a_thread_does_at_once_meets_the_engine_at_the_same_step(template, source_for):
    steps = set()
    for _ in range(5):
        source = source_for(asking(on_a_thread(0.0)))
        sampled(source, requests(template, 8))
        steps.add(source.engine.counters.decode_steps)
    assert len(steps) == 1


@pytest.mark.long
@pytest.mark.parametrize("wait", [on_a_thread, lambda seconds: lambda: asyncio.sleep(seconds)], ids=["sync", "async"])
def test_64_trajectories_with_a_slow_tool_take_hardly_longer(template, source_for, wait):
    wanted = requests(template, 64)
    sized = [replace(one.sampling, max_new_tokens=20 + 5 * number) for number, one in enumerate(wanted)]
    wanted = [replace(request, sampling=sampling) for request, sampling in zip(wanted, sized, strict=True)]

    def seconds(asked):
        source = source_for(asking(wait(asked)))
        began = time.monotonic()
        sampled(source, wanted)
        return time.monotonic() - began

    seconds(0.0)
    pairs = [(seconds(0.0), seconds(0.2)) for _ in range(5)]
    print(pairs)
    assert min(slow / fast for fast, slow in pairs) < 1.3  # a busy machine only makes it longer


async def raising(error):
    raise error


@pytest.mark.parametrize("error", [KeyError, SystemExit, TimeoutError])
def test_a_sample_whose_environment_fails_is_left_out_alone(template, source_for, error, caplog):
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
    source = source_for(of_envs({"shaky": Shaky}, "shaky"))
    assert [fault(one) for one in sampled(source, wanted)] == [None, f"environment: {error.__name__}"] * 2
    assert (source.late, Once.closed) == (0, 4)


REWARDS = [(1, None), (True, None), (None, None), (numpy.float32(0.5), None), (torch.tensor(2.0), None)]
NONE = [("1.0", "TypeError"), (b"1", "TypeError"), ({1.0}, "TypeError"), (numpy.ones(1), "TypeError")]
INFINITE = [(float("nan"), "ValueError"), (float("-inf"), "ValueError"), (10**400, "ValueError"), (1e39, "ValueError")]


@pytest.mark.parametrize(("value", "error"), REWARDS + NONE + INFINITE)
def test_the_reward_of_a_step_is_a_number_or_its_sample_is_left_out(template, source_for, value, error):
    class Giving(Once):
        async def step(self, messages):
            return "", value, True, {}

    [one] = sampled(source_for(of_envs({"giving": Giving}, "giving")), requests(template, 1))
    assert fault(one) == (error and f"environment: {error}")
    assert error or one.episode.rewards == [None if value is None else float(value)]


def test_an_environment_that_never_works_ends_the_run(template, source_for, caplog):
    class Broken(Once):
        async def step(self, messages):
            raise KeyError("the board")

    with pytest.raises(
        EngineError, match=r"--gym_env: mine: raised KeyError: 'the board' \(.*test_trajectory_ends.py:\d+\)"
    ):
        sampled(source_for(of_envs({"broken": Broken}, "broken")), requests(template, 40))
    assert len([line for line in caplog.messages if "KeyError" in line]) == 1


@pytest.mark.parametrize("late", [False, True])
def test_an_environment_that_never_works_ends_a_run_that_takes_no_more_than_its_samples(template, source_for, late):
    class Broken(Once):
        async def reset(self, request):
            if late:
                await asyncio.sleep(100)
            raise KeyError("the board")

    source = source_for(of_envs({"broken": Broken}, "broken"), limit_s=0.3 if late else 600.0)
    with pytest.raises(EngineError, match="the first 32 samples all failed"):
        for _ in range(4):
            sampled(source, requests(template, 8))


class OwnError(BaseException):
    """Of a plugin."""


@pytest.mark.parametrize("error", [KeyboardInterrupt, OwnError])
@pytest.mark.parametrize("where", ["reset", "step", "close"])
def test_whatever_an_environment_raises_the_others_go_on(template, source_for, error, where):
    class Rude(Once):
        pass

    async def rude(self, *arguments):
        raise error

    setattr(Rude, where, rude)
    source = source_for(of_envs({"rude": Rude, "fine": Once}, "fine"))
    wanted = [requests(template, 2, env_config={"name": name})[i] for i, name in enumerate(["rude", "fine"])]
    assert [fault(one) is None for one in sampled(source, wanted)] == [False, True]
    assert [fault(one) for one in sampled(source, wanted[1:])] == [None]


@pytest.mark.parametrize("worked", [False, True])
def test_a_step_that_blocks_the_loop_is_a_time_out_and_the_next_samples_get_another_loop(
    template, source_for, caplog, worked
):
    leave = threading.Event()

    class Blocking(Once):
        async def step(self, messages):
            if self.config["blocks"]:
                leave.wait(100)
            return await super().step(messages)

    source = source_for(of_envs({"blocking": Blocking}, "blocking"), limit_s=0.5)
    fine, blocked = (requests(template, 3, env_config={"blocks": blocks}) for blocks in (False, True))
    if worked:
        sampled(source, fine)
    began = time.monotonic()
    assert [fault(one) for one in sampled(source, blocked)] == ["environment: timeout"] * 3
    assert time.monotonic() - began < 20
    assert "test_trajectory_ends.py:" in caplog.text and "blocks the event loop for over" in caplog.text
    assert source.late == 3
    assert [fault(one) for one in sampled(source, fine)] == [None] * 3
    leave.set()
    assert [fault(one) for one in sampled(source, fine)] == [None] * 3
    assert source.late == 3


def full(trajectory):
    raise OutOfRoom


def left_out(trajectory):
    raise Excluded("for a reason")


@pytest.mark.parametrize("end", [full, left_out], ids=["full", "excluded"])
def test_a_trajectory_that_came_to_any_end_shows_that_the_environment_works(template, source_for, end):
    async def play(trajectory):
        if trajectory.request.request_id == "p-0/0":
            end(trajectory)
        await asyncio.sleep(0.01)
        raise KeyError("the board")

    assert [fault(one) for one in sampled(source_for(play), requests(template, 40))][1:] == [
        "environment: KeyError"
    ] * 39


@pytest.mark.parametrize("waits", ["for its environment", "for its turn"])
def test_a_trajectory_that_takes_too_long_is_left_out_and_counted(template, source_for, waits):
    class Long(Once):
        async def step(self, messages):
            if self.config["long"]:
                await asyncio.sleep(100)
            return await super().step(messages)

    source = source_for(of_envs({"long": Long}, "long"), limit_s=1.0)
    wanted = [requests(template, 2, env_config={"long": bool(i)})[i] for i in range(2)]
    if waits == "for its turn":
        wanted[1] = replace(wanted[1], sampling=replace(wanted[1].sampling, max_new_tokens=900))
        source.engine.before_step = lambda: time.sleep(0.005)
    assert [fault(one) for one in sampled(source, wanted)] == [None, "environment: timeout"]
    assert (source.late, Once.closed) == (1, 2)
    assert source.engine.counters.decode_rows < 900


def test_an_environment_that_is_always_late_ends_the_run(template, source_for):
    source = source_for(of_envs({"slow": sleepy(100)}, "slow"), limit_s=0.3)
    with pytest.raises(EngineError, match=r"--gym_env: mine: took over --rollout_timeout 0.3 s; the first 32"):
        sampled(source, requests(template, 32))


@pytest.mark.parametrize("message", [{"role": "assistant"}, {"content": "?"}, "no message"])
def test_whatever_an_environment_makes_of_its_messages_every_request_ends(template, source_for, message):
    async def play(trajectory):
        trajectory.messages.append(message)

    source = source_for(play)
    assert all(isinstance(one, Completion | AttributeError) for one in outcomes(source, requests(template, 2)))


def test_the_end_of_the_pipeline_closes_environments(template, source_for):
    source = source_for(of_envs({"endless": sleepy(100)}, "endless"))
    pipeline = SmallRun(source, depth=1).pipeline
    pipeline._runner.loop.begin(source.generate(requests(template, 1)[0]))
    while not Once.asleep:
        time.sleep(0.01)
    pipeline.close()
    assert Once.closed == 1
    assert pipeline._runner.loop._loop.is_closed()


@pytest.mark.filterwarnings("error")
def test_an_unused_loop_closes_without_a_warning():
    EnvironmentLoop().close()


def test_a_loop_that_a_library_blocks_is_given_up(monkeypatch):
    monkeypatch.setattr(loop_module, "LIBRARIES", ("/",))  # as if swift and the environment were installed
    loop, begun, released = EnvironmentLoop(), threading.Event(), threading.Event()
    loop.call(lambda: (begun.set(), released.wait(10)))
    assert begun.wait(10)
    try:
        assert loop.give_up(0.0).startswith(threading.__file__)
    finally:
        released.set()


def test_who_leaves_ends_trajectories_where_they_are(template, source_for):
    source = source_for(of_envs({"endless": sleepy(100), "fine": Once}, "endless"))

    leave(source, requests(template, 3), lambda: Once.asleep == 3)
    while Once.closed < 3:
        time.sleep(0.01)
    assert source.engine.advance() is None
    [one] = sampled(source, requests(template, 1, env_config={"name": "fine"}))
    assert fault(one) is None


def test_who_leaves_before_the_first_step_leaves_nothing_behind(template, source_for):
    source = source_for(of_envs({"once": Once}, "once"))
    source._environments = EnvironmentLoop()
    source._environments.call(time.sleep, 0.2)  # all of what follows runs at once

    leave(source, requests(template, 3), lambda: source._running)
    assert len(sampled(source, requests(template, 3))) == 3
    assert not source._tasks and not source._running
