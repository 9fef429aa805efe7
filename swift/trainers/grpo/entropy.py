"""Entropy over one global batch: the weight of the bonus, and the tokens of highest entropy.

Entropy is computed in the policy's training forward pass: in every step if a setting needs it or if whole logits are
made anyway, else in every `LOG_EVERY`-th step. The threshold of the top entropies has to be known before the first
backward pass of a global batch. If one micro-batch holds the global batch, it comes from the same forward pass, else
from an additional pass without gradient.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from swift.rl.entropy import AdaptiveEntropy, top_entropy_threshold
from swift.rl.linear_logprobs import Entropy
from swift.rollout.samples import RolloutBatch
from swift.trainers.grpo.micro_batch import split_by_sample

if TYPE_CHECKING:
    from swift.trainers.grpo.logprobs import LogProbs
    from swift.trainers.grpo.metrics import StepMetrics


LOG_EVERY = 10
"""Optimizer steps between two entropies that are computed only for the log, from the first step on."""
STEERING = "steering"
"""The sum and number of an update's entropies in its report, for the controller and not for the log."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EntropySettings:
    """Settings of the entropy.

    coefficient: weight of the bonus; unused with `adaptive`, the controller of a new run, which adapts the weight.
    quantile: share of the tokens that is trained on, those of the highest entropy; 1 is off. log: whether to log it in
    each step; None logs it where it costs nothing, and every `LOG_EVERY` steps.
    """

    coefficient: float = 0.0
    adaptive: AdaptiveEntropy | None = None
    quantile: float = 1.0
    log: bool | None = None

    @property
    def has_bonus(self) -> bool:
        """Whether some update may have a bonus; then completions without advantage have a gradient too."""
        return self.coefficient > 0 or self.adaptive is not None

    def kind(self, step: int, *, free: bool) -> Entropy:
        """What a training forward pass computes of it after `step` updates; `free`: whole logits are made anyway."""
        if self.has_bonus:
            return "gradient"
        log = self.log if self.log is not None else free or step % LOG_EVERY == 0
        return "value" if log or self.quantile < 1 else "none"


@dataclass(frozen=True, slots=True)
class TopEntropy:
    """The mask h of a global batch: keep[sample][token] is whether the token's entropy reaches `threshold`.

    num_tokens: trained tokens that are kept, the sum of m h over it.
    """

    threshold: float
    keep: dict[int, np.ndarray]
    num_tokens: int


def controller_state(controller: AdaptiveEntropy) -> dict[str, Any]:
    """The controller's part of a checkpoint; its bounds are settings."""
    last = controller.last_entropy
    return {"coefficient": controller.coefficient, "last_entropy": last if math.isfinite(last) else None}


def restored_controller(start: AdaptiveEntropy | None, state: dict[str, Any] | None) -> AdaptiveEntropy | None:
    """The controller of a resumed run; if the checkpoint has none, that of a new run.

    A coefficient outside the current bounds is moved to the nearest one.
    """
    if start is None or state is None:
        return start
    last = state["last_entropy"]
    coefficient = min(max(state["coefficient"], start.minimum), start.maximum)
    return replace(start, coefficient=coefficient, last_entropy=math.inf if last is None else last)


@dataclass(eq=False)
class EntropyControl:
    """The weight of the bonus, and the mask of the top entropies.

    controller: adapts the weight; None if it is fixed.
    """

    logprobs: LogProbs
    controller: AdaptiveEntropy | None

    @property
    def coefficient(self) -> float:
        """The weight of the bonus in the next update."""
        return self.logprobs.settings.entropy.coefficient if self.controller is None else self.controller.applied

    def mask_ahead(self, batch: RolloutBatch, chosen: Sequence[int], policy: nn.Module) -> TopEntropy | None:
        """The mask of the top entropies of a global batch, from a pass without gradient.

        All trained tokens count for the threshold, those without advantage too. None if one micro-batch holds them all:
        its training forward pass gives the mask.
        """
        logprobs = self.logprobs
        plan = logprobs.planner.plan(batch.samples, chosen)
        if logprobs.in_one(plan):
            return None
        policy.eval()
        own: list[int] = []
        values: list[Tensor] = []
        with logprobs.agreed(), torch.no_grad():
            for part, held in logprobs.own_micro_batches(batch.samples, plan, lambda sample: True):
                _, entropy_N = logprobs.scores(policy, part, "value")
                assert entropy_N is not None
                if held:  # no filler
                    own += held
                    values.append(entropy_N)
        policy.train()
        samples = [batch.samples[i] for i in own]
        mine = dict(zip(own, split_by_sample(torch.cat(values), samples), strict=True)) if own else {}
        return self.mask_of(batch, logprobs.collectives.merged(mine))

    def mask_of(self, batch: RolloutBatch, entropies: dict[int, np.ndarray]) -> TopEntropy:
        """The tokens of highest entropy (arXiv:2506.01939), from the entropies of all samples of a global batch.

        Ties at the threshold are kept.
        """
        order = sorted(entropies)
        trained = {i: batch.samples[i].trained for i in order}
        every = np.concatenate([entropies[i][trained[i]] for i in order])
        threshold = top_entropy_threshold(torch.from_numpy(every), self.logprobs.settings.entropy.quantile)
        keep = {i: entropies[i] >= np.float32(threshold) for i in order}
        return TopEntropy(threshold, keep, sum(int((keep[i] & trained[i]).sum()) for i in order))

    def steer(self, report: StepMetrics) -> None:
        """Update the controller, if there is one, from what `report` has of this rank's entropies; collective."""
        if self.controller is None or STEERING not in report:
            return
        entropy = report.pop(STEERING)
        total, count = self.logprobs.collectives.sum([entropy.total, entropy.weight])
        if count and math.isfinite(total):  # else the update is skipped
            self.controller = self.controller.updated(total / count)
