"""Guided decoding, counting penalties and least lengths in the transformers engine, and what engines refuse."""

from __future__ import annotations

import re
import sys
from dataclasses import replace

import oracle
import pytest
import torch

from swift.errors import ConfigError, RequestRefused, ResourceError, Unsupported
from swift.rollout.engines import guided
from swift.rollout.engines.running import ends_with_stop, first_stop
from swift.rollout.engines.transformers import TransformersEngine
from swift.rollout.engines.transformers.sampling import BatchSampler, Row
from swift.types import Request, SamplingParams

PLAIN = SamplingParams(max_new_tokens=24, temperature=1.0)
XGRAMMAR = pytest.mark.skipif(not guided.available(), reason="the package xgrammar is not installed")
DIGITS = r"(\+|-)?\d{2,4}( \w{3})?"


@pytest.fixture(scope="module")
def tokenizer(nano_folders):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(nano_folders["qwen2"])


@pytest.fixture(scope="module")
def engine(nano_folders, tokenizer):
    model = oracle.load(nano_folders["qwen2"])
    return TransformersEngine(model, eos_token_ids=[tokenizer.eos_token_id], tokenizer=tokenizer)


def run(engine, sampling, *, count=8, prompt=(5, 6, 7)):
    requests = [Request(f"g/{seed}", list(prompt), replace(sampling, seed=seed)) for seed in range(count)]
    return oracle.run(engine, requests)


@XGRAMMAR
def test_every_completion_matches_the_expression_and_ends_by_itself(engine, tokenizer):
    for completion in run(engine, replace(PLAIN, regex=DIGITS)):
        assert completion.token_ids[-1] == tokenizer.eos_token_id
        assert re.fullmatch(DIGITS, tokenizer.decode(completion.token_ids[:-1])), completion
        assert completion.finish_reason == "stop"


@XGRAMMAR
def test_a_cut_completion_is_the_beginning_of_a_match(engine, tokenizer):
    for completion in run(engine, replace(PLAIN, regex=r"a{9}", max_new_tokens=4)):
        assert tokenizer.decode(completion.token_ids) == "aaaa"
        assert (completion.finish_reason, completion.logprobs) == ("length", [0.0] * 4)


@XGRAMMAR
def test_log_probs_are_renormalised_over_what_the_expression_allows(engine):
    """Two tokens may start: their probabilities, from the plain distribution, add up to 1."""
    first = {one.token_ids[0]: one.logprobs[0] for one in run(engine, replace(PLAIN, regex="[ab]"), count=40)}
    assert len(first) == 2
    assert sum(torch.tensor(list(first.values())).exp()).item() == pytest.approx(1.0, abs=1e-6)


@XGRAMMAR
def test_rows_without_an_expression_are_what_they_are_without_the_others(engine):
    alone = run(engine, PLAIN, count=2)
    mixed = [Request(f"free/{s}", [5, 6, 7], replace(PLAIN, seed=s)) for s in range(2)]
    mixed += [Request(f"held/{s}", [5, 6, 7], replace(PLAIN, seed=s, regex=r"\d+")) for s in range(2)]
    free_0, free_1, *held = [one.token_ids for one in oracle.run(engine, mixed)]
    assert [free_0, free_1] == [one.token_ids for one in alone]
    assert all(ids != one.token_ids for ids, one in zip(held, alone, strict=True))


@XGRAMMAR
def test_an_expression_holds_for_greedy_sampling_and_over_compaction(engine, tokenizer):
    """Short matches leave the batch while long ones go on."""
    sampling = replace(PLAIN, regex=r"a|b{12}")
    texts = {tokenizer.decode(one.token_ids[:-1]) for one in run(engine, sampling, count=24)}
    assert texts == {"a", "b" * 12}
    greedy = run(engine, replace(sampling, temperature=0.0), count=2)
    assert greedy[0].token_ids == greedy[1].token_ids
    assert tokenizer.decode(greedy[0].token_ids[:-1]) in texts


@XGRAMMAR
def test_an_expression_that_xgrammar_refuses_is_refused_with_its_request_only(engine):
    with pytest.raises(RequestRefused, match=r"--vllm_guided_decoding_regex: \(a: .*parenthesis"):
        run(engine, replace(PLAIN, regex="(a"))
    assert len(run(engine, PLAIN, count=1)) == 1


@XGRAMMAR
def test_an_expression_without_any_end_token_is_refused(nano_folders, tokenizer):
    endless = TransformersEngine(oracle.load(nano_folders["qwen2"]), eos_token_ids=[], tokenizer=tokenizer)
    with pytest.raises(RequestRefused, match="no end token that could follow"):
        run(endless, replace(PLAIN, regex="a"))


def test_without_xgrammar_the_engine_says_so_before_and_while_sampling(nano_folders, tokenizer, monkeypatch):
    monkeypatch.setitem(sys.modules, "xgrammar", None)
    monkeypatch.setattr(guided.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ResourceError, match="pip install xgrammar"):
        guided.require("transformers", "a")
    engine = TransformersEngine(oracle.load(nano_folders["qwen2"]), eos_token_ids=[258], tokenizer=tokenizer)
    assert not engine.capabilities.guided
    with pytest.raises(Unsupported, match="pip install xgrammar"):
        run(engine, replace(PLAIN, regex="a"))


