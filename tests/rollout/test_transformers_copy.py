"""The in-process engine over weights of its own: updates in place, sleep, and other threads.

What every backend promises is in tests/engines/test_conformance_*.py; here is what only this one can be asked.
"""

from __future__ import annotations

import copy

import pytest
import torch
from given_weights import Given, tensors_of
from oracle import gap, load, noisy
from processes import wait_for
from sources import asking, nothing_left
from transformers_parts import PROMPT, ask, copy_engine, sampled

from swift import errors
from swift.rollout.engines.spec import EngineSpec, build_engine
from swift.rollout.engines.transformers import TransformersEngine
from swift.rollout.weights.base import AdapterWeights, WeightStream
from swift.rollout.weights.policy import PolicyWeights
from swift.types import Request, SamplingParams

# --- whose weights -----------------------------------------------------------------------------------------------


def test_over_the_trainers_weights_there_is_nothing_to_copy(nano_folders):
    engine = TransformersEngine(load(nano_folders["qwen2"]), eos_token_ids=[])
    assert engine.capabilities.shares_weights
    source = PolicyWeights(engine.model)
    for change in (
        lambda: engine.load_weights(source, 1),
        lambda: engine.sleep(1),
        engine.drop_adapter,
        lambda: engine.load_adapter(AdapterWeights({}, {}), 1),
        engine.rebuild,
    ):
        with pytest.raises(errors.Unsupported, match="transformers"):
            change()
    assert engine.sleep(0).freed_bytes == 0
    assert engine.wake() is True
    engine.close()
    assert all(parameter.numel() for parameter in engine.model.parameters())


def test_an_engine_of_its_own_is_made_from_a_folder(nano_folders):
    folder = nano_folders["llama"]
    state = torch.get_rng_state()
    spec = EngineSpec(backend="transformers", model=str(folder), eos_token_ids=(262,), max_model_len=40)
    engine = build_engine(spec)
    assert torch.equal(torch.get_rng_state(), state)
    assert not engine.capabilities.shares_weights
    assert engine.capabilities.max_model_len == 40
    assert gap(load(folder), ask(), sampled(engine)) < 1e-5


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"tensor_parallel_size": 2, "devices": ("cpu", "cpu")}, "tensor_parallel_size: 2"),
        ({"engine_kwargs": {"block_size": 32}}, "block_size: the transformers engine has no such argument"),
    ],
)
def test_settings_that_it_does_not_have_are_refused_before_loading(nano_folders, change, line):
    with pytest.raises(errors.ConfigError, match=line):
        build_engine(EngineSpec(backend="transformers", model=str(nano_folders["llama"]), **change))


# --- updates -----------------------------------------------------------------------------------------------------

FUSED = {
    "mixtral": {},
    "qwen3_moe": {},
    "deepseek_v3": {"first_k_dense_replace": 1},
}


@pytest.mark.parametrize("arch", FUSED)
def test_experts_that_loading_fused_are_updated_under_the_names_of_their_checkpoint(small_model, arch):
    model = small_model(arch, **FUSED[arch]).eval()
    changed = noisy(model, scale=0.2)
    names = {info.name for info in PolicyWeights(changed).manifest()}
    assert names != set(changed.state_dict()), "nothing is rearranged; choose another architecture"
    engine = copy_engine(model)
    ack = engine.load_weights(PolicyWeights(changed, move_model_batches=2), 3)
    assert (ack.version, ack.tensors) == (3, len(names))
    for name, parameter in engine.model.named_parameters():
        assert torch.equal(parameter, changed.state_dict()[name]), name
    assert gap(changed, ask(), sampled(engine)) < 1e-5


@pytest.mark.parametrize(
    ("sent", "stored"), [("float32", "bfloat16"), ("bfloat16", "float32"), ("float16", "bfloat16")]
)
def test_an_update_of_another_type_is_rounded_once(nano_folders, sent, stored):
    model = noisy(load(nano_folders["qwen2"]), scale=0.2)
    engine = copy_engine(load(nano_folders["qwen2"]).to(getattr(torch, stored)))
    assert engine.capabilities.dtype == stored
    engine.load_weights(PolicyWeights(model, dtype=sent), 1)
    for name, parameter in engine.model.named_parameters():
        value = model.state_dict()[name].to(getattr(torch, sent)).to(getattr(torch, stored))
        assert torch.equal(parameter, value), name


def test_tied_weights_come_under_either_name_or_both(nano_folders):
    model = load(nano_folders["qwen2"])
    changed = noisy(model, scale=0.2)
    both = tensors_of(changed)
    assert {"lm_head.weight", "model.embed_tokens.weight"} <= {name for name, _ in both}
    for left_out in ("", "lm_head.weight", "model.embed_tokens.weight"):
        engine = copy_engine(model)
        engine.load_weights(Given([one for one in both if one[0] != left_out]), 1)
        assert gap(changed, ask(), sampled(engine)) < 1e-5
    neither = [one for one in both if "embed" not in one[0] and "lm_head" not in one[0]]
    with pytest.raises(errors.SyncFailed, match=r"model.embed_tokens.weight is missing; lm_head.weight is missing"):
        copy_engine(model).load_weights(Given(neither), 1)


