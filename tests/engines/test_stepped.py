"""An engine that decodes step by step: failures reach those whom they concern, and nothing is left behind."""

import asyncio
import time
from dataclasses import replace

import pytest
from scripted_engine import ScriptedEngine
from sources import nothing_left, on_a_loop

from swift.errors import EngineDead, RequestRefused, SyncFailed
from swift.rollout.loop import RolloutLoop
from swift.types import Completion, Request, SamplingParams

LIMIT_S = 20.0


def request(name):
    return Request(name, [1, 2], SamplingParams(max_new_tokens=50, seed=6))


def ends(engine, names):
    """What each request came to: "stop", or the error. names: of a request -> seconds after which it is made."""

    async def one(name, delay_s):
        await asyncio.sleep(delay_s)
        try:
            return (await asyncio.wait_for(engine.generate(request(name)), LIMIT_S)).finish_reason
        except Exception as error:
            return error

    async def everyone():
        return dict(zip(names, await asyncio.gather(*(one(*item) for item in names.items())), strict=True))

    found = on_a_loop(everyone)
    assert nothing_left(engine) and not engine._new and not engine._outstanding
    return found


def test_an_engine_that_dies_while_requests_come_tells_each_of_them():
    class Dying(ScriptedEngine):
        dead = False

        def submit(self, request):
            self.dead = self.dead or request.request_id == "bad"
            if self.dead:
                raise EngineDead("engine: gone, as told")
            super().submit(request)

        def advance(self):
            if self.dead:
                self._outstanding.clear()
                raise EngineDead("engine: gone, as told")
            return super().advance()

    found = ends(Dying(step_s=0.05), {"a": 0, "b": 0, "bad": 0.2, "c": 0.25, "d": 0.3, "e": 0.4})
    assert all(isinstance(end, EngineDead) for end in found.values()), found


@pytest.mark.parametrize("kind", [RequestRefused, RuntimeError])
def test_what_an_engine_raises_for_a_request_ends_that_one_alone(kind):
    class Choosy(ScriptedEngine):
        def submit(self, request):
            if request.request_id == "bad":
                raise RequestRefused("bad", "request: bad: as told") if kind is RequestRefused else kind("as told")
            super().submit(request)

    found = ends(Choosy(step_s=0.02), {"a": 0, "bad": 0.1, "b": 0.1})
    assert isinstance(found.pop("bad"), kind)
    assert found == {"a": "stop", "b": "stop"}


def test_who_asks_after_a_failed_step_is_answered():
    class Void(ScriptedEngine):
        fails = True

        def advance(self):
            if self.fails and len(self._outstanding) >= 2:
                self.fails = False
                raise SyncFailed("weights: void, as told")
            return super().advance()

    found = ends(Void(step_s=0.02), {"a": 0, "b": 0, "late": 0.1})
    assert isinstance(found["a"], SyncFailed) and isinstance(found["b"], SyncFailed)
    assert found["late"] == "stop"


def test_who_is_cancelled_comes_back_when_the_engine_has_let_go():
    engine = ScriptedEngine(step_s=0.05)

    async def leave():
        task = asyncio.create_task(engine.generate(request("a")))
        await asyncio.sleep(0.12)
        task.cancel()
        await asyncio.wait([task])
        assert not engine._outstanding
        again: Completion = await engine.generate(request("a"))
        await engine.free()
        return again

    assert on_a_loop(leave).finish_reason == "stop"


def test_what_is_aborted_before_it_was_submitted_has_no_tokens():
    engine = ScriptedEngine()

    async def abort():
        tasks = [asyncio.create_task(engine.generate(request(name))) for name in "ab"]
        await asyncio.sleep(0)
        engine.abort(["a"])
        return await asyncio.gather(*tasks)

    aborted, whole = on_a_loop(abort)
    assert (aborted.finish_reason, aborted.token_ids, whole.finish_reason) == ("abort", [], "stop")
    assert ("submit", "a", 0) not in engine.events


def test_an_abort_that_comes_too_late_does_not_end_a_later_request_with_that_id():
    class Beside(ScriptedEngine):
        def advance(self):
            if not self.counters.decode_steps:
                self.counters.decode_steps += 1
                self.abort(["a"])  # as another thread
            return super().advance()

    engine = Beside()
    assert [one.finish_reason for one in engine.sample([request("a")])] == ["abort"]
    assert [one.finish_reason for one in engine.sample([request("a")])] == ["stop"]


class Endless(ScriptedEngine):
    """No sample ends by itself."""

    def _step(self):
        for row in self._outstanding.values():
            row.length = 1 << 30
        return super()._step()


def test_an_abort_of_a_late_request_ends_it():
    class Beside(Endless):
        def abort_submitted(self, request_ids):
            super().abort_submitted(request_ids)
            self._pending["a"].withdrawn = True  # as by a caller at the same time

    engine = Beside(step_s=0.01)
    (done,) = engine.sample([replace(request("a"), limit_s=0.1)])
    assert (done.finish_reason, engine.counters.late) == ("abort", 0)
    assert [event for event in engine.events if event[0] == "submit"] == [("submit", "a", 0)]


def test_the_shortest_limit_does_not_stretch_the_others():
    engine = Endless(step_s=0.01)
    began = time.monotonic()
    done = list(engine.sample([replace(request("a"), limit_s=1e-6), replace(request("b"), limit_s=0.3)]))
    assert {one.finish_reason for one in done} == {"error"}
    assert time.monotonic() - began < 5


def test_who_leaves_a_held_engine_is_gone_when_it_goes_on():
    engine = ScriptedEngine()

    async def leave():
        engine.hold()
        task = asyncio.create_task(engine.generate(request("a")))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
        engine.release()
        await engine.free()
        return (await engine.generate(request("a"))).finish_reason

    assert on_a_loop(leave) == "stop"
    assert nothing_left(engine)


def test_a_loop_that_is_closed_leaves_no_task_and_the_engine_can_be_used_on_another():
    engine = ScriptedEngine(step_s=0.01)
    loop = RolloutLoop()

    async def begin():
        begun = asyncio.create_task(engine.generate(request("a")))
        await asyncio.sleep(0.03)
        return begun

    loop.run(begin())
    loop.close(1.0)
    assert engine._pumping is None
    assert [one.finish_reason for one in engine.sample([request("b")])] == ["stop"]


def test_a_caller_that_leaves_a_sample_leaves_nothing_and_may_be_interrupted():
    class Interrupted(ScriptedEngine):
        def _step(self):
            if self.counters.decode_steps == 2:
                self.counters.decode_steps += 1
                raise KeyboardInterrupt
            self.counters.decode_steps += 1
            return super()._step()

    engine = Interrupted()
    with pytest.raises(KeyboardInterrupt):
        list(engine.sample([request("a")]))
    assert nothing_left(engine) and not engine._outstanding
    assert [one.finish_reason for one in engine.sample([request("a")])] == ["stop"]
