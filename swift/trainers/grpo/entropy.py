"""Entropy over one optimizer window: how much the bonus weighs, and which tokens are uncertain enough to train on.

Entropy is computed only where a setting asks for it, from the logits of the policy's own forward pass. What needs the
whole window before its first backward pass (the threshold of the top entropies) comes from that forward pass alone
where it holds the whole window, else from a pass without gradient.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from swift.rl.entropy import AdaptiveEntropy, top_entropy_threshold


@dataclass(frozen=True, slots=True, kw_only=True)
class EntropySettings:
    """What the entropy is for.

    coefficient: weight of the bonus; with `adaptive`, the controller steers it instead.
    adaptive: the controller of a new run, or None. quantile: share of the tokens that is trained on. log: log it.
    """

    coefficient: float = 0.0
    adaptive: AdaptiveEntropy | None = None
    quantile: float = 1.0
    log: bool = False

    @property
    def has_bonus(self) -> bool:
        """Whether a bonus may act in some window; then completions without advantage move the gradient too."""
        return self.coefficient > 0 or self.adaptive is not None

    @property
    def selects(self) -> bool:
        """Whether only the most uncertain tokens are trained on."""
        return self.quantile < 1

    @property
    def observed(self) -> bool:
        """Whether a forward pass has to compute it."""
        return self.log or self.has_bonus or self.selects


@dataclass(frozen=True, slots=True)
class TopEntropy:
    """The mask h of a window: keep[sample][token] says whether the token's entropy reaches `threshold`.

    num_tokens: trained tokens that are kept, the sum of m h over the window.
    """

    threshold: float
    keep: dict[int, np.ndarray]
    num_tokens: int


def top_entropy(entropies: Mapping[int, np.ndarray], trained: Mapping[int, np.ndarray], quantile: float) -> TopEntropy:
    """Choose the most uncertain trained tokens of a window (arXiv:2506.01939).

    Args:
        entropies: of every token, by sample: all samples of the window that have trained tokens.
        trained: the data mask of each.
        quantile: share to keep; ties at the threshold are kept.
    """
    order = sorted(entropies)
    every = np.concatenate([entropies[i][trained[i]] for i in order])
    threshold = top_entropy_threshold(torch.from_numpy(every), quantile)
    keep = {i: entropies[i] >= np.float32(threshold) for i in order}
    return TopEntropy(threshold, keep, sum(int((keep[i] & trained[i]).sum()) for i in order))


def controller_state(controller: AdaptiveEntropy | None) -> dict[str, Any] | None:
    """What a checkpoint keeps of the controller; its bounds are settings."""
    if controller is None:
        return None
    last = controller.last_entropy
    return {"coefficient": controller.coefficient, "last_entropy": last if math.isfinite(last) else None}


def restored_controller(start: AdaptiveEntropy | None, state: dict[str, Any] | None) -> AdaptiveEntropy | None:
    """The controller of a resumed run; where the checkpoint has none, it begins as in a new run.

    Bounds that have changed since hold at once: the coefficient is moved to the nearer one.
    """
    if start is None or state is None:
        return start
    last = state["last_entropy"]
    coefficient = min(max(state["coefficient"], start.minimum), start.maximum)
    return replace(start, coefficient=coefficient, last_entropy=math.inf if last is None else last)
