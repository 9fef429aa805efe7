"""Drawing tokens: temperature, penalties, truncation, and inverse-CDF sampling from given uniforms.

The order is that of the other engines: repetition, frequency and presence penalty on the raw logits, temperature, end
tokens that come too early (`min_tokens`) and what an expression forbids, then top-k, top-p and min-p on the tempered
distribution. The returned log-prob is that of the distribution drawn from: over the whole vocabulary if nothing is left
out, else renormalised over what is left; then the log of the mass that is left is returned too.

R rows, V vocabulary, M the likeliest tokens of a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from swift.rollout.engines.running import Running
from swift.types import Alternatives

WIDE, BLOCK = 4096, 128
"""Vocabularies from this size on are summed block by block; tokens of a block."""
CANDIDATES = 1024
"""So many of the likeliest tokens are looked at before all are sorted."""


@dataclass(slots=True)
class Row(Running):
    """A request in a batch.

    budget: most tokens. ends: tokens that end it. uniforms: [budget] float64, one for each token. guide: what holds it
    to its expression.
    """

    budget: int = 0
    ends: frozenset[int] = frozenset()
    uniforms: np.ndarray = field(default_factory=lambda: np.empty(0))
    guide: Any = None
    started: bool = False
    ended: bool = False


class BatchSampler:
    """Draws one token per row and step."""

    def __init__(self, rows: Sequence[Row], device: torch.device) -> None:
        self.rows = list(rows)
        sampling = [row.request.sampling for row in rows]

        def column(values: Sequence[float]) -> Tensor:
            return torch.tensor(values, device=device)[:, None]

        self.divisor_R1 = column([one.temperature if one.temperature > 0 else 1.0 for one in sampling])
        self.greedy_R = column([one.temperature <= 0 for one in sampling])[:, 0]
        self.top_p_R1 = column([one.top_p for one in sampling])
        self.min_p_R1 = column([one.min_p for one in sampling])
        self.top_k_R1 = column([one.top_k for one in sampling])
        self.repetition_R1 = column([one.repetition_penalty for one in sampling])
        self.frequency_R1 = column([one.frequency_penalty for one in sampling])
        self.presence_R1 = column([one.presence_penalty for one in sampling])
        # which steps any row needs, so that plain sampling pays for none of them
        self.any_temperature = any(one.temperature not in (0.0, 1.0) for one in sampling)
        self.any_greedy = any(one.temperature <= 0 for one in sampling)
        self.any_top_k, self.all_top_k = (some(one.top_k > 0 for one in sampling) for some in (any, all))
        self.largest_top_k = max(one.top_k for one in sampling)
        self.any_top_p = any(one.top_p < 1.0 for one in sampling)
        self.any_min_p = any(one.min_p > 0.0 for one in sampling)
        self.penalises = any(one.penalises for one in sampling)
        self.most_told = max(one.top_logprobs for one in sampling)
        self.longest_minimum = max(one.min_tokens for one in sampling)
        self.counts_RV: Tensor | None = None  # how often each token was sampled
        self.prompt_RV: Tensor | None = None  # which tokens each prompt has

    def draw(
        self, logits_RV: Tensor, uniform_R: Tensor, allowed_RV: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor | None, list[Alternatives] | None]:
        """Token ids [R], their log-probs [R] (fp32), and the log of the kept mass [R], None where no row is narrowed.

        Then the likeliest tokens of each row, None where no row asks for them.

        Args:
            logits_RV: of the rows.
            uniform_R: float64 in [0, 1).
            allowed_RV: tokens that may be drawn; None for all.
        """
        logits_RV = logits_RV.float()
        if self.penalises:
            logits_RV = self._penalised(logits_RV)
        tempered_RV = logits_RV / self.divisor_R1 if self.any_temperature else logits_RV
        tempered_RV, log_mass_R = self._narrow(tempered_RV, allowed_RV)
        token_R, logprob_R = _drawn(tempered_RV, uniform_R, self.greedy_R if self.any_greedy else None)
        if self.counts_RV is not None:
            self.counts_RV.scatter_add_(1, token_R[:, None], torch.ones_like(token_R, dtype=torch.float32)[:, None])
        return token_R, logprob_R, log_mass_R, self._tops(tempered_RV) if self.most_told else None

    def _tops(self, tempered_RV: Tensor) -> list[Alternatives]:
        """The likeliest tokens that each row may draw, as many as it asks for."""
        values_RK, order_RK = tempered_RV.log_softmax(-1).topk(min(self.most_told, tempered_RV.shape[1]), -1)
        return [
            [one for one in zip(ids, values, strict=True) if one[1] > -torch.inf][: row.request.sampling.top_logprobs]
            for row, ids, values in zip(self.rows, order_RK.tolist(), values_RK.tolist(), strict=True)
        ]

    def _penalised(self, logits_RV: Tensor) -> Tensor:
        """Repetition (arXiv:1909.05858, eq. 13 as practised), then frequency and presence as in OpenAI's API."""
        if self.counts_RV is None:
            self.counts_RV = _counted([row.token_ids for row in self.rows], logits_RV)
            self.prompt_RV = _counted([row.request.prompt_ids for row in self.rows], logits_RV) > 0
        assert self.prompt_RV is not None
        sampled_RV = self.counts_RV > 0
        repeated_RV = torch.where(logits_RV > 0, logits_RV / self.repetition_R1, logits_RV * self.repetition_R1)
        logits_RV = torch.where(sampled_RV | self.prompt_RV, repeated_RV, logits_RV)
        return logits_RV - self.frequency_R1 * self.counts_RV - self.presence_R1 * sampled_RV

    def _narrow(self, tempered_RV: Tensor, allowed_RV: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Logits of what may be drawn, and the log of the mass [R] that it has of the whole distribution."""
        early = (
            [len(row.token_ids) < row.request.sampling.min_tokens for row in self.rows] if self.longest_minimum else []
        )
        truncates = self.any_top_k or self.any_top_p or self.any_min_p
        if not (any(early) or truncates or allowed_RV is not None):
            return tempered_RV, None
        kept_RV = tempered_RV.log_softmax(-1)
        log_mass_R1 = torch.zeros_like(kept_RV[:, :1])
        if any(early) or allowed_RV is not None:
            if allowed_RV is not None:
                kept_RV = kept_RV.masked_fill(~allowed_RV, -torch.inf)
            if any(early):
                kept_RV = self._without_ends(kept_RV, early)
            log_mass_R1 = kept_RV.logsumexp(-1, keepdim=True)
            kept_RV = kept_RV - log_mass_R1
        if truncates:
            kept_RV = self._truncate(kept_RV)
            log_mass_R1 = log_mass_R1 + kept_RV.logsumexp(-1, keepdim=True)
        return kept_RV, log_mass_R1[:, 0]

    def _without_ends(self, logits_RV: Tensor, early: Sequence[bool]) -> Tensor:
        """No end token in the early rows, unless nothing else may follow (an expression that is complete)."""
        without_RV = logits_RV.clone()
        for place, (row, is_early) in enumerate(zip(self.rows, early, strict=True)):
            if is_early and row.ends:
                without_RV[place, torch.tensor(sorted(row.ends), device=logits_RV.device)] = -torch.inf
        return torch.where(without_RV.isneginf().all(1, keepdim=True), logits_RV, without_RV)

    def _truncate(self, logprobs_RV: Tensor) -> Tensor:
        """Log-probs with -inf outside of top-k, top-p (arXiv:1904.09751) and min-p (2407.01082)."""
        least_R1 = self.min_p_R1.clamp(min=1e-38).log()  # beside the likeliest
        if not (self.any_top_k or self.any_top_p):
            return logprobs_RV.masked_fill(logprobs_RV < logprobs_RV.amax(-1, keepdim=True) + least_R1, -torch.inf)
        sorted_RM, order_RM = self._likeliest(logprobs_RV)
        keep_RM = torch.ones_like(sorted_RM, dtype=torch.bool)
        if self.any_top_k:
            rank_M = torch.arange(sorted_RM.shape[1], device=sorted_RM.device)[None]
            keep_RM &= (self.top_k_R1 <= 0) | (rank_M < self.top_k_R1)
        if self.any_top_p:
            kept_RM = sorted_RM.exp().masked_fill_(~keep_RM, 0.0)
            total_R1 = torch.where(self.top_k_R1 > 0, kept_RM.sum(-1, keepdim=True), 1.0)
            keep_RM &= (kept_RM.cumsum(-1) - kept_RM < self.top_p_R1 * total_R1) | (self.top_p_R1 >= 1.0)
        if self.any_min_p:
            keep_RM &= sorted_RM >= sorted_RM[:, :1] + least_R1
        keep_RM[:, 0] = True
        truncated_RV = torch.full_like(logprobs_RV, -torch.inf)
        return truncated_RV.scatter_(1, order_RM, sorted_RM.masked_fill_(~keep_RM, -torch.inf))

    def _likeliest(self, logprobs_RV: Tensor) -> tuple[Tensor, Tensor]:
        """Log-probs of the likeliest tokens [R, M] in descending order and which they are, M enough for every row.

        All of a wide vocabulary are sorted only if fewer do not suffice: on a CPU that takes ten times as long.
        """
        size, most = logprobs_RV.shape[1], self.largest_top_k
        if self.all_top_k and most < size:
            values_RM, order_RM = logprobs_RV.topk(most, -1)
            return values_RM, order_RM
        most = max(most, CANDIDATES)
        if logprobs_RV.device.type == "cpu" and most < size:  # elsewhere the look would wait
            values_RM, order_RM = logprobs_RV.topk(most, -1)
            open_R1 = (values_RM.exp().sum(-1, keepdim=True) < self.top_p_R1) | (self.top_p_R1 >= 1.0)
            if not bool((open_R1 & (self.top_k_R1 <= 0)).any()):
                return values_RM, order_RM
        values_RM, order_RM = logprobs_RV.sort(-1, descending=True)
        return values_RM, order_RM


def _counted(token_ids: Sequence[Sequence[int]], like_RV: Tensor) -> Tensor:
    """[R, V] float: how often each token is in each row."""
    counts_RV = torch.zeros(like_RV.shape, device=like_RV.device)
    for counts_V, row in zip(counts_RV, token_ids, strict=True):
        ids = torch.tensor(row, dtype=torch.long, device=like_RV.device)
        counts_V.index_add_(0, ids, torch.ones(len(row), device=like_RV.device))
    return counts_RV


def _drawn(tempered_RV: Tensor, uniform_R: Tensor, greedy_R: Tensor | None) -> tuple[Tensor, Tensor]:
    """Tokens [R] and their log-probs [R], the likeliest where `greedy_R`."""
    probs_RV = tempered_RV.softmax(-1)
    token_R = _inverse_cdf(probs_RV, uniform_R)
    if greedy_R is not None:
        token_R = torch.where(greedy_R, tempered_RV.argmax(-1), token_R)
    return token_R, probs_RV.gather(1, token_R[:, None])[:, 0].log_()


def _inverse_cdf(probs_RV: Tensor, uniform_R: Tensor) -> Tensor:
    """The token at which the cumulative probability first exceeds the uniform; never one of probability 0.

    Sums are those of float64. Of a wide vocabulary they are those of blocks first, then of the one that is hit: sums up
    to every single token would take several times as long.
    """
    size, uniform_R1 = probs_RV.shape[1], uniform_R[:, None]
    if size < WIDE:
        return _first_beyond(probs_RV.cumsum(-1, dtype=torch.float64), uniform_R1)[:, 0]
    whole = size // BLOCK * BLOCK
    sums_RB = probs_RV.narrow(1, 0, whole).view(probs_RV.shape[0], -1, BLOCK).sum(-1)
    if whole < size:
        sums_RB = torch.cat([sums_RB, probs_RV.narrow(1, whole, size - whole).sum(-1, keepdim=True)], 1)
    cumulative_RB = sums_RB.cumsum(-1, dtype=torch.float64)
    block_R1 = _first_beyond(cumulative_RB, uniform_R1)
    token_RK = block_R1 * BLOCK + torch.arange(BLOCK, device=probs_RV.device)
    inside_RK = probs_RV.gather(1, token_RK.clamp(max=size - 1)).masked_fill_(token_RK >= size, 0.0)
    sum_R1 = sums_RB.gather(1, block_R1).double()
    before_R1 = cumulative_RB.gather(1, block_R1) - sum_R1
    within_R1 = (uniform_R1 * cumulative_RB[:, -1:] - before_R1) / sum_R1
    place_R1 = _first_beyond(inside_RK.cumsum(-1, dtype=torch.float64), within_R1.clamp_(0.0, 1.0))
    return (block_R1 * BLOCK + place_R1)[:, 0].clamp_(max=size - 1)


def _first_beyond(cumulative_RN: Tensor, share_R1: Tensor) -> Tensor:
    """The first place [R, 1] that goes beyond a share of a row's total, or reaches the total if none does."""
    total_R1 = cumulative_RN[:, -1:].contiguous()
    place_R1 = torch.searchsorted(cumulative_RN, share_R1 * total_R1, right=True)
    last_R1 = torch.searchsorted(cumulative_RN, total_R1)  # first place that reaches the total
    within = cumulative_RN.shape[1] - 1  # a row that is not numbers has no place for anything
    return torch.minimum(place_R1, last_R1).clamp_(max=within)
