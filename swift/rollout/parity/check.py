"""The three stages of the check, a collective of all ranks.

Every rank makes the same forward passes, because a pass of a sharded policy is a collective: a rank without an engine
scores the samples of the first rank that has one. All ranks get the same verdict. The check restores parameters (bit
for bit), the mode of the model, random number generators and the version of the weights. At its end the engine has the
true weights, synced under the version of the run.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from swift.devices import own_device
from swift.errors import NumericError, SwiftError
from swift.models.autocast import autocast_dtype
from swift.models.forward import TokenSequence
from swift.models.quantisation import is_quantised, rounds_activations
from swift.models.sharded import exchanged
from swift.rollout.engines.base import Capabilities, InferenceEngine
from swift.rollout.engines.process import same_randomness
from swift.rollout.parity.noise import has_experts, make_noise, num_layers
from swift.rollout.parity.tolerance import Gaps, Limits, Sample, Verdict, contract_faults, limits_for, measure
from swift.rollout.seeds import sample_seed
from swift.rollout.weights.base import dtype_name
from swift.rollout.weights.sync import TRIAL_VERSION, WeightSync
from swift.types import Prompt, Request, SamplingParams

if TYPE_CHECKING:
    from swift.trainers.distributed import Collectives

PROMPTS, SAMPLES, TOKENS = 8, 2, 32
"""Size of a stage: number of prompts, of samples per prompt, and of tokens per sample."""
LONG_PROMPT = 160
"""Minimum length of the longest prompt, if the context allows: a prefix cache keeps blocks of up to 128 tokens."""
STOP_IDS = 64
"""Number of stop tokens of the samples that test the end of a completion."""
AS_LOADED, NOISY, RESTORED, NOW = "as loaded", "with noise", "restored", "now"
ORDER: tuple[Verdict, ...] = ("pass", "warn", "refuse")

Score = Callable[[Sequence[TokenSequence], float], Tensor]
"""Computes the trainer's log-probs [N] of all completion tokens at a temperature, without gradient."""


@dataclass(frozen=True, slots=True)
class Stage:
    """Result of one stage on the rank with the worst result. problem: reason why it did not pass, or ""."""

    name: str
    version: int
    gaps: Gaps
    verdict: Verdict
    problem: str = ""


def worst_of(stages: Sequence[Stage]) -> Stage:
    """The stage with the worst verdict; of equal ones, that with the largest gap."""
    return max(stages, key=lambda stage: (ORDER.index(stage.verdict), stage.gaps.maximum))


@dataclass(frozen=True, slots=True)
class ParityReport:
    """All stages of one check.

    dtypes: of trainer and engine. limits: the row of the table. note: a property that could not be checked, or "".
    """

    stages: tuple[Stage, ...]
    dtypes: tuple[str, str]
    engine: str
    limits: Limits
    note: str = ""

    @property
    def verdict(self) -> Verdict:
        return worst_of(self.stages).verdict

    def line(self) -> str:
        """The report in one line, for the log."""
        gaps = [stage.gaps for stage in self.stages]
        tokens, top = sum(gap.tokens for gap in gaps), max(gaps, key=lambda gap: gap.maximum)
        mean = sum(gap.mean * gap.tokens for gap in gaps) / max(tokens, 1)
        versions = ", ".join("trial" if stage.version == TRIAL_VERSION else str(stage.version) for stage in self.stages)
        return (
            f"parity: engine against trainer over {tokens} tokens ({', '.join(stage.name for stage in self.stages)}): "
            f"max |logp difference| {top.maximum:.1e}, mean {mean:.1e}, p99 {max(gap.p99 for gap in gaps):.1e}, "
            f"k3 {max(gap.k3 for gap in gaps):.1e}{top.place}; trainer {self.dtypes[0]}, {self.engine} "
            f"{self.dtypes[1]}; versions {versions}" + (f"; {self.note}" if self.note else "")
        )

    def error(self) -> str:
        """The error message in one line if a stage is refused; else ""."""
        stage = worst_of(self.stages)
        if stage.verdict != "refuse":
            return ""
        worst = stage.gaps.worst
        values = f": {worst.engine:.4g}, the trainer's {worst.trainer:.4g}" if worst else ""
        return (
            f"--parity_check: {stage.name}: {stage.problem}: engine and trainer disagree by more than rounding "
            f"explains ({self.limits.row}; trainer {self.dtypes[0]}, {self.engine} {self.dtypes[1]})"
            f"{stage.gaps.place}{values}; see docs/parity_check.md, or "
            "--parity_check warn to continue with wrong ratios"
        )

    def require(self) -> None:
        """Raises NumericError (exit 6) if a stage is refused."""
        if error := self.error():
            raise NumericError(error)


