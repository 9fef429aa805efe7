"""The contract of `swift.rollout.engines.base`, case by case: new weights and adapters.

Which cases run on which backends is said in test_conformance_sampling.py.
"""

from __future__ import annotations

import time

import pytest
import torch
from conformance_checks import LONG, TOLERANCE, gap, need, while_it_samples
from conformance_parts import transport
from given_weights import Given, tensors_of
from oracle import PROMPT, ask, logprobs_of, noisy, run, with_adapter
from sources import asking

from swift.errors import EngineError, SyncFailed, Unsupported
from swift.rollout.weights.digest import StreamDigest
from swift.rollout.weights.policy import PolicyWeights

PAUSE_S = 0.3
"""How long a paused engine is looked at."""


@transport
def test_c12_new_weights_give_new_logprobs_under_the_new_version(subject):
    request, changed = ask("r", temperature=0.0), noisy(subject.model)
    before = run(subject.engine, [request])[0]
    source = PolicyWeights(changed)
    ack = subject.engine.load_weights(source, subject.next_version())
    digest, nbytes = StreamDigest(), 0
    for bucket in PolicyWeights(changed).buckets():
        for name, tensor in bucket.tensors:
            digest.add(name, tensor)
            nbytes += tensor.numel() * tensor.element_size()
    assert (ack.version, ack.tensors) == (subject.version, len(source.manifest()))
    assert (ack.nbytes, ack.digest) == (nbytes, digest.hexdigest())
    after = run(subject.engine, [request])[0]
    assert gap(changed, request, after) < TOLERANCE
    assert gap(changed, request, before) > 1e-2
    assert subject.engine.version == subject.version
    assert after.versions == [(subject.version, 0, len(after.token_ids))]


@transport
def test_c12_weights_may_come_in_any_number_of_buckets(subject):
    changed = noisy(subject.model)
    for source in (PolicyWeights(changed, move_model_batches=4), PolicyWeights(changed, bucket_bytes=1)):
        assert len(list(source.buckets())) > 3
        subject.engine.load_weights(source, subject.next_version())
        request = ask("r")
        assert gap(changed, request, run(subject.engine, [request])[0]) < TOLERANCE


@transport
def test_c13_weights_that_change_in_flight_show_in_the_version_spans(subject, endless):
    engine = subject.engine
    need(subject, engine.capabilities.in_flight_updates, "updates in flight")
    changed = noisy(subject.model)
    for attempt in range(4):  # on a busy machine the long one may have ended before the pause arrives
        long = ask(f"long-{attempt}", endless, temperature=0.0, max_new_tokens=LONG)
        short = ask(f"short-{attempt}", max_new_tokens=1)
        old = engine.version
        came = {}
        with asking(engine, long, short) as caller:
            for completion in caller.completions():
                came[completion.request_id] = completion
                if completion.request_id == short.request_id and long.request_id not in came:
                    caller.hold()
                    subject.sync(changed)
                    caller.release()
        done = came[long.request_id]
        if len(done.versions) > 1:
            break
        subject.sync(subject.model)
    (first, start, middle), (second, also_middle, stop) = done.versions
    assert (first, second) == (old, subject.version)
    assert start == 0 < middle == also_middle < stop == len(done.token_ids)
    gaps = (torch.tensor(done.logprobs) - logprobs_of(subject.model, long.prompt_ids, done.token_ids)).abs()
    assert float(gaps[:middle].max()) < TOLERANCE
    assert float(gaps[middle:].max()) > 1e-2


@transport
def test_c13_a_paused_engine_keeps_what_it_has(subject, endless):
    engine = subject.engine
    need(subject, engine.capabilities.in_flight_updates, "updates in flight")
    long = [ask(i, endless, temperature=0.0, max_new_tokens=LONG - i) for i in range(3)]
    with asking(engine, *long) as caller:
        caller.hold()
        caller.ask(ask("later"))
        time.sleep(PAUSE_S)
        assert caller.ended.empty()
        caller.release()
        reasons = {completion.request_id: completion.finish_reason for completion in caller.completions()}
    assert reasons.pop("later") in ("stop", "length")
    assert reasons == dict.fromkeys("012", "length")


@transport
def test_c13_weights_are_not_changed_under_requests_that_nobody_paused(subject, endless):
    request = ask("r", endless, temperature=0.0)

    def sync():
        with pytest.raises(EngineError):
            subject.sync(noisy(subject.model))

    completion = while_it_samples(subject.engine, request, sync)
    assert completion.finish_reason == "length"
    assert gap(subject.model, request, completion) < TOLERANCE


