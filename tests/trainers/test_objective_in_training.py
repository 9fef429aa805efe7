"""Every setting of the objective acts in a training step as its formula says, whatever the cut into passes."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from grpo_parts import logs_of, one_step, passes_of, policy_of, relative_difference
from transformers import AutoModelForCausalLM

from swift.models.reference import FrozenReference, StartAdapterReference
from swift.rl.entropy import AdaptiveEntropy
from swift.rl.global_batch import count_batch
from swift.rl.losses import LossConfig, get_loss, sequence_weights
from swift.rl.objective import policy_loss
from swift.rl.segments import Segments
from swift.trainers.grpo.entropy import EntropySettings
from swift.trainers.grpo.settings import CorrectionSettings


@pytest.fixture
def folder(nano_folders):
    return nano_folders["qwen2"]


class ByHand:
    """A global batch under the weights of a trainer's model, in one piece, with plain torch."""

    def __init__(self, trainer, folder, samples, temperature=1.0):
        self.model = AutoModelForCausalLM.from_pretrained(folder)
        self.model.load_state_dict(trainer.model.state_dict())
        self.samples, rows, entropies = samples, [], []
        for one in samples:
            ids = torch.tensor([*one.prompt_ids, *one.token_ids])
            logits = self.model(input_ids=ids[None]).logits[0, one.prompt_ids.size - 1 : -1] / temperature
            logprobs = logits.log_softmax(-1)
            rows.append(logprobs.gather(1, torch.tensor(one.token_ids).long()[:, None])[:, 0])
            entropies.append(-(logprobs.exp() * logprobs).sum(-1))
        self.logprobs, self.entropy = torch.cat(rows), torch.cat(entropies)
        self.mask = torch.from_numpy(np.concatenate([one.trained for one in samples]))
        self.index = torch.repeat_interleave(torch.arange(len(samples)), torch.tensor([len(row) for row in rows]))

    def join(self, name):
        return torch.from_numpy(np.concatenate([getattr(one, name) for one in self.samples]))

    def loss(self, config, **more):
        """The loss of the global batch by the pure functions."""
        lengths = [one.num_trained for one in self.samples]
        weights = sequence_weights(get_loss(config.loss_type), count_batch(lengths), lengths, max_completion_length=8)
        output = policy_loss(
            self.logprobs,
            config=config,
            advantages_T=torch.tensor([one.advantage for one in self.samples])[self.index],
            segments=Segments(self.mask, self.index, len(self.samples)),
            token_weights_T=self.mask * torch.tensor(weights)[self.index],
            **more,
        )
        return output.loss

    def gradients(self, loss):
        self.model.zero_grad()
        loss.backward()
        return {name: parameter.grad for name, parameter in self.model.named_parameters()}


def stale(samples):
    """Old log-probs that come with the samples, up to .3 away from what the policy says now."""
    rng = np.random.default_rng(0)
    for one in samples:
        gap = rng.uniform(-0.3, 0.3, one.token_ids.size).astype(np.float32)
        one.old_logprobs = one.sampler_logprobs + gap
        one.trained = one.trained & (rng.random(one.token_ids.size) > 0.2)


def test_reference_log_probs_are_those_of_the_reference(make, folder):
    other = AutoModelForCausalLM.from_pretrained(folder)
    other.model.norm.weight.data.mul_(1.5)
    trainer = make(loss=LossConfig(beta=0.1), reference=FrozenReference(other))
    _, values, samples = one_step(trainer)
    by_hand, of_reference = ByHand(trainer, folder, samples), ByHand(SimpleNamespace(model=other), folder, samples)
    gap = (of_reference.logprobs - by_hand.logprobs).detach()
    assert values["kl"] == pytest.approx(float((gap.exp() - gap - 1).mean()), rel=1e-4)
    assert values["kl"] > 1e-3


