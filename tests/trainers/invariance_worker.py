"""Gradients of one frozen rollout, cut and laid out in many ways: `python invariance_worker.py <folder>`.

`measure` runs in the test's own process and, by `on_ranks`, in each of several. A run is a setting (what is computed)
and a layout (how): the number of micro-batches of a rank, packed with or without shared prompts, or padded.
"""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Collection
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from grpo_parts import make_trainer
from preloaded import run_ranks
from ranks import joined

from swift.models.attention.interface import enable_packed_attention
from swift.models.attention.sequence_parallel import SequenceGroup
from swift.models.forward import TokenSequence, pack
from swift.rl.losses import LossConfig, losses
from swift.rollout.samples import RolloutBatch, TrainSample
from swift.trainers.grpo import micro_batch as microbatch
from swift.trainers.grpo.entropy import EntropySettings
from swift.trainers.grpo.settings import CorrectionSettings
from swift.trainers.micro_batches import Limits

GROUPS, GENERATIONS = 6, 4
SAMPLES = GROUPS * GENERATIONS
LONGEST = 12
FILTERED = (2, 9, 17)
"""Samples without a trained token."""
FLAT = (1, 12, 13, 14, 15)
"""Samples with an advantage of 0: one, and a whole group."""
NOMINAL = 4
"""Completions of a nominal micro-batch."""
LIMITED = ("first update", "second iteration", "second global batch", "top entropy", "with KL")
"""Situations of dapo and bnpo that are cut by a limit of tokens too."""


@dataclass(frozen=True)
class Setting:
    """What is computed: the loss, fields of GRPOSettings, and which update on the rollout batch is looked at, the last.

    `start` is the first update that is made: 0 is that on a fresh rollout, a later one finds its old log-probs.
    Between two updates every weight moves.
    """

    loss: LossConfig
    fields: dict = field(default_factory=dict)
    num_global_batches: int = 1
    iterations: int = 1
    start: int = 0

    @property
    def moves(self) -> bool:
        """Whether the weights move before the update that is looked at."""
        return self.num_global_batches * self.iterations - self.start > 1

    @property
    def num_useful(self) -> int:
        """Samples of the (last) global batch that a forward pass has to see."""
        first = SAMPLES - SAMPLES // self.num_global_batches
        idle = [i for i in FILTERED if i >= first]
        entropy = self.fields.get("entropy", EntropySettings())
        if not self.loss.beta and not entropy.has_bonus and "teacher_kl_coef" not in self.fields:
            idle += [i for i in FLAT if i >= first]
        return SAMPLES - first - len(idle)


@dataclass(frozen=True)
class Layout:
    """How it is computed. `passes`: forward/backward passes of a rank; 0: as many as a limit of `tokens` makes."""

    passes: int
    kind: str = "shared"  # prompts; or "single": each completion with a prompt of its own; or "padded"
    tokens: int | None = None


def loss_of(name: str, **changes) -> LossConfig:
    high = {"cispo": 1.3, "gspo": 0.04, "luspo": 0.04}.get(name, 0.28)
    low = {"gspo": 0.03, "luspo": 0.03}.get(name, 0.2)
    return LossConfig(**{"loss_type": name, "epsilon": low, "epsilon_high": high, **changes})


