"""Merging from and into files: what is exact, what is kept, how much memory it takes."""

import gc
import json
from pathlib import Path

import pytest
import safetensors.torch
import torch
from experts import EXPERTS, on_experts
from policies import IDS, moved
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoModelForTokenClassification

from swift.errors import ConfigError
from swift.models.arguments import ModelArguments
from swift.models.export import merge_adapter
from swift.models.policy import load_policy
from swift.models.shard_merge import MergedModel
from swift.models.source import locate


def adapted(model: str, folder: Path, head=None, **more) -> tuple[str, torch.Tensor]:
    """Folder and logits of an adapter with random weights."""
    policy = moved(load_policy(ModelArguments(model=model, **more), reward_head=head).eval())
    policy.config.pad_token_id = policy.config.vocab_size - 1
    policy.save_pretrained(folder)
    with torch.no_grad():
        return str(folder), policy(input_ids=IDS % policy.config.vocab_size).logits


def logits_of(kind, folder: Path) -> torch.Tensor:
    model = kind.from_pretrained(folder).eval()
    with torch.no_grad():
        return model(input_ids=IDS % model.config.vocab_size).logits


@pytest.mark.parametrize("tuner", [{"modules_to_save": ["embed_tokens"]}, {"target_modules": ["embed_tokens"]}])
def test_a_head_stays_what_it_was_if_only_the_embedding_it_was_tied_to_is_trained(qwen2, tmp_path, tuner):
    adapter, wanted = adapted(qwen2, tmp_path / "adapter", **tuner)
    folder = merge_adapter(ModelArguments(model=qwen2, adapters=[adapter]), tmp_path / "merged")
    assert torch.allclose(logits_of(AutoModelForCausalLM, folder), wanted, atol=1e-5)
    base, merged = load_file(Path(qwen2) / "model.safetensors"), load_file(folder / "model.safetensors")
    assert torch.equal(merged["lm_head.weight"], base["model.embed_tokens.weight"])
    assert not torch.equal(merged["model.embed_tokens.weight"], base["model.embed_tokens.weight"])


@pytest.mark.parametrize(
    ("head", "kind"), [("answer", AutoModelForSequenceClassification), ("step", AutoModelForTokenClassification)]
)
def test_the_adapter_of_a_reward_model_becomes_a_whole_reward_model(qwen2, tmp_path, head, kind):
    adapter, wanted = adapted(qwen2, tmp_path / "adapter", head, use_dora=True)
    folder = merge_adapter(ModelArguments(model=qwen2, adapters=[adapter]), tmp_path / "merged")
    assert torch.allclose(logits_of(kind, folder), wanted, atol=1e-5)
    assert (
        kind.__name__.removeprefix("AutoModel") in json.loads((folder / "config.json").read_text())["architectures"][0]
    )


