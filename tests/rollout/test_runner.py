"""Rounds in the background: they come back whole or with their failure, and the thread always ends."""

import threading
import time

import pytest
from scripted_engine import ScriptedEngine
from small_runs import NumberedPrompts, OneRank, SlowScorer
from sources import source_of

from swift.errors import EngineDead, EngineError, PromptTooLong, RewardError
from swift.rollout import runner
from swift.rollout.collector import RolloutCollector
from swift.rollout.round import EngineShare
from swift.rollout.runner import RoundRunner
from swift.rollout.scheduler import LaunchLog, RolloutScheduler
from swift.rollout.weights.base import WeightStream
from swift.types import SamplingParams, TrainerProgress

LIMIT_S = 20
"""Nothing here takes a tenth of it."""


@pytest.fixture
def sampled():
    """Makes a thread on an engine, and ends both."""
    made = []

    def make(engine, scorer=None, **settings):
        scorer = scorer or SlowScorer()
        collector = RolloutCollector(source_of(engine), SamplingParams(16), 7, str, scorer, OneRank(), EngineShare())
        thread = RoundRunner(collector, threaded=True, **settings)
        scheduler = RolloutScheduler(NumberedPrompts(), groups_per_batch=2, batches_per_epoch=None)

        def ask():
            log = scheduler.begin_round(1)
            scheduler.launch_batch(log)
            current = collector.prepare(log, num_generations=2, progress=TrainerProgress(0, 9, 0.0))
            thread.start(current)
            return current

        made.append((thread, engine, scorer))
        return thread, ask

    yield make
    for thread, engine, scorer in made:
        engine.close()
        thread.close()
        scorer.pool.shutdown()
        assert not thread.loop._thread or not thread.loop._thread.is_alive()


def in_time(work, *arguments):
    """The call's result; fails when it does not return."""
    done = []
    runner = threading.Thread(target=lambda: done.append(work(*arguments)), daemon=True)
    runner.start()
    runner.join(LIMIT_S)
    assert done, f"{work} does not return"
    return done[0]


@pytest.mark.parametrize("overlap", [False, True])
def test_rounds_come_back_whole_and_every_request_is_made_once(sampled, overlap):
    engine = ScriptedEngine(step_s=0.005)
    thread, ask = sampled(engine, overlap=overlap)
    rounds = [ask() for _ in range(3)]
    for current in rounds:
        in_time(thread.wait, current)
        assert current.complete and current.failure is None
        assert all(len(part) == 2 for part in current.parts.values())
    names = [one.request_id for current in rounds for part in current.parts.values() for one in part.values()]
    assert sorted(event[1] for event in engine.events if event[0] == "submit") == sorted(names)
    assert len(engine.events) == len(set(names)) == 12, "nothing is asked for twice, or dropped"


def test_rounds_share_no_batch_of_the_engine_unless_they_may(sampled):
    def most_together(overlap):
        engine, together = ScriptedEngine(), []
        engine.step_s = lambda: together.append(len(engine._outstanding)) or 0.01
        thread, ask = sampled(engine, overlap=overlap)
        for _ in range(3):
            ask()
        in_time(thread.drain)
        return max(together)

    assert most_together(overlap=False) == 4
    assert most_together(overlap=True) > 4


def test_the_engine_is_free_when_the_last_round_has_been_waited_for(sampled):
    # the last completion is out before the last step: whoever goes on then shares the engine with the thread
    engine = ScriptedEngine()
    advance = engine.advance

    def slow_to_end():
        ended = advance()
        if ended is None:
            time.sleep(0.2)
            with engine._alone("advance"):
                engine.events.append(("ended",))
        return ended

    engine.advance = slow_to_end
    thread, ask = sampled(engine)
    for number in range(3):
        in_time(thread.wait, ask())
        assert sum(event == ("ended",) for event in engine.events) == number + 1
        engine.update(WeightStream([], [], number))
    assert engine.overlaps == []


def test_an_error_of_the_engine_reaches_every_round_and_every_later_one(sampled):
    thread, ask = sampled(ScriptedEngine(fail_after=3, step_s=0.01))
    rounds = [ask(), ask()]
    in_time(thread.wait, rounds[0])
    for current in [*rounds, ask()]:
        in_time(thread.wait, current)
        assert isinstance(current.failure, EngineDead)
    assert thread.collector.engine.delivered == 3, "what came later depends on when the failure was noticed"


