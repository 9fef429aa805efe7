"""Token budgets of micro-batches: given, or from memory; and gradients that stay as they are."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from grpo_parts import one_step, passes_of, relative_difference
from torch import nn
from transformers import AutoConfig

from swift.models.activation_memory import ModelShape, activation_bytes
from swift.models.attention.interface import enable_packed_attention
from swift.models.forward import TokenSequence, completion_logits, pack
from swift.models.tiny import build_tiny
from swift.rollout.samples import TrainSample
from swift.trainers import token_budget
from swift.trainers.micro_batches import Limits
from swift.trainers.token_budget import MicroBatchPlanner, expected_bytes, tokens_that_fit


class Ranks:
    """`world_size` ranks; the others say `others`."""

    def __init__(self, *others):
        self.rank, self.world_size, self.others = 0, 1 + len(others), others

    def all_gather(self, value):
        return [value, *self.others]

    def broadcast(self, value):
        return value


def stepped(trainer):
    """Gradients of a global batch, and (completions, tokens) of each forward pass."""
    passes = passes_of(trainer, with_tokens=True)
    return one_step(trainer).gradients, passes


def test_a_limit_of_tokens_makes_micro_batches_larger_than_the_device_batch_or_smaller(make):
    """Two prompts of 3 and 4 tokens with four completions of 8: 31 and 32 tokens."""
    expected, by_samples = stepped(make(per_device=2, max_samples=2))
    assert [samples for samples, _ in by_samples] == [2, 2, 2, 2]
    for tokens, found in ((63, [(8, 63)]), (40, [(4, 32), (4, 31)]), (18, [(2, 18), (2, 18), (2, 17), (2, 17)])):
        trainer = make(per_device=2, max_samples=None, max_tokens=tokens)
        trainer.planner.budget = lambda **_: pytest.fail("memory was measured")
        gradients, passes = stepped(trainer)
        assert passes == found and trainer.planner.fitting_tokens is None
        assert relative_difference(gradients, expected) < 1e-6
    for tokens, most in ((18, 2), (63, 3)):
        trainer = make(max_samples=3, max_tokens=tokens)
        assert max(samples for samples, _ in stepped(trainer)[1]) == most, "both limits hold"


def test_free_memory_is_the_budget_where_none_is_given(make):
    expected, whole = stepped(make(per_device=1, max_samples=None))
    assert [samples for samples, _ in whole] == [8], "memory for all, whatever the device batch is"
    trainer = make(max_samples=None)
    trainer.planner.budget = lambda **_: 20
    gradients, cut = stepped(trainer)
    assert [samples for samples, _ in cut] == [2, 2, 2, 2]
    assert relative_difference(gradients, expected) < 1e-6


def test_on_an_accelerator_a_device_batch_of_the_longest_bounds_it_too(nano_folders):
    made = planner(nano_folders["qwen2"])
    made.fitting_tokens = 1000
    samples = [
        TrainSample(
            group=i,
            prompt_ids=np.arange(5),
            token_ids=np.arange(length),
            sampler_logprobs=np.zeros(length, dtype=np.float32),
            trained=np.ones(length, dtype=bool),
            advantage=1.0,
        )
        for i, length in enumerate([15, 4, 4, 4, 4, 4])
    ]

    def sizes():
        plan = made.plan(samples, range(6), [True] * 6)
        return sorted(
            sum(samples[i].prompt_ids.size + samples[i].token_ids.size - 1 for i in one)
            for one in plan.micro_batches[0]
        )

    assert made.plan(samples, []).micro_batches == [[]], "groups may have come before the last arrival"
    assert sizes() == [19 + 5 * 8]
    made.device = torch.device("cuda")
    assert len(sizes()) == 2
    assert max(sizes()) <= 2 * (5 + 15)


def test_on_a_cpu_activations_are_bounded(nano_folders, monkeypatch):
    made = planner(nano_folders["qwen2"])
    per_token = activation_bytes(ModelShape.of(made.model.config), element=4, checkpointing=False, whole_logits=True)
    found = made.budget(whole_logits=True, has_state=True)
    assert found == (1 << 30) // per_token > token_budget.CPU_TOKENS
    monkeypatch.setattr(token_budget, "CPU_BYTES", 0)
    assert made.budget(whole_logits=True, has_state=True) == token_budget.CPU_TOKENS
    monkeypatch.setattr(token_budget, "free_bytes", lambda device: 1000 * per_token)
    assert made.budget(whole_logits=True, has_state=True) < 1000


def test_completions_above_the_limit_are_said_once(make):
    trainer = make(max_samples=None, max_tokens=10)
    said = []
    trainer.planner._report = said.append
    _, passes = stepped(trainer)
    assert [samples for samples, _ in passes] == [1] * 8
    trainer.training_step(trainer.model, next(trainer.pipeline.steps(trainer.progress)))
    (line,) = said
    assert line.startswith("micro-batches: 4 completions over 10 tokens")


def planner(folder, ranks=None):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder)
    return MicroBatchPlanner(
        model, ranks or Ranks(), Limits(), per_device=2, device=torch.device("cpu"), say=lambda line: None
    )


@pytest.mark.parametrize(
    ("now", "others", "kept"), [(1000, [], 900), (500, [], 900), (449, [], 449), (1000, [300], 300)]
)
def test_a_resumed_run_keeps_its_limit_unless_far_less_fits_on_some_rank(nano_folders, now, others, kept):
    made = planner(nano_folders["qwen2"], Ranks(*others))
    made.fitting_tokens = 900
    made.budget = lambda **_: now
    made.measure(whole_logits=False, has_state=True)
    assert made.fitting_tokens == kept


def test_the_limit_is_in_the_state_of_the_run(make):
    trainer = make(save_strategy="steps", save_steps=1, max_steps=1)
    trainer.train()
    found = trainer.planner.fitting_tokens
    assert found > 10_000
    resumed = make()
    resumed.load_pipeline_state(Path(trainer.args.output_dir) / "checkpoint-1")
    assert resumed.planner.fitting_tokens == found


def test_what_fits_leaves_room_for_gradients_optimizer_and_surprises():
    assert tokens_that_fit(1000, expected=300, per_token=5) == 100  # (0.8 * 1000 - 300) / 5
    assert tokens_that_fit(1000, expected=5000, per_token=5) == 50  # a quarter in any case
    assert tokens_that_fit(10, expected=0, per_token=50) == 1
    layers = nn.Linear(10, 3), nn.Linear(10, 3).to(torch.bfloat16)
    layers[1].bias.requires_grad_(False)
    parameters = [one for layer in layers for one in layer.parameters()]
    assert expected_bytes(parameters, has_state=True) == 33 * 4 + 30 * 2 + 30 * 4
    assert expected_bytes(parameters, has_state=False) == 33 * 4 + 30 * 2 + 63 * 8 + 30 * 4


def test_the_work_of_a_token_is_that_of_the_model(tmp_path):
    shape = ModelShape.of(config_of(tmp_path, "small"))
    assert shape == ModelShape(512, 8, 512, 128, 1536, 263)
    linear_flops, attention_flops, head_flops = shape.forward_flops()
    assert linear_flops == 2 * 8 * (512 * (2 * 512 + 2 * 128) + 3 * 512 * 1536)
    assert attention_flops == 8 * 4 * 512
    assert head_flops == 2 * 512 * 263


def config_of(folder, size):
    return AutoConfig.from_pretrained(build_tiny(folder / size, size=size))


def test_a_model_with_other_names_and_lists_has_a_shape_too():
    config = SimpleNamespace(
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=[4, 8],
        moe_intermediate_size=32,
        num_experts_per_tok=2,
        vocab_size=100,
    )
    config.get_text_config = lambda: config
    assert ModelShape.of(config) == ModelShape(64, 2, 64, 64, 64, 100)
    sizes = {"num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 32, "num_hidden_layers": 2}
    sizes |= {"head_dim": 8, "global_head_dim": 16, "intermediate_size": 48, "vocab_size": 100}
    gemma = AutoConfig.for_model("gemma4_text", **sizes)
    assert ModelShape.of(gemma) == ModelShape(32, 2, 64, 32, 48, 100), "the last layer has wider heads"


@pytest.mark.parametrize("arch", ["qwen2", "llama", "qwen3"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_estimate_is_above_what_a_forward_pass_keeps_and_not_by_far(tmp_path, arch, dtype, checkpointing):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(build_tiny(tmp_path / arch, arch, "tiny"), dtype=dtype)
    enable_packed_attention(model)
    model.train()
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    ids = list(range(64))
    tokens = pack([TokenSequence(ids, ids) for _ in range(8)])
    parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            kept[storage.data_ptr()] = storage  # alive, so that no other gets its address
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = completion_logits(model, tokens).float().logsumexp(-1).sum()
    found = sum(storage.nbytes() for storage in kept.values()) / tokens.inputs["input_ids"].numel()
    estimate = activation_bytes(
        ModelShape.of(model.config), element=dtype.itemsize, checkpointing=checkpointing, whole_logits=True
    )
    assert loss.isfinite()
    assert found < estimate < (5 if checkpointing else 2) * found
