"""One frozen rollout has one gradient: however it is cut, packed, padded or spread over ranks, for every loss.

The rollout is ragged, holds tokens that are not trained, samples without a trained token and samples without advantage,
and its policy has moved since. Differences are relative to the norm of the gradient that one pass over the whole packed
global batch makes; in fp32 they are rounding, and in float64 they are gone.
"""

from __future__ import annotations

import sys
from dataclasses import asdict
from itertools import combinations
from pathlib import Path

import pytest
import torch
from invariance_worker import (
    LONGEST,
    NOMINAL,
    SAMPLES,
    Bench,
    Layout,
    Setting,
    limited,
    loss_of,
    measure,
    on_ranks,
    rollout,
    settings,
)

from swift.models.forward import TokenSequence, completion_logits, pack
from swift.rl.logprobs import selected_logprobs
from swift.rl.losses import losses
from swift.rollout.samples import RolloutBatch
from swift.trainers.grpo.entropy import EntropySettings

sys.path.insert(0, str(Path(__file__).parents[1] / "rl"))
from padded_windows import Window
from whole_objective import Options, run_ours

pytestmark = pytest.mark.slow

FP32 = 1e-6
WHOLE = Layout(1)
CUTS = [Layout(passes) for passes in (1, 2, 4, 8)]
PADDED = [Layout(1, "padded"), Layout(4, "padded")]
BY_TOKENS = [Layout(0, tokens=40), Layout(0, "padded", tokens=60)]
"""The longest completion alone takes 21."""
ALONE = Layout(4, "single")
"""Packed, each completion with a prompt of its own."""
SETTINGS = settings()
AMPLIFIED = [name for name in SETTINGS if name.startswith("vespo") and SETTINGS[name].start]

OF_OTHERS = [f"{name}, {situation}" for name in losses for situation in ("later update", "with KL")]
"""What is looked at with the other architectures."""


@pytest.fixture(scope="module")
def bench(nano_folders, tmp_path_factory):
    return Bench(nano_folders["qwen2"], tmp_path_factory.mktemp("single"))


@pytest.fixture(scope="module")
def batch(bench):
    return rollout(bench.trainer)


@pytest.fixture(scope="module")
def single(bench, batch):
    return measure(bench, batch, [*CUTS, ALONE, *PADDED, *BY_TOKENS])


@pytest.fixture(scope="module")
def exact(nano_folders, tmp_path_factory):
    """A bench in float64."""
    return Bench(nano_folders["qwen2"], tmp_path_factory.mktemp("double"), torch.float64)


@pytest.fixture(scope="module")
def double(exact, batch):
    return measure(exact, batch, [WHOLE, Layout(8), ALONE, PADDED[1]])


@pytest.fixture(scope="module")
def two_ranks(nano_folders, batch, tmp_path_factory):
    return on_ranks(
        tmp_path_factory.mktemp("ranks") / "two", nano_folders["qwen2"], batch, [*CUTS, PADDED[1], *BY_TOKENS]
    )


def relative(gradient, other):
    return float((gradient - other).norm() / other.norm())


def gaps(found, name, reference):
    """How far each layout's gradient is from the reference."""
    return {key[1:]: relative(gradient, reference) for key, (gradient, _) in found.items() if key[0] == name}


def assert_equal(found, name, reference, *, layouts=None):
    """In fp32; what amplifies the rounding of padded rows is looked at below."""
    differences = gaps(found, name, reference)
    assert layouts is None or len(differences) == layouts
    compared = [gap for key, gap in differences.items() if key[1] != "padded" or name not in AMPLIFIED]
    assert max(compared) < FP32, differences


def whole(found, name):
    return found[name, WHOLE.passes, WHOLE.kind][0]


def test_every_loss_is_measured_in_every_situation():
    assert {name.split(", ")[0] for name in SETTINGS} == set(losses)
    assert len(SETTINGS) == 4 * len(losses) + 14


