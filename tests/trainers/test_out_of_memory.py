"""Memory that runs out in a pass changes no gradient: it is made again, with smaller micro-batches."""

import random
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import replace

import pytest
import torch
from invariance_worker import Layout, rollout, settings
from out_of_memory_worker import Case, ShortBench, on_two_ranks

from swift.rl.losses import LossConfig
from swift.trainers.micro_batches import Limits

pytestmark = pytest.mark.slow

FP32 = 1e-6
NAMES = [name for name in settings() if not name.startswith("vespo")]  # which amplifies rounding


AMPLE, LEAST = 10**6, 30
"""Tokens; the longest completion with its prompt has 26."""


def cases(seed, count, ranks):
    """Random cases; the first pass of a rank fails."""
    draw = random.Random(seed)
    for _ in range(count):
        room = [draw.choice([AMPLE, draw.randrange(LEAST, 60)]) for _ in range(ranks)]
        room[draw.randrange(ranks)] = draw.randrange(LEAST, 60)
        numbers = (draw.randrange(4),) if ranks == 1 else ()
        layout = Layout(draw.choice([1, 2]) if ranks == 1 else 1, draw.choice(["shared", "padded"]))
        yield Case(draw.choice(NAMES), layout, draw.choice(["forward", "backward"]), tuple(room), numbers)


@pytest.fixture(scope="module")
def bench(nano_folders, tmp_path_factory):
    return ShortBench(nano_folders["qwen2"], tmp_path_factory.mktemp("short"))


@pytest.fixture(scope="module")
def batch(bench):
    return rollout(bench.trainer)


@pytest.fixture(scope="module")
def whole(bench, batch):
    """The gradient of a setting for which memory suffices."""
    made = {}

    def of(name):
        if name not in made:
            made[name], failed = bench.of(batch, Case(name, Layout(1), "forward", (AMPLE,)))
            assert not failed
        return made[name]

    return of


def gap(gradient, other):
    return float((gradient - other).norm() / other.norm())


@pytest.mark.parametrize(("drawn", "least"), [(5, 6), pytest.param(70, 150, marks=pytest.mark.long)])
def test_many_times_on_one_device(bench, batch, whole, drawn, least):
    times = 0
    for case in cases(1, drawn, ranks=1):
        gradient, failed = bench.of(batch, case)
        assert failed >= 1, case
        assert gap(gradient, whole(case.name)) < FP32, case
        times += failed
    assert times >= least


@pytest.mark.parametrize(("count", "least"), [(4, 5), pytest.param(32, 50, marks=pytest.mark.long)])
def test_many_times_on_two_ranks(bench, batch, whole, nano_folders, tmp_path, count, least):
    drawn = list(cases(2, count, ranks=2))
    found = on_two_ranks(tmp_path / "two", nano_folders["qwen2"], batch, drawn)
    for case, (gradient, failed, same_gradient, same_budget) in zip(drawn, found, strict=True):
        assert failed >= 1, case
        assert same_gradient and same_budget, case
        assert gap(gradient, whole(case.name)) < FP32, case
    assert sum(failed for _, failed, *_ in found) >= least


def test_the_budget_is_halved_and_said_each_time(bench, batch):
    bench.lines.clear()
    bench.of(batch, Case("dapo, later update", Layout(1), "backward", (AMPLE,), (0, 1)))
    had = [int(line.split()[7]) for line in bench.lines]
    assert bench.lines == [
        f"memory: ran out in a micro-batch of {tokens} tokens; again, with {tokens // 2} at most from here on"
        for tokens in had
    ]
    assert len(had) == 2 and bench.trainer.planner.fitting_tokens == had[1] // 2 < had[0] // 2


def test_a_completion_that_does_not_fit_alone_ends_the_run(bench, batch):
    with pytest.raises(torch.OutOfMemoryError):
        bench.of(batch, Case("dapo, later update", Layout(1), "backward", (10,)))


class PolicyItself:
    """The policy as its own reference."""

    def __init__(self, model):
        self.model = model

    @contextmanager
    def active(self):
        yield self.model


def test_passes_of_the_reference_are_made_again_too(bench, batch, monkeypatch):
    logprobs, planner = bench.trainer.logprobs, bench.trainer.planner
    monkeypatch.setattr(logprobs, "models", {"ref_logprobs": PolicyItself(bench.trainer.model)})
    monkeypatch.setattr(logprobs, "settings", replace(logprobs.settings, loss=LossConfig(beta=0.1)))

    def scored(room):
        planner.limits, found = Limits(None, AMPLE), deepcopy(batch)
        for sample in found.samples:
            sample.ref_logprobs = None
        bench.made = bench.failed = 0
        with bench._failing(Case("", Layout(1), "forward", (room,))):
            logprobs.score_frozen(found)
            kl = logprobs.reward_kl(found.samples)
        return [sample.ref_logprobs for sample in found.samples if sample.num_trained], kl, bench.failed

    ours, our_kl, failed = scored(40)
    theirs, their_kl, none = scored(AMPLE)
    assert failed >= 2 and none == 0
    torch.testing.assert_close(torch.tensor(our_kl), torch.tensor(their_kl))
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(torch.from_numpy(one), torch.from_numpy(other))


def test_an_error_that_only_one_of_several_ranks_has_is_not_survived(bench, batch, monkeypatch):
    monkeypatch.setattr(bench.trainer.planner.collectives, "active", True)

    def alone():
        raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(torch.OutOfMemoryError):
        bench.trainer.planner.surviving(alone)
