"""One copy of the weights for trainer and engine, shared only where every tensor is found bit for bit.

The engine's side is a plain module with vLLM's names and fused rows, except in the last tests, which need vLLM: there
its packing for CPUs is switched off, as on a GPU.
"""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest
import torch
from oracle import load, with_noise
from small_runs import OneRank
from torch import nn
from vllm_parts import LIMIT, drift, ended, request, requests, spec_of

from swift.errors import EngineError
from swift.models.arguments import CheckpointArguments
from swift.models.policy import load_for_inference
from swift.models.tiny import build_tiny
from swift.rollout.engines.spec import build_engine
from swift.rollout.engines.vllm.single_copy import NotShareable, SingleCopy
from swift.rollout.weights.policy import PolicyWeights
from swift.rollout.weights.sync import WeightSync

PACKED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}
PAD = 320
"""Rows of vLLM's embedding, a multiple of 64."""


class Padded(nn.Module):
    """An embedding or head with rows that no checkpoint has."""

    def __init__(self, weight):
        super().__init__()
        self.num_embeddings_padded = PAD
        self.weight = nn.Parameter(torch.cat([weight, weight.new_zeros(PAD - len(weight), weight.shape[1])]))


class Holder(nn.Module):
    """A layer with nothing but a weight and perhaps a bias."""


class Stored(nn.Module):
    """The parameters of a model as vLLM stores them."""

    def __init__(self, policy):
        super().__init__()
        self.packed_modules_mapping = PACKED
        fused = {part: (whole, parts) for whole, parts in PACKED.items() for part in parts}
        state = {name: tensor.detach().clone() for name, tensor in policy.state_dict().items()}
        tied = policy.config.tie_word_embeddings
        for name, tensor in state.items():
            module, _, key = name.rpartition(".")
            parent, _, last = module.rpartition(".")
            if tied and name == "lm_head.weight":
                continue
            if last in fused:
                whole, parts = fused[last]
                if last == parts[0]:
                    rows = torch.cat([state[f"{parent}.{part}.{key}"] for part in parts])
                    self._holder(f"{parent}.{whole}").register_parameter(key, nn.Parameter(rows, requires_grad=False))
            elif last in ("embed_tokens", "lm_head"):
                self._holder(parent).add_module(last, Padded(tensor))
            else:
                self._holder(module).register_parameter(key, nn.Parameter(tensor))

    def _holder(self, path):
        module = self
        for part in path.split(".") if path else ():
            if part not in module._modules:
                module.add_module(part, Holder())
            module = module._modules[part]
        return module


@pytest.fixture(scope="module", params=["qwen2", "llama"])
def folder(request, tmp_path_factory):
    """Qwen2 has biases and ties the head to the embedding, Llama does neither."""
    return build_tiny(tmp_path_factory.mktemp(request.param), arch=request.param, size="nano", init_std=0.1)


@pytest.fixture
def policy(folder):
    return load_for_inference(
        CheckpointArguments(model=str(folder), torch_dtype="float32"), device="cpu"
    ).requires_grad_(True)


@pytest.fixture
def stored(policy):
    return Stored(policy)


def ties(policy):
    return (
        {"tied": "lm_head.weight", "embedding": "model.embed_tokens.weight"}
        if policy.config.tie_word_embeddings
        else {}
    )


def parameters_of(policy):
    """As a run reads them before each weight sync."""
    return lambda: PolicyWeights(policy).parameters()


def share(stored, policy):
    return SingleCopy(stored, PolicyWeights(policy).parameters(), **ties(policy))


def shift(policy):
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.mul_(1.5).add_(0.25)


def holds(stored, policy):
    """Whether the engine's parameters are what its own loading would make of the policy."""
    wanted = Stored(policy).state_dict()
    found = stored.state_dict()
    return found.keys() == wanted.keys() and all(torch.equal(found[name], wanted[name]) for name in wanted)


# --- what is not shared -------------------------------------------------------------------------------------------


def reordered(stored):
    with torch.no_grad():
        weight = stored.get_submodule("model.layers.0.self_attn.qkv_proj").weight
        weight.copy_(weight.flip(0))


def one_number(stored):
    with torch.no_grad():
        stored.model.norm.weight[-1] += 1e-6


def packed(stored):
    stored.model.layers._modules["0"].mlp.down_proj.weight = nn.Parameter(torch.empty(0))


def with_scale(stored):
    stored.model.layers._modules["0"].mlp.register_parameter("scale", nn.Parameter(torch.ones(3)))


def without_norm(stored):
    del stored.model.norm


def absorbed(stored):
    vars(stored.model.layers._modules["1"].self_attn)["absorbed"] = [torch.ones(3, 3)]


