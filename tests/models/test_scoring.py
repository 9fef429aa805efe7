"""A model that scores itself gives the log-probs of its logits, in value and gradient, packed and padded."""

from __future__ import annotations

import copy
import inspect

import pytest
import torch
from peft import LoraConfig, get_peft_model
from policies import SEQUENCES, assert_equal_gradients
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM

from swift.models.attention.choice import choose_attention
from swift.models.forward import TokenSequence, arrange, completion_logits, pack
from swift.models.scoring import prepare_scoring, score_tokens, scores_itself
from swift.rl import linear_logprobs
from swift.rl.logprobs import selected_logprobs

TARGETS = torch.tensor([token for one in SEQUENCES for token in one.completion_ids])


def from_logits(model):
    return selected_logprobs(completion_logits(model, arrange(model, SEQUENCES)), TARGETS, temperature=0.9)


def itself(model, entropy="gradient"):
    return score_tokens(model, arrange(model, SEQUENCES), temperature=0.9, entropy=entropy)


def gradients(model, pair):
    logprobs, entropies = pair
    loss = (logprobs * torch.linspace(-1, 1, len(logprobs))).sum() + entropies.square().sum()
    model.zero_grad()
    loss.backward()
    return {name: one.grad.clone() for name, one in model.named_parameters() if one.grad is not None}


def assert_scores_are_those_of_logits(model, prepare=True):
    theirs = from_logits(model)
    expected = gradients(model, theirs)
    if prepare:
        assert prepare_scoring(model) is None
    assert scores_itself(model)
    torch.testing.assert_close(from_logits(model), theirs, rtol=0, atol=0)
    mine = itself(model)
    for one, other in zip(mine, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
    assert_equal_gradients(gradients(model, mine), expected, 2e-5)


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_scores_are_the_log_probs_of_logits(nano_folder, packed, checkpointing):
    model = AutoModelForCausalLM.from_pretrained(nano_folder).train()
    if packed:
        assert choose_attention(model) is None
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    assert_scores_are_those_of_logits(model)


@pytest.mark.parametrize(
    ("arch", "settings"),
    [
        ("gemma2", {"final_logit_softcapping": 3.0}),
        ("cohere", {"logit_scale": 0.3}),
        ("granite", {"logits_scaling": 4.0, "embedding_multiplier": 2.0}),
        ("phi", {"partial_rotary_factor": 0.5}),  # its output layer has a bias
        ("gpt2", {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}),
        ("mixtral", {"num_experts_per_tok": 2}),
        ("mamba", {"state_size": 4}),
    ],
)
def test_what_architectures_do_with_their_logits_is_known(small_model, arch, settings):
    model = small_model(arch, **settings)
    if arch == "phi":
        torch.nn.init.normal_(model.lm_head.bias)
    choose_attention(model)
    assert_scores_are_those_of_logits(model)


@pytest.mark.parametrize("options", [{}, {"modules_to_save": ["lm_head"]}])
def test_policies_with_an_adapter_score_themselves_with_it_and_without(nano_folders, options):
    torch.manual_seed(0)
    base = AutoModelForCausalLM.from_pretrained(nano_folders["llama"])
    model = get_peft_model(base, LoraConfig(target_modules=["q_proj"], init_lora_weights=False, **options))
    if options:
        torch.nn.init.normal_(model.get_base_model().lm_head.modules_to_save["default"].weight, 0.1)
    choose_attention(model)
    assert_scores_are_those_of_logits(model)
    with model.disable_adapter(), torch.no_grad():
        torch.testing.assert_close(itself(model), from_logits(model), rtol=1e-5, atol=1e-5)


def test_a_16_bit_policy_scores_itself(nano_folder):
    model = AutoModelForCausalLM.from_pretrained(nano_folder, dtype=torch.bfloat16)
    choose_attention(model)
    assert prepare_scoring(model) is None
    torch.testing.assert_close(itself(model), from_logits(model), rtol=0, atol=0.02)


def test_under_autocast_the_output_layer_has_its_type(nano_folder):
    model = AutoModelForCausalLM.from_pretrained(nano_folder)
    assert prepare_scoring(model) is None
    exact = itself(model)[0]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mine, theirs = itself(model), from_logits(model)
    assert mine[0].dtype == torch.float32
    torch.testing.assert_close(mine, theirs, rtol=0, atol=0.02)
    assert not torch.equal(mine[0], exact)
    gradients(model, mine)
    assert model.lm_head.weight.grad.dtype == torch.float32


def test_a_copy_scores_itself_with_its_own_weights(nano_folder):
    model = AutoModelForCausalLM.from_pretrained(nano_folder)
    choose_attention(model)
    prepare_scoring(model)
    before = itself(model)[0].detach()
    other = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1.1)
    assert not torch.allclose(itself(other)[0], before, atol=1e-4)
    assert torch.equal(itself(model)[0], before)


def test_the_model_shows_the_parameters_and_state_that_it_had(nano_folder):
    model = AutoModelForCausalLM.from_pretrained(nano_folder)
    signature, names = inspect.signature(model.forward), list(model.state_dict())
    prepare_scoring(model)
    assert inspect.signature(model.forward) == signature
    assert list(model.state_dict()) == names


@pytest.mark.parametrize("entropy", ["none", "value", "gradient"])
def test_the_vocabulary_is_in_no_tensor_but_the_weights(small_model, entropy, monkeypatch):
    model = small_model("llama", vocab_size=500, num_hidden_layers=1, sliding_window=None)
    choose_attention(model)
    assert prepare_scoring(model) is None
    monkeypatch.setattr(linear_logprobs, "CPU_BLOCK_ELEMENTS", 2**13)
    monkeypatch.setattr(linear_logprobs, "KEEP_BYTES", 0)
    shapes = set()

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            result = function(*args, **(kwargs or {}))
            if isinstance(result, torch.Tensor) and 500 in result.shape:
                shapes.add(tuple(result.shape))
            return result

    with Watch():
        logprobs, entropies = score_tokens(model, pack([TokenSequence([1], range(60))] * 3), entropy=entropy)
        (logprobs.sum() + (entropies.sum() if entropy == "gradient" else 0)).backward()
    assert shapes == {(500, 32)}


def test_an_output_layer_with_lora_is_scored_from_logits(nano_folders):
    model = get_peft_model(
        AutoModelForCausalLM.from_pretrained(nano_folders["llama"]),
        LoraConfig(target_modules=["q_proj", "lm_head"], init_lora_weights=False),
    )
    choose_attention(model)
    assert prepare_scoring(model) == "its output layer is a Linear (peft)"
    torch.testing.assert_close(itself(model), from_logits(model), rtol=0, atol=0)
    assert itself(model, "none")[1] is None


def test_a_model_that_does_more_with_its_logits_is_scored_from_them(small_model):
    model = small_model("cohere", logit_scale=0.3)
    model.logit_scale = 0.7  # not what its config says
    choose_attention(model)
    assert prepare_scoring(model) == "its log-probs differ from its logits'"
    assert not scores_itself(model)
    assert "forward" not in vars(model) and "forward" not in vars(model.lm_head)
    torch.testing.assert_close(itself(model), from_logits(model), rtol=0, atol=0)


def test_a_forward_pass_that_another_library_replaced_is_left_alone(nano_folder):
    model = AutoModelForCausalLM.from_pretrained(nano_folder)
    model.forward = replaced = model.forward
    assert prepare_scoring(model) == "another library has replaced its forward pass"
    assert model.forward is replaced
