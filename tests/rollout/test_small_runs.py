"""What holds for every kind of run: time changes nothing, a resume changes nothing, nor does the number of ranks.

The engine and the rewards are scripted; the policy depends on all that it was trained on.
"""

from __future__ import annotations

import random
import threading
import time

import pytest
from function_parts import wrap
from scripted_engine import ScriptedEngine, lost
from small_runs import SlowScorer, on_two_ranks

from swift.errors import EngineDead, EngineError, RewardError, SyncFailed
from swift.rollout.replay import ReplayBuffer
from swift.rollout.round import EngineShare
from swift.rollout.scheduler import RerollConfig

KINDS = {
    "plain": {},
    "ahead": {"depth": 1},
    "far ahead, seldom synced": {"depth": 2, "interval": 3},
    "several batches of a round": {"depth": 2, "windows": 2, "interval": 3},
    "iterations": {"depth": 1, "iterations": 2},
    "dynamic": {"dynamic": 3},
    "dynamic, ahead": {"dynamic": 3, "depth": 1},
    "dynamic, far ahead": {"dynamic": 3, "depth": 2},
    "parts": {"streaming": 1},
    "parts, ahead": {"streaming": 1, "depth": 1},
    "dynamic, parts": {"streaming": 1, "dynamic": 3},
    "dynamic, larger parts, ahead": {"streaming": 2, "dynamic": 3, "depth": 1},
    "replay": {"replay": 3},
    "replay, ahead": {"replay": 3, "depth": 1},
    "again": {"reroll": 2},
    "dynamic, again": {"dynamic": 3, "reroll": 2},
    "function": {"function": True},
    "dynamic, function, ahead": {"dynamic": 3, "depth": 1, "function": True},
}
STEPS = 7


def equal(group):
    return group.launch_index % 3 == 0


def settings_of(kind, **script):
    """Of a `SmallRun`, with an engine of that script."""
    made = {"groups": 4, "prompts": 50, **KINDS[kind]}
    if "replay" in made:
        made["replay"] = ReplayBuffer(made["replay"], max_age=4, seed=1)
    if "reroll" in made:
        made["reroll"] = RerollConfig(start_step=3, max_groups=made["reroll"])
    engine = ScriptedEngine(**script)
    made["engine"] = wrap(engine=engine) if made.pop("function", False) else engine
    return made


def train(run, until=STEPS, **options):
    return run.train(until, max_steps=STEPS, **options)


def story(run):
    """What the steps of a run were trained on and came to."""
    return [(s.step, s.tokens, s.versions, s.staleness, s.value) for s in run.steps]


def end(run):
    """What was made of its launches, and which weights its engine has."""
    books = run.scheduler
    return books.launched, books.trained, books.dropped, books.excluded, run.weight_sync.state_dict()


def launched(run):
    return [group.launch_index for scored in run.rounds for group in scored.groups]


