"""Every kernel computes the same attention of packed segments: masked SDPA over rows, FlexAttention."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from swift.models.attention.layout import DecodeLayout, SegmentLayout, flex_obstacle, kernel_for
from swift.models.attention.rows import SegmentRows
from swift.models.attention.spans import GroupSpans, Span, Variant


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


def dense(chosen, query, key, value, scale, window=None):
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
    for image in (image for group in chosen.groups for image in group.images):
        mask[image.start : image.stop, image.start : image.stop] = True
    if window is not None:  # of places in the sequence: a completion's begin behind its prompt
        places = torch.empty(num_tokens, dtype=torch.long)
        for group in chosen.groups:
            places[group.prompt.index] = torch.arange(group.prompt.length)
            for span in group.completions:
                places[span.index] = group.prompt.length + torch.arange(span.length)
        mask &= places > places[:, None] - window
    repeats = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
    scores = (query @ key.mT * (query.shape[3] ** -0.5 if scale is None else scale)).masked_fill(~mask, -torch.inf)
    return (scores.softmax(-1) @ value).transpose(1, 2)


def with_gradients(output, given):
    weights = torch.linspace(-1, 1, output.numel(), dtype=output.dtype).reshape(output.shape)
    return [output, *torch.autograd.grad(output, given, weights)]


@pytest.mark.parametrize("kernel", ["rows", "flash"])
@pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS)
@pytest.mark.parametrize("groups", LAYOUTS.values(), ids=LAYOUTS)
def test_each_segment_sees_its_prompt_and_itself(groups, heads, kernel, fake_flash):
    chosen, num_tokens = layout(*groups)
    given = states(num_tokens, heads)
    found = with_gradients(chosen.attend(*given, 0.3, kernel=kernel), given)
    expected = with_gradients(dense(chosen, *given, 0.3), given)
    assert found[0].shape == (1, num_tokens, heads[0], heads[3])
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize(("kernel", "window"), [("rows", None), ("rows", 6), ("flex", None), ("flash", None)])
def test_tokens_of_an_image_see_each_other(kernel, window):
    groups, num_tokens = layout((20, 7, 3), (9, 4), (6,), (12, 2, 5))
    first, second, third, fourth = groups.groups
    with_images = [
        replace(first, images=(Span(0, 4), Span(8, 10))),
        second,
        replace(third, images=(third.prompt,)),
        replace(fourth, images=(Span(fourth.prompt.stop - 2, 2),)),
    ]
    chosen = SegmentLayout(with_images)
    given = states(num_tokens, HEADS["grouped"], torch.float32)
    variant, expected = Variant(window), dense(chosen, *given, None, window)
    if kernel == "flex":
        found = chosen.attend(*[one.detach() for one in given], None, kernel=kernel)
        torch.testing.assert_close(found, expected.detach(), rtol=1e-5, atol=1e-6)
        return
    pairs = zip(
        with_gradients(chosen.attend(*given, None, variant, kernel), given),
        with_gradients(expected, given),
        strict=True,
    )
    for one, other in pairs:
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", ["rows", "tiles", "decode"])
def test_no_masked_call_of_sdpa_has_grouped_keys(kind, monkeypatch):
    """On GPUs such a call keeps all scores: no other kernel takes both."""
    calls, sdpa = [], torch.nn.functional.scaled_dot_product_attention

    def watched(query, key, value, attn_mask=None, **options):
        calls.append((attn_mask is not None, options["enable_gqa"]))
        return sdpa(query, key, value, attn_mask, **options)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", watched)
    query, key, value = states(13, (4, 2, 8, 8))
    if kind == "decode":
        mask = torch.ones(1, 1, 1, 13, dtype=torch.bool)
        DecodeLayout(mask).attend(query[:, :, -1:], key, value, None)
    else:
        prefixes = (2, 4) if kind == "tiles" else ()
        groups = [GroupSpans(Span(0, 5), (Span(5, 4), Span(9, 4)), prefixes)]
        SegmentLayout(groups).attend(query, key, value, None, kernel="rows")
    assert any(masked for masked, _ in calls)
    assert not any(masked and grouped for masked, grouped in calls)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("groups", LAYOUTS.values(), ids=LAYOUTS)
def test_flex_attention_sees_the_same(groups):
    chosen, num_tokens = layout(*groups)
    given = [one.detach().float() for one in states(num_tokens, HEADS["grouped"])]
    found = chosen.attend(*given, None, kernel="flex")  # uncompiled: its definition
    torch.testing.assert_close(found, dense(chosen, *given, None), rtol=1e-5, atol=1e-6)


def test_flex_attention_is_used_only_where_a_trial_agrees(monkeypatch):
    cpu, heads = torch.device("cpu"), (4, 2, 16, 16)
    assert "does not support backward on CPU" in str(flex_obstacle(cpu, torch.float32, heads))
    assert "not tried in float64" in str(flex_obstacle(cpu, torch.float64, heads))

    from swift.models.attention.flex import FlexSegments

    def off_by(gap):
        return lambda self, *states: (1 + gap) * SegmentRows(self.groups, "cpu").attend(*states)

    monkeypatch.setattr(FlexSegments, "__init__", lambda self, groups, device: setattr(self, "groups", groups))
    monkeypatch.setattr(FlexSegments, "attend", off_by(1e-4))
    assert flex_obstacle(cpu, torch.float32, heads) is None
    monkeypatch.setattr(FlexSegments, "attend", off_by(1e-2))
    assert "differs from masked SDPA" in str(flex_obstacle(cpu, torch.float32, heads))


def test_a_gpu_without_a_working_flex_attention_says_so_and_uses_masked_sdpa(monkeypatch, caplog):
    from swift.models.attention import layout as segments

    outcomes = {"broken": "FlexAttention fails here (RuntimeError: no compiler)", "fine": None}
    for outcome, kernel in (("broken", "rows"), ("fine", "flex")):
        monkeypatch.setattr(segments, "flex_obstacle", lambda *_, found=outcomes[outcome]: found)
        kernel_for.cache_clear()
        assert kernel_for(torch.device("cuda", 0), torch.bfloat16, (4, 2, 16, 16)) == kernel
    assert caplog.text.count("no compiler") == 1
    kernel_for.cache_clear()
    for device in ("cpu", "mps"):
        assert kernel_for(torch.device(device), torch.float32, (4, 2, 16, 16)) == "rows"


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


def test_16_bit_states_give_16_bit_results():
    chosen, num_tokens = layout(*LAYOUTS["ragged"])
    given = states(num_tokens, HEADS["grouped"], torch.bfloat16)
    found = with_gradients(chosen.attend(*given, None, kernel="rows"), given)
    exact = [one.detach().double().requires_grad_() for one in given]
    for one, other in zip(found, with_gradients(dense(chosen, *exact, None), exact), strict=True):
        assert one.dtype == torch.bfloat16
        assert float((one - other).detach().norm() / other.detach().norm()) < 1e-2


def test_autocast_leaves_states_of_two_types_to_attention():
    chosen, num_tokens = layout(*LAYOUTS["ragged"])
    query, key, value = states(num_tokens, HEADS["grouped"], torch.float32)
    expected = dense(chosen, query, key, value, None)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = chosen.attend(query, key, value.bfloat16(), None, kernel="rows")
    assert float((found - expected).detach().norm() / expected.detach().norm()) < 1e-2
    found.sum().backward()
    assert query.grad.dtype == torch.float32
