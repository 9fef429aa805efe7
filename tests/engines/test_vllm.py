"""What only vLLM in process does, beside the contract (test_conformance_*.py). One engine for all but the last tests.

The model ties its head to the embedding; the KV cache has 512 MiB, so that giving it back shows.
"""

from __future__ import annotations

import math
import os
import random
import re

import numpy as np
import psutil
import pytest
import torch
from engine_traces import Traces
from given_weights import Given
from oracle import gap, load, logprobs_of, with_noise
from small_runs import OneRank
from vllm_parts import ENDS, LIMIT, drift, ended, request, requests, require_vllm, sample
from vllm_parts import spec_of as spec

from swift.errors import (
    ConfigError,
    EngineAsleep,
    EngineDead,
    NumericError,
    RequestRefused,
    ResourceError,
    SyncFailed,
    Unsupported,
)
from swift.models.tiny import build_tiny
from swift.rollout.engines.process import same_randomness
from swift.rollout.engines.spec import build_engine
from swift.rollout.engines.vllm import worker
from swift.rollout.parity import ParityCheck
from swift.rollout.weights.base import WeightStream
from swift.rollout.weights.policy import PolicyWeights
from swift.rollout.weights.sync import WeightSync
from swift.types import Prompt

require_vllm()
pytestmark = pytest.mark.slow

KV_MIB = 512
OURS = ("LOCAL_WORLD_SIZE", "LD_PRELOAD", "VLLM_ENABLE_V1_MULTIPROCESSING", "OMP_NUM_THREADS", "RANK", "MASTER_PORT")


def randomness():
    return random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()


def process():
    return randomness(), {name: os.environ.get(name) for name in OURS}, torch.set_num_threads


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return build_tiny(tmp_path_factory.mktemp("tiny"), arch="qwen2", size="tiny")


@pytest.fixture(scope="module")
def made(folder):
    """The engine, and the process before and after its construction."""
    os.environ["LOCAL_WORLD_SIZE"] = "7"
    before = process()
    engine = build_engine(spec(folder, sleep=True, engine_kwargs={"kv-cache-memory-bytes": KV_MIB << 20}))
    yield engine, before, process()
    engine.close()
    del os.environ["LOCAL_WORLD_SIZE"]


@pytest.fixture
def engine(made, folder):
    """Awake, with the weights of the folder as version 0."""
    one = made[0]
    yield one
    if not one.health().alive:
        one.rebuild()
    elif one.version or one.health().detail:
        one.wake()
        one.load_weights(PolicyWeights(load(folder)), 0)


@pytest.fixture
def model(folder):
    return load(folder)


# --- sampling -----------------------------------------------------------------------------------------------


def test_neither_construction_nor_sampling_moves_random_generators_environment_or_threads(made):
    engine, before, after = made
    assert before == after
    with same_randomness():  # once for whatever is sampled, as colocation and the parity check do
        sample(engine, requests())
    assert process() == after


def test_the_likeliest_tokens_are_those_of_the_distribution_that_was_sampled_from(engine):
    done = sample(engine, [request(top_logprobs=3, temperature=0.7), request("cut", top_logprobs=5, top_k=2)])
    cut = done["cut"]
    for one, told in ((done["r"], 3), (cut, 2)):
        assert [len(top) for top in one.top_logprobs] == [told] * len(one.token_ids)
        for token, logprob, top in zip(one.token_ids, one.logprobs, one.top_logprobs, strict=True):
            assert [value for _, value in top] == sorted((value for _, value in top), reverse=True)
            assert dict(top).get(token, logprob) == logprob <= top[0][1]
    assert sum(math.exp(value) for _, value in cut.top_logprobs[0]) == pytest.approx(1, abs=1e-5)


def test_samples_that_need_not_be_exact_have_no_seed_of_their_own_and_right_log_probs(engine, model):
    wanted = requests(exact=False, temperature=1.0)
    first, second = ({name: one.token_ids for name, one in sample(engine, wanted).items()} for _ in range(2))
    assert first != second
    assert drift(engine, model, wanted) <= LIMIT
    exact = [sample(engine, requests(temperature=1.0)) for _ in range(2)]
    assert [one.token_ids for one in exact[0].values()] == [one.token_ids for one in exact[1].values()]


