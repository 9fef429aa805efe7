"""Typed values, windows, phases, and a state that resumes to the same bits."""

import math
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from timings import is_timing

from swift.observability.metrics import MetricStore, kind_of
from swift.rollout.saved_state import decode, encode
from swift.trainers.grpo.callbacks import PipelineCallback
from swift.trainers.grpo.metrics import StepMetrics, held_up


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def without_time(values):
    return {name: value for name, value in values.items() if not is_timing(name)}


def test_values_are_folded_by_their_type():
    store = MetricStore()
    for value in (1.0, 5.0):
        store.add("a", value)
        store.add("b", value, kind="max")
        store.add("c", value, kind="min")
        store.add("d", value, kind="sum")
    assert without_time(store.commit()) == {"a": 3.0, "b": 5.0, "c": 1.0, "d": 6.0}


def test_a_window_averages_means_over_the_steps_that_had_them():
    store = MetricStore()
    store.add_many({"reward": 1.0, "loss": 2.0, "health/failed": 1.0})
    store.commit()
    store.add_many({"loss": 4.0, "health/failed": 2.0})
    store.commit()
    assert without_time(store.flush()) == {"reward": 1.0, "loss": 3.0, "health/failed": 3.0}
    assert store.flush() == {}


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("loss", "mean"),
        ("completions/max_length", "max"),
        ("completions/min_length", "min"),
        ("mismatch/logp_abs_diff_max", "max"),
        ("health/reward_failed/accuracy", "sum"),
        ("rewards/max_style/mean", "mean"),
    ],
)
def test_a_name_tells_its_type(name, kind):
    assert kind_of(name) == kind


def test_a_name_has_one_type():
    store = MetricStore()
    store.add("a", 1.0, kind="sum")
    with pytest.raises(ValueError, match="a: is a sum and cannot be a max too"):
        store.add("a", 1.0, kind="max")


def test_a_value_that_is_not_a_number_stays_visible():
    store = MetricStore()
    store.add("a", math.nan, kind="max")
    store.add("a", 1.0, kind="max")
    assert math.isnan(store.commit()["a"])


def test_phases_and_step_time_and_speed():
    clock = Clock()
    store = MetricStore(clock)
    with store.timer("generate"):
        clock.now += 2.0
    with store.timer("train"):
        clock.now += 1.0
    clock.now += 0.5
    store.add("tokens/trained", 700.0)
    values = store.commit()
    assert values == {"tokens/trained": 700.0, "step_time": 3.5, "time/generate": 2.0, "time/train": 1.0}
    assert store.flush()["tokens_per_s"] == 200.0


def test_what_evaluation_generates_is_time_of_evaluation_and_no_part_of_a_step():
    clock = Clock()
    store = MetricStore(clock)
    with store.timer("eval"), store.timer("generate"):
        clock.now += 9.0
    clock.now += 1.0
    assert store.commit() == {"step_time": 1.0, "time/eval": 9.0}


def test_training_waits_for_rollouts_as_a_share_of_all_steps():
    clock = Clock()
    store = MetricStore(clock)
    pipeline = SimpleNamespace(
        overlaps=True, idle_s=lambda: 0.5, staleness=lambda step: {}, engine_health=dict, step_done=lambda step: None
    )
    trainer = SimpleNamespace(
        metrics=store,
        pipeline=pipeline,
        report=None,
        collectives=SimpleNamespace(is_main=True, any=lambda asked: asked),
    )
    callback = PipelineCallback(trainer, epoch=lambda: 0.0)
    for step in range(1, 5):
        with store.timer("generate" if step == 1 else "train"):
            clock.now += 3.0
        clock.now += 1.0 if step == 1 else -2.0
        callback.on_step_end(None, SimpleNamespace(global_step=step, max_steps=9), SimpleNamespace(should_log=False,
                             should_save=False))  # fmt: skip
    logs = store.flush()
    assert (logs["time/wait_rollout"], logs["step_time"]) == (0.75, 1.75), "3 s of 4 + 1 + 1 + 1"


def test_waiting_for_other_ranks_is_no_own_time():
    clock, waited = Clock(), [10.0]
    store = MetricStore(clock)
    store.waited = lambda: waited[0]
    for own in (1.0, 0.5):
        with store.timer("train"), store.timer("generate"):
            clock.now += 3.0
            waited[0] += 3.0 - own
    assert store.own_s == {"train": 1.5}
    assert store.commit()["time/train"] == 6.0 and store.own_s == {}


def test_the_slowest_rank_holds_the_others_up():
    own = [{"train": 2.0, "generate": 4.0}, {"train": 2.1, "generate": 1.0}, {"train": 1.9, "generate": 1.4}]
    found = held_up(own)
    assert found == {"time/held_up/generate/rank-0": pytest.approx(2.8)}, "training differs by less than a tenth"
    assert held_up([{"train": 1.0}]) == {}, "nobody waits"
    store = MetricStore(lambda: 0.0)
    for _ in range(3):
        store.add_many(found)
        store.commit()
    assert store.flush()["time/held_up/generate/rank-0"] == pytest.approx(8.4)


def test_a_timer_counts_when_its_body_raises():
    clock = Clock()
    store = MetricStore(clock)
    with pytest.raises(KeyError), store.timer("reward"):
        clock.now += 3.0
        raise KeyError
    with store.timer("train"):
        clock.now += 1.0
    values = store.commit()
    assert (values["time/reward"], values["time/train"]) == (3.0, 1.0)


step_values = st.lists(
    st.tuples(st.sampled_from(["loss", "x_max", "y_min", "health/n"]), st.floats(-1e6, 1e6)), max_size=6
)


@given(steps=st.lists(step_values, min_size=1, max_size=6), cut=st.integers(0, 5), inside=st.booleans())
def test_a_resumed_store_logs_the_same_bits(steps, cut, inside):
    def run(resume):
        store = MetricStore(lambda: 0.0)
        for number, values in enumerate(steps):
            if resume and number == cut and not inside:
                store = reload(store)
            for name, value in values:
                store.add(name, value)
            if resume and number == cut and inside:
                store = reload(store)
            store.commit()
        return store.flush()

    def reload(store):
        fresh = MetricStore(lambda: 0.0)
        fresh.load_state_dict(decode(encode(store.state_dict()), dict))
        return fresh

    assert run(resume=True) == run(resume=False)


def test_the_state_keeps_values_that_are_not_finite():
    store = MetricStore()
    store.add("a", math.inf)
    store.add("b", math.nan)
    fresh = MetricStore()
    fresh.load_state_dict(decode(encode(store.state_dict()), dict))
    values = fresh.commit()
    assert values["a"] == math.inf
    assert math.isnan(values["b"])


@pytest.mark.parametrize("name", ["ratio/max", "mismatch/ratio_min"])
def test_an_extreme_that_was_not_a_number_stays_so(name):
    for values in ([math.nan, 1.0], [1.0, math.nan]):
        report = StepMetrics()
        for value in values:
            report.add(name, torch.tensor(value), kind=kind_of(name))
        report.collect()
        assert math.isnan(report.results()[name])
