import runpy
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from swift.models.tiny import ARCHS, build_tiny

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("arch", ARCHS)
def test_a_built_folder_loads_like_a_downloaded_model(arch, tiny_folders):
    model = AutoModelForCausalLM.from_pretrained(tiny_folders[arch])
    tokenizer = AutoTokenizer.from_pretrained(tiny_folders[arch])
    assert model.config.model_type == arch
    assert model.config.tie_word_embeddings is (arch != "llama")
    assert model.config.vocab_size == len(tokenizer)
    assert tokenizer.convert_ids_to_tokens(model.generation_config.eos_token_id) == ["<|im_end|>", "<|endoftext|>"]


def test_the_sizes_have_the_promised_numbers_of_parameters(tmp_path):
    def count(size):
        return AutoModelForCausalLM.from_pretrained(build_tiny(tmp_path / size, size=size)).num_parameters()

    assert 30_000 < count("nano") < 60_000
    assert 550_000 < count("tiny") < 700_000


def test_the_seed_alone_decides_the_weights(tmp_path):
    def weights(name, seed):
        torch.manual_seed(len(name))  # the caller's generator must not matter, and is left alone
        expected = torch.rand(3, generator=torch.Generator().manual_seed(len(name)))
        built = (build_tiny(tmp_path / name, size="nano", seed=seed) / "model.safetensors").read_bytes()
        assert torch.equal(torch.rand(3), expected)
        return built

    first = weights("a", 1)
    assert first == weights("bb", 1)
    assert first != weights("ccc", 2)


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize(
    "text", ["12 + 34 = 46", "  two  spaces\n\ttab", "naïve 数 😀", "<think>3</think><answer>4</answer>", "x<|im_end|>"]
)
def test_text_survives_a_round_trip(arch, text, tiny_folders):
    tokenizer = AutoTokenizer.from_pretrained(tiny_folders[arch])
    assert tokenizer.decode(tokenizer(text).input_ids) == text


def test_every_digit_and_every_tag_is_one_token_and_tags_are_kept_for_rewards(qwen2):
    tokenizer = AutoTokenizer.from_pretrained(qwen2)
    ids = tokenizer("<think>907</think>").input_ids
    assert len(ids) == 5
    assert tokenizer.decode([*ids, tokenizer.eos_token_id], skip_special_tokens=True) == "<think>907</think>"


def test_a_tiny_reward_model_gives_one_number(tmp_path):
    folder = build_tiny(tmp_path, "llama", "nano", reward_model=True)
    model = AutoModelForSequenceClassification.from_pretrained(folder)
    assert model(input_ids=torch.tensor([[65, 66, 67]])).logits.shape == (1, 1)


def test_the_example_script_builds_a_model(tmp_path, monkeypatch, capsys):
    script = ROOT / "examples" / "tiny" / "build.py"
    monkeypatch.setattr(sys, "argv", [str(script), str(tmp_path / "m"), "--arch", "qwen3", "--size", "nano"])
    runpy.run_path(str(script), run_name="__main__")
    assert capsys.readouterr().out.strip() == str(tmp_path / "m")
    assert (tmp_path / "m" / "model.safetensors").is_file()
