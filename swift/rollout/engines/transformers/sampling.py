"""Token sampling: temperature, penalties, truncation, and inverse-CDF sampling from given uniforms.

The order is that of the other engines: repetition, frequency and presence penalty on the raw logits; temperature;
exclusion of end tokens before `min_tokens` and of tokens outside of the expression (guided decoding); then top-k, top-p
and min-p on the tempered distribution. The log-prob of a token is that of the distribution it was drawn from: over the
whole vocabulary, or renormalised over the remaining tokens. In the latter case the log of their mass is returned too.

R rows, V vocabulary, M the likeliest tokens of a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from swift.models.transfer import to_device
from swift.rollout.engines.running import Running
from swift.types import Alternatives

WIDE, BLOCK = 4096, 128
"""Minimum vocabulary size at which the inverse CDF sums blocks first, and number of tokens of a block."""
CANDIDATES = 1024
"""Number of likeliest tokens that truncation on a CPU selects before it sorts the whole vocabulary."""


@dataclass(slots=True)
class Row(Running):
    """A request in a batch.

    budget: maximum number of tokens. ends: tokens that end it. uniforms: [budget] float64, one for each token. guide:
    matcher of guided decoding, or None. first: position of its first token.
    """

    budget: int = 0
    ends: frozenset[int] = frozenset()
    uniforms: np.ndarray = field(default_factory=lambda: np.empty(0))
    guide: Any = None
    first: int = 0
    started: bool = False
    ended: bool = False


class BatchSampler:
    """Samples one token per row and step."""

    def __init__(self, rows: Sequence[Row], device: torch.device) -> None:
        self.rows = list(rows)
        sampling = [row.request.sampling for row in rows]

        def column(values: Sequence[float]) -> Tensor:
            return to_device(values, device)[:, None]

        self.divisor_R1 = column([params.temperature if params.temperature > 0 else 1.0 for params in sampling])
        self.greedy_R = column([params.temperature <= 0 for params in sampling])[:, 0]
        self.top_p_R1 = column([params.top_p for params in sampling])
        self.min_p_R1 = column([params.min_p for params in sampling])
        self.top_k_R1 = column([params.top_k for params in sampling])
        self.repetition_R1 = column([params.repetition_penalty for params in sampling])
        self.frequency_R1 = column([params.frequency_penalty for params in sampling])
        self.presence_R1 = column([params.presence_penalty for params in sampling])
        # plain sampling skips the steps that no row needs
        self.any_temperature = any(params.temperature not in (0.0, 1.0) for params in sampling)
        self.any_greedy = any(params.temperature <= 0 for params in sampling)
        self.any_top_k, self.all_top_k = (some(params.top_k > 0 for params in sampling) for some in (any, all))
        self.largest_top_k = max(params.top_k for params in sampling)
        self.any_top_p = any(params.top_p < 1.0 for params in sampling)
        self.any_min_p = any(params.min_p > 0.0 for params in sampling)
        self.penalises = any(params.penalises for params in sampling)
        self.num_alternatives = max(params.top_logprobs for params in sampling)
        self.longest_minimum = max(params.min_tokens for params in sampling)
        self.counts_RV: Tensor | None = None  # count of each token among the sampled ones
        self.prompt_RV: Tensor | None = None  # whether the prompt has each token

    def draw(
        self, logits_RV: Tensor, uniform_R: Tensor, allowed_RV: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor | None, list[Alternatives] | None]:
        """Sample the next tokens.

        Args:
            logits_RV: logits of the rows.
            uniform_R: float64 in [0, 1).
            allowed_RV: tokens that may be sampled; None for all.

        Returns:
            Token ids [R], their log-probs [R] (fp32), the log of the remaining mass [R] (None if no row excludes
            tokens), and the likeliest tokens of each row (None if no row asks for them).
        """
        logits_RV = logits_RV.float()
        if self.penalises:
            logits_RV = self._penalised(logits_RV)
        tempered_RV = logits_RV / self.divisor_R1 if self.any_temperature else logits_RV
        log_mass_R = None
        if self.any_top_k or self.any_top_p or self.any_min_p or self.longest_minimum or allowed_RV is not None:
            tempered_RV, log_mass_R = self._exclude(tempered_RV, allowed_RV)
        probs_RV = tempered_RV.softmax(-1)
        token_R = _inverse_cdf(probs_RV, uniform_R)
        if self.any_greedy:
            token_R = torch.where(self.greedy_R, tempered_RV.argmax(-1), token_R)
        logprob_R = probs_RV.gather(1, token_R[:, None])[:, 0].log_()
        if self.counts_RV is not None:
            self.counts_RV.scatter_add_(1, token_R[:, None], torch.ones_like(token_R, dtype=torch.float32)[:, None])
        return token_R, logprob_R, log_mass_R, self._alternatives(tempered_RV) if self.num_alternatives else None

    def _alternatives(self, tempered_RV: Tensor) -> list[Alternatives]:
        """The likeliest tokens of each row and their log-probs, as many as its request asks for."""
        size = min(self.num_alternatives, tempered_RV.shape[1])
        logprobs_RK, ids_RK = tempered_RV.log_softmax(-1).topk(size, -1)
        found = []
        for row, ids, logprobs in zip(self.rows, ids_RK.tolist(), logprobs_RK.tolist(), strict=True):
            possible = [(token, logprob) for token, logprob in zip(ids, logprobs, strict=True) if logprob > -torch.inf]
            found.append(possible[: row.request.sampling.top_logprobs])
        return found

    def _penalised(self, logits_RV: Tensor) -> Tensor:
        """Repetition penalty (arXiv:1909.05858, eq. 13), then frequency and presence penalty as in OpenAI's API."""
        if self.counts_RV is None:
            self.counts_RV = _counted([row.token_ids for row in self.rows], logits_RV)
            prompts = [[token for token in row.request.prompt_ids if token >= 0] for row in self.rows]  # not of images
            self.prompt_RV = _counted(prompts, logits_RV) > 0
        assert self.prompt_RV is not None
        sampled_RV = self.counts_RV > 0
        repeated_RV = torch.where(logits_RV > 0, logits_RV / self.repetition_R1, logits_RV * self.repetition_R1)
        logits_RV = torch.where(sampled_RV | self.prompt_RV, repeated_RV, logits_RV)
        return logits_RV - self.frequency_R1 * self.counts_RV - self.presence_R1 * sampled_RV

    def _exclude(self, tempered_RV: Tensor, allowed_RV: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Logits with -inf for excluded tokens, and the log of the mass [R] of the others, None if none is excluded."""
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
        """Exclude the end tokens of early rows, unless no other token may follow (a complete match)."""
        without_RV = logits_RV.clone()
        for place, (row, is_early) in enumerate(zip(self.rows, early, strict=True)):
            if is_early and row.ends:
                without_RV[place, torch.tensor(sorted(row.ends), device=logits_RV.device)] = -torch.inf
        return torch.where(without_RV.isneginf().all(1, keepdim=True), logits_RV, without_RV)

    def _truncate(self, logprobs_RV: Tensor) -> Tensor:
        """Log-probs with -inf outside of top-k, top-p (arXiv:1904.09751) and min-p (2407.01082)."""
        least_R1 = self.min_p_R1.clamp(min=1e-38).log()  # relative to the likeliest
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
        """Log-probs of the likeliest tokens [R, M] in descending order, and their ids; M is enough for every row.

        A wide vocabulary is sorted as a whole only if fewer tokens do not suffice: that is ten times slower on a CPU.
        """
        size, most = logprobs_RV.shape[1], self.largest_top_k
        if self.all_top_k and most < size:
            values_RM, order_RM = logprobs_RV.topk(most, -1)
            return values_RM, order_RM
        most = max(most, CANDIDATES)
        if logprobs_RV.device.type == "cpu" and most < size:  # elsewhere the test would synchronize
            values_RM, order_RM = logprobs_RV.topk(most, -1)
            open_R1 = (values_RM.exp().sum(-1, keepdim=True) < self.top_p_R1) | (self.top_p_R1 >= 1.0)
            if not bool((open_R1 & (self.top_k_R1 <= 0)).any()):
                return values_RM, order_RM
        values_RM, order_RM = logprobs_RV.sort(-1, descending=True)
        return values_RM, order_RM


def _counted(token_ids: Sequence[Sequence[int]], like_RV: Tensor) -> Tensor:
    """[R, V] float: count of each token in each row."""
    counts_RV = torch.zeros(like_RV.shape, device=like_RV.device)
    for counts_V, row in zip(counts_RV, token_ids, strict=True):
        ids = torch.tensor(row, dtype=torch.long, device=like_RV.device)
        counts_V.index_add_(0, ids, torch.ones(len(row), device=like_RV.device))
    return counts_RV


def _inverse_cdf(probs_RV: Tensor, uniform_R: Tensor) -> Tensor:
    """The token at which the cumulative probability first exceeds the uniform; never one of probability 0.

    Sums are in float64. A wide vocabulary is searched in two steps, for a block and then inside it: cumulative sums
    over single tokens would take several times as long.
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
    """The first place [R, 1] that exceeds a share of a row's total, or reaches the total if none does."""
    total_R1 = cumulative_RN[:, -1:].contiguous()
    place_R1 = torch.searchsorted(cumulative_RN, share_R1 * total_R1, right=True)
    last_R1 = torch.searchsorted(cumulative_RN, total_R1)  # the first place that reaches the total
    within = cumulative_RN.shape[1] - 1  # a row of NaN has no such place
    return torch.minimum(place_R1, last_R1).clamp_(max=within)
