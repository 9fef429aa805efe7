"""A vLLM engine whose weights stay as they come, as on a GPU: updates are written in place, or there is one memory.

vLLM's packing for CPUs is switched off before the engine starts; with it every update is a reload, see
test_vllm_weights.py.
"""

from __future__ import annotations

import logging

import pytest
import torch
from small_runs import OneRank
from vllm_parts import ENDS, LIMIT, drift, model_of, nudge, request, requests, require_vllm, sample
from vllm_parts import spec_of as spec

from swift.errors import EngineError, SyncFailed
from swift.models.tiny import build_tiny
from swift.rollout.engines.spec import build_engine
from swift.rollout.engines.vllm_weights import DirectUpdate
from swift.rollout.parity import ParityCheck
from swift.rollout.weight_sync.policy import LiveWeights, PolicyWeights
from swift.rollout.weight_sync.publisher import WeightPublisher
from swift.types import Prompt, SamplingParams

require_vllm()
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", params=["qwen2", "llama"])
def folder(request, tmp_path_factory):
    """Qwen2 ties the head to the embedding, Llama does not."""
    return build_tiny(tmp_path_factory.mktemp(request.param), arch=request.param, size="tiny", init_std=0.1)


on_one = pytest.mark.parametrize("folder", ["qwen2"], indirect=True, scope="module")
"""For what does not depend on the architecture."""


@pytest.fixture(scope="module")
def engine(folder):
    import vllm._custom_ops as operators

    packs, operators._supports_onednn = operators._supports_onednn, False
    try:
        made = build_engine(spec(folder))
        yield made
        made.close()
    finally:
        operators._supports_onednn = packs


@pytest.fixture
def model(engine, folder):
    """A policy that shares nothing yet, and an engine that has proven where its weights lie."""
    engine.separate()
    engine._parted = ""
    made = model_of(folder)
    if not engine.health().alive:
        engine.rebuild()
    engine.load_weights(PolicyWeights(made), 0)
    return made


def publisher(engine, model, **settings):
    return WeightPublisher(
        engine, source=lambda: PolicyWeights(model), live=LiveWeights(model), ranks=OneRank(), **settings
    )


def is_shared(engine, model):
    return engine._shared and engine._layout.shared_with(LiveWeights(model)())


def engine_weights(engine):
    runner = engine._llm.model_executor.driver_worker.model_runner
    return {name: one.detach().clone() for name, one in runner.get_model().named_parameters()}


