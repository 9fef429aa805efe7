"""Rounds of dynamic sampling through the whole pipeline: scripted engine, scripted rewards, one rank and two."""

import pytest
from scripted_engine import ScriptedEngine

from swift.errors import EngineError
from swift.rollout.scheduler import RerollConfig


def equal_by(period, least=1):
    """Of every `period` groups the first `least` teach nothing, by launch index."""
    return lambda group: group.launch_index % period < least


SETTINGS = {"dynamic": 3, "groups": 4, "prompts": 50, "equal": equal_by(2)}


def used_groups(scored):
    return [group for i, group in enumerate(scored.groups) if scored.used[2 * i]]


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_every_window_is_full_of_groups_that_teach(run, depth):
    small = run(depth=depth).train(6, max_steps=6)
    for scored in small.rounds:
        groups = used_groups(scored)
        assert len(groups) == 4 and not any(group.launch_index % 2 == 0 for group in groups)
    books = small.scheduler
    assert books.launched == books.trained + books.dropped and not books.carried
    assert books.trained == 24


@pytest.mark.parametrize("depth", [0, 1])
def test_surplus_groups_are_carried_to_the_next_window_and_none_is_lost(run, depth):
    equal = lambda index: index % 20 < 10  # noqa: E731
    small = run(depth=depth, equal=lambda group: equal(group.launch_index)).train(12, max_steps=12)
    indexes = [[group.launch_index for group in used_groups(scored)] for scored in small.rounds]
    flat = [index for batch in indexes for index in batch]
    assert flat == sorted(flat) == [i for i in range(small.scheduler.launched) if not equal(i)]
    carried = [scored.metrics["dynamic_sample/carried_out"] for scored in small.rounds]
    assert max(carried) > 0 and carried[-1] == 0.0
    assert [scored.metrics["dynamic_sample/carried_in"] for scored in small.rounds[1:]] == carried[:-1]


def test_dropped_groups_are_logged_as_unused_and_counted(run):
    small = run().train(1)
    [scored] = small.rounds
    unused = [group.launch_index for i, group in enumerate(scored.groups) if not scored.used[2 * i]]
    assert unused == [0, 2, 4, 6]
    metrics = scored.metrics
    assert metrics["dynamic_sample/launched"] == 8 and metrics["dynamic_sample/zero_variance"] == 4
    assert metrics["frac_reward_zero_std"] == 0.5
    assert metrics["dynamic_sample/dropped_tokens"] == sum(
        len(one.token_ids) for group in scored.groups if group.launch_index in unused for one in group.completions
    )


def test_a_spent_budget_trains_what_there_is(run):
    small = run(equal=lambda group: True, dynamic=1).train(2)
    for scored in small.rounds:
        assert scored.metrics["dynamic_sample/budget_exhausted"] == 1.0
        assert scored.metrics["dynamic_sample/filled"] == 4.0
        assert scored.metrics["dynamic_sample/launched"] == 8.0
    assert small.scheduler.trained == 8 and small.scheduler.dropped == 8


@pytest.mark.parametrize("depth", [0, 1])
def test_samples_of_dropped_groups_count_towards_the_limit_of_excluded_ones(run, depth):
    spoil = {f"p{i}-{again}/{sample}": "error" for i in range(0, 50, 2) for again in range(9) for sample in range(2)}
    small = run(ScriptedEngine(spoil=spoil), equal=lambda group: False, depth=depth, max_excluded_frac=0.4)
    with pytest.raises(EngineError, match=r"--max_excluded_frac: 0.4: .*last 20 .*engine: error"):
        small.train(30, max_steps=30)
    assert small.scheduler.excluded >= 80 and len(small.rounds) == 20


def test_replacements_are_sampled_while_other_groups_decode(run):
    class Draining(ScriptedEngine):
        drained = 0

        def advance(self):
            ended = super().advance()
            self.drained += ended is None
            return ended

    engine = Draining(step_s=0.002)
    small = run(engine, equal=equal_by(4), groups=8).train(1)
    submitted = [event[1] for event in engine.events if event[0] == "submit"]
    steps = len(submitted)
    assert steps == 2 * small.scheduler.launched
    assert engine.drained < 1 + small.scheduler.dropped, "each replacement waited for the batch to drain"


def test_failed_prompts_are_tried_again_late_in_the_run_and_displaced_ones_come_next(run):
    equal = lambda group: group.launch_index == 1  # noqa: E731
    small = run(dynamic=None, equal=equal, reroll=RerollConfig(start_step=3)).train(4)
    prompts = [[group.prompt.prompt_id for group in scored.groups] for scored in small.rounds]
    assert prompts[:2] == [["p0", "p1", "p2", "p3"], ["p4", "p5", "p6", "p7"]]
    assert prompts[2] == ["p8", "p9", "p10", "p1"]
    assert prompts[3] == ["p11", "p12", "p13", "p14"]
    assert small.rounds[2].groups[3].group_id == "p1-1", "its samples have seeds of their own"