def test_a_head_that_differs_from_the_embedding_it_is_tied_to_is_refused(nano_folders):
    model = load(nano_folders["qwen2"])
    tensors = [(name, tensor + (name == "lm_head.weight")) for name, tensor in tensors_of(model)]
    engine = copy_engine(model)
    with pytest.raises(errors.SyncFailed, match="to which this model ties it"):
        engine.load_weights(Given(tensors), 1)
    with pytest.raises(errors.SyncFailed, match=r"the update to version 1 was given up half-way.*; rebuild"):
        sampled(engine)
    assert not engine.health().alive


def test_a_refused_manifest_names_what_is_wrong_and_changes_nothing(nano_folders):
    model = load(nano_folders["llama"])
    tensors = dict(tensors_of(noisy(model, scale=0.2)))
    norm, up = tensors["model.norm.weight"], tensors["model.layers.0.mlp.up_proj.weight"]
    engine = copy_engine(model)
    for change, line in (
        ({"model.norm.weight": norm[:3]}, r"model.norm.weight has shape \[3\], the engine's \[32\]"),
        ({"model.layers.0.mlp.up_proj.weight": up.long()}, "up_proj.weight of type int64 cannot be stored"),
        ({"extra": up}, "extra is not one of the model's"),
    ):
        with pytest.raises(errors.SyncFailed, match=line):
            engine.load_weights(Given(list((tensors | change).items())), 1)
    with pytest.raises(errors.SyncFailed, match=r"0 of \d+ tensors were sent"):
        engine.update(WeightStream(PolicyWeights(model).manifest(), [], 1))
    assert engine.version == 0
    assert gap(model, ask(), sampled(engine)) < 1e-5


def test_a_copy_that_cannot_be_loaded_again_is_dead(nano_folders, tmp_path):
    import shutil

    folder = shutil.copytree(nano_folders["llama"], tmp_path / "model")
    engine = build_engine(EngineSpec(backend="transformers", model=str(folder)))
    shutil.rmtree(folder)
    with pytest.raises(errors.EngineDead, match="cannot be made again"):
        engine.rebuild()
    with pytest.raises(errors.EngineDead, match="it cannot be made again"):
        sampled(engine)
    assert not engine.health().alive


def test_a_row_without_a_distribution_names_request_and_version(nano_folders):
    model = load(nano_folders["qwen2"])
    engine = copy_engine(model)
    broken = copy.deepcopy(model)
    with torch.no_grad():
        broken.model.norm.weight[0] = torch.nan
    engine.load_weights(PolicyWeights(broken), 5)
    with pytest.raises(
        errors.NumericError, match=r"request: odd: token 1 .* version 5.*not finite.*lower --learning_rate"
    ):
        sampled(engine, ask("odd"))
    engine.load_weights(PolicyWeights(model), 6)
    assert gap(model, ask("odd"), sampled(engine, ask("odd"))) < 1e-5


@pytest.mark.parametrize("first", [True, False])
def test_one_row_without_a_distribution_ends_alone(nano_folders, caplog, first):
    """Tokens without an embedding are only the end of the rows that meet them."""
    model = load(nano_folders["llama"])
    assert not model.config.tie_word_embeddings
    engine = copy_engine(model)
    plain = {one.request_id: one for one in engine.sample(asked_eight())}
    poison = plain["r3"].token_ids[4]  # the other rows of this prompt may meet it, too
    broken = copy.deepcopy(model)
    with torch.no_grad():
        broken.model.embed_tokens.weight[[poison, 250]] = torch.nan
    engine.load_weights(PolicyWeights(broken), 5)
    bad_prompt = Request("bad", [*PROMPT[:3], 250, *PROMPT[3:]], SamplingParams(max_new_tokens=6))
    asked = [bad_prompt, *asked_eight()] if first else [*asked_eight(), bad_prompt]
    done = {one.request_id: one for one in engine.sample(asked)}
    assert len(done) == 9
    assert (done["bad"].finish_reason, done["bad"].token_ids, done["bad"].versions) == ("error", [], [])
    reasons = {}
    for name, before in plain.items():
        after, ids = done[name], before.token_ids
        met = ids.index(poison) + 1 if poison in ids[:-1] else None
        assert after.token_ids == ids[:met]
        assert after.logprobs == pytest.approx(before.logprobs[:met], abs=1e-5)
        assert after.versions == [(5, 0, len(after.token_ids))]
        assert after.finish_reason == (before.finish_reason if met is None else "error")
        reasons[name] = after.finish_reason
    assert reasons["r3"] == "error"
    assert {"error", "length"} <= set(reasons.values())
    assert "cannot be sampled with the weights of version 5: their logits are not finite; it is left out" in caplog.text
    assert nothing_left(engine)


