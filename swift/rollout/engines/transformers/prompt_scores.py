"""Requests for the scores of their own prompts: one forward pass of several packed prompts, and no decoding."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from swift.models.forward import TokenSequence, arrange
from swift.models.scoring import at_head, prepare_scoring
from swift.rl.linear_distillation import Head
from swift.rollout.engines.running import Running, RunningRequests
from swift.rollout.scores import packed
from swift.types import Completion

TOKENS_AT_A_TIME = 1 << 14
"""Most tokens of a pass, unless one prompt has more."""
BLOCK_ELEMENTS = 1 << 26
"""Elements of a block of logits."""


class PromptScores(RunningRequests[Running]):
    """The outstanding requests with `SamplingParams.prompt_logprobs`."""

    @torch.no_grad()
    def step(self, model: nn.Module, device: torch.device, version: int) -> list[Completion]:
        """The completions of the next requests, without tokens of their own."""
        chosen: list[Running] = []
        for running in self.values():
            total = sum(len(one.request.prompt_ids) for one in (*chosen, running))
            if chosen and total > TOKENS_AT_A_TIME:
                break
            chosen.append(running)
        prepare_scoring(model)
        firsts = [max(1, one.request.sampling.scored_from) for one in chosen]
        prompts = [list(one.request.prompt_ids) for one in chosen]
        sequences = [TokenSequence(ids[:first], ids[first:]) for ids, first in zip(prompts, firsts, strict=True)]
        top_k = max(one.request.sampling.prompt_logprobs for one in chosen)
        ids_NK, logprobs_NK, own_N = at_head(model, arrange(model, sequences, device=device), _likeliest(top_k))
        lengths = [len(sequence.completion_ids) for sequence in sequences]
        parts: Any = zip(*(value.cpu().split(lengths) for value in (ids_NK, logprobs_NK, own_N)), strict=True)
        done = []
        for running, (ids, logprobs, own) in zip(chosen, parts, strict=True):
            most = running.request.sampling.prompt_logprobs
            scores = packed(ids[:, :most].numpy(), logprobs[:, :most].numpy(), own.numpy())
            name = running.request.request_id
            self.take(name)
            done.append(Completion(name, [], [], "stop", prompt_scores=scores))
        return done


def _likeliest(top_k: int) -> Any:
    """The work at the output layer: the likeliest tokens, their log-probs, and those of the tokens that are there."""

    def work(head: Head, ids_N: Tensor) -> tuple[Tensor, ...]:
        size, parts = max(1, BLOCK_ELEMENTS // head.vocabulary), []
        for start in range(0, ids_N.numel(), size):
            rows = slice(start, start + size)
            logprobs_nV = head.logits(rows).log_softmax(-1)
            logprobs_nK, ids_nK = logprobs_nV.topk(min(top_k, head.vocabulary))
            parts.append((ids_nK.int(), logprobs_nK, logprobs_nV.gather(1, ids_N[rows, None])[:, 0]))
        return tuple(torch.cat(column) for column in zip(*parts, strict=True))

    return work