@pytest.mark.parametrize("name", SETTINGS)
def test_one_process_has_one_gradient(single, name):
    assert whole(single, name).norm() > 0.1
    assert_equal(single, name, whole(single, name))


@pytest.mark.long
@pytest.mark.parametrize("name", SETTINGS)
def test_two_processes_have_the_gradient_of_one(single, two_ranks, name):
    layouts = len(CUTS) + 1 + (len(BY_TOKENS) if limited(name) else 0)
    assert_equal(two_ranks, name, whole(single, name), layouts=layouts)


@pytest.fixture(
    scope="module",
    params=[pytest.param(sharing, marks=pytest.mark.long) for sharing in ((2, 2), (4, 2), (4, 4))],
    ids=str,
)
def sharing(request, nano_folders, batch, tmp_path_factory):
    """Ranks that share micro-batches, a part of the tokens each."""
    count, size = request.param
    place = tmp_path_factory.mktemp("sharing") / "ranks"
    return on_ranks(place, nano_folders["qwen2"], batch, [*CUTS[::2], ALONE], count=count, sharing=size)


@pytest.mark.parametrize("name", SETTINGS)
def test_ranks_that_share_micro_batches_have_the_gradient_of_one(single, sharing, name):
    assert_equal(sharing, name, whole(single, name), layouts=3)


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def other(request, nano_folders, tmp_path_factory):
    """Another architecture in one process and in two."""
    folder = nano_folders[request.param]
    bench = Bench(folder, tmp_path_factory.mktemp(request.param))
    batch = rollout(bench.trainer)
    alone = measure(bench, batch, [*CUTS, ALONE, *PADDED], OF_OTHERS)
    place = tmp_path_factory.mktemp("ranks") / request.param
    return alone, on_ranks(place, folder, batch, [*CUTS, PADDED[1]], OF_OTHERS)


@pytest.mark.long
@pytest.mark.parametrize("name", OF_OTHERS)
def test_other_architectures_have_one_gradient_too(other, name):
    reference = whole(other[0], name)
    assert reference.norm() > 0.1
    for found, layouts in zip(other, (7, 5), strict=True):
        assert_equal(found, name, reference, layouts=layouts)


@pytest.mark.parametrize("name", SETTINGS)
def test_in_float64_the_gradients_are_equal(single, double, name):
    found = gaps(double, name, whole(double, name))
    assert max(found.values()) < 1e-13, found
    assert relative(whole(single, name), whole(double, name)) < FP32  # and fp32 is right, not only consistent


@pytest.mark.long
@pytest.mark.parametrize("name", AMPLIFIED)
def test_vespo_amplifies_the_rounding_of_log_probs_by_its_kernel_and_no_more(single, two_ranks, name):
    """Its weight is `exp(a s - l e^s)` of a sum over the sequence, so what another attention kernel rounds differently
    counts up to three times for each of up to twelve tokens. In float64 (above) nothing of it is left.
    """
    for found in (single, two_ranks):
        others = [gap for key, gap in gaps(found, name, whole(single, name)).items() if key[1] == "padded"]
        assert max(others) < 2 * FP32, others


@pytest.mark.parametrize("name", [name for name in SETTINGS if not SETTINGS[name].moves])
def test_it_is_the_gradient_of_the_objective_on_paper(exact, batch, double, name):
    """Log-probs go through `swift.rl` as in the tests of TRL's numbers, and its gradients through the model.

    The trainer keeps weights and advantages in fp32, the rest is float64 on both sides.
    """
    on_paper = gradient_on_paper(exact, batch, SETTINGS[name])
    assert relative(whole(double, name), on_paper) < 2e-7