def train(model, step):
    """A step of AdamW on some tokens."""
    model.train().requires_grad_(True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    ids = (torch.arange(40)[None] * (step + 3)) % 250
    model(input_ids=ids, labels=ids).loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    model.eval()


def test_twenty_updates_in_place_leave_no_drift(engine, model):
    for version in range(1, 21):
        nudge(model, seed=version, scale=0.01)
        source = PolicyWeights(model, move_model_batches=version % 4 or None)
        ack = engine.load_weights(source, version)
        assert isinstance(engine._update, DirectUpdate)
        assert (ack.version, engine.version, ack.tensors) == (version, version, len(source.manifest()))
        assert drift(engine, model, requests(3)) <= LIMIT


def test_twenty_publications_of_one_memory_leave_no_drift(engine, model):
    made = publisher(engine, model)
    made.publish(0)
    assert is_shared(engine, model)
    for step in range(1, 21):
        train(model, step)
        ack = made.update(step)
        assert (ack.version, engine.version, ack.digest, ack.note) == (step + 1, step + 1, "", "one memory for both")
        assert drift(engine, model, requests(3)) <= LIMIT
    assert is_shared(engine, model)


def test_a_reload_and_one_memory_give_the_same_parameters(engine, model, monkeypatch):
    made = publisher(engine, model)
    made.publish(0)
    train(model, 1)
    made.update(1)
    shared = engine_weights(engine)
    made.separate()
    engine._layout = None
    engine.load_weights(PolicyWeights(model), 2)
    assert not isinstance(engine._update, DirectUpdate)
    reloaded = engine_weights(engine)
    assert shared.keys() == reloaded.keys()
    assert all(torch.equal(shared[name], reloaded[name]) for name in shared)


@on_one
def test_prompts_computed_before_a_step_are_forgotten(engine, model):
    made = publisher(engine, model)
    made.publish(0)
    prompt = request("p", range(70), tokens=4)
    sample(engine, [prompt])
    train(model, 2)
    made.update(1)
    before = engine.counters.prefill_tokens
    assert drift(engine, model, [prompt]) <= LIMIT
    assert engine.counters.prefill_tokens - before == 70


@on_one
def test_parameters_that_move_are_copied_from_then_on_and_that_is_said_once(engine, model, caplog):
    made = publisher(engine, model)
    made.publish(0)
    model.model.norm.weight.data = model.model.norm.weight.data.clone()
    with caplog.at_level(logging.INFO):
        for step in (1, 2, 3):
            train(model, step)
            assert made.update(step).digest
            assert drift(engine, model, requests(3)) <= LIMIT
    warned = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert warned == ["vllm: the trainer's parameters have moved to other memory; updates are copied from now on"]
    assert not is_shared(engine, model)
    before = engine_weights(engine)
    nudge(model, seed=1)
    assert all(torch.equal(tensor, before[name]) for name, tensor in engine_weights(engine).items())


@on_one
def test_an_engine_that_is_made_anew_shares_again(engine, model):
    made = publisher(engine, model)
    made.publish(0)
    engine.rebuild()
    train(model, 3)
    made.update(1)
    train(model, 4)
    made.update(2)
    assert is_shared(engine, model)
    assert drift(engine, model) <= LIMIT


@on_one
@pytest.mark.parametrize("level", [1, 2])
def test_one_memory_outlives_sleep_on_a_cpu(engine, model, level):
    made = publisher(engine, model)
    made.publish(0)
    for step in (1, 2):
        engine.sleep(level)
        train(model, step)
        engine.wake(["weights"])
        made.update(step, lost=level == 2)
        engine.wake(["kv_cache"])
        assert drift(engine, model, requests(3)) <= LIMIT
    assert is_shared(engine, model)


@on_one
def test_older_weights_are_kept_where_publications_are_rarer_than_steps(engine, model):
    made = publisher(engine, model, interval=2)
    made.update(0)
    before = engine_weights(engine)
    train(model, 1)
    made.update(1)
    assert all(torch.equal(tensor, before[name]) for name, tensor in engine_weights(engine).items())


@on_one
def test_shared_memory_is_not_written_by_an_update(engine, model):
    publisher(engine, model).publish(0)
    with pytest.raises(EngineError, match="the trainer's own memory; separate them"):
        engine.load_weights(PolicyWeights(model), 5)


@on_one
def test_weights_are_not_taken_over_while_requests_are_outstanding(engine, model):
    made = publisher(engine, model)
    made.publish(0)
    engine.submit(request("busy", tokens=3))
    with pytest.raises(EngineError, match="1 requests are outstanding"):
        made.publish(1)
    assert [one.request_id for one in engine.stream()] == ["busy"]


@on_one
def test_a_cache_that_is_not_reset_voids_the_engine(engine, model, monkeypatch):
    made = publisher(engine, model)
    made.publish(0)
    monkeypatch.setattr(engine._llm, "reset_prefix_cache", lambda **_: False)
    with pytest.raises(EngineError, match="the prefix cache was not reset"):
        made.publish(1)
    assert not engine.health().alive
    assert engine.version == 1


@on_one
def test_half_an_update_in_place_voids_the_engine_until_rebuilt(engine, model):
    nudge(model, seed=9)
    source = PolicyWeights(model, move_model_batches=4)
    update = engine.begin_update(source.manifest(), 9)
    assert isinstance(update, DirectUpdate)
    update.send(next(source.buckets()))
    with pytest.raises(SyncFailed, match="version 9 is being loaded"):
        engine.submit(request())
    update.abort()
    with pytest.raises(SyncFailed, match=r"given up half-way.*rebuild the engine"):
        engine.submit(request())
    engine.rebuild()
    engine.load_weights(source, 9)
    assert drift(engine, model) <= LIMIT


@on_one
def test_a_missing_tensor_is_refused_before_anything_is_written(engine, model):
    before = engine_weights(engine)
    manifest = [info for info in PolicyWeights(model).manifest() if info.name != "model.norm.weight"]
    with pytest.raises(SyncFailed, match=r"model\.norm\.weight is missing"):
        engine.begin_update(manifest, 3)
    assert all(torch.equal(tensor, before[name]) for name, tensor in engine_weights(engine).items())


@on_one
def test_parameters_that_vllm_has_moved_are_loaded_and_proven_again(engine, model):
    runner = engine._llm.model_executor.driver_worker.model_runner
    norm = runner.get_model().model.norm
    norm.weight.data = norm.weight.data.clone()
    nudge(model, seed=2)
    engine.load_weights(PolicyWeights(model), 1)
    assert not isinstance(engine._update, DirectUpdate)
    nudge(model, seed=3)
    engine.load_weights(PolicyWeights(model), 2)
    assert isinstance(engine._update, DirectUpdate)
    assert drift(engine, model) <= LIMIT


@on_one
def test_wider_weights_are_rounded_in_place_and_the_receipt_says_so(engine, model):
    nudge(model, seed=4)
    assert engine.load_weights(PolicyWeights(model.double()), 1).rounded
    assert engine.load_weights(PolicyWeights(model), 2).rounded
    assert isinstance(engine._update, DirectUpdate)
    assert drift(engine, model.float()) <= LIMIT


@on_one
def test_the_parity_check_leaves_a_trainer_that_shared_its_memory_as_it_was(engine, model):
    """Its noise stands in for parameters that are put aside: what is published then must not reach those."""
    made = publisher(engine, model)
    made.publish(0)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}

    def score(sequences):
        return torch.cat([_logprobs(model, one) for one in sequences])

    check = ParityCheck(
        engine,
        score=score,
        model=model,
        publisher=made,
        prompts=[Prompt(str(i), [], list(range(20 + i, 40 + 2 * i))) for i in range(8)],
        sampling=SamplingParams(max_new_tokens=16),
        ranks=OneRank(),
        end_token_ids=ENDS,
    )
    report = check.run()
    assert len(report.stages) == 3
    assert not report.error(), report.line()
    assert not is_shared(engine, model)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    train(model, 1)
    made.publish(1)
    assert is_shared(engine, model)


@torch.no_grad()
def _logprobs(model, one):
    ids = torch.tensor([[*one.prompt_ids, *one.completion_ids]])
    scores = model(ids).logits[0, len(one.prompt_ids) - 1 : -1].log_softmax(-1)
    return scores.gather(1, torch.tensor(list(one.completion_ids))[:, None])[:, 0]
