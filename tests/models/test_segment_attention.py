"""Every kernel computes the same attention of packed segments: tiles, masked SDPA, FlexAttention."""

from __future__ import annotations

import pytest
import torch

from swift.models import segment_tiles
from swift.models.segments import GroupSpans, SegmentLayout, Span, flex_obstacle, kernel_for


def layout(*groups):
    """A layout of groups given as (prompt length, *completion input lengths)."""
    made, end = [], 0
    for lengths in groups:
        spans = []
        for length in lengths:
            spans.append(Span(end, length))
            end += length
        made.append(GroupSpans(spans[0], tuple(spans[1:])))
    return SegmentLayout(made), end


LAYOUTS = {
    "one shared prompt": [(5, 3, 3, 3)],
    "ragged": [(5, 3, 0, 7, 1), (1, 2), (2, 0), (4,), (5, 9, 8, 2)],
    "several blocks, long tail": [(70, 200, 130, 65, 64, 3, 1), (33, 63, 63)],
    "prompts alone": [(6,), (6,), (6,), (150,), (2,)],
    "plain packing": [(5, 3), (5, 7), (90, 80)],
    "prompts of several lengths": [(5, 3, 3), (9, 4, 2, 0), (7, 40, 39, 3), (5, 4, 4)],
    "long prompts": [(140, 40, 33, 3), (129, 5, 5), (4, 2, 2)],
}
HEADS = {
    "grouped": (4, 2, 8, 8),
    "one for all": (3, 1, 8, 8),
    "each its own": (2, 2, 8, 8),
    "narrow values": (4, 4, 8, 6),
}


def states(num_tokens, heads, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    num_heads, num_kv, head_size, value_size = heads
    shapes = [(num_heads, head_size), (num_kv, head_size), (num_kv, value_size)]
    # as they come from a linear layer: token after token
    made = [torch.randn(1, num_tokens, *shape, generator=generator, dtype=torch.float64) for shape in shapes]
    return [one.to(dtype).transpose(1, 2).requires_grad_() for one in made]


def dense(chosen, query, key, value, scale):
    """Attention under the whole [T, T] mask."""
    num_tokens = query.shape[2]
    segment, prompt = torch.empty(2, num_tokens, dtype=torch.long)
    number = 0
    for group in chosen.groups:
        first = number
        for span in (group.prompt, *group.completions):
            segment[span.start : span.stop], prompt[span.start : span.stop] = number, first
            number += 1
    mask = (segment[:, None] == segment) | (prompt[:, None] == segment)
    mask &= torch.ones(num_tokens, num_tokens, dtype=torch.bool).tril()
    repeats = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
    scores = (query @ key.mT * (query.shape[3] ** -0.5 if scale is None else scale)).masked_fill(~mask, -torch.inf)
    return (scores.softmax(-1) @ value).transpose(1, 2)


def with_gradients(output, given):
    weights = torch.linspace(-1, 1, output.numel(), dtype=output.dtype).reshape(output.shape)
    return [output, *torch.autograd.grad(output, given, weights)]


@pytest.mark.parametrize("kernel", ["tiles", "rows"])
@pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS)
@pytest.mark.parametrize("groups", LAYOUTS.values(), ids=LAYOUTS)
def test_each_segment_sees_its_prompt_and_itself(kernel, groups, heads):
    chosen, num_tokens = layout(*groups)
    given = states(num_tokens, heads)
    found = with_gradients(chosen.using(kernel).attend(*given, 0.3), given)
    expected = with_gradients(dense(chosen, *given, 0.3), given)
    assert found[0].shape == (1, num_tokens, heads[0], heads[3])
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("groups", LAYOUTS.values(), ids=LAYOUTS)
def test_flex_attention_sees_the_same(groups):
    chosen, num_tokens = layout(*groups)
    given = [one.detach().float() for one in states(num_tokens, HEADS["grouped"])]
    found = chosen.using("flex").attend(*given, None)  # uncompiled: its definition
    torch.testing.assert_close(found, dense(chosen, *given, None), rtol=1e-5, atol=1e-6)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention_is_used_only_where_a_trial_agrees(monkeypatch):
    cpu, heads = torch.device("cpu"), (4, 2, 16, 16)
    assert flex_obstacle(cpu, torch.float32, heads, backward=False) is None
    assert "does not support backward on CPU" in str(flex_obstacle(cpu, torch.float32, heads))
    assert "not tried in float64" in str(flex_obstacle(cpu, torch.float64, heads))

    from swift.models import segment_flex

    monkeypatch.setattr(
        segment_flex.FlexSegments, "attend", lambda self, query, key, value, scale: query.transpose(1, 2)
    )
    assert "differs from masked SDPA" in str(flex_obstacle(cpu, torch.float32, heads, backward=False))


