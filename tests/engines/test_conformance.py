"""The contract of `swift.rollout.engines.base`, case by case.

Every case runs on the engines of this process (transformers, vLLM, LMDeploy), those marked `transport` also on engines
in actors, pools of them and servers. The oracle is a plain transformers forward pass over one sequence. A capability
that a backend does not name skips the case and says so.
"""

from __future__ import annotations

import copy
import random
import threading
import time
import weakref
from dataclasses import replace

import pytest
import torch
from conformance_parts import BACKENDS, GONE_LIMIT_S, MAX_MODEL_LEN, Traces, transport, with_noise

from swift.errors import EngineAsleep, EngineDead, EngineError, PromptTooLong, SyncFailed, Unsupported
from swift.models.checkpoint_tensors import read_adapter
from swift.rollout.weights.base import AdapterWeights, Bucket, TensorInfo
from swift.rollout.weights.digest import StreamDigest
from swift.rollout.weights.policy import PolicyWeights
from swift.types import Request, SamplingParams

TOLERANCE = 1e-5
"""Of a log-prob at temperature 1; logits that are divided by a temperature have their rounding divided too."""
PROMPT = list(b"The quick brown fox jumps over the lazy dog.")
KILLED_LIMIT_S = 10.0


def ask(request_id, prompt=PROMPT, **sampling):
    return Request(str(request_id), list(prompt), SamplingParams(**{"max_new_tokens": 16, **sampling}))


def run(engine, requests):
    done = {}
    for completion in engine.generate(requests):
        assert completion.request_id not in done, "came twice"
        done[completion.request_id] = completion
    assert set(done) == {request.request_id for request in requests}
    return [done[request.request_id] for request in requests]


@torch.no_grad()
def all_logprobs(model, prompt, ids, temperature=1.0):
    """[T, V]: the distribution of each token of a completion."""
    logits = model(input_ids=torch.tensor([[*prompt, *ids]])).logits[0, len(prompt) - 1 : -1]
    return (logits / temperature).log_softmax(-1)


def oracle(model, request, ids):
    full = all_logprobs(model, request.prompt_ids, ids, request.sampling.temperature or 1.0)
    return full.gather(1, torch.tensor(ids)[:, None])[:, 0]


def gap(model, request, completion):
    """Largest difference between the engine's log-probs and those of the oracle, whose own rounding is none of it."""
    if model not in EXACT:
        EXACT[model] = copy.deepcopy(model).double()
    exact = oracle(EXACT[model], request, completion.token_ids)
    return float((torch.tensor(completion.logprobs, dtype=torch.float64) - exact).abs().max())


def noisy(subject, *, seed=11, scale=0.05, only=""):
    return with_noise(copy.deepcopy(subject.model), seed=seed, scale=scale, only=only)


EXACT = weakref.WeakKeyDictionary()
"""Models that were asked for -> the same in float64; no case changes a model that it has asked."""
LONG = 450
"""Tokens of a completion that lasts until something stops it; with its prompt it fits the context."""


@pytest.fixture(scope="module")
def endless(shared_subject):
    """A prompt whose likeliest completion of LONG tokens has no end token."""
    model, eos = shared_subject.model, shared_subject.eos
    for start in range(40, 80):
        prompt = [start, 41, 42, 43]
        if eos not in likeliest(model, prompt, LONG, until=eos):
            return prompt
    pytest.fail("every greedy completion ends; change the model")


@torch.no_grad()
def likeliest(model, prompt, length, *, until=None):
    """The greedy completion, up to `until`."""
    ids, state = [], None
    while len(ids) < length and (not ids or ids[-1] != until):
        output = model(input_ids=torch.tensor([ids[-1:] or prompt]), past_key_values=state, use_cache=True)
        state = output.past_key_values
        ids.append(int(output.logits[0, -1].argmax()))
    return ids


def need(subject, has, what):
    if not has:
        pytest.skip(f"{subject.backend.name}: no {what}")


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
    need(subject, subject.engine.capabilities.seeded, "seeds")
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
        if subject.engine.capabilities.seeded:
            assert alone.token_ids == completion.token_ids
            assert alone.logprobs == pytest.approx(completion.logprobs, abs=TOLERANCE)
        assert gap(subject.model, request, alone) < TOLERANCE


