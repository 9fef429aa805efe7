"""The three stages, on all ranks together.

Every rank makes the same forward passes, because a pass of a sharded policy is a collective: a rank without an engine
of its own scores the samples of the first rank that has one. All ranks come to the same verdict. What the check touches
is as it was afterwards: parameters bit for bit, the mode of the model, random number generators, the version of the
weights. The engine is left with the true weights, synced under the version of the run.
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
from swift.models.forward import TokenSequence
from swift.models.quantisation import is_quantised, rounds_activations
from swift.models.sharded import exchanged
from swift.rollout.engines.base import Capabilities, InferenceEngine
from swift.rollout.engines.process import same_randomness
from swift.rollout.parity.noise import has_experts, make_noise
from swift.rollout.parity.tolerance import Gaps, Limits, Sample, Verdict, contract_faults, limits_for, measure
from swift.rollout.seeds import sample_seed
from swift.rollout.weights.base import dtype_name
from swift.rollout.weights.sync import REHEARSAL, WeightSync
from swift.types import Prompt, Request, SamplingParams

if TYPE_CHECKING:
    from swift.trainers.distributed import Collectives

PROMPTS, SAMPLES, TOKENS = 8, 2, 32
"""Size of a stage: prompts, samples of each, tokens of each sample."""
LONG_PROMPT = 160
"""Tokens of the longest prompt at least, where the context allows: a prefix cache keeps whole blocks of up to 128."""
STOP_IDS = 64
"""How many tokens count as end tokens in the samples that are there to end."""
AS_LOADED, NOISY, RESTORED, NOW = "as loaded", "with noise", "restored", "now"
ORDER: tuple[Verdict, ...] = ("pass", "warn", "refuse")

Score = Callable[[Sequence[TokenSequence], float], Tensor]
"""The trainer's log-probs [N] of all completion tokens at a temperature, without gradient."""


@dataclass(frozen=True, slots=True)
class Stage:
    """Outcome of one stage on the rank where it was worst. problem: why it did not pass, or ""."""

    name: str
    version: int
    gaps: Gaps
    verdict: Verdict
    problem: str = ""

    @property
    def badness(self) -> tuple[int, float]:
        """Orders stages: the worst is the largest."""
        return ORDER.index(self.verdict), self.gaps.maximum


@dataclass(frozen=True, slots=True)
class ParityReport:
    """All stages of one check.

    dtypes: of trainer and engine. limits: the row of the table. note: what could not be checked, or "".
    """

    stages: tuple[Stage, ...]
    dtypes: tuple[str, str]
    engine: str
    limits: Limits
    note: str = ""

    @property
    def verdict(self) -> Verdict:
        return self._worst.verdict

    @property
    def _worst(self) -> Stage:
        return max(self.stages, key=lambda stage: stage.badness)

    def line(self) -> str:
        gaps = [stage.gaps for stage in self.stages]
        tokens, top = sum(one.tokens for one in gaps), max(gaps, key=lambda one: one.maximum)
        mean = sum(one.mean * one.tokens for one in gaps) / max(tokens, 1)
        versions = ", ".join("rehearsal" if stage.version == REHEARSAL else str(stage.version) for stage in self.stages)
        return (
            f"parity: engine against trainer over {tokens} tokens ({', '.join(stage.name for stage in self.stages)}): "
            f"max |logp difference| {top.maximum:.1e}, mean {mean:.1e}, p99 {max(one.p99 for one in gaps):.1e}, "
            f"k3 {max(one.k3 for one in gaps):.1e}{top.place}; {self._types}; versions {versions}"
            + (f"; {self.note}" if self.note else "")
        )

    def error(self) -> str:
        """One line when a stage is refused; else ""."""
        stage = self._worst
        if stage.verdict != "refuse":
            return ""
        worst = stage.gaps.worst
        values = f": {worst.engine:.4g}, the trainer's {worst.trainer:.4g}" if worst else ""
        return (
            f"--parity_check: {stage.name}: {stage.problem}: engine and trainer disagree by more than rounding "
            f"explains ({self.limits.row}; {self._types}){stage.gaps.place}{values}; see docs/parity_check.md, or "
            "--parity_check warn to continue with wrong ratios"
        )

    @property
    def _types(self) -> str:
        return f"trainer {self.dtypes[0]}, {self.engine} {self.dtypes[1]}"

    def require(self) -> None:
        """Raises NumericError (exit 6) when a stage is refused."""
        if error := self.error():
            raise NumericError(error)