def test_a_gpu_without_a_working_flex_attention_says_so_and_uses_masked_sdpa(monkeypatch, caplog):
    from swift.models import segments

    outcomes = {"broken": "FlexAttention fails here (RuntimeError: no compiler)", "fine": None}
    for outcome, kernel in (("broken", "rows"), ("fine", "flex")):
        monkeypatch.setattr(segments, "flex_obstacle", lambda *_, found=outcomes[outcome]: found)
        kernel_for.cache_clear()
        assert kernel_for(torch.device("cuda", 0), torch.bfloat16, (4, 2, 16, 16)) == kernel
    assert caplog.text.count("no compiler") == 1
    kernel_for.cache_clear()
    assert kernel_for(torch.device("cpu"), torch.float32, (4, 2, 16, 16)) == "tiles"
    assert kernel_for(torch.device("mps"), torch.float32, (4, 2, 16, 16)) == "rows"


@pytest.mark.parametrize("groups", LAYOUTS.values(), ids=LAYOUTS)
def test_probabilities_that_are_not_kept_are_computed_again_to_the_last_bit(groups, monkeypatch):
    chosen, num_tokens = layout(*groups)
    given = states(num_tokens, HEADS["grouped"], torch.float32)
    monkeypatch.setattr(segment_tiles, "KEPT_PER_QUERY", 10**6)
    kept = with_gradients(chosen.attend(*given, None), given)
    monkeypatch.setattr(segment_tiles, "KEPT_PER_QUERY", 0)
    again = with_gradients(chosen.attend(*given, None), given)
    assert all(torch.equal(one, other) for one, other in zip(kept, again, strict=True))


def test_long_sequences_keep_less_than_a_few_times_their_queries():
    chosen, num_tokens = layout((40, 900, 880))
    given = states(num_tokens, (2, 1, 8, 8), torch.float32)
    kept = 0

    def count(tensor):
        nonlocal kept
        kept += tensor.numel()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
        chosen.attend(*given, None)
    assert kept < 4 * given[0].numel()


