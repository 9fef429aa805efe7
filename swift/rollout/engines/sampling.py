"""Drawing tokens: temperature, penalties, truncation, and inverse-CDF sampling from given uniforms.

The order is that of the other engines: end tokens that come too early (`min_tokens`), repetition, frequency and
presence penalty on the raw logits, temperature, then top-k, top-p and min-p on the tempered distribution. The returned
log-prob is that of the distribution drawn from: over the whole vocabulary without truncation, renormalised over the
surviving tokens with it; then the log of the mass that survived is returned too.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from swift.types import Request

WIDE, BLOCK = 4096, 128
"""Vocabularies from this size on are summed block by block; tokens of a block."""
CANDIDATES = 1024
"""So many of the likeliest tokens are looked at before all are sorted."""


class BatchSampler:
    """Draws one token per row and step.

    Args:
        requests: R requests, one row each.
        uniforms_RT: [R, T] float64 in [0, 1); column t draws token t.
        ends_RE: [R, E] end tokens of each row, -1 for none; None when no row has any.
    """

    def __init__(self, requests: Sequence[Request], uniforms_RT: Tensor, ends_RE: Tensor | None = None) -> None:
        sampling = [request.sampling for request in requests]
        device = uniforms_RT.device

        def column(values: list[float]) -> Tensor:
            return torch.tensor(values, device=device)[:, None]

        self.uniforms_RT = uniforms_RT
        self.temperature_R1 = column([s.temperature for s in sampling])
        self.top_p_R1 = column([s.top_p for s in sampling])
        self.min_p_R1 = column([s.min_p for s in sampling])
        self.top_k_R1 = column([s.top_k for s in sampling])
        self.penalty_R1 = column([s.repetition_penalty for s in sampling])
        self.frequency_R1 = column([s.frequency_penalty for s in sampling])
        self.presence_R1 = column([s.presence_penalty for s in sampling])
        self.min_tokens_R1 = column([s.min_tokens for s in sampling])
        self.ends_RE = ends_RE if ends_RE is not None else torch.full((len(sampling), 1), -1, device=device)
        self.seen_RV: Tensor | None = None
        self.counts_RV: Tensor | None = None  # how often each token was sampled
        self.prompts = [list(request.prompt_ids) for request in requests]
        self._look()

    def _look(self) -> None:
        """Note which steps any row needs, so that plain sampling pays for none of them."""
        self.any_penalty = bool((self.penalty_R1 != 1.0).any())
        self.any_count = bool((self.frequency_R1 != 0.0).any() or (self.presence_R1 != 0.0).any())
        self.longest_minimum = int(self.min_tokens_R1.max()) if len(self.min_tokens_R1) else 0
        self.any_greedy = bool((self.temperature_R1 == 0.0).any())
        self.any_top_k = bool((self.top_k_R1 > 0).any())
        self.all_top_k = bool((self.top_k_R1 > 0).all())
        self.largest_top_k = int(self.top_k_R1.max()) if len(self.top_k_R1) else 0
        self.any_top_p = bool((self.top_p_R1 < 1.0).any())
        self.any_min_p = bool((self.min_p_R1 > 0.0).any())

        positive_R1 = self.temperature_R1 > 0
        self.divisor_R1 = torch.where(positive_R1, self.temperature_R1, 1.0)
        self.any_temperature = bool((self.divisor_R1 != 1.0).any())

    def extend(self, other: BatchSampler) -> None:
        """Add the rows of another sampler, which has drawn nothing yet, behind these."""
        steps = max(self.uniforms_RT.shape[1], other.uniforms_RT.shape[1])
        ends = max(self.ends_RE.shape[1], other.ends_RE.shape[1])
        for sampler in (self, other):
            pad = nn.functional.pad
            sampler.uniforms_RT = pad(sampler.uniforms_RT, (0, steps - sampler.uniforms_RT.shape[1]))
            sampler.ends_RE = pad(sampler.ends_RE, (0, ends - sampler.ends_RE.shape[1]), value=-1)
        for name in _PER_ROW:
            setattr(self, name, torch.cat([getattr(self, name), getattr(other, name)]))
        if self.seen_RV is not None:
            self.seen_RV = torch.cat([self.seen_RV, _seen(other.prompts, self.seen_RV)])
        if self.counts_RV is not None:
            more = self.counts_RV.new_zeros(len(other.prompts), self.counts_RV.shape[1])
            self.counts_RV = torch.cat([self.counts_RV, more])
        self.prompts += other.prompts
        self._look()

    def keep(self, rows: Tensor) -> None:
        """Keep only `rows`."""
        for name in _PER_ROW:
            setattr(self, name, getattr(self, name)[rows])
        self.seen_RV = self.seen_RV[rows] if self.seen_RV is not None else None
        self.counts_RV = self.counts_RV[rows] if self.counts_RV is not None else None
        self.prompts = [self.prompts[i] for i in rows.tolist()]
        self._look()

    def draw(self, logits_RV: Tensor, step: int | Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Token ids [R], their log-probs [R] (fp32), and the log of the kept mass [R], None where no row is narrowed.

        Args:
            logits_RV: of the rows.
            step: tokens that every row has drawn before; [R] where they differ.
        """
        logits_RV = logits_RV.float()
        if self.any_penalty:
            logits_RV = self._penalise(logits_RV)
        if self.any_count:
            logits_RV = self._discount(logits_RV)
        tempered_RV = logits_RV / self.divisor_R1 if self.any_temperature else logits_RV
        tempered_RV, log_mass_R = self._narrow(tempered_RV, step)
        if isinstance(step, int):
            uniform_R = self.uniforms_RT[:, step]
        else:
            uniform_R = self.uniforms_RT.gather(1, step[:, None])[:, 0]
        greedy_R = self.temperature_R1[:, 0] <= 0 if self.any_greedy else None
        token_R, logprob_R = _drawn(tempered_RV, uniform_R, greedy_R)
        if self.seen_RV is not None:
            self.seen_RV.scatter_(1, token_R[:, None], True)
        if self.counts_RV is not None:
            self.counts_RV.scatter_add_(1, token_R[:, None], torch.ones_like(token_R, dtype=torch.float32)[:, None])
        return token_R, logprob_R, log_mass_R

    def _narrow(self, tempered_RV: Tensor, step: int | Tensor) -> tuple[Tensor, Tensor | None]:
        """Logits of what may be drawn, and the log of the mass [R] that it has of the whole distribution."""
        early = self.longest_minimum and not (isinstance(step, int) and step >= self.longest_minimum)
        truncates = self.any_top_k or self.any_top_p or self.any_min_p
        if not (early or truncates):
            return tempered_RV, None
        kept_RV = tempered_RV.log_softmax(-1)
        log_mass_R1 = torch.zeros_like(kept_RV[:, :1])
        if early:
            kept_RV = self._without_ends(kept_RV, step)
            log_mass_R1 = kept_RV.logsumexp(-1, keepdim=True)
            kept_RV = kept_RV - log_mass_R1
        if truncates:
            kept_RV = self._truncate(kept_RV)
            log_mass_R1 = log_mass_R1 + kept_RV.logsumexp(-1, keepdim=True)
        return kept_RV, log_mass_R1[:, 0]

    def _penalise(self, logits_RV: Tensor) -> Tensor:
        """Divide positive and multiply negative logits of seen tokens (arXiv:1909.05858, eq. 13 as practised)."""
        if self.seen_RV is None:
            self.seen_RV = _seen(self.prompts, logits_RV)
        penalised = torch.where(logits_RV > 0, logits_RV / self.penalty_R1, logits_RV * self.penalty_R1)
        return torch.where(self.seen_RV, penalised, logits_RV)

    def _discount(self, logits_RV: Tensor) -> Tensor:
        """Subtract the frequency penalty per sampled occurrence and the presence penalty once, as OpenAI's API does."""
        if self.counts_RV is None:
            self.counts_RV = torch.zeros_like(logits_RV)
        return logits_RV - self.frequency_R1 * self.counts_RV - self.presence_R1 * (self.counts_RV > 0)

    def _without_ends(self, logits_RV: Tensor, step: int | Tensor) -> Tensor:
        """No end token before a row's minimum, unless nothing else may follow (an expression that is complete)."""
        early_R1 = self.min_tokens_R1 > (step if isinstance(step, int) else step[:, None])
        ends_RV = torch.zeros_like(logits_RV, dtype=torch.bool)
        ends_RV.scatter_(1, self.ends_RE.clamp(min=0), self.ends_RE >= 0)
        ends_RV[:, 0] = (self.ends_RE == 0).any(1)  # what clamping has written there
        without_RV = logits_RV.masked_fill(ends_RV & early_R1, -torch.inf)
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


_PER_ROW = (
    "uniforms_RT", "temperature_R1", "top_p_R1", "min_p_R1", "top_k_R1", "penalty_R1", "frequency_R1", "presence_R1",
    "min_tokens_R1", "ends_RE",
)  # fmt: skip


def _seen(prompts: Sequence[Sequence[int]], like_RV: Tensor) -> Tensor:
    """[rows, V] bool: the tokens of each row's prompt."""
    seen_RV = torch.zeros(len(prompts), like_RV.shape[1], dtype=torch.bool, device=like_RV.device)
    for row, prompt in enumerate(prompts):
        seen_RV[row, torch.tensor(prompt, device=like_RV.device)] = True
    return seen_RV


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
