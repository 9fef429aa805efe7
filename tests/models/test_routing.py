"""Routes of mixtures of experts: recorded, replayed, and tried before they are relied on."""

from __future__ import annotations

import copy

import pytest
import torch
from hybrids import hybrid
from torch.nn import functional as F

from swift.models.attention.choice import choose_attention
from swift.models.forward import TokenSequence, completion_logits, pack, pad
from swift.models.routing import UNKNOWN, routing_gap, routing_of

SEQUENCES = [
    TokenSequence(list(range(3, 9)), [30, 31, 32, 33]),
    TokenSequence(list(range(3, 9)), [40, 41]),
    TokenSequence([20, 21], [50, 51, 52, 53, 54, 55]),
]
FOUR = {"num_local_experts": 4, "num_experts_per_tok": 2}
MIXTURES = {
    "qwen3_moe": {},
    "mixtral": FOUR,
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
    "gpt_oss": FOUR,
    "deepseek_v3": {"n_routed_experts": 4, "num_experts_per_tok": 2, "first_k_dense_replace": 1},
}
HYBRIDS = ("qwen3_next", "qwen3_5_moe_text", "lfm2_moe")


def mixture(arch, small_model, **settings):
    model = hybrid(arch, **settings) if arch in HYBRIDS else small_model(arch, **{**MIXTURES[arch], **settings})
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("gate.weight", "router.weight")):
                parameter.normal_(0, 1)
    return model


def routers(model):
    return [module for name, module in model.named_modules() if name.endswith((".gate", ".router"))]


def record(model, sequences=SEQUENCES):
    """Routes [T, L, K] of padded rows, and logits."""
    routing = routing_of(model)
    with routing.recording() as recording:
        logits = completion_logits(model, pad(sequences))
    return recording.routes(), logits


def replayed(model, routes, sequences=SEQUENCES):
    routing = routing_of(model)
    routing.replay(routes)
    try:
        return completion_logits(model, pad(sequences))
    finally:
        routing.replay(None)


@pytest.mark.parametrize("arch", [*MIXTURES, *HYBRIDS])
def test_a_mixture_uses_the_experts_of_another_with_gate_weights_of_its_own(arch, small_model):
    model = mixture(arch, small_model)
    other = copy.deepcopy(model)
    with torch.no_grad():
        for router in routers(other):
            router.weight.add_(0.5 * torch.randn_like(router.weight))
    assert routing_gap(model) is None
    theirs, _ = record(other)
    mine, own = record(model)
    assert not torch.equal(theirs.sort(-1).values, mine.sort(-1).values)
    assert torch.allclose(replayed(model, mine), own, atol=1e-6)
    seen = []
    hooks = [router.register_forward_hook(lambda _, __, output: seen.append(output[1:])) for router in routers(model)]
    model.zero_grad()
    logits = replayed(model, theirs)
    for hook in hooks:
        hook.remove()
    assert len(seen) == theirs.shape[1] and not torch.allclose(logits, own, atol=1e-4)
    for layer, (weights, indices) in enumerate(seen):
        assert torch.equal(indices, theirs[:, layer])
        assert weights.requires_grad
    logits.square().sum().backward()
    assert all(router.weight.grad.norm() > 1e-4 for router in routers(model))


@pytest.mark.parametrize("arch", ["qwen3_moe", "mixtral", "gpt_oss"])
def test_gate_weights_are_those_of_the_scores_of_replayed_experts(arch, small_model):
    model = mixture(arch, small_model, norm_topk_prob=True)
    routing, router = routing_of(model), routers(model)[0]
    name = next(name for name, module in model.named_modules() if module is router)
    block = model.get_submodule(name.rpartition(".")[0])
    hidden = torch.randn(1, 5, 32)
    wanted = torch.tensor([[0, 1], [3, 2], [1, 3], [0, 2], [2, 1]])
    seen = []
    router.register_forward_hook(lambda _, __, output: seen.append(output[1:]))
    routing.replay(torch.stack([wanted] * 2, 1))
    block(hidden)
    routing.replay(None)
    weights, indices = seen[0]
    logits = F.linear(hidden[0], router.weight, getattr(router, "bias", None))
    assert torch.equal(indices, wanted)
    torch.testing.assert_close(weights, logits.gather(1, wanted).softmax(-1))  # renormalised probabilities, too


