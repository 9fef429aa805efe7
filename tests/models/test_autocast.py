"""Float32 weights under autocast: products in bfloat16 in every pass, the rest in float32."""

from __future__ import annotations

import copy

import pytest
import torch
from policies import SEQUENCES, full, lora

from swift.models import load_policy, load_reference
from swift.models.attention.choice import choose_attention
from swift.models.attention.interface import enable_packed_attention, transformers_model
from swift.models.features import FeatureNetwork
from swift.models.forward import arrange
from swift.models.policy import check_policy
from swift.models.reference import FrozenReference
from swift.models.scoring import prepare_scoring, score_tokens
from swift.planning.devices import find_device
from swift.planning.kernels import as_on_gpu
from swift.planning.trace import Trace
from swift.rollout.engines.transformers import TransformersEngine
from swift.rollout.weights.policy import PolicyWeights
from swift.types import Request, SamplingParams

HALF, WHOLE = torch.bfloat16, torch.float32


def policy(model, make=full, **more):
    loaded = load_policy(make(model, torch_dtype="float32", autocast="bfloat16", **more))
    choose_attention(loaded)
    return loaded


class Types:
    """The types that a layer's product and the layer itself give in each pass."""

    def __init__(self, model):
        self.products, self.layers = [], []
        layer = transformers_model(model).model.layers[0]
        layer.mlp.up_proj.register_forward_hook(lambda module, args, out: self.products.append(out.dtype))
        layer.register_forward_hook(lambda module, args, out: self.layers.append(out.dtype))


def scored(model, device="cpu", **options):
    return score_tokens(model, arrange(model, SEQUENCES, device=device), **options)[0]


@pytest.mark.parametrize("make", [full, lora])
@pytest.mark.parametrize("prepare", [True, False])
def test_products_are_bfloat16_and_log_probs_residuals_and_gradients_float32(qwen2, make, prepare):
    model = policy(qwen2, make)
    if prepare:
        assert prepare_scoring(model) is None
    seen = Types(model)
    logprobs = scored(model)
    logprobs.sum().backward()
    assert logprobs.dtype == WHOLE and set(seen.products) == {HALF} and set(seen.layers) == {WHOLE}
    trained = [one for one in model.parameters() if one.requires_grad]
    assert {one.dtype for one in model.parameters()} == {one.grad.dtype for one in trained} == {WHOLE}


def test_recomputed_layers_are_those_of_the_forward_pass(qwen2):
    model = policy(qwen2)
    prepare_scoring(model)
    again = copy.deepcopy(model).train()
    again.gradient_checkpointing_enable({"use_reentrant": False})
    for one in (model, again):
        scored(one).square().sum().backward()
    for ours, theirs in zip(again.parameters(), model.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)


def test_reference_features_and_sampling_cast_as_well(qwen2):
    model = policy(qwen2)
    reference = load_reference(full(qwen2, torch_dtype="float32", autocast="bfloat16"), model)
    assert isinstance(reference, FrozenReference)
    choose_attention(reference.module)
    with reference.active() as module:
        seen = Types(module)
        theirs = scored(module)
    assert torch.equal(theirs, scored(model)) and set(seen.products) == {HALF}
    FeatureNetwork(reference, fractions=[0.5], norm="concat", method="last_token").of_sequences(SEQUENCES)
    assert len(seen.products) == 2 and set(seen.products) == {HALF}
    seen = Types(model)
    engine = TransformersEngine(model, eos_token_ids=[])
    (completion,) = engine.sample([Request("a", [3, 4], SamplingParams(max_new_tokens=3))])
    assert len(completion.token_ids) == 3 and len(seen.products) == 3 and set(seen.products) == {HALF}
    assert engine.capabilities.dtype == "bfloat16"


def test_an_engine_gets_weights_in_its_own_type(qwen2):
    model = policy(qwen2)
    sent = {name: tensor for bucket in PolicyWeights(model).buckets() for name, tensor in bucket.tensors}
    named = dict(model.named_parameters())
    assert {tensor.dtype for tensor in sent.values()} == {HALF}
    assert all(torch.equal(tensor, named[name].to(HALF)) for name, tensor in sent.items() if name in named)
    assert PolicyWeights(model).parameters() == {}, "it cannot read those of the trainer"


def test_a_gradient_is_nearer_to_that_of_float64_than_with_bfloat16_weights(qwen2):
    """Of the same weights; those of bfloat16 are not rounded here, because they are numbers of bfloat16."""
    rounded = {
        name: one.detach().to(HALF) for name, one in load_policy(full(qwen2, torch_dtype="float32")).named_parameters()
    }

    def gradient(model):
        with torch.no_grad():
            for name, one in model.named_parameters():
                one.copy_(rounded[name])
        logprobs = scored(model)
        (logprobs * torch.linspace(-1, 1, len(logprobs))).sum().backward()
        return torch.cat([one.grad.double().flatten() for one in model.parameters()])

    exact = gradient(load_policy(full(qwen2, torch_dtype="float32")).double())

    def error(model):
        return float((gradient(model) - exact).norm() / exact.norm())

    half, ours = error(load_policy(full(qwen2, torch_dtype="bfloat16"))), error(policy(qwen2))
    assert ours < half < 0.1


@pytest.mark.parametrize("recomputes", [False, True])
def test_the_plan_keeps_the_types_that_autocast_does(qwen2, recomputes):
    """Each module gives the same type without numbers as with them, in layers that are computed again, too."""

    def types(model, device):
        if recomputes:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        found = []
        for name, module in model.named_modules():

            def keep(module, args, output, name=name):
                first = output[0] if isinstance(output, tuple) else output
                found.append((name, getattr(first, "dtype", None)))

            module.register_forward_hook(keep)
        scored(model, device).sum().backward()
        assert {one.grad.dtype for one in model.parameters()} == {WHOLE}
        return found

    settings = full(qwen2, torch_dtype="float32", autocast="bfloat16")
    model = policy(qwen2)
    prepare_scoring(model)
    expected = types(model, "cpu")
    planned = check_policy(settings, weights=False).train()
    with Trace(find_device("h100-80gb")) as trace, as_on_gpu(trace):
        enable_packed_attention(planned, "flex")
        prepare_scoring(planned)
        assert types(planned, "meta") == expected
