"""The contract of `swift.rollout.engines.base`, case by case: sampling.

Every case runs on the engines of this process (transformers, vLLM, LMDeploy), those marked `transport` also on engines
in actors, pools of them and servers. A capability that a backend does not name skips the case and says so.
"""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace

import pytest
from conformance_checks import LONG, TOLERANCE, gap, need
from conformance_parts import MAX_MODEL_LEN, transport
from oracle import PROMPT, all_logprobs, ask, run
from sources import asking, nothing_left, on_a_loop, outcomes, source_of

from swift.errors import EngineError, PromptTooLong

# --- C1 to C9: sampling ------------------------------------------------------------------------------------------


@transport
def test_c01_ids_pass_unchanged(subject):
    """Ids that no text stands for: cut characters, special tokens, the end token in the middle."""
    cut = subject.tokenizer.encode("é😀", add_special_tokens=False)[:-1]
    prompts = [cut, list(reversed(cut)), [subject.eos, 65, subject.eos], list(range(256, 263)), [0]]
    requests = [ask(i, prompt, seed=i) for i, prompt in enumerate(prompts)]
    for request, completion in zip(requests, run(subject.engine, requests), strict=True):
        assert all(0 <= token < subject.model.config.vocab_size for token in completion.token_ids)
        assert gap(subject.model, request, completion) < TOLERANCE


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.3])
def test_c02_a_logprob_per_token_of_the_distribution_that_was_drawn_from(subject, temperature):
    requests = [ask(i, seed=i, temperature=temperature) for i in range(4)]
    for request, completion in zip(requests, run(subject.engine, requests), strict=True):
        assert len(completion.logprobs) == len(completion.token_ids) > 0
        assert all(value <= 0 and value > float("-inf") for value in completion.logprobs)
        scored = replace(request, sampling=replace(request.sampling, temperature=1.0))
        raw = subject.engine.capabilities.logprob_support == "raw"
        assert gap(subject.model, scored if raw else request, completion) < TOLERANCE / (1.0 if raw else temperature)


def test_c02_the_logprobs_of_truncated_sampling_are_what_the_capabilities_say(subject):
    support = subject.engine.capabilities.logprob_support
    need(subject, support != "raw", "log-probs at the sampling temperature")
    requests = [ask(i, seed=i, top_k=5, temperature=0.8) for i in range(8)]
    for request, completion in zip(requests, run(subject.engine, requests), strict=True):
        full = all_logprobs(subject.model, request.prompt_ids, completion.token_ids, 0.8)
        best, kept = full.topk(5)
        for step, token in enumerate(completion.token_ids):
            assert token in kept[step]
            mass = best[step].logsumexp(0) if support == "truncated" else 0.0
            assert completion.logprobs[step] == pytest.approx(float(full[step, token] - mass), abs=TOLERANCE)


def test_c03_the_end_token_belongs_to_the_completion_and_only_ours_end_it(subject):
    requests = [ask(i, [60 + i] * 5, seed=i, max_new_tokens=60) for i in range(64)]
    completions = run(subject.engine, requests)
    assert {completion.finish_reason for completion in completions} == {"stop", "length"}
    for completion in completions:
        assert subject.eos not in completion.token_ids[:-1]
        assert (completion.token_ids[-1] == subject.eos) == (completion.finish_reason == "stop")
    pad = subject.tokenizer.pad_token_id  # among the end tokens of generation_config.json, and not among ours
    assert any(pad in completion.token_ids[:-1] for completion in completions)


def test_c04_length_ends_at_the_request_and_at_the_context(subject, endless):
    short, tight = run(
        subject.engine,
        [
            ask("short", endless, max_new_tokens=3, temperature=0.0),
            ask("tight", (endless * MAX_MODEL_LEN)[: MAX_MODEL_LEN - 1], max_new_tokens=50, temperature=0.0),
        ],
    )
    assert (len(short.token_ids), short.finish_reason) == (3, "length")
    assert len(tight.token_ids) == 1
    assert tight.finish_reason == "length" or tight.token_ids[-1] == subject.eos


def test_c05_eight_samples_of_a_prompt_differ_when_sampled_and_agree_when_greedy(subject):
    sampled = run(subject.engine, [ask(f"s{i}", seed=i, max_new_tokens=24) for i in range(8)])
    assert len({tuple(completion.token_ids) for completion in sampled}) == 8
    greedy = run(subject.engine, [ask(f"g{i}", seed=i, temperature=0.0) for i in range(8)])
    assert len({tuple(completion.token_ids) for completion in greedy}) == 1
    likeliest = all_logprobs(subject.model, PROMPT, greedy[0].token_ids).argmax(-1)
    assert likeliest.tolist() == greedy[0].token_ids


