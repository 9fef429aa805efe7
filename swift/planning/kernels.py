"""Stand-ins on the device "meta" for kernels that only CUDA has: what they keep, compute and move.

What attention computes is counted from the segments of the stream.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from swift.models.attention import flex
from swift.models.attention.layout import Kernel, SegmentLayout
from swift.models.attention.spans import in_autocast_type
from swift.planning import numbers
from swift.planning.autocast import autocast_on_meta
from swift.planning.trace import Trace


def kernel_of(args: Any) -> Kernel | None:
    """The kernel of packed attention on a GPU."""
    return "flash" if args.attn_impl == "flash_attn" else "flex"


@contextlib.contextmanager
def as_on_gpu(trace: Trace) -> Iterator[None]:
    """Stand-ins for kernels of attention, and for autocast, which the device "meta" does not have."""
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
        # a tower's images see themselves
        images = None if settings.get("is_causal", True) else numbers.of(settings.get("cu_seq_lens_q"))
        seen = pairs() if images is None else float(images.diff().square().sum())
        return _Attention.apply(*states, trace, seen, True).transpose(1, 2)  # type: ignore[no-any-return]

    def of_flex(query: Tensor, key: Tensor, value: Tensor, **settings: Any) -> Tensor:
        return _Attention.apply(query, key, value, trace, pairs(), False)  # type: ignore[no-any-return]

    def of_sdpa(
        query: Tensor, key: Tensor, value: Tensor, attn_mask: Any = None, is_causal: bool = False, **settings: Any
    ) -> Tensor:
        query, key, value = in_autocast_type(query, key, value)
        seen = query.shape[0] * query.shape[2] * key.shape[2] / (2 if is_causal else 1)
        return _Attention.apply(query, key, value, trace, seen, False)  # type: ignore[no-any-return]

    flash = "transformers.modeling_flash_attention_utils._flash_attention_forward"
    with (
        mock.patch.object(SegmentLayout, "__init__", init),
        mock.patch(flash, of_flash),
        mock.patch.object(nn.functional, "scaled_dot_product_attention", of_sdpa),
        mock.patch.object(flex, "_flex_attention", lambda device_type: of_flex),
        mock.patch.object(flex, "_block_mask_of", lambda *numbers: None),
        fused_scans(trace),
        autocast_on_meta(),
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


@contextlib.contextmanager
def fused_scans(trace: Trace) -> Iterator[None]:
    """Linear attention as flash-linear-attention computes it, and state spaces as mamba-ssm, in models made before."""

    def delta_rule(
        query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, chunk_size: int = 64, **settings: Any
    ) -> tuple[Tensor, Tensor]:
        rows, length, heads, width = value.shape
        size, steps = key.shape[3], rows * length * heads
        # products in chunks, of which the solved one is kept in 16 bits, and those with the state
        flops = steps * (2 * chunk_size * (3 * size + 2 * width) + 6 * size * width)
        kept = key.new_empty(rows, length, heads, chunk_size + 6)  # three float32 numbers beside it
        given = (value, query, key, g, beta, settings.get("initial_state"))
        return _Scan.apply(trace, flops, (heads, size, width), chunk_size, kept, *given)  # type: ignore[no-any-return]

    def state_space(
        hidden: Tensor, dt: Tensor, decay: Tensor, b: Tensor, c: Tensor, chunk_size: int, *more: Any, **settings: Any
    ) -> Any:
        rows, length, heads, width = hidden.shape
        size, steps = b.shape[3], rows * length * heads
        flops = steps * (2 * chunk_size * (size + width) + 4 * size * width)
        kept = dt.new_empty(rows, length, heads, 2, dtype=torch.float32)
        given = (hidden, dt, decay, b, c, *more, *settings.values())
        output, state = _Scan.apply(trace, flops, (heads, width, size), chunk_size, kept, *given)
        return (output, state) if settings.get("return_final_states") else output

    stands = {"torch_chunk_gated_delta_rule": delta_rule, "mamba2_chunk_scan": state_space}
    files = [file for name, file in sys.modules.items() if name.startswith("transformers.models.")]
    with contextlib.ExitStack() as stack:
        for name, kernel in stands.items():
            for file in files:
                if name in vars(file):
                    stack.enter_context(mock.patch.object(file, name, kernel))
        yield


class _Scan(torch.autograd.Function):
    """A recurrence in chunks: keeps its inputs and `kept`, and makes the states of all chunks in each pass.

    The first input is [B, T, H, P], like the output; `state`: shape of a sequence's state.
    """

    @staticmethod
    def forward(ctx: Any, trace: Trace, flops: float, state: Any, chunk: int, kept: Tensor, *inputs: Any) -> Any:
        values = inputs[0]
        ctx.save_for_backward(kept, *(one for one in inputs if isinstance(one, Tensor)))
        ctx.places = [isinstance(one, Tensor) for one in inputs]
        ctx.trace, ctx.flops, ctx.states = trace, flops, (values.shape[0], -(-values.shape[1] // chunk), *state)
        states, output = values.new_empty(ctx.states), torch.empty_like(values)
        trace.kernel(flops, (values, *ctx.saved_tensors, states, states, output))
        return output, values.new_empty((values.shape[0], *state), dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, of_state: Tensor | None) -> Any:  # type: ignore[override]
        kept, *inputs = ctx.saved_tensors
        states = [gradient.new_empty(ctx.states) for _ in range(2)]  # and their gradients
        again = [torch.empty_like(one) for one in inputs[:3]]
        gradients = [torch.empty_like(one) for one in inputs]
        ctx.trace.kernel(3 * ctx.flops, (gradient, kept, *inputs, *states, *states, *again, *again, *gradients))
        found = iter(gradients)
        return (None,) * 5 + tuple(next(found) if tensor else None for tensor in ctx.places)


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
