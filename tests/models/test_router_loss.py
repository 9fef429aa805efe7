"""The load-balancing loss of mixtures of experts: by hand, as the model's own, and of packed streams."""

from __future__ import annotations

import copy

import pytest
import torch
from hybrids import hybrid

from swift.errors import ConfigError
from swift.models.attention.choice import choose_streams
from swift.models.attention.forked import forks, takes_streams
from swift.models.forward import TokenSequence, arrange, pack, pad
from swift.models.router_loss import balancing_loss, router_coefficient
from swift.models.scoring import prepare_scoring, score_tokens, scores_and_balance, scores_itself

PROMPT, OTHER = list(range(3, 12)), list(range(20, 25))
SEQUENCES = [
    TokenSequence(PROMPT, [30, 31, 32, 33]),
    TokenSequence(PROMPT, [40, 41]),
    TokenSequence(OTHER, [50, 51, 52, 53, 54, 55]),
]
FOUR = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
MIXTURES = {
    "qwen3_moe": {},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen2_moe": {**FOUR, "shared_expert_intermediate_size": 16, "sliding_window": None},
}
FORKED = ("qwen3_next", "qwen3_5_moe_text")


def prepared(arch, small_model):
    """A mixture that takes streams and scores itself, and a copy as transformers made it."""
    model = hybrid(arch) if arch in FORKED else small_model(arch, **MIXTURES[arch])
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "gate.weight" in name or "router.weight" in name:
                parameter.normal_(0, 1)  # not all experts alike
    own = copy.deepcopy(model)
    assert choose_streams(model) is None
    assert prepare_scoring(model) is None
    return model, own


def own_loss(model, sequences):
    """The loss that the causal language model of transformers gives, of padded rows."""
    return model(**pad(sequences).inputs, output_router_logits=True, use_cache=False).aux_loss


def router_logits(model, sequences):
    """[tokens, experts] of each layer and sequence alone, without padding."""
    return [model(**pad([one]).inputs, output_router_logits=True, use_cache=False).router_logits for one in sequences]


def by_hand(logits, top_k):
    """`E sum_e f_e P_e` of router logits [rows, E], token by token."""
    counts, probs = torch.zeros(logits.shape[1]), torch.zeros(logits.shape[1])
    for row in logits.float():
        counts[row.argsort(descending=True)[:top_k]] += 1
        probs = probs + row.softmax(0)
    return logits.shape[1] * (counts / len(logits) * probs / len(logits)).sum()


@pytest.mark.parametrize("arch", [*MIXTURES, *FORKED])
def test_a_stream_has_the_loss_of_its_tokens_each_prompt_once(arch, small_model):
    model, own = prepared(arch, small_model)
    assert takes_streams(model) and forks(model) == (arch in FORKED)
    _, _, loss = scores_and_balance(model, pack(SEQUENCES))
    rows = []
    for layers in zip(*router_logits(own, SEQUENCES), strict=True):
        first, second, third = layers
        rows += [first, second[len(PROMPT) :], third]  # the prompt of the second is that of the first
    expected = by_hand(torch.cat(rows), 2)
    torch.testing.assert_close(loss, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("arch", [*MIXTURES, *FORKED])
def test_without_shared_prompts_it_is_the_models_own(arch, small_model):
    model, own = prepared(arch, small_model)
    apart = [SEQUENCES[0], SEQUENCES[2]]
    expected = own_loss(own, apart)
    _, _, packed = scores_and_balance(model, pack(apart))
    torch.testing.assert_close(packed, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("scores", [True, False], ids=["itself", "from logits"])
@pytest.mark.parametrize("packed", [True, False], ids=["packed", "rows"])
def test_scores_are_the_same_with_the_loss_in_any_arrangement(small_model, packed, scores):
    model = small_model("qwen3_moe")
    if packed:
        assert choose_streams(model) is None
    if scores:
        assert prepare_scoring(model) is None
    assert scores_itself(model) == scores
    tokens = arrange(model, SEQUENCES[::2])
    plain = score_tokens(model, tokens, temperature=0.9, entropy="value")
    logprobs, entropies, loss = scores_and_balance(model, tokens, temperature=0.9, entropy="value")
    torch.testing.assert_close((logprobs, entropies), plain, rtol=0, atol=0)
    torch.testing.assert_close(loss, own_loss(small_model("qwen3_moe"), SEQUENCES[::2]), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("arch", ["qwen3_moe", "qwen3_next"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_its_gradient_is_that_of_the_formula(arch, small_model, checkpointing):
    model, own = prepared(arch, small_model)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    logprobs, _, loss = scores_and_balance(model, pack([SEQUENCES[0], SEQUENCES[2]]))
    (3 * loss + 0 * logprobs.sum()).backward()
    layers = zip(*router_logits(own, [SEQUENCES[0], SEQUENCES[2]]), strict=True)
    (3 * by_hand(torch.cat([torch.cat(layer) for layer in layers]), 2)).backward()
    expected = {name: one.grad for name, one in own.named_parameters() if one.grad is not None}
    routers = [name for name in expected if name.endswith(".gate.weight") and expected[name].norm() > 1e-3]
    assert len(routers) == own.config.num_hidden_layers
    for name, parameter in model.named_parameters():
        if name in expected:
            torch.testing.assert_close(parameter.grad, expected[name], rtol=1e-3, atol=1e-5)


def test_equal_use_of_all_experts_has_the_least_loss(small_model):
    model = small_model("qwen3_moe")
    even = 9 * torch.eye(4)[torch.tensor([[0, 1], [1, 2], [2, 3], [3, 0]])].sum(1)
    assert float(balancing_loss(model, (even,), None)) == pytest.approx(2, abs=0.01)
    assert float(balancing_loss(model, (even[:1].expand(4, 4),), None)) == pytest.approx(4, abs=0.01)
    assert float(balancing_loss(model, (even,), torch.tensor([[1, 0, 0, 0]]))) == pytest.approx(4, abs=0.01)


def test_the_coefficient_is_the_models_own_with_none(small_model):
    mixture, dense = small_model("qwen3_moe", router_aux_loss_coef=0.02), small_model("qwen3")
    assert [router_coefficient(given, mixture) for given in (None, 0.0, 0.5)] == [0.02, 0.0, 0.5]
    assert [router_coefficient(given, dense) for given in (None, 0.0)] == [0.0, 0.0]
    for model in (dense, hybrid("lfm2_moe")):  # LFM2's routers balance by a bias
        with pytest.raises(ConfigError, match=r"--router_aux_loss_coef: 0\.5: the model is no mixture"):
            router_coefficient(0.5, model)