def test_c06_a_sample_depends_on_its_seed_and_not_on_its_company(subject):
    requests = [ask(i, PROMPT[: 5 + 7 * (i % 3)], seed=100 + i) for i in range(6)]
    first = [completion.token_ids for completion in run(subject.engine, requests)]
    again = [completion.token_ids for completion in run(subject.engine, requests[::-1])][::-1]
    alone = [run(subject.engine, [request])[0].token_ids for request in requests]
    assert first == again == alone
    other = [replace(r, sampling=replace(r.sampling, seed=r.sampling.seed + 1000)) for r in requests]
    assert [completion.token_ids for completion in run(subject.engine, other)] != first


def first_readable_pair(tokenizer, ids, step):
    """Whether two tokens from `step` are printable characters that did not occur before."""
    word, before = tokenizer.decode(ids[step : step + 2]), tokenizer.decode(ids[: step + 1])
    return (
        len(word) == 2 and word.isascii() and word.isprintable() and word not in before and ids[step] not in ids[:step]
    )


def test_c07_stop_strings_and_stop_ids_end_a_completion_and_belong_to_it(subject):
    requests = [ask(i, [40 + i] * 4, temperature=0.0, max_new_tokens=24) for i in range(32)]
    free = run(subject.engine, requests)
    request, whole, step = next(
        (request, completion, step)
        for request, completion in zip(requests, free, strict=True)
        for step in range(1, len(completion.token_ids) - 2)
        if first_readable_pair(subject.tokenizer, completion.token_ids, step)
    )
    word, token = subject.tokenizer.decode(whole.token_ids[step : step + 2]), whole.token_ids[step]
    by_word, by_id = run(
        subject.engine,
        [
            replace(request, request_id="word", sampling=replace(request.sampling, stop=(word,))),
            replace(request, request_id="id", sampling=replace(request.sampling, stop_token_ids=(token,))),
        ],
    )
    assert (by_word.token_ids, by_word.finish_reason) == (whole.token_ids[: step + 2], "stop")
    assert (by_id.token_ids, by_id.finish_reason) == (whole.token_ids[: step + 1], "stop")
    assert len(by_word.logprobs) == step + 2


def test_c08_prompts_of_1_to_400_tokens_together_equal_single_runs(subject):
    lengths = [1, 2, 3, 17, 64, 129, 255, 400]
    requests = [ask(n, [(7 * i + n) % 256 for i in range(n)], seed=n, max_new_tokens=12) for n in lengths]
    together = run(subject.engine, requests)
    for request, completion in zip(requests, together, strict=True):
        assert gap(subject.model, request, completion) < TOLERANCE
        alone = run(subject.engine, [request])[0]
        assert alone.token_ids == completion.token_ids
        assert alone.logprobs == pytest.approx(completion.logprobs, abs=TOLERANCE)
        assert gap(subject.model, request, alone) < TOLERANCE


@transport
def test_c09_what_cannot_be_sampled_is_refused_before_anything_is_and_the_engine_lives_on(subject):
    for length in (MAX_MODEL_LEN, MAX_MODEL_LEN + 100):
        (refused,) = outcomes(subject.engine, [ask("long", [65] * length)])
        assert isinstance(refused, PromptTooLong)
        assert (refused.length, refused.limit) == (length, MAX_MODEL_LEN)
        with pytest.raises(PromptTooLong):
            list(subject.engine.sample([ask("fits"), ask("long", [65] * length)]))
        assert nothing_left(subject.engine)
    with pytest.raises(EngineError):
        list(subject.engine.sample([ask("empty", [])]))
    first, second = outcomes(subject.engine, [ask("twice"), ask("twice")])
    assert first.request_id == "twice"
    assert isinstance(second, EngineError)
    assert nothing_left(subject.engine)


# --- C10, C11: ends ----------------------------------------------------------------------------------------------


