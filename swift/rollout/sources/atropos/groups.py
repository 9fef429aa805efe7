"""Conversion of groups of the message API to completions, and exclusion of invalid sequences.

    tokens   p0 p1 a0 a1 e0 b0      one sequence: prompt, answer, environment, next answer
    masks   -100 .. a0 a1 -100 b0   the token itself where it is trained on
             prompt | a0 a1 e0 b0   prompt_ids, token_ids; the completion begins with the first trained token

The API does not check groups. An invalid sequence is excluded, with a reason; a group whose lists do not match is
excluded as a whole.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from statistics import fmean
from typing import Any

from swift.errors import ConfigError
from swift.rollout.engines.wire import Versions
from swift.rollout.sources.atropos.api import Group
from swift.types import Completion, Episode

NOT_TRAINED = -100
ROUNDING = 1e-4
"""Maximum of a positive log-prob that counts as a rounded 0."""


class _Excluded(Exception):
    """The sequence is excluded from training; the text is a short reason."""


@dataclass(slots=True)
class GroupReader:
    """Converts groups to completions.

    Attributes:
        group_size: sequences of a group, `--num_generations`.
        vocab_size: exclusive upper bound of token ids.
        max_token_len: exclusive upper bound of the length of a sequence.
        temperature: temperature of the loss; sequences with another one are excluded.
        require_logprobs: whether sequences without sampler log-probs are excluded.
        use_advantages: whether the environment's advantages replace those computed from scores.
        end_token_ids: end tokens; a completion without one at its end is truncated.
        decode: converts token ids to text.
        rows: number of sequences so far. leaked: number of those with log-probs above 0.
    """

    group_size: int
    vocab_size: int
    max_token_len: int
    temperature: float
    require_logprobs: bool
    use_advantages: bool
    end_token_ids: frozenset[int]
    decode: Callable[[Sequence[int]], str]
    rows: int = 0
    leaked: int = 0
    _accepted: bool = field(default=False, init=False)

    def completions(self, group: Group, request_ids: Sequence[str], versions: Versions) -> list[Completion]:
        """A completion per request; those of excluded sequences have the reason.

        Raises ConfigError: size or temperature of the first group differ from the settings.
        """
        problem = self._problem(group)
        if not self._accepted:
            self._accept(group)
        completions = []
        for index, name in enumerate(request_ids):
            try:
                if problem:
                    raise _Excluded(problem)
                completions.append(self._completion(group, index, name, versions))
            except _Excluded as reason:
                episode = Episode([], 0, 0, problem=str(reason))
                completions.append(Completion(name, [], [], "stop", episode=episode))
        return completions

    def _accept(self, group: Group) -> None:
        """Raises ConfigError before training if size or temperature of a group differ from the settings."""
        count = len(group.tokens)
        if count != self.group_size:
            raise ConfigError(
                f"--num_generations: {self.group_size}: environment {group.env_id} sends groups of {count} sequences; "
                f"--num_generations {count}, or its group_size {self.group_size}"
            )
        found = {value for index in range(count) if math.isfinite(value := self._temperature(group, index))}
        if found and self.temperature not in found:
            raise ConfigError(
                f"--temperature: {self.temperature:g}: environment {group.env_id} samples at "
                f"{', '.join(f'{value:g}' for value in sorted(found))}; --temperature {min(found):g}"
            )
        self._accepted = True

    def _problem(self, group: Group) -> str:
        """Reason why the whole group is excluded, or ""."""
        count = len(group.tokens)
        if count != self.group_size:
            return "group size"
        parallel = (
            group.masks, group.scores, group.inference_logprobs, group.ref_logprobs, group.advantages, group.overrides,
        )  # fmt: skip
        wrong = not group.masks or not group.scores or any(rows and len(rows) != count for rows in parallel)
        return "misaligned" if wrong else ""

    def _completion(self, group: Group, index: int, name: str, versions: Versions) -> Completion:
        tokens, score = group.tokens[index], group.scores[index]
        trained = self._trained(tokens, group.masks[index])
        if not math.isfinite(score):
            raise _Excluded("score")
        if self._temperature(group, index) != self.temperature:
            raise _Excluded("temperature")
        start, end = trained.index(True), len(tokens) - trained[::-1].index(True)
        mask, ids = [int(is_trained) for is_trained in trained[start:end]], tokens[start:end]

        def row_of(rows: list[list[float]] | None) -> list[float] | None:
            """The row of this sequence, over the completion."""
            if not rows:
                return None
            if len(rows[index]) != len(tokens):
                raise _Excluded("misaligned")
            return rows[index][start:end]

        logprobs, references = row_of(group.inference_logprobs), row_of(group.ref_logprobs)
        self._check_logprobs(logprobs, mask)
        sampler_logprobs = logprobs or [math.nan] * len(ids)
        turns = list(_turns(mask))
        advantage, by_token = self._advantage(group, index, row_of(group.advantages), mask)
        messages = [pair for first, last in turns for pair in self._messages(tokens, start, first, last, mask)]
        return Completion(
            request_id=name,
            token_ids=ids,
            logprobs=[min(value, 0.0) if bit else 0.0 for value, bit in zip(sampler_logprobs, mask, strict=True)],
            finish_reason="stop" if ids[-1] in self.end_token_ids else "length",
            text=self.decode(ids[turns[-1][0] : turns[-1][1]]),
            versions=_versions(tokens, start, turns, logprobs or [], versions),
            columns={"env_id": group.env_id},
            mask=mask if 0 in mask else [],
            episode=Episode(
                [{"role": "prompt", "content": self.decode(tokens[:start])}, *messages],
                start=1,
                num_turns=len(turns),
                prompt_ids=tokens[:start],
                rewards=[score],
                logprobs_known=logprobs is not None,
                ref_logprobs=references if references and _finite(references, mask) else [],
                advantage=advantage,
                advantages=by_token,
            ),
        )

    def _trained(self, tokens: list[int], mask: list[int]) -> list[bool]:
        """Whether each token is trained on; the first one has no log-prob, so it is not."""
        if len(tokens) != len(mask):
            raise _Excluded("misaligned")
        if len(tokens) >= self.max_token_len:
            raise _Excluded("too long")
        if any(not 0 <= token < self.vocab_size for token in tokens):
            raise _Excluded("vocabulary")
        if any(entry not in (NOT_TRAINED, token) for entry, token in zip(mask, tokens, strict=True)):
            raise _Excluded("mask")
        trained = [False, *(entry != NOT_TRAINED for entry in mask[1:])]
        if not any(trained):
            raise _Excluded("empty")
        return trained

    def _check_logprobs(self, logprobs: list[float] | None, mask: list[int]) -> None:
        """Raises _Excluded for invalid log-probs; 1.0 marks masked tokens, and at trained ones a shifted row."""
        self.rows += 1
        if logprobs is None:
            if self.require_logprobs:
                raise _Excluded("no log-probs")
            return
        if not _finite(logprobs, mask):
            raise _Excluded("misaligned")
        if any(value > ROUNDING for value, bit in zip(logprobs, mask, strict=True) if bit):
            self.leaked += 1
            raise _Excluded("positive log-probs")

    def _advantage(
        self, group: Group, index: int, given: list[float] | None, mask: list[int]
    ) -> tuple[float | None, list[float]]:
        """The environment's advantage, or None: the mean, and one per token if these differ, or []."""
        if group.overrides and group.overrides[index].get("set_advantage_to_zero"):
            return 0.0, []
        if not self.use_advantages or given is None:
            return None, []
        if not _finite(given, mask):
            raise _Excluded("advantages")
        trained = [value for value, bit in zip(given, mask, strict=True) if bit]
        differ = len(set(trained)) > 1
        return fmean(trained), [value if bit else 0.0 for value, bit in zip(given, mask, strict=True)] if differ else []

    def _temperature(self, group: Group, index: int) -> float:
        """Temperature of a sequence, given for it or its group; by default that of the loss. NaN: not a number."""
        overrides = group.overrides[index] if group.overrides and index < len(group.overrides) else {}
        for settings in (overrides, group.generation_params, group.group_overrides):
            value = (settings or {}).get("temperature")
            if value is not None:
                try:
                    return float(value) if float(value) > 0 else 1.0
                except (TypeError, ValueError, OverflowError):
                    return math.nan
        return self.temperature

    def _messages(
        self, tokens: list[int], start: int, first: int, last: int, mask: list[int]
    ) -> Iterator[dict[str, Any]]:
        """An answer, and the text of the environment after it."""
        yield {"role": "assistant", "content": self.decode(tokens[start + first : start + last])}
        after = next((place for place in range(last, len(mask)) if mask[place]), len(mask))
        if after > last:
            yield {"role": "environment", "content": self.decode(tokens[start + last : start + after])}


def _finite(values: Sequence[float], mask: Sequence[int]) -> bool:
    return all(math.isfinite(value) for value, bit in zip(values, mask, strict=True) if bit)


def _turns(mask: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Runs of trained tokens, as (start, end)."""
    place = 0
    for bit, run in groupby(mask):
        length = len(list(run))
        if bit:
            yield place, place + length
        place += length


def _versions(
    tokens: list[int], start: int, turns: Sequence[tuple[int, int]], logprobs: Sequence[float], versions: Versions
) -> list[tuple[int, int, int]]:
    """The policy versions of the trained tokens that the policy server has recorded; positions in the completion."""
    calls = [
        (tokens[: start + first], tokens[start + first : start + last], logprobs[first:last]) for first, last in turns
    ]
    return [
        (version, first + begin, first + end)
        for (first, _), found in zip(turns, versions(calls), strict=True)
        for version, begin, end in found or ()
    ]