def absorbed_by_attention(stored):
    stored.model.layers._modules["1"].self_attn.impl = SimpleNamespace(absorbed=torch.ones(3, 3))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (reordered, "differs from the engine's"),
        (one_number, r"model\.norm\.weight differs from the engine's"),
        (packed, "does not fit into"),
        (with_scale, r"no tensor of the trainer belongs to .*mlp\.scale"),
        (without_norm, r"no parameter for model\.norm\.weight"),
        (absorbed, r"layers\.1\.self_attn.* keeps values beside its weights"),
        (absorbed_by_attention, r"layers\.1\.self_attn.* keeps values beside its weights"),
    ],
)
def test_an_engine_that_stores_its_weights_otherwise_keeps_its_own(stored, policy, change, words):
    change(stored)
    places = {name: tensor.data_ptr() for name, tensor in policy.named_parameters()}
    with pytest.raises(NotShareable, match=words):
        share(stored, policy)
    assert places == {name: tensor.data_ptr() for name, tensor in policy.named_parameters()}


def test_a_kv_cache_beside_a_layer_is_no_obstacle(stored, policy):
    vars(stored.model.layers._modules["1"].self_attn)["kv_cache"] = torch.ones(3, 3)
    share(stored, policy)


# --- one copy ---------------------------------------------------------------------------------------------------


def test_training_is_the_same_with_shared_memory(stored, policy):
    """Gradients, clipping and AdamW's state, bit for bit; the same tensors are in the optimizer before and after."""
    alone = copy.deepcopy(policy)
    optimizers = [torch.optim.AdamW(one.parameters(), lr=0.01, foreach=True) for one in (alone, policy)]
    single, parameters = share(stored, policy), parameters_of(policy)
    ids = torch.arange(5, 45)[None]
    for _ in range(3):
        for model, optimizer in zip((alone, policy), optimizers, strict=True):
            model(input_ids=ids, labels=ids).loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
    for (name, one), other in zip(alone.named_parameters(), policy.parameters(), strict=True):
        assert torch.equal(one, other), name
    first, second = (optimizer.state_dict()["state"] for optimizer in optimizers)
    assert all(torch.equal(first[i][key], second[i][key]) for i in first for key in first[i])
    assert single.holds(parameters())
    assert holds(stored, policy)


def test_a_checkpoint_is_saved_and_loaded_whole(stored, policy, tmp_path):
    share(stored, policy)
    shift(policy)
    policy.save_pretrained(tmp_path)
    torch.save(policy.state_dict(), tmp_path / "state.pt")
    again = load_for_inference(CheckpointArguments(model=str(tmp_path), torch_dtype="float32"), device="cpu")
    kept = torch.load(tmp_path / "state.pt")
    for name, tensor in policy.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor), name
        assert torch.equal(kept[name], tensor), name


@pytest.mark.parametrize("side", ["stored", "policy"])
def test_a_side_with_other_memory_is_noticed(stored, policy, side):
    single, parameters = share(stored, policy), parameters_of(policy)
    assert single.holds(parameters())
    moved = {"stored": stored, "policy": policy}[side].model
    moved.norm.weight.data = moved.norm.weight.data.clone()
    assert not single.holds(parameters())
    moved.norm = copy.deepcopy(moved.norm)
    assert not single.holds(parameters())


def test_separated_memories_have_equal_bits_and_no_effect_on_each_other(stored, policy):
    share(stored, policy).separate()
    assert holds(stored, policy)
    shift(policy)
    assert not holds(stored, policy)
    if policy.config.tie_word_embeddings:
        assert policy.lm_head.weight is policy.model.embed_tokens.weight


def not_contiguous(policy):
    policy.model.norm.weight.data = policy.model.norm.weight.data.repeat_interleave(2)[::2]


def part_of_a_buffer(policy):
    """As ZeRO and fused optimizers keep parameters: slices of one flat buffer."""
    flat = torch.cat([one.detach().reshape(-1) for one in policy.parameters()])
    start = 0
    for one in policy.parameters():
        one.data = flat[start : start + one.numel()].view_as(one)
        start += one.numel()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda policy: policy.bfloat16(), "another device, type or layout"),
        (not_contiguous, "another device, type or layout"),
        (part_of_a_buffer, "a part of a larger piece of memory"),
        (shift, "differs from the engine's"),
    ],
    ids=["dtype", "layout", "flat", "contents"],
)
def test_memory_that_cannot_be_shared_is_left_alone(stored, policy, change, words):
    parameters = parameters_of(policy)
    change(policy)
    places = {name: tensor.data_ptr() for name, tensor in policy.named_parameters()}
    with pytest.raises(NotShareable, match=words):
        SingleCopy(stored, parameters() or dict(policy.named_parameters(remove_duplicate=False)), **ties(policy))
    assert places == {name: tensor.data_ptr() for name, tensor in policy.named_parameters()}


def test_a_head_that_only_one_side_ties_is_not_shared(stored, policy):
    names = ties(policy)
    if policy.config.tie_word_embeddings:
        policy.lm_head.weight = nn.Parameter(policy.lm_head.weight.detach().clone())
        words = "the engine ties"
    else:
        policy.lm_head.weight = policy.model.embed_tokens.weight
        words = "differs from|one tensor in the trainer"
    with pytest.raises(NotShareable, match=words):
        SingleCopy(stored, dict(policy.named_parameters(remove_duplicate=False)), **names)


