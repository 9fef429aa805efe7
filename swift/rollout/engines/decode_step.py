"""The arithmetic of a decode step, written so that TorchScript can run all layers of it in one call.

A step of a small model is hundreds of operations that are over in microseconds, and calling them one by one from
Python takes longer than they do. TorchScript runs the same operations one after the other without Python: the bits are
the same, and other threads go on. Where this version of PyTorch has no TorchScript, or refuses these functions, they
are called as they are. Parts of tensors are taken by `narrow`: TorchScript makes an operation of every colon.

R rows with N >= R rows of states (rounded up for the products, the last N - R mean nothing), H query heads, Hkv
key/value heads of width D; the cells of the cache are those of `swift.rollout.engines.prompt_cache`.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from swift.models.cpu_rows import inverse_rms

ALIGNMENT = 16
"""Widths are multiples of this."""
BLOCK = 128
"""Positions per product with values: MKL adds up longer sums in an order that depends on their length. The sums of
blocks are added apart, because other code adds to the smallest products."""
LEAST_ROWS = 4
"""Products with fewer rows are computed by other kernels, with other roundings."""


@functools.cache
def scalar(value: float) -> Tensor:
    """A number as a tensor on the CPU, which goes with tensors of any device."""
    return torch.tensor(value)


def rms_norm(rows: Tensor, weight: Tensor, epsilon: Tensor) -> Tensor:
    """Root-mean-square norm over the last dimension (arXiv:1910.07467)."""
    return inverse_rms(rows, epsilon).mul(rows).mul_(weight)


def turned(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions [N, h, D] of [N, h, D]; cos and sin [N, 1, D], the sine negative in its first half."""
    return torch.addcmul(heads * cos, heads.roll([heads.shape[-1] // 2], [-1]), sin)


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: Tensor,
    prompt_keys: Tensor,
    prompt_values: Tensor,
    own_keys: Tensor,
    own_values: Tensor,
    position: int,
    places: list[Tensor],
    prompt_mask: Tensor | None,
    own_mask: Tensor | None,
    row_of_slot: Tensor | None,
    slot_of_row: Tensor | None,
    alignment: int = ALIGNMENT,
    block: int = BLOCK,
) -> Tensor:
    """Write one position per row and attend to the prompt and the row's own positions.

    Args:
        query: [R, H, D]; consecutive heads share a key/value head.
        key: [R, Hkv, D].
        value: [R, Hkv, D].
        scale: softmax scale, a scalar on the CPU: TorchScript would make a tensor of a number each time.
        prompt_keys: [C, Hkv, D, W].
        prompt_values: [C, Hkv, W, D].
        own_keys: [C, Hkv, S, D, K], written.
        own_values: [C, Hkv, S, K, D], written.
        position: where rows write, the latest of them where they differ.
        places: cell, slot and position [R] of each row where those differ; empty where they do not.
        prompt_mask: [C * Hkv, 1, W], 0 or -inf.
        own_mask: [C, 1, S, 1, width], 0 or -inf, where positions differ.
        row_of_slot: [C * S]; None: row i is in slot i.
        slot_of_row: [N]; None: row i is in slot i, and N = R.
        alignment: constants are arguments for TorchScript's sake.
        block: see `BLOCK`.

    Returns:
        [N, H * D]
    """
    cells, groups, size, depth, room = own_keys.shape
    width = (position + alignment) // alignment * alignment
    if len(places) > 0:
        own_keys[places[0], :, places[1], :, places[2]] = key
        own_values[places[0], :, places[1], places[2]] = value
    else:
        if row_of_slot is not None:
            key, value = key.index_select(0, row_of_slot), value.index_select(0, row_of_slot)
        own_keys.select(4, position).copy_(key.view(cells, size, groups, depth).transpose(1, 2))
        own_values.select(3, position).copy_(value.view(cells, size, groups, depth).transpose(1, 2))
    if row_of_slot is not None:
        query = query.index_select(0, row_of_slot)
    grid = torch.empty([cells, groups, size, query.shape[1] // groups, depth], dtype=query.dtype, device=query.device)
    torch.mul(query.view(cells, size, groups, -1, depth).transpose(1, 2), scale, out=grid)
    queries = grid.view(cells * groups, -1, depth)  # [C * Hkv, S * rep, D]
    scores = _to_prompt(queries, prompt_keys.flatten(0, 1), prompt_mask)
    own = torch.bmm(grid.view(cells * groups * size, -1, depth), own_keys.view(-1, depth, room).narrow(2, 0, width))
    if own_mask is not None:
        own.view(cells, groups, size, -1, width).add_(own_mask)
    elif position + 1 < width:
        own.narrow(2, position + 1, width - position - 1).fill_(-float("inf"))
    both = torch.cat([scores.view(own.shape[0], own.shape[1], -1), own], -1).softmax(-1)
    prompt_width = prompt_keys.shape[3]
    to_prompt = both.view(queries.shape[0], queries.shape[1], -1).narrow(2, 0, prompt_width)
    output = _from_prompt(to_prompt, prompt_values.flatten(0, 1))
    sums = output.view(own.shape[0], own.shape[1], depth)
    own_states = own_values.view(-1, room, depth)
    for start in range(0, width, block):
        length = min(block, width - start)
        sums += torch.bmm(both.narrow(2, prompt_width + start, length), own_states.narrow(1, start, length))
    by_slot = output.view(cells, groups, size, -1).transpose(1, 2).reshape(cells * size, -1)
    return by_slot if slot_of_row is None else by_slot.index_select(0, slot_of_row)


def _to_prompt(queries: Tensor, keys: Tensor, mask: Tensor | None, least: int = LEAST_ROWS) -> Tensor:
    """Scores [B, M, W] of queries [B, M, D] with keys [B, D, W]."""
    rows = queries.shape[1]
    if rows < least:
        queries = torch.nn.functional.pad(queries, [0, 0, 0, least - rows])
    scores = torch.bmm(queries, keys) if mask is None else torch.baddbmm(mask, queries, keys)
    return scores.narrow(1, 0, rows).contiguous() if rows < least else scores


def _from_prompt(weights: Tensor, values: Tensor, block: int = BLOCK, least: int = LEAST_ROWS) -> Tensor:
    """Sums [B, M, D] of values [B, W, D] with weights [B, M, W]."""
    rows, width = weights.shape[1], weights.shape[2]
    if rows < least:
        weights = torch.nn.functional.pad(weights, [0, 0, 0, least - rows])
    if width <= block:
        sums = torch.bmm(weights, values)
    else:
        sums = torch.bmm(weights.narrow(2, 0, block), values.narrow(1, 0, block))
    for start in range(block, width, block):
        length = min(block, width - start)
        sums += torch.bmm(weights.narrow(2, start, length), values.narrow(1, start, length))
    return sums.narrow(1, 0, rows).contiguous() if rows < least else sums


def decode(
    ids: Tensor,
    positions: Tensor,
    embeddings: Tensor,
    cosines: Tensor,
    sines: Tensor,
    weights: list[list[Tensor | None]],
    last: list[Tensor | None],
    caches: list[list[Tensor]],
    scales: list[Tensor],
    num_rows: int,
    position: int,
    places: list[Tensor],
    prompt_mask: Tensor | None,
    own_mask: Tensor | None,
    row_of_slot: Tensor | None,
    slot_of_row: Tensor | None,
) -> Tensor:
    """One step from tokens to logits.

    Args:
        ids: [N].
        positions: [N].
        embeddings: [V, hidden].
        cosines: [T, 1, D], of the first T positions.
        sines: [T, 1, D], negative in their first half.
        weights: of each layer norm, epsilon [1], heads (queries, keys and values) and bias, norms of queries and of
            keys and their epsilon, output and bias, second norm, inner (gate and up) and bias, down and bias, matrices
            as `product` takes them; None for what a model does not have.
        last: norm behind the layers, its epsilon [1], head as `product` takes it and its bias or None.
        caches: of each layer the four tensors of `attend`.
        scales: softmax scale of each layer.
        num_rows: R.
        position: see `attend`.
        places: see `attend`.
        prompt_mask: see `attend`.
        own_mask: see `attend`.
        row_of_slot: see `attend`.
        slot_of_row: see `attend`.

    Returns:
        [R, V]
    """
    hidden = torch.nn.functional.embedding(ids, embeddings)
    cos, sin = cosines.index_select(0, positions), sines.index_select(0, positions)
    for layer in range(len(weights)):
        norm, epsilon, heads, heads_bias, query_norm, key_norm, head_epsilon = weights[layer][:7]
        output, output_bias, inner_norm, inner, inner_bias, down, down_bias = weights[layer][7:]
        prompt_keys, prompt_values, own_keys, own_values = caches[layer]
        assert norm is not None and epsilon is not None and inner_norm is not None
        assert heads is not None and output is not None and inner is not None and down is not None
        groups, depth = own_keys.shape[1], own_keys.shape[3]
        states = product(rms_norm(hidden, norm, epsilon), heads, heads_bias).view(hidden.shape[0], -1, depth)
        count = states.shape[1] - 2 * groups  # query heads
        turning = states.narrow(1, 0, count + groups)
        if query_norm is not None and key_norm is not None and head_epsilon is not None:
            queries = rms_norm(turning.narrow(1, 0, count), query_norm, head_epsilon)
            turning = torch.cat([queries, rms_norm(turning.narrow(1, count, groups), key_norm, head_epsilon)], 1)
        turning = turned(turning, cos, sin)
        if num_rows < states.shape[0]:
            turning, states = turning.narrow(0, 0, num_rows), states.narrow(0, 0, num_rows)
        attended = attend(
            turning.narrow(1, 0, count),
            turning.narrow(1, count, groups),
            states.narrow(1, count + groups, groups),
            scales[layer],
            prompt_keys,
            prompt_values,
            own_keys,
            own_values,
            position,
            places,
            prompt_mask,
            own_mask,
            row_of_slot,
            slot_of_row,
        )
        hidden = hidden.add_(product(attended, output, output_bias))
        parts = product(rms_norm(hidden, inner_norm, epsilon), inner, inner_bias).chunk(2, -1)
        active = torch.nn.functional.silu(parts[0]).mul_(parts[1])
        hidden = hidden.add_(product(active, down, down_bias))
    norm, epsilon, head, head_bias = last
    assert norm is not None and epsilon is not None and head is not None
    logits = product(rms_norm(hidden, norm, epsilon), head, head_bias)
    return logits.narrow(0, 0, num_rows) if num_rows < logits.shape[0] else logits


def product(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """[N, M] of rows [N, K].

    Args:
        rows: at least `LEAST_ROWS`.
        weight: packed for oneDNN (`swift.models.cpu_linear.pack`), or [K, M].
        bias: [M].
    """
    if weight.is_mkldnn:
        return torch.ops.mkldnn._linear_pointwise(rows, weight, bias, "none", [], "")
    return torch.mm(rows, weight) if bias is None else torch.addmm(bias, rows, weight)
