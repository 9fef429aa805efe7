"""How a global batch is cut into micro-batches: which rank computes which completions, in which forward/backward pass.

The cut changes no gradient, because normalisers count the global batch; it decides time and memory. What it is made
from is the same on every rank (samples and settings), so every rank computes the same plan and nothing is communicated.
It does not depend on the update either: a sample is on the same rank at every visit of its rollout batch, which is what
the log-probs that ranks remember rely on.

    1. ranks     Prompts with all their completions, the most work first, each to the rank that has least so far
                 (longest processing time first). Then single completions move from the busiest rank to the idlest while
                 that gains more than it costs: the prompt is computed on both.
    2. number    The fewest passes that keep the limits; the rank that needs most decides for all, since every forward
                 pass may be a collective.
    3. passes    On each rank that many, as even as they get: the smallest bound that suffices, found by bisection.

*Tokens of a pass* are those that the model is run over, and what `Limits.tokens` bounds. Packed, that is each prompt
once and each completion without its last token, which predicts nothing; padded, the rows times the longest of them.

Only a completion that is longer than the limit by itself exceeds it, and has a pass of its own.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from swift.rollout.samples import TrainSample

PASS_PRICE_TOKENS = 64
"""What one more pass is taken to cost, in tokens, when fewer passes mean that prompts are computed again."""

LEAST_GAIN = 0.01
"""Share of a rank's mean work that moving a completion to another rank has to gain."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What one pass may hold; None is no limit. samples: completions. tokens: tokens that the model is run over."""

    samples: int | None = None
    tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Work:
    """How long tokens take, in units of one prompt token through the linear layers.

    completion: one completion token, with its share of the head. attention: a token attending to one other token.
    """

    completion: float = 1.0
    attention: float = 0.0


@dataclass(frozen=True, slots=True)
class MicroBatchPlan:
    """How the ranks share a global batch: `micro_batches[rank][i]` are sample indices.

    Every rank has the same number of micro-batches; a short rank's last ones are empty. too_long: samples that exceed
    the limit of tokens by themselves.
    """

    micro_batches: list[list[list[int]]]
    too_long: tuple[int, ...] = ()

    @property
    def first(self) -> int:
        """The first sample that any rank computes."""
        return next(i for rank in self.micro_batches for one in rank for i in one)


def plan_micro_batches(
    samples: Sequence[TrainSample],
    chosen: Sequence[int],
    *,
    world_size: int,
    limits: Limits,
    useful: Sequence[bool],
    packed: bool = True,
    work: Work = Work(),
) -> MicroBatchPlan:
    """Cut a global batch over the ranks and each rank's part into micro-batches.

    Args:
        samples: those of the rollout batch.
        chosen: sample indices of the global batch in launch order.
        world_size: data-parallel ranks.
        limits: of one pass.
        useful: per position, whether the sample can contribute to the gradient; others are left out.
        packed: whether neighbours share their prompt; otherwise each completion is a padded row.
        work: what the ranks' shares are weighed by.

    Returns:
        the plan; useful samples appear exactly once.
    """
    loads = list(_loads(samples, (i for i, wanted in zip(chosen, useful, strict=True) if wanted)))
    shares = _share_out(loads, world_size, _most_of_a_rank(len(loads), world_size, limits), packed, work)
    passes = max(_fewest_passes(share, limits, packed) for share in shares)
    micro_batches = [_cut(share, limits, passes, packed) for share in shares]
    alone = [load.sample for load in loads if limits.tokens and load.prompt_tokens + load.own_tokens > limits.tokens]
    return MicroBatchPlan(micro_batches, tuple(alone))


def micro_batch_tokens(samples: Sequence[TrainSample], part: Sequence[int], *, packed: bool = True) -> int:
    """Tokens that the model is run over in a pass with these samples in this order."""
    tokens = _Tokens(packed)
    for load in _loads(samples, part):
        tokens.add(_Block([load]))
    return tokens.total


@dataclass(frozen=True, slots=True)
class _Load:
    """One sample. prompt: equal numbers are equal prompts. own_tokens: inputs that are the completion's own."""

    sample: int
    prompt: int
    prompt_tokens: int
    own_tokens: int