# --- entropy ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_samples", [8, 3])
def test_the_bonus_is_the_mean_entropy_of_the_global_batch(make, folder, max_samples):
    trainer = make(max_samples=max_samples, entropy=EntropySettings(coefficient=0.7), temperature=1.3)
    ours, values, samples = one_step(trainer, stale)
    by_hand = ByHand(trainer, folder, samples, temperature=1.3)
    mean = by_hand.entropy[by_hand.mask].mean()
    loss = by_hand.loss(LossConfig(), old_logprobs_T=by_hand.join("old_logprobs")) - 0.7 * mean
    assert relative_difference(ours, by_hand.gradients(loss)) < 1e-5
    assert values["entropy"] == pytest.approx(mean.item(), rel=1e-5)
    assert values["entropy_coef"] == 0.7


@pytest.mark.parametrize(("max_samples", "forwards"), [(8, [8]), (3, [3, 3, 2] * 2)])
def test_only_the_most_uncertain_tokens_of_the_global_batch_train(make, folder, max_samples, forwards):
    trainer = make(max_samples=max_samples, entropy=EntropySettings(quantile=0.3, coefficient=0.5))
    calls = passes_of(trainer)
    ours, values, samples = one_step(trainer, stale)
    assert calls == forwards, "a pass of its own where no pass holds the global batch"
    by_hand = ByHand(trainer, folder, samples)
    entropies = by_hand.entropy[by_hand.mask].detach().sort().values
    rank = math.ceil(0.7 * (len(entropies) - 1) - 1e-9)
    keep = by_hand.entropy.detach() >= (entropies[rank] + entropies[rank - 1]) / 2  # between two tokens
    assert int((keep & by_hand.mask).sum()) == len(entropies) - rank
    loss = by_hand.loss(LossConfig(), old_logprobs_T=by_hand.join("old_logprobs"), keep_T=keep)
    loss = loss - 0.5 * by_hand.entropy[keep & by_hand.mask].mean()
    assert relative_difference(ours, by_hand.gradients(loss)) < 1e-5
    assert values["entropy_threshold"] == pytest.approx(float(entropies[rank]), rel=1e-5)


def test_samples_without_advantage_have_a_say_in_the_threshold(make, folder):
    def reward(completion, prompt):
        return 1.0 if prompt.prompt_id == "p0" else float(completion.token_ids[0] % 2)

    thresholds, gradients = [], []
    for size in (8, 4):
        trainer = make(reward=reward, max_samples=size, entropy=EntropySettings(quantile=0.5))
        ours, values, samples = one_step(trainer)
        assert {one.advantage == 0 for one in samples} == {True, False}
        thresholds.append(values["entropy_threshold"])
        gradients.append(ours)
    by_hand = ByHand(trainer, folder, samples)
    assert thresholds == pytest.approx([by_hand.entropy.median().item()] * 2, abs=0.02)
    assert relative_difference(*gradients) < 1e-5


@pytest.mark.parametrize(
    ("entropy", "forwards"),
    [
        (EntropySettings(), 4),
        (EntropySettings(log=False), 4),
        (EntropySettings(log=True), 4),
        (EntropySettings(coefficient=0.1), 8),
        (EntropySettings(adaptive=AdaptiveEntropy()), 8),
    ],
)
def test_samples_without_advantage_are_passed_over_exactly_when_they_cannot_matter(make, entropy, forwards):
    def reward(completion, prompt):
        return 1.0 if prompt.prompt_id == "p0" else float(completion.token_ids[0] % 2)

    trainer = make(reward=reward, entropy=entropy)
    calls = passes_of(trainer)
    one_step(trainer)
    assert calls == [forwards]


@pytest.mark.parametrize(
    ("log", "whole_logits", "steps"),
    [(None, False, [1, 11]), (None, True, [*range(1, 13)]), (True, False, [*range(1, 13)]), (False, True, [])],
)
def test_entropy_is_logged_where_it_costs_nothing_or_every_tenth_step_and_changes_no_weight(
    make, monkeypatch, log, whole_logits, steps
):
    if whole_logits:
        monkeypatch.setattr("swift.trainers.grpo.trainer.prepare_scoring", lambda model: "its logits are whole")
    trained = {}
    for setting in (log, False):
        trainer = make(max_samples=2, max_steps=12, prompts=32, entropy=EntropySettings(log=setting))
        trainer.train()
        trained[setting] = trainer
    assert [row["step"] for row in logs_of(trained[log]) if "entropy" in row] == steps
    theirs = trained[False].model.state_dict()
    assert all(torch.equal(value, theirs[name]) for name, value in trained[log].model.state_dict().items())


