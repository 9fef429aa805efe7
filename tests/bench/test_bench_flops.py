"""Counted operations, worked by hand on a model of one layer, and against torch's own count of a forward pass."""

import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM

from swift.bench.flops import Dimensions, step_flops
from swift.models.tiny import build_tiny

TOY = Dimensions(hidden=2, layers=1, heads=1, kv_heads=1, head_size=2, intermediate=3, vocab=5)


def test_a_token_costs_its_projections_its_mlp_and_what_it_sees():
    # q and o 2 x 2 x 2, k and v 2 x 2 x 2, MLP 3 x 2 x 3 multiply-adds
    assert TOY.per_token == 2 * (8 + 8 + 18)
    assert TOY.per_visible == 4 * 2
    assert TOY.per_prediction == 2 * 2 * 5


def test_a_step_of_one_prompt_and_two_completions():
    found = step_flops(TOY, [3], [[1, 3]], reference=False)
    prompt = 3 * 68 + (1 + 2 + 3) * 8
    behind = 2 * 68 + (4 + 5) * 8  # of the completion of 3 tokens the first two are read; the other is of one token
    assert found.prefill == prompt + 20
    assert found.decode == behind + 2 * 20
    assert found.forward == prompt + behind + 3 * 20
    assert found.backward == 2 * found.forward
    assert found.reference == 0
    assert found.total == 272 + 248 + 520 + 1040


def test_a_reference_is_one_more_forward_pass():
    without, with_ = (step_flops(TOY, [3], [[1, 3]], reference=reference) for reference in (False, True))
    assert with_.total - without.total == without.forward
    assert with_.generation == without.generation


def test_groups_add_up_and_the_prompt_counts_once_for_its_completions():
    one, two = step_flops(TOY, [4], [[2]], reference=False), step_flops(TOY, [4, 4], [[2], [2]], reference=False)
    assert two.total == 2 * one.total
    shared = step_flops(TOY, [4], [[2, 2]], reference=False)
    assert shared.prefill == one.prefill
    assert shared.forward < two.forward


def test_the_linear_part_is_what_torch_counts(tmp_path):
    model = AutoModelForCausalLM.from_pretrained(build_tiny(tmp_path, size="nano"))
    dimensions = Dimensions.of(model.config.to_dict())
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(torch.arange(7)[None])
    counts = {name: count for name, count in counter.get_flop_counts()["Global"].items() if "mm" in str(name)}
    assert sum(counts.values()) == 7 * (dimensions.per_token + dimensions.per_prediction)
