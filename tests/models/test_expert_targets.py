"""What names of projections mean in a mixture of experts: experts, shared experts and dense layers alike."""

from __future__ import annotations

import re

import pytest
from experts import HYBRID
from peft import PeftModel

from swift.errors import ConfigError
from swift.models.arguments import ModelArguments
from swift.models.policy import load_for_inference, load_policy
from swift.models.tuners import expert_lines

PROJECTIONS = ["gate_proj", "up_proj", "down_proj"]
EXPERTS = {"mlp.experts.gate_up_proj", "mlp.experts.down_proj"}
SHARED = {f"mlp.shared_experts.{one}" for one in PROJECTIONS}
DENSE = {f"mlp.{one}" for one in PROJECTIONS}
ATTENTION = {f"self_attn.{one}_proj" for one in "qkvo"}
LATENT = {f"self_attn.{one}" for one in ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")}
SHAPES = {"deepseek_v3": {"first_k_dense_replace": 1}, "qwen3_5_moe_text": HYBRID}
CASES = [
    ("qwen3_moe", {}, ATTENTION | EXPERTS | {"mlp.gate"}),
    ("qwen3_moe", {"target_modules": PROJECTIONS}, EXPERTS),
    ("qwen3_moe", {"target_modules": ["q_proj", "down_proj"]}, {"self_attn.q_proj", "mlp.experts.down_proj"}),
    ("qwen3_moe", {"target_modules": ["experts.down_proj", "mlp.gate"]}, {"mlp.experts.down_proj", "mlp.gate"}),
    ("qwen3_moe", {"target_regex": r".*layers\.1\..*(v|down)_proj"}, {"1.self_attn.v_proj", "1.mlp.experts.down_proj"}),
    ("mixtral", {}, ATTENTION | EXPERTS | {"mlp.gate"}),
    ("mixtral", {"target_modules": ["w1", "w2", "w3"]}, EXPERTS),
    ("deepseek_v3", {}, LATENT | EXPERTS | SHARED | DENSE | {"mlp.gate"}),
    ("deepseek_v3", {"target_modules": PROJECTIONS}, EXPERTS | SHARED | DENSE),
    ("deepseek_v3", {"target_modules": ["shared_experts.gate_proj"]}, {"mlp.shared_experts.gate_proj"}),
    ("deepseek_v3", {"target_regex": r".*\.0\.mlp\.(gate|up)_proj"}, {"0.mlp.gate_proj", "0.mlp.up_proj"}),
    ("gpt_oss", {}, ATTENTION),
    ("gpt_oss", {"target_parameters": ["experts.gate_up_proj", "experts.down_proj"]}, ATTENTION | EXPERTS),
    ("qwen3_5_moe_text", {"target_modules": PROJECTIONS}, {f"mlp.shared_expert.{one}" for one in PROJECTIONS}),
    ("qwen3_5_moe_text", {"target_modules": ["q_proj"], "target_parameters": sorted(EXPERTS)}, EXPERTS | {
        "self_attn.q_proj",
    }),
    ("qwen2", {"target_modules": ["q_proj"], "target_parameters": ["v_proj.weight"]}, {
        "self_attn.q_proj", "self_attn.v_proj",
    }),
]  # fmt: skip


def adapted(policy, numbers):
    """Places of adapters, with the number of the layer or without."""
    found = set()
    for name, layer in policy.named_modules():
        if hasattr(layer, "lora_A"):
            place = name.split("layers.")[1].replace(".base_layer", "")
            only = getattr(layer, "parameter_name", "weight")
            place += "" if only == "weight" else f".{only}"
            found.add(place if numbers else place.partition(".")[2])
    return found


@pytest.fixture
def folder(small_model, tmp_path):
    def make(arch):
        small_model(arch, **SHAPES.get(arch, {})).save_pretrained(tmp_path / "base")
        return str(tmp_path / "base")

    return make


@pytest.mark.parametrize(("arch", "flags", "places"), CASES)
def test_names_mean_experts_shared_experts_and_dense_layers(folder, tmp_path, arch, flags, places):
    base = folder(arch)
    numbers = any(re.match(r"\d", one) for one in places)
    args = ModelArguments(model=base, lora_rank=2, lora_alpha=4, **flags)
    policy = load_policy(args)
    assert adapted(policy, numbers) == places
    on_experts = [one for name, one in policy.named_parameters() if re.search(r"\.experts\.(base_layer\.)?lora_", name)]
    count = sum(one.numel() for one in on_experts)
    assert expert_lines(policy, args) == ([f"adapter: {count:,} parameters on experts"] if count else [])
    policy.save_pretrained(tmp_path / "adapter")
    again = PeftModel.from_pretrained(load_for_inference(ModelArguments(model=base)), str(tmp_path / "adapter"))
    assert adapted(again, numbers) == places
    shapes = {name: one.shape for name, one in policy.named_parameters() if "lora_" in name}
    assert shapes == {name: one.shape for name, one in again.named_parameters() if "lora_" in name}


@pytest.mark.parametrize("rslora", [False, True])
def test_each_projection_of_fused_experts_has_the_rank_and_scale_of_the_settings(folder, rslora):
    policy = load_policy(ModelArguments(model=folder("qwen3_moe"), lora_rank=2, lora_alpha=6, use_rslora=rslora))
    wrappers = [one for one in policy.modules() if hasattr(one, "parameter_name")]
    layers = {one.parameter_name: one for one in wrappers if one.num_experts > 1}
    assert {name: one.r["default"] for name, one in layers.items()} == {"gate_up_proj": 4, "down_proj": 2}
    scale = 6 / 2**0.5 if rslora else 3
    assert [one.scaling["default"] for one in layers.values()] == pytest.approx([scale, scale])


@pytest.mark.parametrize(
    ("arch", "flags", "message"),
    [
        ("qwen3_moe", {"target_modules": ["gate_proj"]}, r"--target_modules: gate_proj: the model holds gate_proj and "
         r"up_proj of its experts as one parameter, which has one adapter; name up_proj, too"),
        ("mixtral", {"target_modules": PROJECTIONS}, "--target_modules: gate_proj: fits no module"),
        ("gpt_oss", {"target_modules": PROJECTIONS}, "--target_modules: gate_proj: fits no module"),
        ("gpt_oss", {"target_parameters": ["experts.up_proj"]}, "--target_parameters: experts.up_proj: fits no param.*"
         "valid: .*experts.gate_up_proj"),
    ],
)  # fmt: skip
def test_what_cannot_have_an_adapter_is_refused(folder, arch, flags, message):
    with pytest.raises(ConfigError, match=message):
        load_policy(ModelArguments(model=folder(arch), **flags))