def test_the_controller_sees_each_global_batch_once(make):
    start = AdaptiveEntropy(coefficient=0.1, target=100.0, step=0.02, maximum=0.15)
    trainer = make(iterations=2, max_samples=2, max_steps=4, entropy=EntropySettings(coefficient=0.1, adaptive=start))
    trainer.train()
    rows = logs_of(trainer)
    assert [row["entropy_coef"] for row in rows] == pytest.approx([0.0, 0.12, 0.14, 0.15])
    controller = start
    for row in rows:
        controller = controller.updated(row["entropy"])
    assert trainer.entropy.controller.coefficient == pytest.approx(controller.coefficient)
    assert trainer.entropy.controller.last_entropy == pytest.approx(controller.last_entropy, rel=1e-6)


def test_above_the_target_the_bonus_rests(make):
    start = AdaptiveEntropy(coefficient=0.1, target=0.01, step=0.04)
    trainer = make(max_steps=3, entropy=EntropySettings(coefficient=0.1, adaptive=start))
    trainer.train()
    assert [row["entropy_coef"] for row in logs_of(trainer)] == [0, 0, 0]
    assert trainer.entropy.controller.coefficient == 0.0


# --- sampler and trainer ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_samples", [8, 3])
def test_sequences_that_drifted_lose_their_policy_term_and_nothing_else(make, folder, max_samples):
    def drift(samples):
        stale(samples)
        for one in samples[::2]:
            one.sampler_logprobs = one.sampler_logprobs + 0.5

    trainer = make(max_samples=max_samples, off_policy_delta=0.2)
    ours, values, samples = one_step(trainer, drift)
    by_hand = ByHand(trainer, folder, samples)
    kept = torch.tensor([i % 2 == 1 or one.advantage >= 0 for i, one in enumerate(samples)])
    assert 0 < int((~kept).sum()) < 4
    loss = by_hand.loss(LossConfig(), old_logprobs_T=by_hand.join("old_logprobs"), keep_T=kept[by_hand.index])
    assert relative_difference(ours, by_hand.gradients(loss)) < 1e-5
    muted = int((by_hand.mask & ~kept[by_hand.index]).sum())
    assert values["off_policy/masked_frac"] == pytest.approx(muted / int(by_hand.mask.sum()))


@pytest.mark.parametrize(
    ("settings", "max_samples"),
    [({}, 8), ({"log_offpolicy": True}, 3), ({"correction": CorrectionSettings(mode="token_mask")}, 3)],
)
def test_unclamped_ratios_are_logged_with_their_effective_sample_size(make, folder, settings, max_samples):
    def shift(samples):
        for number, one in enumerate(samples):
            one.sampler_logprobs = one.sampler_logprobs - np.float32(0.25 * number)

    trainer = make(max_samples=max_samples, **settings)
    _, values, samples = one_step(trainer, shift)
    by_hand = ByHand(trainer, folder, samples)
    eta = (by_hand.logprobs.detach() - by_hand.join("sampler_logprobs")).double()
    ratio = eta.exp()
    expected = {
        "kl": -eta.mean(),
        "ratio_mean": ratio.mean(),
        "ratio_min": ratio.min(),
        "ratio_max": ratio.max(),
        "clipped_frac": (ratio > 2).double().mean(),
        "k3": (ratio - eta - 1).mean(),
        "logp_abs_diff_mean": eta.abs().mean(),
        "logp_abs_diff_max": eta.abs().max(),
        "ess": ratio.sum() ** 2 / (len(ratio) * (ratio**2).sum()),
    }
    if "correction" in settings:
        kept = ratio * (ratio <= 2)
        expected |= {"is_weight_mean": kept.mean(), "is_weight_min": kept.min(), "is_weight_max": kept.max()}
    logged = {name.split("/")[1]: value for name, value in values.items() if name.startswith("mismatch/")}
    assert logged == pytest.approx({name: float(value) for name, value in expected.items()}, rel=1e-4)
    if "log_offpolicy" in settings:
        gain = torch.tensor([one.advantage > 0 for one in samples])[by_hand.index]
        assert values["logp/positive_advantage_mean"] == pytest.approx(by_hand.logprobs[gain].mean().item(), rel=1e-4)
        assert values["logp/negative_advantage_mean"] == pytest.approx(by_hand.logprobs[~gain].mean().item(), rel=1e-4)


