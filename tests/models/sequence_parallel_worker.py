"""Log-probs and gradients of models on one rank and on several: `python sequence_parallel_worker.py <folder>`."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from ranks import joined
from small_models import small_model
from torch import nn

from swift.models.attention.choice import choose_attention
from swift.models.attention.interface import transformers_model
from swift.models.attention.sequence_parallel import SequenceGroup, spread_rows
from swift.models.forward import TokenSequence, pack
from swift.models.scoring import prepare_scoring, score_tokens, scores_itself

HEADS = {"num_attention_heads": 7, "num_key_value_heads": 1}
"""Which 2 and 3 ranks do not divide."""
TWO_KV = {"num_key_value_heads": 2}
MODELS = {
    "qwen2": ("qwen2", {}),
    "qwen2, 7 heads": ("qwen2", {**HEADS, "hidden_size": 56}),
    "qwen3, 2 key/value heads": ("qwen3", TWO_KV),
    "llama, 6 heads for 2": ("llama", {"num_attention_heads": 6, **TWO_KV, "hidden_size": 48, "sliding_window": None}),
    "mistral": ("mistral", {"sliding_window": 4}),
    "gemma2": ("gemma2", {"attn_logit_softcapping": 2.0, "sliding_window": 4, **TWO_KV}),
    "gpt_oss": ("gpt_oss", {"layer_types": ["full_attention", "sliding_attention"], **TWO_KV, "sliding_window": 4}),
    "qwen3_moe": ("qwen3_moe", {}),
    "deepseek_v3": ("deepseek_v3", {}),
    "lora": ("qwen3", TWO_KV),
    "checkpointing": ("qwen3", TWO_KV),
    "whole logits": ("qwen2", {}),
}
LONG = [
    TokenSequence(list(range(2, 14)), list(range(20, 29))),
    TokenSequence(list(range(2, 14)), list(range(30, 33))),
    TokenSequence([5, 6, 7], list(range(40, 52))),
    TokenSequence([9], [20]),
]
STREAMS = {"several": LONG, "one token": LONG[3:], "two groups": LONG[1:3]}


def model_of(name: str) -> nn.Module:
    arch, settings = MODELS[name]
    model = small_model(arch, **settings)
    if name == "lora":
        model = get_peft_model(model, LoraConfig(target_modules="all-linear", init_lora_weights=False))
    if name == "checkpointing":
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


def gradients(model: nn.Module) -> torch.Tensor:
    """Of all trained parameters, in one vector; they are gone after it."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    found = torch.cat([torch.zeros_like(one).flatten() if one.grad is None else one.grad.flatten() for one in trained])
    model.zero_grad(set_to_none=True)
    return found


def relative(value: torch.Tensor, expected: torch.Tensor) -> float:
    return float((value - expected).norm() / expected.norm())


def streams(name: str, group: SequenceGroup) -> dict[str, float]:
    """How far log-probs, entropies and gradients of packed streams are from those of one rank."""
    model = model_of(name)
    assert (obstacle := choose_attention(model)) is None, obstacle
    if name != "whole logits":
        assert prepare_scoring(model) is None
    assert scores_itself(model) == (name != "whole logits")
    gaps = {}
    for kind, sequences in STREAMS.items():
        tokens = pack(sequences)
        weights = torch.linspace(-1, 1, tokens.target_ids.numel() + 1)[1:]
        made = []
        for one in (tokens, tokens.spread(group)):
            logprobs, entropy = score_tokens(model, one, temperature=0.9, entropy="gradient")
            (logprobs * weights + 0.1 * entropy).sum().backward()
            made.append((logprobs.detach(), entropy.detach(), gradients(model)))
        (*values, gradient), (*shared, share) = made
        dist.all_reduce(share)
        gaps[kind] = max(map(relative, [*shared, share], [*values, gradient]))
    return gaps


def rows(name: str, group: SequenceGroup) -> dict[str, float]:
    """How far the logits of padded rows, and the mean of gradients over the ranks, are from those of one rank."""
    own, shared = model_of(name), model_of(name)
    transformers_model(own).set_attn_implementation("eager")  # sdpa has no soft caps
    assert choose_attention(shared) is None
    spread_rows(transformers_model(shared).base_model, group)
    ids = torch.randint(2, 60, (3, 17), generator=torch.Generator().manual_seed(1))
    gaps = {}
    for side in ("right", "left", "none"):
        mask = torch.ones_like(ids)
        for row, padding in enumerate((0, 5, 12) if side != "none" else ()):
            mask[row, slice(17 - padding, None) if side == "right" else slice(0, padding)] = 0
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        made = []
        for model in (own, shared):
            logits = model(input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=False).logits
            logits = logits.log_softmax(-1) * mask[..., None]
            logits.gather(2, ids[..., None]).sum().backward()
            made.append((logits.detach(), gradients(model)))
        dist.all_reduce(made[1][1])
        gaps[side] = max(relative(made[1][0], made[0][0]), relative(made[1][1] / group.size, made[0][1]))
    return gaps


def main(folder: str) -> None:
    with joined():
        group = SequenceGroup.of_this_rank(dist.get_world_size())
        found = {("stream", name): streams(name, group) for name in MODELS}
        found |= {("rows", name): rows(name, group) for name in MODELS}
        if dist.get_rank() == 0:
            torch.save(found, Path(folder) / "found")


if __name__ == "__main__":
    main(*sys.argv[1:])
