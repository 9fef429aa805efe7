"""Rounds sampled ahead: which weights they see, that time decides nothing, that no prompt is lost or trained twice."""

import random
import time

import pytest
from scripted_engine import ScriptedEngine, lost
from small_runs import SlowScorer

from swift.errors import RewardError, SyncFailed
from swift.types import TrainerProgress


def versions(step):
    """The versions of all tokens of a step."""
    return {version for spans in step.versions for version, _, _ in spans}


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_a_round_uses_the_weights_of_as_many_steps_before_as_rounds_are_sampled_ahead(run, depth):
    made = run(depth=depth).train(6)
    assert [versions(step) for step in made.steps] == [{max(0, step - depth)} for step in range(6)]
    assert [step.staleness["off_policy/max"] for step in made.steps] == [min(step, depth) for step in range(6)]
    assert made.synced == [1, 2, 3, 4, 5]


def test_an_interval_of_five_syncs_after_steps_5_10_and_15_whatever_a_batch_feeds(run):
    for windows, iterations in [(1, 1), (2, 1), (1, 2)]:
        made = run(interval=5, windows=windows, iterations=iterations).train(17)
        assert made.synced == [5, 10, 15]
        assert made.weight_sync.version == 3


def test_ahead_of_training_weights_change_at_the_start_of_a_batch(run):
    made = run(depth=1, interval=5, windows=2).train(20)
    assert made.synced == [6, 12, 18]


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_nothing_is_sampled_that_nobody_will_train_on(run, depth):
    made = run(depth=depth, windows=2)
    made.train(7, max_steps=7)
    assert made.scheduler.rounds == 4
    assert made.scheduler.in_flight == 0


@pytest.mark.slow
def test_one_round_ahead_hides_nearly_all_that_can_be_hidden(run):
    # everything takes time but no computing
    chance = random.Random(5)

    def seconds(depth, *, sampling=True, training=True):
        chance.seed(5)
        engine = ScriptedEngine(step_s=0.012 if sampling else 0.0)  # long-tailed: 4 or 13 steps a round
        scorer = SlowScorer(lambda: chance.uniform(0, 0.05) if sampling else 0.0)
        made = run(engine, depth=depth, groups=4, scorer=scorer)
        pause = (lambda: 0.12) if training else (lambda: 0.0)
        made.train(2, pause=pause)
        began = time.monotonic()
        made.train(8, pause=pause)
        return time.monotonic() - began

    def efficiency():
        alone = max(seconds(0, training=False), seconds(0, sampling=False))
        one_by_one, ahead = seconds(0), seconds(1)
        return (one_by_one - ahead) / (one_by_one - alone)

    assert any(efficiency() > 0.85 for _ in range(3)), "measured again where others disturb"


def test_a_checkpoint_holds_the_rounds_on_their_way_and_a_resume_samples_none_of_them_again(run):
    straight = run(ScriptedEngine(step_s=0.01), depth=2).train(2)
    state = straight.save()["pipeline"]
    assert [len(one.groups) for one in state.ahead] == [2, 2]
    resumed = run(depth=2).load({"pipeline": state, "value": straight.value, "step": 2}).train(4)
    again = {event[1].rpartition("/")[0] for event in resumed.engine.events if event[0] == "submit"}
    ahead = [group.completions[0].request_id for one in state.ahead for group in one.groups]
    saved = {request_id.rpartition("/")[0] for request_id in ahead}
    assert not again & saved


def test_the_depth_may_change_between_two_attempts(run):
    state = run(depth=2).train(3).save()
    made = run(depth=0).load(state).train(8)
    launched = [group.launch_index for scored in made.rounds for group in scored.groups]
    assert launched == list(range(6, 16))


def test_evaluation_waits_for_rounds_on_their_way_and_leaves_them_as_they_are(run):
    plain = run(depth=2).train(6)
    made = run(ScriptedEngine(step_s=0.003), depth=2).train(3)
    metrics = made.pipeline.evaluate(made.scheduler.source.prompts[:3], TrainerProgress(made.step, 10, 0.0))
    assert metrics["completions/mean_length"] > 0
    made.train(6)
    assert [s.tokens for s in made.steps] == [s.tokens for s in plain.steps]