def test_ratios_are_logged_wherever_they_mean_something(make):
    _, values, _ = one_step(make(entropy=EntropySettings(log=False)))
    assert not [name for name in values if name.startswith(("logp/", "entropy", "off_policy/masked"))], "unasked"
    assert values["mismatch/ess"] == pytest.approx(1.0, abs=1e-6)
    assert values["mismatch/logp_abs_diff_max"] < 1e-4 and values["mismatch/clipped_frac"] == 0.0
    _, values, _ = one_step(make(correctable_sampling=False))
    assert not [name for name in values if name.startswith("mismatch/")], "log-probs at another temperature"


def test_truncated_sampling_is_corrected_too_and_said_to_be_biased(make):
    def shift(samples):
        for one in samples:
            one.sampler_logprobs = one.sampler_logprobs + np.float32(0.3)

    correction = {"correction": CorrectionSettings(mode="token_truncate")}
    plain, biased = (
        one_step(make(**correction, comparable_sampling=comparable), shift) for comparable in (True, False)
    )
    assert all(torch.equal(biased.gradients[name], gradient) for name, gradient in plain.gradients.items())
    assert biased.values["mismatch/biased"] == 1.0 and "mismatch/biased" not in plain.values


def test_log_probs_at_another_temperature_correct_nothing(make):
    def shift(samples):
        for sample in samples:
            sample.sampler_logprobs = sample.sampler_logprobs + np.float32(1.0)

    uncorrected = one_step(make(), shift).gradients
    corrected, off = (
        one_step(make(correction=CorrectionSettings(mode="token_truncate"), correctable_sampling=correctable), shift)
        for correctable in (True, False)
    )
    assert relative_difference(corrected.gradients, uncorrected) > 0.1
    assert all(torch.equal(off.gradients[name], gradient) for name, gradient in uncorrected.items())
    assert "mismatch/is_weight_mean" in corrected.values and "mismatch/is_weight_mean" not in off.values


READS = ("item", "tolist", "__float__", "cpu", "numpy")
"""Methods of a tensor that wait for its device; attention layouts call `__int__` too, of tensors on the host."""


@pytest.mark.parametrize("iterations", [1, 2])
def test_the_number_of_reads_from_the_device_is_that_of_steps_and_not_of_micro_batches(make, monkeypatch, iterations):
    def reads(max_samples):
        trainer = make(
            max_samples=max_samples,
            iterations=iterations,
            off_policy_delta=0.2,
            log_offpolicy=True,
            correction=CorrectionSettings(mode="token_truncate"),
            entropy=EntropySettings(coefficient=0.1, adaptive=AdaptiveEntropy(), log=True),
        )
        passes, counted = passes_of(trainer), Counter()
        with monkeypatch.context() as patch:
            for name in READS:
                patch.setattr(torch.Tensor, name, counting(getattr(torch.Tensor, name), counted))
            values = one_step(trainer, stale).values
        assert len(passes) == 8 / max_samples
        assert {"ratio/max", "mismatch/ratio_min", "mismatch/is_weight_mean", "off_policy/masked_frac"} <= values.keys()
        return counted

    def counting(method, counted):
        def read(tensor, *args, **named):
            counted[method.__name__] += 1
            return method(tensor, *args, **named)

        return read

    assert reads(1) == reads(8)


# --- what the ratio compares with ---------------------------------------------------------------------------------


