"""Small random models whose layers read a sequence from left to right: linear attention, state spaces, convolutions."""

from __future__ import annotations

import torch
from transformers import AutoConfig, AutoModelForCausalLM

SIZES = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 512, "bos_token_id": None, "eos_token_id": 1,
    "pad_token_id": 0, "initializer_range": 0.08,
}  # fmt: skip
DELTA = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
SHARED = {**EXPERTS, "shared_expert_intermediate_size": 16}
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 1, "mamba_chunk_size": 64}

SAMPLED = {
    "qwen3_5_text": DELTA,
    "qwen3_next": {**DELTA, **SHARED},
    "qwen3_5_moe_text": {**DELTA, **SHARED},
    "olmo_hybrid": DELTA,
    "nemotron_h": {
        "layers_block_type": ["mamba", "mlp", "attention", "mamba"], "mamba_num_heads": 8, "mamba_head_dim": 8,
        "ssm_state_size": 8, "n_groups": 1, "chunk_size": 64,
    },
    "falcon_h1": {**MAMBA, "mamba_d_ssm": 64, "mamba_expand": 2},
    "granitemoehybrid": {
        **MAMBA, "layer_types": ["mamba", "mamba", "attention", "mamba"], "num_local_experts": 0,
        "num_experts_per_tok": 0, "shared_intermediate_size": 48, "position_embedding_type": "rope",
    },
    "bamba": {**MAMBA, "attn_layer_indices": [2]},
    "zamba2": {
        "n_mamba_heads": 8, "mamba_d_state": 8, "chunk_size": 64, "use_mem_rope": True,
        "layers_block_type": ["mamba", "hybrid", "mamba", "mamba"],
    },
    "lfm2": {"layer_types": ["conv", "conv", "full_attention", "conv"], "block_auto_adjust_ff_dim": False},
    "lfm2_moe": {**EXPERTS, "layer_types": ["conv", "conv", "full_attention", "conv"], "num_dense_layers": 1},
}  # fmt: skip
"""Architecture -> its settings; completions continue from the states of prompts, for the transformers engine, too."""

FORKED = {
    **SAMPLED,
    "mamba2": {"state_size": 8, "num_heads": 8, "head_dim": 8, "n_groups": 1, "chunk_size": 64, "expand": 2},
}
"""With those whose states the engine does not find."""

PADDED = {
    "jamba": {
        "attn_layer_period": 4, "attn_layer_offset": 2, "num_experts": 1, "num_experts_per_tok": 1, "mamba_d_state": 8,
        "mamba_dt_rank": 4,
    },
    "recurrent_gemma": {"lru_width": 32, "attention_window_size": 64, "block_types": ["recurrent", "attention"]},
    "gpt2": {"n_inner": 48, "n_positions": 512},
    "mamba": {"state_size": 8, "time_step_rank": 4},
}  # fmt: skip
"""Architectures whose states cannot be forked, because they would be wrong or lost on the way."""


def hybrid(arch, dtype=torch.float32, **settings):
    """One of them, in training mode."""
    given = {**SIZES, **FORKED.get(arch, PADDED.get(arch, {})), **settings}
    if arch == "nemotron_h":  # which counts its blocks
        del given["num_hidden_layers"]
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(arch, **given), dtype=dtype).train()
