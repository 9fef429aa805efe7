"""Mixtures of experts whose files and modules store experts in different ways, and adapters on all their tensors."""

from __future__ import annotations

from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import nn

HYBRID = {
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"],
}  # fmt: skip
EXPERTS = {
    "qwen3_moe": ({}, {}),
    "qwen3_5_moe_text": (  # PEFT knows no names for its experts
        HYBRID,
        {"target_parameters": ["experts.gate_up_proj", "experts.down_proj", "mlp.gate.weight"]},
    ),
    "mixtral": ({}, {}),  # other names in files
    "deepseek_v3": ({"first_k_dense_replace": 1}, {}),  # shared experts, and a dense layer
    "gpt_oss": (  # fused in files too, transposed, with biases
        {},
        {
            "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"],
            "target_parameters": ["experts.gate_up_proj", "experts.down_proj", "router.weight"],
        },
    ),
}
"""Architecture -> settings of the model, and of an adapter on its attention, experts and router."""

ENGINE_SIZES = {
    "vocab_size": 263,
    "head_dim": 32,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "initializer_range": 0.1,
    "eos_token_id": 258,
    "pad_token_id": 256,
}
"""Of models that vLLM takes on a CPU, with the vocabulary of the tiny tokenizer."""


def on_experts(arch: str, model: nn.Module, *, r: int = 2, scale: float = 0.1, seed: int = 4, **more: Any) -> Any:
    """`model` under LoRA with random values of this scale in every A and B, experts and router included."""
    options = {"target_modules": "all-linear", "task_type": "CAUSAL_LM", "r": r, **EXPERTS[arch][1], **more}
    policy = get_peft_model(model, LoraConfig(**options)).eval()
    torch.manual_seed(seed)
    for parameter in policy.parameters():
        if parameter.requires_grad:
            parameter.data.normal_(0, scale)
    return policy
