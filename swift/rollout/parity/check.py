"""The three stages, on all ranks together.

Every rank makes the same forward passes, because a pass of a policy that is spread over ranks is a collective: a rank
without an engine of its own scores the samples of the first rank that has one. All ranks come to the same verdict.
What the check touches is as it was afterwards: parameters bit for bit, the mode of the model, random number generators,
the version of the weights. The engine is left with the true weights, published under the version of the run.
"""

from __future__ import annotations

import contextlib
import random
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from swift.errors import NumericError, SwiftError
from swift.models.forward import TokenSequence
from swift.rollout.engines.base import Ack, Capabilities, InferenceEngine
from swift.rollout.parity import causes
from swift.rollout.parity.gaps import NOTHING, Drawn, Gaps, comparable, faults, measure
from swift.rollout.parity.noise import Noise, make_noise
from swift.rollout.parity.tolerance import Limits, Verdict, limits_for
from swift.rollout.seeds import sample_seed
from swift.rollout.weight_sync.base import dtype_name
from swift.rollout.weight_sync.publisher import REHEARSAL
from swift.types import Prompt, Request, SamplingParams

PROMPTS, SAMPLES, TOKENS = 8, 2, 32
"""Size of a stage: prompts, samples of each, tokens of each sample."""

LONG_PROMPT = 160
"""Tokens of the longest prompt at least, where the context allows: a prefix cache keeps whole blocks of up to 128."""

STOP_IDS = 64
"""How many tokens count as end tokens in the samples that are there to end."""

AS_LOADED, NOISY, RESTORED, NOW = "as loaded", "with noise", "restored", "now"

Score = Callable[[Sequence[TokenSequence]], Tensor]
"""The trainer's log-probs [N] of all completion tokens, without gradient."""


class Ranks(Protocol):
    """The collective that the check needs; see `swift.trainers.distributed`."""

    def all_gather(self, value: Any) -> list[Any]:
        """Values of all ranks, everywhere."""
        ...


class Publisher(Protocol):
    """How weights get to the engine; see `WeightPublisher`."""

    version: int

    def rehearse(self) -> Ack | None:
        """Send the weights of now under a number that is no version."""
        ...

    def refresh(self) -> Ack | None:
        """Send the weights of now under the present version."""
        ...

    def separate(self) -> None:
        """Give engine and trainer memory of their own, until the next publication."""
        ...


@dataclass(frozen=True, slots=True)
class Stage:
    """Outcome of one stage on the rank where it was worst.

    problem: why it is refused or warned about, "" when it passed. cause: the probable one of a refusal.
    """

    name: str
    version: int
    gaps: Gaps
    verdict: Verdict
    problem: str = ""
    cause: str = ""


@dataclass(frozen=True, slots=True)
class ParityReport:
    """All stages of one check.

    dtypes: of trainer and engine. limits: the row of the table. notes: what could not be checked.
    """

    stages: tuple[Stage, ...]
    dtypes: tuple[str, str]
    engine: str
    limits: Limits
    notes: tuple[str, ...] = ()

    @property
    def verdict(self) -> Verdict:
        """The worst of all stages."""
        return self._worst.verdict

    @property
    def _worst(self) -> Stage:
        return max(self.stages, key=lambda stage: (_ORDER[stage.verdict], stage.gaps.maximum))

    def line(self) -> str:
        """One readable line."""
        tokens = sum(stage.gaps.tokens for stage in self.stages)
        names = ", ".join(stage.name for stage in self.stages)
        top = max((stage.gaps for stage in self.stages), key=lambda gaps: gaps.maximum)
        mean = sum(stage.gaps.mean * stage.gaps.tokens for stage in self.stages) / max(tokens, 1)
        worst = top.worst
        where = f"; worst at prompt {worst.prompt}, token {worst.position} (id {worst.token_id})" if worst else ""
        versions = ", ".join("rehearsal" if stage.version == REHEARSAL else str(stage.version) for stage in self.stages)
        notes = "".join(f"; {note}" for note in self.notes)
        return (
            f"parity: sampler against trainer over {tokens} tokens ({names}): max |logp difference| {top.maximum:.1e}, "
            f"mean {mean:.1e}, p99 {max(stage.gaps.p99 for stage in self.stages):.1e}, "
            f"k3 {max(stage.gaps.k3 for stage in self.stages):.1e}{where}; trainer {self.dtypes[0]}, "
            f"{self.engine} {self.dtypes[1]}; versions {versions}{notes}"
        )

    def warning(self) -> str:
        """One line when a stage is neither fine nor refused; else ""."""
        stage = self._worst
        return f"parity: {stage.name}: {stage.problem} ({self.limits.row})" if stage.verdict == "warn" else ""

    def error(self) -> str:
        """One line when a stage is refused; else ""."""
        stage = self._worst
        if stage.verdict != "refuse":
            return ""
        worst = stage.gaps.worst
        where = (
            f", at worst {worst.sampler:.4g} against {worst.trainer:.4g} for token {worst.position} (id "
            f"{worst.token_id}) of prompt {worst.prompt}"
            if worst is not None
            else ""
        )
        return (
            f"--parity_check: {stage.name}: {stage.problem}: sampler and trainer disagree by more than "
            f"rounding explains ({self.limits.row}){where}; probable cause: {stage.cause}; see docs/parity_check.md, "
            "or --parity_check warn to go on with wrong ratios"
        )

    def require(self) -> None:
        """Raises NumericError (exit 6) when a stage is refused."""
        if error := self.error():
            raise NumericError(error)