def test_adapters_of_two_kinds_are_merged_in_order_into_several_files_with_an_index(qwen2, tmp_path):
    first, _ = adapted(qwen2, tmp_path / "first")
    between = merge_adapter(ModelArguments(model=qwen2, adapters=[first]), tmp_path / "between")
    second, wanted = adapted(str(between), tmp_path / "second", tuner_type="ia3")
    args = ModelArguments(model=qwen2, adapters=[first, second])
    merged = MergedModel(locate(args), args)
    merged.write(tmp_path, file_bytes=40_000)
    merged.config.save_pretrained(tmp_path)
    assert torch.allclose(logits_of(AutoModelForCausalLM, tmp_path), wanted, atol=1e-5)
    assert len({*json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"].values()}) > 2


@pytest.mark.parametrize("wanted", [None, "float16"])
def test_tensors_keep_the_types_of_the_files_and_what_no_adapter_changes_keeps_its_bits(qwen2, tmp_path, wanted):
    adapter, _ = adapted(qwen2, tmp_path / "adapter")
    tensors = {name: one.bfloat16() for name, one in load_file(Path(qwen2) / "model.safetensors").items()}
    tensors["model.norm.weight"] = tensors["model.norm.weight"].float() + 1e-4
    tensors["mtp.layers.0.weight"] = torch.ones(3)  # which the architecture does not have
    base = tmp_path / "base"
    base.mkdir()
    for file in Path(qwen2).iterdir():
        (base / file.name).write_bytes(file.read_bytes())
    save_file(tensors, base / "model.safetensors", {"format": "pt"})
    folder = merge_adapter(ModelArguments(model=str(base), adapters=[adapter], torch_dtype=wanted), tmp_path / "out")
    merged = load_file(folder / "model.safetensors")
    assert merged.keys() == tensors.keys()
    if wanted:
        assert {one.dtype for one in merged.values()} == {torch.float16}
        return
    assert {name: one.dtype for name, one in merged.items()} == {name: one.dtype for name, one in tensors.items()}
    changed = {name for name, one in merged.items() if not torch.equal(one, tensors[name])}
    assert changed and all("proj" in name for name in changed)


@pytest.mark.parametrize("kind", ["mixtral", "gpt2", "gpt_neox"])
def test_architectures_whose_files_have_other_names_than_their_modules(small_model, tmp_path, kind):
    small_model(kind).save_pretrained(tmp_path / "base")
    targets = {"mixtral": ["q_proj", "lm_head"], "gpt2": ["c_attn"], "gpt_neox": ["query_key_value"]}[kind]
    adapter, wanted = adapted(str(tmp_path / "base"), tmp_path / "adapter", target_modules=targets)
    given = ModelArguments(adapters=[adapter])
    merged = MergedModel(locate(given), given)
    (tmp_path / "out").mkdir()
    merged.write(tmp_path / "out")
    merged.config.save_pretrained(tmp_path / "out")
    assert torch.allclose(logits_of(AutoModelForCausalLM, tmp_path / "out"), wanted, atol=1e-5)


@pytest.mark.parametrize("arch", EXPERTS)
def test_adapters_on_experts_are_merged_into_the_files_of_single_experts(small_model, tmp_path, arch):
    model = small_model(arch, **EXPERTS[arch][0]).eval()
    model.save_pretrained(tmp_path / "base")
    policy = on_experts(arch, model)
    policy.save_pretrained(tmp_path / "adapter")
    with torch.no_grad():
        wanted = policy(input_ids=IDS % policy.config.vocab_size).logits
    given = ModelArguments(model=str(tmp_path / "base"), adapters=[str(tmp_path / "adapter")])
    merged = MergedModel(locate(given), given)
    (tmp_path / "out").mkdir()
    merged.write(tmp_path / "out", file_bytes=30_000)
    merged.config.save_pretrained(tmp_path / "out")
    assert torch.allclose(logits_of(AutoModelForCausalLM, tmp_path / "out"), wanted, atol=1e-5)
    keys = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())["weight_map"].keys()
    assert keys == load_file(tmp_path / "base" / "model.safetensors").keys()


def test_the_adapter_of_a_reward_model_with_experts_becomes_a_whole_reward_model(small_model, tmp_path):
    small_model("qwen3_moe").save_pretrained(tmp_path / "base")
    adapter, wanted = adapted(str(tmp_path / "base"), tmp_path / "adapter", "answer")
    given = ModelArguments(model=str(tmp_path / "base"), adapters=[adapter])
    merged = MergedModel(locate(given), given)
    (tmp_path / "out").mkdir()
    merged.write(tmp_path / "out")
    merged.config.pad_token_id = merged.config.vocab_size - 1
    merged.config.save_pretrained(tmp_path / "out")
    assert torch.allclose(logits_of(AutoModelForSequenceClassification, tmp_path / "out"), wanted, atol=1e-5)


def test_a_quantised_base_and_an_unfit_adapter_are_refused(qwen2, tmp_path):
    adapter, _ = adapted(qwen2, tmp_path / "adapter")
    unfit = tmp_path / "unfit"
    unfit.mkdir()
    Path(unfit, "adapter_config.json").write_bytes(Path(adapter, "adapter_config.json").read_bytes())
    tensors = load_file(Path(adapter, "adapter_model.safetensors"))
    lost = tensors.popitem()[0]
    save_file(tensors, unfit / "adapter_model.safetensors")
    with pytest.raises(ConfigError, match=f"--adapters: .*does not fit the model .*{lost} is missing"):
        merge_adapter(ModelArguments(model=qwen2, adapters=[str(unfit)]), tmp_path / "out")
    base = tmp_path / "base"
    base.mkdir()
    for file in Path(qwen2).iterdir():
        (base / file.name).write_bytes(file.read_bytes())
    config = json.loads((base / "config.json").read_text())
    quantised = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    (base / "config.json").write_text(json.dumps({**config, "quantization_config": quantised}))
    with pytest.raises(ConfigError, match=r"--model: .*holds quantised weights"):
        merge_adapter(ModelArguments(model=str(base), adapters=[adapter]), tmp_path / "out")


def test_merging_holds_neither_the_model_nor_its_result(qwen2, tmp_path, monkeypatch):
    adapter, _ = adapted(qwen2, tmp_path / "adapter", lora_rank=1)
    args = ModelArguments(model=qwen2, adapters=[adapter])

    def held() -> int:
        """Bytes of the tensors made since `gc.freeze`."""
        gc.collect()
        tensors = [one for one in gc.get_objects() if type(one) in (torch.Tensor, torch.nn.Parameter)]
        return sum({one.data_ptr(): one.nbytes for one in tensors if not one.is_meta}.values())

    def peak(file_bytes: int) -> int:
        found = []
        monkeypatch.setattr(safetensors.torch, "save_file", lambda *words: (found.append(held()), save(*words)))
        gc.freeze()
        MergedModel(locate(args), args).write(tmp_path, file_bytes)
        gc.unfreeze()
        return max(found)

    save = safetensors.torch.save_file
    whole = Path(qwen2, "model.safetensors").stat().st_size
    adapters = Path(adapter, "adapter_model.safetensors").stat().st_size
    largest = 263 * 32 * 4
    assert 0 < peak(20_000) < 2 * largest + adapters < whole / 2 < peak(10 * whole), (whole, largest, adapters)
