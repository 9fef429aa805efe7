"""Training samples of a rollout batch, and their division into global batches, one for each optimizer step.

A rollout batch holds all samples of one round, in launch order, the same on every rank. It feeds `num_global_batches`
global batches, `num_iterations` times each:

    rollout batch   [ g0 g0 g0 g0 | g1 g1 g1 g1 | g2 ... ]        samples in launch order
    global batch    consecutive samples

`swift.trainers.micro_batches` divides a global batch over the ranks and into micro-batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol, get_args

import numpy as np

if TYPE_CHECKING:
    from swift.types import RolloutGroup

FrozenName = Literal["ref_logprobs", "teacher_logprobs"]
FROZEN: tuple[FrozenName, ...] = get_args(FrozenName)
"""Fields of a sample with the log-probs of frozen models: the reference of the KL, the teacher of a distillation."""


@dataclass(slots=True)
class TrainSample:
    """One completion as training data.

    token_ids: int32 [T]. sampler_logprobs: float32 [T]. trained: bool [T], the data mask m: tokens that contribute to
        the loss.
    versions: policy versions of the tokens, run-length encoded as (version, start, end).
    old_logprobs, ref_logprobs, teacher_logprobs: float32 [T]; None until a forward pass has computed them.
    teacher_prompt_ids: int32, the prompt that the teacher gets; None: the same.
    teacher_ids, teacher_top: int32 and float32 [T, K], the teacher's likeliest tokens at each place, and their
        log-probs; None without a teacher elsewhere.
    token_advantages: float32 [T], or None without advantages per token; `advantage` is their mean then.
    group_id, prompt_id, index, finish_reason, completion, reward_kl, rewards, excluded: for the record; `index` is the
        place in the group, `completion` encodes what the tokens do not tell (`swift.rollout.saved_state`), if there is
        anything, `reward_kl` is in nats (`--kl_in_reward`), each function and model has a reward, and `excluded` is why
        it has no part, or None.
    routes: uint8 or uint16 [P + T - 1, layers, top-k], the experts to replay for P tokens of the prompt and those of
        the completion but the last one; None without.
    """

    group: int
    prompt_ids: np.ndarray
    token_ids: np.ndarray
    sampler_logprobs: np.ndarray
    trained: np.ndarray
    advantage: float
    versions: list[tuple[int, int, int]] = field(default_factory=list)
    old_logprobs: np.ndarray | None = None
    ref_logprobs: np.ndarray | None = None
    teacher_logprobs: np.ndarray | None = None
    teacher_prompt_ids: np.ndarray | None = None
    teacher_ids: np.ndarray | None = None
    teacher_top: np.ndarray | None = None
    token_advantages: np.ndarray | None = None
    routes: np.ndarray | None = None
    group_id: str = ""
    prompt_id: str = ""
    index: int = 0
    finish_reason: str = ""
    completion: bytes | None = None
    reward_kl: float | None = None
    rewards: list[float | None] = field(default_factory=list)
    excluded: str | None = None

    @property
    def is_given(self) -> bool:
        """Whether something else than the policy has made the completion: nobody knows its log-probs then."""
        return bool(np.isnan(self.sampler_logprobs).all())

    @property
    def has_advantage(self) -> bool:
        if self.token_advantages is None:
            return self.advantage != 0.0
        return bool(self.token_advantages[self.trained].any())

    @property
    def num_trained(self) -> int:
        """Number of tokens under the data mask; T_i of the papers."""
        return int(self.trained.sum())


@dataclass(frozen=True, slots=True)
class Arrival:
    """Indexes of samples that were added to a rollout batch; `last`: the batch is complete with them."""

    samples: range
    last: bool


@dataclass(slots=True)
class RolloutBatch:
    """The samples of one round, and the number of optimizer steps taken on them.

    position: optimizer steps taken, of `num_global_batches * num_iterations`.
    arriving: of a batch that is trained on while it is sampled, an iterator of `Arrival` that appends to `samples`;
        until its end the batch is incomplete. Such a batch lasts one step, so no checkpoint holds it.
    references: answers whose cross-entropy is part of the loss.
    """

    samples: list[TrainSample]
    num_global_batches: int
    num_iterations: int
    position: int = 0
    arriving: Any = None
    references: list[TrainSample] = field(default_factory=list)

    @property
    def exhausted(self) -> bool:
        return self.position >= self.updates_per_rollout

    @property
    def updates_per_rollout(self) -> int:
        """Optimizer steps per rollout batch, U."""
        return self.num_global_batches * self.num_iterations

    def global_batch(self, index: int | None = None) -> range:
        """Indexes of the samples of a global batch; None: of the one that the next step trains on."""
        index = self.position % self.num_global_batches if index is None else index
        size = len(self.samples) // self.num_global_batches
        return range(index * size, (index + 1) * size)


class TrainerScores(Protocol):
    """Scores from forward passes of the trainer's models, added to those of the reward functions."""

    def score(self, groups: Sequence[RolloutGroup]) -> dict[str, float]:
        """Add to the groups' scores; collective. Returns metrics."""
        ...

    def reference_samples(self, groups: Sequence[RolloutGroup]) -> list[TrainSample]:
        """`RolloutBatch.references`."""
        ...
