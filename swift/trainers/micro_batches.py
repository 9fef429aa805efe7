"""Micro-batches of a global batch: which rank computes which completions, in which forward/backward pass.

The cut changes no gradient, because normalisers count the global batch; it decides time and memory. Its inputs (samples
and settings) are the same on every rank, so every rank computes the same plan and nothing is communicated. It does not
depend on the update either: a sample is on the same rank in every pass over its rollout batch, as the log-probs that
ranks keep require.

    1. ranks     Prompts with all their completions, the most work first, each to the rank that has least so far
                 (longest processing time first). Then single completions move from the busiest rank to the idlest while
                 that gains more than it costs: the prompt is computed on both.
    2. number    The fewest micro-batches within the limits, unless more of them save tokens; the rank that needs most
                 decides for all, since every forward pass may be a collective.
    3. cut       On each rank that many, as even as they get: the smallest bound that suffices, found by bisection.

*Tokens of a micro-batch* are those that the model is run over, and what `Limits.tokens` bounds. Packed, that is each
prompt once and each completion without its last token, which predicts nothing; forked, prompts and completions as rows,
each of the two padded to its longest; padded, the rows times the longest of them. Only a completion that is longer than
the limit by itself exceeds it, and has a micro-batch of its own.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

from swift.rollout.samples import TrainSample

MICRO_BATCH_PRICE_TOKENS = 64
"""What one more micro-batch is taken to cost, in tokens, when fewer of them mean that prompts are computed again."""

Arrangement = Literal["packed", "forked", "padded"]
"""Of sequences, as a model takes them: `swift.models.forward`, `swift.models.attention.forked`."""

LEAST_GAIN = 0.01
"""Share of a rank's mean work that moving a completion to another rank has to gain."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Of one micro-batch; None is no limit. samples: completions. tokens: tokens that the model is run over."""

    samples: int | None = None
    tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Work:
    """Computing time of tokens, in units of one prompt token through the linear layers.

    completion: one completion token, with its share of the head. attention: a token attending to one other token.
    """

    completion: float = 1.0
    attention: float = 0.0

    def of(self, load: _Load, others: int) -> float:
        """The time of a sample on a rank that has `others` of the same prompt."""
        tokens, prompt = load.own_tokens, load.prompt_tokens
        own = self.completion * tokens + self.attention * tokens * (prompt + tokens / 2)
        return own if others else own + prompt + self.attention * prompt**2 / 2


@dataclass(frozen=True, slots=True)
class MicroBatchPlan:
    """How the ranks share a global batch: `micro_batches[rank][i]` are sample indices.

    Every rank has the same number of micro-batches; a short rank's last ones are empty. too_long: samples that exceed
    the limit of tokens by themselves. tokens: of the largest micro-batch.
    """

    micro_batches: list[list[list[int]]]
    too_long: tuple[int, ...] = ()
    tokens: int = 0

    @property
    def first(self) -> int:
        """The first sample that any rank computes."""
        return next(i for rank in self.micro_batches for micro_batch in rank for i in micro_batch)

    def repeated(self, times: int) -> MicroBatchPlan:
        """Each rank's micro-batches for so many neighbours, which share them."""
        shared = [held for held in self.micro_batches for _ in range(times)]
        return replace(self, micro_batches=shared) if times > 1 else self

    @property
    def can_be_finer(self) -> bool:
        """Whether some micro-batch has more than one sample."""
        return any(len(micro_batch) > 1 for rank in self.micro_batches for micro_batch in rank)


