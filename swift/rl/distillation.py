"""Divergence between a student's and a teacher's distribution of a token, over the vocabulary or a part of it.

The generalized Jensen-Shannon divergence (arXiv:2306.13649) with the mixture `m = beta p + (1 - beta) q` of teacher p
and student q:

    beta = 0        KL(p | q)                                  forward
    0 < beta < 1    beta KL(p | m) + (1 - beta) KL(q | m)
    beta = 1        KL(q | p)                                  reverse

Of a teacher behind a server only the K likeliest tokens are known. All other tokens are one bin, the tail. Bins lose
information, so the divergence of the bins is never above the exact one, and `tail_bound` is the most that is lost.

N tokens, V vocabulary, K likeliest tokens of the teacher, B = K + 1 bins.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

LEAST_LOGPROB = math.log(1e-30)
"""Of a bin: one that is empty up to rounding has no logarithm."""


def generalized_jsd(student_NV: Tensor, teacher_NV: Tensor, beta: float) -> Tensor:
    """The divergence of each token in nats, [N], of log-probs over the same tokens or bins.

    Example: p = (.5, .5), q = (.9, .1): .511 with beta = 0, .368 with beta = 1, .102 with beta = .5.
    """
    if beta == 0:
        return _kl(teacher_NV, student_NV)
    if beta == 1:
        return _kl(student_NV, teacher_NV)
    mixture_NV = torch.logaddexp(student_NV + math.log1p(-beta), teacher_NV + math.log(beta))
    return beta * _kl(teacher_NV, mixture_NV) + (1 - beta) * _kl(student_NV, mixture_NV)


def _kl(first_NV: Tensor, second_NV: Tensor) -> Tensor:
    """`KL(first | second)` of log-probs, [N]."""
    return (first_NV.exp() * (first_NV - second_NV)).sum(-1)


def student_bins(logprobs_NV: Tensor, ids_NK: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probs of the bins, [N, B], tail last, of log-probs of all tokens; and the least of the tail's, [N]."""
    tail_NV = logprobs_NV.scatter(1, ids_NK, -torch.inf)
    bins_NB = torch.cat([logprobs_NV.gather(1, ids_NK), tail_NV.logsumexp(1, keepdim=True)], dim=1)
    least_N = logprobs_NV.detach().scatter(1, ids_NK, torch.inf).amin(1)
    return bins_NB.clamp_min(LEAST_LOGPROB), least_N


def teacher_bins(logprobs_NK: Tensor) -> Tensor:
    """Log-probs of the bins, [N, B], tail last, of those of the K likeliest tokens."""
    tail_N1 = (1 - logprobs_NK.double().exp().sum(1, keepdim=True)).clamp_min(0).log().to(logprobs_NK.dtype)
    return torch.cat([logprobs_NK, tail_N1], dim=1).clamp_min(LEAST_LOGPROB)


def tail_bound(student_NB: Tensor, teacher_NB: Tensor, least_N: Tensor, beta: float) -> Tensor | None:
    """Upper bound of the exact divergence less that of the bins, [N], without gradient; None for the reverse KL.

    With tail masses p and q, the bins lose, by the chain rule, the divergence of the conditional distributions in the
    tail, P of the teacher (unknown) and Q of the student:

        beta = 0        p KL(P | Q) <= p (log u - log min Q): no token of the tail is likelier than the last of the K
                        likeliest, so P <= u = min(1, p_K / p)
        0 < beta < 1    m h(beta p / m), with m = beta p + (1 - beta) q and the entropy h of two events: what telling
                        from a token of the tail which of the two has drawn it can be worth
        beta = 1        q KL(Q | P) has no bound: P may be 0 where Q is not

    least_N: least log-prob of the student in the tail.
    """
    if beta == 1:
        return None
    with torch.no_grad():
        student_N, teacher_N = student_NB[:, -1], teacher_NB[:, -1]
        if beta == 0:
            log_u_N = (teacher_NB[:, :-1].amin(1) - teacher_N).clamp_max(0)
            return teacher_N.exp() * (log_u_N - (least_N - student_N)).clamp_min(0)
        teacher_part_N, student_part_N = beta * teacher_N.exp(), (1 - beta) * student_N.exp()
        whole_N = teacher_part_N + student_part_N
        return sum(
            (part * (whole_N / part).log() for part in (teacher_part_N, student_part_N)), torch.zeros_like(least_N)
        )


def describe(beta: float, top_k: int | None, lmbda: float, sft_alpha: float) -> str:
    """One line of the plan: the divergence, and whose answers are trained on.

    Example: "generalized JSD (arXiv:2306.13649): beta 0.5 over the whole vocabulary; 1 of the answers sampled".
    """
    name = "forward KL" if beta == 0 else "reverse KL" if beta == 1 else f"generalized JSD, beta {beta:g}"
    tokens = "the whole vocabulary" if top_k is None else f"the teacher's {top_k} likeliest tokens and the rest as one"
    more = f"; + {sft_alpha:g} cross-entropy of given answers" if sft_alpha else ""
    return f"{name} (arXiv:2306.13649), over {tokens}; share of sampled answers {lmbda:g}{more}"
