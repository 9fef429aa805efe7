"""Drawing from uniforms: small and wide vocabularies, edges, rows that are no distribution."""

from __future__ import annotations

import math

import pytest
import torch

from swift.rollout.engines.transformers import sampling
from swift.rollout.engines.transformers.sampling import BatchSampler, Row, _inverse_cdf
from swift.types import Request, SamplingParams


def distributions(rows, size):
    generator = torch.Generator().manual_seed(size)
    return torch.randn(rows, size, generator=generator).mul_(3).softmax(-1)


@pytest.mark.parametrize("size", [4096, 5000, 8192 + 1, 32768 + 127])
def test_a_wide_vocabulary_is_drawn_from_as_a_small_one(size, monkeypatch):
    probs = distributions(256, size)
    uniforms = torch.rand(256, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    blocks = _inverse_cdf(probs, uniforms)
    monkeypatch.setattr(sampling, "WIDE", size + 1)
    plain = _inverse_cdf(probs, uniforms)
    cumulative = probs.double().cumsum(-1)
    reached = cumulative.gather(1, blocks[:, None])[:, 0]
    before = reached - probs.gather(1, blocks[:, None])[:, 0].double()
    assert ((before - 1e-6 <= uniforms) & (uniforms <= reached + 1e-6)).all()
    assert (blocks == plain).float().mean() > 0.98, "roundings may move a draw to its neighbour"


@pytest.mark.parametrize("size", [7, 4096, 4096 + 50])
def test_tokens_without_probability_are_never_drawn(size):
    probs = distributions(64, size)
    probs[:, ::3] = 0
    probs[:, -200:] = 0
    probs[:, 1] += 1e-3
    for uniform in (0.0, 0.3, 1 - 2**-53):
        tokens = _inverse_cdf(probs, torch.full((64,), uniform, dtype=torch.float64))
        assert (probs.gather(1, tokens[:, None]) > 0).all()
    assert (_inverse_cdf(probs, torch.zeros(64, dtype=torch.float64)) == 1).all()


@pytest.mark.parametrize("size", [7, 4096 + 50])
def test_one_token_with_all_of_it(size):
    for token in (0, size // 2, size - 1):
        probs = torch.nn.functional.one_hot(torch.tensor([token]), size).float()
        for uniform in (0.0, 0.5, 1 - 2**-53):
            assert _inverse_cdf(probs, torch.tensor([uniform], dtype=torch.float64)).item() == token


@pytest.mark.parametrize("size", [7, 4096 + 50])
def test_a_row_that_is_not_numbers_harms_no_other(size):
    logits = torch.randn(3, size, generator=torch.Generator().manual_seed(0))
    uniforms = torch.tensor([0.2, 0.7, 0.9], dtype=torch.float64)
    sampler = BatchSampler([Row(Request(f"r{i}", [1], SamplingParams(8))) for i in range(3)], torch.device("cpu"))
    tokens, logprobs, *_ = sampler.draw(logits.clone(), uniforms)
    logits[1] = float("nan")
    found, values, *_ = sampler.draw(logits, uniforms)
    assert found[[0, 2]].tolist() == tokens[[0, 2]].tolist() and 0 <= found[1] < size
    assert values[[0, 2]].tolist() == logprobs[[0, 2]].tolist() and values[1].isnan()


def test_frequencies_of_a_wide_vocabulary_are_its_probabilities():
    probs = distributions(1, sampling.WIDE + 300)
    count = 20_000
    uniforms = (torch.arange(count, dtype=torch.float64) + 0.5) / count
    tokens = torch.cat([_inverse_cdf(probs.expand(1000, -1), part) for part in uniforms.split(1000)])
    counted = torch.bincount(tokens, minlength=probs.shape[1])
    assert (counted / count - probs[0]).abs().max() <= 1.01 / count


def truncated(logprobs, **options):
    """By one row's settings, or those of several rows."""
    settings = [dict(zip(options, values, strict=True)) for values in zip(*options.values(), strict=True)]
    requests = [Request(f"r{i}", [1], SamplingParams(8, **one)) for i, one in enumerate(settings)]
    return BatchSampler([Row(request) for request in requests], torch.device("cpu"))._truncate(logprobs)


def reference(logprobs, top_k=0, top_p=1.0, min_p=0.0):
    """Token by token."""
    order = sorted(range(len(logprobs)), key=lambda token: -float(logprobs[token]))
    order = order[:top_k] if top_k > 0 else order
    total = sum(math.exp(logprobs[token]) for token in order)
    kept, mass = set(), 0.0
    for token in order:
        below = min_p > 0 and logprobs[token] < logprobs[order[0]] + math.log(min_p)
        if kept and (mass >= top_p * total or below):
            break
        kept.add(token)
        mass += math.exp(logprobs[token])
    return kept


@pytest.mark.parametrize("size", [50, 3000])
@pytest.mark.parametrize(
    "options",
    [
        {"top_k": [5, 20]},
        {"top_p": [0.5, 0.9]},
        {"min_p": [0.3, 0.01]},
        {"top_k": [20, 7], "top_p": [0.8, 0.99]},
        {"top_k": [0, 7], "top_p": [0.6, 0.9]},
        {"top_k": [0, 7], "top_p": [1.0, 0.9]},
        {"top_k": [0, 2000], "top_p": [0.9, 1.0], "min_p": [0.001, 0.0]},
        {"top_k": [4000, 1], "top_p": [0.9, 1.0]},
        {"top_p": [0.9999, 0.2]},  # more tokens than are looked at first
    ],
)
def test_what_truncation_leaves(size, options):
    generator = torch.Generator().manual_seed(size)
    logprobs = torch.randn(2, size, generator=generator).mul_(2).log_softmax(-1)
    found = truncated(logprobs.clone(), **options)
    for row in range(2):
        wanted = reference(logprobs[row].double().tolist(), **{name: values[row] for name, values in options.items()})
        kept = set((found[row] > -torch.inf).nonzero()[:, 0].tolist())
        assert len(kept ^ wanted) <= 1, "a rounding may move the edge by a token"
        assert torch.equal(found[row, sorted(kept)], logprobs[row, sorted(kept)])


@pytest.mark.parametrize("likely", [10, 1500])
def test_all_are_sorted_only_where_few_do_not_suffice(likely, monkeypatch):
    logits = torch.zeros(1, 3000)
    logits[:, :likely] = 20.0
    calls, sort = [], torch.Tensor.sort
    monkeypatch.setattr(torch.Tensor, "sort", lambda self, *given, **how: calls.append(1) or sort(self, *given, **how))
    kept = truncated(logits.log_softmax(-1), top_p=[0.8733]) > -torch.inf
    assert kept.sum() == math.ceil(0.8733 * likely)
    assert len(calls) == (likely > sampling.CANDIDATES)


def test_the_kept_mass_turns_log_probs_into_those_of_the_whole_vocabulary():
    """Rows with and without truncation together; end tokens 0 and 1 may not come yet in the last row."""
    options = [{}, {"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.2, "temperature": 0.7}, {"min_tokens": 2}]
    requests = [Request(f"r{i}", [1], SamplingParams(8, **one)) for i, one in enumerate(options)]
    rows = [Row(request, ends=frozenset({0, 1})) for request in requests]
    sampler = BatchSampler(rows, torch.device("cpu"))
    uniforms = torch.rand(len(requests), dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    logits = torch.randn(len(requests), 40, generator=torch.Generator().manual_seed(1)).mul_(2)
    token, logprob, log_mass, _ = sampler.draw(logits, uniforms)
    whole = (logits / torch.tensor([1.0, 1.0, 1.0, 0.7, 1.0])[:, None]).log_softmax(-1)
    assert (logprob + log_mass - whole.gather(1, token[:, None])[:, 0]).abs().max() < 1e-5
    assert log_mass[0].abs() < 1e-6 and (log_mass[1:] < -0.01).all()
    assert BatchSampler(rows[:1], torch.device("cpu")).draw(logits[:1], uniforms[:1])[2] is None
    allowed = torch.arange(40) % 2 == 0
    one = BatchSampler(rows[:1], torch.device("cpu"))
    token, logprob, log_mass, _ = one.draw(logits[:1], uniforms[:1], allowed[None])
    assert token[0] % 2 == 0 and logprob + log_mass == pytest.approx(float(whole[0, token[0]]), abs=1e-5)
