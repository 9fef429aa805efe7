"""`--new_special_tokens`: tokens that tokenizer and model get, and that are trained."""

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl_runs import argv_of, trained, weights, written

from swift.arguments import parse
from swift.cli.dry_run import dry_run_trl
from swift.errors import ConfigError
from swift.models.arguments import CheckpointArguments
from swift.models.policy import load_for_inference
from swift.models.tokenizer import load_chat, load_tokenizer

ROWS = [
    {"messages": [{"role": "user", "content": f"<|a|>{n}"}, {"role": "assistant", "content": "<|b|>"}]}
    for n in range(16)
]
SAVED = "--modules_to_save embed_tokens lm_head"


@pytest.fixture
def settings(nano_folders, tmp_path):
    """Resolved settings of a run with two new tokens, one of them in a file."""
    (tmp_path / "tokens.txt").write_text("<|a|>\n")

    def resolved(*flags, model="llama"):
        own = {
            "--model": nano_folders[model], "--dataset": written(tmp_path / "rows.jsonl", ROWS), "--max_steps": 24,
            "--output_dir": tmp_path / "out", "--per_device_train_batch_size": 8, "--learning_rate": "2e-2",
        }  # fmt: skip
        new = ["--new_special_tokens", str(tmp_path / "tokens.txt"), "<|b|>"]
        return parse("sft", argv_of(own, new, *flags), {})

    return resolved


@pytest.fixture
def roomy(nano_folders, tmp_path):
    """A model with more rows than tokens."""
    model = AutoModelForCausalLM.from_pretrained(nano_folders["llama"])
    model.resize_token_embeddings(280)
    model.save_pretrained(tmp_path / "roomy")
    AutoTokenizer.from_pretrained(nano_folders["llama"]).save_pretrained(tmp_path / "roomy")
    return str(tmp_path / "roomy")


def answered(args):
    """Greedily, to a row."""
    template, model = load_chat(args), load_for_inference(args)
    ids = torch.tensor([template.encode_prompt(ROWS[3]["messages"][:1])])
    found = model.generate(ids, max_new_tokens=1, do_sample=False)[0, -1]
    return template.decode([int(found)], skip_special_tokens=False)


def test_an_adapter_learns_new_tokens_in_rows_that_the_model_has(settings, roomy):
    checkpoint = trained(settings(SAVED, "--tuner_type lora", "--model", roomy)) / "checkpoint-24"
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    assert tokenizer("<|a|><|b|>", add_special_tokens=False)["input_ids"] == [263, 264]
    assert tokenizer.decode([263, 264], skip_special_tokens=True) == ""
    assert answered(CheckpointArguments(adapters=[str(checkpoint)])) == "<|b|>"


def test_a_whole_model_gets_rows(settings, nano_folders):
    checkpoint = trained(settings("--tuner_type full")) / "checkpoint-24"
    assert answered(CheckpointArguments(model=str(checkpoint))) == "<|b|>"
    rows = weights(checkpoint)["lm_head.weight"]
    assert len(rows) == 320 and len(weights(nano_folders["llama"])["lm_head.weight"]) == 263
    assert len(load_tokenizer(CheckpointArguments(model=str(checkpoint)))) == 265


WRONG = [
    ("--tuner_type lora", "2 tokens: embed_tokens is not trained, nor are their rows; use --modules_to_save"),
    ("--tuner_type lora --modules_to_save embed_tokens", "lm_head is not trained"),
    ("--tuner_type full --freeze_parameters lm_head", "lm_head is not trained"),
    ("--tuner_type full --new_special_tokens no.txt", "--new_special_tokens: no.txt: no such file"),
]


@pytest.mark.parametrize(("flags", "problem"), WRONG)
def test_tokens_that_would_not_be_trained_are_refused_in_the_dry_run(settings, roomy, flags, problem):
    with pytest.raises(ConfigError, match=problem):
        dry_run_trl(settings("--model", roomy, flags))


def test_an_adapter_does_not_lengthen_its_base(settings):
    with pytest.raises(ConfigError, match="265 tokens with the new ones, and 263 rows in the embedding of the base"):
        dry_run_trl(settings(SAVED, "--tuner_type lora"))
