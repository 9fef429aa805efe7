"""The in-process engine: what it samples, what it reports, what it costs."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from hybrids import SAMPLED, hybrid
from oracle import load

from swift.errors import ConfigError
from swift.models.attention.spans import Span
from swift.models.forward import TokenSequence, completion_logits, pad
from swift.rollout.engines.base import EngineCounters
from swift.rollout.engines.transformers import TransformersEngine
from swift.rollout.engines.transformers.batch import BatchRun
from swift.rollout.engines.transformers.cache import RowCache
from swift.types import Request, SamplingParams

PLAIN = SamplingParams(max_new_tokens=12, temperature=0.9)


def make_engine(folder, **options):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    return TransformersEngine(load(folder), eos_token_ids=[tokenizer.eos_token_id], tokenizer=tokenizer, **options)


def make_requests(prompts, *, samples=4, sampling=PLAIN):
    return [
        Request(f"{p}/{s}", ids, replace(sampling, seed=1000 * p + s))
        for p, ids in enumerate(prompts)
        for s in range(samples)
    ]


def run(engine, requests):
    return {completion.request_id: completion for completion in engine.sample(requests)}


PROMPTS = [[5, 6, 7], [9] * 11, [20, 21, 22, 23, 24, 25]]


def test_a_prompt_is_prefilled_once_for_all_its_samples(nano_folder):
    engine = make_engine(nano_folder)
    completions = run(engine, make_requests(PROMPTS, samples=8))
    assert engine.counters.prefill_tokens == sum(len(prompt) for prompt in PROMPTS)
    assert engine.counters.decode_rows == sum(len(c.token_ids) for c in completions.values())


def test_a_small_cache_cuts_the_batch_and_changes_no_sample(nano_folder):
    requests = make_requests(PROMPTS)
    whole = run(make_engine(nano_folder), requests)
    cut = run(make_engine(nano_folder, max_rows=3), requests)
    assert {k: c.token_ids for k, c in whole.items()} == {k: c.token_ids for k, c in cut.items()}


def test_a_batch_that_runs_out_of_memory_is_sampled_again_in_halves(nano_folder, monkeypatch, caplog):
    requests, decode, room = make_requests(PROMPTS), BatchRun._decode, 4
    whole = run(make_engine(nano_folder), requests)

    def short(batch, model):
        if len(batch.rows) > room and batch.counters.decode_steps > 3:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return decode(batch, model)

    monkeypatch.setattr(BatchRun, "_decode", short)
    engine = make_engine(nano_folder)
    found = run(engine, requests)
    assert {name: one.token_ids for name, one in found.items()} == {name: one.token_ids for name, one in whole.items()}
    for name, one in found.items():
        assert one.logprobs == pytest.approx(whole[name].logprobs, abs=1e-5)
    assert caplog.text.count("memory: ran out in a batch of ") == 2 and 1 < engine.max_rows <= room
    room = 0
    with pytest.raises(torch.OutOfMemoryError):
        run(engine, requests[:1])


def test_aborted_requests_come_back_where_removing_them_runs_out_of_memory(nano_folder, monkeypatch):
    requests, keep, failures = make_requests(PROMPTS), BatchRun._keep, []

    def short(batch, rows):
        if not failures:
            failures.append(len(batch.rows))
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        keep(batch, rows)

    monkeypatch.setattr(BatchRun, "_keep", short)
    engine = make_engine(nano_folder)
    for request in requests:
        engine.submit(request)
    engine.advance()
    aborted = {request.request_id for request in requests[2:]}
    engine.abort_submitted(aborted)
    found = []
    while (done := engine.advance()) is not None:
        found += done
    assert failures
    assert sorted(one.request_id for one in found) == sorted(request.request_id for request in requests)
    assert {one.request_id for one in found if one.finish_reason == "abort"} == aborted


def test_a_batch_never_takes_more_than_the_cache_it_may(nano_folder, monkeypatch):
    """Long prompts with few tokens beside short prompts with many: every row is as wide as the widest of both."""
    taken = []
    change = RowCache.add

    def noting(cache, *args):
        change(cache, *args)
        taken.append(sum(part.nbytes for layer in cache.layers for part in layer))

    monkeypatch.setattr(RowCache, "add", noting)
    requests = [
        Request(f"{i}", [5 + i] * (100 if i % 2 else 4), SamplingParams(max_new_tokens=4 if i % 2 else 100, seed=i))
        for i in range(12)
    ]
    limit = 1 << 18
    engine = make_engine(nano_folder, cache_bytes=limit)
    assert len(run(engine, requests)) == len(requests)
    assert limit // 2 < max(taken) <= limit


def joined_late(engine, first, later, step):
    """Completions of `first` by id, while `later` is submitted after `step` decode steps."""
    waiting, done = list(later), {}
    engine.counters = EngineCounters()
    for request in first:
        engine.submit(request)
    while (ended := engine.advance()) is not None:
        done |= {one.request_id: one for one in ended}
        if engine.counters.decode_steps >= step:
            while waiting:
                engine.submit(waiting.pop(0))
    return done


@pytest.mark.parametrize("step", [1, 5, 10])
def test_requests_that_come_later_join_a_batch_that_runs(nano_folder, step, monkeypatch):
    """Prompts that are longer than the slots in use, too; rows that have left give their slots back."""
    engine = make_engine(nano_folder)
    monkeypatch.setattr(TransformersEngine, "joins", True)  # as on an accelerator
    requests = make_requests([*PROMPTS, [7] * 60])
    alone = run(engine, requests)
    joined = joined_late(engine, requests[:4], requests[4:], step)
    assert engine.counters.decode_steps <= step + max(len(one.token_ids) for one in alone.values())
    for name, one in alone.items():
        assert joined[name].token_ids == one.token_ids
        assert joined[name].logprobs == pytest.approx(one.logprobs, abs=1e-5)


def test_on_a_cpu_requests_wait_for_the_batch_so_that_no_bit_depends_on_when_they_came(nano_folder):
    engine = make_engine(nano_folder)
    requests = make_requests(PROMPTS)
    first, later = run(engine, requests[:4]), run(engine, requests[4:])
    found = joined_late(engine, requests[:4], requests[4:], 3)
    assert {name: (one.token_ids, one.logprobs) for name, one in found.items()} == {
        name: (one.token_ids, one.logprobs) for name, one in {**first, **later}.items()
    }


def test_rows_that_leave_never_double_the_cache():
    class Layers(list):
        """Notes how much is held whenever one layer is replaced."""

        def __setitem__(self, index, value):
            super().__setitem__(index, value)
            sizes.append(sum(keys.nbytes for keys, _ in self))

    states = torch.arange(2 * 4 * 3, dtype=torch.float32).view(1, 2, 4, 3)
    prompts = [(states + i, states - i) for i in range(4)]
    cache = RowCache(prompts)
    cache.add(prompts, [Span(0, 4)] * 8, [5] * 8)
    whole, sizes = sum(keys.nbytes for keys, _ in cache.layers), []
    expected = [(keys[[1, 6]], values[[1, 6]]) for keys, values in cache.layers]
    cache.layers = Layers(cache.layers)
    cache.reorder_cache(torch.tensor([1, 6]))
    assert sizes == [whole - whole // 4 * 3 // 4 * (i + 1) for i in range(4)]
    for (keys, values), (kept_keys, kept_values) in zip(expected, cache.layers, strict=True):
        assert torch.equal(keys, kept_keys) and torch.equal(values, kept_values)


def test_repetition_penalty_makes_seen_tokens_rarer(nano_folder):
    strong = replace(PLAIN, temperature=0.0, repetition_penalty=1e6, max_new_tokens=10)
    completion = run(make_engine(nano_folder), make_requests(PROMPTS[:1], samples=1, sampling=strong))["0/0"]
    ids = completion.token_ids
    assert len(set(ids)) == len(ids)
    assert not set(ids) & set(PROMPTS[0])


def test_samples_follow_the_distribution(nano_folder):
    engine = make_engine(nano_folder)
    one = SamplingParams(max_new_tokens=1, temperature=0.2)
    requests = make_requests([[5, 6, 7]], samples=4000, sampling=one)
    counts = torch.zeros(engine.model.config.vocab_size)
    for completion in engine.sample(requests):
        counts[completion.token_ids[0]] += 1
    logits = completion_logits(load(nano_folder), pad([TokenSequence([5, 6, 7], [0])]))
    probs = (logits[0] / 0.2).softmax(-1).detach()
    likely = probs > 0.005
    expected = probs[likely] * 4000
    chi_square = float((((counts[likely] - expected) ** 2) / expected).sum())
    assert chi_square < 3.0 * int(likely.sum()) + 30


def test_streamed_tokens_equal_the_completion(nano_folder):
    engine = make_engine(nano_folder)
    request = make_requests(PROMPTS[:1], samples=1)[0]
    streamed = []
    engine.after_step = lambda: streamed.append([list(part) for part in engine.so_far(request.request_id)[:2]])
    whole = run(engine, [request])[request.request_id]
    ids, logprobs = whole.token_ids, whole.logprobs
    assert len(ids) > 2
    assert [one for one in streamed if one[0]] == [[ids[:n], logprobs[:n]] for n in range(1, len(ids))]


def test_the_model_is_left_in_the_mode_it_was_in(nano_folder):
    engine = make_engine(nano_folder)
    engine.model.train()
    run(engine, make_requests(PROMPTS))
    assert engine.model.training
    assert torch.is_grad_enabled()


@pytest.mark.parametrize("arch", ["mistral", "gemma2", "gemma3_text", "gemma4_text", "gpt_oss"])
@pytest.mark.parametrize("prompts", [None, [[30] * 7, [31] * 7]], ids=["padded", "one length"])
def test_windows_soft_caps_and_sinks_are_sampled_in_the_packed_way(small_model, arch, prompts):
    assert_sampled_as_it_is(small_model(arch), packed=True, prompts=prompts)


@pytest.mark.parametrize("arch", ["gpt2", "nemotron", "qwen3_next"])
def test_models_that_cannot_be_packed_are_sampled_with_their_own_attention(small_model, arch):
    linear = {"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8}
    linear |= {"linear_value_head_dim": 8, "num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16}
    linear |= {"layer_types": ["linear_attention", "full_attention"], "shared_expert_intermediate_size": 16}
    assert_sampled_as_it_is(small_model(arch, **(linear if arch == "qwen3_next" else {})), packed=False)


@pytest.mark.parametrize("arch", SAMPLED)
def test_prompts_of_several_lengths_are_one_batch_of_a_hybrid_model(arch):
    model = hybrid(arch)
    prompts = [[5, 6, 7, 8, 9, 10, 11], [20], [30] * 12, [40, 41, 42]]
    assert_sampled_as_it_is(model, packed=False, prompts=prompts)
    engine = TransformersEngine(model, eos_token_ids=[])
    requests = make_requests(prompts, samples=2, sampling=PLAIN)
    run(engine, requests)
    assert engine.counters.decode_steps == PLAIN.max_new_tokens
    assert engine.counters.prefill_tokens == sum(map(len, prompts))


def assert_sampled_as_it_is(model, *, packed, prompts=None):
    """The engine's log-probs are those of the model's own forward pass, row by row."""
    own = copy.deepcopy(model).eval()
    if packed:
        own.set_attn_implementation("eager")  # sdpa has no soft caps
    ends = replace(PLAIN, stop_token_ids=(1, 2, 3, 4, 5, 6))  # rows end at different times, so that they leave
    requests = make_requests(prompts or [*PROMPTS, [30] * 11], samples=5, sampling=ends)
    engine = TransformersEngine(model, eos_token_ids=[])
    assert (engine.obstacle is None) == packed
    completions = run(engine, requests)
    assert len({len(completion.token_ids) for completion in completions.values()}) > 2
    for request in requests:
        completion = completions[request.request_id]
        with torch.no_grad():
            logits = completion_logits(own, pad([TokenSequence(request.prompt_ids, completion.token_ids)]))
        expected = (logits / 0.9).log_softmax(-1).gather(1, torch.tensor(completion.token_ids)[:, None])[:, 0]
        assert (torch.tensor(completion.logprobs) - expected).abs().max() < 1e-5


def test_a_model_without_a_cache_of_the_usual_kind_is_refused(small_model):
    with pytest.raises(ConfigError, match="mamba: the transformers engine cannot sample"):
        TransformersEngine(small_model("mamba"), eos_token_ids=[])