class ParityCheck:
    """Compares an engine with the trainer.

    Args:
        engine: this rank's engine, or None.
        score: computes the trainer's log-probs at a temperature, in one forward pass.
        model: the trainer's policy, with its wrappers.
        weight_sync: syncs weights to the engines; collective.
        prompts: the first prompts of the dataset.
        sampling: the training distribution; the check omits truncation, penalties and stop words, which change the
            engine's distribution.
        ranks: the collectives.
        end_token_ids: tokens that end every completion.
        adapter_only: whether only the LoRA adapter is synced.
        around: context of sampling, entered by every rank (needed for a sharded policy).
        seed: seed of samples and noise.
    """

    def __init__(
        self,
        engine: InferenceEngine | None,
        *,
        score: Score,
        model: nn.Module,
        weight_sync: WeightSync,
        prompts: Sequence[Prompt],
        sampling: SamplingParams,
        ranks: Collectives,
        end_token_ids: Collection[int] = (),
        adapter_only: bool = False,
        around: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext,
        seed: int = 0,
    ) -> None:
        self.engine, self.model, self.weight_sync, self.ranks = engine, model, weight_sync, ranks
        self.end_token_ids = frozenset(end_token_ids)
        self.adapter_only, self.around, self.seed = adapter_only, around, seed
        self.capabilities: Capabilities = self._from_engine(engine.capabilities if engine is not None else None)
        self._score = score
        self._temperature = 1.0 if self.capabilities.logprob_support == "raw" else sampling.temperature
        dtype = next(parameter.dtype for parameter in model.parameters() if parameter.dtype.is_floating_point)
        self.dtypes = dtype_name(autocast_dtype(model) or dtype), self.capabilities.dtype
        quantised = rounds_activations(model) or (adapter_only and is_quantised(model))
        self.limits = limits_for(
            *self.dtypes,
            own_device().type,
            quantised=quantised or bool(self.capabilities.quantization),
            experts=has_experts(model),
            layers=num_layers(model),
        )
        self._requests = self._make_requests(prompts, sampling)
        self._end_tokens_checked = True

    def run(self) -> ParityReport:
        """Run all stages; at the end the true weights are synced under the present version. Collective.

        Raises SyncFailed or EngineDead on every rank: sampling or a weight sync failed.
        """
        with same_randomness():
            version = int(self._from_engine(self.engine.version if self.engine is not None else None))
            stages = [self._compare(AS_LOADED, version, ends=True)]
            if stages[0].verdict == "refuse":
                return self._report(stages)
            noise = make_noise(self.model, seed=self.seed, adapter_only=self.adapter_only)
            if self.capabilities.shares_weights:  # the engine has the noise without a sync
                with exchanged(self.model, noise):
                    stages.append(self._compare(NOISY, version, requests=self._requests[::SAMPLES]))
                return self._report(stages)
            self.weight_sync.separate()  # an engine that shares memory would not have the noise
            with exchanged(self.model, noise):
                self.weight_sync.send_trial()
                stages.append(self._compare(NOISY, TRIAL_VERSION))
            self.weight_sync.refresh()
            if stages[1].verdict != "refuse":
                stages.append(self._compare(RESTORED, self.weight_sync.version))
            return self._report(stages)

    def now(self) -> ParityReport:
        """Compare engine and trainer without a change of weights, while no request is in flight. Collective.

        All checks use the same prompts, so that a cache with keys and values of older weights is found.
        """
        with same_randomness():
            return self._report([self._compare(NOW, self.weight_sync.version)])

    def _compare(
        self, name: str, version: int, *, ends: bool = False, requests: Sequence[Request] | None = None
    ) -> Stage:
        """Sample, score and compare; returns the result of the worst rank.

        ends: whether to also sample completions with the most frequent tokens of the others as stop tokens.
        """
        samples = self._sample(self._requests if requests is None else requests)
        if ends:
            counts = Counter(token for sample in samples for token in sample.completion.token_ids)
            stops = tuple(token for token, _ in counts.most_common(STOP_IDS))
            ending = []
            for request in (sample.request for sample in samples[::SAMPLES]):
                sampling = replace(request.sampling, stop_token_ids=stops, seed=request.sampling.seed ^ 1)
                ending.append(replace(request, request_id=f"{request.request_id}/end", sampling=sampling))
            samples += self._sample(ending)
            self._end_tokens_checked = any(sample.completion.finish_reason == "stop" for sample in samples)
        faults = contract_faults(
            samples, end_token_ids=self.end_token_ids, limit=self.capabilities.max_model_len, version=version
        )
        usable = [
            sample for sample in samples if 0 < len(sample.completion.token_ids) == len(sample.completion.logprobs)
        ]
        sequences = [TokenSequence(sample.request.prompt_ids, sample.completion.token_ids) for sample in usable]
        trainer_N = self._trainer_logprobs(sequences or [_FILLER])
        gaps = measure(usable, trainer_N, left_out=self.limits.left_out) if usable else Gaps()
        verdict, problem = self.limits.judge(gaps)
        if faults:
            verdict, problem = "refuse", f"contract: {faults}"
        return worst_of(self.ranks.all_gather(Stage(name, version, gaps, verdict, problem)))

    # --- sampling ---------------------------------------------------------------------------------------------

    def _sample(self, requests: Sequence[Request]) -> list[Sample]:
        """This rank's samples, or those of the first rank with an engine; in the order of the requests."""
        own, failure = None, None
        with self.around():
            if self.engine is not None:
                try:
                    done = {completion.request_id: completion for completion in self.engine.sample(requests)}
                    own = [
                        Sample(request, int(request.request_id.split("/")[0]), done[request.request_id])
                        for request in requests
                    ]
                except SwiftError as error:
                    failure = error
        of_ranks = self.ranks.all_gather((own, failure))
        first_failure = next((error for _, error in of_ranks if error is not None), None)
        if first_failure is not None:
            raise failure or first_failure
        return own if own is not None else next(samples for samples, _ in of_ranks if samples is not None)

    def _make_requests(self, prompts: Sequence[Prompt], sampling: SamplingParams) -> list[Request]:
        tokens = min(TOKENS, sampling.max_new_tokens, self.capabilities.max_model_len // 2)
        room = self.capabilities.max_model_len - tokens
        plain = SamplingParams(
            max_new_tokens=tokens, temperature=sampling.temperature, stop_token_ids=sampling.stop_token_ids
        )
        chosen = choose_prompts([list(prompt.token_ids) for prompt in prompts], room)
        return [
            Request(f"{p}/{s}", ids, replace(plain, seed=sample_seed(self.seed, f"parity:{p}", 0, s)))
            for p, ids in enumerate(chosen)
            for s in range(SAMPLES)
        ]

    # --- scoring ----------------------------------------------------------------------------------------------

    def _trainer_logprobs(self, sequences: Sequence[TokenSequence]) -> Tensor:
        """The trainer's log-probs [N] in evaluation mode, as float64 on the CPU."""
        was_training = self.model.training
        self.model.eval()
        try:
            with torch.no_grad():
                return self._score(sequences, self._temperature).detach().double().cpu()
        finally:
            self.model.train(was_training)

    def _from_engine(self, own: Any) -> Any:
        """This rank's value, or without an engine that of the first rank that has one; collective."""
        values = [value for value in self.ranks.all_gather(own) if value is not None]
        return values[0] if own is None else own

    def _report(self, stages: Sequence[Stage]) -> ParityReport:
        note = "" if self._end_tokens_checked else "no sample ended by itself, so end tokens are unchecked"
        return ParityReport(tuple(stages), self.dtypes, self.capabilities.name, self.limits, note)


_FILLER = TokenSequence([0], [0])
"""Scored by a rank without samples, so that all ranks make the same forward passes."""


def choose_prompts(prompts: Sequence[list[int]], room: int, count: int = PROMPTS) -> list[list[int]]:
    """Prompts of different lengths within `room` tokens, one of them long.

    Errors of padding need prompts of different lengths, those of a prefix cache a long one; a dataset may have neither.
    Prompts with images stay whole.
    """
    usable = [ids for ids in prompts if 0 < len(ids) <= room][:count] or [
        [token for token in ids if token >= 0][-room:] for ids in prompts[:count] if ids
    ]
    usable = [usable[i % len(usable)] for i in range(count)]
    if len({len(ids) for ids in usable}) == 1 and len(usable[0]) > 1:
        usable = [ids if min(ids) < 0 else ids[i % 2 * (len(ids) // 2) :] for i, ids in enumerate(usable)]
    if max(len(ids) for ids in usable) < LONG_PROMPT:
        joined = [token for ids in prompts for token in ids if token >= 0]
        joined = joined * (-(-LONG_PROMPT // len(joined)))
        usable[-1] = joined[: min(LONG_PROMPT, room)]
    return usable
