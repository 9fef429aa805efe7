"""Log-probs of the samples of a rollout batch: under the policy, at its first visit, and under the reference.

What a rank remembers of a sample (`old_logprobs`, `ref_logprobs`) it needs again at every visit, so the samples of a
rank are the same at each (`swift.trainers.micro_batches`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from swift.errors import NumericError
from swift.models.attention.interface import is_packed
from swift.models.forward import TokenSequence, pack
from swift.models.scoring import score_tokens
from swift.rl.linear_logprobs import Entropy
from swift.rollout.samples import RolloutBatch, TrainSample
from swift.trainers.distributed import Collectives
from swift.trainers.grpo.micro_batch import MicroBatch, collate, split_by_sample
from swift.trainers.micro_batches import Limits, MicroBatchPlan
from swift.trainers.token_budget import MicroBatchPlanner

if TYPE_CHECKING:
    from swift.models.reference import ReferenceModel
    from swift.trainers.grpo.settings import GRPOSettings


class LogProbs:
    """Scores samples with the models of one trainer.

    Args:
        settings: of the step, as they are now.
        collectives: the data-parallel ranks.
        planner: cuts global batches into micro-batches.
        reference: the KL reference, or none.
        policy: gives the policy without what wraps it for training.
        device: where tensors go.
        on_progress: called after each micro-batch.

    Attributes:
        in_step: the model is sharded, so every rank has to make the same number of forward passes.
    """

    def __init__(
        self,
        *,
        settings: Callable[[], GRPOSettings],
        collectives: Collectives,
        planner: MicroBatchPlanner,
        reference: ReferenceModel | None,
        policy: Callable[[], nn.Module],
        device: torch.device,
        on_progress: Callable[[], None],
    ) -> None:
        self._settings = settings
        self.collectives = collectives
        self.planner = planner
        self.reference = reference
        self._policy_module = policy
        self.device = device
        self.on_progress = on_progress
        self.in_step = False

    @property
    def settings(self) -> GRPOSettings:
        """Those of the step."""
        return self._settings()

    # --- micro-batches ----------------------------------------------------------------------------------------

    def collate(self, samples: Sequence[TrainSample], weights_S: Sequence[float]) -> MicroBatch:
        """The samples of a micro-batch, packed; see `swift.trainers.grpo.micro_batch.collate`."""
        return collate(samples, weights_S, device=self.device)

    def plan(self, samples: Sequence[TrainSample], chosen: Sequence[int], useful: Sequence[bool]) -> MicroBatchPlan:
        """Who computes what in which micro-batch; the same on every rank."""
        settings = self.settings
        limits = Limits(settings.max_samples, settings.max_tokens)
        return self.planner.plan(samples, chosen, useful, limits, per_device=settings.per_device)

    def contributes(self, sample: TrainSample) -> bool:
        """Whether a sample can move the gradient: one without advantage only by its KL or its entropy."""
        settings = self.settings
        others = settings.loss.beta > 0 or settings.entropy.has_bonus
        return sample.advantage != 0.0 or others or not settings.skip_zero_advantage

    def useful(self, batch: RolloutBatch, chosen: Sequence[int]) -> list[bool]:
        """Which samples of a global batch are computed: those that move the gradient, or set the entropy threshold."""
        trained = [batch.samples[i].num_trained > 0 for i in chosen]
        useful = [has and self.contributes(batch.samples[i]) for has, i in zip(trained, chosen, strict=True)]
        if any(useful) and self.settings.entropy.selects and self.in_one(self.plan(batch.samples, chosen, trained)):
            return trained
        return useful

    def in_one(self, plan: MicroBatchPlan) -> bool:
        """Whether one micro-batch of one rank holds the whole plan."""
        return self.collectives.world_size == 1 and len(plan.micro_batches[0]) == 1

    def own_micro_batches(
        self, batch: RolloutBatch, plan: MicroBatchPlan, wanted: Callable[[int], bool]
    ) -> Iterator[tuple[MicroBatch, list[int]]]:
        """This rank's micro-batches of a plan with something wanted in them, and what each holds.

        With a sharded model there is one in each turn in which any rank has one, if need be over a filler.
        """
        needs = {i for rank in plan.micro_batches for one in rank for i in one if wanted(i)}
        for turn, held in enumerate(plan.micro_batches[self.collectives.rank]):
            if not needs.isdisjoint(held):
                mine = held
            elif self.in_step and any(not needs.isdisjoint(rank[turn]) for rank in plan.micro_batches):
                mine = []
            else:
                continue
            samples = [batch.samples[i] for i in mine or [plan.first]]
            yield self.collate(samples, [0.0] * len(samples)), mine

    # --- forward passes ---------------------------------------------------------------------------------------

    def policy(self, model: nn.Module, batch: MicroBatch) -> tuple[Tensor, Tensor | None]:
        """Log-prob and, where a setting asks for it, entropy of each completion token [N] from one forward pass."""
        if self.settings.entropy.observed:
            return self.with_entropy(model, batch)
        return self.of(model, batch), None

    def of(self, model: nn.Module, batch: MicroBatch) -> Tensor:
        """Log-prob of each completion token [N] at the sampling temperature, fp32."""
        return self._scores(model, batch, "none")[0]

    def with_entropy(self, model: nn.Module, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        """The same with the entropy of the tempered distribution, which has a gradient where the bonus needs one."""
        logprobs_N, entropy_N = self._scores(model, batch, "gradient" if self.settings.entropy.has_bonus else "value")
        assert entropy_N is not None, "an entropy that was asked for"
        return logprobs_N, entropy_N

    def _scores(self, model: nn.Module, batch: MicroBatch, entropy: Entropy) -> tuple[Tensor, Tensor | None]:
        tokens = batch.tokens if is_packed(model) else batch.sequences()
        return score_tokens(model, tokens, temperature=self.settings.temperature, entropy=entropy, device=self.device)

    def score(self, sequences: Sequence[TokenSequence], *, temperature: float | None = None) -> Tensor:
        """The trainer's log-probs [N] of all completion tokens, without gradient; for checks.

        Args:
            sequences: prompts with their completions.
            temperature: None means that of sampling.
        """
        model = self._policy_module()
        tokens = pack(sequences, device=self.device) if is_packed(model) else sequences
        with torch.no_grad():
            return score_tokens(
                model, tokens, temperature=temperature or self.settings.temperature, device=self.device
            )[0]

    # --- old log-probs ----------------------------------------------------------------------------------------

    def prepare_old(self, batch: RolloutBatch) -> None:
        """Before the first update on a rollout batch: what later ones (or dropout) need from the weights of now."""
        if batch.position > 0:
            return
        if self.settings.old_logprobs == "sampler":
            take_sampler_logprobs(batch.samples)
            return
        model = self._policy_module()
        model.eval()
        for number in range(0 if self.settings.keep_dropout else 1, batch.num_global_batches):
            chosen = batch.global_batch(number)
            # the plan is that of the training passes, so that a rank fills what it will need
            plan = self.plan(batch.samples, chosen, self.useful(batch, chosen))
            for one, held in self.own_micro_batches(batch, plan, lambda i: batch.samples[i].old_logprobs is None):
                with torch.no_grad():
                    logprobs_N = self.of(model, one)
                if held:
                    remember(one, logprobs_N)
                self.on_progress()
        model.train()

    def check_old(self, batch: RolloutBatch, held: Sequence[int], *, step: int) -> None:
        """Only the first update after a rollout may take the policy itself for the old one.

        Raises:
            NumericError: a sample of a later update has no old log-probs on this rank, so its ratio would be 1.
        """
        if batch.position == 0 and (batch.arriving is not None or not self.settings.keep_dropout):
            return
        missing = [i for i in held if batch.samples[i].old_logprobs is None]
        if missing:
            raise NumericError(
                f"old log-probs: rank {self.collectives.rank} has none for {len(missing)} of {len(held)} samples of "
                f"step {step} (update {batch.position + 1} of their rollout); this is a bug"
            )

    def share_old(self, batch: RolloutBatch) -> None:
        """Later visits cut the whole global batch over the ranks, not its arrivals, so samples change hands.

        Collective.
        """
        mine = {i: one.old_logprobs for i, one in enumerate(batch.samples) if one.old_logprobs is not None}
        for of_rank in self.collectives.all_gather(mine):
            for i, logprobs in of_rank.items():
                if batch.samples[i].old_logprobs is None:
                    batch.samples[i].old_logprobs = logprobs

    # --- reference --------------------------------------------------------------------------------------------

    def refer(self, batch: RolloutBatch) -> None:
        """Fill in the reference's log-probs, on the rank and in the micro-batch that will train on each; collective.

        The pipeline asks for it while rewards are computed. Nothing is done before micro-batches have their size.
        """
        if not self.planner.ready(self.settings.max_tokens):
            return
        for number in range(batch.num_global_batches):
            chosen = batch.global_batch(number)
            plan = self.plan(batch.samples, chosen, [batch.samples[i].num_trained > 0 for i in chosen])
            for one, held in self.own_micro_batches(batch, plan, lambda i: batch.samples[i].ref_logprobs is None):
                self.ensure_reference(one, keep=bool(held))
                self.on_progress()

    def ensure_reference(self, batch: MicroBatch, *, keep: bool) -> None:
        """Fill in the reference's log-probs; with `keep`, on the rank that owns the samples, for later visits too."""
        if self.settings.loss.beta == 0:
            return
        missing = batch.ref_logprobs_N is None
        if not (self.collectives.any(missing) if self.in_step else missing):
            return
        batch.ref_logprobs_N = self.of_reference(batch)
        if not keep or not missing:
            return
        for sample, values in zip(batch.samples, split_by_sample(batch.ref_logprobs_N, batch.samples), strict=True):
            sample.ref_logprobs = values

    def of_reference(self, batch: MicroBatch) -> Tensor:
        """The reference's log-probs [N], without gradient."""
        assert self.reference is not None, "a KL without a reference"
        with self.reference.active() as module, torch.no_grad():
            return self.of(module, batch)


def remember(batch: MicroBatch, logprobs_N: Tensor) -> None:
    """Keep log-probs with the samples that have none yet, for later updates on the same rollout batch."""
    if all(sample.old_logprobs is not None for sample in batch.samples):
        return
    for sample, values in zip(batch.samples, split_by_sample(logprobs_N, batch.samples), strict=True):
        if sample.old_logprobs is None:
            sample.old_logprobs = values


def take_sampler_logprobs(samples: Sequence[TrainSample]) -> None:
    """Let what the sampler recorded stand in for old log-probs, except where samples bring theirs."""
    for sample in samples:
        if sample.old_logprobs is None:
            sample.old_logprobs = sample.sampler_logprobs