def test_a_groups_prompt_is_prefilled_once(engine):
    engine.reset_caches()
    before = engine.counters.prefill_tokens
    sample(engine, [request("first", range(64 + 8))])
    sample(engine, [request(i, range(64 + 8), seed=i) for i in range(8)])
    assert engine.counters.prefill_tokens - before == 72 + 8 * 8  # two blocks of 32 are shared


def test_what_vllm_does_not_sample_with_is_refused_before_it_is_submitted(engine):
    with pytest.raises(RequestRefused, match=r"request: hot: vLLM refuses it \(temperature must") as refused:
        engine.check_length(request("hot", temperature=2.5))
    assert refused.value.request_id == "hot"
    with pytest.raises(RequestRefused, match=r"request: odd: its prompt has token ids outside of 0\.\."):
        engine.submit(request("odd", [10**6]))
    for wanted in ({"regex": "(?=a)b"}, {"extra": {"structured_outputs": {"json": {"type": "unheard of"}}}}):
        with pytest.raises(RequestRefused, match="vLLM refuses it"):
            sample(engine, [request(**wanted), *requests(1)])
    with pytest.raises(Unsupported, match=r"--generation_kwargs: bad_wrods: .*nearest: bad_words"):
        sample(engine, requests(1, extra={"bad_wrods": ["x"]}))
    assert len(sample(engine, requests(2))) == 2


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
    full = logprobs_of(model, one.prompt_ids, done.token_ids)
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
        assert gap(model, one, found[one.request_id]) < LIMIT


def test_penalties_least_lengths_and_vllms_own_fields_reach_vllm(engine):
    plain, varied = (
        sample(engine, requests(6, temperature=0.3, **more))
        for more in ({}, {"presence_penalty": 2.0, "frequency_penalty": 2.0})
    )
    different = [sum(len(set(one.token_ids)) for one in found.values()) for found in (plain, varied)]
    assert different[1] > different[0]
    others = tuple(token for token in range(250) if token != 9)
    ends = sample(engine, requests(4, stop_token_ids=others))
    held = sample(engine, requests(4, stop_token_ids=others, min_tokens=6))
    assert max(len(one.token_ids) for one in ends.values()) <= 6 < min(len(one.token_ids) for one in held.values())
    only = sample(engine, requests(2, extra={"allowed_token_ids": [7, 8]}))
    assert {token for one in only.values() for token in one.token_ids} <= {7, 8}
    pushed = sample(engine, requests(2, extra={"logit_bias": {"11": 90.0}}))
    assert {token for one in pushed.values() for token in one.token_ids} == {11}


def test_the_others_keep_their_tokens_when_one_output_is_not_finite(engine, monkeypatch):
    """Those of a step arrive together."""
    wanted = [request(i, seed=i, tokens=3 + i % 2, stop_token_ids=()) for i in range(6)]
    alone = sample(engine, wanted)
    step = engine._llm.step

    def broken():
        outputs = step()
        for output in outputs:
            if output.request_id == "2":
                output.outputs[0].logprobs.logprobs[2] = math.nan
        return outputs

    monkeypatch.setattr(engine._llm, "step", broken)
    for one in wanted:
        engine.submit(one)
    found = []
    with pytest.raises(NumericError, match="request: 2: token 2 has log-prob nan"):
        found.extend(ended(engine))
    found.extend(ended(engine))
    expected = {name: one.token_ids for name, one in alone.items() if name != "2"}
    assert {one.request_id: one.token_ids for one in found} == expected


# --- weights ------------------------------------------------------------------------------------------------


def test_twenty_updates_leave_no_drift_and_no_prompt_of_older_weights(engine, model):
    prompt = request("p", range(70), tokens=4)
    for version in range(1, 21):
        with_noise(model, seed=version, scale=0.01)
        engine.load_weights(PolicyWeights(model, move_model_batches=version % 4 or None), version)
        before = engine.counters.prefill_tokens
        assert drift(engine, model, [prompt]) <= LIMIT
        assert engine.counters.prefill_tokens - before == 70


def test_a_fused_matrix_may_arrive_in_parts(engine, model):
    """q, k and v in three buckets: the reload waits for the last one."""
    with_noise(model, seed=4)
    tensors = model.state_dict().items()
    engine.load_weights(Given(tensors, *([pair] for pair in tensors)), 3)
    with pytest.raises(SyncFailed, match="not today"):
        engine.update(WeightStream(PolicyWeights(model).manifest(), gives_up_after([]), 11))
    assert drift(engine, model) <= LIMIT