def gradient_on_paper(bench, batch, setting):
    model = bench.trainer.model
    sequences = [TokenSequence(one.prompt_ids.tolist(), one.token_ids.tolist()) for one in batch.samples]
    tokens = pack(sequences)
    model.zero_grad(set_to_none=True)
    policy_N, entropy_N = selected_logprobs(completion_logits(model, tokens), tokens.target_ids)
    real = torch.tensor([[t < len(one.completion_ids) for t in range(LONGEST)] for one in sequences])

    def padded(values_N):
        return torch.zeros(real.shape, dtype=values_N.dtype).masked_scatter(real, values_N)

    def joined(name):
        return padded(torch.cat([torch.from_numpy(getattr(one, name)).double() for one in batch.samples]))

    padded_window = Window(
        policy=padded(policy_N.detach()),
        old=joined("old_logprobs"),
        ref=joined("ref_logprobs"),
        sampler=joined("sampler_logprobs"),
        entropies=padded(entropy_N.detach()),
        advantages=torch.tensor([one.advantage for one in batch.samples], dtype=torch.float64),
        completion_mask=real.long(),
        tool_mask=joined("trained").long(),
    )
    correction, entropy = setting.fields.get("correction"), setting.fields.get("entropy", EntropySettings())
    options = Options(
        setting.loss,
        with_old=setting.start > 0,
        with_sampler=True,
        correction=None if correction is None else asdict(correction),
        sequence_mask_delta=setting.fields.get("off_policy_delta"),
        quantile=entropy.quantile,
        entropy_coefficient=entropy.coefficient,
    )
    ours = run_ours(padded_window, options, batch=SAMPLES, nominal=NOMINAL, max_completion_length=LONGEST)
    torch.autograd.backward([policy_N, entropy_N], [ours.gradient[real], ours.entropy_gradient[real]])
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


@pytest.mark.long
def test_the_gradients_come_from_as_many_passes_as_named(single, two_ranks):
    for found in (single, two_ranks):
        assert [found["dapo, first update", layout.passes, layout.kind][1] for layout in CUTS] == [1, 2, 4, 8]
    for name, one, two in (("dapo, first update", 5, 3), ("dapo, with KL", 6, 3), ("dapo, second global batch", 2, 1)):
        assert [found[name, 0, "shared"][1] for found in (single, two_ranks)] == [one, two]
    # 21 samples over two ranks: 11 and 10, where the second rank's last pass is one over a filler
    assert two_ranks["dapo, with KL", 8, "shared"][1] == 6


def test_situations_differ_from_each_other(single):
    """Options that changed nothing would be invariant for nothing."""
    for name in losses:
        for kind, other in combinations(("first update", "later update", "with KL", "corrected"), 2):
            gap = relative(whole(single, f"{name}, {kind}"), whole(single, f"{name}, {other}"))
            assert gap > 1e-3, (name, kind, other)
    later = whole(single, "dapo, later update")
    for name in SETTINGS:
        if name.startswith("dapo, ") and name != "dapo, later update":
            assert relative(whole(single, name), later) > 1e-3, name


@pytest.mark.parametrize("start", [0, 1])
def test_bnpo_is_the_mean_of_its_nominal_micro_batches_and_follows_them_alone(bench, batch, start):
    """Each nominal micro-batch as a global batch of its own has the token mean of dapo; bnpo is their mean."""

    def part(first, count):
        return RolloutBatch(batch.samples[first : first + count], num_global_batches=1, num_iterations=1)

    def gradient(name, samples, nominal, passes=1):
        setting = Setting(loss_of(name), iterations=1 + start, start=start)
        return bench.gradient(samples, setting, Layout(passes), nominal=nominal)

    by_size = {}
    for nominal in (NOMINAL, 8, SAMPLES):
        starts = range(0, SAMPLES, nominal)
        informative = [
            first for first in starts if any(one.advantage and one.num_trained for one in part(first, nominal).samples)
        ]
        means = sum(gradient("dapo", part(first, nominal), nominal) for first in informative)
        for passes in (1, 4):
            by_size[nominal] = gradient("bnpo", batch, nominal, passes)
            assert relative(by_size[nominal], means / len(starts)) < FP32
    assert relative(by_size[NOMINAL], by_size[8]) > 1e-3 < relative(by_size[8], by_size[SAMPLES])
    assert relative(by_size[SAMPLES], gradient("dapo", batch, NOMINAL)) < FP32