def _loads(samples: Sequence[TrainSample], chosen: Iterable[int]) -> Iterator[_Load]:
    numbers: dict[bytes, int] = {}
    for i in chosen:
        sample = samples[i]
        prompt = numbers.setdefault(sample.prompt_ids.tobytes(), len(numbers))
        yield _Load(i, prompt, int(sample.prompt_ids.size), int(sample.token_ids.size) - 1)


def _by_prompt(loads: Iterable[_Load]) -> list[list[_Load]]:
    """Completions of the same prompt together, in the order in which prompts come first."""
    groups: dict[int, list[_Load]] = {}
    for load in loads:
        groups.setdefault(load.prompt, []).append(load)
    return list(groups.values())


# --- 1. ranks -------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Share:
    """What one rank computes, and how long that takes."""

    packed: bool
    work: Work
    loads: list[_Load] = field(default_factory=list)
    time: float = 0.0
    of_prompt: dict[int, int] = field(default_factory=dict)

    def added(self, load: _Load) -> float:
        """The time that one more sample takes."""
        return self._own_time(load) + (0.0 if self.of_prompt.get(load.prompt) else self._prompt_time(load))

    def saved(self, load: _Load) -> float:
        """The time that one sample less takes away."""
        return self._own_time(load) + (0.0 if self.of_prompt[load.prompt] > 1 else self._prompt_time(load))

    def add(self, load: _Load) -> None:
        """Take a sample."""
        self.time += self.added(load)
        self.of_prompt[load.prompt] = self.of_prompt.get(load.prompt, 0) + 1
        self.loads.append(load)

    def remove(self, load: _Load) -> None:
        """Give a sample away."""
        self.time -= self.saved(load)
        self.of_prompt[load.prompt] -= 1
        self.loads.remove(load)

    def _own_time(self, load: _Load) -> float:
        tokens = load.own_tokens
        attended = tokens * (load.prompt_tokens + tokens / 2)
        own = self.work.completion * tokens + self.work.attention * attended
        return own if self.packed else own + self._of_prompt_tokens(load)

    def _prompt_time(self, load: _Load) -> float:
        return self._of_prompt_tokens(load) if self.packed else 0.0

    def _of_prompt_tokens(self, load: _Load) -> float:
        return load.prompt_tokens + self.work.attention * load.prompt_tokens**2 / 2