def test_the_ratio_may_be_taken_against_the_sampler(make, folder):
    def shift(samples):
        rng = np.random.default_rng(0)
        for one in samples:
            one.sampler_logprobs = one.sampler_logprobs + rng.uniform(-0.4, 0.4, 8).astype(np.float32)

    trainer = make(max_samples=3, old_logprobs="sampler", log_offpolicy=True)
    ours, values, samples = one_step(trainer, shift)
    by_hand = ByHand(trainer, folder, samples)
    loss = by_hand.loss(LossConfig(), old_logprobs_T=by_hand.join("sampler_logprobs"))
    assert relative_difference(ours, by_hand.gradients(loss)) < 1e-5
    assert values["ratio/max"] == pytest.approx(values["mismatch/ratio_max"], rel=1e-5)


def test_the_samplers_log_probs_spare_later_global_batches_their_pass(make):
    trainer = make(num_global_batches=3, iterations=2, max_steps=6, old_logprobs="sampler")
    calls = passes_of(trainer)
    trainer.train()
    assert calls == [8] * 6


def test_parts_of_a_global_batch_are_compared_with_the_sampler_too(make):
    from swift.rollout.samples import Arrival

    def gradients(parts):
        trainer = make(old_logprobs="sampler")
        return one_step(trainer, shift, parts).gradients

    def shift(samples):
        for one in samples[::2]:
            one.sampler_logprobs = one.sampler_logprobs - np.float32(0.1)

    arriving = iter([Arrival(range(3), last=False), Arrival(range(3, 8), last=True)])
    assert relative_difference(gradients(arriving), gradients(None)) < 1e-5


def test_old_log_probs_that_come_with_samples_are_kept_and_others_filled_in(make):
    trainer = make(num_global_batches=2, iterations=2, max_samples=4, max_steps=4)
    calls = passes_of(trainer)
    batches = trainer.pipeline.steps
    preset = {}

    def with_replayed(progress):
        for batch in batches(progress):
            if batch.position == 0:
                for i in (1, 2, 8, 9, 10, 11):
                    one = batch.samples[i]
                    one.old_logprobs = one.sampler_logprobs - np.float32(0.1)
                    preset[i] = one.old_logprobs.copy()
            trainer.seen = batch
            yield batch

    trainer.pipeline.steps = with_replayed
    trainer.train()
    assert calls == [4] * 9, "one pass of global batch 2 has none yet; then two passes of each global batch, twice"
    rows = logs_of(trainer)
    assert rows[0]["ratio/max"] == pytest.approx(math.exp(0.1), rel=1e-4)
    for i, one in enumerate(trainer.seen.samples):
        kept = preset.get(i, one.old_logprobs)
        assert np.array_equal(one.old_logprobs, kept)
        gap = one.old_logprobs - one.sampler_logprobs
        assert np.allclose(gap, -0.1 if i in preset else 0.0, atol=1e-4), i


# --- a reference that moves ---------------------------------------------------------------------------------------


def moving_run(make, folder, kind, **arguments):
    """A run with everything that has a state of its own; the reference moves after every third step."""
    from swift.trainers.grpo.callbacks import EveryFewSteps

    if kind == "lora":
        model = policy_of(folder, lora={"lora_dropout": 0.0})
        reference = StartAdapterReference(model)
    else:
        model = AutoModelForCausalLM.from_pretrained(folder)
        reference = FrozenReference(AutoModelForCausalLM.from_pretrained(folder))
    start = AdaptiveEntropy(coefficient=0.05, target=5.452, step=0.02)
    trainer = make(
        model=model,
        reference=reference,
        loss=LossConfig(beta=0.1),
        num_global_batches=2,
        iterations=2,
        max_samples=3,
        learning_rate=1e-2,
        entropy=EntropySettings(adaptive=start, quantile=0.8),
        **arguments,
    )
    trainer.add_callback(EveryFewSteps(3, lambda step: trainer.move_reference(0.6)))
    return trainer


