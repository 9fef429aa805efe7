"""What `swift plan` foresees is what runs on the simulated GPU allocate, within a tenth."""

import random
from types import SimpleNamespace

import numpy as np
import pytest
from gpu_runs import GRPO, on_gpu
from transformers import AutoConfig, AutoModelForCausalLM

from swift.arguments import parse
from swift.arguments.derived import Machine
from swift.models.tiny import build_tiny
from swift.planning import command
from swift.planning.devices import DEVICES
from swift.rollout.samples import TrainSample

__all__ = ["on_gpu"]

WITHOUT = GRPO.replace(" --num_generations 4", "").replace(" --max_completion_length 8", "")
BASE = f"{WITHOUT} --parity_check off --log_entropy false"
"""Entropies for the log would be computed in every tenth step, of which one is traced, and none is measured."""


def settings(seed, count):
    """Random ones."""
    choices = {
        "tuner_type": ["full", "lora"],
        "torch_dtype": ["float32", "bfloat16"],
        "beta": [0, 0.04],
        "gradient_checkpointing": ["true", "false"],
        "num_generations": [2, 4, 8],
        "max_completion_length": [16, 32, 48],
        "top_entropy_quantile": [1.0, 1.0, 0.5],
        "vocabulary": [263, 263, 5000],
        "max_tokens_per_micro_batch": [150, 400, 2000],
        "optim": ["adamw_torch_fused", "adamw_torch_fused", "adamw_torch", "adamw_cpu"],
    }
    draw = random.Random(seed)
    return [{name: draw.choice(values) for name, values in choices.items()} for _ in range(count)]


@pytest.fixture
def model(tmp_path):
    """Makes a small model with a vocabulary of a given size."""

    def make(vocabulary):
        folder = build_tiny(tmp_path / "model", size="tiny")
        config = AutoConfig.from_pretrained(folder)
        if vocabulary > config.vocab_size:
            config.vocab_size = vocabulary
            AutoModelForCausalLM.from_config(config).save_pretrained(folder)
        return folder

    return make


class Recorded:
    """The samples of a step of a run; where one micro-batch holds them, all set the threshold of the top entropies."""

    def __init__(self, rows, args):
        prompts = {group: prompt for group, prompt, _, _ in rows}
        tokens = sum(prompts.values()) + sum(length - 1 for _, _, length, _ in rows)
        everyone = args.top_entropy_quantile < 1 and tokens <= args.max_tokens_per_micro_batch
        self.rows = [(*sizes, advantage or float(everyone)) for *sizes, advantage in rows]

    def samples(self):
        return [
            TrainSample(
                group=group,
                prompt_ids=np.full(prompt, group, np.int32),
                token_ids=np.zeros(length, np.int32),
                sampler_logprobs=np.zeros(length, np.float32),
                trained=np.ones(length, bool),
                advantage=advantage,
            )
            for group, prompt, length, advantage in self.rows
        ]


def compare(on_gpu, model, monkeypatch, given):
    """Bytes that were measured and foreseen."""
    given = dict(given)
    folder = model(given.pop("vocabulary"))
    flags = " ".join(f"--{name} {value}" for name, value in given.items())
    words = BASE.replace("--max_tokens_per_micro_batch 60", flags)
    code, err, found = on_gpu(words, model=folder, steps=2)
    assert code == 0, err[-3000:]
    plugin = on_gpu.folder / "plugin.py"
    asked = SimpleNamespace(prompt_tokens=8, num_rows=None, price_per_hour=None)
    words = [*words.format(plugin=plugin).split()[1:], "--model", str(folder), "--dataset", str(plugin)]
    args = parse("rlhf", words, {}, machine=Machine(True, 2)).args
    monkeypatch.setattr(command, "kernel_of", lambda args: None)  # masked SDPA, as on the simulated GPU
    monkeypatch.setattr(command, "shape_of", lambda *rest: Recorded(found["samples"], args))
    cost = command.plan_grpo(args, DEVICES["h100-80gb"], 1, asked).cost

    return [
        (found["training_bytes"], cost.training),
        (found["update_bytes"], cost.update),
        (found["resident_bytes"], cost.resident),
    ]


@pytest.mark.parametrize("given", settings(1, 3))
def test_three_settings(on_gpu, model, monkeypatch, given):
    for measured, foreseen in compare(on_gpu, model, monkeypatch, given):
        assert foreseen == pytest.approx(measured, rel=0.1)


@pytest.mark.long
@pytest.mark.parametrize("given", settings(2, 60))
def test_sixty_settings(on_gpu, model, monkeypatch, given):
    for measured, foreseen in compare(on_gpu, model, monkeypatch, given):
        assert foreseen == pytest.approx(measured, rel=0.1)
