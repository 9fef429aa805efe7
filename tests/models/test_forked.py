"""Completions that continue from the states of their prompts equal rows, in value and gradient."""

from __future__ import annotations

import copy
import functools
import random

import pytest
import torch
import transformers
from hybrids import FORKED, PADDED, hybrid
from policies import gradients_of

from swift.models.attention import choice, forked
from swift.models.attention.choice import choose_attention, choose_streams
from swift.models.attention.forked import enable_forking, forks, takes_streams
from swift.models.features import FeatureNetwork
from swift.models.forward import TokenSequence, arrange, completion_logits, pack, pad
from swift.models.reference import FrozenReference
from swift.models.scoring import prepare_scoring, score_tokens

CHUNKED = ("qwen3_5_text", "qwen3_next", "qwen3_5_moe_text", "olmo_hybrid")
"""Linear attention is computed in chunks, which begin at other tokens of a row.

Rows behind 29 tokens of padding differ as much from rows without: logits by 1.4e-4, gradients by 1.4e-5 in 60 layouts.
"""


def layouts(number, seed=0):
    """Random groups: prompts shorter than a convolution, completions longer than a chunk."""
    rng = random.Random(seed)

    def ids(count):
        return [rng.randrange(2, 97) for _ in range(count)]

    for _ in range(number):
        sequences = []
        for _ in range(rng.randint(1, 3)):
            prompt = ids(rng.choice([1, 2, 7, 20, rng.randint(1, 90)]))
            sequences += [
                TokenSequence(prompt, ids(rng.choice([1, 2, 5, rng.randint(1, 80)]))) for _ in range(rng.randint(1, 4))
            ]
        yield sequences


def rows(model, sequences):
    return torch.cat([completion_logits(model, pad([sequence])) for sequence in sequences])


def assert_forked_as_rows(arch, model, sequences):
    """Logits to a few roundings of their spread, and the gradient of all parameters together."""
    expected = rows(model, sequences)
    weights = torch.randn(expected.shape, generator=torch.Generator().manual_seed(0))
    theirs = gradients_of(model, expected * weights)
    if not forks(model):
        enable_forking(model)
    found = completion_logits(model, pack(sequences))
    assert (found - expected).abs().max() < (3e-4 if arch in CHUNKED else 1e-5) * expected.std()
    mine = gradients_of(model, found * weights)
    assert mine.keys() == theirs.keys()
    apart = sum((mine[name] - theirs[name]).double().square().sum() for name in mine) ** 0.5
    assert (
        apart
        < (5e-5 if arch in CHUNKED else 1e-5) * sum(theirs[name].double().square().sum() for name in theirs) ** 0.5
    )


@pytest.mark.parametrize("arch", FORKED)
@pytest.mark.parametrize("checkpointing", [False, True])
def test_forked_logits_and_gradients_are_those_of_rows(arch, checkpointing):
    model = hybrid(arch)
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    for sequences in layouts(2, seed=3 + checkpointing):
        assert_forked_as_rows(arch, model, sequences)


@pytest.mark.long
@pytest.mark.parametrize("arch", FORKED)
def test_200_random_layouts(arch):
    model = hybrid(arch)
    for sequences in layouts(200, seed=7):
        assert_forked_as_rows(arch, model, sequences)


def test_plans_know_them():
    assert set(FORKED) == choice.FORKED


@pytest.mark.parametrize("arch", FORKED)
def test_the_trial_lets_them_take_streams(arch):
    model = hybrid(arch)
    assert choose_attention(model) is not None
    assert choose_streams(model) is None
    assert forks(model) and takes_streams(model) and not model.is_gradient_checkpointing and model.training
    assert all(module.training for module in model.modules())
    assert not any(module._forward_hooks for module in model.modules())


@pytest.mark.parametrize("arch", PADDED)
def test_the_trial_refuses_states_that_are_wrong_or_lost(arch):
    model = hybrid(arch)
    assert "forked" in choose_streams(model)
    assert not forks(model) and not takes_streams(model)
    (sequences,) = layouts(1)
    assert not arrange(model, sequences).packed


def test_reentrant_checkpoints_forget_states():
    model = hybrid("lfm2")
    assert "use_reentrant" in choose_streams(model, unless="use_reentrant forgets states")
    assert not takes_streams(model)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("arch", ["qwen3_5_text", "lfm2_moe"])
def test_16_bits_pass_the_trial(arch, dtype):
    if (arch, dtype) == ("qwen3_5_text", torch.float16) and transformers.__version__.startswith("5.16"):
        pytest.skip("it normalises queries and keys in float16, where zeros of the padding have no gradient")
    assert choose_streams(hybrid(arch, dtype)) is None