_ORDER: dict[Verdict, int] = {"pass": 0, "warn": 1, "refuse": 2}


@dataclass(frozen=True, slots=True)
class _Compared:
    """A stage that all ranks agree on, with this rank's samples and the trainer's log-probs [N] of them."""

    stage: Stage
    drawn: list[Drawn]
    trainer_N: Tensor


class ParityCheck:
    """Compares an engine with the trainer.

    Args:
        engine: this rank's engine, or None.
        score: the trainer's log-probs at the sampling temperature; makes one forward pass.
        model: the policy as the trainer holds it, wrappers and all.
        publisher: sends weights to the engines, on all ranks together.
        prompts: the first of the data set.
        sampling: the training distribution; truncation, penalties and stop words are left out, as they change the
            sampler's distribution on purpose.
        ranks: the collectives.
        end_token_ids: tokens that end every completion.
        unscaled: like `score` at temperature 1; needed for engines that return raw log-probs unless sampling is at 1,
            and to recognise a temperature that was not applied.
        adapter_only: only the LoRA adapter is published.
        quantised: the trainer's weights are quantised.
        around: entered by every rank around sampling (a policy spread over ranks needs it).
        seed: of samples and noise.
    """

    def __init__(
        self,
        engine: InferenceEngine | None,
        *,
        score: Score,
        model: nn.Module,
        publisher: Publisher,
        prompts: Sequence[Prompt],
        sampling: SamplingParams,
        ranks: Ranks,
        end_token_ids: Collection[int] = (),
        unscaled: Score | None = None,
        adapter_only: bool = False,
        quantised: bool = False,
        around: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext,
        seed: int = 0,
    ) -> None:
        self.engine, self.model, self.publisher, self.ranks = engine, model, publisher, ranks
        self.end_token_ids = frozenset(end_token_ids)
        self.adapter_only, self.around, self.seed = adapter_only, around, seed
        self.capabilities = self._first_capabilities()
        self._score = score
        self._unscaled = unscaled if sampling.temperature != 1.0 else None
        parameter = next(one for one in model.parameters() if one.dtype.is_floating_point)
        self.dtypes = dtype_name(parameter.dtype), self.capabilities.dtype
        quantised = quantised or bool(self.capabilities.extra.get("quantization"))
        self.limits = limits_for(*self.dtypes, parameter.device.type, quantised=quantised)
        self._requests = self._make_requests(prompts, sampling)
        self.notes: list[str] = []
        if self.capabilities.logprob_support == "raw" and sampling.temperature != 1.0:
            if unscaled is None:
                raise ValueError("an engine with raw log-probs can only be compared with unscaled ones")
            self._score, self._unscaled = unscaled, None

    # --- the two ways to use it -------------------------------------------------------------------------------

    def run(self) -> ParityReport:
        """All stages; ends with the true weights published under the present version. Collective.

        Raises:
            SyncFailed, EngineDead: the engine could not be sampled from, or did not take the weights; on every rank.
        """
        with self._undisturbed():
            self.notes = []
            first = self._compare(AS_LOADED, self._version(), ends=True)
            if first.stage.verdict == "refuse":
                return self._report([self._explained(first, lambda: self._why_as_loaded(first))])
            noise = make_noise(self.model, seed=self.seed, adapter_only=self.adapter_only)
            if self.capabilities.shares_weights:
                return self._report([first.stage, self._shared(noise)])
            second = self._published_noise(noise)
            self.publisher.refresh()
            if second.verdict == "refuse":
                return self._report([first.stage, second])
            return self._report([first.stage, second, self._restored(noise)])

    def now(self) -> ParityReport:
        """The engine as it is against the trainer as it is, on the same prompts as ever. Collective.

        The prompts are those of every check, so what an engine remembers of them from older weights shows. To be
        called when the engine has the trainer's present weights, and nothing else is in flight.
        """
        with self._undisturbed():
            self.notes = []
            return self._report([self._explained(self._compare(NOW, self.publisher.version), causes.later)])

    # --- stages -----------------------------------------------------------------------------------------------

    def _published_noise(self, noise: Noise) -> Stage:
        self.publisher.separate()  # the noise stands in for parameters that are put aside meanwhile
        with noise.applied():
            self.publisher.rehearse()
            compared = self._compare(NOISY, REHEARSAL)
            remembers = compared.stage.verdict == "refuse" and self._remembers(REHEARSAL)
        if compared.stage.verdict != "refuse":
            self._look_for_blind_spots(compared.drawn, noise)
        return self._why_with_noise(compared, noise, remembers=remembers)

    def _shared(self, noise: Noise) -> Stage:
        """An engine that reads the trainer's own parameters follows the noise without a publication."""
        with noise.applied():
            compared = self._compare(NOISY, self._version(), requests=self._requests[::SAMPLES])
        return self._why_with_noise(compared, noise)

    def _why_with_noise(self, compared: _Compared, noise: Noise, *, remembers: bool = False) -> Stage:
        if remembers:
            return self._explained(compared, lambda: causes.CACHES)
        rescore = self._rescore(compared.drawn)
        return self._explained(compared, lambda: causes.with_noise(compared.drawn, self.limits, noise, rescore))

    def _restored(self, noise: Noise) -> Stage:
        compared = self._compare(RESTORED, self.publisher.version)
        if compared.stage.verdict == "refuse" and self._remembers(self.publisher.version):
            return self._explained(compared, lambda: causes.CACHES)
        rescore = self._rescore(compared.drawn)
        return self._explained(compared, lambda: causes.restored(compared.drawn, self.limits, noise, rescore))

    def _remembers(self, version: int) -> bool:
        """Whether prompts that the engine has never seen are right where the others are wrong."""
        fresh = [replace(one, prompt_ids=[*one.prompt_ids[-1:], *one.prompt_ids[:-1]]) for one in self._requests]
        return self._compare("", version, requests=fresh).stage.verdict != "refuse"

    def _compare(
        self, name: str, version: int, *, ends: bool = False, requests: Sequence[Request] | None = None
    ) -> _Compared:
        """Draw, score and judge; the stage of the rank where it is worst, and this rank's samples."""
        drawn = self._draw(self._requests if requests is None else requests)
        if ends:
            drawn += self._draw(self._ending(drawn))
            if not any(one.completion.finish_reason == "stop" for one in drawn):
                self.notes.append("no sample ended by itself, so end tokens are unchecked")
        broken = faults(drawn, end_token_ids=self.end_token_ids, limit=self.capabilities.max_model_len, version=version)
        usable = comparable(drawn)
        trainer_N = self._scored(self._score, [one.sequence for one in usable] or [_FILLER])
        gaps = measure(usable, trainer_N) if usable else NOTHING
        verdict = "refuse" if broken else self.limits.judge(gaps)
        problem = "; ".join(broken) or self.limits.exceeded(gaps)
        stage = Stage(name, version, gaps, verdict, problem, "the engine breaks its contract" if broken else "")
        return _Compared(self._agreed(stage), usable, trainer_N)

    def _explained(self, compared: _Compared, why: Callable[[], str]) -> Stage:
        """With the probable cause of a refusal; every rank looks for it, the worst one's counts."""
        stage = compared.stage
        if stage.verdict != "refuse" or stage.cause:
            return stage
        mine = replace(stage, cause=why())
        own = self.limits.judge(measure(compared.drawn, compared.trainer_N)) == "refuse"
        causes_found = self.ranks.all_gather((own, mine.cause))
        return replace(stage, cause=next((text for is_own, text in causes_found if is_own), mine.cause))

    def _agreed(self, stage: Stage) -> Stage:
        """The worst of all ranks' stages."""
        stages = self.ranks.all_gather(stage)
        return max(stages, key=lambda one: (_ORDER[one.verdict], bool(one.cause), one.gaps.maximum))

    def _why_as_loaded(self, compared: _Compared) -> str:
        unscaled = self._unscaled
        return causes.as_loaded(
            compared.drawn,
            compared.trainer_N,
            self.limits,
            declared=self.capabilities.dtype,
            unscaled=None if unscaled is None else self._rescore(compared.drawn, unscaled),
        )

    def _look_for_blind_spots(self, drawn: Sequence[Drawn], noise: Noise) -> None:
        """Note the tensors whose noise moves log-probs so little that rounding could hide their absence."""
        if self.limits.refuse_mean is None:
            return  # float32: nothing of this size is hidden
        few = drawn[:SAMPLES]
        sequences = [one.sequence for one in few]
        with noise.applied():
            all_N = self._scored(self._score, sequences)
        for name, kind in noise.kinds.items():
            if kind == "LoRA B":
                continue
            with noise.applied(without=[name]):
                effect = float((self._scored(self._score, sequences) - all_N).abs().mean())
            if effect <= self.limits.refuse_mean:
                self.notes.append(f"{name} moves log-probs by {effect:.1e} only, so its loss could go unseen")

    # --- sampling ---------------------------------------------------------------------------------------------

    def _draw(self, requests: Sequence[Request]) -> list[Drawn]:
        """This rank's samples, or those of the first rank with an engine; in the order of the requests."""
        mine, failure = None, None
        with self.around():
            if self.engine is not None:
                try:
                    done = {one.request_id: one for one in self.engine.generate(requests)}
                    mine = [Drawn(request, _prompt_of(request), done[request.request_id]) for request in requests]
                except SwiftError as error:
                    failure = error
        offers = self.ranks.all_gather((mine, failure))
        problem = next((error for _, error in offers if error is not None), None)
        if problem is not None:
            raise failure or problem
        return mine if mine is not None else next(drawn for drawn, _ in offers if drawn is not None)

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

    def _ending(self, drawn: Sequence[Drawn]) -> list[Request]:
        """One request per prompt that ends at any of the tokens that were common before."""
        counts = Counter(token for one in drawn for token in one.completion.token_ids)
        stops = tuple(token for token, _ in counts.most_common(STOP_IDS))
        return [
            replace(
                one.request,
                request_id=f"{one.request.request_id}/end",
                sampling=replace(one.request.sampling, stop_token_ids=stops, seed=one.request.sampling.seed ^ 1),
            )
            for one in drawn[::SAMPLES]
        ]

    # --- the trainer's side -----------------------------------------------------------------------------------

    def _rescore(self, drawn: Sequence[Drawn], score: Score | None = None) -> Callable[[], Tensor]:
        sequences = [one.sequence for one in drawn]
        return lambda: self._scored(score or self._score, sequences)

    def _scored(self, score: Score, sequences: Sequence[TokenSequence]) -> Tensor:
        was_training = self.model.training
        self.model.eval()
        try:
            with torch.no_grad():
                return score(sequences).detach().double().cpu()
        finally:
            self.model.train(was_training)

    def _version(self) -> int:
        """What the engines say they sample with."""
        mine = self.engine.version if self.engine is not None else None
        return int(next(one for one in self.ranks.all_gather(mine) if one is not None))

    def _first_capabilities(self) -> Capabilities:
        mine = self.engine.capabilities if self.engine is not None else None
        found = [one for one in self.ranks.all_gather(mine) if one is not None]
        return mine or found[0]

    def _report(self, stages: Sequence[Stage]) -> ParityReport:
        return ParityReport(tuple(stages), self.dtypes, self.capabilities.name, self.limits, tuple(self.notes))

    @contextlib.contextmanager
    def _undisturbed(self) -> Iterator[None]:
        """Random number generators are as before after the block: a run with and without the check is the same."""
        import numpy as np

        python, arrays = random.getstate(), np.random.get_state()
        own = {one.device.index or 0 for one in self.model.parameters() if one.device.type == "cuda"}
        with torch.random.fork_rng(devices=sorted(own)):
            try:
                yield
            finally:
                random.setstate(python)
                np.random.set_state(arrays)


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


def _prompt_of(request: Request) -> int:
    return int(request.request_id.partition("/")[0])
