"""The runs that every way of spreading must make like one process does, and how to compare them."""

from __future__ import annotations

import math

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

PARTS = {"slice_size": 2, "windows": 2, "iterations": 2}
STEPS = {"max_steps": 4, "adam_epsilon": 1e-6}
"""At the usual 1e-8, AdamW turns the rounding of a gradient that is nearly 0 (1e-9 here) into updates of up to 5e-5."""
SCHEDULED = {**STEPS, "lr_scheduler_type": "linear"}

FULL = {"policy": "full", "beta": 0.1, "parts": PARTS, "arguments": STEPS}
LORA = {**FULL, "policy": "lora"}
ADAPTER = {**FULL, "policy": "adapter"}
SKIPPING = {
    "parts": {"slice_size": 2},
    "arguments": {**SCHEDULED, "max_grad_norm": 0.5},
    "flat_steps": ["p2", "p3"],  # the second window has no signal
    "poisoned_step": 2,  # and the third gradient is not finite, on one rank
}


def make_adapter(model, folder):
    """An adapter to start from, with random weights."""
    policy = get_peft_model(AutoModelForCausalLM.from_pretrained(model), LoraConfig(target_modules="all-linear"))
    torch.manual_seed(5)
    for parameter in policy.parameters():
        if parameter.requires_grad:
            parameter.data.normal_(0, 0.1)
    policy.save_pretrained(folder)
    return str(folder)


def assert_same_training(ours, theirs, tolerance=1e-5):
    """The same completions, logs, weights and publications."""
    assert ours["lengths"] == theirs["lengths"]
    assert len(set(ours["lengths"])) > 1, "ranks decode for different numbers of steps"
    assert len(ours["logs"]) == len(theirs["logs"])
    for mine, other in zip(ours["logs"], theirs["logs"], strict=True):
        for name in ("loss", "grad_norm", "learning_rate", "kl"):
            value, expected = mine.get(name, 0.0), other.get(name, 0.0)
            assert math.isfinite(value) == math.isfinite(expected), (name, value, expected)
            assert not math.isfinite(expected) or abs(value - expected) < tolerance, (name, value, expected)
        for name in ("health/steps_without_signal", "health/non_finite_steps", "tokens/trained"):
            assert mine.get(name, 0) == other.get(name, 0), name
    for part in ("state", "published", "adapter"):
        assert list(ours[part]) == list(theirs[part])
        assert gap(ours[part], theirs[part]) < tolerance, part


def gap(ours, theirs):
    """The largest difference of any number."""
    return max((float((ours[name].float() - theirs[name].float()).abs().max()) for name in theirs), default=0.0)
