"""Where an engine stores each tensor is proven before it is used, and one memory serves trainer and engine alike.

The engine's side is a plain module with vLLM's names and fused rows; no vLLM is needed.
"""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from swift.models.arguments import CheckpointArguments
from swift.models.policy import load_for_inference
from swift.models.tiny import build_tiny
from swift.rollout.engines.vllm_direct import Layout, NoLayout
from swift.rollout.weight_sync.base import checksums
from swift.rollout.weight_sync.policy import LiveWeights, PolicyWeights

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


def tensors(policy):
    return [pair for bucket in PolicyWeights(policy).buckets() for pair in bucket.tensors]


def proven(stored, policy):
    """A layout that an engine's own loading has confirmed."""
    layout = Layout.of(stored, PolicyWeights(policy).manifest(), **ties(policy))
    sent = tensors(policy)
    numbers = checksums([tensor for _, tensor in sent])
    layout.note(sent, {name: number for (name, _), number in zip(sent, numbers, strict=True)})
    layout.prove()
    return layout


def shift(policy):
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.mul_(1.5).add_(0.25)


def holds(stored, policy):
    """Whether the engine's parameters are what its own loading would make of the policy."""
    wanted = Stored(policy).state_dict()
    found = stored.state_dict()
    return found.keys() == wanted.keys() and all(torch.equal(found[name], wanted[name]) for name in wanted)


# --- copying ------------------------------------------------------------------------------------------------------


def test_an_update_is_written_to_fused_and_padded_parameters_by_one_call(stored, policy, monkeypatch):
    layout = proven(stored, policy)
    shift(policy)
    assert not holds(stored, policy)
    calls = []
    copy_all = torch._foreach_copy_
    monkeypatch.setattr(torch, "_foreach_copy_", lambda *lists: (calls.append(len(lists[0])), copy_all(*lists)))
    layout.write(tensors(policy))
    assert holds(stored, policy)
    assert len(calls) == 1


def test_a_rounded_update_is_proven_and_written_too(stored, policy):
    stored.bfloat16()
    layout = proven(stored, policy)
    shift(policy)
    layout.write(tensors(policy))
    wanted = Stored(policy).bfloat16().state_dict()
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in stored.state_dict().items())


@pytest.mark.parametrize("name", ["model.layers.0.self_attn.qkv_proj", "model.layers.1.mlp.gate_up_proj"])
def test_rows_in_another_order_are_noticed(stored, policy, name):
    weight = stored.get_submodule(name).weight
    with torch.no_grad():
        weight.copy_(weight.flip(0))
    with pytest.raises(NoLayout, match="in another way than it came"):
        proven(stored, policy)


def test_a_single_other_number_is_noticed(stored, policy):
    with torch.no_grad():
        stored.model.norm.weight[-1] += 1e-6
    with pytest.raises(NoLayout, match=r"model\.norm\.weight in another way"):
        proven(stored, policy)


def test_a_packed_parameter_has_no_layout(stored, policy):
    stored.model.layers._modules["0"].mlp.down_proj.weight = nn.Parameter(torch.empty(0))
    with pytest.raises(NoLayout, match="does not fit into"):
        proven(stored, policy)


def test_a_parameter_that_nothing_is_sent_for_has_no_layout(stored, policy):
    stored.model.layers._modules["0"].mlp.register_parameter("scale", nn.Parameter(torch.ones(3)))
    with pytest.raises(NoLayout, match=r"no tensor of the update belongs to .*mlp\.scale"):
        proven(stored, policy)


def test_a_tensor_that_the_engine_does_not_hold_has_no_layout(stored, policy):
    del stored.model.norm
    with pytest.raises(NoLayout, match=r"no parameter for model\.norm\.weight"):
        proven(stored, policy)


@pytest.mark.parametrize("where", ["layer", "impl", "list"])
def test_values_that_are_computed_from_weights_have_no_layout(stored, policy, where):
    attention = stored.model.layers._modules["1"].self_attn
    if where == "impl":
        attention.impl = SimpleNamespace(absorbed=torch.ones(3, 3))
    else:
        vars(attention)["absorbed"] = [torch.ones(3, 3)] if where == "list" else torch.ones(3, 3)
    with pytest.raises(NoLayout, match=r"layers\.1\.self_attn.* keeps values beside its weights"):
        proven(stored, policy)


def test_a_kv_cache_beside_a_layer_is_no_obstacle(stored, policy):
    vars(stored.model.layers._modules["1"].self_attn)["kv_cache"] = torch.ones(3, 3)
    proven(stored, policy)


def test_an_update_with_other_tensors_or_shapes_does_not_fit(stored, policy):
    layout = proven(stored, policy)
    manifest = PolicyWeights(policy).manifest()
    assert layout.fits(manifest)
    assert not layout.fits(manifest[1:])
    assert not layout.fits([_other(manifest[0]), *manifest[1:]])


