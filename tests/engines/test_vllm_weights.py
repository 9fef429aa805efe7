"""New weights in a vLLM engine: they arrive exactly, or not at all. One engine per architecture."""

from __future__ import annotations

import pytest
import torch
from vllm_parts import LIMIT, drift, model_of, nudge, request, requests, require_vllm, sample
from vllm_parts import spec_of as spec

from swift.errors import EngineError, SyncFailed
from swift.models.tiny import build_tiny
from swift.rollout.engines.spec import build_engine
from swift.rollout.weight_sync.base import Bucket, StreamDigest, TensorInfo
from swift.rollout.weight_sync.policy import PolicyWeights

require_vllm()
pytestmark = pytest.mark.slow


class Tensors:
    """A source over plain tensors: one bucket for each, or all in one."""

    def __init__(self, tensors, *, apart=False):
        self.tensors, self.apart = list(tensors), apart

    def manifest(self):
        return tuple(TensorInfo.of(name, tensor) for name, tensor in self.tensors)

    def buckets(self):
        if self.apart:
            yield from (Bucket([pair]) for pair in self.tensors)
        else:
            yield Bucket(self.tensors)


@pytest.fixture(scope="module", params=["qwen2", "llama"])
def folder(request, tmp_path_factory):
    """Qwen2 ties the head to the embedding, Llama does not."""
    return build_tiny(tmp_path_factory.mktemp(request.param), arch=request.param, size="tiny")


@pytest.fixture(scope="module")
def engine(folder):
    made = build_engine(spec(folder))
    yield made
    made.close()


@pytest.fixture
def model(folder):
    return model_of(folder)


def state(model):
    return dict(model.state_dict())


def test_twenty_updates_leave_no_drift(engine, model):
    for version in range(1, 21):
        nudge(model, seed=version, scale=0.01)
        source = PolicyWeights(model, move_model_batches=version % 4 or None)
        ack = engine.load_weights(source, version)
        assert (ack.version, engine.version, ack.tensors, ack.rounded) == (
            version,
            version,
            len(source.manifest()),
            False,
        )
        assert drift(engine, model, requests(3)) <= LIMIT


def test_the_receipt_digests_what_the_model_took(engine, model):
    digest = StreamDigest()
    for bucket in PolicyWeights(model).buckets():
        for name, tensor in bucket.tensors:
            digest.add(name, tensor)
    assert engine.load_weights(PolicyWeights(model), 1).digest == digest.hexdigest()


def test_completions_carry_the_version_they_were_sampled_with(engine, model):
    engine.load_weights(PolicyWeights(model), 41)
    assert sample(engine, [request(tokens=5)])["r"].versions == [(41, 0, 5)]


def test_prompts_computed_with_old_weights_are_forgotten(engine, model):
    prompt = request("p", range(70), tokens=4)
    engine.load_weights(PolicyWeights(model), 1)
    sample(engine, [prompt])
    nudge(model, seed=3)
    engine.load_weights(PolicyWeights(model), 2)
    before = engine.counters.prefill_tokens
    assert drift(engine, model, [prompt]) <= LIMIT
    assert engine.counters.prefill_tokens - before == 70


def test_a_fused_matrix_may_arrive_in_parts(engine, model):
    """q, k and v in three buckets: the reload waits for the last one."""
    nudge(model, seed=4)
    engine.load_weights(Tensors(state(model).items(), apart=True), 3)
    assert drift(engine, model) <= LIMIT


def test_a_tied_head_that_is_not_sent_is_made_from_the_embedding(engine, model):
    if not model.config.tie_word_embeddings:
        pytest.skip("the head has weights of its own")
    nudge(model, seed=5)
    tensors = [(name, tensor) for name, tensor in state(model).items() if name != "lm_head.weight"]
    ack = engine.load_weights(Tensors(tensors), 4)
    assert (ack.tensors, ack.note) == (len(tensors), "the tied head was taken from the embedding")
    assert drift(engine, model) <= LIMIT


def test_every_missing_tensor_is_refused_before_anything_is_touched(engine, model):
    engine.load_weights(PolicyWeights(model), 5)
    greedy = sample(engine, requests(temperature=0.0))
    tensors = state(model)
    tied = {"lm_head.weight"} if model.config.tie_word_embeddings else set()
    for name in set(tensors) - tied:
        with pytest.raises(SyncFailed, match=f"{name} is missing"):
            engine.begin_update(Tensors((n, t) for n, t in tensors.items() if n != name).manifest(), 6)
    after = sample(engine, requests(temperature=0.0))
    assert {n: one.token_ids for n, one in after.items()} == {n: one.token_ids for n, one in greedy.items()}
    assert engine.version == 5


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: {**t, "model.norm.weight": torch.ones(3)}, r"norm.weight has shape \[3\], the engine's \[128\]"),
        (lambda t: {**t, "model.layers.9.input_layernorm.weight": torch.ones(128)}, "is not one of the model's"),
    ],
    ids=["shape", "unknown"],
)  # fmt: skip
def test_tensors_that_do_not_fit_are_refused_by_name(engine, model, change, words):
    with pytest.raises(SyncFailed, match=words):
        engine.load_weights(Tensors(change(state(model)).items()), 6)
    engine.load_weights(PolicyWeights(model), 7)
    assert drift(engine, model) <= LIMIT


