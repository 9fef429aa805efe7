"""Sampling with vLLM in process: what a completion is, and what the trainer's process keeps. One engine for all."""

from __future__ import annotations

import math
import os
import random
import re
import threading

import numpy as np
import pytest
import torch
from vllm_parts import ENDS, LIMIT, drift, forward_logprobs, model_of, nudge, request, requests, require_vllm, sample
from vllm_parts import spec_of as spec

from swift.errors import ConfigError, EngineError, PromptTooLong, RequestRefused, Unsupported
from swift.models.tiny import build_tiny
from swift.rollout.engines.spec import build_engine
from swift.rollout.weight_sync.policy import PolicyWeights

require_vllm()
pytestmark = pytest.mark.slow

OURS = ("LOCAL_WORLD_SIZE", "LD_PRELOAD", "VLLM_ENABLE_V1_MULTIPROCESSING", "OMP_NUM_THREADS", "RANK", "MASTER_PORT")


def randomness():
    return random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return build_tiny(tmp_path_factory.mktemp("tiny"), arch="qwen2", size="tiny")


@pytest.fixture(scope="module")
def made(folder):
    """The engine, and what its construction left behind."""
    os.environ["LOCAL_WORLD_SIZE"] = "7"
    before = (randomness(), {name: os.environ.get(name) for name in OURS}, torch.set_num_threads)
    engine = build_engine(spec(folder))
    after = (randomness(), {name: os.environ.get(name) for name in OURS}, torch.set_num_threads)
    yield engine, before, after
    engine.close()
    del os.environ["LOCAL_WORLD_SIZE"]


@pytest.fixture
def engine(made):
    return made[0]


@pytest.fixture(scope="module")
def model(folder):
    return model_of(folder)


def test_construction_moves_neither_random_generators_nor_environment_nor_threads(made):
    _, before, after = made
    assert before == after


@pytest.mark.parametrize("temperature", [1.0, 0.7, 0.0])
def test_logprobs_are_those_of_a_forward_pass_at_the_temperature(engine, model, temperature):
    assert drift(engine, model, requests(temperature=temperature)) <= LIMIT


def test_sampling_moves_no_random_generator(engine):
    before = randomness()
    sample(engine, requests())
    assert randomness() == before


def test_equal_seeds_give_equal_samples_whatever_else_is_in_the_batch(engine):
    together = sample(engine, requests(12))
    again = sample(engine, list(reversed(requests(12))))
    alone = sample(engine, [requests(12)[5]])
    assert {name: one.token_ids for name, one in together.items()} == {
        name: one.token_ids for name, one in again.items()
    }
    assert alone["5"].token_ids == together["5"].token_ids


def test_a_group_differs_at_temperature_1_and_agrees_at_0(engine):
    drawn = sample(engine, [request(i, seed=i) for i in range(8)])
    greedy = sample(engine, [request(i, seed=i, temperature=0.0) for i in range(8)])
    assert len({tuple(one.token_ids) for one in drawn.values()}) == 8
    assert len({tuple(one.token_ids) for one in greedy.values()}) == 1


def test_a_groups_prompt_is_prefilled_once(engine):
    engine.reset_caches()
    before = engine.counters.prefill_tokens
    sample(engine, [request("first", range(64 + 8))])
    sample(engine, [request(i, range(64 + 8), seed=i) for i in range(8)])
    assert engine.counters.prefill_tokens - before == 72 + 8 * 8  # two blocks of 32 are shared


def test_the_end_token_belongs_to_the_completion(engine, model):
    """Every token ends it: the first one drawn does, and it is there with its log-prob."""
    one = request("end", stop_token_ids=tuple(range(263)))
    done = sample(engine, [one])["end"]
    assert (len(done.token_ids), len(done.logprobs), done.finish_reason) == (1, 1, "stop")
    assert abs(float(forward_logprobs(model, one, done)[0]) - done.logprobs[0]) <= LIMIT


def test_only_our_end_tokens_end_a_completion(engine):
    """The model's config names one end token; the spec names two. Long samples meet both."""
    found = sample(engine, [request(i, seed=i, tokens=200, temperature=1.5) for i in range(24)])
    stopped = [one for one in found.values() if one.finish_reason == "stop"]
    assert {one.token_ids[-1] for one in stopped} == set(ENDS)
    assert all(not set(one.token_ids[:-1]) & set(ENDS) for one in found.values())


