"""Requests of an engine in this process that take too long: once more, then out of training, and counted."""

import asyncio
import time
from contextlib import nullcontext
from dataclasses import replace

from oracle import load
from scripted_engine import ScriptedEngine
from small_runs import OneRank, SlowScorer
from sources import nothing_left, on_a_loop, source_of

from swift.rollout.collector import RolloutCollector, launches_of
from swift.rollout.engines.transformers import TransformersEngine
from swift.rollout.round import EngineShare
from swift.rollout.runner import RoundRunner
from swift.rollout.scheduler import LaunchLog
from swift.types import Prompt, Request, SamplingParams, TrainerProgress


class Endless(ScriptedEngine):
    """Some requests never end by themselves, or only at their second try."""

    def __init__(self, endless=(), once=(), **kwargs):
        super().__init__(**kwargs)
        self.endless, self.once = set(endless), set(once)

    def submit(self, request):
        super().submit(request)
        if request.request_id in self.endless | self.once:
            self._outstanding[request.request_id].length = 1 << 30
        self.once.discard(request.request_id)

    def _step(self):
        ended = super()._step()
        self._aborting -= {completion.request_id for completion in ended}  # an id may come again
        return ended


def requests(count):
    return [Request(f"g/{i}", [1, 2, 3], SamplingParams(max_new_tokens=20, seed=i)) for i in range(count)]


def sampled(engine, wanted, limit_s=0.5, then=()):
    """What comes of requests, and of those of `then` that are asked for once one is done; and how many were late."""

    def ask(request):
        return asyncio.create_task(engine.generate(replace(request, limit_s=limit_s)))

    async def sample():
        first = [ask(request) for request in wanted]
        await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
        later = [ask(request) for request in then]
        done = await asyncio.gather(*first, *later)
        await engine.free()
        return {one.request_id: one for one in done}

    done = on_a_loop(sample)
    assert set(done) == {request.request_id for request in [*wanted, *then]}
    return done, engine.counters.late


def test_a_late_request_is_sampled_once_more_with_the_same_seed():
    done, late = sampled(Endless(once=["g/2"], step_s=0.01), requests(4))
    plain = {one.request_id: one.token_ids for one in ScriptedEngine().sample(requests(4))}
    assert ({name: one.token_ids for name, one in done.items()}, late) == (plain, 1)


def test_a_late_request_without_a_seed_of_its_own_is_not_sampled_again():
    inexact = [replace(one, sampling=replace(one.sampling, exact=False)) for one in requests(4)]
    done, late = sampled(Endless(once=["g/2"], step_s=0.01), inexact)
    assert ({name for name, one in done.items() if one.finish_reason == "error"}, late) == ({"g/2"}, 1)


def test_what_is_asked_for_later_is_bounded_as_well():
    later = Request("later/0", [1, 2, 3], SamplingParams(max_new_tokens=20, seed=9))
    done, late = sampled(Endless(endless=["later/0"], step_s=0.01), requests(1), then=[later])
    assert {name: one.finish_reason for name, one in done.items()} == {"g/0": "stop", "later/0": "error"}
    assert late == 2


def test_a_model_in_this_process_is_bounded_as_well(nano_folders):
    model = load(nano_folders["qwen2"])
    slow = model.register_forward_pre_hook(lambda *_: time.sleep(0.05))
    engine = TransformersEngine(model, eos_token_ids=[], max_rows=2)
    wanted = [Request(f"g/{i}", [5, 6], SamplingParams(max_new_tokens=200 if i == 1 else 2, seed=i)) for i in range(4)]
    done, late = sampled(engine, wanted, limit_s=1.0)
    slow.remove()
    assert {name: one.finish_reason for name, one in done.items()} == {
        "g/0": "length", "g/1": "error", "g/2": "length", "g/3": "length",
    }  # fmt: skip
    assert late == 2
    assert nothing_left(engine)


def test_the_limit_leaves_out_the_time_in_the_queue_of_the_engine(nano_folders):
    model = load(nano_folders["qwen2"])
    slow = model.register_forward_pre_hook(lambda *_: time.sleep(0.05))
    engine = TransformersEngine(model, eos_token_ids=[], max_rows=2)
    wanted = [Request(f"g/{i}", [5, 6], SamplingParams(max_new_tokens=12, seed=i)) for i in range(12)]
    done, late = sampled(engine, wanted, limit_s=2.0)  # six times 0.6 s
    slow.remove()
    assert ({one.finish_reason for one in done.values()}, late) == ({"length"}, 0)


def test_a_round_leaves_what_was_given_up_out_and_counts():
    moved, settings = [], {"num_generations": 4, "progress": TrainerProgress(0, 1, 0.0)}
    launches = launches_of([Prompt("p", [], [1, 2, 3])])
    engine = Endless(endless=[f"{launches[0].group_id}/1"], step_s=0.01)
    collector = RolloutCollector(
        source_of(engine),
        SamplingParams(20),
        7,
        str,
        SlowScorer(),
        OneRank(),
        EngineShare(),
        progress=lambda: moved.append(1),
        limit_s=0.5,
    )

    def run():
        current = collector.prepare(LaunchLog(launches=launches), **settings)
        RoundRunner(collector).sample(current)
        return collector.finish(current, timer=lambda _: nullcontext())

    ((group,), metrics) = (ended := run()).groups, ended.metrics
    assert group.scores.excluded == [None, "engine: error", None, None]
    assert (metrics["health/rollout_timeouts"], len(moved)) == (2, 4)
    engine.endless = set()
    assert "health/rollout_timeouts" not in run().metrics
