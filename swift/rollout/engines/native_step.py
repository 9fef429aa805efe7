"""A decode step with the compiled kernels of `swift.native`: per layer four products of PyTorch and four calls between.

It computes what `decode_step.decode` computes, up to rounding, from the same weights and the same cache. Rows need no
masks here and none is moved: each is told where it is, and reads as many positions as it has.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Sequence

import torch
from torch import Tensor

from swift.native import LANES, Kernels, Layer, Step, threads_for
from swift.rollout.engines.decode_step import product
from swift.rollout.engines.prompt_cache import PromptCache


class NativeStep:
    """The weights of a model as `decode_step.decode` takes them, and its step.

    Args:
        kernels: compiled.
        embeddings: [V, hidden].
        weights: of each layer.
        last: behind the layers.
        scales: softmax scale of each layer.
        depth: D, width of a head.
    """

    def __init__(
        self,
        kernels: Kernels,
        embeddings: Tensor,
        weights: Sequence[Sequence[Tensor | None]],
        last: Sequence[Tensor | None],
        scales: Sequence[float],
        depth: int,
    ) -> None:
        self._kernels, self._embeddings, self._weights, self._last = kernels, embeddings, weights, last
        self._depth = depth
        self._layers = [Layer() for _ in weights]
        for layer, parts, scale in zip(self._layers, weights, scales, strict=True):
            layer.query_norm, layer.key_norm = (None if part is None else part.data_ptr() for part in parts[4:6])
            layer.epsilon = 0.0 if parts[6] is None else float(parts[6])
            layer.depth, layer.scale = depth, scale
        self._pointers = [ctypes.byref(layer) for layer in self._layers]
        self._epsilons = [_number(parts[1]) for parts in (*weights, last)]
        self._workspace = torch.empty(0)
        self._seen: weakref.ref[PromptCache] | None = None
        self._arrangement = -1
        self._room = 0  # floats of workspace per thread

    @staticmethod
    def obstacle(embeddings: Tensor, weights: Sequence[Sequence[Tensor | None]], depth: int) -> str | None:
        """Why the kernels do not take these weights, in a few words."""
        widths = [embeddings.shape[1], depth]
        for parts in weights:
            inner = parts[10]
            assert inner is not None
            widths.append(inner.shape[0 if inner.is_mkldnn else 1] // 2)
        if any(width % LANES for width in widths):
            return f"widths that are no multiples of {LANES}"
        found = [part for parts in weights for part in parts if part is not None]
        if not all(part.is_mkldnn or part.is_contiguous() for part in found):
            return "weights that are not contiguous"
        return None

    def __call__(self, ids: Tensor, positions: Tensor, table: tuple[Tensor, Tensor], cache: PromptCache) -> Tensor:
        """Logits [R, V] of the next token of each row of a cache, whose step has begun.

        Args:
            ids: [N], N >= R.
            positions: [N].
            table: cosines and sines [T, 1, D] of more positions than a row has.
            cache: of the rows.
        """
        kernels, weights = self._kernels, self._weights
        threads = torch.get_num_threads()
        hidden = torch.nn.functional.embedding(ids, self._embeddings)
        num_rows, width = hidden.shape
        normed = torch.empty_like(hidden)
        some = threads_for(hidden.numel())
        hidden_at, normed_at = hidden.data_ptr(), normed.data_ptr()

        def add_norm(added: Tensor | None, index: int, weight: Tensor | None) -> Tensor:
            """`hidden` with what is added, and its norm."""
            assert weight is not None
            pointer = None if added is None else added.data_ptr()
            epsilon = self._epsilons[index]
            kernels.add_norm(hidden_at, pointer, weight.data_ptr(), epsilon, normed_at, num_rows, width, some)
            return normed

        step = self._begin(positions, table, cache, threads)
        pointer = ctypes.byref(step)
        attended: Tensor | None = None
        active: Tensor | None = None
        states = add_norm(None, 0, weights[0][0])
        for index, parts in enumerate(weights):
            heads, heads_bias, output, output_bias, inner, inner_bias, down, down_bias = _matrices(parts)
            turning = product(states, heads, heads_bias)
            if attended is None:
                of_heads = turning.shape[1] - 2 * self._layers[index].groups * self._depth
                attended = turning.new_zeros(num_rows, of_heads)
            step.states, step.output = turning.data_ptr(), attended.data_ptr()
            kernels.attend(self._pointers[index], pointer)
            states = add_norm(product(attended, output, output_bias), index, parts[9])
            both = product(states, inner, inner_bias)
            if active is None:
                active = both.new_empty(num_rows, both.shape[1] // 2)
            gates, inner_width = both.data_ptr(), active.shape[1]
            ups = gates + inner_width * both.element_size()
            kernels.gate(gates, ups, active.data_ptr(), num_rows, inner_width, both.shape[1], threads_for(both.numel()))
            following = weights[index + 1] if index + 1 < len(weights) else self._last
            states = add_norm(product(active, down, down_bias), index + 1, following[0])
        head = self._last[2]
        assert head is not None
        logits = product(states, head, self._last[3])
        return logits.narrow(0, 0, cache.num_rows) if cache.num_rows < num_rows else logits

    def _begin(self, positions: Tensor, table: tuple[Tensor, Tensor], cache: PromptCache, threads: int) -> Step:
        """The rows of a step."""
        if self._seen is None or self._seen() is not cache or self._arrangement != cache.arrangement:
            self._look_at(cache)
        if self._workspace.numel() < threads * self._room:
            self._workspace = torch.empty(threads * self._room)
        slots, own, prompts = cache.rows()
        cosines, sines = table
        return Step(
            slots=slots.data_ptr(),
            own=own.data_ptr(),
            prompts=prompts.data_ptr(),
            positions=positions.data_ptr(),
            cosines=cosines.data_ptr(),
            sines=sines.data_ptr(),
            workspace=self._workspace.data_ptr(),
            share=self._room,
            rows=cache.num_rows,
            threads=threads,
        )

    def _look_at(self, cache: PromptCache) -> None:
        """Take down where the tensors of a cache are."""
        for index, (layer, parts) in enumerate(zip(self._layers, cache.layers, strict=True)):
            keys, _, own_keys, _ = parts
            layer.prompt_keys, layer.prompt_values, layer.own_keys, layer.own_values = (p.data_ptr() for p in parts)
            _, layer.groups, _, layer.width = keys.shape
            layer.size, layer.room = own_keys.shape[2], own_keys.shape[4]
            heads = self._weights[index][2]
            assert heads is not None
            rows = heads.shape[0 if heads.is_mkldnn else 1]
            layer.heads = rows // self._depth - 2 * layer.groups
        shared = layer.heads // layer.groups
        self._room = (2 * shared + 1) * self._depth + shared * (layer.width + layer.room)
        self._seen, self._arrangement = weakref.ref(cache), cache.arrangement


def _number(value: Tensor | None) -> float:
    assert value is not None
    return float(value)


def _matrices(
    parts: Sequence[Tensor | None],
) -> tuple[Tensor, Tensor | None, Tensor, Tensor | None, Tensor, Tensor | None, Tensor, Tensor | None]:
    """Heads, output, inner and down with their biases."""
    heads, output, inner, down = parts[2], parts[7], parts[10], parts[12]
    assert heads is not None and output is not None and inner is not None and down is not None
    return heads, parts[3], output, parts[8], inner, parts[11], down, parts[13]