def test_tokens_without_a_route_choose_for_themselves(small_model):
    model = mixture("qwen3_moe", small_model)
    mine, own = record(model)
    routes = (mine + 1) % 4
    width = mine.shape[0] // len(SEQUENCES)
    routes[width:] = UNKNOWN  # all but the first row
    found = replayed(model, routes)
    assert torch.allclose(found[4:], own[4:], atol=1e-6)
    assert not torch.allclose(found[:4], own[:4], atol=1e-3)


def test_tokens_whose_experts_differ_are_counted_and_their_order_does_not_matter(small_model):
    model = mixture("qwen3_moe", small_model)
    routing = routing_of(model)
    mine, _ = record(model)
    routes = mine.flip(-1)
    routes[3, 0] = (mine[3, 0] + 1) % 4
    routes[5] = UNKNOWN
    routing.replay(routes)
    with routing.recording() as recording:
        completion_logits(model, pad(SEQUENCES))
    routing.replay(None)
    first = recording.differing[0]
    assert first.nonzero()[:, 0].tolist() == [3]
    assert set(recording.differing) == {0, 1}


@pytest.mark.parametrize("reentrant", [False, True])
def test_layers_that_are_computed_again_use_the_same_experts(small_model, reentrant):
    model, others = mixture("qwen3_moe", small_model), None
    others = (record(model)[0] + 1) % 4
    gradients = []
    for checkpointing in (False, True):
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
            model.enable_input_require_grads()
        model.zero_grad()
        routing_of(model).replay(others)
        completion_logits(model, pad(SEQUENCES)).square().sum().backward()
        routing_of(model).replay(None)
        gradients.append({name: one.grad.clone() for name, one in model.named_parameters() if one.grad is not None})
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient, rtol=1e-4, atol=1e-5)


def test_a_packed_stream_has_the_routes_of_its_tokens(small_model):
    model = mixture("qwen3_moe", small_model)
    own, _ = record(model, SEQUENCES[:1])
    assert choose_attention(model) is None
    routing, tokens = routing_of(model), pack(SEQUENCES)
    with routing.recording() as recording:
        completion_logits(model, tokens)
    prompt, completion = tokens.spans[0]
    routes = recording.routes()
    assert torch.equal(torch.cat([routes[prompt.start : prompt.stop], routes[completion.start : completion.stop]]), own)
    assert routing.array(recording).dtype == "uint8"


def test_recording_changes_nothing_and_ends(small_model):
    model = mixture("qwen3_moe", small_model)
    plain = completion_logits(model, pad(SEQUENCES))
    _, recorded = record(model)
    assert torch.equal(plain, recorded)
    with pytest.raises(IndexError), routing_of(model).recording():
        completion_logits(model, pad([TokenSequence([999], [1])]))
    assert torch.equal(plain, completion_logits(model, pad(SEQUENCES)))


def test_what_cannot_be_replayed_is_said(small_model, monkeypatch):
    assert routing_gap(small_model("qwen3")) == "it is no mixture of experts"
    model = mixture("qwen3_moe", small_model)

    def by_sorting(self, hidden):
        logits = F.linear(hidden, self.weight)
        probs, indices = logits.softmax(-1).sort(descending=True)
        return logits, probs[:, : self.top_k], indices[:, : self.top_k]

    router = type(routers(model)[0])
    with monkeypatch.context() as patch:
        patch.setattr(router, "forward", by_sorting)
        assert routing_gap(model) == "not all of its layers choose experts by one top-k"

    def twice(self, hidden):
        torch.topk(F.linear(hidden, self.weight), self.top_k)
        return by_sorting(self, hidden)

    monkeypatch.setattr(router, "forward", twice)
    assert routing_gap(model) == "replayed experts are not those that it computes with"