class ParityCheck:
    """Compares an engine with the trainer.

    Args:
        engine: this rank's engine, or None.
        score: the trainer's log-probs at a temperature; makes one forward pass.
        model: the policy as the trainer holds it, wrappers and all.
        weight_sync: sends weights to the engines, on all ranks together.
        prompts: the first of the data set.
        sampling: the training distribution; truncation, penalties and stop words are left out, as they change the
            engine's distribution on purpose.
        ranks: the collectives.
        end_token_ids: tokens that end every completion.
        adapter_only: only the LoRA adapter is synced.
        around: entered by every rank around sampling (a sharded policy needs it).
        seed: of samples and noise.
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
        self.capabilities: Capabilities = self._first(engine.capabilities if engine is not None else None)
        self._score = score
        self._temperature = 1.0 if self.capabilities.logprob_support == "raw" else sampling.temperature
        parameter = next(one for one in model.parameters() if one.dtype.is_floating_point)
        self.dtypes = dtype_name(parameter.dtype), self.capabilities.dtype
        other_base = rounds_activations(model) or (adapter_only and is_quantised(model))
        self.limits = limits_for(
            *self.dtypes,
            own_device().type,
            quantised=other_base or bool(self.capabilities.quantization),
            experts=has_experts(model),
        )
        self._requests = self._make_requests(prompts, sampling)
        self._ended = True

    def run(self) -> ParityReport:
        """All stages; ends with the true weights synced under the present version. Collective.

        Raises SyncFailed or EngineDead on every rank: the engine could not be sampled from, or did not take the
        weights.
        """
        with same_randomness():
            stages = [self._compare(AS_LOADED, self._version(), ends=True)]
            if stages[0].verdict == "refuse":
                return self._report(stages)
            noise = make_noise(self.model, seed=self.seed, adapter_only=self.adapter_only)
            if self.capabilities.shares_weights:  # it follows the noise without a sync
                with exchanged(self.model, noise):
                    stages.append(self._compare(NOISY, self._version(), requests=self._requests[::SAMPLES]))
                return self._report(stages)
            self.weight_sync.separate()  # the noise stands in for parameters that are put aside meanwhile
            with exchanged(self.model, noise):
                self.weight_sync.rehearse()
                stages.append(self._compare(NOISY, REHEARSAL))
            self.weight_sync.refresh()
            if stages[1].verdict != "refuse":
                stages.append(self._compare(RESTORED, self.weight_sync.version))
            return self._report(stages)

    def now(self) -> ParityReport:
        """The engine as it is against the trainer as it is, with nothing in flight. Collective.

        The prompts are those of every check, so a cache with keys and values of older weights shows.
        """
        with same_randomness():
            return self._report([self._compare(NOW, self.weight_sync.version)])

    def _compare(
        self, name: str, version: int, *, ends: bool = False, requests: Sequence[Request] | None = None
    ) -> Stage:
        """Sample, score and judge; the stage of the rank where it is worst."""
        samples = self._sample(self._requests if requests is None else requests)
        if ends:
            samples += self._sample(self._ending(samples))
            self._ended = any(one.completion.finish_reason == "stop" for one in samples)
        broken = contract_faults(
            samples, end_token_ids=self.end_token_ids, limit=self.capabilities.max_model_len, version=version
        )
        usable = [one for one in samples if 0 < len(one.completion.token_ids) == len(one.completion.logprobs)]
        trainer_N = self._scored([one.sequence for one in usable] or [_FILLER])
        gaps = measure(usable, trainer_N, left_out=self.limits.left_out) if usable else Gaps()
        verdict, problem = self.limits.judge(gaps)
        if broken:
            verdict, problem = "refuse", f"contract: {broken}"
        stages: list[Stage] = self.ranks.all_gather(Stage(name, version, gaps, verdict, problem))
        return max(stages, key=lambda stage: stage.badness)

    # --- sampling ---------------------------------------------------------------------------------------------

    def _sample(self, requests: Sequence[Request]) -> list[Sample]:
        """This rank's samples, or those of the first rank with an engine; in the order of the requests."""
        mine, failure = None, None
        with self.around():
            if self.engine is not None:
                try:
                    done = {one.request_id: one for one in self.engine.generate(requests)}
                    mine = [Sample(one, int(one.request_id.split("/")[0]), done[one.request_id]) for one in requests]
                except SwiftError as error:
                    failure = error
        offers = self.ranks.all_gather((mine, failure))
        problem = next((error for _, error in offers if error is not None), None)
        if problem is not None:
            raise failure or problem
        return mine if mine is not None else next(samples for samples, _ in offers if samples is not None)

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

    def _ending(self, samples: Sequence[Sample]) -> list[Request]:
        """One request per prompt that ends at any of the tokens that were common before."""
        counts = Counter(token for one in samples for token in one.completion.token_ids)
        stops = tuple(token for token, _ in counts.most_common(STOP_IDS))
        return [
            replace(
                one.request,
                request_id=f"{one.request.request_id}/end",
                sampling=replace(one.request.sampling, stop_token_ids=stops, seed=one.request.sampling.seed ^ 1),
            )
            for one in samples[::SAMPLES]
        ]

    # --- the trainer's side -----------------------------------------------------------------------------------

    def _scored(self, sequences: Sequence[TokenSequence]) -> Tensor:
        was_training = self.model.training
        self.model.eval()
        try:
            with torch.no_grad():
                return self._score(sequences, self._temperature).detach().double().cpu()
        finally:
            self.model.train(was_training)

    def _version(self) -> int:
        return int(self._first(self.engine.version if self.engine is not None else None))

    def _first(self, mine: Any) -> Any:
        """This rank's value, or that of the first rank that has one."""
        found = [one for one in self.ranks.all_gather(mine) if one is not None]
        return found[0] if mine is None else mine

    def _report(self, stages: Sequence[Stage]) -> ParityReport:
        note = "" if self._ended else "no sample ended by itself, so end tokens are unchecked"
        return ParityReport(tuple(stages), self.dtypes, self.capabilities.name, self.limits, note)


_FILLER = TokenSequence([0], [0])
"""What a rank scores when it got nothing, so that all ranks make the same forward passes."""


def choose_prompts(prompts: Sequence[list[int]], room: int, count: int = PROMPTS) -> list[list[int]]:
    """Prompts of different lengths that fit `room` tokens, one of them long.

    Padding shows only beside a longer prompt, and a prefix cache only keeps long ones; a data set may have neither.
    """
    usable = [ids for ids in prompts if 0 < len(ids) <= room][:count] or [ids[-room:] for ids in prompts[:count] if ids]
    usable = [usable[i % len(usable)] for i in range(count)]
    if len({len(ids) for ids in usable}) == 1 and len(usable[0]) > 1:
        usable = [ids[i % 2 * (len(ids) // 2) :] for i, ids in enumerate(usable)]
    if max(len(ids) for ids in usable) < LONG_PROMPT:
        joined = [token for ids in prompts for token in ids]
        joined = joined * (-(-LONG_PROMPT // len(joined)))
        usable[-1] = joined[: min(LONG_PROMPT, room)]
    return usable
