"""Training on groups while others are sampled: what arrives, in which order, and what it leaves behind."""

import pytest
from scripted_engine import ScriptedEngine

from swift.rollout.replay import ReplayBuffer
from swift.types import TrainerProgress

SETTINGS = {"streaming": 1, "groups": 6, "prompts": 50, "equal": lambda group: group.launch_index % 5 == 1}


def groups_of(step):
    """The completions of each group of a step, in any order."""
    return sorted(tuple(map(tuple, step.tokens[i : i + 2])) for i in range(0, len(step.tokens), 2))


@pytest.mark.parametrize("dynamic", [None, 3])
@pytest.mark.parametrize("depth", [0, 1, 2])
def test_the_same_groups_are_trained_on_as_in_whole_rounds(run, depth, dynamic):
    whole = run(depth=depth, dynamic=dynamic, streaming=0).train(1)
    parts = run(depth=depth, dynamic=dynamic).train(1)
    assert groups_of(parts.steps[0]) == groups_of(whole.steps[0])
    assert parts.scheduler.launched >= parts.scheduler.trained + parts.scheduler.dropped


@pytest.mark.parametrize("size", [1, 2, 4])
def test_parts_have_the_size_asked_for_and_the_rest_comes_last(run, size):
    small = run(streaming=size).train(3)
    for parts in small.parts:
        assert all(len(part) == 2 * size for part in parts[:-1])
        assert [number for part in parts for number in part] == [i // 2 for i in range(12)]
    informative = [sum(g.launch_index % 5 != 1 for g in scored.groups) for scored in small.rounds]
    assert [len(parts) - 1 for parts in small.parts] == [count // size for count in informative]


def test_training_begins_before_sampling_has_ended(run):
    engine = ScriptedEngine(step_s=0.01)
    small = run(engine)
    delivered = []
    batch = next(small.pipeline.steps(lambda: TrainerProgress(0, 10, 0.0)))
    for _ in batch.arriving:
        delivered.append(engine.delivered)
    assert delivered[0] < 12 and delivered[-1] == 12


def test_replayed_groups_come_with_the_last_part(run):
    small = run(replay=ReplayBuffer(8, max_age=9, seed=1)).train(3)
    assert small.rounds[1].metrics["replay/groups"] == 2.0
    used = [group for group in groups_of(small.steps[1]) if group in groups_of(small.steps[0])]
    assert len(used) == 2