def _other(info):
    return type(info)(info.name, info.dtype, (*info.shape, 1))


def test_parameters_that_the_engine_has_moved_are_noticed(stored, policy):
    layout = proven(stored, policy)
    assert layout.in_place()
    stored.model.norm.weight.data = stored.model.norm.weight.data.clone()
    assert not layout.in_place()
    layout = proven(stored, policy)
    stored.model.norm.weight = nn.Parameter(stored.model.norm.weight.data)
    assert not layout.in_place()


# --- one memory ---------------------------------------------------------------------------------------------------


def test_what_the_trainer_changes_is_the_engines(stored, policy):
    layout, live = proven(stored, policy), LiveWeights(policy)
    layout.share(live())
    assert layout.shared_with(live())
    for _ in range(20):
        shift(policy)
        assert holds(stored, policy)
    assert layout.shared_with(live())


def test_training_is_the_same_with_shared_memory(stored, policy):
    """Gradients, clipping and AdamW's state, bit for bit; the same tensors are in the optimizer before and after."""
    alone = copy.deepcopy(policy)
    optimizers = [torch.optim.AdamW(one.parameters(), lr=0.01, foreach=True) for one in (alone, policy)]
    layout, live = proven(stored, policy), LiveWeights(policy)
    layout.share(live())
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
    assert layout.shared_with(live())
    assert holds(stored, policy)


def test_a_checkpoint_is_saved_and_loaded_whole(stored, policy, tmp_path):
    proven(stored, policy).share(LiveWeights(policy)())
    shift(policy)
    policy.save_pretrained(tmp_path)
    torch.save(policy.state_dict(), tmp_path / "state.pt")
    again = load_for_inference(CheckpointArguments(model=str(tmp_path), torch_dtype="float32"), device="cpu")
    kept = torch.load(tmp_path / "state.pt")
    for name, tensor in policy.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor), name
        assert torch.equal(kept[name], tensor), name


def test_a_loaded_state_stays_shared(stored, policy):
    layout, live = proven(stored, policy), LiveWeights(policy)
    before = {name: tensor.clone() for name, tensor in policy.state_dict().items()}
    layout.share(live())
    shift(policy)
    policy.load_state_dict(before)
    assert layout.shared_with(live())
    assert holds(stored, policy)


def test_a_trainer_with_other_memory_is_noticed(stored, policy):
    layout, live = proven(stored, policy), LiveWeights(policy)
    layout.share(live())
    policy.model.norm.weight.data = policy.model.norm.weight.data.clone()
    assert not layout.shared_with(live())
    policy.model.norm = copy.deepcopy(policy.model.norm)
    assert not layout.shared_with(live())


def test_separated_memories_have_equal_bits_and_no_effect_on_each_other(stored, policy):
    layout, live = proven(stored, policy), LiveWeights(policy)
    layout.share(live())
    layout.separate()
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
    layout, live = proven(stored, policy), LiveWeights(policy)
    change(policy)
    places = {name: tensor.data_ptr() for name, tensor in policy.named_parameters()}
    with pytest.raises(NoLayout, match=words):
        layout.share(live())
    assert places == {name: tensor.data_ptr() for name, tensor in policy.named_parameters()}


def test_a_head_that_only_one_side_ties_is_not_shared(stored, policy):
    layout = proven(stored, policy)
    if policy.config.tie_word_embeddings:
        policy.lm_head.weight = nn.Parameter(policy.lm_head.weight.detach().clone())
        words = "the engine ties"
    else:
        policy.lm_head.weight = policy.model.embed_tokens.weight
        words = "differs from|one tensor in the trainer"
    with pytest.raises(NoLayout, match=words):
        layout.share(dict(policy.named_parameters(remove_duplicate=False)))


# --- which memory is the policy's -----------------------------------------------------------------------------------


def test_the_live_weights_are_the_policys_own_parameters(policy):
    live = LiveWeights(policy)
    own = dict(policy.named_parameters(remove_duplicate=False))
    assert live().keys() == own.keys() == {info.name for info in PolicyWeights(policy).manifest()}
    assert all(live()[name] is own[name] for name in own)
    policy.model.norm = copy.deepcopy(policy.model.norm)
    assert live()["model.norm.weight"] is policy.model.norm.weight


def test_a_policy_with_an_adapter_has_no_live_weights(policy):
    from peft import LoraConfig, get_peft_model

    live = LiveWeights(policy)
    assert live()
    tuned = get_peft_model(policy, LoraConfig(r=2, target_modules=["q_proj"]))
    assert LiveWeights(tuned)() == {}
    with tuned.disable_adapter():
        off = LiveWeights(tuned)
        off()
    assert off() == {}, "the adapter is on again"


def test_weights_that_are_cast_for_the_engine_are_not_live(policy):
    assert PolicyWeights(policy, dtype="bfloat16").live() == {}