# --- which memory is the policy's -----------------------------------------------------------------------------------


def test_the_parameters_of_an_update_are_the_policys_own_parameters(policy):
    parameters = parameters_of(policy)
    own = dict(policy.named_parameters(remove_duplicate=False))
    assert parameters().keys() == own.keys() == {info.name for info in PolicyWeights(policy).manifest()}
    assert all(parameters()[name] is own[name] for name in own)
    policy.model.norm = copy.deepcopy(policy.model.norm)
    assert parameters()["model.norm.weight"] is policy.model.norm.weight


def test_a_policy_with_an_adapter_has_no_plain_parameters(policy):
    from peft import LoraConfig, get_peft_model

    parameters = parameters_of(policy)
    assert parameters()
    tuned = get_peft_model(policy, LoraConfig(r=2, target_modules=["q_proj"]))
    assert PolicyWeights(tuned).parameters() == {}
    with tuned.disable_adapter():
        off = parameters_of(tuned)
        off()
    assert off() == {}, "the adapter is on again"


def test_weights_that_are_cast_for_the_engine_are_not_its_parameters(policy):
    assert PolicyWeights(policy, dtype="bfloat16").parameters() == {}


# --- a real vLLM ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    """vLLM with weights that stay as they come, and its model's folder."""
    pytest.importorskip("vllm")
    import vllm._custom_ops as operators

    folder = build_tiny(tmp_path_factory.mktemp("vllm"), arch="qwen2", size="tiny", init_std=0.1)
    packs, operators._supports_onednn = operators._supports_onednn, False
    try:
        made = build_engine(spec_of(folder))
        yield made
        made.close()
    finally:
        operators._supports_onednn = packs


@pytest.fixture
def model(engine):
    """A policy that shares nothing yet, and an engine with its weights."""
    engine.separate()
    engine._sharing_ended = ""
    if not engine.health().alive:
        engine.rebuild()
    made = load(engine.spec.model)
    engine.load_weights(PolicyWeights(made), 0)
    return made


def weight_sync(engine, model, **settings):
    return WeightSync(
        engine, source=lambda: PolicyWeights(model), parameters=parameters_of(model), ranks=OneRank(), **settings
    )


def engine_weights(engine):
    runner = engine._llm.model_executor.driver_worker.model_runner
    return {name: one.detach().clone() for name, one in runner.get_model().named_parameters()}


def train(model, step):
    """A step of AdamW on some tokens."""
    model.train().requires_grad_(True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    ids = (torch.arange(40)[None] * (step + 3)) % 250
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    model.eval()


@pytest.mark.slow
@pytest.mark.long
def test_ten_syncs_of_one_copy_leave_no_drift_through_sleep_and_a_rebuild(engine, model):
    made = weight_sync(engine, model)
    made.sync(0)
    for step in range(1, 11):
        if step == 4:
            engine.rebuild()
            made.sync(step - 1)
        if step > 7:
            engine.sleep(1 + step % 2)
        train(model, step)
        engine.wake(["weights"])
        ack = made.update(step, lost=step > 7)
        engine.wake(["kv_cache"])
        assert engine.version == made.version
        assert ack.digest == ""
        assert drift(engine, model, requests(3)) <= LIMIT
    shared = engine_weights(engine)
    made.separate()
    engine.load_weights(PolicyWeights(model), 99)
    assert all(torch.equal(tensor, shared[name]) for name, tensor in engine_weights(engine).items())


@pytest.mark.slow
def test_parameters_that_move_are_copied_from_then_on_and_that_is_said_once(engine, model, caplog):
    made = weight_sync(engine, model)
    made.sync(0)
    model.model.norm.weight.data = model.model.norm.weight.data.clone()
    for step in (1, 2, 3):
        train(model, step)
        assert made.update(step).digest
        assert drift(engine, model, requests(3)) <= LIMIT
    warned = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert warned == ["vllm: the trainer's parameters have moved to other memory; updates are copied from now on"]
    before = engine_weights(engine)
    with_noise(model, seed=1)
    assert all(torch.equal(tensor, before[name]) for name, tensor in engine_weights(engine).items())


@pytest.mark.slow
def test_one_copy_is_not_written_nor_taken_while_requests_run_or_the_cache_is_not_reset(engine, model, monkeypatch):
    made = weight_sync(engine, model)
    made.sync(0)
    with pytest.raises(EngineError, match="the trainer's own memory; separate them"):
        engine.load_weights(PolicyWeights(model), 5)
    engine.submit(request("busy", tokens=3))
    with pytest.raises(EngineError, match="1 requests are outstanding"):
        made.sync(1)
    assert [one.request_id for one in ended(engine)] == ["busy"]
    monkeypatch.setattr(engine._llm, "reset_prefix_cache", lambda **_: False)
    with pytest.raises(EngineError, match="the prefix cache was not reset"):
        made.sync(1)
    assert not engine.health().alive
    assert engine.version == 1