@XGRAMMAR
@pytest.mark.parametrize("backend", ["transformers", "lmdeploy", "vllm"])
def test_what_the_engines_library_refuses_is_an_error_before_weights_load(backend):
    with pytest.raises(ConfigError, match=r"--vllm_guided_decoding_regex: a\{3,1\}: .*Lower bound"):
        guided.require(backend, "a{3,1}")
    guided.require(backend, DIGITS)


def draw(logits, tokens=(), **sampling):
    """One row that has sampled some tokens draws the next."""
    row = Row(Request("r", [0], replace(PLAIN, **sampling)), token_ids=list(tokens))
    uniform = torch.tensor([0.5], dtype=torch.float64)
    sampler = BatchSampler([row], torch.device("cpu"))
    return sampler, [value[0].item() for value in sampler.draw(torch.tensor([logits]), uniform)[:2]]


def test_frequency_counts_each_occurrence_and_presence_only_the_first():
    """Token 2 was drawn twice, so its logit falls by 2 x 0.5 + 0.25; token 0, of the prompt, keeps its own."""
    penalties = {"frequency_penalty": 0.5, "presence_penalty": 0.25, "temperature": 0.0}
    for extra, expected in ((-0.01, 0), (0.01, 2)):
        logits = [1.0, -9.0, 2.25 + extra, -9.0]
        assert draw(logits, tokens=(2, 2), **penalties)[1][0] == expected
        sampler, (token, _) = draw([-9.0, -9.0, 9.0, -9.0], tokens=(2,), **penalties)  # counts its own draws
        assert token == 2
        again = sampler.draw(torch.tensor([logits]), torch.tensor([0.5], dtype=torch.float64))
        assert again[0].tolist() == [expected]


def test_no_end_token_comes_before_the_least_length(engine, tokenizer):
    """Every token but one ends a completion, so that without a minimum nearly all end at once."""
    others = tuple(i for i in range(250) if i != 9)
    base = replace(PLAIN, stop_token_ids=others)
    assert max(len(one.token_ids) for one in run(engine, base)) < 6
    held = run(engine, replace(base, min_tokens=6))
    assert min(len(one.token_ids) for one in held) >= 7
    assert all(set(one.token_ids[:6]).isdisjoint({*others, tokenizer.eos_token_id}) for one in held)


def test_a_minimum_also_holds_for_stop_texts(engine):
    words = tuple(chr(code) for code in range(32, 127))
    stops = replace(PLAIN, stop=words)
    short = run(engine, stops)
    long = run(engine, replace(stops, min_tokens=10))
    assert min(len(one.token_ids) for one in long) >= 10 > min(len(one.token_ids) for one in short)


def test_a_stop_text_counts_from_the_least_length_on(tokenizer):
    ids = tokenizer("xax xyx", add_special_tokens=False)["input_ids"]
    for least, expected in ((0, [False, True, True, True, True, True, True]), (2, [False] * 6 + [False])):
        found = [ends_with_stop(ids[:length], ["a"], tokenizer, least) for length in range(1, len(ids) + 1)]
        assert found == expected, least
    assert first_stop(ids, ["x x", "y", "a"], 3, tokenizer.decode) == (2, "x x")


@XGRAMMAR
def test_an_expression_that_is_complete_beats_a_minimum(engine, tokenizer):
    (completion,) = run(engine, replace(PLAIN, regex="a", min_tokens=8), count=1)
    assert tokenizer.decode(completion.token_ids) == "a<|im_end|>"


def test_an_end_token_of_id_0_is_held_back_and_no_other_one():
    row = Row(Request("r", [1], replace(PLAIN, min_tokens=2, temperature=0.0)), ends=frozenset({0}))
    sampler = BatchSampler([row], torch.device("cpu"))
    uniform, logits = torch.tensor([0.5], dtype=torch.float64), torch.tensor([[3.0, 2.0, 1.0]])
    assert sampler.draw(logits, uniform)[0].tolist() == [1]
    row.token_ids += [1, 1]
    assert sampler.draw(logits, uniform)[0].tolist() == [0]


def test_an_engine_refuses_fields_that_it_would_ignore(engine):
    with pytest.raises(Unsupported, match="--generation_kwargs: bad_words: the engine transformers does not have it"):
        run(engine, replace(PLAIN, extra={"bad_words": ["x"]}))


@pytest.mark.parametrize(
    ("changes", "truncates", "penalises"),
    [
        ({}, False, False),
        ({"regex": "a"}, True, False),
        ({"min_tokens": 1}, True, False),
        ({"frequency_penalty": 0.1}, False, True),
        ({"presence_penalty": -0.1}, False, True),
        ({"repetition_penalty": 1.1}, False, True),
    ],
)
def test_what_narrows_and_what_changes_the_distribution_is_told_apart(changes, truncates, penalises):
    sampling = replace(PLAIN, **changes)
    assert (sampling.truncates, sampling.penalises) == (truncates, penalises)
