"""From a group of the message API to completions: which sequences can be trained on, and which are excluded and why.

    tokens   p0 p1 a0 a1 e0 b0      one sequence: prompt, answer, what the environment says, next answer
    masks   -100 .. a0 a1 -100 b0   trained where it is the token itself
             prompt | a0 a1 e0 b0   prompt_ids, token_ids; the completion begins with the first trained token

The API checks nothing of this, so everything is checked here. A sequence that does not hold is excluded, with a
reason; where rows cannot be told apart, the whole group.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from statistics import fmean
from typing import Any

from swift.errors import ConfigError
from swift.rollout.atropos.api import Group
from swift.rollout.engines.wire import Versions
from swift.types import Completion, Episode

NOT_TRAINED = -100
ROUNDING = 1e-4
"""A log-prob so far above 0 is one that was rounded."""


class _Excluded(Exception):
    """This sequence takes no part; the text says why, in a word or two."""


@dataclass(slots=True)
class GroupReader:
    """Makes completions of groups.

    Attributes:
        group_size: sequences of a group, `--num_generations`.
        vocab_size: ids are below it.
        max_token_len: sequences have fewer tokens.
        temperature: of the loss; sequences that say another one are excluded.
        require_logprobs: whether sequences without sampler log-probs are excluded.
        use_advantages: whether the environment's advantages count instead of those that follow from scores.
        end_token_ids: a completion that ends otherwise was cut.
        decode: token ids to text.
        rows: sequences seen. leaked: of these, how many had log-probs above 0.
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
        """A completion per request; those of sequences that cannot be trained on say why.

        Raises ConfigError: the first group is of another size or temperature than the settings say.
        """
        problem = self._problem(group)
        if not self._accepted:
            self._accept(group)
        made = []
        for index, name in enumerate(request_ids):
            try:
                if problem:
                    raise _Excluded(problem)
                made.append(self._completion(group, index, name, versions))
            except _Excluded as reason:
                made.append(Completion(name, [], [], "stop", episode=Episode([], 0, 0, problem=str(reason))))
        return made

    def _accept(self, group: Group) -> None:
        """Settings that no group can fit are an error before anything is trained."""
        count = len(group.tokens)
        if count != self.group_size:
            raise ConfigError(
                f"--num_generations: {self.group_size}: environment {group.env_id} sends groups of {count} sequences; "
                f"--num_generations {count}, or its group_size {self.group_size}"
            )
        found = {one for index in range(count) if math.isfinite(one := self._temperature(group, index))}
        if found and self.temperature not in found:
            raise ConfigError(
                f"--temperature: {self.temperature:g}: environment {group.env_id} samples at "
                f"{', '.join(f'{one:g}' for one in sorted(found))}; --temperature {min(found):g}"
            )
        self._accepted = True

    def _problem(self, group: Group) -> str:
        """Why rows cannot be told apart, "" when they can."""
        count = len(group.tokens)
        if count != self.group_size:
            return "group size"
        parallel = (
            group.masks, group.scores, group.inference_logprobs, group.ref_logprobs, group.advantages, group.overrides,
        )  # fmt: skip
        wrong = not group.masks or not group.scores or any(one and len(one) != count for one in parallel)
        return "misaligned" if wrong else ""

    def _completion(self, group: Group, index: int, name: str, versions: Versions) -> Completion:
        tokens, score = group.tokens[index], group.scores[index]
        trained = self._trained(tokens, group.masks[index])
        if not math.isfinite(score):
            raise _Excluded("score")
        if self._temperature(group, index) != self.temperature:
            raise _Excluded("temperature")
        start, end = trained.index(True), len(tokens) - trained[::-1].index(True)
        mask, ids = [int(one) for one in trained[start:end]], tokens[start:end]

        def own(rows: list[list[float]] | None) -> list[float] | None:
            """The row of this sequence, over the completion."""
            if not rows:
                return None
            if len(rows[index]) != len(tokens):
                raise _Excluded("misaligned")
            return rows[index][start:end]

        logprobs, references = own(group.inference_logprobs), own(group.ref_logprobs)
        self._check_logprobs(logprobs, mask)
        known = logprobs or [math.nan] * len(ids)
        turns = list(_turns(mask))
        advantage, by_token = self._advantage(group, index, own(group.advantages), mask)
        said = [pair for first, last in turns for pair in self._messages(tokens, start, first, last, mask)]
        return Completion(
            request_id=name,
            token_ids=ids,
            logprobs=[min(value, 0.0) if one else 0.0 for value, one in zip(known, mask, strict=True)],
            finish_reason="stop" if ids[-1] in self.end_token_ids else "length",
            text=self.decode(ids[turns[-1][0] : turns[-1][1]]),
            versions=_versions(tokens, start, turns, logprobs or [], versions),
            columns={"env_id": group.env_id},
            mask=mask if 0 in mask else [],
            episode=Episode(
                [{"role": "prompt", "content": self.decode(tokens[:start])}, *said],
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
        """Which tokens carry loss; the first one has no log-prob, so it cannot."""
        if len(tokens) != len(mask):
            raise _Excluded("misaligned")
        if len(tokens) >= self.max_token_len:
            raise _Excluded("too long")
        if any(not 0 <= token < self.vocab_size for token in tokens):
            raise _Excluded("vocabulary")
        if any(one not in (NOT_TRAINED, token) for one, token in zip(mask, tokens, strict=True)):
            raise _Excluded("mask")
        trained = [False, *(one != NOT_TRAINED for one in mask[1:])]
        if not any(trained):
            raise _Excluded("empty")
        return trained

    def _check_logprobs(self, logprobs: list[float] | None, mask: list[int]) -> None:
        """Atropos has 1.0 at masked tokens; at trained ones it says that the row is shifted or has none."""
        self.rows += 1
        if logprobs is None:
            if self.require_logprobs:
                raise _Excluded("no log-probs")
            return
        if not _finite(logprobs, mask):
            raise _Excluded("misaligned")
        if any(value > ROUNDING for value, one in zip(logprobs, mask, strict=True) if one):
            self.leaked += 1
            raise _Excluded("positive log-probs")

    def _advantage(
        self, group: Group, index: int, given: list[float] | None, mask: list[int]
    ) -> tuple[float | None, list[float]]:
        """What the environment says instead of an advantage from scores, if it does: a mean, and tokens that differ."""
        if group.overrides and group.overrides[index].get("set_advantage_to_zero"):
            return 0.0, []
        if not self.use_advantages or given is None:
            return None, []
        if not _finite(given, mask):
            raise _Excluded("advantages")
        trained = [value for value, one in zip(given, mask, strict=True) if one]
        differ = len(set(trained)) > 1
        return fmean(trained), [value if one else 0.0 for value, one in zip(given, mask, strict=True)] if differ else []

    def _temperature(self, group: Group, index: int) -> float:
        """Of a sequence: what is said of it, or of its group; that of the loss where nothing is, NaN for no number."""
        own = group.overrides[index] if group.overrides and index < len(group.overrides) else {}
        for said in (own, group.generation_params, group.group_overrides):
            value = (said or {}).get("temperature")
            if value is not None:
                try:
                    return float(value) if float(value) > 0 else 1.0
                except (TypeError, ValueError, OverflowError):
                    return math.nan
        return self.temperature

    def _messages(
        self, tokens: list[int], start: int, first: int, last: int, mask: list[int]
    ) -> Iterator[dict[str, Any]]:
        """An answer, and what the environment said after it."""
        yield {"role": "assistant", "content": self.decode(tokens[start + first : start + last])}
        after = next((place for place in range(last, len(mask)) if mask[place]), len(mask))
        if after > last:
            yield {"role": "environment", "content": self.decode(tokens[start + last : start + after])}


def _finite(values: Sequence[float], mask: Sequence[int]) -> bool:
    return all(math.isfinite(value) for value, one in zip(values, mask, strict=True) if one)


def _turns(mask: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Runs of trained tokens, as (start, end)."""
    place = 0
    for one, run in groupby(mask):
        length = len(list(run))
        if one:
            yield place, place + length
        place += length


def _versions(
    tokens: list[int], start: int, turns: Sequence[tuple[int, int]], logprobs: Sequence[float], versions: Versions
) -> list[tuple[int, int, int]]:
    """The weight versions of the trained tokens, as far as the policy server knows them; places in the completion."""
    asked = [
        (tokens[: start + first], tokens[start + first : start + last], logprobs[first:last]) for first, last in turns
    ]
    return [
        (version, first + begin, first + end)
        for (first, _), found in zip(turns, versions(asked), strict=True)
        for version, begin, end in found or ()
    ]
