import json
import math
import shutil
from pathlib import Path

import pytest
import torch
from hybrids import hybrid
from policies import full, lora, moved
from safetensors.torch import load_file, save_file

from swift.errors import ConfigError
from swift.models import load_chat
from swift.models.policy import load_policy, pick_dtype


def trainable_counts(model) -> tuple[int, int]:
    """Numbers of trainable and of all parameters."""
    sizes = [(parameter.numel(), parameter.requires_grad) for parameter in model.parameters()]
    return sum(size for size, trained in sizes if trained), sum(size for size, _ in sizes)


def edited_config(model: str, folder: Path, **values) -> str:
    shutil.copytree(model, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **values}))
    return str(folder)


@pytest.mark.parametrize("arch", ["nemotron_h", "falcon_h1"])
def test_all_linear_leaves_out_what_peft_refuses_in_mamba_layers(arch, tmp_path):
    hybrid(arch).save_pretrained(tmp_path)
    names = [name for name, _ in load_policy(lora(tmp_path)).named_parameters() if ".lora_A" in name]
    adapted = {name.split(".lora_A")[0].rpartition(".")[2] for name in names}
    assert {"in_proj", "q_proj", "down_proj"} <= adapted and not {"out_proj", "conv1d"} & adapted


def test_all_linear_reaches_attention_and_mlp_but_not_the_head(any_model):
    policy = load_policy(lora(any_model, target_modules=["all-linear"]))
    targets = {name.split(".lora_A")[0].rpartition(".")[2] for name, _ in policy.named_parameters() if "lora_A" in name}
    assert targets == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}


def test_rank_alpha_targets_and_modules_to_save_are_passed_on(qwen2):
    policy = load_policy(
        lora(qwen2, lora_rank=3, lora_alpha=5, target_modules=["q_proj"], modules_to_save=["norm"], lora_dropout=0.25)
    )
    config = policy.peft_config["default"]
    assert (config.r, config.lora_alpha, config.lora_dropout) == (3, 5, 0.25)
    names = [name for name, p in policy.named_parameters() if p.requires_grad]
    assert any("norm.modules_to_save" in name for name in names)
    assert all("q_proj" in name or "modules_to_save" in name for name in names)


def test_gradients_reach_the_adapter_through_gradient_checkpointing(any_model, logits):
    gradients = []
    for checkpointing in (False, True):
        torch.manual_seed(0)
        policy = load_policy(lora(any_model))
        moved(policy)
        if checkpointing:
            policy.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        policy(input_ids=torch.arange(12)[None]).logits.square().sum().backward()
        gradients.append([p.grad for p in policy.parameters() if p.requires_grad])
    assert all(torch.allclose(a, b, atol=1e-5, rtol=1e-4) for a, b in zip(*gradients, strict=True))
    assert any(g.abs().max() > 0 for g in gradients[1])


def test_dropout_of_the_model_is_off_unless_asked_for(qwen2, tmp_path):
    model = edited_config(qwen2, tmp_path / "m", attention_dropout=0.5)
    ids = torch.arange(30)[None]

    def spread(policy):
        with torch.no_grad():
            return (policy(input_ids=ids).logits - policy(input_ids=ids).logits).abs().max().item()

    assert spread(load_policy(full(model))) == 0.0
    assert spread(load_policy(lora(model))) == 0.0
    assert spread(load_policy(full(model), model_dropout=True)) > 0.0


def test_an_adapter_trained_with_dropout_starts_rl_without(qwen2, tmp_path):
    load_policy(lora(qwen2, lora_dropout=0.3)).save_pretrained(tmp_path / "a")
    policy = load_policy(lora(qwen2, adapters=[str(tmp_path / "a")]))
    rates = [module.p for module in policy.modules() if isinstance(module, torch.nn.Dropout)]
    assert all(rate == 0.0 for rate in rates)


def test_training_goes_on_from_an_adapter(any_model, make_adapter, logits):
    adapter = make_adapter(any_model)
    continued = load_policy(lora(any_model, adapters=[adapter]))
    trained, _ = trainable_counts(continued)
    assert trained == trainable_counts(load_policy(lora(any_model)))[0]
    base = logits(load_policy(full(any_model)).eval())
    assert (logits(continued.eval()) - base).abs().max() > 1e-2


def test_full_tuning_folds_all_start_adapters_in(qwen2, make_adapter, logits):
    first, second = make_adapter(qwen2, "one", 1), make_adapter(qwen2, "two", 2)
    base = load_file(f"{qwen2}/model.safetensors")["model.layers.0.mlp.up_proj.weight"]

    def change(*adapters):
        policy = load_policy(full(qwen2, adapters=list(adapters)))
        return policy.get_submodule("model.layers.0.mlp.up_proj").weight.detach() - base

    assert torch.allclose(change(first, second), change(first) + change(second), atol=1e-6)
    policy = load_policy(full(qwen2, adapters=[first]))
    assert trainable_counts(policy)[0] == trainable_counts(policy)[1]
    assert not any("lora" in name for name, _ in policy.named_parameters())


