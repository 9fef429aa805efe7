"""Training with rounds sampled ahead by a real engine with weights of its own: bit for bit, whatever anything takes."""

from __future__ import annotations

import random
import time

import msgspec
import pytest
import torch
from grpo_parts import Scorer, all_different, logs_of, make_trainer

from swift.observability.metrics import is_timing
from swift.rollout.engines.spec import EngineSpec, build_engine

pytestmark = pytest.mark.slow


@pytest.fixture
def train(nano_folders, tmp_path):
    """Makes trainers with an engine of their own, and ends them."""
    made = []

    def make(*, delays=None, name="run", **settings):
        folder = nano_folders["qwen2"]
        torch.manual_seed(0)
        engine = build_engine(EngineSpec(backend="transformers", model=str(folder)))
        scorer = Scorer(all_different)
        if delays is not None:
            delay(engine, delays, "stream", "submit", "begin_update")
            delay(scorer, delays, "submit")
        trainer = make_trainer(folder, tmp_path / name, engine=engine, scorer=scorer, max_steps=5, **settings)
        made.append((trainer, engine))
        return trainer

    yield make
    for trainer, engine in made:
        trainer.pipeline.close()
        engine.close()


def delay(target, chance, *names):
    """Calls of these methods take up to 20 ms longer; so does every completion of a stream."""
    for name in names:
        call = getattr(target, name)

        def slow(*arguments, call=call, **keywords):
            time.sleep(chance.choice([0, 0, 0.004, 0.02]))
            return call(*arguments, **keywords)

        def slow_stream(*arguments, call=call):
            for one in call(*arguments):
                time.sleep(chance.choice([0, 0.004]))
                yield one

        setattr(target, name, slow_stream if name == "stream" else slow)


def completions(trainer):
    return [
        (c.request_id, c.token_ids, c.logprobs, c.versions)
        for scored in trainer.rounds
        for group in scored.groups
        for c in group.completions
    ]


def rows(trainer):
    return [
        {name: value for name, value in row.items() if not is_timing(name) and name != "epoch"}
        for row in logs_of(trainer)
    ]


def assert_equal_runs(one, other):
    assert completions(one) == completions(other)
    for (name, ours), theirs in zip(one.model.named_parameters(), other.model.parameters(), strict=True):
        assert torch.equal(ours, theirs), name


SETTINGS = [
    pytest.param({"depth": 1}, id="one-ahead"),
    pytest.param({"depth": 2, "num_global_batches": 2, "interval": 3}, id="two-ahead"),
]


@pytest.mark.parametrize("settings", SETTINGS)
def test_random_delays_change_no_bit_of_samples_and_weights(train, settings):
    calm = train(**settings)
    start = {name: parameter.clone() for name, parameter in calm.model.named_parameters()}
    calm.train()
    assert not any(torch.equal(start[name], parameter) for name, parameter in calm.model.named_parameters())
    hectic = train(delays=random.Random(1), **settings)
    hectic.train()
    assert_equal_runs(hectic, calm)
    assert rows(hectic) == rows(calm)


def test_each_step_trains_on_the_weights_of_the_step_before(train):
    trainer = train(depth=1)
    trainer.train()
    assert [row["off_policy/max"] for row in logs_of(trainer)] == [0, 1, 1, 1, 1]
    gaps = [row["mismatch/logp_abs_diff_max"] for row in logs_of(trainer)]
    assert gaps[0] < 1e-5 < 1e-4 < min(gaps[1:]), "the first batch is fresh, the others are one step old"


def test_without_anything_ahead_an_engine_of_its_own_trains_like_the_model_itself(train, nano_folders, tmp_path):
    apart = train()
    apart.train()
    assert max(row["mismatch/logp_abs_diff_max"] for row in logs_of(apart)) < 1e-5
    torch.manual_seed(0)
    itself = make_trainer(nano_folders["qwen2"], tmp_path / "itself", max_steps=5)
    itself.train()
    assert [(name, ids) for name, ids, _, _ in completions(apart)] == [
        (name, ids) for name, ids, _, _ in completions(itself)
    ]


@pytest.mark.parametrize(
    ("settings", "at"), [({"depth": 1}, 2), ({"depth": 2, "num_global_batches": 2, "interval": 3}, 3)]
)
def test_a_run_that_is_killed_and_resumed_is_the_run_that_was_not(train, tmp_path, settings, at):
    straight = train(name="straight", save_strategy="steps", save_steps=at, **settings)
    straight.train()
    checkpoint = tmp_path / "straight" / f"checkpoint-{at}"
    state = msgspec.msgpack.decode((checkpoint / "pipeline_state.msgpack").read_bytes())[1]["pipeline"]
    assert state["ahead"], "the rounds on their way are in the checkpoint"
    resumed = train(name="resumed", delays=random.Random(3), save_strategy="steps", save_steps=at, **settings)
    resumed.load_pipeline_state(checkpoint)
    resumed.train(resume_from_checkpoint=str(checkpoint))
    again = completions(resumed)
    assert again == completions(straight)[-len(again) :]
    for (name, ours), theirs in zip(resumed.model.named_parameters(), straight.model.parameters(), strict=True):
        assert torch.equal(ours, theirs), name
    assert rows(resumed)[-(5 - at) :] == rows(straight)[at:]