def test_half_an_update_cannot_be_sampled_from_and_abort_invalidates_the_engine_until_rebuilt(engine, model):
    with_noise(model, seed=9)
    source = PolicyWeights(model, move_model_batches=4)
    with pytest.raises(SyncFailed, match="not today"):
        engine.update(WeightStream(source.manifest(), gives_up_after([next(source.buckets())]), 9))
    assert not engine.health().alive
    for attempt in (lambda: sample(engine, requests()), lambda: engine.load_weights(source, 9), engine.reset_caches):
        with pytest.raises(SyncFailed, match=r"given up half-way.*rebuild the engine"):
            attempt()
    engine.rebuild()
    assert (engine.version, engine.health().alive) == (0, True)
    engine.load_weights(source, 9)
    assert drift(engine, model) <= LIMIT


def gives_up_after(buckets):
    yield from buckets
    raise SyncFailed("weights: not today")


def fails(worker, tensors):
    list(tensors)
    raise RuntimeError("planted")


def skips_one(worker, tensors, load=worker.load_part):
    return load(worker, tensors) - {"model.norm.weight"}


@pytest.mark.parametrize(
    ("load", "words"), [(fails, "RuntimeError: planted; rebuild the engine"), (skips_one, r"nothing arrived in model")]
)
def test_a_loader_that_fails_invalidates_the_engine(engine, model, monkeypatch, load, words):
    monkeypatch.setattr(worker, "load_part", load)
    with pytest.raises(SyncFailed, match=words):
        engine.load_weights(PolicyWeights(model), 13)
    assert not engine.health().alive
    with pytest.raises(SyncFailed, match="rebuild the engine"):
        sample(engine, requests())


def test_a_cache_that_is_not_reset_fails_the_update(engine, model, monkeypatch):
    monkeypatch.setattr(engine._llm, "reset_prefix_cache", lambda **_: False)
    with pytest.raises(SyncFailed, match="the prefix cache was not reset"):
        engine.load_weights(PolicyWeights(model), 15)
    assert engine.version != 15


def test_a_cache_that_was_not_reset_holds_nothing_for_other_weights(engine, model, monkeypatch):
    prompt = [5 + i % 200 for i in range(2 * 32 + 7)]
    sample(engine, [request("first", prompt, tokens=4)])
    monkeypatch.setattr(engine._llm, "reset_prefix_cache", lambda **_: True)  # says so, and does not
    with_noise(model, seed=1)
    engine.load_weights(PolicyWeights(model), 17)
    assert drift(engine, model, [request("after", prompt, tokens=4)]) <= LIMIT


@pytest.mark.long
def test_requests_kept_over_a_rebuild_end_with_abort(engine):
    engine.submit(request("kept", tokens=50))
    engine.pause()
    engine.rebuild()
    assert [(one.request_id, one.finish_reason) for one in ended(engine)] == [("kept", "abort")]


def test_the_parity_check_passes_and_refuses_a_cache_kept_across_a_sync(engine, model, monkeypatch):
    @torch.no_grad()
    def score(sequences, temperature):
        rows = []
        for one in sequences:
            logits = model(torch.tensor([[*one.prompt_ids, *one.completion_ids]])).logits[0]
            scores = (logits[len(one.prompt_ids) - 1 : -1] / temperature).log_softmax(-1)
            rows.append(scores.gather(1, torch.tensor(list(one.completion_ids))[:, None])[:, 0])
        return torch.cat(rows)

    check = ParityCheck(
        engine,
        score=score,
        model=model,
        weight_sync=WeightSync(engine, source=lambda: PolicyWeights(model), ranks=OneRank()),
        prompts=[Prompt(str(i), [], list(range(20 + i, 40 + 2 * i))) for i in range(8)],
        sampling=request(tokens=16, temperature=0.9).sampling,
        ranks=OneRank(),
        end_token_ids=ENDS,
    )
    state = torch.get_rng_state().tolist()
    monkeypatch.setattr(engine, "reset_caches", lambda: None)
    report = check.run()
    assert (report.verdict, len(report.stages)) == ("pass", 3), report.line()  # the salt tells versions apart
    assert check.now().verdict == "pass"
    assert torch.get_rng_state().tolist() == state
    add_request = engine._llm.add_request

    def without_salt(request_id, prompt, *rest, **named):
        del prompt["cache_salt"]
        return add_request(request_id, prompt, *rest, **named)

    monkeypatch.setattr(engine._llm, "add_request", without_salt)
    assert check.run().error().startswith("--parity_check: with noise: ")


