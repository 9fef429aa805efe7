"""Prompts are shared where that is expected to take less time, group by group."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from swift.models.forward import TokenSequence, enable_packed_attention, pack, packed_logits
from swift.models.prompt_sharing import SharingCost, sharing_cost

COST = SharingCost(token_s=10e-6, tile_s=100e-6, kv_heads=2)


@pytest.mark.parametrize(
    ("prompt", "completions", "pays"),
    [
        (31, [64, 64], True),  # spares 31 tokens, 310 us; costs (1 + 2 blocks) tiles, 300 us
        (30, [64, 64], False),
        (31, [64, 3], True),  # the longest counts
        (40, [66, 3], False),  # 65 inputs are three blocks: 400 us
        (41, [66, 3], True),
        (10, [9] * 3, False),  # spares 2 x 10
        (10, [9] * 4, True),
        (1000, [9], False),  # nobody to share with
        (1, [1] * 12, True),  # no inputs of their own, no tiles: spares 11
        (1, [1] * 11, False),
    ],
)
def test_sharing_pays_where_spared_tokens_cost_more_than_tiles(prompt, completions, pays):
    assert COST.pays(prompt, completions) is pays


def test_behind_a_long_prompt_each_head_has_its_own_tiles():
    cost = SharingCost(token_s=10e-6, tile_s=100e-6, kv_heads=8)
    assert cost.pays(128, [64, 64])  # spares 1280 us, costs 300
    assert not cost.pays(129, [64, 64])  # costs 1700 us
    assert cost.pays(171, [64, 64])


def config(hidden, intermediate, heads, kv_heads):
    return LlamaConfig(
        hidden_size=hidden, intermediate_size=intermediate, num_attention_heads=heads, num_key_value_heads=kv_heads
    )


def test_larger_models_share_shorter_prompts():
    tiny = sharing_cost(config(128, 256, 4, 2), device_type="cpu")
    small = sharing_cost(config(512, 1536, 8, 2), device_type="cpu")

    def shortest(cost, num):
        return next(prompt for prompt in range(1, 1000) if cost.pays(prompt, [64] * num))

    # as measured on the machine of docs: about 20 spared tokens and 2
    assert 15 <= shortest(tiny, 2) <= 25
    assert shortest(tiny, 8) <= 3
    assert shortest(small, 2) <= 3


def test_threads_make_tokens_cheaper_and_tiles_not():
    one, four = (sharing_cost(config(128, 256, 4, 2), device_type="cpu", threads=n) for n in (1, 4))
    assert four.token_s == one.token_s / 4
    assert four.tile_s == one.tile_s


def test_devices_with_one_kernel_for_all_segments_always_share():
    assert sharing_cost(config(128, 256, 4, 2), device_type="cuda") is None


def test_each_group_is_packed_as_it_costs_less_and_the_logits_are_the_same(nano_folder):
    sequences = [
        TokenSequence([5, 6], [10, 11, 12]),
        TokenSequence([5, 6], [13, 14]),
        TokenSequence(list(range(60)), [10, 11, 12]),
        TokenSequence(list(range(60)), [13, 14]),
    ]
    tokens = pack(sequences, share_prompts=COST)
    spans = [(group.prompt.length, [span.length for span in group.completions]) for group in tokens.layout.groups]
    assert spans == [(2, [2]), (2, [1]), (60, [2, 1])]
    model = AutoModelForCausalLM.from_pretrained(nano_folder)
    enable_packed_attention(model)
    with torch.no_grad():
        logits = packed_logits(model, tokens)
        assert (logits - packed_logits(model, pack(sequences))).abs().max() < 1e-5
