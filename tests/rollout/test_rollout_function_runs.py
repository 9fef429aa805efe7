"""Whole runs in which a function of the user makes the completions: dynamic sampling, resume, two ranks.

A function that passes on what its engine samples must train what the engine alone would.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from scripted_engine import VOCABULARY, ScriptedEngine
from small_runs import SlowScorer, data, on_two_ranks

from swift.errors import EngineError
from swift.rollout.rollout_function import RolloutFunctionEngine
from swift.rollout.round import EngineShare

TOKENIZER = SimpleNamespace(decode=lambda ids, **_: str(ids))


def equal(group):
    return group.launch_index % 3 == 0


SETTINGS = {"groups": 4, "prompts": 50, "equal": equal}


def passing(prompts, rollout):
    done = rollout.generate(rollout.repeated_prompt_ids)
    return {"completion_ids": [one.token_ids for one in done], "logprobs": [one.logprobs for one in done]}


def wrap(function=passing):
    return RolloutFunctionEngine(
        ScriptedEngine(), function, name="mine", args=None, tokenizer=TOKENIZER, end_token_ids=(1,),
        vocab_size=VOCABULARY, limit_s=30.0,
    )  # fmt: skip


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("dynamic", [None, 3])
@pytest.mark.parametrize("at", [1, 3])
def test_a_function_that_passes_everything_on_trains_what_the_engine_would_also_after_a_resume(run, at, dynamic, depth):
    settings = {"dynamic": dynamic, "depth": depth}
    plain = run(ScriptedEngine(), **settings).train(6, max_steps=6)
    first = run(wrap(), **settings).train(at, max_steps=6)
    second = run(wrap(), **settings).load(first.save()).train(6, max_steps=6)
    assert data(first) + data(second) == data(plain)
    assert second.scheduler.dropped == plain.scheduler.dropped
    assert (plain.scheduler.dropped > 0) == (dynamic is not None)


def test_groups_that_are_replaced_come_in_calls_of_their_own(run):
    calls = []

    def noting(prompts, rollout):
        calls.append(len(rollout.prompt_ids))
        return passing(prompts, rollout)

    small = run(wrap(noting), dynamic=3).train(1, max_steps=1)
    assert calls[0] == 4, "the last batch of a run launches no surplus"
    assert len(calls) > 1
    assert sum(calls) == small.scheduler.launched


def test_columns_of_completions_survive_a_checkpoint(run):
    def with_column(prompts, rollout):
        return {**passing(prompts, rollout), "tries": list(range(len(rollout.repeated_prompt_ids)))}

    first = run(wrap(with_column), depth=1).train(1, max_steps=3)
    second = run(wrap(with_column), depth=1).load(first.save()).train(3, max_steps=3)
    tries = [[one.columns["tries"] for group in scored.groups for one in group.completions] for scored in second.rounds]
    assert tries == [list(range(8))] * 2


def test_two_ranks_with_a_function_each_train_on_what_one_does(run):
    alone = run(wrap(), dynamic=3).train(4, max_steps=4)

    def settings(rank):
        own = {"engine": wrap(), "share": EngineShare(rank, 2), "scorer": SlowScorer(equal=equal)}
        return {**own, "dynamic": 3, "groups": 4, "prompts": 50}

    assert on_two_ranks(settings, lambda small: data(small.train(4, max_steps=4))) == [data(alone)] * 2


def test_a_function_that_fails_on_a_replacement_ends_the_run_with_its_line(run):
    calls = []

    def fails_later(prompts, rollout):
        calls.append(prompts)
        if len(calls) > 1:
            raise ValueError("no more")
        return passing(prompts, rollout)

    with pytest.raises(EngineError, match=r"mine: test_rollout_function_runs.py:\d+: raised ValueError"):
        run(wrap(fails_later), dynamic=3).train(3)
