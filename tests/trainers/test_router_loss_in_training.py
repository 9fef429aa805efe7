"""`router_aux_loss_coef` in a step of GRPO: the mean over micro-batches, weighted by their trained tokens."""

from __future__ import annotations

import copy

import pytest
import torch
from grpo_parts import make_trainer, one_step

from swift.models.attention.choice import choose_streams
from swift.models.forward import TokenSequence, pack
from swift.models.scoring import prepare_scoring, scores_and_balance

COEFFICIENT = 0.3


@pytest.fixture
def mixture(small_model):
    model = small_model("qwen3_moe", vocab_size=263, num_experts=4, eos_token_id=None)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "gate.weight" in name:
                parameter.normal_(0, 1)
    return model


def even(completion, prompt):
    """A reward without a signal."""
    return 1.0


def step_of(model, tmp_path, name, **settings):
    """A step, with the micro-batches that it makes: samples and weight of each pass with a gradient."""
    trainer = make_trainer(None, tmp_path / name, model=copy.deepcopy(model), **settings)
    passes, own = [], trainer.logprobs.training_scores

    def noted(policy, batch, entropy):
        passes.append(batch.samples)
        return own(policy, batch, entropy)

    trainer.logprobs.training_scores = noted
    return one_step(trainer, shorten), passes


def shorten(samples):
    """Completions of different lengths, with other weights than their number."""
    for number, sample in enumerate(samples):
        sample.trained[2 + number :] = False


def formula(model, passes):
    """Gradients of the coefficient times the weighted mean of the losses of these micro-batches."""
    model = copy.deepcopy(model)
    assert choose_streams(model) is None and prepare_scoring(model) is None
    total = sum(sample.num_trained for samples in passes for sample in samples)
    for samples in passes:
        sequences = [TokenSequence(one.prompt_ids.tolist(), one.token_ids.tolist()) for one in samples]
        _, _, loss = scores_and_balance(model, pack(sequences))
        (COEFFICIENT * sum(one.num_trained for one in samples) / total * loss).backward()
    return {name: one.grad for name, one in model.named_parameters()}


@pytest.mark.parametrize("max_samples", [8, 4, 3])
def test_a_step_adds_the_weighted_mean_of_its_micro_batches(mixture, tmp_path, max_samples):
    settings = {"max_samples": max_samples, "skip_zero_advantage": False}
    plain, _ = step_of(mixture, tmp_path, "plain", **settings)
    step, passes = step_of(mixture, tmp_path, "balanced", router_aux_loss_coef=COEFFICIENT, **settings)
    assert len(passes) == {8: 1, 4: 2, 3: 3}[max_samples]
    expected = formula(mixture, passes)
    for name, gradient in step.gradients.items():
        base = plain.gradients[name]
        added = expected[name]
        if gradient is None:
            assert base is None and added is None
            continue
        torch.testing.assert_close(
            gradient - base, torch.zeros_like(base) if added is None else added, atol=2e-6, rtol=1e-3
        )
    assert step.values["loss"] - plain.values["loss"] == pytest.approx(COEFFICIENT * step.values["aux_loss"], abs=1e-5)


def test_without_a_signal_all_completions_balance_the_routers(mixture, tmp_path):
    plain, skipped = step_of(mixture, tmp_path, "plain", reward=even)
    step, passes = step_of(mixture, tmp_path, "balanced", reward=even, router_aux_loss_coef=COEFFICIENT)
    assert not skipped and plain.values["health/steps_without_signal"] == 1
    assert sum(map(len, passes)) == 8
    gradients = [step.gradients[name] for name in step.gradients if "gate.weight" in name]
    assert len(gradients) == 2 and all(gradient.norm() > 1e-4 for gradient in gradients)
    expected = formula(mixture, passes)
    for name, added in expected.items():
        if added is not None:
            torch.testing.assert_close(step.gradients[name], added, atol=2e-6, rtol=1e-3)