# --- memory -------------------------------------------------------------------------------------------------


def greedy(engine):
    return {name: (one.token_ids, one.logprobs) for name, one in sample(engine, requests(8, temperature=0.0)).items()}


def test_sleeping_gives_the_kv_cache_back_and_waking_gives_the_same_tokens(engine, folder):
    assert engine.capabilities.sleep_levels == (0, 1, 2)
    before, full = greedy(engine), psutil.Process().memory_info().rss
    assert 0 < engine.memory()["kv"] <= KV_MIB << 20
    report = engine.sleep(1)
    assert report.note == ""
    assert min(report.freed_bytes, full - psutil.Process().memory_info().rss) >= 0.95 * (KV_MIB << 20)
    numbers = sum(parameter.numel() for parameter in load(folder).parameters())
    assert engine.memory() == {"weights": 4 * numbers, "kv": 0}
    assert engine.wake()
    assert greedy(engine) == before


def test_sleep_goes_deeper_but_not_back(engine, model):
    before = greedy(engine)
    engine.sleep(1)
    assert engine.sleep(2).note == "weights stay resident (2 MiB)"
    for _ in range(2):  # what level 2 dropped does not come back by sleeping less deep
        engine.sleep(1)
        engine.wake()
        with pytest.raises(EngineAsleep, match="sync them before sampling"):
            sample(engine, requests())
    engine.load_weights(PolicyWeights(model), 4)
    assert greedy(engine) == before
    with pytest.raises(Unsupported, match="sleep\\(3\\)"):
        engine.sleep(3)


def test_memory_that_cannot_be_released_is_said_in_one_line(engine, monkeypatch):
    monkeypatch.setattr(worker, "MADV_DONTNEED", 10**6)  # which the kernel refuses
    report = engine.sleep(1)
    assert report.freed_bytes == 0
    assert re.fullmatch(
        rf"KV cache of {KV_MIB} MiB cannot be released: madvise of \d+ bytes failed \(Invalid argument\)", report.note
    )
    engine.wake()
    assert len(sample(engine, [request(tokens=2)])["r"].token_ids) == 2


# --- start and end: engines of their own ------------------------------------------------------------------------


@pytest.mark.long
def test_what_cannot_start_is_refused_with_the_flag(folder, tmp_path):
    with pytest.raises(ConfigError, match=r"--vllm_engine_kwargs: max_num_seq: .*nearest: max_num_seqs"):
        build_engine(spec(folder, engine_kwargs={"max_num_seq": 3}))
    with pytest.raises(ResourceError, match="lower --vllm_max_model_len"):
        build_engine(spec(folder, max_model_len=2048, engine_kwargs={"kv_cache_memory_bytes": 1 << 20}))
    nano = build_tiny(tmp_path / "nano", arch="qwen2", size="nano")  # heads of 8 numbers: fails in the first step
    with pytest.raises(ConfigError, match=r"vLLM cannot run it on this device .*head_dim=8.*--infer_backend t"):
        build_engine(spec(nano))


def test_without_a_limit_the_context_shrinks_to_the_cache_and_closing_leaves_nothing(folder, engine, caplog):
    traces = Traces()
    made = build_engine(spec(folder, sleep=True, max_model_len=None, engine_kwargs={"kv_cache_memory_bytes": 1 << 20}))
    assert 32 <= made.capabilities.max_model_len < 2048
    assert "limited to" in caplog.text
    traces.look()
    made.submit(request("lost", tokens=3))
    made.close()
    made.close()
    assert (made.health().alive, made.health().detail) == (False, "closed")
    for attempt in (lambda: sample(made, requests()), made.advance, made.wake):
        with pytest.raises(EngineDead, match="closed"):
            attempt()
    assert not made._busy.locked()  # a call of another thread ends with the error above instead of waiting
    assert traces.wait_until_gone() == []
    assert len(sample(engine, [request(tokens=2)])["r"].token_ids) == 2  # the other engine goes on


def test_closing_the_last_engine_ends_the_groups_that_vllm_made(made):
    assert torch.distributed.is_initialized()
    made[0].close()
    assert not torch.distributed.is_initialized()
