"""LoRA in a 16-bit model: float32 matrices, products in the type of the activations."""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

from swift.models.lora_products import multiply_in_input_type

CONFIG = LlamaConfig(
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=100,
)
TOKENS = torch.arange(64).reshape(2, 32)


def policy(dtype: torch.dtype, *, in_input_type: bool, **options):
    torch.manual_seed(0)
    model = LlamaForCausalLM(CONFIG).to(torch.bfloat16).to(dtype)
    adapted = get_peft_model(model, LoraConfig(r=8, target_modules="all-linear", init_lora_weights=False, **options))
    if in_input_type:
        multiply_in_input_type(adapted)
    return adapted


def backward(model) -> tuple[torch.Tensor, torch.Tensor, int]:
    """The loss, all gradients, and the bytes that autograd kept."""
    kept = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor.nbytes)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = model(input_ids=TOKENS, labels=TOKENS).loss
    loss.backward()
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    assert {weight.dtype for weight in trained} == {weight.grad.dtype for weight in trained} == {torch.float32}
    return loss.detach(), torch.cat([weight.grad.flatten() for weight in trained]), sum(kept)


def test_gradients_stay_float32_and_right_and_less_is_kept():
    exact = backward(policy(torch.float32, in_input_type=False))[1]
    of_peft, ours = (backward(policy(torch.bfloat16, in_input_type=own)) for own in (False, True))
    errors = [float(1 - torch.cosine_similarity(given[1], exact, dim=0)) for given in (of_peft, ours)]
    assert errors[1] < 1.5 * errors[0] < 1e-3
    assert ours[2] < 0.85 * of_peft[2]


def test_nothing_changes_in_a_float32_model():
    of_peft, ours = (backward(policy(torch.float32, in_input_type=own)) for own in (False, True))
    assert torch.equal(of_peft[0], ours[0])
    assert torch.equal(of_peft[1], ours[1])


@pytest.mark.parametrize("options", [{"use_dora": True}, {"lora_bias": True}])
def test_variants(options: dict):
    loss, gradients, _ = backward(policy(torch.bfloat16, in_input_type=True, **options))
    expected = backward(policy(torch.bfloat16, in_input_type=False, **options))
    assert torch.allclose(loss, expected[0], rtol=1e-2)
    assert torch.cosine_similarity(gradients, expected[1], dim=0) > 0.999
