"""Entropy over one global batch: the weight of the bonus, and the most uncertain tokens.

Entropy comes from the logits of the policy's own forward pass: where a setting asks for it, where whole logits give it
anyway, and else in every `LOG_EVERY`-th step. What needs the
whole global batch before its first backward pass (the threshold of the top entropies) comes from that forward pass
alone where one micro-batch holds the whole global batch, else from a pass without gradient.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from swift.rl.entropy import AdaptiveEntropy, top_entropy_threshold
from swift.rl.linear_logprobs import Entropy
from swift.rollout.samples import RolloutBatch
from swift.trainers.grpo.micro_batch import split_by_sample

if TYPE_CHECKING:
    from swift.trainers.grpo.logprobs import LogProbs


LOG_EVERY = 10
"""Optimizer steps between two entropies that are computed for the log alone; the first step has one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EntropySettings:
    """What the entropy is for.

    coefficient: weight of the bonus; with `adaptive`, the controller steers it instead.
    adaptive: the controller of a new run, or None. quantile: share of the tokens that is trained on. log: log it in
    each step; None where it costs nothing, and every `LOG_EVERY` steps.
    """

    coefficient: float = 0.0
    adaptive: AdaptiveEntropy | None = None
    quantile: float = 1.0
    log: bool | None = None

    @property
    def has_bonus(self) -> bool:
        """Whether a bonus may act in some update; then completions without advantage move the gradient too."""
        return self.coefficient > 0 or self.adaptive is not None

    @property
    def selects(self) -> bool:
        """Whether only the most uncertain tokens are trained on."""
        return self.quantile < 1

    def kind(self, step: int, *, free: bool) -> Entropy:
        """What a forward pass of the policy computes of it after `step` updates; `free`: the logits are made anyway."""
        if self.has_bonus:
            return "gradient"
        log = self.log if self.log is not None else free or step % LOG_EVERY == 0
        return "value" if log or self.selects else "none"


@dataclass(frozen=True, slots=True)
class TopEntropy:
    """The mask h of a global batch: keep[sample][token] says whether the token's entropy reaches `threshold`.

    num_tokens: trained tokens that are kept, the sum of m h over it.
    """

    threshold: float
    keep: dict[int, np.ndarray]
    num_tokens: int


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


class EntropyControl:
    """The bonus's weight, and the mask of the top entropies."""

    def __init__(self, logprobs: LogProbs) -> None:
        self.logprobs = logprobs
        self.controller = self.settings.adaptive
        """Steers the coefficient; None where it is fixed."""

    @property
    def settings(self) -> EntropySettings:
        """Those of the step."""
        return self.logprobs.settings.entropy

    @property
    def coefficient(self) -> float:
        """The weight of the bonus in the next update."""
        return self.settings.coefficient if self.controller is None else self.controller.applied

    def look_ahead(self, batch: RolloutBatch, chosen: Sequence[int], policy: nn.Module) -> TopEntropy | None:
        """The mask of the top entropies of a global batch, as far as it has to be known before its first micro-batch.

        All trained tokens count for the threshold, those without advantage too. Where one micro-batch holds them all,
        the mask is made from its own entropies.
        """
        if not self.settings.selects:
            return None
        logprobs = self.logprobs
        plan = logprobs.planner.plan(batch.samples, chosen)
        if logprobs.in_one(plan):
            return None
        policy.eval()
        mine: dict[int, np.ndarray] = {}
        for one, held in logprobs.own_micro_batches(batch.samples, plan, lambda sample: True):
            with torch.no_grad():
                _, entropy_N = logprobs.scores(policy, one, "value")
            assert entropy_N is not None
            mine |= dict(zip(held, split_by_sample(entropy_N, one.samples), strict=False))  # none of a filler
        policy.train()
        return self.choose(batch, logprobs.collectives.merged(mine))

    def choose(self, batch: RolloutBatch, entropies: dict[int, np.ndarray]) -> TopEntropy:
        """The most uncertain tokens (arXiv:2506.01939), from the entropies of all samples of a global batch.

        Ties at the threshold are kept.
        """
        order = sorted(entropies)
        trained = {i: batch.samples[i].trained for i in order}
        every = np.concatenate([entropies[i][trained[i]] for i in order])
        threshold = top_entropy_threshold(torch.from_numpy(every), self.settings.quantile)
        keep = {i: entropies[i] >= np.float32(threshold) for i in order}
        return TopEntropy(threshold, keep, sum(int((keep[i] & trained[i]).sum()) for i in order))

    def steer(self, total: float, count: float) -> None:
        """Update the controller from the sum and number of this rank's entropies of an update; collective."""
        if self.controller is None:
            return
        total, count = self.logprobs.collectives.sum([total, count])
        if count and math.isfinite(total):  # else the update is skipped, and there is nothing to learn from
            self.controller = self.controller.updated(total / count)
