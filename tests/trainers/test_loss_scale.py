"""Policies in float16: a scaled loss keeps small gradients, and weights move as those of float32."""

from __future__ import annotations

import pytest
import torch
from grpo_parts import make_trainer, policy_of

from swift.errors import NumericError
from swift.trainers.grpo import trainer as trainer_module
from swift.trainers.grpo.trainer import NON_FINITE_LIMIT
from swift.trainers.optimizers.loss_scale import LOSS_SCALE, clip_scaled, loss_scale_of
from swift.trainers.optimizers.master_weights import keep_master_weights

TOKENS = 1_000_000
"""Of a step, over which the loss is normalised."""


def gradient_of(folder, dtype, scale=1.0):
    model = policy_of(folder, dtype=dtype)
    torch.manual_seed(0)
    ids = torch.randint(3, 250, (4, 24))
    logprobs = model(input_ids=ids).logits[:, :-1].float().log_softmax(-1).gather(-1, ids[:, 1:, None])
    (scale * (logprobs.squeeze(-1) * torch.linspace(-1, 1, 23)).sum() / TOKENS).backward()
    return torch.cat([parameter.grad.float().flatten() / scale for parameter in model.parameters()])


def test_what_float16_loses_the_scale_keeps(nano_folders):
    """The figures of models of this size; without a scale float16 loses nearly all of it."""
    folder = nano_folders["qwen2"]
    exact = gradient_of(folder, torch.float32)

    def error(*how):
        return float((gradient_of(folder, *how) - exact).norm() / exact.norm())

    assert error(torch.float16) > 0.2
    assert error(torch.float16, LOSS_SCALE) < 5e-3 < error(torch.bfloat16)


@pytest.mark.parametrize("max_norm", [0.0, 0.05, 1e3])
def test_masters_and_float32_weights_get_the_clipped_gradient_without_the_scale(max_norm):
    torch.manual_seed(0)
    half, whole = torch.randn(7, 5).half(), torch.randn(64)
    gradients = torch.randn(7, 5) / 8, torch.randn(64) / 8

    def stepped(first, scale):
        weights = [torch.nn.Parameter(first), torch.nn.Parameter(whole.clone())]
        optimizer = torch.optim.SGD(weights, lr=1.0)
        keep_master_weights(optimizer)
        for weight, gradient in zip(weights, gradients, strict=True):
            weight.grad = (gradient * scale).to(weight.dtype)
        if scale == 1:
            norm = torch.nn.utils.clip_grad_norm_(weights, max_norm or torch.inf)
        else:
            norm = clip_scaled(weights, optimizer, scale=scale, max_norm=max_norm)
        optimizer.step()
        return norm, weights

    expected_norm, expected = stepped(half.float(), 1)
    norm, found = stepped(half.clone(), 1024.0)
    assert norm == pytest.approx(float(expected_norm), rel=1e-3)
    assert torch.allclose(found[0].float(), expected[0], rtol=1e-3, atol=1e-3)
    assert torch.allclose(found[1], expected[1], rtol=1e-3, atol=1e-5)


def run(folder, output, dtype, **options):
    model = policy_of(folder, dtype=dtype, lora=options.pop("lora", None))
    before = {name: weight.detach().float().clone() for name, weight in model.named_parameters()}
    trainer = make_trainer(
        folder, output, model=model, max_steps=2, logging_steps=1, learning_rate=1e-3, max_grad_norm=0.05, **options
    )
    trainer.train()
    moved = {name: weight.detach().float() - before[name] for name, weight in model.named_parameters()}
    return trainer, torch.cat([one.flatten() for one in moved.values()])


@pytest.mark.parametrize("lora", [None, {"r": 4}])
def test_a_run_in_float16_moves_as_one_in_float32(nano_folders, tmp_path, lora):
    folder = nano_folders["qwen2"]
    trainer, moved = run(folder, tmp_path / "half", torch.float16, lora=lora)
    assert trainer.step.loss_scale == LOSS_SCALE == loss_scale_of(trainer.model)
    exact, expected = run(folder, tmp_path / "whole", torch.float32, lora=lora)
    assert exact.step.loss_scale == 1
    norms = [[row["grad_norm"] for row in one.state.log_history if "grad_norm" in row] for one in (trainer, exact)]
    assert norms[0][0] == pytest.approx(norms[1][0], rel=2e-2) and norms[1][0] > 0.05
    assert torch.cosine_similarity(moved, expected, dim=0) > 0.9


def test_an_overflow_is_a_step_that_is_left_out(nano_folders, tmp_path, monkeypatch):
    monkeypatch.setattr(trainer_module, "loss_scale_of", lambda model: 2.0**40)
    trainer, moved = run(nano_folders["qwen2"], tmp_path, torch.float16)
    assert NON_FINITE_LIMIT > 2 and not moved.any()
    assert [row["health/nan_skips"] for row in trainer.state.log_history if "health/nan_skips" in row] == [1.0, 1.0]


def test_overflows_in_a_row_are_counted_across_a_resume(nano_folders, tmp_path, monkeypatch):
    monkeypatch.setattr(trainer_module, "loss_scale_of", lambda model: 2.0**40)
    monkeypatch.setattr(trainer_module, "NON_FINITE_LIMIT", 3)
    folder = nano_folders["qwen2"]
    run(folder, tmp_path, torch.float16, save_strategy="steps", save_steps=2)
    saved = tmp_path / "checkpoint-2"
    trainer = make_trainer(folder, tmp_path, model=policy_of(folder, dtype=torch.float16), max_steps=4)
    trainer.load_pipeline_state(saved)
    with pytest.raises(NumericError, match="not finite for 3 updates in a row, the last at step 3"):
        trainer.train(resume_from_checkpoint=str(saved))