def faulty(model, *, listed=lambda tensors: tensors, sent):
    """The weights of a model in two buckets, with a fault between manifest and buckets."""
    tensors = tensors_of(model)
    sent = sent(tensors)
    return Given(listed(tensors), sent[: len(sent) // 2], sent[len(sent) // 2 :])


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
    changed = noisy(subject.model)
    subject.sync(changed)
    assert gap(changed, request, run(subject.engine, [request])[0]) < TOLERANCE


@transport
def test_c14_an_update_whose_manifest_lacks_a_tensor_is_refused(subject):
    fails(subject, faulty(noisy(subject.model), listed=without, sent=without))


@transport
def test_c14_an_update_that_ends_before_its_last_tensor_fails(subject):
    fails(subject, faulty(noisy(subject.model), sent=lambda tensors: tensors[:-1]))


def test_c14_a_tied_head_is_sent_or_not_missed(subject):
    """vLLM keeps a head of its own: one that is never sent would stay behind without a word."""
    tied = subject.model.config.tie_word_embeddings
    need(subject, tied, "tied head in its model")
    changed, request = noisy(subject.model), ask("r")
    source = Given(one for one in tensors_of(changed) if one[0] != "lm_head.weight")
    subject.engine.load_weights(source, subject.next_version())
    assert gap(changed, request, run(subject.engine, [request])[0]) < TOLERANCE


@pytest.mark.parametrize("fault", [halved, stranger], ids=["wrong shape", "unknown name"])
def test_c15_an_update_that_does_not_fit_the_model_is_refused(subject, fault):
    fails(subject, faulty(noisy(subject.model), listed=fault, sent=fault))


@transport
def test_c15_a_tensor_that_the_manifest_does_not_have_there_fails(subject):
    fails(subject, faulty(noisy(subject.model), sent=halved))


def test_c16_a_prompt_is_computed_again_after_new_weights(subject):
    prompt = PROMPT * 5
    run(subject.engine, [ask(f"warm {i}", prompt, seed=i) for i in range(3)])
    changed, request = noisy(subject.model, only="layers.0"), ask("r", prompt)
    subject.sync(changed)
    after = run(subject.engine, [request])[0]
    assert gap(changed, request, after) < TOLERANCE
    assert gap(subject.model, request, after) > 1e-3
    subject.engine.reset_caches()
    assert gap(changed, request, run(subject.engine, [request])[0]) < TOLERANCE


@transport
def test_c17_an_adapter_is_loaded_replaced_and_dropped(subject):
    need(subject, subject.engine.capabilities.lora, "LoRA adapters")
    request = ask("r")
    for seed in (1, 2, 3):
        policy, adapter = with_adapter(subject.model, seed=seed)
        ack = subject.engine.load_adapter(adapter, subject.next_version())
        assert (ack.version, ack.tensors, ack.digest) == (subject.version, len(adapter.tensors), adapter.digest())
        completion = run(subject.engine, [request])[0]
        assert gap(policy, request, completion) < TOLERANCE
        assert gap(subject.model, request, completion) > 1e-2
        assert completion.versions == [(subject.version, 0, len(completion.token_ids))]
    if subject.backend.place == "server":
        return  # which drops it when the run leaves
    subject.engine.drop_adapter()
    assert gap(subject.model, request, run(subject.engine, [request])[0]) < TOLERANCE


@transport
def test_c17_an_update_of_all_weights_ends_the_adapter(subject):
    need(subject, subject.engine.capabilities.lora, "LoRA adapters")
    _, adapter = with_adapter(subject.model, seed=1)
    subject.engine.load_adapter(adapter, subject.next_version())
    changed, request = noisy(subject.model), ask("r")
    subject.sync(changed)
    assert gap(changed, request, run(subject.engine, [request])[0]) < TOLERANCE
    if subject.backend.place == "server":
        return
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
    (_, former), (policy, adapter) = (with_adapter(subject.model, seed=seed) for seed in (1, 2))
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
    _, adapter = with_adapter(subject.model, seed=1)
    with pytest.raises(Unsupported):
        subject.engine.load_adapter(adapter, subject.next_version())


KINDS = ["embed_tokens", "lm_head", "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj",
         "input_layernorm", "post_attention_layernorm", "model.norm", "bias"]  # fmt: skip


def test_c24_every_kind_of_weight_arrives(subject):
    """Noise on one kind at a time: what is not taken over, or to the wrong place, shows in the log-probs."""
    requests = [ask(i, [80 + i] * 6, seed=i, max_new_tokens=8) for i in range(4)]
    present = [kind for kind in KINDS if any(kind in name for name, _ in subject.model.named_parameters())]
    assert len(present) >= 11
    for kind in present:
        changed = noisy(subject.model, scale=0.1, only=kind)
        subject.sync(changed)
        completions = run(subject.engine, requests)
        pairs = list(zip(requests, completions, strict=True))
        assert max(gap(changed, *pair) for pair in pairs) < TOLERANCE, kind
        assert max(gap(subject.model, *pair) for pair in pairs) > 1e-4, f"{kind}: its noise does not show"
    subject.sync(subject.model)
    for request, completion in zip(requests, run(subject.engine, requests), strict=True):
        assert gap(subject.model, request, completion) < TOLERANCE
