"""Frozen rollouts: the same token ids and advantages for both trainers."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from harness.work import Work, prompts

TEXT_TOKENS = 256
"""Ids below are plain bytes in the tiny models' vocabulary."""


@dataclass(frozen=True, slots=True)
class Rollout:
    """One completion: prompt ids, completion ids (int32 arrays) and its advantage."""

    group: int
    prompt_ids: np.ndarray
    token_ids: np.ndarray
    advantage: float


def frozen(work: Work, *, lengths: str = "forced") -> list[Rollout]:
    """`work.num_completions` rollouts in group order.

    Args:
        work: the batch; token ids and advantages are drawn from its seed.
        lengths: "forced" makes every completion `completion_tokens` long, "mixed" draws 1..completion_tokens.
    """
    random = np.random.default_rng(work.seed)
    texts = prompts(work)
    rollouts = []
    for index in range(work.num_completions):
        group = index // work.num_generations
        prompt = np.frombuffer(texts[group % len(texts)].encode(), dtype=np.uint8).astype(np.int32)
        longest = work.completion_tokens
        length = longest if lengths == "forced" else int(random.integers(1, longest + 1))
        ids = random.integers(0, TEXT_TOKENS, size=length).astype(np.int32)
        rollouts.append(Rollout(group, prompt, ids, float(random.standard_normal())))
    return rollouts