def test_lora_training_from_two_adapters_is_refused(qwen2, make_adapter):
    adapters = [make_adapter(qwen2, "one"), make_adapter(qwen2, "two")]
    with pytest.raises(ConfigError, match=r"lora training starts from one adapter.*merge-lora"):
        load_policy(lora(qwen2, adapters=adapters))


def test_an_adapter_of_another_architecture_is_named(tiny_folders, tmp_path, make_adapter):
    from swift.models.tiny import build_tiny

    adapter = make_adapter(str(tiny_folders["qwen2"]))
    other = str(build_tiny(tmp_path / "wide", "qwen2", "tiny"))
    with pytest.raises(ConfigError, match=r"--adapters: .*adapter: does not fit the model"):
        load_policy(lora(other, adapters=[adapter]))


def test_the_dtype_is_float32_on_the_cpu_unless_given(qwen2):
    assert next(load_policy(full(qwen2, torch_dtype=None), device="cpu").parameters()).dtype == torch.float32
    assert next(load_policy(full(qwen2, torch_dtype="bfloat16")).parameters()).dtype == torch.bfloat16
    assert pick_dtype(None, "cuda") == torch.bfloat16


def test_the_attention_implementation_is_passed_on(qwen2):
    assert load_policy(full(qwen2, attn_impl="eager")).config._attn_implementation == "eager"


def test_an_architecture_without_sdpa_gets_eager(small_model, tmp_path):
    small_model("gpt_oss").save_pretrained(tmp_path)
    assert load_policy(full(tmp_path)).config._attn_implementation == "eager"


def test_missing_weights_are_never_invented(qwen2, tmp_path):
    shutil.copytree(qwen2, tmp_path / "m")
    weights = load_file(tmp_path / "m" / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, tmp_path / "m" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"1 weights of the architecture are not in .*layers\.1\.mlp\.up_proj"):
        load_policy(full(str(tmp_path / "m")))


def test_a_torn_weight_file_is_a_one_line_error(qwen2, tmp_path):
    shutil.copytree(qwen2, tmp_path / "m")
    weights = tmp_path / "m" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:5000])
    with pytest.raises(ConfigError, match=r"--model: .*its weights cannot be loaded") as error:
        load_policy(full(str(tmp_path / "m")))
    assert len(error.value.problems) == 1


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"intermediate_size": 64}, "--model: "),
        ({"model_type": "qwen99"}, r"--model: .*qwen99"),
        ({"rope_theta": math.inf}, "config.json: rope_theta inf: the model computes NaN"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": -1.0}}, "config.json: rope_theta -1"),
        ({"rms_norm_eps": math.nan}, "config.json: rms_norm_eps nan"),
        ({"hidden_size": 10**400}, "config.json: hidden_size 10000"),
        (
            {"model_type": "my_own_model", "auto_map": {"AutoConfig": "configuration_mine.MyConfig"}},
            r"needs Python code from its repository.*--trust_remote_code true",
        ),
    ],
)
def test_what_a_config_asks_for_and_cannot_be_loaded_is_named(qwen2, tmp_path, values, message):
    with pytest.raises(ConfigError, match=message):
        load_policy(full(edited_config(qwen2, tmp_path / "m", **values)))


@pytest.mark.parametrize(
    ("file", "values"),
    [
        ("config.json", {"auto_map": {"AutoConfig": "mine.Mine", "AutoModelForCausalLM": "mine.Mine"}}),
        (
            "tokenizer_config.json",
            {"auto_map": {"AutoTokenizer": ["mine.Mine", "mine.Mine"]}, "tokenizer_class": "Mine"},
        ),
        ("generation_config.json", {"auto_map": {"GenerationConfig": "mine.Mine"}}),
        ("generation_config.json", {"custom_generate": "mine.py"}),
    ],
)
def test_repository_code_does_not_run_without_the_flag(qwen2, tmp_path, file, values):
    folder = Path(edited_config(qwen2, tmp_path / "m"))
    written = json.loads((folder / file).read_text())
    (folder / file).write_text(json.dumps({**written, **values}))
    (folder / "custom_generate").mkdir()
    for script in ("mine.py", "custom_generate/generate.py"):
        (folder / script).write_text("raise SystemExit('repository code ran')")
    args = full(str(folder))
    assert load_policy(args).config.model_type == "qwen2"
    assert load_chat(args).tokenizer.encode("text")


def test_model_type_overrides_detection(qwen2, tmp_path):
    model = edited_config(qwen2, tmp_path / "m", model_type="unreadable")
    assert load_policy(full(model, model_type="qwen2_5")).config.model_type == "qwen2"
    with pytest.raises(ConfigError, match=r"--model_type: zwen2: .*qwen2"):
        load_policy(full(model, model_type="zwen2"))