@pytest.mark.parametrize("kind", ["full", "lora"])
def test_the_reference_becomes_the_mixture_and_old_answers_of_it_are_forgotten(make, folder, kind):
    trainer = moving_run(make, folder, kind, max_steps=3)
    start = {name: tensor.clone() for name, tensor in trainer.reference.weights().items()}
    trainer.train()
    policy = dict(trainer.model.named_parameters())
    moved = trainer.reference.weights()
    assert max(float((moved[name] - start[name]).abs().max()) for name in start) > 1e-3
    for name, tensor in moved.items():
        assert torch.allclose(tensor, 0.6 * policy[name] + 0.4 * start[name], atol=1e-6), name
    assert all(one.ref_logprobs is None for one in trainer.pipeline.batch.samples)


def test_with_alpha_1_a_lora_reference_is_the_policy_itself(make, folder):
    from swift.trainers.grpo.callbacks import EveryFewSteps

    model = policy_of(folder, lora={"lora_dropout": 0.0})
    trainer = make(
        model=model,
        reference=StartAdapterReference(model),
        loss=LossConfig(beta=0.1),
        learning_rate=1e-1,
        max_steps=4,
    )
    trainer.add_callback(EveryFewSteps(2, lambda step: trainer.move_reference(1.0)))
    trainer.train()
    distances = [row["kl"] for row in logs_of(trainer)]
    assert distances[1] > 1e-6
    assert distances[3] > 1e-6
    assert distances[0] == pytest.approx(0.0, abs=1e-9)
    assert distances[2] == pytest.approx(0.0, abs=1e-9), "it was moved after step 2"


SAVING = {"max_steps": 7, "save_strategy": "steps", "save_steps": 1}


@pytest.fixture(scope="module", params=["full", "lora"])
def straight(request, make, nano_folders):
    """A run that was not interrupted, and its kind."""
    trainer = moving_run(make, nano_folders["qwen2"], request.param, **SAVING)
    trainer.train()
    return trainer, request.param


@pytest.mark.parametrize("step", [2, 3, 5])
def test_a_resumed_run_has_the_controller_and_the_reference_of_the_straight_one(make, folder, straight, step):
    expected, kind = straight
    checkpoint = Path(expected.args.output_dir) / f"checkpoint-{step}"
    assert (checkpoint / "reference.pt").exists() == (step >= 3)
    resumed = moving_run(make, folder, kind, **SAVING)
    resumed.load_pipeline_state(checkpoint)
    resumed.train(resume_from_checkpoint=str(checkpoint))
    assert resumed.entropy.controller == expected.entropy.controller
    for ours, theirs in (
        (resumed.model.state_dict(), expected.model.state_dict()),
        (resumed.reference.weights(), expected.reference.weights()),
    ):
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    names = ("loss", "grad_norm", "kl", "entropy", "entropy_coef", "entropy_threshold")
    ours, theirs = ([[row[name] for name in names] for row in logs_of(one)] for one in (resumed, expected))
    assert ours[-(7 - step) :] == theirs[step:]
    assert len({row[names.index("entropy_coef")] for row in theirs}) > 1, "the controller does something"


def test_gradients_do_not_depend_on_what_is_merely_logged(make):
    plain = one_step(make()).gradients
    watched = one_step(make(entropy=EntropySettings(log=True), log_offpolicy=True)).gradients
    assert all(torch.equal(watched[name], gradient) for name, gradient in plain.items())


TRUNCATIONS = [{"top_k": 20}, {"top_p": 0.6}, {"min_p": 0.3}, {"top_k": 30, "top_p": 0.9}, {"min_tokens": 4}]


@pytest.mark.parametrize("sampling", TRUNCATIONS, ids="-".join)
def test_truncated_samples_of_the_policy_itself_are_on_policy(make, sampling):
    """The sampler's log-probs are renormalised over what truncation keeps; the mass it kept makes them comparable."""
    trainer = make(old_logprobs="sampler", off_policy_delta=0.05, sampling=sampling, eos=[3, 4, 5])
    values = one_step(trainer).values
    assert values["off_policy/masked_frac"] == 0.0
    assert values["ratio/mean"] == pytest.approx(1.0, abs=1e-5) and values["ratio/max"] == pytest.approx(1.0, abs=1e-4)
    assert values["mismatch/logp_abs_diff_max"] < 1e-4