def settings() -> dict[str, Setting]:
    """Every loss in four situations, and the options that look at the whole global batch."""
    made = {}
    later = {"iterations": 2, "start": 1}
    correction = {"correction": CorrectionSettings(mode="token_truncate", threshold=1.2), "off_policy_delta": 0.02}
    for name in losses:
        made[f"{name}, first update"] = Setting(loss_of(name))
        made[f"{name}, later update"] = Setting(loss_of(name), **later)
        made[f"{name}, with KL"] = Setting(loss_of(name, beta=0.05, kl_bias_correction=True), **later)
        made[f"{name}, corrected"] = Setting(loss_of(name), correction, **later)
    dapo = loss_of("dapo")
    for mode in ("sequence_truncate", "sequence_mask"):
        fields = {"correction": CorrectionSettings(mode=mode, threshold=1.05, lower=0.95)}
        made[f"dapo, {mode}"] = Setting(dapo, fields, **later)
    fields = {"correction": CorrectionSettings(mode="sequence_truncate", sequence_ratio="sum")}
    made["dapo, product of ratios"] = Setting(dapo, fields, **later)
    made["dapo, token_mask"] = Setting(
        dapo, {"correction": CorrectionSettings(mode="token_mask", threshold=1.2)}, **later
    )
    made["dapo, biased KL"] = Setting(loss_of("dapo", beta=0.05), **later)
    both = {"entropy": EntropySettings(quantile=0.4), "off_policy_delta": 0.02}
    made["dapo, both masks"] = Setting(dapo, both, **later)
    for level in ("sequence", "sequence_token"):
        made[f"dapo, {level}"] = Setting(loss_of("dapo", importance_sampling_level=level), **later)
    made["dapo, two-sided"] = Setting(loss_of("dapo", delta=1.4), **later)
    made["dapo, entropy bonus"] = Setting(dapo, {"entropy": EntropySettings(coefficient=0.01)}, **later)
    made["dapo, top entropy"] = Setting(dapo, {"entropy": EntropySettings(coefficient=0.01, quantile=0.4)}, **later)
    made["dapo, second iteration"] = Setting(dapo, iterations=2)
    made["dapo, with a teacher"] = Setting(dapo, {"teacher_kl_coef": 0.7}, iterations=2)
    made["dapo, second global batch"] = Setting(dapo, num_global_batches=2)
    return made


def rollout(trainer) -> RolloutBatch:
    """A frozen rollout batch: ragged completions, cut by tool calls, of several prompt lengths; a moved policy."""
    random = np.random.default_rng(7)
    samples = []
    for number in range(SAMPLES):
        group = number // GENERATIONS
        length = int(random.integers(1, LONGEST + 1)) if number else LONGEST
        trained = random.random(length) < 0.85
        trained[0] = True
        advantage = float(random.normal()) if number not in FLAT else 0.0
        samples.append(
            TrainSample(
                group=group,
                prompt_ids=np.full(3 + 2 * group, 40 + group, dtype=np.int32),
                token_ids=random.integers(0, 250, length).astype(np.int32),
                sampler_logprobs=np.zeros(length, dtype=np.float32),
                trained=trained & (number not in FILTERED),
                advantage=advantage,
            )
        )
    scores = trainer.logprobs.score([TokenSequence(one.prompt_ids.tolist(), one.token_ids.tolist()) for one in samples])
    ends = np.cumsum([one.token_ids.size for one in samples])[:-1]
    for sample, values in zip(samples, np.split(scores.float().numpy(), ends), strict=True):

        def near(scale, values=values):
            return (values + scale * random.normal(size=values.size)).astype(np.float32)

        sample.old_logprobs, sample.ref_logprobs = near(0.25), near(0.25)
        sample.sampler_logprobs = (sample.old_logprobs + 0.2 * random.normal(size=values.size)).astype(np.float32)
    random = np.random.default_rng(8)
    for sample in samples:
        gaps = random.normal(size=sample.token_ids.size)
        sample.teacher_logprobs = (sample.old_logprobs + gaps).astype(np.float32)
    return RolloutBatch(samples, num_global_batches=1, num_iterations=1)


