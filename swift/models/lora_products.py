"""Products of LoRA's matrices in the type of the activations, as under autocast: bfloat16 in a bfloat16 model.

The matrices themselves stay float32, and so do their gradients: sums over micro-batches and small updates lose nothing.
PEFT would turn the input of each adapted layer into float32 instead, which autograd then keeps, and multiply outside of
the tensor cores.
"""

from __future__ import annotations

from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from torch.nn import functional


class InputTypeLinear(nn.Linear):
    """A linear layer whose weight and bias are rounded to the type of its input."""

    def forward(self, input: Tensor) -> Tensor:
        """The product [..., out] of `input` [..., in], in its type."""
        bias = self.bias if self.bias is None else self.bias.to(input.dtype)
        return functional.linear(input, self.weight.to(input.dtype), bias)


def multiply_in_input_type(policy: nn.Module) -> None:
    """Let the LoRA layers of a model compute so; those of DoRA, convolutions and embeddings stay as PEFT has them."""
    for layer in policy.modules():
        if not isinstance(layer, LoraLayer) or layer.lora_variant:
            continue
        matrices = [*layer.lora_A.values(), *layer.lora_B.values()]
        if matrices and all(type(matrix) in (nn.Linear, InputTypeLinear) for matrix in matrices):
            layer.cast_input_dtype_enabled = False
            for matrix in matrices:
                matrix.__class__ = InputTypeLinear


def multiplies_in_input_type(policy: nn.Module) -> bool:
    """Whether LoRA layers of a model compute so."""
    return any(isinstance(module, InputTypeLinear) for module in policy.modules())