@pytest.mark.parametrize("length", [MAX_MODEL_LEN, MAX_MODEL_LEN + 100])
@transport
def test_c09_a_prompt_that_leaves_no_room_is_refused_before_anything_is_sampled(subject, length):
    with pytest.raises(PromptTooLong) as caught:
        subject.engine.submit(ask("long", [65] * length))
    assert (caught.value.length, caught.value.limit) == (length, MAX_MODEL_LEN)
    with pytest.raises(PromptTooLong):
        list(subject.engine.generate([ask("fits"), ask("long", [65] * length)]))
    assert list(subject.engine.stream()) == []
    assert run(subject.engine, [ask("fits")])[0].token_ids


@transport
def test_c09_an_empty_prompt_and_an_id_in_use_are_refused_and_the_engine_lives_on(subject):
    with pytest.raises(EngineError):
        subject.engine.submit(ask("empty", []))
    subject.engine.submit(ask("twice"))
    with pytest.raises(EngineError):
        subject.engine.submit(ask("twice"))
    assert [completion.request_id for completion in subject.engine.stream()] == ["twice"]


# --- C10, C11: ends ----------------------------------------------------------------------------------------------


@transport
def test_c10_an_abort_in_flight_delivers_the_tokens_so_far(subject, endless):
    engine = subject.engine
    long = {name: ask(name, endless, temperature=0.0, max_new_tokens=LONG) for name in ("first", "second", "third")}
    for request in (*long.values(), ask("short", max_new_tokens=4)):
        engine.submit(request)
    order, done = [], {}
    for completion in engine.stream():
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
    assert list(engine.stream()) == []


@transport
def test_c10_a_request_that_had_not_begun_is_aborted_without_tokens_or_few(subject):
    subject.engine.submit(ask("early", max_new_tokens=LONG))
    subject.engine.abort(["early"])
    (completion,) = subject.engine.stream()
    assert (completion.request_id, completion.finish_reason) == ("early", "abort")
    assert len(completion.token_ids) == len(completion.logprobs) < LONG


@transport
def test_c11_each_of_200_shuffled_requests_arrives_exactly_once_some_aborted(subject):
    draw = random.Random(3)
    requests = [
        ask(f"{p}/{s}", [65 + p] * draw.randint(1, 40), seed=100 * p + s, max_new_tokens=draw.randint(1, 24))
        for p in range(25)
        for s in range(8)
    ]
    draw.shuffle(requests)
    for request in requests[:150]:
        subject.engine.submit(request)
    later, came = requests[150:], []
    for completion in subject.engine.stream():
        came.append(completion.request_id)
        if later:
            subject.engine.submit(later.pop())
        if len(came) == 60:
            subject.engine.abort([request.request_id for request in requests[20:50]])
    assert sorted(came) == sorted(request.request_id for request in requests)


@transport
def test_c11_a_caller_that_leaves_early_leaves_nothing_behind(subject):
    stream = subject.engine.generate([ask(i, seed=i, max_new_tokens=4 + 20 * i) for i in range(6)])
    next(stream)
    stream.close()
    assert list(subject.engine.stream()) == []
    assert run(subject.engine, [ask("next")])[0].token_ids


# --- C25: between two steps -------------------------------------------------------------------------------------------


@pytest.fixture
def hooked(subject):
    """Sets the engine's `between_steps`, and takes it away after the case."""

    def hook(work):
        subject.engine.between_steps = work

    yield hook
    if subject.engine is not None:
        subject.engine.between_steps = None