def test_in_front_of_a_broken_round_a_checkpoint_is_still_made_and_evaluation_goes_well(run):
    broken = RewardError("--reward_funcs: hash: failed on every sample")
    failing = run(depth=2, scorer=SlowScorer(fail_at="p1-1", failure=broken)).train(3)
    state = failing.save()
    assert len(state["pipeline"].ahead) == 1, "the whole round is kept, the broken one left out"
    assert failing.pipeline.evaluate(failing.scheduler.source.prompts[2:5], TrainerProgress(failing.step, 10, 0.0))
    with pytest.raises(RewardError):
        failing.train(9)
    assert failing.step == 4
    healed = run(depth=2).load(state).train(9)
    launched = [g.launch_index for r in [*failing.rounds[:3], *healed.rounds] for g in r.groups]
    assert launched == list(range(18))


def test_weights_that_do_not_arrive_stop_the_run_with_the_batch_still_to_train(run):
    engine = ScriptedEngine(update_failures=[None, None, ("commit", lost()), ("commit", lost())])
    made = run(engine, depth=1).train(2)
    with pytest.raises(SyncFailed):
        made.train(3)
    state = made.save()["pipeline"]
    assert state.batch is not None and state.batch.position == 0
    healed = run(depth=1).load({"pipeline": state, "value": made.value, "step": 2}).train(5)
    launched = [g.launch_index for r in [*made.rounds, *healed.rounds] for g in r.groups]
    assert launched == list(range(10))


@pytest.mark.parametrize("reason", ["error", "abort"])
@pytest.mark.parametrize("depth", [0, 1])
def test_what_the_engine_gave_up_is_left_out_with_its_reason(run, depth, reason):
    plain = run(depth=depth, groups=2).train(1)
    made = run(ScriptedEngine(spoil={"p0-0/1": reason, "p1-0/0": reason, "p1-0/1": reason}), depth=depth).train(2)
    scored = made.rounds[0]
    assert [one.scores.excluded for one in scored.groups] == [[None, f"engine: {reason}"], [f"engine: {reason}"] * 2]
    assert scored.rewards[1:] == [None] * 3 and scored.advantages[1:] == [None] * 3
    assert scored.rewards[0] == plain.rounds[0].rewards[0]
    assert scored.advantages[0] == 0.0, "a group of one has nothing to compare with"
    assert scored.metrics["health/excluded_samples"] == scored.metrics[f"health/excluded/engine/{reason}"] == 3.0
    assert scored.metrics["completions/excluded_ratio"] == 0.75
    assert made.steps[0].books[1:] == (1, 1), "a group without any sample to train on is excluded"
    assert made.steps[0].staleness == {"off_policy/mean": 0.0, "off_policy/max": 0.0}


def test_ages_count_each_trained_token_with_the_version_that_sampled_it(run):
    made = run(depth=1).train(4)
    batch, step_of = made.pipeline.batch, made.weight_sync.step_of
    batch.position = 0
    for sample in batch.samples:
        sample.versions = [(1, 0, 1), (3, 1, 4)]
    assert (step_of(1), step_of(3)) == (1, 3)
    assert made.pipeline.staleness(5) == {"off_policy/mean": (4 + 3 * 2) / 4, "off_policy/max": 4.0}
    batch.samples[0].versions, batch.samples[0].trained = [], batch.samples[0].trained[:0]
    batch.samples[1].versions, batch.samples[1].trained = [(0, 0, 3)], batch.samples[1].trained & False
    assert made.pipeline.staleness(5)["off_policy/max"] == 4.0, "no age without tokens, or where nobody trains on them"


def test_with_in_flight_updates_completions_carry_every_version_that_sampled_them(run):
    engine = ScriptedEngine(step_s=0.02)
    made = run(engine, depth=2, in_flight=True)
    made.train(8)
    mixed = [spans for step in made.steps for spans in step.versions if len(spans) > 1]
    assert mixed, "no update fell into a completion"
    for spans in mixed:
        assert [start for _, start, _ in spans[1:]] == [end for _, _, end in spans[:-1]] and spans[0][1] == 0
        numbers = [version for version, _, _ in spans]
        assert numbers == sorted(set(numbers))
    events = [event[0] for event in engine.events if event[0] in ("pause", "update", "resume")]
    held = [events[i + 1 : i + 3] for i, name in enumerate(events) if name == "pause"]
    assert held and all(pair == ["update", "resume"] for pair in held)
