"""The layout of blocks that continue a document from many places: anchors, indices, and what each token sees."""

from __future__ import annotations

import pytest
import torch

from swift.models.attention.spans import PLAIN, Variant
from swift.models.attention.strided import BlockStream, block_anchors


def one_document(num_tokens=64, *, length=8, stride=8, first=8, samples=1):
    anchors = block_anchors(num_tokens, length=length, stride=stride, first=first)
    return BlockStream([num_tokens], [(0, anchor) for anchor in anchors for _ in range(samples)], length)


TWO = BlockStream([9, 12], [(0, 2), (0, 2), (0, 5), (1, 1), (1, 8), (1, 8)], 4)
"""Two documents, blocks at several places, some sampled twice."""


@pytest.mark.parametrize(
    ("num_tokens", "length", "stride", "first", "count"),
    [
        *((64, 8, 8, 8, 7), (64, 8, 8, 28, 4), (50, 8, 8, 28, 2), (1024, 8, 8, 8, 127)),
        *((1024, 4, 2, 4, 509), (16, 8, 8, 8, 1), (15, 8, 8, 8, 0)),
    ],
)
def test_the_number_of_blocks(num_tokens, length, stride, first, count):
    anchors = block_anchors(num_tokens, length=length, stride=stride, first=first)
    assert len(anchors) == count == max(0, (num_tokens - length - first) // stride + 1)
    assert all(first <= anchor <= num_tokens - length for anchor in anchors)


def visible(stream, num_steps, kernel="rows", variant=PLAIN):
    """[T, T] which tokens each token of a stream sees: attention of equal scores to one-hot values."""
    num_tokens = stream.num_document_tokens + num_steps * len(stream.columns)
    states = torch.zeros(1, 1, num_tokens, 8)
    found = stream.layout(num_steps, "cpu").attend(
        states, states, torch.eye(num_tokens)[None, None], None, variant, kernel
    )
    return found[0, :, 0] > 0


def sees(stream, step, column):
    """What the definition says of one token: its document up to the anchor, and its own column up to itself."""
    document, anchor = stream.columns[column]
    start = stream.starts[document]
    own = [stream.num_document_tokens + t * len(stream.columns) + column for t in range(step + 1)]
    return [*range(start, start + anchor), *own]


def test_a_token_in_the_middle_of_seven_blocks():
    stream = one_document()
    assert int(stream.index()[2, 3]) == 81
    assert int(stream.positions(8)[81]) == 34
    assert int(stream.predecessors()[2, 3]) == 74
    assert visible(stream, 8)[81].nonzero()[:, 0].tolist() == [*range(32), 67, 74, 81]


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("stream", [one_document(30, samples=2, stride=4), TWO], ids=["one", "two"])
@pytest.mark.parametrize("kernel", ["rows", "flex"])
def test_every_token_sees_its_prefix_and_its_column_and_nothing_else(stream, kernel):
    seen = visible(stream, stream.length, kernel)
    for document, (start, length) in enumerate(zip(stream.starts, stream.lengths, strict=True)):
        for place in range(length):
            assert seen[start + place].nonzero()[:, 0].tolist() == [*range(start, start + place + 1)], document
    for step in range(stream.length):
        for column in range(len(stream.columns)):
            token = int(stream.index()[step, column])
            assert seen[token].nonzero()[:, 0].tolist() == sees(stream, step, column)


def states(num_tokens, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = [(1, heads, num_tokens, 8) for heads in (4, 2, 2)]
    return [torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_() for shape in shapes]


@pytest.mark.parametrize("variant", [PLAIN, Variant(window=3), Variant(softcap=2.0)], ids=["plain", "window", "cap"])
@pytest.mark.parametrize("stream", [one_document(30, samples=2, stride=4), TWO], ids=["one", "two"])
def test_a_step_behind_a_cache_is_the_last_step_of_the_whole_stream(stream, variant):
    for num_steps in range(1, stream.length + 1):
        num_tokens, size = stream.num_document_tokens + num_steps * len(stream.columns), len(stream.columns)
        query, key, value = states(num_tokens)
        whole = stream.layout(num_steps, "cpu").attend(query, key, value, None, variant)
        step = stream.step_layout(num_steps, "cpu").attend(query[:, :, -size:], key, value, None, variant)
        torch.testing.assert_close(step, whole[:, -size:], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("stream", [one_document(30, samples=2, stride=4), TWO], ids=["one", "two"])
def test_flash_attention_computes_the_same_with_gradients(stream, fake_flash):
    num_tokens = stream.num_document_tokens + stream.length * len(stream.columns)
    given = states(num_tokens)
    layout = stream.layout(stream.length, "cpu")
    weights = torch.linspace(-1, 1, num_tokens * 32, dtype=torch.float64).view(1, num_tokens, 4, 8)
    found, expected = (
        [output, *torch.autograd.grad(output, given, weights)]
        for output in (layout.attend(*given, 0.3, kernel=kernel) for kernel in ("flash", "rows"))
    )
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


def test_columns_share_a_copy_of_their_document_and_no_mask_is_over_the_whole_stream(monkeypatch):
    stream = one_document(256, samples=4)
    num_tokens = stream.num_document_tokens + 8 * len(stream.columns)
    given = [one.detach() for one in states(num_tokens)]
    masked, copied = [], []
    attend = torch.nn.functional.scaled_dot_product_attention

    def noted(query, key, value, attn_mask=None, **more):
        masked.append(attn_mask.numel() if attn_mask is not None else 0)
        copied.append(key.numel())
        return attend(query, key, value, attn_mask=attn_mask, **more)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", noted)
    stream.layout(8, "cpu").attend(*given, None)
    assert 0 < max(masked) < num_tokens**2 / 8
    assert sum(copied) < 3 * given[1].numel()
    copied.clear()
    query, *cached = given
    stream.step_layout(8, "cpu").attend(query[:, :, -len(stream.columns) :], *cached, None)
    assert sum(copied) < 3 * given[1].numel()
