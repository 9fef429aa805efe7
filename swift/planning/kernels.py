"""Stand-ins on the device "meta" for kernels that only CUDA has: what they keep, compute and move.

What attention computes is counted from the segments of the stream.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from swift.models.attention import flex
from swift.models.attention.layout import Kernel, SegmentLayout
from swift.planning.trace import Trace


def kernel_of(args: Any) -> Kernel | None:
    """The kernel of packed attention on a GPU."""
    return "flash" if args.attn_impl == "flash_attn" else "flex"


@contextlib.contextmanager
def as_on_gpu(trace: Trace) -> Iterator[None]:
    """Stand-ins for kernels of attention; and no autocast, which the device "meta" does not have."""
    layouts: list[SegmentLayout] = []
    made = SegmentLayout.__init__

    def init(self: SegmentLayout, *args: Any, **kwargs: Any) -> None:
        made(self, *args, **kwargs)
        layouts[:] = [self]

    def pairs() -> float:
        return sum(
            seen.length * span.length + span.length**2 / 2 if span is not group.prompt else span.length**2 / 2
            for group in layouts[0].groups
            for seen, span in [(group.prompt, group.prompt), *group.seen()]
        )

    def of_flash(query: Tensor, key: Tensor, value: Tensor, **settings: Any) -> Tensor:
        states = (state.transpose(1, 2) for state in (query, key, value))
        return _Attention.apply(*states, trace, pairs(), True).transpose(1, 2)  # type: ignore[no-any-return]

    def of_flex(query: Tensor, key: Tensor, value: Tensor, **settings: Any) -> Tensor:
        return _Attention.apply(query, key, value, trace, pairs(), False)  # type: ignore[no-any-return]

    def of_sdpa(
        query: Tensor, key: Tensor, value: Tensor, attn_mask: Any = None, is_causal: bool = False, **settings: Any
    ) -> Tensor:
        seen = query.shape[0] * query.shape[2] * key.shape[2] / (2 if is_causal else 1)
        return _Attention.apply(query, key, value, trace, seen, False)  # type: ignore[no-any-return]

    flash = "transformers.modeling_flash_attention_utils._flash_attention_forward"
    with (
        mock.patch.object(SegmentLayout, "__init__", init),
        mock.patch(flash, of_flash),
        mock.patch.object(nn.functional, "scaled_dot_product_attention", of_sdpa),
        mock.patch.object(flex, "_flex_attention", lambda device_type: of_flex),
        mock.patch.object(flex, "_block_mask_of", lambda *numbers: None),
        mock.patch.object(torch, "is_autocast_enabled", lambda *device_type: False),
        mock.patch.object(torch, "autocast", lambda *settings, **named: nullcontext()),
    ):
        yield


class _Attention(torch.autograd.Function):
    """Attention that keeps its inputs, its output and one float32 number per query and head, as fused kernels do.

    Of query [R, H, T, D], key [R, K, C, D] and value [R, K, C, E]; `pairs` of query and key are visible. sums: the
    backward pass adds up the queries' gradient in float32 (flash-attn).
    """

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, trace: Trace, pairs: float, sums: bool) -> Tensor:
        output = query.new_empty(*query.shape[:3], value.shape[3])
        logsumexp = query.new_empty(query.shape[:3], dtype=torch.float32)
        ctx.save_for_backward(query, key, value, output, logsumexp)
        ctx.trace, ctx.pairs, ctx.sums = trace, pairs, sums
        trace.kernel(4 * pairs * query.shape[1] * query.shape[3], (query, key, value, output))
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        query, key, value, output, logsumexp = ctx.saved_tensors
        delta = torch.empty_like(logsumexp)
        total = torch.empty_like(query, dtype=torch.float32) if ctx.sums else None
        gradients = torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
        moved = (query, key, value, output, gradient, *gradients)
        ctx.trace.kernel(10 * ctx.pairs * query.shape[1] * query.shape[3], moved)
        del delta, total
        return (*gradients, None, None, None)


class _Launched:
    """A Triton kernel, which is called with a grid in brackets."""

    def __init__(self, call: Callable[..., None]) -> None:
        self.call = call

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return self.call


@contextlib.contextmanager
def fused_head(trace: Trace) -> Iterator[None]:
    """TRL's log-probs as on a GPU: of tokens that the loss counts, in tiles or rows that Triton kernels read once."""
    from trl.kernels import chunked_logprob, logprob_entropy
    from trl.trainer import utils

    def forward(tile: Tensor, *arguments: Any, **named: Any) -> None:
        trace.kernel(0, (tile,))

    def backward(tile: Tensor, *arguments: Any, **named: Any) -> None:
        trace.kernel(0, (tile, tile))

    def add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
        trace.kernel(2 * left.shape[0] * left.shape[1] * right.shape[1], (left, right, total))

    with (
        mock.patch.object(utils, "_use_triton", lambda device: True),  # which chooses tokens, and no kernel
        mock.patch.object(utils, "_supports_trl_loss_kernel", lambda *arguments: True),
        mock.patch.object(logprob_entropy, "_forward_kernel", _Launched(forward)),
        mock.patch.object(logprob_entropy, "_backward_kernel", _Launched(forward)),  # which has an output of its own
        mock.patch.object(chunked_logprob, "_forward_tile", forward),
        mock.patch.object(chunked_logprob, "_backward_tile", backward),
        mock.patch.object(chunked_logprob, "_addmm_fp32", add_product),
    ):
        yield