@transport
def test_c10_an_abort_in_flight_delivers_the_tokens_so_far(subject, endless):
    engine = subject.engine
    long = {name: ask(name, endless, temperature=0.0, max_new_tokens=LONG) for name in ("first", "second", "third")}
    order, done = [], {}
    for completion in engine.sample([*long.values(), ask("short", max_new_tokens=4)]):
        order.append(completion.request_id)
        done[completion.request_id] = completion
        if completion.request_id == "short":
            engine.abort(["first", "first", "unknown", "short"])
            engine.abort(["first"])
        if completion.request_id == "first":
            engine.abort()
    assert sorted(order) == ["first", "second", "short", "third"]
    for name, request in long.items():
        assert done[name].finish_reason == "abort"
        assert 0 < len(done[name].token_ids) < LONG
        assert len(done[name].logprobs) == len(done[name].token_ids) == done[name].versions[-1][2]
        assert gap(subject.model, request, done[name]) < TOLERANCE
    engine.abort()
    assert nothing_left(engine)


@transport
def test_c11_each_of_200_shuffled_requests_arrives_exactly_once_some_aborted(subject):
    draw = random.Random(3)
    requests = [
        ask(f"{p}/{s}", [65 + p] * draw.randint(1, 40), seed=100 * p + s, max_new_tokens=draw.randint(1, 24))
        for p in range(25)
        for s in range(8)
    ]
    draw.shuffle(requests)
    later, came = requests[150:], []
    with asking(subject.engine, *requests[:150]) as caller:
        for completion in caller.completions():
            came.append(completion.request_id)
            if later:
                caller.ask(later.pop())
            if len(came) == 60:
                subject.engine.abort([request.request_id for request in requests[20:50]])
    assert sorted(came) == sorted(request.request_id for request in requests)


@transport
def test_c11_a_caller_that_leaves_early_leaves_nothing_behind(subject):
    stream = subject.engine.sample([ask(i, seed=i, max_new_tokens=4 + 20 * i) for i in range(6)])
    next(stream)
    stream.close()
    assert nothing_left(subject.engine)
    assert run(subject.engine, [ask("next")])[0].token_ids


# --- C25: awaited -----------------------------------------------------------------------------------------------------


@transport
def test_c25_others_run_while_it_decodes_and_may_end_it(subject, endless):
    source, looks = source_of(subject.engine), []

    async def look(task):
        while not task.done():
            looks.append(len(subject.engine.so_far("long")[0]))
            if len(looks) == 30:
                source.engine.abort(["long"])
            await asyncio.sleep(0.001)

    async def sample():
        task = asyncio.create_task(source.generate(ask("long", endless, temperature=0.0, max_new_tokens=LONG)))
        await look(task)
        await source.free()
        return task.result()

    completion = on_a_loop(sample)
    assert len(looks) >= 3
    assert (completion.finish_reason == "abort") <= (len(looks) >= 30)
    assert gap(subject.model, ask("long", endless), completion) < TOLERANCE


@transport
def test_c25_what_is_asked_for_later_joins(subject):
    source = source_of(subject.engine)
    waves = [[ask(f"{wave}/{i}", seed=10 * wave + i, max_new_tokens=6) for i in range(2)] for wave in range(4)]

    async def sample():
        tasks = []
        for wave in waves:
            tasks += [asyncio.create_task(source.generate(request)) for request in wave]
            await asyncio.wait(tasks[-2:], return_when=asyncio.FIRST_COMPLETED)
        return await asyncio.gather(*tasks)

    asked = [request for wave in waves for request in wave]
    for request, completion in zip(asked, on_a_loop(sample), strict=True):
        assert completion.request_id == request.request_id
        assert gap(subject.model, request, completion) < TOLERANCE
    assert nothing_left(subject.engine)


@transport
def test_c25_who_leaves_leaves_nothing_behind(subject, endless):
    source = source_of(subject.engine)

    async def leave():
        wanted = [ask("a", max_new_tokens=2), ask("b", endless, temperature=0.0, max_new_tokens=LONG)]
        tasks = [asyncio.create_task(source.generate(request)) for request in wanted]
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        tasks[1].cancel()
        await asyncio.wait(tasks)
        await source.free()

    on_a_loop(leave)
    assert nothing_left(subject.engine)
    assert run(subject.engine, [ask("next")])[0].token_ids


# --- C23: nothing ------------------------------------------------------------------------------


@transport
def test_c23_a_batch_that_is_refused_half_way_leaves_nothing(subject):
    """Half of it would be sampled for nobody."""
    with pytest.raises(EngineError):
        list(subject.engine.sample([ask("a"), ask("b"), ask("a")]))
    assert nothing_left(subject.engine)
    assert list(subject.engine.sample([])) == []
    subject.engine.abort()
    assert [one.request_id for one in run(subject.engine, [ask("c")])] == ["c"]