@transport
def test_c25_the_hook_is_called_while_it_decodes_in_the_thread_that_streams(subject, hooked, endless):
    calls, threads = [], set()

    def look():
        calls.append(time.monotonic())
        threads.add(threading.get_ident())
        if len(calls) == 30:
            subject.engine.abort()

    hooked(look)
    subject.engine.submit(ask("long", endless, temperature=0.0, max_new_tokens=LONG))
    (completion,) = subject.engine.stream()
    assert threads == {threading.get_ident()}
    assert len(calls) >= 3
    assert (completion.finish_reason == "abort") == (len(calls) > 30)
    assert gap(subject.model, ask("long", endless), completion) < TOLERANCE


@transport
def test_c25_what_the_hook_submits_comes_out_of_the_same_stream(subject, hooked):
    """Also when it comes as the last one has ended: as long as the hook adds, the stream goes on."""
    waves = [[ask(f"{wave}/{i}", seed=10 * wave + i, max_new_tokens=6) for i in range(2)] for wave in range(4)]
    came, todo = [], waves[1:]

    def look():
        if todo and len(came) == 2 * (4 - len(todo)):
            for request in todo.pop(0):
                subject.engine.submit(request)

    hooked(look)
    done = {}
    for completion in subject.engine.generate(waves[0]):
        came.append(completion.request_id)
        done[completion.request_id] = completion
    assert sorted(came) == [request.request_id for wave in waves for request in wave]
    for request in (request for wave in waves for request in wave):
        assert gap(subject.model, request, done[request.request_id]) < TOLERANCE
    assert list(subject.engine.stream()) == []


@transport
def test_c25_a_hook_may_submit_and_abort_while_others_decode(subject, hooked, endless):
    engine, calls = subject.engine, []

    def look():
        calls.append(1)
        if len(calls) == 2:
            engine.submit(ask("added", max_new_tokens=4))
        if len(calls) == 4:
            engine.abort(["long"])

    hooked(look)
    requests = [ask("long", endless, temperature=0.0, max_new_tokens=LONG), ask("short", max_new_tokens=4)]
    reasons = {completion.request_id: completion.finish_reason for completion in engine.generate(requests)}
    assert set(reasons) == {"long", "short", "added"}
    assert reasons["long"] in ("abort", "length")  # a fast engine has ended it by then
    assert reasons["added"] in ("length", "stop")


@pytest.mark.parametrize("call", [1, 2])
@transport
def test_c25_what_the_hook_raises_ends_the_stream_and_the_engine_goes_on(subject, hooked, endless, call):
    class Odd(Exception):
        pass

    calls = []

    def look():
        calls.append(1)
        if len(calls) == call:
            raise Odd("as told")

    hooked(look)
    with pytest.raises(Odd, match="as told"):
        list(subject.engine.generate([ask("long", endless, temperature=0.0, max_new_tokens=LONG), ask("short")]))
    subject.engine.between_steps = None
    subject.engine.abort()
    assert {completion.finish_reason for completion in subject.engine.stream()} <= {"abort", "length", "stop"}
    assert list(subject.engine.stream()) == []
    request = ask("next")
    assert gap(subject.model, request, run(subject.engine, [request])[0]) < TOLERANCE


@transport
def test_c25_a_caller_that_leaves_early_leaves_nothing_of_the_hook_behind(subject, hooked, endless):
    todo = [ask("added", endless, temperature=0.0, max_new_tokens=LONG)]
    calls = []

    def look():
        calls.append(1)
        if todo:
            subject.engine.submit(todo.pop())

    hooked(look)
    stream = subject.engine.generate([ask("a", max_new_tokens=2), ask("b", max_new_tokens=100)])
    next(stream)
    before = len(calls)
    stream.close()
    assert len(calls) == before
    hooked(None)
    assert list(subject.engine.stream()) == []
    assert run(subject.engine, [ask("next")])[0].token_ids


# --- C12 to C17: weights -----------------------------------------------------------------------------------------