def test_a_stop_string_ends_with_the_token_that_completes_it(engine, folder):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    words = (*"abcdefghijklmnopqrstuvwxyz", "<answer>", "12")
    for done in sample(engine, [request(i, seed=i, tokens=200, stop=words) for i in range(8)]).values():
        text, earlier = tokenizer.decode(done.token_ids), tokenizer.decode(done.token_ids[:-1])
        assert done.finish_reason == "stop"
        assert any(word in text for word in words) or done.token_ids[-1] in ENDS
        assert not any(word in earlier for word in words)


def test_length_ends_at_the_request_and_at_the_context(engine):
    long = request("context", range(250), tokens=100)
    found = sample(engine, [request("asked", tokens=5), long])
    assert (len(found["asked"].token_ids), found["asked"].finish_reason) == (5, "length")
    assert (len(found["context"].token_ids), found["context"].finish_reason) == (6, "length")


def test_a_prompt_without_room_is_refused_and_the_engine_goes_on(engine):
    with pytest.raises(PromptTooLong) as refused:
        sample(engine, [request("long", [7] * 256)])
    assert (refused.value.length, refused.value.limit) == (256, 256)
    assert len(sample(engine, [request(tokens=3)])["r"].token_ids) == 3


def test_what_vllm_does_not_sample_with_is_refused_before_it_is_submitted(engine):
    with pytest.raises(RequestRefused, match=r"request: hot: vLLM refuses it \(temperature must") as refused:
        engine.check_length(request("hot", temperature=2.5))
    assert refused.value.request_id == "hot"


def test_an_unknown_token_is_refused_by_name(engine):
    with pytest.raises(RequestRefused, match=r"request: odd: its prompt has token ids outside of 0\.\."):
        engine.submit(request("odd", [10**6]))
    assert list(engine.stream()) == []


def test_an_id_cannot_be_outstanding_twice(engine):
    engine.submit(request("twice"))
    with pytest.raises(EngineError, match="twice: submitted twice"):
        engine.submit(request("twice"))
    assert [one.request_id for one in engine.stream()] == ["twice"]


@torch.no_grad()
def test_truncated_logprobs_are_renormalised_over_what_is_left(engine, model):
    one = request("k", top_k=5, tokens=8)
    done = sample(engine, [one])["k"]
    logits = model(torch.tensor([list(one.prompt_ids) + done.token_ids])).logits[0, len(one.prompt_ids) - 1 : -1]
    top = logits.topk(5, dim=-1)
    for place, (token, logprob) in enumerate(zip(done.token_ids, done.logprobs, strict=True)):
        chosen = top.indices[place].tolist().index(token)
        assert abs(float(top.values[place].log_softmax(-1)[chosen]) - logprob) <= LIMIT


@torch.no_grad()
def test_a_repetition_penalty_is_part_of_the_logprob(engine, model):
    one = request("p", repetition_penalty=1.5, tokens=6)
    done = sample(engine, [one])["p"]
    for place, (token, logprob) in enumerate(zip(done.token_ids, done.logprobs, strict=True)):
        seen = [*one.prompt_ids, *done.token_ids[:place]]
        logits = model(torch.tensor([seen])).logits[0, -1]
        for used in set(seen):
            logits[used] = logits[used] / 1.5 if logits[used] > 0 else logits[used] * 1.5
        assert abs(float(logits.log_softmax(-1)[token]) - logprob) <= LIMIT


def test_min_p_leaves_the_likely_tokens_only(engine, model):
    one = request("m", min_p=0.5, tokens=8)
    done = sample(engine, [one])["m"]
    full = forward_logprobs(model, one, done)
    assert all(part >= float(whole) - LIMIT for part, whole in zip(done.logprobs, full, strict=True))


def test_a_regular_expression_holds_for_those_requests_that_have_one(engine, folder, model):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    expression = r"(yes|no): \d{2,3}"
    held = requests(4, regex=expression)
    free = [request(f"free/{i}", seed=i) for i in range(2)]
    found = sample(engine, [*held, *free])
    for one in held:
        *body, end = found[one.request_id].token_ids
        assert end in ENDS
        assert re.fullmatch(expression, tokenizer.decode(body))
        assert all(math.isfinite(value) and value <= 0 for value in found[one.request_id].logprobs)
    for one in free:
        assert (
            forward_logprobs(model, one, found[one.request_id]) - torch.tensor(found[one.request_id].logprobs)
        ).abs().max() < LIMIT


