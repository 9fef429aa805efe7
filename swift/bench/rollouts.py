"""Frozen rollouts: the same token ids and advantages for both trainers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from swift.bench.work import Work, prompts

TEXT_TOKENS = 256
"""Ids below are plain bytes in the tiny models' vocabulary."""


@dataclass(frozen=True, slots=True)
class Rollout:
    """One completion: prompt ids, completion ids (int32 arrays) and its advantage."""

    group: int
    prompt_ids: np.ndarray
    token_ids: np.ndarray
    advantage: float


def frozen(work: Work, *, lengths: Literal["forced", "mixed"] = "forced") -> list[Rollout]:
    """`work.num_completions` rollouts in group order.

    Args:
        work: the batch; token ids and advantages are drawn from its seed.
        lengths: "forced" takes `Work.limits`, "mixed" draws 1..completion_tokens.
    """
    random = np.random.default_rng(work.seed)
    texts, limits = prompts(work), work.limits
    rollouts = []
    for index in range(work.num_completions):
        group = index // work.num_generations
        prompt = np.frombuffer(texts[group % len(texts)].encode(), dtype=np.uint8).astype(np.int32)
        length = limits[index] if lengths == "forced" else int(random.integers(1, work.completion_tokens + 1))
        ids = random.integers(0, work.vocab_size or TEXT_TOKENS, size=length).astype(np.int32)
        rollouts.append(Rollout(group, prompt, ids, float(random.standard_normal())))
    return rollouts
