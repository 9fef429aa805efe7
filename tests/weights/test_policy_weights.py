"""What is published is what a checkpoint would hold: names, values, cuts; and the policy is only looked at."""

from __future__ import annotations

import copy
import json

import pytest
import torch
from experts import EXPERTS, on_experts
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM
from transformers.core_model_loading import revert_weight_conversion

from swift.errors import ConfigError
from swift.models.sharded import gathered, reading_from
from swift.rollout.weights.base import TensorInfo
from swift.rollout.weights.policy import PolicyWeights, adapter_weights

IDS = torch.arange(24).reshape(2, 12) + 60  # [B, T]


def load(folder, dtype=torch.float32):
    """A model that is not the one on the disk any more, as after training."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    torch.manual_seed(3)
    for parameter in model.parameters():
        parameter.data += 0.02 * torch.randn_like(parameter)
    return model


def adapted(folder, **config):
    policy = get_peft_model(load(folder), LoraConfig(**{"target_modules": "all-linear", "r": 4, **config}))
    torch.manual_seed(4)
    for parameter in policy.parameters():
        if parameter.requires_grad:
            parameter.data.normal_(0, 0.1)
    return policy.eval()


def stream(source):
    """All tensors, checked against the manifest."""
    found = [pair for bucket in source.buckets() for pair in bucket.tensors]
    assert tuple(TensorInfo.of(name, tensor) for name, tensor in found) == source.manifest()
    return dict(found)


def logits(model):
    with torch.no_grad():
        return model(input_ids=IDS).logits


def fresh(model, tensors):
    """A new model that got nothing but the stream."""
    config = copy.deepcopy(model.config)
    made = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    made.load_state_dict(tensors, strict=True)
    return made


def test_a_fresh_model_that_loads_the_stream_says_the_same(nano_folder):
    model = load(nano_folder)
    assert torch.equal(logits(fresh(model, stream(PolicyWeights(model)))), logits(model))


def test_a_tied_head_is_sent_under_its_own_name_in_the_bucket_of_its_embedding(nano_folders):
    model = load(nano_folders["qwen2"])
    buckets = [dict(bucket.tensors) for bucket in PolicyWeights(model, bucket_bytes=1).buckets()]
    (both,) = [bucket for bucket in buckets if "lm_head.weight" in bucket]
    assert torch.equal(both["lm_head.weight"], both["model.embed_tokens.weight"])
    assert "lm_head.weight" in stream(PolicyWeights(load(nano_folders["llama"])))


def test_tensors_of_a_policy_in_memory_are_not_copied(nano_folders):
    model = load(nano_folders["qwen2"])
    live = {parameter.data_ptr() for parameter in model.parameters()}
    assert {tensor.data_ptr() for tensor in stream(PolicyWeights(model)).values()} == live


PATTERNS = {"use_rslora": True, "alpha_pattern": {"q_proj": 3}, "rank_pattern": {"v_proj": 2}}


@pytest.mark.parametrize(
    ("arch", "config"),
    [
        pytest.param("qwen2", {"lora_alpha": 32}, id="qwen2-alpha"),
        pytest.param("llama", {"lora_alpha": 32}, id="llama-alpha"),
        pytest.param("qwen2", PATTERNS, id="qwen2-patterns"),
        pytest.param("qwen3", PATTERNS, id="qwen3-patterns"),
        pytest.param("qwen2", {"target_modules": ["q_proj", "v_proj"], "lora_bias": True}, id="qwen2-bias"),
        pytest.param("llama", {"target_modules": ["k_proj", "embed_tokens", "lm_head"]}, id="llama-embedding"),
        pytest.param("llama", {"modules_to_save": ["lm_head", "embed_tokens"]}, id="llama-modules_to_save"),
    ],
)
def test_an_adapter_is_merged_as_peft_merges_it(nano_folders, arch, config):
    policy = adapted(nano_folders[arch], **config)
    tensors = stream(PolicyWeights(policy))
    expected = copy.deepcopy(policy).merge_and_unload()
    assert set(tensors) == set(expected.state_dict())
    for name, tensor in expected.state_dict().items():
        torch.testing.assert_close(tensors[name], tensor, rtol=0, atol=1e-6, msg=name)
    assert (logits(fresh(policy, tensors)) - logits(policy)).abs().max() < 1e-5


def test_gpt2_stores_its_weights_the_other_way_around(small_model):
    policy = get_peft_model(small_model("gpt2"), LoraConfig(target_modules=["c_attn", "c_proj"], fan_in_fan_out=True))
    for parameter in policy.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    tensors = stream(PolicyWeights(policy.eval()))
    expected = copy.deepcopy(policy).merge_and_unload().state_dict()
    assert max((tensors[name] - expected[name]).abs().max() for name in tensors) < 1e-6


@pytest.mark.parametrize("arch", EXPERTS)
def test_adapters_on_fused_experts_are_merged_at_every_level(small_model, arch):
    policy = on_experts(arch, small_model(arch, **EXPERTS[arch][0]))
    tensors = stream(PolicyWeights(policy))
    merged = copy.deepcopy(policy).merge_and_unload()
    expected = revert_weight_conversion(merged, merged.state_dict())
    with policy.disable_adapter():
        before = stream(PolicyWeights(policy))
    assert tensors.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(tensors[name], tensor, rtol=0, atol=1e-6, msg=name)
    for name, tensor in before.items():
        assert "bias" in name or ".experts." not in name or not torch.equal(tensors[name], tensor), name


def test_fused_experts_travel_under_the_names_of_the_checkpoint(small_model, tmp_path):
    model = small_model("mixtral")
    model.save_pretrained(tmp_path)
    from safetensors.torch import load_file

    saved = load_file(tmp_path / "model.safetensors")
    tensors = stream(PolicyWeights(model, bucket_bytes=1))
    assert tensors.keys() == saved.keys()
    assert all(torch.equal(tensors[name], saved[name]) for name in saved)


def test_the_base_is_never_edited(nano_folders):
    policy = adapted(nano_folders["llama"], modules_to_save=["lm_head"])
    before = {name: value.clone() for name, value in policy.state_dict().items()}
    versions = {name: parameter._version for name, parameter in policy.named_parameters()}
    stream(PolicyWeights(policy, dtype="bfloat16"))
    assert all(torch.equal(value, before[name]) for name, value in policy.state_dict().items())
    assert {name: parameter._version for name, parameter in policy.named_parameters()} == versions


def test_a_merge_is_rounded_once(nano_folders):
    exact = {name: value.clone() for name, value in stream(PolicyWeights(adapted(nano_folders["qwen3"]))).items()}
    rounded = stream(PolicyWeights(adapted(nano_folders["qwen3"]), dtype=torch.bfloat16))
    assert all(torch.equal(rounded[name], exact[name].bfloat16()) for name in exact)


def test_only_the_policys_own_type_is_cast(nano_folders):
    model = load(nano_folders["llama"], torch.bfloat16)
    model.model.layers[0].mlp.gate_proj.weight.data = model.model.layers[0].mlp.gate_proj.weight.data.float()
    model.model.register_buffer("steps", torch.tensor([7]))
    types = {name: tensor.dtype for name, tensor in stream(PolicyWeights(model, dtype="float16")).items()}
    assert types.pop("model.layers.0.mlp.gate_proj.weight") == torch.float32
    assert types.pop("model.steps") == torch.int64
    assert set(types.values()) == {torch.float16}


def test_an_adapter_that_breaks_a_tie_is_refused_by_name(nano_folders):
    with pytest.raises(ConfigError, match=r"policy: lm_head.weight: the model ties it to model.embed_tokens.weight"):
        PolicyWeights(adapted(nano_folders["qwen2"], target_modules=["embed_tokens"]))


@pytest.mark.parametrize(
    ("config", "name"),
    [
        ({"trainable_token_indices": [1]}, "TrainableTokens"),
        ({"lora_bias": True, "target_modules": ["q_proj"]}, "no bias"),
    ],
    ids=["tokens", "bias"],
)
def test_what_is_more_than_a_low_rank_sum_is_refused_by_name(nano_folders, config, name):
    with pytest.raises(ConfigError, match=f"policy: model.*{name}"):
        PolicyWeights(adapted(nano_folders["llama"], **config))


def layer_of(name):
    return name.split("layers.")[1].split(".")[0] if "layers." in name else None


@settings(max_examples=30, deadline=None)
@given(limit=st.integers(1, 400_000), dtype=st.sampled_from([None, "bfloat16"]))
def test_a_bucket_ends_between_layers_whatever_its_size(nano_folders, limit, dtype):
    source = PolicyWeights(SMALL.setdefault("model", load(nano_folders["qwen3"])), bucket_bytes=limit, dtype=dtype)
    buckets = [[name for name, _ in bucket.tensors] for bucket in source.buckets()]
    for layer in ("0", "1"):
        assert sum(any(layer_of(name) == layer for name in bucket) for bucket in buckets) == 1
    for bucket in source.buckets():
        parts = {layer_of(name) or name.rpartition(".")[0] for name, _ in bucket.tensors}
        tied = {"lm_head", "model.embed_tokens"} <= parts
        assert sum(info.nbytes for info in bucket.infos) <= limit or len(parts) == 1 + tied
    assert len([name for bucket in buckets for name in bucket]) == len(source.manifest())


SMALL: dict = {}


@pytest.mark.parametrize(("count", "layers"), [(1, [4]), (2, [2, 2]), (3, [2, 2]), (4, [1] * 4), (9, [1] * 4)])
def test_move_model_batches_is_groups_of_whole_layers_and_the_rest(small_model, count, layers):
    model = small_model("llama", num_hidden_layers=4)
    buckets = [
        [name for name, _ in bucket.tensors] for bucket in PolicyWeights(model, move_model_batches=count).buckets()
    ]
    assert [len({layer_of(name) for name in bucket}) for bucket in buckets[:-1]] == layers
    assert all(layer_of(name) for bucket in buckets[:-1] for name in bucket)
    assert buckets[-1] == ["model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_adapter_alone_is_what_peft_would_save_bit_for_bit(nano_folders, tmp_path, dtype):
    from safetensors.torch import load_file

    policy = adapted(nano_folders["llama"], modules_to_save=["lm_head"]).to(dtype)
    policy.save_pretrained(tmp_path)
    adapter = adapter_weights(policy)
    saved = load_file(tmp_path / "adapter_model.safetensors")
    assert adapter.tensors.keys() == saved.keys()
    for name, tensor in saved.items():
        assert adapter.tensors[name].dtype == dtype
        assert torch.equal(adapter.tensors[name].view(torch.uint8), tensor.view(torch.uint8))
    written = json.loads((tmp_path / "adapter_config.json").read_text())
    assert json.loads(json.dumps(adapter.config)).keys() == written.keys()
    assert {"r", "lora_alpha"} <= {name for name, value in written.items() if adapter.config[name] == value}
    assert sorted(written["target_modules"]) == adapter.config["target_modules"]


def test_an_adapter_that_was_sent_gives_the_same_policy(nano_folders, tmp_path):
    from safetensors.torch import save_file

    policy = adapted(nano_folders["qwen3"], lora_alpha=20)
    adapter = adapter_weights(policy)
    (tmp_path / "adapter_config.json").write_text(json.dumps(adapter.config))
    save_file(adapter.tensors, tmp_path / "adapter_model.safetensors")
    loaded = PeftModel.from_pretrained(load(nano_folders["qwen3"]), str(tmp_path)).eval()
    assert torch.equal(logits(loaded), logits(policy))


def test_an_adapter_is_copied_so_that_training_may_go_on(nano_folders):
    policy = adapted(nano_folders["qwen2"])
    adapter = adapter_weights(policy)
    before = adapter.digest()
    for parameter in policy.parameters():
        parameter.data.zero_()
    assert adapter.digest() == before


def test_full_tuning_has_no_adapter_to_send(nano_folders):
    with pytest.raises(ConfigError, match=r"--vllm_enable_lora: true: the policy has no adapter"):
        adapter_weights(load(nano_folders["qwen2"]))


def test_a_copy_left_for_a_parameter_that_is_gone_is_never_given_for_one_with_its_id():
    parameter = torch.nn.Parameter(torch.ones(2, 3))
    with reading_from({id(parameter): torch.zeros(5)}), gathered([parameter]) as whole:
        assert torch.equal(whole(parameter), torch.ones(2, 3))
