"""Log-probs of the samples of a rollout batch: of the policy before its first update on them, and of frozen models.

The log-probs that a rank keeps with a sample (`old_logprobs`, those of `FROZEN`) are needed in every later update on
the sample, so a sample stays on its rank (`swift.trainers.micro_batches`).
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypeVar

import torch
from torch import Tensor, nn

from swift.errors import NumericError
from swift.models.attention.forked import takes_streams
from swift.models.attention.sequence_parallel import SequenceGroup
from swift.models.forward import TokenBatch, TokenSequence, arrange, pad
from swift.models.scoring import HeadWork, at_head, score_tokens, scores_and_balance
from swift.models.vision import Vision, vision_of
from swift.rl.kl import sequence_k1
from swift.rl.linear_logprobs import Entropy
from swift.rollout.samples import FROZEN, FrozenName, RolloutBatch, TrainSample
from swift.trainers.distributed import Collectives
from swift.trainers.grpo.micro_batch import MicroBatch, collate, seen_by_teacher, split_by_sample
from swift.trainers.grpo.routes import RoutingReplay
from swift.trainers.micro_batches import MicroBatchPlan
from swift.trainers.token_budget import MicroBatchPlanner

if TYPE_CHECKING:
    from swift.models.reference import ReferenceModel
    from swift.trainers.grpo.settings import GRPOSettings

T = TypeVar("T")
Scored: TypeAlias = tuple[Sequence[TrainSample], Tensor]
"""The samples of a micro-batch and what a model gave for their tokens, [N]."""


@dataclass(eq=False)
class LogProbs:
    """Scores samples with the models of one trainer.

    models: the frozen ones beside the policy, by the field of a sample for their log-probs. unwrapped: returns the
    policy without its wrappers for training. on_progress: called after each micro-batch. timer: times phases. group:
    the ranks that share micro-batches. in_step: whether the model is sharded, so that every rank has to make the same
    number of forward passes. routes: replays the experts of samples; None without.
    """

    settings: GRPOSettings
    collectives: Collectives
    planner: MicroBatchPlanner
    models: Mapping[FrozenName, ReferenceModel]
    unwrapped: Callable[[], nn.Module]
    device: torch.device
    on_progress: Callable[[], None]
    timer: Callable[[str], AbstractContextManager[None]]
    group: SequenceGroup | None = None
    in_step: bool = False
    routes: RoutingReplay | None = None

    @property
    def vision(self) -> Vision | None:
        """What the policy sees images with."""
        return vision_of(self.unwrapped())

    @property
    def frozen(self) -> list[FrozenName]:
        """The frozen models whose log-probs are part of the loss; not the reference with `--kl_in_reward`."""
        weights = {"ref_logprobs": self.settings.loss.beta, "teacher_logprobs": self.settings.teacher_kl_coef}
        elsewhere = {"teacher_logprobs"} - self.models.keys()  # a teacher behind a server
        return [name for name in FROZEN if weights[name] > 0 and name not in elsewhere]

    # --- micro-batches ----------------------------------------------------------------------------------------

    def useful(self, batch: RolloutBatch, chosen: Sequence[int]) -> list[bool]:
        """Which samples of a global batch are computed: those with a gradient, or all that set the entropy threshold.

        A sample with advantage 0 has a gradient only from its KL, its teacher, its entropy bonus or the load-balancing
        loss.
        """
        settings = self.settings
        has_other_terms = (
            bool(self.frozen)
            or settings.teacher_kl_coef > 0
            or settings.loss.rollout_kl_coef > 0
            or settings.entropy.has_bonus
        )
        has_other_terms = has_other_terms or settings.router_aux_loss_coef > 0 or settings.distillation is not None
        every = has_other_terms or not settings.skip_zero_advantage
        trained = [batch.samples[i].num_trained > 0 for i in chosen]
        useful = [has and (every or batch.samples[i].has_advantage) for has, i in zip(trained, chosen, strict=True)]
        if any(useful) and settings.entropy.quantile < 1 and self.in_one(self.planner.plan(batch.samples, chosen)):
            return trained
        return useful

    def in_one(self, plan: MicroBatchPlan) -> bool:
        """Whether one micro-batch of one rank holds the whole plan."""
        return self.collectives.world_size == 1 and len(plan.micro_batches[0]) == 1

    def own_micro_batches(
        self, samples: Sequence[TrainSample], plan: MicroBatchPlan, wanted: Callable[[TrainSample], bool]
    ) -> Iterator[tuple[MicroBatch, list[int]]]:
        """This rank's micro-batches of a plan that hold a wanted sample, and the indices of what each holds.

        With a sharded model, this rank has a filler in each turn in which only other ranks have a micro-batch.
        """
        needs = {i for rank in plan.micro_batches for indices in rank for i in indices if wanted(samples[i])}
        for turn, held in enumerate(plan.micro_batches[self.collectives.rank]):
            mine = held if not needs.isdisjoint(held) else []
            if mine or (self.in_step and any(not needs.isdisjoint(rank[turn]) for rank in plan.micro_batches)):
                chosen = [samples[i] for i in mine or [plan.first]]
                batch = collate(chosen, [0.0] * len(chosen), device=self.device, filler=not mine, vision=self.vision)
                yield batch, mine
                self.on_progress()

    @property
    def can_agree(self) -> bool:
        """Whether forward passes have no collectives: then a rank may fail in one."""
        return not self.in_step and self.group is None

    def agreed(self) -> AbstractContextManager[None]:
        """Around passes without a collective; where they have some, a failing rank fails alone."""
        return self.planner.agreed() if self.can_agree else nullcontext()

    def surviving(self, attempt: Callable[[], T]) -> T:
        """See `MicroBatchPlanner.surviving`."""
        return self.planner.surviving(attempt, alone=self.can_agree)

    # --- routes -----------------------------------------------------------------------------------------------

    def begin(self, batch: RolloutBatch) -> None:
        """Before an optimizer step on a rollout batch."""
        if self.routes is not None:
            several = batch.updates_per_rollout > 1 or self.settings.keep_dropout
            self.routes.keeps = self.routes.mode == "trainer" and several

    @contextlib.contextmanager
    def routes_kept(self) -> Iterator[None]:
        """Around a forward pass with its backward pass, in which layers are computed again with the same experts."""
        try:
            yield
        finally:
            if self.routes is not None:
                self.routes.end()

    def _replay(self, batch: MicroBatch, tokens: TokenBatch) -> AbstractContextManager[None]:
        """Around a forward pass of the policy."""
        if self.routes is None or self.routes.is_paused:
            return nullcontext()
        return self.routes.around(batch.samples, tokens, filler=batch.filler)

    # --- forward passes ---------------------------------------------------------------------------------------

    def scores(
        self, model: nn.Module, batch: MicroBatch, entropy: Entropy = "none", temperature: float | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Log-prob of each completion token and entropy of its distribution, [N], fp32.

        temperature: None is that of the training. Routes of the samples are replayed.
        """
        temperature, tokens = temperature or self.settings.temperature, self._tokens(model, batch)
        with self._replay(batch, tokens):
            return score_tokens(model, tokens, temperature=temperature, entropy=entropy)

    def training_scores(
        self, model: nn.Module, batch: MicroBatch, entropy: Entropy
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """`scores`, and the load-balancing loss of the routers over the tokens of this pass; None with coefficient 0.

        The tokens are prompts and completions without their last tokens; of a packed stream, a shared prompt counts
        once.
        """
        if not self.settings.router_aux_loss_coef:
            return (*self.scores(model, batch, entropy), None)
        tokens = self._tokens(model, batch)
        with self._replay(batch, tokens):
            return scores_and_balance(model, tokens, temperature=self.settings.temperature, entropy=entropy)

    def at_head(self, model: nn.Module, batch: MicroBatch, work: HeadWork) -> Any:
        """What `work` gives at the output layer of a model; see `swift.models.scoring.at_head`."""
        return at_head(model, self._tokens(model, batch), work)

    def _tokens(self, model: nn.Module, batch: MicroBatch) -> TokenBatch:
        """A micro-batch as the model takes it."""
        tokens = batch.tokens if takes_streams(model) else pad(batch.sequences, device=self.device, vision=self.vision)
        return tokens if self.group is None else tokens.spread(self.group)

    @torch.no_grad()
    def score(self, sequences: Sequence[TokenSequence], *, temperature: float | None = None) -> Tensor:
        """The policy's log-probs [N] of all completion tokens, without gradient; None: the training temperature."""
        model = self.unwrapped()
        tokens = arrange(model, sequences, device=self.device)
        return score_tokens(model, tokens, temperature=temperature or self.settings.temperature)[0]

    # --- old log-probs ----------------------------------------------------------------------------------------

    def prepare_old(self, batch: RolloutBatch) -> None:
        """Before the first update on a rollout batch: score what later updates (or dropout) need old log-probs of."""
        if self.settings.old_logprobs == "sampler":
            take_sampler_logprobs(batch.samples)
            return
        model = self.unwrapped()
        model.eval()
        scored: list[Scored] = []
        with self.agreed():
            for number in range(0 if self.settings.keep_dropout else 1, batch.num_global_batches):
                chosen = batch.global_batch(number)
                # the plan of the training passes, so that a rank scores the samples that it will train on
                plan = self.planner.plan(batch.samples, chosen, self.useful(batch, chosen))
                missing = self.own_micro_batches(batch.samples, plan, lambda sample: sample.old_logprobs is None)
                for part, held in missing:
                    with torch.no_grad():
                        logprobs_N, _ = self.scores(model, part)
                    if held:
                        scored.append((part.samples, logprobs_N))
        model.train()
        keep("old_logprobs", scored)

    def check_old(self, batch: RolloutBatch, own: Sequence[int]) -> None:
        """Raises NumericError if a sample of this rank has no old log-probs, in an update that cannot do without.

        In the first update the policy itself is the old one. Later, that would make the ratio 1.
        """
        missing = [i for i in own if batch.samples[i].old_logprobs is None]
        if missing:
            raise NumericError(
                f"old log-probs: rank {self.collectives.rank} has none for {len(missing)} of {len(own)} samples in "
                f"update {batch.position + 1} of their rollout; this is a bug"
            )

    def share(self, batch: RolloutBatch) -> None:
        """Give every rank the log-probs, and the routes, that the others keep; collective.

        For a checkpoint, and where later updates cut the whole global batch over the ranks instead of its arrivals.
        """
        keeps = self.routes is not None and self.routes.mode == "trainer"
        names = ["old_logprobs", *FROZEN, *(["routes"] if keeps else [])]
        mine = {
            (i, name): values
            for i, sample in enumerate(batch.samples)
            for name in names
            if (values := getattr(sample, name)) is not None
        }
        for of_rank in self.collectives.all_gather(mine):
            for (i, name), values in of_rank.items():
                if getattr(batch.samples[i], name) is None:
                    setattr(batch.samples[i], name, values)

    def forget_old(self, batch: RolloutBatch) -> None:
        """Forget what the trainer has kept of a batch that is computed again from the beginning."""
        for sample in batch.samples:
            sample.old_logprobs = None
            if self.routes is not None and self.routes.mode == "trainer":
                sample.routes = None

    # --- frozen models ----------------------------------------------------------------------------------------

    def score_frozen(self, batch: RolloutBatch) -> None:
        """Fill in the log-probs of the frozen models for a rollout batch; collective.

        Each sample is scored on the rank, and in the micro-batch, that will train on it. The pipeline calls this while
        rewards are computed. Before the size of micro-batches is known, nothing is scored.
        """
        if not self.planner.ready:
            return
        with self.timer("train"):
            for name in self.frozen:
                self.surviving(functools.partial(self._score_with, name, batch))

    def _score_with(self, name: FrozenName, batch: RolloutBatch) -> None:
        scored: list[Scored] = []
        with self.agreed():
            for number in range(batch.num_global_batches):
                plan = self.planner.plan(batch.samples, batch.global_batch(number))
                missing = self.own_micro_batches(batch.samples, plan, lambda sample: getattr(sample, name) is None)
                for part, held in missing:
                    logprobs_N = self.of_frozen(name, part)
                    if held:
                        scored.append((part.samples, logprobs_N))
        keep(name, scored)

    def of_frozen(self, name: FrozenName, batch: MicroBatch) -> Tensor:
        """A frozen model's log-probs [N] of a micro-batch, computed where they are missing; collective if sharded."""
        given_N = batch.frozen_N.get(name)
        others_miss = self.in_step and self.collectives.any(given_N is None)
        return self._frozen_scores(name, batch) if given_N is None or others_miss else given_N

    def reward_kl(self, samples: Sequence[TrainSample]) -> list[float]:
        """`sum_t m (lp_s - lp_r)` of each sample in nats, the on-policy k1 estimate; 0 without a trained token.

        `--kl_in_reward` subtracts it, as RLOO (arXiv:2402.14740) and REINFORCE++ do. Collective: ranks share the
        samples, and every rank gets all sums, because it computes all advantages.
        """
        with self.timer("ref_logp"):
            mine = self.surviving(lambda: self._own_reward_kl(samples))
        sums = self.collectives.merged(mine)
        return [sums.get(i, 0.0) for i in range(len(samples))]

    def _own_reward_kl(self, samples: Sequence[TrainSample]) -> dict[int, float]:
        """This rank's part of `reward_kl`."""
        plan = self.planner.plan(samples, range(len(samples)))
        own: list[int] = []
        values: list[Tensor] = []
        with self.agreed():
            for part, held in self.own_micro_batches(samples, plan, lambda sample: True):
                ref_logprobs_N = self._frozen_scores("ref_logprobs", part)
                k1_S = sequence_k1(part.sampler_logprobs_N, ref_logprobs_N, part.segments)
                own += held
                values.append(k1_S[: len(held)])  # none of a filler
        return dict(zip(own, torch.cat(values).tolist(), strict=True)) if values else {}

    def _frozen_scores(self, name: FrozenName, batch: MicroBatch) -> Tensor:
        """A frozen model's log-probs [N] at the training temperature, without gradient."""
        paused = nullcontext() if self.routes is None else self.routes.paused()
        if name == "teacher_logprobs":
            batch = seen_by_teacher(batch, vision=self.vision)
        with paused, self.models[name].active() as module, torch.no_grad():
            return self.scores(module, batch)[0]


def keep(name: Literal["old_logprobs"] | FrozenName, scored: Sequence[Scored]) -> None:
    """Keep log-probs with the samples that have none yet, for later updates on the same rollout batch.

    One transfer brings those of all micro-batches to the host.
    """
    scored = [(part, part_N) for part, part_N in scored if any(getattr(sample, name) is None for sample in part)]
    if not scored:
        return
    samples = [sample for part, _ in scored for sample in part]
    logprobs_N = torch.cat([part_N for _, part_N in scored])
    for sample, values in zip(samples, split_by_sample(logprobs_N, samples), strict=True):
        if getattr(sample, name) is None:
            setattr(sample, name, values)


def take_sampler_logprobs(samples: Sequence[TrainSample]) -> None:
    """Use the rollout engine's log-probs as old log-probs of samples that have none yet."""
    for sample in samples:
        if sample.old_logprobs is None:
            sample.old_logprobs = sample.sampler_logprobs