def test_a_wrong_expression_costs_its_own_request_only(engine):
    with pytest.raises(EngineError, match="vLLM refuses it"):
        sample(engine, [request(regex="(?=a)b"), *requests(1)])
    assert len(sample(engine, requests(2))) == 2


def test_counting_penalties_and_least_lengths_reach_vllm(engine):
    plain = sample(engine, requests(6, temperature=0.3))
    varied = sample(engine, requests(6, temperature=0.3, presence_penalty=2.0, frequency_penalty=2.0))
    assert sum(len(set(one.token_ids)) for one in varied.values()) > sum(
        len(set(one.token_ids)) for one in plain.values()
    )
    others = tuple(token for token in range(250) if token != 9)
    ends = sample(engine, requests(4, stop_token_ids=others))
    held = sample(engine, requests(4, stop_token_ids=others, min_tokens=6))
    assert max(len(one.token_ids) for one in ends.values()) <= 6 < min(len(one.token_ids) for one in held.values())


def test_vllms_own_fields_pass_through_and_others_are_refused(engine):
    only = sample(engine, requests(2, extra={"allowed_token_ids": [7, 8]}))
    assert {token for one in only.values() for token in one.token_ids} <= {7, 8}
    pushed = sample(engine, requests(2, extra={"logit_bias": {"11": 90.0}}))
    assert {token for one in pushed.values() for token in one.token_ids} == {11}
    with pytest.raises(Unsupported, match=r"--generation_kwargs: bad_wrods: .*nearest: bad_words"):
        sample(engine, requests(1, extra={"bad_wrods": ["x"]}))


def test_mixed_lengths_equal_single_runs(engine):
    mixed = [request(i, range(i % 3 + 1, length + i % 3 + 1), seed=i) for i, length in enumerate((1, 200, 17, 90, 3))]
    together = sample(engine, mixed)
    for one in mixed:
        alone = sample(engine, [one])[one.request_id]
        assert alone.token_ids == together[one.request_id].token_ids
        assert np.allclose(alone.logprobs, together[one.request_id].logprobs, rtol=0, atol=LIMIT)


def test_each_of_200_shuffled_requests_arrives_once(engine):
    wanted = [request(i, range(i % 50 + 1), seed=i, tokens=1 + i % 7) for i in range(200)]
    random.Random(0).shuffle(wanted)
    names = [one.request_id for one in engine.generate(wanted)]
    assert sorted(names, key=int) == [str(i) for i in range(200)]


def test_an_aborted_request_comes_out_once_with_its_tokens_so_far(engine):
    engine.submit(request("short", tokens=4))
    engine.submit(request("long", seed=1, tokens=200, stop_token_ids=()))
    stream = engine.stream()
    assert next(stream).request_id == "short"
    engine.abort(["long", "never heard of"])
    engine.abort(["long"])
    rest = list(stream)
    assert [(one.request_id, one.finish_reason) for one in rest] == [("long", "abort")]
    assert 0 < len(rest[0].token_ids) < 200
    assert len(rest[0].logprobs) == len(rest[0].token_ids)
    assert rest[0].versions == [(engine.version, 0, len(rest[0].token_ids))]
    assert list(engine.stream()) == []


def test_what_has_not_begun_is_aborted_without_tokens(engine):
    engine.submit(request("a"))
    engine.abort()
    (done,) = engine.stream()
    assert (done.token_ids, done.logprobs, done.versions, done.finish_reason) == ([], [], [], "abort")


def test_another_thread_may_abort(engine):
    for i in range(4):
        engine.submit(request(i, seed=i, tokens=200, temperature=1.0))
    helper = threading.Timer(0.05, engine.abort)
    helper.start()
    found = list(engine.stream())
    helper.join()
    assert sorted(one.request_id for one in found) == ["0", "1", "2", "3"]
    assert {one.finish_reason for one in found} <= {"abort", "stop", "length"}