@transport
def test_c12_new_weights_give_new_logprobs_under_the_new_version(subject):
    request, changed = ask("r", temperature=0.0), noisy(subject)
    before = run(subject.engine, [request])[0]
    source = PolicyWeights(changed)
    ack = subject.engine.load_weights(source, subject.next_version())
    digest, nbytes = StreamDigest(), 0
    for bucket in PolicyWeights(changed).buckets():
        for name, tensor in bucket.tensors:
            digest.add(name, tensor)
            nbytes += tensor.numel() * tensor.element_size()
    assert (ack.version, ack.tensors) == (subject.version, len(source.manifest()))
    assert (ack.nbytes, ack.digest, ack.rounded) == (nbytes, digest.hexdigest(), False)
    after = run(subject.engine, [request])[0]
    assert gap(changed, request, after) < TOLERANCE
    assert gap(changed, request, before) > 1e-2
    assert subject.engine.version == subject.version
    assert subject.engine.health().version == subject.version
    assert after.versions == [(subject.version, 0, len(after.token_ids))]


@transport
def test_c12_weights_may_come_in_any_number_of_buckets(subject):
    changed = noisy(subject)
    for source in (PolicyWeights(changed, move_model_batches=4), PolicyWeights(changed, bucket_bytes=1)):
        assert len(list(source.buckets())) > 3
        subject.engine.load_weights(source, subject.next_version())
        request = ask("r")
        assert gap(changed, request, run(subject.engine, [request])[0]) < TOLERANCE


@transport
def test_c13_versions_cover_the_completion(subject):
    completion = run(subject.engine, [ask("r")])[0]
    assert completion.versions == [(subject.engine.version, 0, len(completion.token_ids))]


@transport
def test_c13_weights_that_change_in_flight_show_in_the_version_spans(subject, endless):
    engine = subject.engine
    need(subject, engine.capabilities.in_flight_updates, "updates in flight")
    changed = noisy(subject)
    for attempt in range(4):  # on a busy machine the long one may have ended before the pause arrives
        long = ask(f"long-{attempt}", endless, temperature=0.0, max_new_tokens=LONG)
        short = ask(f"short-{attempt}", max_new_tokens=1)
        old = engine.version
        engine.submit(long)
        engine.submit(short)
        came = {}
        for completion in engine.stream():
            came[completion.request_id] = completion
            if completion.request_id == short.request_id and long.request_id not in came:
                engine.pause("keep")
                subject.sync(changed)
                engine.resume()
        done = came[long.request_id]
        if len(done.versions) > 1:
            break
        subject.sync(subject.model)
    (first, start, middle), (second, also_middle, stop) = done.versions
    assert (first, second) == (old, subject.version)
    assert start == 0 < middle == also_middle < stop == len(done.token_ids)
    gaps = (torch.tensor(done.logprobs) - oracle(subject.model, long, done.token_ids)).abs()
    assert float(gaps[:middle].max()) < TOLERANCE
    assert float(gaps[middle:].max()) > 1e-2


@pytest.mark.parametrize("mode", ["abort", "wait", "keep"])
@transport
def test_c13_a_paused_engine_delivers_what_ended_and_keeps_the_rest(subject, endless, mode):
    engine = subject.engine
    for i in range(3):
        engine.submit(ask(i, endless, temperature=0.0, max_new_tokens=6 + i))
    engine.pause(mode)
    paused = list(engine.stream())
    engine.submit(ask("later"))
    assert list(engine.stream()) == []
    engine.resume()
    resumed = list(engine.stream())
    ended = {"abort": ["abort"] * 3, "wait": ["length"] * 3, "keep": []}[mode]
    assert [completion.finish_reason for completion in paused] == ended
    assert sorted(completion.request_id for completion in paused + resumed) == ["0", "1", "2", "later"]


@transport
def test_c13_weights_are_not_changed_under_requests_that_nobody_paused(subject):
    subject.engine.submit(ask("r"))
    with pytest.raises(EngineError):
        subject.sync(noisy(subject))
    (completion,) = subject.engine.stream()
    assert gap(subject.model, ask("r"), completion) < TOLERANCE