class Bench:
    """A trainer whose settings and layout change from run to run.

    In float64 the normalisation layers are kept from computing in float32, as they do in every other precision.
    """

    def __init__(self, folder, output, dtype=torch.float32, *, sharing=1):
        group = SequenceGroup.of_this_rank(sharing)
        self.trainer = make_trainer(folder, output, max_completion_length=LONGEST, sequence_group=group)
        self.trainer.model.to(dtype)
        if dtype == torch.float64:
            for module in self.trainer.model.modules():
                if type(module).__name__.endswith("RMSNorm"):
                    module.forward = partial(_norm, module)
        self.trainer.create_optimizer()
        ranks = self.trainer.collectives
        self.model = self.trainer.accelerator.prepare_model(self.trainer.model) if ranks.active else self.trainer.model
        self.trainer.model_wrapped = self.model
        self.ranks = ranks.world_size // sharing
        self.passes = 0
        self.trainer.logprobs.on_progress = self._count
        self.trainer.planner.survived = 10**9  # no filler for passes of a new size

    def _count(self):
        self.passes += 1

    def gradient(
        self, batch: RolloutBatch, setting: Setting, layout: Layout, *, nominal: int = NOMINAL
    ) -> torch.Tensor:
        """All parameters' gradients as one float64 vector; `passes` is how many passes made it."""
        trainer, before = self.trainer, self.trainer.logprobs.settings
        share = -(-setting.num_useful // self.ranks)
        max_samples = math.ceil(share / layout.passes) if layout.passes else None
        trainer.logprobs.settings = replace(before, loss=setting.loss, per_device=nominal, **setting.fields)
        trainer.planner.limits, trainer.planner.per_device = Limits(max_samples, layout.tokens), nominal
        batch = deepcopy(batch)
        batch.num_global_batches, batch.num_iterations = setting.num_global_batches, setting.iterations
        if setting.start == 0:
            for sample in batch.samples:
                sample.old_logprobs = None
        weights = [parameter.detach().clone() for parameter in trainer.model.parameters()]
        with laid_out(trainer.model, layout.kind):
            for position in range(setting.start, batch.updates_per_rollout):
                if position > setting.start:
                    self._move(weights)
                batch.position = position
                self.model.zero_grad(set_to_none=True)
                self.passes = 0
                trainer.training_step(self.model, batch)
        self._set(weights)
        trainer.logprobs.settings = before
        return torch.cat([parameter.grad.flatten().double() for parameter in trainer.model.parameters()])

    def _move(self, weights):
        generator = torch.Generator().manual_seed(3)
        self._set([one + 0.02 * torch.randn(one.shape, generator=generator).to(one.dtype) for one in weights])

    @torch.no_grad()
    def _set(self, weights):
        for parameter, value in zip(self.trainer.model.parameters(), weights, strict=True):
            parameter.copy_(value)


def _norm(module, states):
    scale = torch.rsqrt(states.pow(2).mean(-1, keepdim=True) + module.variance_epsilon)
    return module.weight * (states * scale)


@contextlib.contextmanager
def laid_out(model, kind):
    """The trainer's own way of packing, with shared prompts and without."""
    if kind in ("shared", "single"):
        microbatch.pack = partial(pack, share_prompts=kind == "shared")
        try:
            yield
        finally:
            microbatch.pack = pack
    else:
        model.set_attn_implementation("sdpa")
        try:
            yield
        finally:
            enable_packed_attention(model)


def measure(bench: Bench, batch: RolloutBatch, layouts: list[Layout], names: Collection[str] | None = None) -> dict:
    """Gradient and passes of every setting (or of those with these names) and layout."""
    return {
        (name, layout.passes, layout.kind): (bench.gradient(batch, setting, layout), bench.passes)
        for name, setting in settings().items()
        if names is None or name in names
        for layout in layouts
        if layout.passes or limited(name)
    }


def limited(name: str) -> bool:
    """Whether a setting is cut by a limit of tokens too."""
    loss, situation = name.split(", ")
    return loss in ("dapo", "bnpo") and situation in LIMITED


def on_ranks(
    folder: Path,
    model: str,
    batch: RolloutBatch,
    layouts: list[Layout],
    names: Collection[str] | None = None,
    *,
    count: int = 2,
    sharing: int = 1,
) -> dict:
    """`measure` in `count` processes, of which so many share micro-batches; all have the same gradient."""
    folder.mkdir()
    torch.save((model, sharing, batch, layouts, names), folder / "task")
    run_ranks([__file__, folder], folder, count=count)
    return torch.load(folder / "found")


def main(folder: str) -> None:
    """One of the ranks; rank 0 writes what came out."""
    place = Path(folder)
    with joined():
        model, sharing, *task = torch.load(place / "task", weights_only=False)
        bench = Bench(model, place / f"rank-{dist.get_rank()}", sharing=sharing)
        found = measure(bench, *task)
        sums = {key: float(gradient.sum()) for key, (gradient, _) in found.items()}
        assert bench.trainer.collectives.all_gather(sums) == [sums] * dist.get_world_size()
        if dist.get_rank() == 0:
            torch.save(found, place / "found")


if __name__ == "__main__":
    main(*sys.argv[1:])
