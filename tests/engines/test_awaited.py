"""An engine whose completions are awaited: failures reach those whom they concern, and nothing is left behind."""

import asyncio
import time

import pytest
from scripted_engine import ScriptedEngine
from sources import on_a_loop

from swift.errors import EngineDead, NumericError, RequestRefused, SyncFailed
from swift.rollout.engines.awaited import AwaitedEngine
from swift.types import Completion, Request, SamplingParams

LIMIT_S = 20.0


class Elsewhere(ScriptedEngine):
    """As of another process: it advances on a thread, and requests come beside that."""

    in_process = False

    def recover(self):
        return set(self._outstanding)


def ends(engine, names, *, patient=False):
    """What each request came to: "stop", or the error. names: of a request -> seconds after which it is made."""
    source = AwaitedEngine(engine, patient=patient)

    async def one(name, delay_s):
        await asyncio.sleep(delay_s)
        request = Request(name, [1, 2], SamplingParams(max_new_tokens=50, seed=6))
        try:
            return (await asyncio.wait_for(source.generate(request), LIMIT_S)).finish_reason
        except Exception as error:
            return error

    async def everyone():
        return dict(zip(names, await asyncio.gather(*(one(*item) for item in names.items())), strict=True))

    found = on_a_loop(everyone)
    assert not source._asked and not source._new
    return found


def test_an_engine_that_dies_while_requests_come_tells_each_of_them():
    class Dying(Elsewhere):
        dead = False

        def submit(self, request):
            self.dead = self.dead or request.request_id == "bad"
            if self.dead:
                raise EngineDead("engine: gone, as told")
            super().submit(request)

        def advance(self):
            time.sleep(0.15)
            if self.dead:
                raise EngineDead("engine: gone, as told")
            return super().advance()

    found = ends(Dying(step_s=0.05), {"a": 0, "b": 0, "bad": 0.2, "c": 0.25, "d": 0.3, "e": 0.4})
    assert all(isinstance(end, EngineDead) for end in found.values()), found


@pytest.mark.parametrize("kind", [RequestRefused, RuntimeError])
def test_what_an_engine_raises_for_a_request_ends_that_one_alone(kind):
    class Choosy(Elsewhere):
        def submit(self, request):
            if request.request_id == "bad":
                raise RequestRefused("bad", "request: bad: as told") if kind is RequestRefused else kind("as told")
            super().submit(request)

    found = ends(Choosy(step_s=0.02), {"a": 0, "bad": 0.1, "b": 0.1})
    assert isinstance(found.pop("bad"), kind)
    assert found == {"a": "stop", "b": "stop"}


def test_who_asks_while_a_failed_engine_is_emptied_is_answered():
    class Void(Elsewhere):
        fails = True

        def advance(self):
            if self.fails and len(self._outstanding) >= 2:
                self.fails = False
                time.sleep(0.2)
                raise SyncFailed("weights: void, as told")
            return super().advance()

    found = ends(Void(step_s=0.1), {"a": 0, "b": 0, "late": 0.25})
    assert isinstance(found["a"], SyncFailed) and isinstance(found["b"], SyncFailed)
    assert found["late"] == "stop"


def test_those_that_an_engine_keeps_over_a_failure_go_on_where_that_is_wanted():
    class Shaky(Elsewhere):
        fails = 1

        def advance(self):
            if self.fails and self._outstanding:
                self.fails -= 1
                raise NumericError("engine: one request was none, as told")
            return super().advance()

    assert ends(Shaky(), {"a": 0, "b": 0, "late": 0.3}, patient=True) == {"a": "stop", "b": "stop", "late": "stop"}
    assert {type(one) for one in ends(Shaky(), {"a": 0, "b": 0}).values()} == {NumericError}


@pytest.mark.parametrize("kind", [ScriptedEngine, Elsewhere])
def test_who_is_cancelled_comes_back_when_the_engine_has_let_go(kind):
    engine = kind(step_s=0.05)
    source = AwaitedEngine(engine)

    async def leave():
        request = Request("a", [1, 2], SamplingParams(max_new_tokens=50, seed=6))
        task = asyncio.create_task(source.generate(request))
        await asyncio.sleep(0.12)
        task.cancel()
        await asyncio.wait([task])
        assert not engine._outstanding
        again: Completion = await source.generate(request)
        await source.free()
        return again

    assert on_a_loop(leave).finish_reason == "stop"
