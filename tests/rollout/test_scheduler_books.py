"""Whatever fails, dawdles or teaches nothing: every launch is accounted for once, and bounds hold."""

import random
import tracemalloc

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scripted_engine import ScriptedEngine
from small_runs import NumberedPrompts, SlowScorer, SmallRun

from swift.rollout.replay import ReplayBuffer
from swift.rollout.saved_state import encode
from swift.rollout.scheduler import REROLL_QUEUE, RerollConfig, RolloutScheduler
from swift.types import Prompt

runs = st.fixed_dictionaries(
    {
        "depth": st.integers(0, 2),
        "interval": st.sampled_from([1, 1, 3]),
        "windows": st.sampled_from([1, 1, 2]),
        "iterations": st.sampled_from([1, 1, 2]),
        "groups": st.sampled_from([2, 4, 6]),
        "dynamic": st.sampled_from([None, 0, 1, 3]),
        "streaming": st.sampled_from([0, 0, 1, 2]),
        "in_flight": st.booleans(),
    }
)


def test_the_queue_of_failed_prompts_has_a_bound_and_holds_each_once():
    again = RerollConfig(start_step=1, max_groups=3)
    scheduler = RolloutScheduler(NumberedPrompts(), groups_per_batch=4, batches_per_epoch=None, reroll=again)
    failed = [Prompt(f"f{i}", [], [1]) for i in range(REROLL_QUEUE + 1)]
    for prompt in (*failed[:2], failed[0], *failed[2:]):
        scheduler.queue_reroll(prompt)
    assert scheduler.rerolls_waiting == REROLL_QUEUE, "the oldest made room for the last"
    assert [one.prompt_id for one in scheduler.begin_round(1).rerolls] == ["f1", "f2", "f3"]
    assert scheduler.rerolls_waiting == REROLL_QUEUE - 3


def play(config, *, equal_share, replay, reroll, seed, hurry):
    """A run of 8 steps with engine failures of single completions, equal groups and delays."""
    chance = random.Random(seed + hurry)
    config = {**config, "streaming": 0 if config["windows"] > 1 else config["streaming"]}
    spoiled = {f"p{i}-0/{i % 2}": "error" for i in range(50) if random.Random(seed * 7 + i).random() < 0.1}
    engine = ScriptedEngine(spoil=spoiled, order=lambda ended: chance.sample(ended, len(ended)))
    small = SmallRun(
        engine,
        scorer=SlowScorer(
            delay=lambda: 0.0 if hurry else chance.random() / 500,
            equal=lambda group: random.Random(seed * 31 + group.launch_index).random() < equal_share,
        ),
        replay=ReplayBuffer(4, max_age=5, seed=seed) if replay else None,
        reroll=RerollConfig(start_step=2, max_groups=2) if reroll else None,
        prompts=50,
        **config,
    )
    try:
        small.train(8, max_steps=8)
        return small, [(step.tokens, step.versions) for step in small.steps]
    finally:
        small.close()


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(runs, st.sampled_from([0.0, 0.4, 0.8, 1.0]), st.booleans(), st.booleans(), st.integers(0, 99))
def test_every_launch_is_accounted_for_once(config, equal_share, replay, reroll, seed):
    small, data = play(config, equal_share=equal_share, replay=replay, reroll=reroll, seed=seed, hurry=False)
    books = small.scheduler
    ahead = [group for one in small.pipeline._ahead if one.result for group in one.result.groups]
    seen = [group.launch_index for scored in small.rounds for group in scored.groups]
    waiting = [group.launch_index for group in books.carried] + [group.launch_index for group in ahead]
    assert len(seen) == len(set(seen)), "a group was used twice"
    assert not set(seen) & set(waiting)
    assert books.trained + books.dropped + books.excluded == len(seen)
    assert books.launched == len(seen) + len(books.carried) + books.in_flight
    if config["dynamic"] is not None:
        budget = config["groups"] * (1 + config["dynamic"])
        assert all(scored.metrics["dynamic_sample/launched"] <= budget for scored in small.rounds)
        assert len(books.carried) <= 2 * config["groups"]
    updates = config["windows"] * config["iterations"]
    bound = config["depth"] * updates + config["interval"] - 1 + updates - 1
    bound += 2 * updates * (config["dynamic"] is not None)  # carried groups wait
    bound += 5 * replay  # the buffer's own limit
    assert max(step.staleness["off_policy/max"] for step in small.steps) <= bound
    assert all(len(step.tokens) * config["windows"] == 2 * config["groups"] for step in small.steps)
    if not config["in_flight"]:  # whose versions within a completion are a matter of time
        _, again = play(config, equal_share=equal_share, replay=replay, reroll=reroll, seed=seed, hurry=True)
        assert again == data


def test_rounds_that_are_undone_leave_the_state_before_them_and_are_launched_again_alike():
    def scheduler():
        made = RolloutScheduler(
            NumberedPrompts(5), groups_per_batch=3, batches_per_epoch=None, reroll=RerollConfig(start_step=1)
        )
        made.queue_reroll(made.source.prompts[4])
        return made

    def launch(made, counts):
        log = made.begin_round(1)
        for count in counts:
            made.launch(log, count)
        return log

    books = scheduler()
    launch(books, [3])
    before = encode(books.state())
    logs = [launch(books, [2, 1, 4]), launch(books, []), launch(books, [7])]
    assert encode(books.state(logs)) == before
    again = scheduler()
    again.load(books.state(logs))
    redone = launch(again, [2, 1, 4])
    assert [(one.group_id, one.index) for one in redone.launches] == [
        (one.group_id, one.index) for one in logs[0].launches
    ]


def test_launching_costs_the_same_however_many_prompts_were_seen():
    books = RolloutScheduler(NumberedPrompts(50_000), groups_per_batch=50_000, batches_per_epoch=None)
    books.launch_batch(books.begin_round(1))
    books.groups_per_batch = 2
    tracemalloc.start()
    books.launch_batch(books.begin_round(2))
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 10_000, "a copy of all prompts ever seen"