def test_a_reward_pipeline_that_refuses_a_group_leaves_the_engine_empty(sampled):
    class Refusing(SlowScorer):
        def submit_group(self, group, progress):
            raise RewardError("--reward_funcs: gone: the workers cannot be started")

    engine = ScriptedEngine()
    thread, ask = sampled(engine, Refusing())
    current = ask()
    in_time(thread.wait, current)
    assert isinstance(current.failure, RewardError)
    assert not engine._outstanding, "evaluation would get what is left of the round"
    assert engine.overlaps == []


@pytest.mark.parametrize("overlap", [False, True])
def test_a_round_that_fails_leaves_the_engine_empty_and_ends_the_later_ones(sampled, overlap):
    engine = ScriptedEngine(step_s=0.02)
    thread, ask = sampled(engine, overlap=overlap)
    thread.collector.decode = lambda ids: 1 / 0
    failed = ask()
    in_time(thread.wait, failed)
    assert isinstance(failed.failure, ZeroDivisionError)
    assert not engine._outstanding
    engine.update(WeightStream([], [], 1))
    thread.collector.decode = str
    assert isinstance(ask().failure, ZeroDivisionError)


def test_a_prompt_without_room_fails_its_round_before_anything_is_sampled(sampled):
    engine = ScriptedEngine(max_model_len=4)
    thread, ask = sampled(engine)
    current = ask()  # prompts of 3 and 4 tokens
    in_time(thread.wait, current)
    assert isinstance(current.failure, PromptTooLong)
    assert engine.events == []


def test_two_threads_are_never_in_the_engine_while_it_is_held(sampled):
    engine = ScriptedEngine(step_s=0.003)
    thread, ask = sampled(engine)
    in_time(thread.hold)  # an idle one can be held as well
    engine.resume()
    thread.release()
    current = ask()
    for version in range(1, 4):
        time.sleep(0.01)
        in_time(thread.hold)
        engine.update(WeightStream([], [], version))
        time.sleep(0.01)
        engine.resume()
        thread.release()
    in_time(thread.wait, current)
    assert current.complete
    assert engine.overlaps == []


def test_holding_does_not_wait_for_a_completion(sampled):
    engine = ScriptedEngine(step_s=0.05)
    thread, ask = sampled(engine)
    current = ask()
    time.sleep(0.01)
    began = time.monotonic()
    in_time(thread.hold)
    assert time.monotonic() - began < 0.5
    held_at = len(engine.events)
    assert not current.complete
    time.sleep(0.1)
    assert len(engine.events) == held_at, "the thread goes on although the engine is held"
    engine.resume()
    thread.release()
    in_time(thread.drain)


def test_closing_ends_the_thread_in_the_middle_of_a_round(sampled):
    engine = ScriptedEngine(stuck="abort")
    thread, ask = sampled(engine)
    current = ask()
    time.sleep(0.05)
    began = time.monotonic()
    thread.close()
    assert time.monotonic() - began < 2
    assert not thread.loop._thread.is_alive()
    in_time(thread.wait, current)
    assert isinstance(current.failure, EngineError)


def test_closing_does_not_wait_for_ever_for_an_engine_that_does_not_listen(sampled, monkeypatch):
    monkeypatch.setattr(runner, "CLOSE_S", 0.5)
    engine = ScriptedEngine(stuck="close")
    thread, ask = sampled(engine)
    ask()
    time.sleep(0.05)
    began = time.monotonic()
    thread.close()
    assert time.monotonic() - began < 2
    assert thread.loop._thread.is_alive(), "the script is wrong"
    engine.close()  # as its owner does right after
    thread.loop._thread.join(2)
    assert not thread.loop._thread.is_alive()


def test_a_rank_without_an_engine_waits_for_nothing(sampled):
    thread = RoundRunner(RolloutCollector(None, SamplingParams(4), 7, str, SlowScorer(), OneRank()), threaded=True)
    current = thread.collector.prepare(LaunchLog(), num_generations=2, progress=TrainerProgress(0, 9, 0.0))
    thread.start(current)
    in_time(thread.wait, current)
    in_time(thread.hold)
    thread.release()
    thread.close()
    assert thread.loop._thread is None
