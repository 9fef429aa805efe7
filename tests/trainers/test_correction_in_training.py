"""The weights for sampler-trainer mismatch act in the step as they do on paper."""

import math
from dataclasses import replace

import pytest
from grpo_parts import make_trainer

from swift.trainers.grpo.settings import CorrectionSettings


def gradients(folder, output_dir, *, shift, comparable=True, **correction):
    """Gradients of one global batch whose sampler log-probs are all moved by `shift`."""
    trainer = make_trainer(folder, output_dir)
    settings = CorrectionSettings(**correction)
    trainer.logprobs.settings = replace(trainer.settings, correction=settings, comparable_sampling=comparable)
    trainer.create_optimizer()
    batch = next(trainer.pipeline.steps(trainer.progress))
    for sample in batch.samples:
        sample.sampler_logprobs = sample.sampler_logprobs + shift
    trainer.training_step(trainer.model, batch)
    return {name: parameter.grad for name, parameter in trainer.model.named_parameters()}


@pytest.mark.parametrize(
    ("shift", "settings", "factor"),
    [
        (0.0, {"mode": "token_truncate"}, 1.0),
        (-0.3, {"mode": "token_truncate"}, math.exp(0.3)),
        (-1.5, {"mode": "token_truncate"}, 2.0),
        (-1.5, {"mode": "token_mask"}, 0.0),
        (-0.3, {"mode": "sequence_truncate"}, math.exp(0.3)),
        (-0.3, {"mode": "sequence_truncate", "sequence_ratio": "sum"}, 2.0),
        (0.3, {"mode": "none"}, 1.0),
    ],
)
def test_a_constant_gap_scales_the_gradient(nano_folders, tmp_path, shift, settings, factor):
    plain = gradients(nano_folders["qwen2"], tmp_path / "plain", shift=0.0, mode="none")
    corrected = gradients(nano_folders["qwen2"], tmp_path / "corrected", shift=shift, **settings)
    largest = max(float(gradient.abs().max()) for gradient in plain.values())
    assert largest > 0
    for name, gradient in plain.items():
        assert (corrected[name] - factor * gradient).abs().max() < 2e-5 * largest, name


def test_truncated_sampling_is_corrected_too_and_said_to_be_biased(nano_folders, tmp_path):
    settings = {"shift": -0.3, "mode": "token_truncate"}
    corrected = gradients(nano_folders["qwen2"], tmp_path / "whole", **settings)
    biased = gradients(nano_folders["qwen2"], tmp_path / "truncated", comparable=False, **settings)
    assert all((biased[name] == corrected[name]).all() for name in corrected)
    trainer = make_trainer(nano_folders["qwen2"], tmp_path / "logged")
    trainer.logprobs.settings = replace(trainer.settings, comparable_sampling=False)
    trainer.create_optimizer()
    trainer.training_step(trainer.model, next(trainer.pipeline.steps(trainer.progress)))
    values = trainer.metrics.commit()
    assert values["mismatch/biased"] == 1.0
    assert values["mismatch/logp_abs_diff_max"] < 1e-4


def test_log_probs_at_another_temperature_correct_nothing(nano_folders, tmp_path):
    trainer = make_trainer(nano_folders["qwen2"], tmp_path)
    settings = CorrectionSettings(mode="token_truncate")
    trainer.logprobs.settings = replace(trainer.settings, correction=settings, correctable_sampling=False)
    assert trainer.step.correction(None, None) is None
