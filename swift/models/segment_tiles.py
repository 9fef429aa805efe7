"""Attention of packed segments on the CPU: only visible keys, no copies of long prompts, no [T, T] matrix.

A *family* is a set of segments that are computed together: the completions of a group, which see its prompt, and
prompts, which see nothing before them. Its rows are cut into tiles of `BLOCK` queries, and a tile is a softmax over the
scores of two products:

    | prefix keys [P, D]      | own keys up to the tile's end, causal |
    | one product for all     | one product per row                   |
    | rows of the family      |                                       |

A short prefix is copied before the keys of each row instead. Then a tile is one batch of products for many rows, all
key/value heads and several groups, which is what small models need: their products are over before the next is asked
for. Prefixes of other lengths are aligned at their ends, what is missing at the front is masked.

Rows are sorted by length, so a tile holds those that reach it, and what is computed for nothing is half a tile per row
and the upper triangle of its last block. The query heads of a key/value head are rows of the same product, so no key
is repeated. Scores of a tile fit into the cache; they are kept for the backward where that is little beside what
the layer keeps anyway, else they are computed again.

The order of all this is that of rows in three tables (queries, keys, values), which are gathered from the stream by one
index and brought back by another. A layout makes both once for all layers (`_Plan`). Tokens that nobody sees are in no
table; their output and their gradients are zero.

Against masked SDPA over rows that hold a copy of their prompt, 64 completion tokens take half the time behind 16 prompt
tokens and two thirds behind 280. 16-bit states are computed in fp32.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

if TYPE_CHECKING:
    from swift.models.segments import GroupSpans, Span

# T tokens of the stream, H query heads, K key/value heads, J = H / K, D head width, E value width
# R rows of a family, L their longest, P prefix tokens, S steps of a tile
# B products of a batch: rows, or rows x key/value heads; C keys of a product
# M, N rows of the tables of queries and keys: one per token and key/value head, for queries J x D wide

BLOCK = 32
"""Query steps of a tile; 64 takes up to a fifth longer where completions are about as long, 16 a tenth elsewhere."""

TILE_ELEMENTS = 2**18
"""Scores of a tile for each thread (1 MiB in fp32, a core's cache)."""

ALIGNED = 8
"""Scores of a query are a multiple of so many (32 bytes in fp32); products take up to a fifth longer else."""

RAGGED = 2
"""Rows of a family are at least this fraction."""

COPIED = 128
"""Prefixes of at most so many tokens are copied to each row, for the time of one layer's forward or backward."""

MERGE_ELEMENTS = 2**14
"""Scores that cost what the operations of a tile cost: so many may be computed for nothing to have one family less."""

KEPT_PER_QUERY = 8
"""Probabilities that a layer keeps for its backward, at most, per element of its queries. A layer keeps about 25 such
tensors in any case."""


@dataclass(frozen=True, slots=True)
class _Row:
    """A segment and what it sees before itself."""

    prefix: Span | None
    span: Span

    @property
    def num_prefix(self) -> int:
        """Tokens of the prefix."""
        return self.prefix.length if self.prefix is not None else 0


@dataclass(frozen=True, slots=True)
class _Tile:
    """A batch of products of queries with the keys that they see. `first_...` are rows of the tables."""

    batch: slice
    """Products of the family."""
    start: int
    stop: int
    first_query: int
    first_key: int
    key_stride: int
    """From the first key of a product to that of the next."""
    num_keys: int
    """Up to `stop` and a few more, all later than the queries, for `ALIGNED`."""
    diagonal: int
    """Which key of a product is the first step's own."""
    first_prefix: int
    num_prefix: int
    """Keys that all products of the batch share."""
    hidden: Tensor | None
    """[B, 1, P], -inf at copied keys that a row does not have."""

    @property
    def num_products(self) -> int:
        """Of the batch."""
        return self.batch.stop - self.batch.start

    @property
    def steps(self) -> int:
        """Of each product."""
        return self.stop - self.start

    @property
    def num_queries(self) -> int:
        """Rows of the table of queries."""
        return self.num_products * self.steps

    def queries(self, table: Tensor, per_step: int) -> Tensor:
        """[M, J x D] -> [B, S x J, D], contiguous."""
        rows = table[self.first_query : self.first_query + self.num_queries]
        return rows.view(self.num_products, self.steps * per_step, -1)

    def keys(self, table_ND: Tensor) -> Tensor:
        """[N, D] -> [B, C, D]"""
        width = table_ND.shape[1]
        return table_ND.as_strided(
            (self.num_products, self.num_keys, width), (self.key_stride * width, width, 1), self.first_key * width
        )

    def prefix(self, table_ND: Tensor) -> Tensor | None:
        """[N, D] -> [P, D]"""
        return table_ND[self.first_prefix : self.first_prefix + self.num_prefix] if self.num_prefix else None


class _Family:
    """Rows that are computed together, longest first: a product for each row and key/value head.

    Args:
        rows: the segments.
        copied: whether each product has its prefix before its keys; else there is one prefix, and its keys of each head
            come behind those of all products.
        num_kv: key/value heads.
        first_key: where its keys begin in their table.
    """

    def __init__(self, rows: Sequence[_Row], *, copied: bool, num_kv: int, first_key: int) -> None:
        self.lengths = [row.span.length for row in rows]
        self.copied, self.num_kv, self.first_key = copied, num_kv, first_key
        self.num_rows, self.longest = len(rows), self.lengths[0]
        self.num_prefix = max(row.num_prefix for row in rows)
        self.prefixes = list(dict.fromkeys(row.prefix for row in rows if row.prefix is not None))
        self.width = self._num_keys(self.longest)
        lengths = torch.tensor(self.lengths)[:, None]
        steps = torch.arange(self.width - self._num_copied)
        # a row that has ended repeats its last token; no real query sees that
        self.own_BL = self._of_heads(
            torch.tensor([row.span.start for row in rows])[:, None] + torch.minimum(steps, lengths - 1)
        )
        self.real_BL = self._by_product(steps < lengths)
        prefix_RP = torch.empty(self.num_rows, 0, dtype=torch.long)
        self._hidden_BP: Tensor | None = None
        if self.prefixes:
            first = torch.tensor([row.prefix.start for row in rows if row.prefix is not None])[:, None]
            stop = torch.tensor([row.prefix.stop for row in rows if row.prefix is not None])[:, None]
            aligned = stop - self.num_prefix + torch.arange(self.num_prefix)
            prefix_RP = torch.maximum(aligned, first)
            if bool((aligned < first).any()):
                hidden_RP = torch.zeros(aligned.shape).masked_fill_(aligned < first, float("-inf"))
                self._hidden_BP = self._by_product(hidden_RP)
            number = {prefix: i for i, prefix in enumerate(self.prefixes)}
            self._prefix_R = torch.tensor([number[row.prefix] for row in rows if row.prefix is not None])
        # which row of the stream [T x K] is in each row of the table of keys, and whether it is a row's own
        if copied:
            self.key_index = torch.cat([self._of_heads(prefix_RP), self.own_BL], 1).flatten()
            self.key_own = torch.nn.functional.pad(self.real_BL, (self.num_prefix, 0)).flatten()
        else:
            prefix_KP = prefix_RP[0] * num_kv + torch.arange(num_kv)[:, None]
            self.key_index = torch.cat([self.own_BL.flatten(), prefix_KP.flatten()])
            self.key_own = torch.nn.functional.pad(self.real_BL.flatten(), (0, prefix_KP.numel()))

    @property
    def _num_copied(self) -> int:
        return self.num_prefix if self.copied else 0

    def _num_keys(self, stop: int) -> int:
        """Keys of a product whose queries end at `stop`."""
        shared = self.num_prefix - self._num_copied
        return -(-(self.num_prefix + stop) // ALIGNED) * ALIGNED - shared

    def _by_product(self, rows: Tensor) -> Tensor:
        """[R, L] -> [B, L]: the heads of each row where prefixes are copied, else the rows of each head."""
        if self.copied:
            return rows.repeat_interleave(self.num_kv, 0)
        return rows.repeat(self.num_kv, 1)

    def _of_heads(self, tokens_RL: Tensor) -> Tensor:
        """The rows of the stream [T x K] of each product."""
        heads_RK = torch.arange(self.num_kv).expand(self.num_rows, -1)
        heads_B = heads_RK.flatten() if self.copied else heads_RK.T.flatten()
        return self._by_product(tokens_RL) * self.num_kv + heads_B[:, None]

    def tiles(self, per_step: int, most: int, first_query: int) -> Iterator[_Tile]:
        """What is computed at once.

        Args:
            per_step: query heads of a key/value head.
            most: scores.
            first_query: where its queries begin in their table; tiles follow each other there.
        """
        shared = self.num_prefix - self._num_copied
        num_products = self.num_rows * self.num_kv
        for start in range(0, self.longest, BLOCK):
            reaching = sum(length > start for length in self.lengths)
            first = 0
            while first < reaching:
                stop = min(start + BLOCK, self.lengths[first])
                num_keys = self._num_keys(stop)
                fitting = max(1, most // (per_step * (stop - start) * (shared + num_keys)))
                num, batches = self._batches(first, reaching, fitting)
                for batch in batches:
                    tile = _Tile(
                        batch=batch,
                        start=start,
                        stop=stop,
                        first_query=first_query,
                        first_key=self.first_key + batch.start * self.width,
                        key_stride=self.width,
                        num_keys=num_keys,
                        diagonal=self._num_copied + start,
                        first_prefix=self.first_key + num_products * self.width + batch.start // self.num_rows * shared,
                        num_prefix=shared,
                        hidden=None if self._hidden_BP is None else self._hidden_BP[batch, None],
                    )
                    yield tile
                    first_query += tile.num_queries
                first += num

    def _batches(self, first: int, reaching: int, fitting: int) -> tuple[int, list[slice]]:
        """How many rows from `first` on are computed at once, and their products, at most about `fitting` each time."""
        if not self.copied:  # a prefix belongs to one head
            num = min(fitting, reaching - first)
            return num, [
                slice(i + first, i + first + num) for i in range(0, self.num_kv * self.num_rows, self.num_rows)
            ]
        num = min(max(1, fitting // self.num_kv), reaching - first)
        start, stop = first * self.num_kv, (first + num) * self.num_kv
        if num > 1:
            return num, [slice(start, stop)]
        return 1, [slice(i, min(i + fitting, stop)) for i in range(start, stop, fitting)]

    def said_about_prefixes(self, table_ND: Tensor) -> Iterator[tuple[Span, Tensor]]:
        """Each prefix with the sum [K, P, D] of what the rows behind it say about its keys."""
        table_ND = table_ND[self.first_key : self.first_key + self.key_index.numel()]
        if not self.prefixes:
            return
        if self.copied:
            said = table_ND.view(self.num_rows, self.num_kv, self.width, -1)[:, :, : self.num_prefix]
            sums = said.new_zeros(len(self.prefixes), said[0].numel()).index_add_(0, self._prefix_R, said.flatten(1))
            said_FKPD = sums.view(-1, *said.shape[1:])
        else:
            said_FKPD = table_ND[-self.num_kv * self.num_prefix :].view(1, self.num_kv, self.num_prefix, -1)
        for prefix, said_KPD in zip(self.prefixes, said_FKPD, strict=True):
            yield prefix, said_KPD[:, -prefix.length :]


class _Plan:
    """Tables and tiles of one layout for one number of heads.

    Args:
        groups: the segments.
        num_kv: key/value heads.
        per_step: query heads of each.
    """

    def __init__(self, groups: Sequence[GroupSpans], num_kv: int, per_step: int) -> None:
        most = TILE_ELEMENTS * torch.get_num_threads()
        self.families: list[_Family] = []
        self.tiles: list[_Tile] = []
        self.num_queries = self.num_keys = 0
        queries, queries_real = [torch.empty(0, dtype=torch.long)], [torch.empty(0, dtype=torch.bool)]
        for rows, copied in _families(groups, num_kv * per_step):
            family = _Family(rows, copied=copied, num_kv=num_kv, first_key=self.num_keys)
            self.families.append(family)
            self.num_keys += family.key_index.numel()
            for tile in family.tiles(per_step, most, self.num_queries):
                self.tiles.append(tile)
                self.num_queries += tile.num_queries
                queries.append(family.own_BL[tile.batch, tile.start : tile.stop].flatten())
                queries_real.append(family.real_BL[tile.batch, tile.start : tile.stop].flatten())
        self.num_scores = per_step * sum(tile.num_queries * (tile.num_prefix + tile.num_keys) for tile in self.tiles)
        self.query_index, real = torch.cat(queries), torch.cat(queries_real)
        self.ended = (~real).nonzero()[:, 0]
        self.key_index = torch.cat([queries[0], *(family.key_index for family in self.families)])
        own = torch.cat([queries_real[0], *(family.key_own for family in self.families)])
        num_rows = num_kv * max(span.stop for group in groups for span in (group.prompt, *group.completions))
        self.query_places = _places(self.query_index, real, num_rows)
        self.key_places = _places(self.key_index, own, num_rows)


def _places(index: Tensor, real: Tensor, num_rows: int) -> Tensor:
    """Where the rows of the stream are in a table; behind its end those that are not in it."""
    places = torch.full((num_rows,), index.numel())
    places[index[real]] = real.nonzero()[:, 0]
    return places


class TiledSegments:
    """Attention of one layout's segments, tile by tile.

    Args:
        groups: the segments.
        device: "cpu"; index tensors are made there.
    """

    def __init__(self, groups: Sequence[GroupSpans], device: torch.device | str = "cpu") -> None:
        assert torch.device(device).type == "cpu"
        self.groups = groups
        self._plans: dict[tuple[int, ...], _Plan] = {}

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
        """See `SegmentLayout.attend`."""
        scale = query.shape[3] ** -0.5 if scale is None else scale
        plan = self.plan(key.shape[1], query.shape[1] // key.shape[1])
        if torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad):
            return _TiledAttention.apply(query, key, value, plan, scale)
        return _forward(plan, query, key, value, scale, keep=False)[0]

    def plan(self, num_kv: int, per_step: int) -> _Plan:
        """Made once for all layers."""
        asked = (num_kv, per_step, TILE_ELEMENTS, torch.get_num_threads())
        if asked not in self._plans:
            self._plans[asked] = _Plan(self.groups, num_kv, per_step)
        return self._plans[asked]


def _families(groups: Sequence[GroupSpans], num_heads: int) -> Iterator[tuple[list[_Row], bool]]:
    """All segments without a prefix together, then completions behind theirs; split where lengths halve.

    Returns:
        rows, and whether prefixes are copied to them.
    """
    alone: list[_Row] = []
    short: list[list[_Row]] = []
    long: list[list[_Row]] = []
    for group in groups:
        if group.unseen:
            continue
        spans = [span for span in group.completions if span.length]
        if len(spans) == 1 and spans[0].start == group.prompt.stop:  # nothing to share: one segment
            alone.append(_Row(None, type(group.prompt)(group.prompt.start, group.prompt.length + spans[0].length)))
            continue
        alone.append(_Row(None, group.prompt))
        if spans:
            (short if group.prompt.length <= COPIED else long).append([_Row(group.prompt, span) for span in spans])
    merged = [(rows, True) for rows in (alone, *_merged(short, num_heads))]
    for rows, copied in [*merged, *((rows, False) for rows in long)]:
        ordered = sorted((row for row in rows if row.span.length), key=lambda row: (-row.span.length, row.span.start))
        while ordered:
            num = sum(RAGGED * row.span.length >= ordered[0].span.length for row in ordered)
            yield ordered[:num], copied
            ordered = ordered[num:]


def _merged(groups: Sequence[list[_Row]], num_heads: int) -> Iterator[list[_Row]]:
    """Rows of groups whose prefixes differ little in length."""
    merged: list[_Row] = []
    for rows in sorted(groups, key=lambda rows: -rows[0].num_prefix):
        num_queries = num_heads * sum(row.span.length for row in rows)
        if merged and num_queries * (merged[0].num_prefix - rows[0].num_prefix) > MERGE_ELEMENTS:
            yield merged
            merged = []
        merged = merged + rows
    if merged:
        yield merged


class _TiledAttention(torch.autograd.Function):
    """query [1, H, T, D], key [1, K, T, D], value [1, K, T, E] -> [1, T, H, E]."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, plan: _Plan, scale: float) -> Tensor:
        keep = plan.num_scores <= KEPT_PER_QUERY * query.numel()
        output, kept = _forward(plan, query, key, value, scale, keep=keep)
        ctx.save_for_backward(query, key, value, *kept)
        ctx.plan, ctx.scale = plan, scale
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, *kept = ctx.saved_tensors
        with torch.autocast("cpu", enabled=False):
            grads = _backward(ctx.plan, query, key, value, grad, ctx.scale, iter(kept))
        return (*grads, None, None)


def _forward(
    plan: _Plan, query: Tensor, key: Tensor, value: Tensor, scale: float, *, keep: bool
) -> tuple[Tensor, list[Tensor]]:
    """The output [1, T, H, E], and with `keep` the probabilities of all tiles in order."""
    num_kv, per_step, head_size = key.shape[1], query.shape[1] // key.shape[1], value.shape[3]
    kept: list[Tensor] = []
    with torch.autocast("cpu", enabled=False):
        queries = _table(query, num_kv, plan.query_index).mul_(scale)
        keys, values = (_table(states, num_kv, plan.key_index) for states in (key, value))
        output = _with_zeros(queries, plan.num_queries, per_step * head_size)
        for tile in plan.tiles:
            probabilities = _probabilities(tile, tile.queries(queries, per_step), keys)
            _see(tile, probabilities, values, 1.0, tile.queries(output, per_step))
            if keep:
                kept.append(probabilities)
        output = output.index_select(0, plan.query_places)
    return output.view(1, -1, query.shape[1], head_size).to(query.dtype), kept


def _backward(
    plan: _Plan, query: Tensor, key: Tensor, value: Tensor, grad: Tensor, scale: float, kept: Iterator[Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value."""
    num_kv, per_step = key.shape[1], query.shape[1] // key.shape[1]
    queries = _table(query, num_kv, plan.query_index).mul_(scale)
    keys, values = (_table(states, num_kv, plan.key_index) for states in (key, value))
    grads = _table(grad.transpose(1, 2), num_kv, plan.query_index).to(queries.dtype)
    if plan.ended.numel():
        grads.index_fill_(0, plan.ended, 0.0)
    dqueries = _with_zeros(queries, plan.num_queries, queries.shape[1])
    dkeys, dvalues = (table.new_zeros(plan.num_keys + 1, table.shape[1]) for table in (keys, values))
    for tile in plan.tiles:
        tile_queries, tile_grads = tile.queries(queries, per_step), tile.queries(grads, per_step)
        probabilities = next(kept, None)
        if probabilities is None:
            probabilities = _probabilities(tile, tile_queries, keys)
        _pull_back(tile, probabilities, tile_grads, dvalues)
        slopes = _products(tile, tile_grads, values)
        # in place, too
        torch._softmax_backward_data(slopes, probabilities, -1, slopes.dtype, grad_input=slopes)
        _pull_back(tile, slopes, tile_queries, dkeys)
        _see(tile, slopes, keys, scale, tile.queries(dqueries, per_step))
    dquery_THD = dqueries.index_select(0, plan.query_places).view(-1, query.shape[1], query.shape[3])
    dkey_TKD, dvalue_TKE = (_of_keys(plan, table, num_kv) for table in (dkeys, dvalues))
    return tuple(  # type: ignore[return-value]
        d.transpose(0, 1)[None].to(states.dtype)
        for d, states in ((dquery_THD, query), (dkey_TKD, key), (dvalue_TKE, value))
    )


def _table(states: Tensor, num_kv: int, index: Tensor) -> Tensor:
    """[1, H, T, D] -> [M, J x D], 16-bit states in fp32."""
    states = states.float() if states.dtype in (torch.bfloat16, torch.float16) else states
    return states[0].transpose(0, 1).reshape(states.shape[2] * num_kv, -1).index_select(0, index)


def _with_zeros(like: Tensor, num_rows: int, width: int) -> Tensor:
    """An empty table, and zeros in one row more."""
    table = like.new_empty(num_rows + 1, width)
    table[num_rows].zero_()
    return table


def _of_keys(plan: _Plan, table_ND: Tensor, num_kv: int) -> Tensor:
    """What was said about keys, [N + 1, D] -> [T, K, D]: as own keys and as a prefix."""
    said_TKD = table_ND.index_select(0, plan.key_places).view(-1, num_kv, table_ND.shape[1])
    for family in plan.families:
        for prefix, said_KPD in family.said_about_prefixes(table_ND):
            said_TKD[prefix.start : prefix.stop].add_(said_KPD.transpose(0, 1))
    return said_TKD


def _products(tile: _Tile, queries: Tensor, table_ND: Tensor) -> Tensor:
    """Products [B, S x J, P + C] of queries [B, S x J, D] with the prefix and with own keys."""
    products = queries.new_empty(*queries.shape[:2], tile.num_prefix + tile.num_keys)
    prefix = tile.prefix(table_ND)
    if prefix is not None:
        of_prefix = products.flatten(0, 1)[:, : tile.num_prefix]
        of_prefix.addmm_(queries.flatten(0, 1), prefix.T, beta=0)
    of_own = products[:, :, tile.num_prefix :] if tile.num_prefix else products
    of_own.baddbmm_(queries, tile.keys(table_ND).mT, beta=0)
    return products


def _probabilities(tile: _Tile, queries: Tensor, keys: Tensor) -> Tensor:
    """Softmax [B, S x J, P + C] of the scores of (scaled) queries."""
    scores = _products(tile, queries, keys)
    now = scores[:, :, tile.num_prefix + tile.diagonal :]
    now.add_(_later(tile.steps, now.shape[2], queries.shape[1] // tile.steps, queries.dtype))
    if tile.hidden is not None:
        scores[:, :, : tile.hidden.shape[2]].add_(tile.hidden)
    return torch.softmax(scores, -1, out=scores)  # in place: row after row, each read before it is written


def _see(tile: _Tile, weights: Tensor, table_ND: Tensor, scale: float, seen: Tensor) -> None:
    """Write weights [B, S x J, P + C] times the states that they belong to into `seen` [B, S x J, D]."""
    prefix, own = tile.prefix(table_ND), tile.keys(table_ND)
    if prefix is None:
        seen.baddbmm_(weights, own, beta=0, alpha=scale)
        return
    of_prefix = torch.mm(weights.flatten(0, 1)[:, : tile.num_prefix], prefix).view(seen.shape)
    torch.baddbmm(of_prefix, weights[:, :, tile.num_prefix :], own, beta=scale, alpha=scale, out=seen)


def _pull_back(tile: _Tile, weights: Tensor, queries: Tensor, table_ND: Tensor) -> None:
    """Add what queries [B, S x J, D] say about the states that they have seen."""
    prefix, own = tile.prefix(table_ND), tile.keys(table_ND)
    if prefix is not None:
        prefix.addmm_(weights.flatten(0, 1)[:, : tile.num_prefix].T, queries.flatten(0, 1))
        weights = weights[:, :, tile.num_prefix :]
    if own.is_contiguous():
        own.baddbmm_(weights.mT, queries)
    else:  # torch would add one product after the other
        own.add_(torch.bmm(weights.mT, queries))


@lru_cache(maxsize=256)
def _later(steps: int, num_keys: int, per_step: int, dtype: torch.dtype) -> Tensor:
    """[S x J, `num_keys`]: -inf where a key comes after the query."""
    return torch.full((steps, num_keys), float("-inf"), dtype=dtype).triu(1).repeat_interleave(per_step, 0)
