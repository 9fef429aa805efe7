"""On-policy distillation in a GRPO trainer: a frozen teacher's log-probs are part of the advantages of tokens."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from grpo_parts import all_different, logs_of, make_trainer, one_step, policy_of
from transformers import AutoModelForCausalLM

from swift.models.reference import AdapterOffReference, FrozenReference
from swift.rl.losses import LossConfig

TEMPERATURE, WEIGHT, RATE = 1.3, 0.7, 0.05


@pytest.fixture(scope="module")
def folder(nano_folders):
    return nano_folders["qwen2"]


def teacher_of(folder):
    """Another model than the policy, of the same tokens."""
    torch.manual_seed(5)
    model = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return model


def equal(completion, prompt):
    return 1.0


def logprobs_of(model, sample):
    """By transformers alone, at the training temperature."""
    ids = torch.tensor([[*sample.prompt_ids, *sample.token_ids]])
    logits = model(input_ids=ids).logits[0, sample.prompt_ids.size - 1 : -1] / TEMPERATURE
    return logits.log_softmax(-1).gather(1, torch.tensor(sample.token_ids).long()[:, None])[:, 0]


@pytest.mark.parametrize("reward", [all_different, equal], ids=["rewards", "teacher-alone"])
def test_two_updates_are_those_of_the_formula_in_plain_torch(folder, tmp_path, reward):
    """GRPO's loss on paper, with gradient descent without clipping of gradients."""
    trainer = make_trainer(
        folder, tmp_path, teacher=FrozenReference(teacher_of(folder)), teacher_kl_coef=WEIGHT, reward=reward,
        iterations=2, temperature=TEMPERATURE, max_samples=3, learning_rate=RATE, optim="sgd", max_grad_norm=0.0,
    )  # fmt: skip
    trainer.train()
    samples = trainer.pipeline.batch.samples
    assert all((sample.advantage == 0) == (reward is equal) for sample in samples)

    model, teacher = AutoModelForCausalLM.from_pretrained(folder), teacher_of(folder)
    losses, old, distances = [], None, []
    with torch.no_grad():
        taught = [logprobs_of(teacher, sample) for sample in samples]
    for _ in range(2):
        new = [logprobs_of(model, sample) for sample in samples]
        old = old or [row.detach() for row in new]
        loss = 0.0
        for sample, lp, lp_old, lp_teacher in zip(samples, new, old, taught, strict=True):
            advantages = sample.advantage + WEIGHT * (lp_teacher - lp_old)
            ratio = (lp - lp_old).exp()
            loss -= torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages).mean() / len(samples)
        model.zero_grad()
        loss.backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= RATE * parameter.grad
        losses.append(loss.item())
        gaps = torch.cat(taught) - torch.cat(old)
        distances.append(float((gaps.exp() - gaps - 1).mean()))
    assert [row["loss"] for row in logs_of(trainer)] == pytest.approx(losses, abs=1e-6)
    assert [row["teacher_kl"] for row in logs_of(trainer)] == pytest.approx(distances, rel=1e-5)
    start = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    moved = 0.0
    for name, ours in trainer.model.state_dict().items():
        assert torch.allclose(ours, model.state_dict()[name], atol=1e-6, rtol=0), name
        moved = max(moved, float((ours - start[name]).abs().max()))
    assert moved > 1e-3


def test_a_teacher_that_is_the_policy_changes_nothing(make, folder):
    """A LoRA policy starts as its base, which teaches it: all log-ratios are 0."""
    plain = one_step(make(model=policy_of(folder, lora={"lora_dropout": 0.0})))
    model = policy_of(folder, lora={"lora_dropout": 0.0})
    taught = one_step(make(model=model, teacher=AdapterOffReference(model), teacher_kl_coef=1.0))
    assert taught.values["teacher_kl"] == pytest.approx(0.0, abs=1e-9)
    gradients = {name: gradient for name, gradient in plain.gradients.items() if gradient is not None}
    assert gradients
    for name, gradient in gradients.items():
        assert torch.allclose(taught.gradients[name], gradient, atol=1e-6, rtol=1e-4), name


def test_reference_and_teacher_are_two_models(make, folder):
    """The teacher is that of the KL and of the advantages at once, or of one of the two."""
    both = [FrozenReference(teacher_of(folder)), FrozenReference(teacher_of(folder))]
    values = one_step(make(loss=LossConfig(beta=0.1), reference=both[0], teacher=both[1], teacher_kl_coef=1.0)).values
    assert values["kl"] == pytest.approx(values["teacher_kl"], rel=1e-5)
    assert values["kl"] > 1e-3
    alone = one_step(make(loss=LossConfig(beta=0.1), reference=both[0])).values
    assert "teacher_kl" not in alone and alone["kl"] == values["kl"]


def test_a_teacher_goes_with_a_kl_in_the_reward(make, folder):
    trainer = make(
        reference=FrozenReference(teacher_of(folder)), teacher=FrozenReference(teacher_of(folder)), teacher_kl_coef=1.0,
        loss=LossConfig(beta=0.0),
    )  # fmt: skip
    batches = trainer.pipeline.batches
    batches.config, batches.kl_of = replace(batches.config, reward_kl=0.5), trainer.logprobs.reward_kl
    trainer.train()
    for row in logs_of(trainer):
        assert row["kl_in_reward"] > 0 and row["teacher_kl"] > 1e-3 and "kl" not in row


def saving_run(make, folder):
    return make(
        teacher=FrozenReference(teacher_of(folder)), teacher_kl_coef=0.5, num_global_batches=2, iterations=2,
        max_steps=4, max_samples=3, learning_rate=1e-2, save_strategy="steps", save_steps=1,
    )  # fmt: skip


def test_a_resumed_run_is_equal_to_the_last_bit(make, folder):
    straight = saving_run(make, folder)
    straight.train()
    checkpoint = Path(straight.args.output_dir) / "checkpoint-1"
    resumed = saving_run(make, folder)
    resumed.load_pipeline_state(checkpoint)
    kept = [sample.teacher_logprobs for sample in resumed.pipeline.batch.samples]
    assert any(values is not None for values in kept), "what is known of the pending batch is in the checkpoint"
    resumed.train(resume_from_checkpoint=str(checkpoint))
    for name, tensor in straight.model.state_dict().items():
        assert torch.equal(resumed.model.state_dict()[name], tensor), name
    ours, theirs = ([(row["loss"], row["teacher_kl"]) for row in logs_of(one)] for one in (resumed, straight))
    assert ours[-3:] == theirs[1:]


def test_a_student_without_rewards_comes_closer_to_a_trained_teacher(make, folder):
    """Groups of one completion; the teacher has learnt to go on with the even tokens."""
    teacher = AutoModelForCausalLM.from_pretrained(folder)
    optimizer = torch.optim.Adam(teacher.parameters(), lr=1e-2)
    random = np.random.default_rng(0)
    for _ in range(30):
        ids = torch.from_numpy(2 * random.integers(0, 20, (16, 12)))
        optimizer.zero_grad()
        teacher(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
    trainer = make(
        teacher=FrozenReference(teacher), teacher_kl_coef=1.0, reward=equal, generations=1, global_batch=32, prompts=32,
        max_samples=32, max_steps=25, learning_rate=1e-2,
    )  # fmt: skip
    trainer.train()
    distances = [row["teacher_kl"] for row in logs_of(trainer)]
    assert np.mean(distances[-3:]) < 0.5 * distances[0], distances