def asked_eight():
    return [Request(f"r{i}", PROMPT, SamplingParams(max_new_tokens=12, seed=i)) for i in range(8)]


def test_weights_that_change_in_flight_act_on_the_tokens_after_them(nano_folders):
    """Keys and values of earlier tokens stay as they were computed: the oracle keeps its cache likewise."""
    old = load(nano_folders["llama"])
    new = noisy(old, scale=0.2)
    engine = copy_engine(old)
    request = ask("long", max_new_tokens=30)
    engine.submit(request)
    engine.submit(ask("short", max_new_tokens=10))
    done = {}
    while (ended := engine.advance()) is not None:
        done |= {completion.request_id: completion for completion in ended}
        if [completion.request_id for completion in ended] == ["short"]:
            engine.pause()
            engine.load_weights(PolicyWeights(new), 4)
            engine.resume()
    completion = done["long"]
    assert completion.versions == [(0, 0, 10), (4, 10, 30)]
    ids = completion.token_ids
    with torch.no_grad():
        before = old(input_ids=torch.tensor([[*PROMPT, *ids[:9]]]), use_cache=True)
        after = new(input_ids=torch.tensor([ids[9:-1]]), past_key_values=before.past_key_values)
    logits = torch.cat([before.logits[0, len(PROMPT) - 1 :], after.logits[0]])
    expected = logits.log_softmax(-1).gather(1, torch.tensor(ids)[:, None])[:, 0]
    assert (torch.tensor(completion.logprobs) - expected).abs().max() < 1e-5


# --- memory ------------------------------------------------------------------------------------------------------


def test_level_two_gives_the_weights_up_and_level_one_says_that_they_stay(nano_folders):
    engine = copy_engine(load(nano_folders["qwen2"]))
    nbytes = sum(parameter.untyped_storage().nbytes() for parameter in engine.model.parameters())
    report = engine.sleep(1)
    assert (report.freed_bytes, "weights stay resident" in report.note) == (0, True)
    assert engine.sleep(2).freed_bytes == nbytes
    assert sum(parameter.untyped_storage().nbytes() for parameter in engine.model.parameters()) == 0


def test_a_closed_copy_gives_its_memory_back(nano_folders):
    engine = copy_engine(load(nano_folders["qwen2"]))
    engine.close()
    engine.close()
    assert sum(parameter.untyped_storage().nbytes() for parameter in engine.model.parameters()) == 0
    for call in (lambda: sampled(engine), lambda: engine.sleep(1), engine.wake, engine.rebuild):
        with pytest.raises(errors.EngineDead, match="closed"):
            call()


# --- other threads -----------------------------------------------------------------------------------------------


LONG = 900


@pytest.fixture
def busy(nano_folders):
    """An engine that samples on another thread, and who has asked it for something that takes its time."""
    engine = copy_engine(load(nano_folders["llama"]))
    with asking(engine, ask("long", max_new_tokens=LONG)) as caller:
        assert wait_for(lambda: engine.counters.decode_steps >= 5)
        yield engine, caller


def test_another_thread_can_pause_and_change_the_weights_between_two_tokens(busy):
    engine, caller = busy
    caller.hold()
    steps = engine.counters.decode_steps
    engine.load_weights(PolicyWeights(noisy(engine.model, scale=0.2)), 8)
    assert caller.ended.empty()
    assert engine.counters.decode_steps == steps
    caller.release()
    (completion,) = caller.completions()
    assert completion.versions == [(0, 0, steps), (8, steps, LONG)]


def test_another_thread_can_close(busy):
    engine, caller = busy
    engine.close()
    with pytest.raises(errors.EngineDead):
        list(caller.completions(20))


def test_a_failed_step_leaves_no_requests_behind(nano_folders):
    engine = copy_engine(load(nano_folders["llama"]))
    sampled(engine, ask("one"))

    def out_of_memory(*args, **kwargs):
        raise RuntimeError("out of memory")

    forward, engine.model.forward = engine.model.forward, out_of_memory
    with pytest.raises(RuntimeError, match="out of memory"):
        sampled(engine, ask("two"))
    engine.model.forward = forward
    assert nothing_left(engine)
    assert sampled(engine, ask("three")).request_id == "three"


@pytest.mark.parametrize(
    ("request_", "line"),
    [
        (ask("big", [40, 10**6]), "token ids outside of 0..262"),
        (ask("negative", [-1, 40]), "token ids outside of 0..262"),
        (ask("word", stop=("x",)), "stop strings need a tokenizer"),
        (ask("none", max_new_tokens=0), "max_new_tokens 0"),
        (ask("empty", []), "no tokens"),
    ],
)
def test_requests_that_cannot_be_sampled_are_refused_by_name(nano_folders, request_, line):
    engine = copy_engine(load(nano_folders["llama"]))
    with pytest.raises(errors.RequestRefused, match=f"request: {request_.request_id}.*{line}") as caught:
        list(engine.sample([ask("fine"), request_]))
    assert caught.value.request_id == request_.request_id
    assert nothing_left(engine)