def test_a_gradient_that_is_no_number_fails_the_trial(monkeypatch):
    """With right logits."""
    states = forked._Reader.recurrent_states.fget

    class Broken(torch.autograd.Function):
        @staticmethod
        def forward(ctx, value):
            return value.clone()

        @staticmethod
        def backward(ctx, gradient):
            return gradient * torch.nan

    def broken(self):
        return {number: Broken.apply(value) for number, value in states(self).items()}

    monkeypatch.setattr(forked._Reader, "recurrent_states", property(broken))
    assert "another gradient" in choose_streams(hybrid("qwen3_5_text"))


def test_positions_that_depend_on_the_longest_sequence_are_not_forked():
    model = hybrid("lfm2")
    model.config.rope_parameters = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    assert "longest sequence" in choose_streams(model)


@pytest.mark.parametrize("arch", ["qwen3_5_text", "lfm2", "mamba2"])
def test_adapters_and_scores(arch):
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(1)
    targets = ["in_proj"] if arch == "mamba2" else "all-linear"  # PEFT refuses its others
    model = get_peft_model(hybrid(arch), LoraConfig(target_modules=targets, init_lora_weights=False))
    (sequences,) = layouts(1, seed=5)
    ids = torch.tensor([token for sequence in sequences for token in sequence.completion_ids])
    expected = rows(model, sequences).log_softmax(-1).gather(1, ids[:, None])[:, 0]
    assert choose_streams(model) is None
    assert prepare_scoring(model) is None
    logprobs, _ = score_tokens(model, arrange(model, sequences))
    assert (logprobs - expected).abs().max() < 1e-4
    theirs, mine = gradients_of(model, expected), gradients_of(model, logprobs)
    assert mine.keys() == theirs.keys() and all("lora_" in name for name in mine)
    for name, gradient in theirs.items():
        assert torch.allclose(mine[name], gradient, atol=1e-4 * float(gradient.abs().max()))


def test_hidden_states_are_those_of_the_stream():
    """What EBFT's features are made of."""
    sequences = [TokenSequence([5, 6, 7], [8, 9]), TokenSequence([5, 6, 7], [10]), TokenSequence([11], [12, 13, 14])]

    def features(model):
        network = FeatureNetwork(FrozenReference(model), fractions=[0.5, 1.0], norm="concat", method="last_token")
        return network.of_sequences(sequences)

    model = hybrid("qwen3_5_text")
    expected = features(model)
    assert choose_streams(model) is None
    assert torch.allclose(features(model), expected, atol=1e-4)


def test_a_model_goes_on_taking_rows_and_decoding():
    model = hybrid("lfm2").eval()
    (sequences,) = layouts(1, seed=2)
    expected = rows(model, sequences)
    assert choose_streams(model) is None
    assert torch.equal(rows(model, sequences), expected)
    prompt = torch.tensor([[5, 6, 7, 8]])
    assert model.generate(prompt, max_new_tokens=4, do_sample=False).shape == (1, 8)


@pytest.mark.parametrize("arch", ["qwen3_5_text", "mamba2"])
def test_a_copy_takes_streams_of_its_own(arch):
    model = hybrid(arch)
    assert choose_streams(model) is None
    (sequences,) = layouts(1, seed=9)
    copied = copy.deepcopy(model)
    expected = completion_logits(model, pack(sequences))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert torch.equal(completion_logits(copied, pack(sequences)), expected)


@pytest.mark.parametrize("arch", FORKED)
def test_layers_that_are_computed_again_after_the_trial_keep_states(arch):
    """The trial has the first layers only, and transformers drops the states of others, with a warning."""
    model = hybrid(arch)
    assert choose_streams(model) is None
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    (sequences,) = layouts(1, seed=9)
    assert_forked_as_rows(arch, model, sequences)


def test_a_layer_that_forgets_states_is_named():
    model = hybrid("lfm2")
    assert choose_streams(model) is None
    (sequences,) = layouts(1, seed=9)
    model.model.layers[3].forward = functools.partial(forgetful, model.model.layers[3])
    with pytest.raises(NotImplementedError, match="layer 3 forgets"):
        completion_logits(model, pack(sequences))


def forgetful(layer, hidden_states, past_key_values=None, **others):
    """A layer whose completions do not see the states of their prompts."""
    keeps = type(past_key_values).__name__ == "PromptStates"
    return type(layer).forward(layer, hidden_states, past_key_values=past_key_values if keeps else None, **others)