def test_a_pause_waits_for_what_is_outstanding(engine):
    engine.submit(request("w", tokens=9))
    engine.pause("wait")
    (done,) = engine.stream()
    engine.resume()
    assert (len(done.token_ids), done.finish_reason) == (9, "length")


def test_a_pause_that_keeps_ends_the_stream_and_resume_goes_on_where_it_stood(engine):
    whole = sample(engine, [request("k", seed=5, tokens=40)])["k"]
    engine.submit(request("k", seed=5, tokens=40))
    engine.submit(request("brief", seed=5, tokens=3))
    stream = engine.stream()
    assert next(stream).request_id == "brief"
    engine.pause("keep")
    assert list(stream) == []
    engine.submit(request("later", seed=6, tokens=2))
    assert list(engine.stream()) == []
    engine.resume()
    found = {one.request_id: one for one in engine.stream()}
    assert found["k"].token_ids == whole.token_ids
    assert len(found["later"].token_ids) == 2


def test_a_pause_that_aborts_delivers_what_there_is(engine):
    engine.submit(request("x", tokens=200))
    engine.pause("abort")
    (done,) = engine.stream()
    engine.resume()
    assert done.finish_reason == "abort"


def test_an_unknown_pause_is_refused(engine):
    with pytest.raises(ConfigError, match="pause: later"):
        engine.pause("later")


def test_weights_that_change_in_flight_split_the_versions_and_give_the_new_logprobs(engine, folder):
    old, new = model_of(folder), model_of(folder)
    nudge(new, seed=1)
    one = request("f", seed=2, tokens=30)
    engine.load_weights(PolicyWeights(old), 10)
    engine.submit(one)
    engine.submit(request("brief", seed=2, tokens=7))
    stream = engine.stream()
    assert next(stream).request_id == "brief"
    engine.pause("keep")
    engine.load_weights(PolicyWeights(new), 11)
    engine.resume()
    (done,) = engine.stream()
    assert done.versions == [(10, 0, 7), (11, 7, 30)]
    found = torch.tensor(done.logprobs)
    assert (forward_logprobs(old, one, done)[:7] - found[:7]).abs().max() <= LIMIT
    assert (forward_logprobs(new, one, done)[7:] - found[7:]).abs().max() <= LIMIT
    engine.load_weights(PolicyWeights(old), 0)


def test_an_output_that_is_not_finite_is_an_error_that_names_the_request(engine, folder):
    good, broken = model_of(folder), model_of(folder)
    with torch.no_grad():
        broken.model.norm.weight.fill_(math.nan)
    engine.load_weights(PolicyWeights(broken), 1)
    with pytest.raises(EngineError, match="request: sick: token 0 has log-prob nan"):
        sample(engine, [request("sick")])
    assert list(engine.stream()) == []
    engine.load_weights(PolicyWeights(good), 0)
    assert drift(engine, good) <= LIMIT


def test_the_others_keep_their_tokens_when_one_output_is_not_finite(engine, monkeypatch):
    """All of a step arrive together, and some of them end with it."""
    wanted = [request(i, seed=i, tokens=3 + i % 2, stop_token_ids=()) for i in range(6)]
    alone = sample(engine, wanted)
    step, steps = engine._llm.step, []

    def spoiled():
        outputs = step()
        steps.append(len(outputs))
        for output in outputs:
            if output.request_id == "2" and len(steps) == 3:
                (token,) = output.outputs[0].token_ids
                output.outputs[0].logprobs[0][token].logprob = math.nan
        return outputs

    monkeypatch.setattr(engine._llm, "step", spoiled)
    for one in wanted:
        engine.submit(one)
    found = []
    with pytest.raises(EngineError, match="request: 2: token 2 has log-prob nan"):
        found.extend(engine.stream())
    found.extend(engine.stream())
    assert sorted(one.request_id for one in found) == ["0", "1", "3", "4", "5"]
    assert {one.request_id: one.token_ids for one in found} == {
        name: one.token_ids for name, one in alone.items() if name != "2"
    }


def test_nothing_submitted_gives_nothing(engine):
    assert list(engine.generate([])) == []


def test_info_is_json_and_says_what_runs(engine, folder):
    import json

    facts = json.loads(json.dumps(engine.info()))
    assert facts["model"] == str(folder)
    assert (facts["max_model_len"], facts["outstanding"], facts["running"]) == (256, 0, 0)