def plan_micro_batches(
    samples: Sequence[TrainSample],
    chosen: Sequence[int],
    *,
    world_size: int,
    limits: Limits,
    useful: Sequence[bool],
    arrangement: Arrangement = "packed",
    work: Work = Work(),
) -> MicroBatchPlan:
    """Cut a global batch over the ranks and each rank's share into micro-batches.

    Args:
        samples: those of the rollout batch.
        chosen: sample indices of the global batch in launch order.
        world_size: data-parallel ranks.
        limits: of one micro-batch.
        useful: per position, whether the sample can contribute to the gradient; others are left out.
        arrangement: of a micro-batch; prompts are shared unless each completion is a padded row.
        work: what the ranks' shares are weighed by.

    Returns:
        the plan; useful samples appear exactly once.
    """
    prompts: dict[bytes, int] = {}
    loads = []
    for i in (i for i, wanted in zip(chosen, useful, strict=True) if wanted):
        ids = samples[i].prompt_ids
        prompt = prompts.setdefault(ids.tobytes(), len(prompts)) if arrangement != "padded" else i
        loads.append(_Load(i, prompt, int(ids.size), int(samples[i].token_ids.size) - 1))
    shares = [loads] if world_size == 1 else _share_out(loads, world_size, limits, work)
    number = max(_fewest(share, limits, arrangement) for share in shares)
    too_long = tuple(load.sample for load in loads if limits.tokens and load.tokens > limits.tokens)
    cut = [_cut(share, limits, number, arrangement) for share in shares]
    indices = [[[load.sample for load in micro_batch.loads] for micro_batch in rank] for rank in cut]
    return MicroBatchPlan(indices, too_long, max((rank[0].tokens for rank in cut if rank), default=0))


class _Load(NamedTuple):
    """One sample. prompt: equal numbers share a prompt. own_tokens: inputs that are the completion's own."""

    sample: int
    prompt: int
    prompt_tokens: int
    own_tokens: int

    @property
    def tokens(self) -> int:
        return self.prompt_tokens + self.own_tokens


def _by_prompt(loads: Iterable[_Load]) -> list[list[_Load]]:
    """Completions of the same prompt together, in the order in which prompts come first."""
    groups: dict[int, list[_Load]] = {}
    for load in loads:
        groups.setdefault(load.prompt, []).append(load)
    return list(groups.values())


# --- 1. ranks -------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Share:
    """The samples of one rank, and their computing time."""

    work: Work
    loads: list[_Load] = field(default_factory=list)
    time: float = 0.0
    of_prompt: Counter[int] = field(default_factory=Counter)

    def added(self, load: _Load) -> float:
        """The time that one more sample takes."""
        return self.work.of(load, self.of_prompt[load.prompt])

    def saved(self, load: _Load) -> float:
        """The time that one sample less takes away."""
        return self.work.of(load, self.of_prompt[load.prompt] - 1)

    def add(self, load: _Load) -> None:
        self.time += self.added(load)
        self.of_prompt[load.prompt] += 1
        self.loads.append(load)

    def remove(self, load: _Load) -> None:
        self.time -= self.saved(load)
        self.of_prompt[load.prompt] -= 1
        self.loads.remove(load)


