"""Padded rows of pairs that a model computes as one stream, without padding, and a common beginning once.

    rows      p0 p1 p2 a  b         stream    p0 p1 p2 | a b | d
              p0 p1 p2 d  .

The caller of the model keeps its rows: they become a stream before the decoder, and hidden states become rows behind
it. A tower for images runs before, for all rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from swift.models.attention.layout import SegmentLayout
from swift.models.attention.spans import GroupSpans, Span
from swift.models.transfer import to_device, to_host


class PairStream(SegmentLayout):
    """The layout of a stream of pairs, with the places of its tokens in their rows, and the reverse.

    Args:
        ids_RL: token ids; the first half of the rows are first answers behind prompts, the second half the others.
        mask_RL: 1 for tokens, 0 for the padding on the right.
        seen: ids of a prompt and its place in the stream -> its images whose tokens see each other.
    """

    def __init__(
        self, ids_RL: Tensor, mask_RL: Tensor, seen: Callable[[Sequence[int], int], tuple[Span, ...]] | None = None
    ) -> None:
        shape, pairs = ids_RL.shape, len(ids_RL) // 2
        same = (ids_RL[:pairs] == ids_RL[pairs:]) & mask_RL[:pairs].bool() & mask_RL[pairs:].bool()
        known = [mask_RL.sum(1), same.cumprod(1).sum(1), *([] if seen is None else [ids_RL])]
        lengths_R, shared_P, *rest = to_host(known)
        groups: list[GroupSpans] = []
        end = 0
        for row, prompt, first, second in zip(
            range(pairs), shared_P.tolist(), *lengths_R.view(2, -1).tolist(), strict=True
        ):
            own = Span(end + prompt, first - prompt), Span(end + first, second - prompt)
            images = () if seen is None else seen(rest[0][row, :prompt].tolist(), end)
            shared = GroupSpans(Span(end, prompt), own, images=images)
            groups += [shared] if prompt else [GroupSpans(span, ()) for span in own]
            end = own[1].stop
        super().__init__(groups, ids_RL.device)
        steps = torch.arange(shape[1])
        real, again = steps < lengths_R[:, None], steps < shared_P[:, None]  # the latter are in the stream already
        kept = torch.stack([real[:pairs], real[pairs:] & ~again], 1)  # pair after pair
        row_place_T = torch.arange(shape.numel()).view(2, pairs, -1).transpose(0, 1)[kept]
        stream_place_RL = torch.zeros(shape, dtype=torch.long)
        stream_place_RL.view(-1)[row_place_T] = torch.arange(end)
        stream_place_RL[pairs:] = stream_place_RL[pairs:].where(~again, stream_place_RL[:pairs])
        self.row_place_T = to_device(row_place_T, ids_RL.device)
        self.stream_place_RL = to_device(stream_place_RL, ids_RL.device)

    def own(self, values: Tensor, axis: int = 1) -> Tensor:
        """[R, L, ...] of the rows -> [1, T, ...] of the stream. axis: that of L."""
        return values.flatten(axis - 1, axis).index_select(axis - 1, self.row_place_T).unsqueeze(axis - 1)

    def own_images(self, seen: Tensor, embeds: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
        """As `SpreadLayout.own_images`; seen: [R, L] of the rows, with V tokens of images."""
        mine = self.own(seen)
        number_T = self.own(seen.flatten().cumsum(0).view(seen.shape))[mine] - 1
        return mine, [one.index_select(0, number_T) for one in embeds]

    def whole(self, states: Tensor) -> Tensor:
        """[1, T, H] of the stream -> [R, L, H]; those of padding have no meaning."""
        return nn.functional.embedding(self.stream_place_RL, states[0])