def _most_of_a_rank(num_samples: int, world_size: int, limits: Limits) -> float:
    """Samples that a rank may have without needing more passes than equal numbers of samples would."""
    if limits.samples is None:
        return math.inf
    equal = -(-num_samples // world_size)
    return limits.samples * -(-equal // limits.samples)


def _share_out(loads: Sequence[_Load], world_size: int, most: float, packed: bool, work: Work) -> list[list[_Load]]:
    """The samples of each rank, in launch order."""
    shares = [_Share(packed, work) for _ in range(world_size)]
    if world_size == 1:
        return [list(loads)]
    groups = _by_prompt(loads) if packed else [[load] for load in loads]
    waiting = sorted(groups, key=lambda group: (-_time_alone(group, packed, work), group[0].sample))
    for group in waiting:
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


def _time_alone(group: Sequence[_Load], packed: bool, work: Work) -> float:
    share = _Share(packed, work)
    for load in group:
        share.add(load)
    return share.time


def _level(shares: list[_Share], most: float) -> None:
    """Move single samples from the rank that takes longest to the one that is done first, while it helps."""
    least_gain = LEAST_GAIN * sum(share.time for share in shares) / len(shares)
    for _ in range(sum(len(share.loads) for share in shares)):
        slow = max(shares, key=lambda share: share.time)  # the first of equals, on every rank alike
        open_ones = [share for share in shares if share is not slow and len(share.loads) < most]
        if not open_ones:
            return
        fast = min(open_ones, key=lambda share: share.time)

        def slower(load: _Load, slow: _Share = slow, fast: _Share = fast) -> float:
            return max(slow.time - slow.saved(load), fast.time + fast.added(load))

        best = min(slow.loads, key=lambda load: (slower(load), load.sample))
        if slow.time - slower(best) <= least_gain:
            return
        slow.remove(best)
        fast.add(best)


# --- 2. and 3.: micro-batches ----------------------------------------------------------------------------------------


class _Block:
    """Completions of one prompt that stay together in a pass. longest: of the rows, with the prompt."""

    __slots__ = ("loads", "longest", "own_tokens", "prompt", "prompt_tokens")

    def __init__(self, loads: list[_Load]) -> None:
        self.loads = loads
        self.prompt, self.prompt_tokens = loads[0].prompt, loads[0].prompt_tokens
        self.own_tokens = sum(load.own_tokens for load in loads)
        self.longest = self.prompt_tokens + max(load.own_tokens for load in loads)


class _Tokens:
    """Counts the tokens of a pass while it is filled."""

    def __init__(self, packed: bool) -> None:
        self.packed = packed
        self.total = self.num_samples = self.longest = 0
        self.prompt: int | None = None

    def with_block(self, block: _Block) -> int:
        """The tokens if this block came too."""
        if not self.packed:
            return (self.num_samples + len(block.loads)) * max(self.longest, block.longest)
        return self.total + block.own_tokens + (block.prompt_tokens if block.prompt != self.prompt else 0)

    def add(self, block: _Block) -> None:
        """Take a block."""
        self.total = self.with_block(block)
        self.num_samples += len(block.loads)
        self.longest = max(self.longest, block.longest)
        self.prompt = block.prompt


def _blocks(loads: Sequence[_Load], limits: Limits, packed: bool, *, whole: bool) -> list[_Block]:
    """What passes are filled with, in order: completions of a prompt next to each other, or rows of similar length.

    With `whole`, those of a prompt are one block where that fits into a pass. Who exceeds the limit by itself comes
    last, so that others need not be parted.
    """
    if not packed:
        return [
            _Block([one]) for one in sorted(loads, key=lambda one: (-one.prompt_tokens - one.own_tokens, one.sample))
        ]
    blocks = []
    for group in _by_prompt(loads):
        block = _Block(group)
        fits = _within(_Tokens(packed).with_block(block), limits.tokens) and _within(len(group), limits.samples)
        blocks += [block] if whole and fits else [_Block([load]) for load in group]
    return sorted(blocks, key=lambda block: not _within(block.longest, limits.tokens))


def _within(value: int, limit: int | None) -> bool:
    return limit is None or value <= limit


def _fill(blocks: Sequence[_Block], limits: Limits, packed: bool) -> tuple[list[list[_Load]], list[int]]:
    """Passes that take blocks in order until one more would break a limit, and the tokens of each."""
    parts: list[list[_Load]] = []
    sizes: list[_Tokens] = []
    for block in blocks:
        tokens = sizes[-1] if sizes else None
        full = tokens is None or not (
            _within(tokens.with_block(block), limits.tokens)
            and _within(tokens.num_samples + len(block.loads), limits.samples)
        )
        if full:
            parts.append([])
            sizes.append(_Tokens(packed))
        parts[-1] += block.loads
        sizes[-1].add(block)
    return parts, [size.total for size in sizes]


def _fewest_passes(loads: Sequence[_Load], limits: Limits, packed: bool) -> int:
    """The passes that this rank wants: few, unless whole prompts in more of them spare enough tokens."""
    prices = []
    for whole in (True, False):
        blocks = _blocks(loads, limits, packed, whole=whole)
        parts, tokens = _fill(blocks, limits, packed)
        prices.append((sum(tokens) + PASS_PRICE_TOKENS * len(parts), len(parts)))
    return min(prices)[1]


def _cut(loads: Sequence[_Load], limits: Limits, passes: int, packed: bool) -> list[list[int]]:
    """`passes` passes within the limits and as even as they get, the largest first.

    The largest comes first, because then memory that suffices for it suffices for all, and because the ranks' passes
    meet each other in this order.
    """
    blocks = _blocks(loads, limits, packed, whole=True)
    if len(_fill(blocks, limits, packed)[0]) > passes:
        blocks = _blocks(loads, limits, packed, whole=False)
    alone = [_Tokens(packed).with_block(block) for block in blocks]
    low = max((tokens for tokens in alone if _within(tokens, limits.tokens)), default=0)
    high = limits.tokens or max(sum(alone), len(loads) * low)

    def filled(bound: int) -> tuple[list[list[_Load]], list[int]]:
        return _fill(blocks, Limits(limits.samples, bound), packed)

    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if len(filled(middle)[0]) <= passes else (middle + 1, high)
    parts, tokens = filled(high)
    order = sorted(range(len(parts)), key=lambda n: (-tokens[n], n))
    return [[load.sample for load in parts[n]] for n in order] + [[] for _ in range(passes - len(parts))]
