"""A decode step with the compiled kernels of `swift.native`: a few calls per layer, no other passes over the states.

It computes what `decode_step.decode` computes, up to rounding, from the same cache. Rows need no masks here and none is
moved: each is told where it is, and reads as many positions as it has. What a row gets does not depend on other rows.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from swift.models.cpu_panels import Panels
from swift.native import LANES, Kernels, Layer, Step, threads_for
from swift.rollout.engines.prompt_cache import PromptCache


@dataclass(frozen=True, slots=True)
class NativeLayer:
    """The weights of a decoder layer, whose activation is silu."""

    norm: Tensor
    """[hidden], before attention."""
    epsilon: float
    """Of this norm and the one before the MLP."""
    heads: Panels
    """Queries, keys and values."""
    query_norm: Tensor | None
    """[D]"""
    key_norm: Tensor | None
    """[D]"""
    head_epsilon: float
    scale: float
    """Of softmax."""
    output: Panels
    inner_norm: Tensor
    """[hidden], before the MLP."""
    inner: Panels
    """Gates and ups."""
    down: Panels


def takes(*widths: int) -> bool:
    """Whether the kernels take states, heads and inner states of these widths."""
    return all(width % LANES == 0 for width in widths)


class NativeStep:
    """The step of a model whose weights have been packed.

    Args:
        kernels: compiled.
        embeddings: [V, hidden].
        layers: all of one shape.
        norm: [hidden], behind the layers.
        epsilon: of that norm.
        head: gives the logits.
        depth: D, width of a head.
        groups: Hkv, key/value heads.
    """

    def __init__(
        self,
        kernels: Kernels,
        embeddings: Tensor,
        layers: Sequence[NativeLayer],
        norm: Tensor,
        epsilon: float,
        head: Panels,
        depth: int,
        groups: int,
    ) -> None:
        self._kernels, self._embeddings, self._weights, self._head = kernels, embeddings, layers, head
        self._norms = [(part.norm, part.epsilon) for part in layers] + [(norm, epsilon)]
        self._heads = layers[0].heads.width // depth - 2 * groups
        self._depth = depth
        self._layers = [
            Layer(
                heads=self._heads,
                groups=groups,
                depth=depth,
                epsilon=one.head_epsilon,
                scale=one.scale,
            )
            for one in layers
        ]
        self._share = 0  # floats of workspace for each thread
        self._workspace = embeddings.new_empty(0)
        self._seen: weakref.ref[PromptCache] | None = None
        self._arrangement = -1

    def __call__(self, ids: Tensor, positions: Tensor, table: tuple[Tensor, Tensor], cache: PromptCache) -> Tensor:
        """Logits [R, V] of the next token of each row of a cache, whose step has begun.

        Args:
            ids: [R].
            positions: [R].
            table: cosines and sines [T, 1, D] of more positions than a row has, the sines negative in their first half.
            cache: of the rows.
        """
        kernels = self._kernels
        hidden = torch.nn.functional.embedding(ids, self._embeddings)
        count, width = hidden.shape
        normed = torch.empty_like(hidden)
        attended = hidden.new_empty(count, self._heads * self._depth)
        active = hidden.new_empty(count, self._weights[0].inner.width // 2)
        step = self._begin(positions, table, cache)
        if count != step.rows:
            raise ValueError(f"{count} tokens for a cache of {step.rows} rows")
        step.output = attended.data_ptr()
        sizes = count, width, threads_for(hidden.numel())

        def add_norm(added: Tensor | None, weight: Tensor, epsilon: float) -> Tensor:
            """Add to the states; their norm."""
            pointer = None if added is None else added.data_ptr()
            kernels.add_norm(hidden.data_ptr(), pointer, weight.data_ptr(), epsilon, normed.data_ptr(), *sizes)
            return normed

        states = add_norm(None, *self._norms[0])
        for layer, weights, following in zip(self._layers, self._weights, self._norms[1:], strict=True):
            turning = weights.heads(states)
            step.states = turning.data_ptr()
            if weights.query_norm is not None and weights.key_norm is not None:
                layer.query_norm, layer.key_norm = weights.query_norm.data_ptr(), weights.key_norm.data_ptr()
            kernels.attend(ctypes.byref(layer), ctypes.byref(step))
            states = add_norm(weights.output(attended), weights.inner_norm, weights.epsilon)
            both = weights.inner(states)
            gates, ups = both.data_ptr(), both.data_ptr() + both.nbytes // (2 * count)
            kernels.gate(gates, ups, active.data_ptr(), *active.shape, both.shape[1], threads_for(both.numel()))
            states = add_norm(weights.down(active), *following)
        return self._head(states)

    def _begin(self, positions: Tensor, table: tuple[Tensor, Tensor], cache: PromptCache) -> Step:
        """The rows of a step."""
        if self._seen is None or self._seen() is not cache or self._arrangement != cache.arrangement:
            self._look_at(cache)
        threads = torch.get_num_threads()
        if self._workspace.numel() < threads * self._share:
            self._workspace = self._workspace.new_empty(threads * self._share)
        slots, own, prompts = cache.rows()
        cosines, sines = table
        for part in (slots, own, prompts, positions):
            if part.shape != (cache.num_rows,) or part.dtype != torch.int64 or not part.is_contiguous():
                raise ValueError(f"{list(part.shape)} {part.dtype} for {cache.num_rows} rows whose step has begun")
        return Step(
            slots=slots.data_ptr(),
            own=own.data_ptr(),
            prompts=prompts.data_ptr(),
            positions=positions.data_ptr(),
            cosines=cosines.data_ptr(),
            sines=sines.data_ptr(),
            workspace=self._workspace.data_ptr(),
            share=self._share,
            rows=cache.num_rows,
            threads=threads,
        )

    def _look_at(self, cache: PromptCache) -> None:
        """Take down where the tensors of a cache are."""
        for layer, parts in zip(self._layers, cache.layers, strict=True):
            layer.prompt_keys, layer.prompt_values, layer.own_keys, layer.own_values = (p.data_ptr() for p in parts)
            layer.width, layer.size, layer.room = parts[0].shape[3], parts[2].shape[2], parts[2].shape[4]
        shared = self._heads // layer.groups
        self._share = (2 * shared + 1) * self._depth + shared * (layer.width + layer.room)
        self._seen, self._arrangement = weakref.ref(cache), cache.arrangement