@pytest.mark.parametrize("elements", [100, 3000, 20000])  # a head of a row; a few heads; a few rows
@pytest.mark.parametrize("groups", ["several blocks, long tail", "prompts of several lengths", "long prompts"])
def test_the_size_of_tiles_changes_rounding_only(groups, elements, monkeypatch):
    chosen, num_tokens = layout(*LAYOUTS[groups])
    given = states(num_tokens, (8, 4, 8, 8))
    whole = with_gradients(chosen.attend(*given, None), given)
    num_tiles = len(chosen.using("tiles").plan(4, 2).tiles)
    monkeypatch.setattr(segment_tiles, "TILE_ELEMENTS", elements // torch.get_num_threads())  # of each thread
    for one, other in zip(with_gradients(chosen.attend(*given, None), given), whole, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)
    assert len(chosen.using("tiles").plan(4, 2).tiles) > num_tiles


def test_short_prompts_make_one_tile_of_all_heads_and_groups():
    chosen, num_tokens = layout((16, 20, 20, 20), (14, 20, 19, 18), (16, 20, 20))
    plan = chosen.using("tiles").plan(2, 2)
    assert [tile.num_products for tile in plan.tiles] == [3 * 2, (3 + 3 + 2) * 2]  # prompts, completions
    given = states(num_tokens, HEADS["grouped"])
    chosen.attend(*given, None)
    assert chosen.using("tiles").plan(2, 2) is plan


def test_prompts_whose_lengths_differ_much_are_not_merged():
    chosen, _ = layout((100, 60, 60, 60), (3, 60, 60, 60))
    num_products = [tile.num_products for tile in chosen.using("tiles").plan(4, 4).tiles if tile.start == 0]
    assert num_products == [4, 4, 3 * 4, 3 * 4]  # two prompts, completions of each


def test_long_prompts_are_not_copied():
    chosen, num_tokens = layout((129, 5, 5, 5), (200, 7, 7))
    plan = chosen.using("tiles").plan(2, 2)
    assert [(tile.num_products, tile.num_prefix) for tile in plan.tiles if tile.num_prefix] == [
        (3, 129),
        (3, 129),
        (2, 200),
        (2, 200),
    ]
    assert plan.num_keys < 2.5 * 2 * num_tokens  # a prompt is a row and a prefix; copies would make this 3.4


@pytest.mark.parametrize("groups", LAYOUTS.values(), ids=LAYOUTS)
def test_filling_gets_zeros_and_changes_nothing(groups):
    chosen, num_tokens = layout(*groups)
    filled = SegmentLayout([*chosen.groups, GroupSpans(Span(num_tokens, 11), (), unseen=True)])
    given = states(num_tokens + 11, HEADS["grouped"])
    found = with_gradients(filled.attend(*given, None), given)
    for one in (found[0][:, num_tokens:], *(gradient[:, :, num_tokens:] for gradient in found[1:])):
        assert not one.any()
    real = [one[:, :, :num_tokens].detach().requires_grad_() for one in given]
    weights = torch.linspace(-1, 1, found[0].numel(), dtype=torch.float64).view_as(found[0])[:, :num_tokens]
    output = chosen.attend(*real, None)
    expected = [output, *torch.autograd.grad(output, real, weights)]
    assert torch.equal(found[0][:, :num_tokens], expected[0])
    for one, other in zip(found[1:], expected[1:], strict=True):
        assert torch.equal(one[:, :, :num_tokens], other)


@pytest.mark.parametrize("groups", LAYOUTS.values(), ids=LAYOUTS)
def test_memory_that_nobody_wrote_is_not_read(groups):
    chosen, num_tokens = layout(*groups)
    given = states(num_tokens, HEADS["grouped"])
    expected = with_gradients(chosen.attend(*given, None), given)
    torch.use_deterministic_algorithms(True)  # fills it with NaN
    try:
        assert torch.empty(3).isnan().all()
        found = with_gradients(chosen.attend(*given, None), given)
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


@pytest.mark.parametrize("kernel", ["tiles", "rows"])
def test_16_bit_states_give_16_bit_results(kernel):
    chosen, num_tokens = layout(*LAYOUTS["ragged"])
    given = states(num_tokens, HEADS["grouped"], torch.bfloat16)
    found = with_gradients(chosen.using(kernel).attend(*given, None), given)
    exact = [one.detach().double().requires_grad_() for one in given]
    for one, other in zip(found, with_gradients(dense(chosen, *exact, None), exact), strict=True):
        assert one.dtype == torch.bfloat16
        assert float((one - other).detach().norm() / other.detach().norm()) < 1e-2


@pytest.mark.parametrize("kernel", ["tiles", "rows"])
def test_autocast_leaves_states_of_two_types_to_attention(kernel):
    chosen, num_tokens = layout(*LAYOUTS["ragged"])
    query, key, value = states(num_tokens, HEADS["grouped"], torch.float32)
    expected = dense(chosen, query, key, value, None)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = chosen.using(kernel).attend(query, key, value.bfloat16(), None)
    assert float((found - expected).detach().norm() / expected.detach().norm()) < 1e-2
    found.sum().backward()
    assert query.grad.dtype == torch.float32


def test_without_gradients_nothing_is_kept():
    chosen, num_tokens = layout(*LAYOUTS["ragged"])
    given = states(num_tokens, HEADS["grouped"])
    expected = chosen.attend(*given, None)
    with torch.no_grad():
        found = chosen.attend(*given, None)
    assert expected.requires_grad
    assert not found.requires_grad
    assert torch.equal(found, expected)
