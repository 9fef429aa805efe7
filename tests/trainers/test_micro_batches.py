"""Cutting a global batch: every completion once, within limits, evenly over ranks and micro-batches, and repeatable."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swift.rollout.samples import TrainSample
from swift.trainers.micro_batches import Limits, Work, plan_micro_batches


def sample(prompt, prompt_tokens, completion_tokens):
    return TrainSample(
        group=prompt,
        prompt_ids=np.full(prompt_tokens, prompt, dtype=np.int32),
        token_ids=np.zeros(completion_tokens, dtype=np.int32),
        sampler_logprobs=np.zeros(completion_tokens, dtype=np.float32),
        trained=np.ones(completion_tokens, dtype=np.bool_),
        advantage=1.0,
    )


def groups(*lengths, prompt_tokens=10):
    """One group per list of completion lengths."""
    return [sample(g, prompt_tokens, n) for g, group in enumerate(lengths) for n in group]


def micro_batch_tokens(samples, micro_batch, arrangement="packed"):
    """Tokens that the model is run over."""
    prompts = [samples[i].prompt_ids for i in micro_batch]
    own = [samples[i].token_ids.size - 1 for i in micro_batch]
    if arrangement == "padded":
        return len(own) * max((prompt.size + n for prompt, n in zip(prompts, own, strict=True)), default=0)
    new = [i for i, prompt in enumerate(prompts) if i == 0 or not np.array_equal(prompt, prompts[i - 1])]
    if arrangement == "forked":
        return len(new) * max((one.size for one in prompts), default=0) + len(own) * max(own, default=0)
    return sum(own) + sum(prompts[i].size for i in new)


NO_LIMITS = Limits()


def plan(samples, *, world_size=1, limits=NO_LIMITS, useful=None, **named):
    useful = [True] * len(samples) if useful is None else useful
    return plan_micro_batches(
        samples, range(len(samples)), world_size=world_size, limits=limits, useful=useful, **named
    )


@st.composite
def batches(draw):
    """Samples of several prompts, some of them equal, and which are useful."""
    samples = []
    for _ in range(draw(st.integers(1, 7))):
        prompt = draw(st.integers(0, 4))
        for length in draw(st.lists(st.integers(1, 60), min_size=1, max_size=6)):
            samples.append(sample(prompt, 3 + 5 * prompt, length))
    return samples, draw(st.lists(st.booleans(), min_size=len(samples), max_size=len(samples)))


limits_ = st.builds(Limits, st.one_of(st.none(), st.integers(1, 9)), st.one_of(st.none(), st.integers(1, 300)))


@settings(max_examples=100, deadline=None)
@given(
    batch=batches(),
    world_size=st.integers(1, 5),
    limits=limits_,
    arrangement=st.sampled_from(["packed", "forked", "padded"]),
    work=st.builds(Work, st.floats(1, 20), st.floats(0, 0.1)),
)
def test_useful_samples_are_computed_once_in_passes_within_the_limits(batch, world_size, limits, arrangement, work):
    samples, useful = batch
    made = plan(samples, world_size=world_size, limits=limits, useful=useful, arrangement=arrangement, work=work)
    computed = Counter(i for parts in made.micro_batches for part in parts for i in part)
    assert computed == Counter(i for i, wanted in enumerate(useful) if wanted)
    assert sum(computed.values()) == sum(useful)
    assert len(made.micro_batches) == world_size
    assert len({len(parts) for parts in made.micro_batches}) == 1
    for parts in made.micro_batches:
        tokens = [micro_batch_tokens(samples, part, arrangement) for part in parts]
        assert tokens == sorted(tokens, reverse=True)
        for part, size in zip(parts, tokens, strict=True):
            assert limits.samples is None or len(part) <= limits.samples
            if limits.tokens is not None and size > limits.tokens:
                assert len(part) == 1
                assert part[0] in made.too_long
    alone = {
        i for i, one in enumerate(samples) if useful[i] and micro_batch_tokens(samples, [i]) > (limits.tokens or 10**9)
    }
    assert set(made.too_long) == alone


@settings(max_examples=100, deadline=None)
@given(batch=batches(), world_size=st.integers(1, 5))
def test_no_rank_has_more_than_the_mean_and_one_prompt_with_its_completions(batch, world_size):
    samples, _ = batch
    made = plan(samples, world_size=world_size)
    prompts = {}
    for i, one in enumerate(samples):
        prompts.setdefault(one.prompt_ids.tobytes(), []).append(i)
    whole = [micro_batch_tokens(samples, part) for part in prompts.values()]
    busiest = max(micro_batch_tokens(samples, part) for parts in made.micro_batches for part in parts)
    assert busiest <= sum(whole) / world_size + max(whole)


@settings(max_examples=100, deadline=None)
@given(lengths=st.lists(st.integers(1, 60), min_size=1, max_size=30), limit=st.integers(1, 9), ranks=st.integers(1, 5))
def test_balance_never_costs_passes(lengths, limit, ranks):
    """As many as ranks with equal numbers of completions need."""
    made = plan(groups(*[[n] for n in lengths]), world_size=ranks, limits=Limits(samples=limit))
    assert len(made.micro_batches[0]) == math.ceil(math.ceil(len(lengths) / ranks) / limit)


def _splits(samples, made):
    """How often a prompt is computed beyond once."""
    times = Counter(
        prompt
        for parts in made.micro_batches
        for part in parts
        for prompt in {samples[i].prompt_ids.tobytes() for i in part}
    )
    return sum(count - 1 for count in times.values())


def test_groups_stay_together_where_they_fit():
    samples = groups([8] * 4, [8] * 4, [8] * 4, prompt_tokens=100)
    made = plan(samples, limits=Limits(tokens=150))
    assert made.micro_batches == [[[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]]


def test_short_prompts_are_rather_computed_twice_than_a_pass_more_is_made():
    samples = groups([8] * 4, [8] * 4, [8] * 4, prompt_tokens=2)
    assert [len(part) for part in plan(samples, limits=Limits(samples=6)).micro_batches[0]] == [6, 6]


def test_passes_are_of_equal_size_and_not_full_ones_with_a_small_rest():
    samples = groups(*[[11]] * 10, prompt_tokens=5)
    parts = plan(samples, limits=Limits(tokens=9 * 15)).micro_batches[0]
    assert [micro_batch_tokens(samples, part) for part in parts] == [75, 75]


def test_a_completion_above_the_limit_is_alone_and_named():
    samples = groups([5, 200, 5], prompt_tokens=3)
    made = plan(samples, limits=Limits(tokens=20))
    assert made.micro_batches == [[[1], [0, 2]]]
    assert made.too_long == (1,)


def test_long_and_short_groups_are_dealt_out_by_their_work():
    """Equal numbers of samples, as consecutive parts have them, would give one rank 10 times the other's tokens."""
    samples = groups(*[[100] * 4] * 4, *[[10] * 4] * 4)
    made = plan(samples, world_size=2)
    first, second = (micro_batch_tokens(samples, part) for (part,) in made.micro_batches)
    assert first == second
    assert _splits(samples, made) == 0


