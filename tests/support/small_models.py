"""Small random models of any architecture."""

from __future__ import annotations

import torch
from transformers import AutoConfig, AutoModelForCausalLM


def small_model(arch, **settings):
    """A random two-layer decoder of any architecture, with a sliding window of 8 where it has one."""
    sizes = {
        "vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 8, "sliding_window": 8,
        "max_position_embeddings": 256, "bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0,
        "initializer_range": 0.2,
    }  # fmt: skip
    special = {
        "gpt2": {"n_inner": 32, "n_positions": 256, "sliding_window": None},
        "gpt_oss": {"num_local_experts": 2, "num_experts_per_tok": 1, "layer_types": ["full_attention"] * 2},
        "mixtral": {"num_local_experts": 2, "num_experts_per_tok": 1, "sliding_window": None},
        "qwen3_moe": {
            "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "sliding_window": None,
        },
        "deepseek_v3": {
            "q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 6,
            "n_routed_experts": 2, "num_experts_per_tok": 1, "n_group": 1, "topk_group": 1,
            "moe_intermediate_size": 16, "sliding_window": None, "head_dim": 4,
        },
        "gemma4_text": {  # wider heads in full attention, inputs of each layer, the last two share keys and values
            "num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2,
            "num_kv_shared_layers": 2, "global_head_dim": 16, "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": 64, "initializer_range": 0.1,
        },
        "gpt_neox": {"sliding_window": None},
        "nemotron": {"sliding_window": None},
    }  # fmt: skip
    torch.manual_seed(0)
    config = AutoConfig.for_model(arch, **{**sizes, **special.get(arch, {}), **settings})
    return AutoModelForCausalLM.from_config(config).train()