def test_a_tensor_that_comes_twice_is_refused(engine, model):
    manifest = Tensors([*state(model).items(), ("model.norm.weight", model.model.norm.weight)]).manifest()
    with pytest.raises(SyncFailed, match=r"model\.norm\.weight comes twice"):
        engine.begin_update(manifest, 6)


def test_weights_are_refused_while_requests_are_outstanding(engine, model):
    engine.submit(request("busy", tokens=3))
    with pytest.raises(EngineError, match="1 requests are outstanding"):
        engine.load_weights(PolicyWeights(model), 8)
    assert [one.request_id for one in engine.stream()] == ["busy"]


def test_half_an_update_cannot_be_sampled_from_and_abort_voids_the_engine_until_rebuilt(engine, model):
    nudge(model, seed=9)
    source = PolicyWeights(model, move_model_batches=4)
    update = engine.begin_update(source.manifest(), 9)
    buckets = source.buckets()
    update.send(next(buckets))
    with pytest.raises(SyncFailed, match="version 9 is being loaded"):
        engine.submit(request())
    update.abort()
    update.abort()
    assert not engine.health().alive
    for attempt in (lambda: engine.submit(request()), lambda: engine.load_weights(source, 9), engine.reset_caches):
        with pytest.raises(SyncFailed, match=r"given up half-way.*rebuild the engine"):
            attempt()
    engine.rebuild()
    assert (engine.version, engine.health().alive) == (0, True)
    engine.load_weights(source, 9)
    assert drift(engine, model) <= LIMIT


def test_an_update_that_nothing_was_sent_of_can_be_given_up(engine, model):
    engine.load_weights(PolicyWeights(model), 10)
    engine.begin_update(PolicyWeights(model).manifest(), 11).abort()
    assert drift(engine, model) <= LIMIT
    assert engine.version == 10


def test_an_incomplete_stream_fails_at_commit_and_the_engine_is_rebuilt(engine, model):
    source = PolicyWeights(model, move_model_batches=2)
    update = engine.begin_update(source.manifest(), 12)
    update.send(next(source.buckets()))
    with pytest.raises(SyncFailed, match="tensors were sent; missing"):
        update.commit()
    update.abort()
    engine.rebuild()
    engine.load_weights(source, 12)
    assert drift(engine, model) <= LIMIT


def test_a_loader_that_fails_voids_the_engine_and_says_why(engine, model, monkeypatch):
    from swift.rollout.engines import vllm_versions

    load = vllm_versions.load_part

    def broken(worker, tensors):
        load(worker, tensors)
        raise RuntimeError("disk of the loader is on fire")

    monkeypatch.setattr(vllm_versions, "load_part", broken)
    with pytest.raises(SyncFailed, match="RuntimeError: disk of the loader is on fire; rebuild the engine"):
        engine.load_weights(PolicyWeights(model), 13)
    monkeypatch.undo()
    with pytest.raises(SyncFailed, match="on fire"):
        engine.submit(request())
    engine.rebuild()
    engine.load_weights(PolicyWeights(model), 13)
    assert drift(engine, model) <= LIMIT


def test_a_parameter_that_vllm_does_not_fill_fails_the_update(engine, model, monkeypatch):
    from swift.rollout.engines import vllm_versions

    load = vllm_versions.load_part
    monkeypatch.setattr(
        vllm_versions, "load_part", lambda worker, tensors: load(worker, tensors) - {"model.norm.weight"}
    )
    with pytest.raises(SyncFailed, match=r"nothing arrived in model\.norm\.weight"):
        engine.load_weights(PolicyWeights(model), 14)
    monkeypatch.undo()
    engine.rebuild()


def test_a_cache_that_is_not_reset_fails_the_update(engine, model, monkeypatch):
    monkeypatch.setattr(engine._llm, "reset_prefix_cache", lambda **_: False)
    with pytest.raises(SyncFailed, match="the prefix cache was not reset"):
        engine.load_weights(PolicyWeights(model), 15)
    assert engine.version != 15
    engine.rebuild()


def test_a_cache_that_was_not_reset_holds_nothing_for_other_weights(folder, model, monkeypatch):
    engine = build_engine(spec(folder, max_model_len=512))
    try:
        block = engine._llm.vllm_config.cache_config.block_size
        prompt = [5 + i % 200 for i in range(2 * block + 7)]
        first = sample(engine, [request("first", prompt, tokens=4)])["first"]
        again = sample(engine, [request("again", prompt, tokens=4)])["again"]
        assert again.token_ids == first.token_ids
        monkeypatch.setattr(engine._llm, "reset_prefix_cache", lambda **_: True)  # says so, and does not
        nudge(model, seed=1)
        engine.load_weights(PolicyWeights(model), 17)
        assert drift(engine, model, [request("after", prompt, tokens=4)]) <= LIMIT
    finally:
        engine.close()


def test_requests_kept_over_a_rebuild_end_with_abort(engine):
    engine.submit(request("kept", tokens=50))
    engine.pause("keep")
    engine.rebuild()
    assert [(one.request_id, one.finish_reason) for one in engine.stream()] == [("kept", "abort")]


def test_wider_weights_are_rounded_and_the_receipt_says_so(engine, model):
    double = {name: tensor.double() for name, tensor in state(model).items()}
    assert engine.load_weights(Tensors(double.items()), 16).rounded
    assert drift(engine, model) <= LIMIT