def test_one_group_is_split_over_ranks_that_would_be_idle():
    samples = groups([50] * 8, prompt_tokens=20)
    made = plan(samples, world_size=2)
    assert [[len(part) for part in parts] for parts in made.micro_batches] == [[4], [4]]


def test_a_group_is_not_split_for_less_than_its_prompt_costs():
    samples = groups([5] * 4, [5] * 4, [5] * 4, prompt_tokens=500)
    assert _splits(samples, plan(samples, world_size=2)) == 0


def test_attention_over_long_contexts_counts_as_work():
    """By tokens the ranks would be even with the long one against ten short ones."""
    samples = groups([1000], *[[100]] * 10, prompt_tokens=1)
    even = plan(samples, world_size=2)
    assert [sum(map(len, parts)) for parts in even.micro_batches] == [1, 10]
    weighed = plan(samples, world_size=2, work=Work(attention=0.01))
    assert [sum(map(len, parts)) for parts in weighed.micro_batches] == [1, 10]
    three = plan(samples, world_size=3, work=Work(attention=0.01))
    assert sorted(sum(map(len, parts)) for parts in three.micro_batches) == [1, 5, 5]


def test_rows_of_similar_length_share_a_pass_where_rows_are_padded():
    samples = groups([50, 2, 50, 2], prompt_tokens=1)
    made = plan(samples, limits=Limits(samples=2), arrangement="padded")
    assert made.micro_batches == [[[0, 2], [1, 3]]]


def test_completions_of_similar_length_share_a_pass_where_states_are_forked():
    lengths = [4000, 300, 2100, 1500, 1000, 800, 500, 200]
    made = plan(groups(lengths, prompt_tokens=100), limits=Limits(tokens=16384), arrangement="forked")
    (parts,) = made.micro_batches
    assert [sorted(lengths[i] for i in part) for part in parts] == [[2100, 4000], [800, 1000, 1500], [300, 500], [200]]
    even = plan(groups([500] * 8, prompt_tokens=100), limits=Limits(tokens=16384), arrangement="forked")
    assert even.micro_batches == [[list(range(8))]]


def test_prompts_of_similar_length_share_a_pass_where_states_are_forked():
    samples = [sample(number, length, 5) for number, length in enumerate((50, 2, 50, 2)) for _ in range(2)]
    made = plan(samples, limits=Limits(samples=4), arrangement="forked")
    assert made.micro_batches == [[[0, 1, 4, 5], [2, 3, 6, 7]]]


@pytest.mark.parametrize("world_size", [1, 3])
def test_a_global_batch_without_useful_samples_has_no_pass(world_size):
    made = plan(groups([3, 4]), world_size=world_size, useful=[False, False], limits=Limits(4, 100))
    assert made.micro_batches == [[]] * world_size