class Faulty:
    """The weights of a model, with a fault between manifest and buckets.

    Args:
        listed: changes the manifest. sent: changes the tensors.
    """

    def __init__(self, model, *, listed=lambda tensors: tensors, sent=lambda tensors: tensors):
        self.tensors = [one for bucket in PolicyWeights(model).buckets() for one in bucket.tensors]
        self.listed, self.sent = listed, sent

    def manifest(self):
        return tuple(TensorInfo.of(name, tensor) for name, tensor in self.listed(self.tensors))

    def buckets(self):
        sent = self.sent(self.tensors)
        yield Bucket(sent[: len(sent) // 2])
        yield Bucket(sent[len(sent) // 2 :])


VICTIM = "model.layers.2.self_attn.k_proj.weight"


def without(tensors):
    return [(name, tensor) for name, tensor in tensors if name != VICTIM]


def halved(tensors):
    return [(name, tensor[::2].contiguous() if name == VICTIM else tensor) for name, tensor in tensors]


def stranger(tensors):
    return [*tensors, ("model.layers.99.self_attn.k_proj.weight", torch.zeros(2, 2))]


def fails(subject, source):
    """The update is refused and nothing is sampled with half of it; the engine goes on, or is rebuilt and as new."""
    request, before = ask("r"), subject.engine.version
    with pytest.raises(SyncFailed):
        subject.engine.load_weights(source, subject.next_version())
    try:
        sampled = run(subject.engine, [request])[0]
    except EngineError:
        assert not subject.engine.health().alive or "asleep" in subject.engine.health().detail
        subject.engine.rebuild()
        assert subject.engine.version == 0
        assert gap(subject.model, request, run(subject.engine, [request])[0]) < TOLERANCE
    else:
        assert sampled.versions == [(before, 0, len(sampled.token_ids))]
        assert gap(subject.model, request, sampled) < TOLERANCE
    changed = noisy(subject)
    subject.sync(changed)
    assert gap(changed, request, run(subject.engine, [request])[0]) < TOLERANCE


@transport
def test_c14_an_update_whose_manifest_lacks_a_tensor_is_refused(subject):
    fails(subject, Faulty(noisy(subject), listed=without, sent=without))


@transport
def test_c14_an_update_that_ends_before_its_last_tensor_fails(subject):
    fails(subject, Faulty(noisy(subject), sent=lambda tensors: tensors[:-1]))


def test_c14_a_tied_head_is_sent_or_not_missed(subject):
    """vLLM keeps a head of its own: one that is never sent would stay behind without a word."""
    tied = subject.model.config.tie_word_embeddings
    need(subject, tied, "tied head in its model")
    changed, request = noisy(subject), ask("r")
    no_head = [one for one in Faulty(changed).tensors if one[0] != "lm_head.weight"]
    source = Faulty(changed, listed=lambda tensors: no_head, sent=lambda tensors: no_head)
    try:
        subject.engine.load_weights(source, subject.next_version())
    except SyncFailed:
        subject.engine.rebuild()
    else:
        assert gap(changed, request, run(subject.engine, [request])[0]) < TOLERANCE


@pytest.mark.parametrize("fault", [halved, stranger], ids=["wrong shape", "unknown name"])
def test_c15_an_update_that_does_not_fit_the_model_is_refused(subject, fault):
    fails(subject, Faulty(noisy(subject), listed=fault, sent=fault))


@transport
def test_c15_a_tensor_that_the_manifest_does_not_have_there_fails(subject):
    fails(subject, Faulty(noisy(subject), sent=halved))


def test_c16_a_prompt_is_computed_again_after_new_weights(subject):
    prompt = PROMPT * 5
    run(subject.engine, [ask(f"warm {i}", prompt, seed=i) for i in range(3)])
    changed, request = noisy(subject, only="layers.0"), ask("r", prompt)
    subject.sync(changed)
    after = run(subject.engine, [request])[0]
    assert gap(changed, request, after) < TOLERANCE
    assert gap(subject.model, request, after) > 1e-3
    subject.engine.reset_caches()
    assert gap(changed, request, run(subject.engine, [request])[0]) < TOLERANCE


def with_adapter(subject, *, seed, rank=4, alpha=16.0, **options):
    """The oracle with a LoRA adapter that changes something, and the adapter alone."""
    from peft import LoraConfig, get_peft_model

    options = {"target_modules": ["q_proj", "k_proj", "v_proj", "o_proj", "up_proj", "down_proj"], **options}
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        policy = get_peft_model(
            copy.deepcopy(subject.model), LoraConfig(task_type="CAUSAL_LM", r=rank, lora_alpha=alpha, **options)
        ).eval()
    with_noise(policy, seed=seed, scale=0.05, only="lora_")
    return policy, AdapterWeights(*read_adapter(policy))


@transport
def test_c17_an_adapter_is_loaded_replaced_and_dropped(subject):
    need(subject, subject.engine.capabilities.lora, "LoRA adapters")
    request = ask("r")
    for seed in (1, 2, 3):
        policy, adapter = with_adapter(subject, seed=seed)
        ack = subject.engine.load_adapter(adapter, subject.next_version())
        assert (ack.version, ack.tensors, ack.digest) == (subject.version, len(adapter.tensors), adapter.digest())
        completion = run(subject.engine, [request])[0]
        assert gap(policy, request, completion) < TOLERANCE
        assert gap(subject.model, request, completion) > 1e-2
        assert completion.versions == [(subject.version, 0, len(completion.token_ids))]
    subject.engine.drop_adapter()
    assert gap(subject.model, request, run(subject.engine, [request])[0]) < TOLERANCE


@transport
def test_c17_an_update_of_all_weights_ends_the_adapter(subject):
    need(subject, subject.engine.capabilities.lora, "LoRA adapters")
    _, adapter = with_adapter(subject, seed=1)
    subject.engine.load_adapter(adapter, subject.next_version())
    changed, request = noisy(subject), ask("r")
    subject.sync(changed)
    assert gap(changed, request, run(subject.engine, [request])[0]) < TOLERANCE
    subject.engine.drop_adapter()
    assert gap(changed, request, run(subject.engine, [request])[0]) < TOLERANCE


@pytest.mark.parametrize("level", [1, 2])
@transport
def test_c17_an_adapter_arrives_while_only_the_weights_are_awake(subject, level):
    engine = subject.engine
    need(subject, engine.capabilities.lora and level in engine.capabilities.sleep_levels, "LoRA adapters and sleep")
    if level == 2 and not subject.spec.lora:
        pytest.skip(f"{subject.backend.name}: drops its base weights")
    request = ask("r")
    (_, former), (policy, adapter) = (with_adapter(subject, seed=seed) for seed in (1, 2))
    engine.load_adapter(former, subject.next_version())
    run(engine, [request])  # its prompt is cached with the former adapter
    engine.sleep(level)
    assert engine.wake(["weights"]) is False
    engine.load_adapter(adapter, subject.next_version())
    assert engine.wake(["kv_cache"]) is True
    completion = run(engine, [request])[0]
    assert gap(policy, request, completion) < TOLERANCE
    assert completion.versions[0][0] == subject.version


@transport
def test_c17_without_the_capability_an_adapter_is_refused(subject):
    if subject.engine.capabilities.lora:
        pytest.skip(f"{subject.backend.name}: loads LoRA adapters")
    _, adapter = with_adapter(subject, seed=1)
    with pytest.raises(Unsupported):
        subject.engine.load_adapter(adapter, subject.next_version())


# --- C18 to C20: sleep -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", [1, 2])
@transport
def test_c18_the_same_greedy_tokens_before_and_after_sleep(subject, level):
    engine = subject.engine
    need(subject, level in engine.capabilities.sleep_levels, f"sleep level {level}")
    requests = [ask(i, [70 + i] * 9, temperature=0.0) for i in range(4)]
    before = run(engine, requests)
    report = engine.sleep(level)
    assert report.freed_bytes >= 0
    if level == 2:
        assert engine.wake(["weights"]) is False
        subject.sync(subject.model)
        assert engine.wake(["kv_cache"]) is True
    else:
        assert engine.wake() is True
    after = run(engine, requests)
    assert [completion.token_ids for completion in after] == [completion.token_ids for completion in before]
    for one, other in zip(before, after, strict=True):
        assert one.logprobs == pytest.approx(other.logprobs, abs=TOLERANCE)


@transport
def test_c19_weights_wake_first_and_a_wrong_tag_is_an_error(subject):
    engine = subject.engine
    need(subject, 1 in engine.capabilities.sleep_levels, "sleep level 1")
    assert engine.wake() is True
    engine.sleep(1)
    engine.sleep(1)
    with pytest.raises(EngineAsleep):
        engine.wake(["kv_cache"])
    with pytest.raises(Unsupported):
        engine.wake(["weights", "kv-cache"])
    assert engine.wake(["weights"]) is False
    assert engine.wake(["weights"]) is False
    with pytest.raises(EngineAsleep):
        engine.submit(ask("early"))
    engine.sleep(1)  # half awake is not asleep
    with pytest.raises(EngineAsleep):
        engine.wake(["kv_cache"])
    assert engine.wake(["weights"]) is False
    assert engine.wake(["kv_cache"]) is True
    assert run(engine, [ask("r")])[0].token_ids


@transport
def test_c19_an_unknown_sleep_level_is_refused(subject):
    levels = subject.engine.capabilities.sleep_levels
    if {1, 2} <= set(levels):
        pytest.skip(f"{subject.backend.name}: has every level")
    with pytest.raises(Unsupported):
        subject.engine.sleep(2 if 2 not in levels else 1)
    assert subject.engine.sleep(0).freed_bytes == 0
    assert run(subject.engine, [ask("r")])[0].token_ids


@pytest.mark.parametrize("level", [1, 2])
@transport
def test_c20_a_sleeping_engine_neither_samples_nor_takes_weights(subject, level):
    engine = subject.engine
    need(subject, level in engine.capabilities.sleep_levels, f"sleep level {level}")
    assert engine.health().detail == ""
    engine.sleep(level)
    assert engine.health().alive
    assert "asleep" in engine.health().detail
    with pytest.raises(EngineAsleep):
        engine.submit(ask("r"))
    with pytest.raises(EngineAsleep):
        list(engine.generate([ask("r")]))
    with pytest.raises(EngineAsleep):
        subject.sync(subject.model)
    engine.wake()
    if level == 2 and not subject.spec.lora:  # awake, with weights of no version
        assert "dropped" in engine.health().detail
        with pytest.raises(EngineAsleep):
            engine.submit(ask("r"))
        subject.sync(subject.model)
    assert engine.health().detail == ""
    assert gap(subject.model, ask("r"), run(engine, [ask("r")])[0]) < TOLERANCE


@transport
def test_c20_a_sleeping_engine_takes_no_adapter(subject):
    engine = subject.engine
    need(subject, engine.capabilities.lora and 1 in engine.capabilities.sleep_levels, "LoRA adapters and sleep")
    engine.sleep(1)
    with pytest.raises(EngineAsleep):
        engine.load_adapter(with_adapter(subject, seed=1)[1], subject.next_version())
    engine.wake()
    subject.sync(subject.model)
    assert gap(subject.model, ask("r"), run(engine, [ask("r")])[0]) < TOLERANCE


@transport
def test_c20_an_engine_with_work_does_not_fall_asleep(subject):
    need(subject, 1 in subject.engine.capabilities.sleep_levels, "sleep level 1")
    subject.engine.submit(ask("r"))
    with pytest.raises(EngineError):
        subject.engine.sleep(1)
    assert [completion.request_id for completion in subject.engine.stream()] == ["r"]


# --- C23, C24: nothing and everything ------------------------------------------------------------------------------


@transport
def test_c23_a_batch_that_is_refused_half_way_leaves_nothing(subject):
    """Half of it would come out of somebody else's stream."""
    with pytest.raises(EngineError):
        list(subject.engine.generate([ask("a"), ask("b"), ask("a")]))
    assert list(subject.engine.stream()) == []
    assert [one.request_id for one in run(subject.engine, [ask("c")])] == ["c"]


@transport
def test_c23_an_empty_batch_gives_nothing(subject):
    assert list(subject.engine.generate([])) == []
    assert list(subject.engine.stream()) == []
    subject.engine.abort()
    assert list(subject.engine.stream()) == []


KINDS = ["embed_tokens", "lm_head", "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj",
         "input_layernorm", "post_attention_layernorm", "model.norm", "bias"]  # fmt: skip


def test_c24_every_kind_of_weight_arrives(subject):
    """Noise on one kind at a time: what is not taken over, or to the wrong place, shows in the log-probs."""
    requests = [ask(i, [80 + i] * 6, seed=i, max_new_tokens=8) for i in range(4)]
    present = [kind for kind in KINDS if any(kind in name for name, _ in subject.model.named_parameters())]
    assert len(present) >= 11
    for kind in present:
        changed = noisy(subject, scale=0.1, only=kind)
        subject.sync(changed)
        completions = run(subject.engine, requests)
        pairs = list(zip(requests, completions, strict=True))
        assert max(gap(changed, *pair) for pair in pairs) < TOLERANCE, kind
        assert max(gap(subject.model, *pair) for pair in pairs) > 1e-4, f"{kind}: its noise does not show"
    subject.sync(subject.model)
    for request, completion in zip(requests, run(subject.engine, requests), strict=True):
        assert gap(subject.model, request, completion) < TOLERANCE


# --- C21, C22: ends, last because the engine has to be started again after each --------------------------------------


FIRST_KILLED = next(one for one in BACKENDS if one.place != "here")


@pytest.mark.parametrize("victim", ["first process", "biggest process"])
@transport
def test_c21_an_engine_killed_while_it_decodes_is_dead_within_seconds(subject, endless, victim):
    if subject.backend.place == "here":
        pytest.skip(f"{subject.backend.name}: shares this process")
    if victim == "first process" and subject.backend != FIRST_KILLED:
        pytest.skip(f"{subject.backend.name}: only the biggest process is killed, because starts take long")
    engine = subject.engine
    engine.info()  # it has started
    subject.traces.look()
    for i in range(8):
        engine.submit(ask(i, endless, temperature=0.0, max_new_tokens=LONG))
    engine.submit(ask("short", max_new_tokens=2))
    killed = None
    with pytest.raises(EngineDead) as caught:
        for _ in engine.stream():
            if killed is None:
                subject.kill(victim)
                killed = time.monotonic()
    assert killed is not None
    assert time.monotonic() - killed < KILLED_LIMIT_S
    assert len(caught.value.problems) == 1
    assert not engine.health().alive
    with pytest.raises(EngineDead):
        engine.submit(ask("after"))
    subject.close()
    assert subject.traces.wait_until_gone() == []


@transport
def test_c22_close_leaves_no_process_port_or_segment(subject):
    engine = subject.engine
    subject.sync(noisy(subject))
    assert run(engine, [ask("r")])[0].token_ids
    subject.traces.look()
    started = time.monotonic()
    subject.close()
    assert time.monotonic() - started < GONE_LIMIT_S
    assert subject.traces.wait_until_gone() == []
    engine.close()
    with pytest.raises(EngineDead):
        engine.submit(ask("after"))
    assert not engine.health().alive


def test_c22_the_traces_of_processes_ports_and_segments_are_seen(tmp_path):
    """The check of the case above, against a process that leaves all of them behind until it is killed."""
    import subprocess
    import sys

    code = (
        "import socket, sys, time; from multiprocessing import shared_memory;"
        "memory = shared_memory.SharedMemory(create=True, size=100);"
        "port = socket.create_server(('127.0.0.1', 0)); path = socket.socket(socket.AF_UNIX);"
        f"path.bind({str(tmp_path / 's')!r}); path.listen(); print('up', flush=True); sys.stdin.read();"
        "memory.close(); memory.unlink()"
    )
    traces = Traces()
    process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert process.stdout.readline() == b"up\n"
        traces.look()
        kinds = {line.split()[0] for line in traces.left()}
        assert kinds == {"process", "port", "segment", "socket"}
    finally:
        process.communicate(timeout=30)
    assert {line.split()[0] for line in traces.wait_until_gone(1.0)} == {"socket"}