def _share_out(loads: Sequence[_Load], world_size: int, limits: Limits, work: Work) -> list[list[_Load]]:
    """The samples of each rank, in launch order; none needs more micro-batches than equal numbers of samples would."""
    most = math.inf
    if limits.samples is not None:
        equal = -(-len(loads) // world_size)
        most = limits.samples * -(-equal // limits.samples)

    def alone(group: Sequence[_Load]) -> float:
        return sum(work.of(load, others) for others, load in enumerate(group))

    shares = [_Share(work) for _ in range(world_size)]
    for group in sorted(_by_prompt(loads), key=lambda group: (-alone(group), group[0].sample)):
        while group:
            room = [most - len(share.loads) for share in shares]
            fits = [r for r in range(world_size) if room[r] >= len(group)] or [r for r in range(world_size) if room[r]]
            chosen = min(fits, key=lambda r: (shares[r].time, r))
            count = int(min(room[chosen], len(group)))
            for load in group[:count]:
                shares[chosen].add(load)
            group = group[count:]
    _level(shares, most)
    return [sorted(share.loads, key=lambda load: load.sample) for share in shares]


def _level(shares: list[_Share], most: float) -> None:
    """Move single samples from the rank that takes longest to the one that is done first, while it helps."""
    least_gain = LEAST_GAIN * sum(share.time for share in shares) / len(shares)
    for _ in range(sum(len(share.loads) for share in shares)):
        slow = max(shares, key=lambda share: share.time)  # the first of equals, on every rank alike
        candidates = [share for share in shares if share is not slow and len(share.loads) < most]
        if not candidates:
            return
        fast = min(candidates, key=lambda share: share.time)
        times = [
            (max(slow.time - slow.saved(load), fast.time + fast.added(load)), load.sample, load) for load in slow.loads
        ]
        slower, _, best = min(times)
        if slow.time - slower <= least_gain:
            return
        slow.remove(best)
        fast.add(best)


# --- 2. and 3.: micro-batches ----------------------------------------------------------------------------------------


@dataclass(slots=True)
class _MicroBatch:
    """A micro-batch that is filled with blocks: completions of one prompt that stay together.

    longest: of its sequences; forked, of its completions. longest_prompt, num_prompts: forked only.
    """

    arrangement: Arrangement
    loads: list[_Load] = field(default_factory=list)
    tokens: int = 0
    longest: int = 0
    longest_prompt: int = 0
    num_prompts: int = 0

    def tokens_with(self, block: Sequence[_Load]) -> int:
        """The tokens if this block is added."""
        number = len(self.loads) + len(block)
        if self.arrangement == "padded":
            return number * max(self.longest, *(load.tokens for load in block))
        prompt, prompts = block[0].prompt_tokens, 0 if self._shares(block) else 1
        if self.arrangement == "packed":
            return self.tokens + sum(load.own_tokens for load in block) + prompts * prompt
        longest = max(self.longest, *(load.own_tokens for load in block))
        return (self.num_prompts + prompts) * max(self.longest_prompt, prompt) + number * longest

    def _shares(self, block: Sequence[_Load]) -> bool:
        """Whether the prompt of a block is the last one there is."""
        return bool(self.loads) and self.loads[-1].prompt == block[0].prompt

    def has_room(self, block: Sequence[_Load], limits: Limits) -> bool:
        most = limits.samples is None or len(self.loads) + len(block) <= limits.samples
        return most and (limits.tokens is None or self.tokens_with(block) <= limits.tokens)

    def add(self, block: Sequence[_Load]) -> None:
        self.tokens = self.tokens_with(block)
        if self.arrangement == "forked":
            self.num_prompts += not self._shares(block)
            self.longest_prompt = max(self.longest_prompt, block[0].prompt_tokens)
        whole = self.arrangement == "padded"
        self.longest = max(self.longest, *(load.tokens if whole else load.own_tokens for load in block))
        self.loads += block


def _blocks(loads: Sequence[_Load], limits: Limits, arrangement: Arrangement, *, whole: bool) -> list[list[_Load]]:
    """The blocks that micro-batches are filled with, in order: neighbours share a prompt, or have similar length.

    With `whole`, completions of a prompt are one block where that fits into a micro-batch; forked, otherwise those of
    similar length. Those that exceed the limit by themselves come last, so that others need not be parted.
    """
    groups = _by_prompt(loads)
    if arrangement == "padded":
        return sorted(groups, key=lambda group: (-group[0].tokens, group[0].sample))

    def parted(block: Sequence[_Load], *, whole: bool) -> list[list[_Load]]:
        if whole and _MicroBatch(arrangement).has_room(block, limits):
            return [list(block)]
        parts = _of_similar_length(block) if arrangement == "forked" else []
        return [piece for part in parts for piece in parted(part, whole=True)] if len(parts) > 1 else _singles(block)

    if arrangement == "forked":
        groups.sort(key=lambda group: (-group[0].prompt_tokens, group[0].sample))
        if not whole:
            groups = sorted(
                (part for group in groups for part in _of_similar_length(group)), key=lambda part: -part[0].own_tokens
            )
            whole = True
    blocks = [piece for group in groups for piece in parted(group, whole=whole)]
    return sorted(blocks, key=lambda block: limits.tokens is not None and block[0].tokens > limits.tokens)


def _singles(block: Sequence[_Load]) -> list[list[_Load]]:
    return [[load] for load in block]


def _of_similar_length(group: Sequence[_Load]) -> list[list[_Load]]:
    """Completions of a prompt, the longest first, in parts whose shortest has half of the longest's tokens at least."""
    parts: list[list[_Load]] = []
    for load in sorted(group, key=lambda load: (-load.own_tokens, load.sample)):
        if not parts or 2 * load.own_tokens < parts[-1][0].own_tokens:
            parts.append([])
        parts[-1].append(load)
    return parts


def _fill(blocks: Sequence[list[_Load]], limits: Limits, arrangement: Arrangement) -> list[_MicroBatch]:
    """Micro-batches that take blocks in order until one more would break a limit."""
    filled: list[_MicroBatch] = []
    for block in blocks:
        if not filled or not filled[-1].has_room(block, limits):
            filled.append(_MicroBatch(arrangement))
        filled[-1].add(block)
    return filled


def _ways(loads: Sequence[_Load], limits: Limits, arrangement: Arrangement) -> list[list[_MicroBatch]]:
    """Ways to fill micro-batches within the limits: whole prompts together or not, and, forked, with smaller bounds."""
    ways = []
    for whole in (True, False):
        blocks = _blocks(loads, limits, arrangement, whole=whole)
        ways.append(_fill(blocks, limits, arrangement))
        most = max((micro_batch.tokens for micro_batch in ways[-1]), default=0)
        for parts in (2, 4, 8) if arrangement == "forked" and most else ():
            bound = min(limits.tokens or most, -(-most // parts))  # one that is too long exceeds the limit
            ways.append(_fill(blocks, Limits(limits.samples, bound), arrangement))
    return ways


def _tokens(filled: Sequence[_MicroBatch]) -> int:
    return sum(micro_batch.tokens for micro_batch in filled)


def _fewest(loads: Sequence[_Load], limits: Limits, arrangement: Arrangement) -> int:
    """Number of micro-batches that suits this rank: few, unless more of them save enough tokens."""
    ways = _ways(loads, limits, arrangement)
    return min((_tokens(filled) + MICRO_BATCH_PRICE_TOKENS * len(filled), len(filled)) for filled in ways)[1]


def _cut(loads: Sequence[_Load], limits: Limits, number: int, arrangement: Arrangement) -> list[_MicroBatch]:
    """`number` micro-batches within the limits and as even as they get, the largest first.

    Memory that suffices for the first then suffices for all, and ranks compute micro-batches of similar size at once.
    Forked, those of similar length are together instead.
    """
    if arrangement == "forked":
        filled = min((way for way in _ways(loads, limits, arrangement) if len(way) <= number), key=_tokens)
    else:
        blocks = _blocks(loads, limits, arrangement, whole=True)
        if len(_fill(blocks, limits, arrangement)) > number:
            blocks = _blocks(loads, limits, arrangement, whole=False)
        alone = [_MicroBatch(arrangement).tokens_with(block) for block in blocks]
        low = max((tokens for tokens in alone if limits.tokens is None or tokens <= limits.tokens), default=0)
        high = limits.tokens or max(sum(alone), len(loads) * low)
        best = low + bisect_left(
            range(low, high),
            True,
            key=lambda bound: len(_fill(blocks, Limits(limits.samples, bound), arrangement)) <= number,
        )
        filled = _fill(blocks, Limits(limits.samples, best), arrangement)
    filled = sorted(filled, key=lambda micro_batch: -micro_batch.tokens)
    return filled + [_MicroBatch(arrangement) for _ in range(number - len(filled))]
