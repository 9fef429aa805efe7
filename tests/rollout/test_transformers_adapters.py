"""LoRA adapters that are merged into the weights of an in-process engine, and taken out again."""

from __future__ import annotations

import copy

import pytest
import torch
from experts import EXPERTS, on_experts
from oracle import gap, load
from transformers_parts import ask, copy_engine, sampled

from swift.errors import SyncFailed, Unsupported
from swift.models.checkpoint_tensors import read_adapter
from swift.rollout.engines.transformers.weights import MergedAdapter
from swift.rollout.weights.base import AdapterWeights


def adapted(model, *, seed=2, **options):
    """A PEFT policy whose adapter changes something."""
    from peft import LoraConfig, get_peft_model

    settings = {"r": 4, "lora_alpha": 12, "target_modules": ["q_proj", "v_proj", "down_proj"], **options}
    policy = get_peft_model(copy.deepcopy(model), LoraConfig(task_type="CAUSAL_LM", **settings)).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            if "lora_" in name or "modules_to_save" in name or (options.get("bias") and name.endswith("bias")):
                parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
    return policy


def adapter_of(policy):
    return AdapterWeights(*read_adapter(policy))


ADAPTERS = {
    "plain": ("qwen2", {}),
    "rank-stabilised": ("qwen2", {"use_rslora": True, "r": 8}),
    "ranks by pattern": ("llama", {"rank_pattern": {"layers.1.self_attn.q_proj": 2, "down_proj": 6}}),
    "alphas by pattern": ("llama", {"alpha_pattern": {r".*\.0\..*v_proj": 3, "down_proj": 40}}),
    "head and embedding of an untied model": (
        "llama", {"target_modules": ["embed_tokens", "lm_head"], "r": 3},
    ),
    "a module trained whole": ("llama", {"modules_to_save": ["lm_head"]}),
    "biases trained whole": ("qwen2", {"bias": "all"}),
    "weight-decomposed": ("qwen2", {"use_dora": True}),
    "a bias of the adapter": ("qwen2", {"lora_bias": True, "target_modules": ["q_proj", "k_proj"]}),
}  # fmt: skip


@pytest.mark.parametrize("case", ADAPTERS)
def test_a_merged_adapter_samples_like_the_policy_that_peft_runs(nano_folders, case):
    arch, options = ADAPTERS[case]
    model = load(nano_folders[arch])
    policy = adapted(model, **options)
    engine = copy_engine(model)
    engine.load_adapter(adapter_of(policy), 3)
    completion = sampled(engine)
    assert gap(policy, ask(), completion) < 1e-5
    assert gap(model, ask(), completion) > 1e-3
    assert completion.versions == [(3, 0, 12)]
    engine.drop_adapter()
    assert engine.version == 0
    for name, parameter in engine.model.named_parameters():
        assert torch.equal(parameter, model.state_dict()[name]), name


def test_weights_stored_the_other_way_around_are_merged_the_other_way_around(small_model):
    model = small_model("gpt2").eval()
    policy = adapted(model, target_modules=["c_attn", "c_fc"], fan_in_fan_out=True)
    engine = copy_engine(model)
    engine.load_adapter(adapter_of(policy), 1)
    assert gap(policy, ask(), sampled(engine)) < 1e-5


@pytest.mark.parametrize("arch", EXPERTS)
def test_adapters_on_experts_are_merged_at_every_level(small_model, arch):
    model = small_model(arch, **EXPERTS[arch][0]).eval()
    policy = on_experts(arch, copy.deepcopy(model))
    engine = copy_engine(model)
    engine.load_adapter(adapter_of(policy), 1)
    assert gap(policy, ask(), sampled(engine)) < 1e-5
    merged = copy.deepcopy(policy).merge_and_unload().state_dict()
    assert max((engine.model.state_dict()[name] - one).abs().max() for name, one in merged.items()) < 1e-6


def test_merging_in_bfloat16_rounds_once(nano_folders):
    model = load(nano_folders["llama"]).to(torch.bfloat16)
    policy = adapted(model)
    engine = copy_engine(model)
    engine.load_adapter(adapter_of(policy), 1)
    name = "model.layers.0.self_attn.q_proj"
    layer = policy.base_model.model.get_submodule(name)
    product = layer.lora_B["default"].weight.float() @ layer.lora_A["default"].weight.float()
    expected = (model.get_submodule(name).weight.float() + 3.0 * product).to(torch.bfloat16)
    assert torch.equal(engine.model.get_submodule(name).weight, expected)


