"""Sequence parallelism: the ranks of a group compute one stream together, a part of its tokens each.

As in DeepSpeed-Ulysses (arXiv:2309.14509), a rank runs the layers over its tokens; around attention, the ranks exchange
them for heads, so that each computes some heads over the whole stream, by the kernels of one rank. Heads need not
divide: with 14 heads, 4 ranks have 4, 4, 3 and 3 of them, and a key/value head goes to each rank with a query of it.

    tokens of a stream    part of a rank   -> layers ->   all heads of its tokens
                                                          exchange
                                                          its heads of all tokens  -> attention -> and back
    hidden states         part of a rank   -> gather ->   of the stream, on every rank

Before the decoder, each rank computes the embeddings of the whole stream, with those of images (a tower runs on each
rank), and takes its part. What follows the decoder is computed by each rank from all hidden states, so losses and
metrics know nothing of it. The gradient of a part is the sum over what the ranks made of it. So if they compute the
same loss, each rank's gradients are N times those of its part, and their mean over the ranks is that of the loss; if
each uses its share of the targets (`swift.models.scoring`), their sum is.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from swift.models.attention.layout import Kernel, SegmentLayout
from swift.models.attention.pair_stream import PairStream
from swift.models.attention.spans import PLAIN, Variant, in_autocast_type, packed_rows
from swift.models.transfer import to_device, to_host

KNOWN_INPUTS = {
    "input_ids", "inputs_embeds", "position_ids", "visual_pos_masks", "deepstack_visual_embeds", "attention_mask",
    "past_key_values", "use_cache", "cache_position", "output_attentions", "output_hidden_states", "return_dict",
    "kwargs",
}  # fmt: skip
"""Arguments of decoders: those that are cut, and those that have no part for each token."""


@dataclass(frozen=True, eq=False)
class SequenceGroup:
    """The ranks that share streams: `size` neighbours, of which this is number `rank`. group: torch's."""

    size: int
    rank: int
    group: Any = None

    @classmethod
    def of_this_rank(cls, size: int, timeout_s: float = 1800.0) -> SequenceGroup | None:
        """The group of this process, whose ranks are a multiple of `size`; None with a size of 1. Collective."""
        if size == 1:
            return None
        group, _ = dist.new_subgroups(group_size=size, timeout=timedelta(seconds=timeout_s))
        return cls(size, dist.get_rank() % size, group)

    def exchange(self, parts: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        """Send `sent[r]` rows of `parts` to rank r, in order; `received[r]` rows come from it, with a gradient."""
        return _Exchange.apply(parts, list(sent), list(received), self.group)  # type: ignore[no-any-return, no-untyped-call]

    def gather(self, part: Tensor) -> Tensor:
        """The rows of all ranks, in rank order, on every rank; each rank has equally many."""
        rows = len(part)
        copies = part.expand(self.size, *part.shape).flatten(0, 1)
        return self.exchange(copies, [rows] * self.size, [rows] * self.size)

    def dealt(self, values: Tensor) -> Tensor:
        """Of values that all ranks have, every `size`-th: this rank's share."""
        return values[self.rank :: self.size]

    def collected(self, share: Tensor, total: int) -> Tensor:
        """The values of which every rank has a share (`dealt`); a gradient reaches the own share only."""
        most = -(-total // self.size)
        own = nn.functional.pad(share, (0, most - len(share)))
        parts = [torch.empty_like(own) for _ in range(self.size)]
        dist.all_gather(parts, own.detach(), group=self.group)
        parts[self.rank] = own
        return torch.stack(parts, 1).flatten()[:total]


class _Exchange(torch.autograd.Function):
    """torch's all-to-all with its gradient, which goes the way back."""

    @staticmethod
    def forward(ctx: Any, parts: Tensor, sent: list[int], received: list[int], group: Any) -> Tensor:
        ctx.way_back = received, sent, group
        made = parts.new_empty(sum(received), *parts.shape[1:])
        dist.all_to_all_single(made, parts.contiguous(), received, sent, group=group)
        return made

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return _Exchange.apply(grads[0], *ctx.way_back), None, None, None  # type: ignore[no-untyped-call]


class SpreadLayout:
    """A layout whose stream is spread over the ranks of a group, in order; the last part is filled up.

    Args:
        layout: of the whole stream.
        num_tokens: of the stream.
        group: the ranks.
        rows: where the stream is made of padded rows, their shape [B, L] and the places of its tokens in them.
    """

    def __init__(
        self,
        layout: SegmentLayout,
        num_tokens: int,
        group: SequenceGroup,
        rows: tuple[torch.Size, Tensor] | None = None,
    ) -> None:
        self.layout, self.num_tokens, self.group, self.rows = layout, num_tokens, group, rows
        self.num_own = -(-num_tokens // group.size)
        self._seen: dict[tuple[int, int], Tensor] = {}

    def own(self, values: Tensor, axis: int = 1) -> Tensor:
        """[1, T, ...] of the stream -> [1, T / N, ...] of this rank. axis: that of tokens."""
        filling = self.num_own * self.group.size - self.num_tokens
        first = values.narrow(axis, 0, 1)
        filled = torch.cat([values, *[first] * filling], axis)
        return filled.narrow(axis, self.group.rank * self.num_own, self.num_own)

    def own_images(self, seen: Tensor, embeds: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
        """Which tokens of this rank stand for images, [1, T / N], and what is added to them in each first layer.

        seen: [1, T] of the stream. embeds: [V, H] of its V tokens of images, for each of these layers (Qwen3-VL).
        """
        start = self.group.rank * self.num_own
        filled = nn.functional.pad(seen, (0, self.num_own * self.group.size - self.num_tokens))
        mine = filled.narrow(1, start, self.num_own)
        before, count = int(filled[:, :start].sum()), int(mine.sum())
        return mine, [one.narrow(0, before, count) for one in embeds]

    def whole(self, hidden: Tensor) -> Tensor:
        """Hidden states [1, T / N, H] of this rank -> those of the stream, [1, T, H] or in its rows, [B, L, H]."""
        found = self.group.gather(hidden[0])[: self.num_tokens]
        if self.rows is None:
            return found[None]
        shape, places = self.rows
        return found.new_zeros(shape.numel(), found.shape[-1]).index_copy(0, places, found).view(*shape, -1)

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float | None,
        variant: Variant = PLAIN,
        kernel: Kernel | None = None,
    ) -> Tensor:
        """As `SegmentLayout.attend`, from and to the tokens of this rank, [1, H, T / N, D] -> [1, T / N, H, E]."""
        query, key, value = in_autocast_type(query, key, value)
        shares = head_shares(query.shape[1], key.shape[1], self.group.size)
        mine = shares[self.group.rank]
        queries = [len(share.queries) for share in shares]
        keys = [len(share.keys) for share in shares]
        every = [number for share in shares for number in share.keys]
        if every != list(range(key.shape[1])):
            if (heads := (query.shape[1], key.shape[1])) not in self._seen:
                self._seen[heads] = to_device(every, key.device)
            key, value = (states.index_select(1, self._seen[heads]) for states in (key, value))
        whole = self._heads(query, queries), self._heads(key, keys), self._heads(value, keys)
        if variant.sinks is not None:
            variant = Variant(variant.window, variant.softcap, variant.sinks[mine.queries.start : mine.queries.stop])
        found = self.layout.attend(*whole, scale, variant, kernel)  # [1, T, own heads, E]
        return self._tokens(found, queries)

    def _heads(self, states: Tensor, counts: Sequence[int]) -> Tensor:
        """All heads of the own tokens, [1, X, T / N, D] -> the own heads of all tokens, [1, x, T, D]."""
        mine = counts[self.group.rank]
        parts = self.group.exchange(states[0], counts, [mine] * self.group.size)
        parts = parts.view(self.group.size, mine, self.num_own, -1).transpose(0, 1)
        return parts.reshape(mine, -1, states.shape[3])[None, :, : self.num_tokens]

    def _tokens(self, found: Tensor, counts: Sequence[int]) -> Tensor:
        """The inverse, [1, T, x, E] -> [1, T / N, X, E]."""
        mine, size = counts[self.group.rank], self.group.size
        filled = nn.functional.pad(found[0], (0, 0, 0, 0, 0, self.num_own * size - self.num_tokens))
        parts = filled.view(size, self.num_own, mine, -1).transpose(1, 2).flatten(0, 1)
        return self.group.exchange(parts, [mine] * size, counts).transpose(0, 1)[None]


@dataclass(frozen=True, slots=True)
class HeadShare:
    """The heads of one rank: its query heads, and the key/value heads that they see, one by one if need be."""

    queries: range
    keys: tuple[int, ...]


def head_shares(num_heads: int, num_kv: int, size: int) -> list[HeadShare]:
    """The heads of each of `size` ranks, as even as they get; there must be a head for each.

    Query heads h * H / K and following see key/value head h; on a rank they do so too, where it has equally many of
    each, and otherwise every query head has a key/value head of its own.

    >>> [share.keys for share in head_shares(14, 2, 4)]
    [(0,), (0, 0, 0, 1), (1,), (1,)]
    """
    ends = list(accumulate(num_heads // size + (rank < num_heads % size) for rank in range(size)))
    shares = []
    for start, stop in zip([0, *ends], ends, strict=False):
        seen = [query * num_kv // num_heads for query in range(start, stop)]
        distinct = sorted(set(seen))
        even = len({seen.count(number) for number in distinct}) == 1
        shares.append(HeadShare(range(start, stop), tuple(distinct if even else seen)))
    return shares


def uncut_inputs(decoder: nn.Module) -> list[str]:
    """Arguments that a decoder may get beside embeddings, of whose tokens a rank would not get its part."""
    return sorted(set(inspect.signature(decoder.forward).parameters) - KNOWN_INPUTS)


def spread_decoder(decoder: nn.Module) -> None:
    """Let a decoder that takes packed streams take a `SpreadLayout` or a `PairStream`, and give whole hidden states."""
    if getattr(decoder, "_swift_spreads", False):
        return

    def before(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        layout = kwargs.get("attention_layout")
        if isinstance(layout, SpreadLayout | PairStream):
            kwargs = {**kwargs}
            for name in ("input_ids", "inputs_embeds", "position_ids"):
                if (values := kwargs.get(name)) is not None:  # positions may be [3, 1, T], of three axes of images
                    kwargs[name] = layout.own(values, values.ndim - 1 if name == "position_ids" else 1)
            if kwargs.get("deepstack_visual_embeds") is not None:
                kwargs["visual_pos_masks"], kwargs["deepstack_visual_embeds"] = layout.own_images(
                    kwargs["visual_pos_masks"], kwargs["deepstack_visual_embeds"]
                )
        return args, kwargs

    def after(module: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> Any:
        layout = kwargs.get("attention_layout")
        if isinstance(layout, SpreadLayout | PairStream):
            output["last_hidden_state"] = layout.whole(output["last_hidden_state"])
        if isinstance(layout, PairStream) and output.get("router_logits") is not None:  # [T, E] of each layer
            output["router_logits"] = tuple(layout.whole(one[None]).flatten(0, 1) for one in output["router_logits"])
        return output

    decoder.register_forward_pre_hook(before, with_kwargs=True)
    decoder.register_forward_hook(after, with_kwargs=True)
    decoder._swift_spreads = True  # type: ignore[assignment]


def lengths_of(mask: Tensor) -> list[int]:
    """Tokens of each row of an attention mask [R, T]."""
    return mask.sum(1).tolist()  # type: ignore[no-any-return]


KINDS = "mm_token_type_ids"
"""Which tokens of rows stand for an image, an argument of models whose images lie in a plane."""


def _positions(model: Any, ids: Tensor, mask: Tensor, inputs: Mapping[str, Any]) -> Tensor:
    """Positions of the tokens of rows, [R, T], or [3, R, T] of images in a plane."""
    names = [name for name, value in inputs.items() if name.endswith((KINDS, "grid_thw")) and value is not None]
    if not names or not hasattr(model, "get_rope_index"):
        return mask.cumsum(1) - 1
    ids_, mask_, *rest = to_host([ids, mask, *(inputs[name] for name in names)])  # it reads each row on the host
    positions = model.get_rope_index(ids_, attention_mask=mask_, **dict(zip(names, rest, strict=True)))[0]
    return to_device(positions, ids.device)


def spread_rows(decoder: nn.Module, group: SequenceGroup) -> None:
    """Let all forward passes of a decoder be shared by a group, whose ranks give it the same rows.

    decoder: or that with the tower of a model that sees.

    Rows are padded, with an attention mask, or packed, with a layout.
    """

    def before(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        kwargs = {**kwargs, **dict(zip(("input_ids",), args, strict=False))}
        ids, mask = kwargs["input_ids"], kwargs.pop("attention_mask", None)
        layout, rows = kwargs.get("attention_layout"), None
        if layout is None:
            mask = torch.ones_like(ids) if mask is None else mask
            rows = ids.shape, mask.flatten().nonzero()[:, 0]
            layout = SegmentLayout(packed_rows(lengths_of(mask)), ids.device)
            positions = kwargs.get("position_ids")
            kwargs["position_ids"] = _positions(module, ids, mask, kwargs) if positions is None else positions
            for name in ("input_ids", "position_ids", KINDS):
                if (values := kwargs.get(name)) is not None:
                    values = values.expand(*values.shape[:-2], *ids.shape)
                    kwargs[name] = values.flatten(-2).index_select(-1, rows[1]).unsqueeze(-2)
        kwargs["attention_layout"] = SpreadLayout(layout, kwargs["input_ids"].shape[1], group, rows)
        return (), kwargs

    decoder.register_forward_pre_hook(before, with_kwargs=True, prepend=True)


def stream_pairs(decoder: nn.Module, seen: Any = None) -> None:
    """Let a decoder that takes packed streams compute padded rows of pairs, with an attention mask, as a `PairStream`.

    decoder: or that with the tower of a model that sees. seen: see `PairStream`.
    """

    def before(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        kwargs = {**kwargs, **dict(zip(("input_ids",), args, strict=False))}
        ids, mask = kwargs["input_ids"], kwargs.pop("attention_mask")
        kwargs["position_ids"] = _positions(module, ids, mask, kwargs)
        return (), {**kwargs, "attention_layout": PairStream(ids, mask, seen)}

    decoder.register_forward_pre_hook(before, with_kwargs=True, prepend=True)
