"""Check that the log-probs an environment reports belong to its tokens, by scoring some of them with the trainer.

The trainer scores a few samples of every rollout batch that the current weights have sampled. Rounding explains small
differences. Differences of nats mean log-probs of other tokens, of another temperature, or of other weights.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from swift.errors import NumericError
from swift.models.forward import TokenSequence
from swift.rollout.samples import RolloutBatch, TrainSample
from swift.trainers.grpo.micro_batch import split_by_sample

logger = logging.getLogger("swift.rollout")

SAMPLES = 4
"""Number of samples of a batch that are scored."""
USUAL, WRONG, LARGE = 0.1, 1.0, 2.0
"""In nats: mean difference up to which rounding explains it, mean that ends the run if it occurs in two batches in a
row, and difference of one token from which on a warning shows it."""
BETTER, FLOOR = 5.0, 0.01
"""Factor by which another explanation has to fit better, and mean difference in nats above which that is tested."""


def sampled_all(sample: TrainSample, is_current: Callable[[int], bool]) -> bool:
    """Whether current versions of the weights are known to have sampled all of a sample's trained tokens."""
    known = sum(end - start for version, start, end in sample.versions if is_current(version))
    return sample.num_trained <= known == sum(end - start for _, start, end in sample.versions)


@dataclass(slots=True)
class AlignmentCheck:
    """Compares sampler and trainer on samples of the current weights.

    score: returns the trainer's log-probs of all completion tokens of sequences, at a temperature; the same passes on
    every rank. temperature: of the loss. is_fresh: whether the current weights have sampled a sample. add: adds a
    metric.
    """

    score: Callable[[Sequence[TokenSequence], float], Tensor]
    temperature: float
    is_fresh: Callable[[TrainSample], bool]
    add: Callable[[str, float], None]
    _wrong: int = 0
    _warned: set[str] = field(default_factory=set)

    def check(self, batch: RolloutBatch) -> None:
        """Check a batch before its first update; collective if the model is sharded.

        Raises NumericError: log-probs are shifted, untempered, or wrong in two batches in a row.
        """
        chosen = [sample for sample in batch.samples if _comparable(sample) and self.is_fresh(sample)][:SAMPLES]
        if not chosen:
            return
        trainer = self._scores(chosen, self.temperature)
        gaps = np.concatenate([(t - s.sampler_logprobs)[s.trained] for t, s in zip(trainer, chosen, strict=True)])
        mean = float(np.abs(gaps).mean())
        self.add("alignment/diff_mean", float(gaps.mean()))
        self.add("alignment/diff_abs_mean", mean)
        self.add("alignment/diff_max", float(np.abs(gaps).max()))
        if mean > FLOOR:
            self._explain(mean, trainer, chosen)
        self._wrong = self._wrong + 1 if mean > WRONG else 0
        if self._wrong >= 2:
            raise NumericError(
                f"alignment: sampler and trainer disagree by {mean:.2g} nats a token, twice in a row: weights do not "
                "reach the server that environments sample with, or their inference_logprobs are not its"
            )
        if mean > USUAL:
            self._warn_once("mean", f"sampler and trainer disagree by {mean:.2g} nats a token at the same weights")
        if np.abs(gaps).max() >= LARGE:
            self._warn_once("token", _worst(trainer, chosen))

    def _scores(self, chosen: Sequence[TrainSample], temperature: float) -> list[np.ndarray]:
        sequences = [TokenSequence(sample.prompt_ids.tolist(), sample.token_ids.tolist()) for sample in chosen]
        return split_by_sample(self.score(sequences, temperature), chosen)

    def _explain(self, mean: float, trainer: Sequence[np.ndarray], chosen: Sequence[TrainSample]) -> None:
        """Raises NumericError if shifted or untempered log-probs fit much better."""
        for shift in (-1, 1):
            if mean > BETTER * _shifted(trainer, chosen, shift):
                raise NumericError(
                    f"alignment: log-probs are shifted by one: those of token t are at t{shift:+d}; correct the "
                    "environment's inference_logprobs"
                )
        if self.temperature != 1.0:
            raw = self._scores(chosen, 1.0)
            gaps = [np.abs(t - s.sampler_logprobs)[s.trained] for t, s in zip(raw, chosen, strict=True)]
            if mean > BETTER * float(np.concatenate(gaps).mean()):
                raise NumericError(
                    "alignment: the server returns untempered log-probs: they fit temperature 1, not --temperature "
                    f"{self.temperature:g}; let it return those of the distribution it samples from"
                )

    def _warn_once(self, kind: str, text: str) -> None:
        if kind not in self._warned:
            self._warned.add(kind)
            logger.warning("warning: alignment: %s", text)


def _comparable(sample: TrainSample) -> bool:
    return bool(sample.num_trained) and bool(np.isfinite(sample.sampler_logprobs[sample.trained]).all())


def _shifted(trainer: Sequence[np.ndarray], chosen: Sequence[TrainSample], shift: int) -> float:
    """Mean difference to the sampler's log-probs `shift` tokens later; infinite without pairs."""
    gaps = []
    for values, sample in zip(trainer, chosen, strict=True):
        both = sample.trained & np.roll(sample.trained, -shift)
        both[-1 if shift > 0 else 0] = False
        gaps.append(np.abs(values - np.roll(sample.sampler_logprobs, -shift))[both])
    joined = np.concatenate(gaps)
    return float(joined.mean()) if joined.size else float("inf")


def _worst(trainer: Sequence[np.ndarray], chosen: Sequence[TrainSample]) -> str:
    """The token with the largest difference, in words."""
    gap, place, number = max(
        (float(gap), place, number)
        for number, (values, sample) in enumerate(zip(trainer, chosen, strict=True))
        for place, gap in enumerate(np.where(sample.trained, np.abs(values - sample.sampler_logprobs), 0.0))
    )
    sample = chosen[number]
    return (
        f"token {place} (id {sample.token_ids[place]}) has log-prob {sample.sampler_logprobs[place]:.2f} in the sampler"
        f" and {trainer[number][place]:.2f} in the trainer, {gap:.1f} nats apart"
    )