REFUSED = {
    "another method": (lambda config, _: config.update(peft_type="IA3"), Unsupported, "peft_type IA3: only LoRA"),
    "another base": (
        lambda config, _: config.update(init_lora_weights="pissa_niter_4"), Unsupported, "changes the base weights too"
    ),
    "another rank": (
        lambda config, _: config.update(r=5), SyncFailed, r"lora_A.weight has shape \[4, 128\] instead of \[5, 128\]"
    ),
    "half a pair": (lambda _, t: t.pop(f"{KEY}.lora_B.weight"), SyncFailed, "q_proj.lora_B.weight is missing"),
    "no tensors": (lambda _, t: t.clear(), SyncFailed, "comes without tensors"),
    "an unknown module": (
        lambda _, t: t.update({"base_model.model.nothing.lora_A.weight": t.pop(f"{KEY}.lora_A.weight")}),
        SyncFailed,
        "nothing.lora_A.weight is no tensor of such an adapter",
    ),
    "another shape": (
        lambda _, t: t.update({f"{KEY}.lora_A.weight": torch.zeros(4, 9)}),
        SyncFailed,
        r"q_proj.lora_A.weight has shape \[4, 9\] instead of \[4, 32\]",
    ),
}  # fmt: skip
KEY = "base_model.model.model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize("case", REFUSED)
def test_adapters_that_do_not_fit_are_refused_by_name_and_change_nothing(nano_folders, case):
    spoil, error, line = REFUSED[case]
    model = load(nano_folders["llama"])
    engine = copy_engine(model)
    good = adapted(model)
    adapter = adapter_of(good)
    engine.load_adapter(adapter, 1)
    config, tensors = dict(adapter.config), dict(adapter.tensors)
    spoil(config, tensors)
    with pytest.raises(error, match=line):
        engine.load_adapter(AdapterWeights(config, tensors), 2)
    assert engine.version == 1
    assert gap(good, ask(), sampled(engine)) < 1e-5


def test_an_adapter_that_changes_one_of_two_tied_modules_is_refused(nano_folders):
    model = load(nano_folders["qwen2"])
    with pytest.raises(Unsupported, match="the model ties it to"):
        MergedAdapter(model, adapter_of(adapted(model, target_modules=["embed_tokens"])), 1)


def test_an_adapter_that_fails_half_way_leaves_nothing_that_samples(nano_folders, monkeypatch):
    model = load(nano_folders["qwen2"])
    engine, policy = copy_engine(model), adapted(model)
    adapter = adapter_of(policy)
    copies = []

    def full(target, source):
        copies.extend(one for one in engine.model.parameters() if one is target)
        if len(copies) == 3:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return copy_(target, source)

    copy_ = torch.Tensor.copy_
    monkeypatch.setattr(torch.Tensor, "copy_", full)
    with pytest.raises(SyncFailed, match="adapter version 3 for transformers: OutOfMemoryError: CUDA out of memory"):
        engine.load_adapter(adapter, 3)
    monkeypatch.undo()
    assert not engine.health().alive
    for attempt in (lambda: sampled(engine), lambda: engine.load_adapter(adapter, 4), engine.drop_adapter):
        with pytest.raises(SyncFailed, match="adapter version 3 is in its weights by half; rebuild"):
            attempt()
    engine.rebuild()
    assert gap(model, ask(), sampled(engine)) < 1e-5
    engine.load_adapter(adapter, 5)
    assert gap(policy, ask(), sampled(engine)) < 1e-5


def test_a_copy_made_for_adapters_keeps_both_through_every_level(nano_folders):
    model = load(nano_folders["llama"])
    engine = copy_engine(model, keeps_base=True)
    policy = adapted(model)
    engine.load_adapter(adapter_of(policy), 1)
    assert "only adapters are synced" in engine.sleep(2).note
    engine.wake()
    assert gap(policy, ask(), sampled(engine)) < 1e-5
    engine.drop_adapter()
    assert gap(model, ask(), sampled(engine)) < 1e-5