def rounds(run):
    """The groups of its rounds, and what was replaced in them."""
    return [
        (scored.metrics.get("replay/groups"), [(g.group_id, [c.text for c in g.completions]) for g in scored.groups])
        for scored in run.rounds
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_delays_of_engine_rewards_and_training_change_no_bit(run, kind):
    calm = train(run(**settings_of(kind), equal=equal))
    chance = random.Random(kind)
    script = {"step_s": lambda: chance.choice([0, 0, 0.004]), "order": lambda ended: chance.sample(ended, len(ended))}
    made = run(**settings_of(kind, **script), equal=equal, delay=lambda: chance.choice([0, 0.01]))
    hectic = train(made, pause=lambda: chance.choice([0, 0.01]))
    assert (story(hectic), rounds(hectic), hectic.parts, end(hectic)) == (
        story(calm), rounds(calm), calm.parts, end(calm)
    )  # fmt: skip


@pytest.mark.parametrize("at", [1, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_a_killed_run_goes_on_as_if_nothing_had_happened(run, kind, at):
    straight = run(**settings_of(kind), equal=equal)
    if "interval" in KINDS[kind]:  # a run that goes on after a checkpoint syncs when a resumed one does
        train(straight, at).save()
    train(straight)
    first = train(run(**settings_of(kind), equal=equal), at)
    resumed = train(run(**settings_of(kind), equal=equal).load(first.save()))
    assert story(first) + story(resumed) == story(straight)
    assert first.parts + resumed.parts == straight.parts
    assert end(resumed) == end(straight)
    assert launched(first) + launched(resumed) == launched(straight)


def test_the_kinds_differ_and_each_does_what_it_is_named_for(run):
    runs = {kind: train(run(**settings_of(kind), equal=equal)) for kind in KINDS}
    for kind, made in runs.items():
        assert (made.scheduler.dropped > 0) == ("dynamic" in kind or "replay" in kind), kind
        assert any(parts for parts in made.parts) == ("parts" in kind), kind
        assert any(replayed for replayed, _ in rounds(made)) == ("replay" in kind), kind
        again = [group.group_id for scored in made.rounds for group in scored.groups if group.launch]
        assert bool(again) == ("again" in kind), kind
        assert max(step.staleness["off_policy/max"] for step in made.steps) >= KINDS[kind].get("depth", 0)
    for kind, same in (("function", "plain"), ("dynamic, function, ahead", "dynamic, ahead")):
        assert (story(runs[kind]), end(runs[kind])) == (story(runs[same]), end(runs[same]))


PLACES = {
    "an engine each": lambda rank: EngineShare(rank, 2),
    "one engine for both": lambda rank: EngineShare() if rank == 0 else None,
    "parts of one engine": lambda rank: EngineShare(reports=rank == 0, lockstep=True),
}


def placed(kind, place):
    """Settings of each rank."""

    def settings(rank):
        script = {"tensor_parallel_size": 2} if place == "parts of one engine" else {}
        made = settings_of(kind, **script)
        share = PLACES[place](rank)
        scorer = SlowScorer(equal=equal, delay=lambda: random.random() / 200)
        return {**made, "engine": made["engine"] if share else None, "share": share, "scorer": scorer}

    return settings


def possible(kind, place):
    """Engines in the trainer's process sample while nothing trains; parts of one cannot call a function each."""
    at_once = not {"depth", "streaming"} & set(KINDS[kind])
    return place == "one engine for both" or (at_once and (place == "an engine each" or "function" not in kind))


@pytest.mark.parametrize(("kind", "place"), [(k, p) for k in KINDS for p in PLACES if possible(k, p)])
def test_two_ranks_train_on_what_one_does(run, kind, place):
    alone = train(run(**settings_of(kind), equal=equal))

    def work(small):
        train(small)
        return story(small), small.parts, end(small), getattr(small.engine, "events", None)

    ends = on_two_ranks(placed(kind, place), work)
    for one in ends:
        assert not isinstance(one, Exception), one
        assert one[:3] == (story(alone), alone.parts, end(alone))
    if place == "parts of one engine":
        first, second = ([event for event in one[3] if event[0] == "submit"] for one in ends)
        assert first == second, "ranks that hold parts of one engine must ask it for the same"


def test_weights_change_in_flight_on_two_ranks_and_both_train_on_the_same_tokens():
    """Completions of 40 tokens at 5 ms each: several steps end while they are sampled."""

    def settings(rank):
        engine = ScriptedEngine(step_s=0.005)
        return {"engine": engine, "share": EngineShare(rank, 2), "depth": 2, "in_flight": True, "max_tokens": 40}

    first, second = on_two_ranks(settings, lambda small: story(small.train(6)))
    assert first == second and len(first) == 6
    assert any(len(spans) > 1 for step in first for spans in step[2]), "no completion saw two versions"


class TiedDown(Exception):
    """An error that no other process can make again."""

    def __init__(self):
        super().__init__("tied to this process")
        self.lock = threading.Lock()


def breaks_down(run):
    def decode(ids):
        if run.step >= 2:
            raise TiedDown
        return ""

    run.pipeline.collector.decode = decode


def cannot_pause(run):
    def pause():
        raise EngineDead("engine: scripted: does not answer")

    run.engine.pause = pause


BROKEN_REWARDS = RewardError("--reward_funcs: hash: failed on every sample")
FAILURES = {
    # the script of the engine of one rank, settings of both, or what happens to that rank: error, line, steps
    "the only engine dies": (0, {"fail_after": 9}, {"place": "one engine for both"}, None, EngineDead, "it died", 2),
    "one of two engines dies": (1, {"fail_after": 5}, {}, None, EngineDead, "it died, as it was told to", 2),
    "it dies at once": (1, {"fail_after": 0}, {}, None, EngineDead, "it died, as it was told to", 0),
    "it dies in dynamic sampling": (1, {"fail_after": 5}, {"dynamic": 3}, None, EngineDead, "it died", None),
    "something of ours breaks": (1, {}, {}, breaks_down, EngineError, "TiedDown: tied to this process", None),
    "rewards break": (0, {}, {"fail_at": "p6-0"}, None, RewardError, "failed on every sample", 3),
    "an update is lost twice": (
        1, {"update_failures": [None, None, ("begin", lost()), ("commit", lost())]}, {}, None,
        SyncFailed, "lost on the way, as told", 2,
    ),
    "an engine cannot be paused": (
        0, {"step_s": 0.05}, {"place": "one engine for both", "depth": 2, "in_flight": True}, cannot_pause,
        EngineDead, "does not answer", 1,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FAILURES)
def test_a_failure_on_one_rank_ends_both_soon_and_with_the_same_line(name):
    broken, script, settings, harm, error, line, steps = FAILURES[name]
    settings = {"depth": 1, "place": "an engine each", "fail_at": None, **settings}
    place, fail_at, runs = PLACES[settings.pop("place")], settings.pop("fail_at"), []

    def settings_of_rank(rank):
        share = place(rank)
        engine = ScriptedEngine(**(script if rank == broken else {})) if share else None
        scorer = SlowScorer(fail_at=fail_at, failure=BROKEN_REWARDS)
        return {"engine": engine, "share": share, "scorer": scorer, **settings}

    def work(small):
        runs.append(small)
        if harm is not None and small.ranks.rank == broken:
            harm(small)
        try:
            small.train(6)
        except (EngineError, RewardError) as failure:
            return type(failure), str(failure)
        raise AssertionError("it went well")

    began = time.monotonic()
    first, second = on_two_ranks(settings_of_rank, work)
    assert first == second and first[0] is error and line in first[1]
    assert time.monotonic() - began < 10
    assert not any(thread.is_alive() for small in runs if (thread := small.pipeline._runner.loop._thread))
    assert len(runs[0].steps) == len(runs[1].steps) and steps in (None, len(runs[0].steps))


def test_an_update_that_is_lost_on_one_rank_is_repeated_on_an_engine_made_anew():
    def settings(rank):
        failures = [None, None, ("send", lost())] if rank == 1 else []
        return {"engine": ScriptedEngine(update_failures=failures), "share": EngineShare(rank, 2), "depth": 1}

    healthy, repaired = on_two_ranks(settings, lambda small: (small.train(6), small.engine.events)[1])
    assert ("rebuild",) in repaired and ("rebuild",) not in healthy


@pytest.mark.parametrize("broken", ["engine", "rewards"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_run_that_has_failed_loses_no_launch_and_goes_on_from_its_checkpoint(run, kind, broken):
    if broken == "engine":
        failed = run(**settings_of(kind, fail_after=25), equal=equal)
    else:
        failed = run(**settings_of(kind), scorer=SlowScorer(equal=equal, fail_at="p13-0", failure=BROKEN_REWARDS))
    with pytest.raises((EngineDead, RewardError)):
        train(failed)
    assert 0 < failed.step < STEPS
    again = train(run(**settings_of(kind), equal=equal).load(failed.save()))
    books = again.scheduler
    carried = [group.launch_index for group in books.carried]
    assert sorted(launched(failed) + launched(again) + carried) == list(range(books.launched))
    assert books.in_flight == 0
    if "depth" not in KINDS[kind]:  # what was lost ahead is sampled again with newer weights
        straight = train(run(**settings_of(kind), equal=equal))
        assert story(failed) + story(again) == story(straight)
        assert end(again) == end(straight)
