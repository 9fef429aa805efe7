"""Images, video and audio, and checkpoints with towers for them, are refused in every mode and in its dry run."""

import json

import pytest
from desk import contents, refused

from swift.models.tiny import build_tokenizer

CHAT = [{"role": "user", "content": "<image>What?"}, {"role": "assistant", "content": "x"}]
ANSWERS = {"chosen": "x", "rejected": "y"}
MODES = {
    "grpo": (["rlhf", "--rlhf_type", "grpo", "--reward_funcs", "format"], {"messages": CHAT}),
    "dpo": (["rlhf", "--rlhf_type", "dpo"], {"messages": CHAT, "rejected_response": "y"}),
    "kto": (["rlhf", "--rlhf_type", "kto"], {"messages": CHAT, "label": True}),
    "rm": (["rlhf", "--rlhf_type", "rm"], {"messages": CHAT, "rejected_response": "y"}),
    "ebft": (["rlhf", "--rlhf_type", "ebft"], {"messages": CHAT, "ground_truth": "x"}),
    "sft": (["sft"], {"messages": CHAT}),
    "pt": (["pt"], {"text": "What? <image>"}),
}
MEDIA = {
    "a column": {"images": ["a.png"]},
    "a tag beside an empty column": {"images": []},
    "parts": {"messages": [{"role": "user", "content": [{"type": "image", "image": "a.png"}]}, CHAT[-1]]},
}


@pytest.fixture(scope="session")
def multimodal(tmp_path_factory):
    """A checkpoint whose language model is loaded without its tower."""
    from transformers import AutoConfig, AutoModelForImageTextToText

    folder, tokenizer = tmp_path_factory.mktemp("models") / "multimodal", build_tokenizer()
    text = {
        "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_key_value_heads": 1, "head_dim": 16, "vocab_size": len(tokenizer), "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id,
        "layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 1, "linear_num_value_heads": 2,
        "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    }  # fmt: skip
    vision = {"depth": 1, "hidden_size": 32, "out_hidden_size": 32, "num_heads": 2, "intermediate_size": 64}
    vision |= {"num_position_embeddings": 16, "patch_size": 4}
    config = AutoConfig.for_model("qwen3_5", text_config=text, vision_config=vision, tie_word_embeddings=False)
    AutoModelForImageTextToText.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def command(desk, mode, rows, *, model=None, dry=True):
    words, row = MODES[mode]
    given = desk.rows([row | rows] * 4)
    words = [*words, "--model", str(model or desk.model), "--dataset", given, "--output_dir", str(desk.output)]
    return [*words, "--max_steps", "1", "--report_to", "none", "--dry_run", str(dry).lower()]


@pytest.mark.parametrize("dry", [True, False], ids=["dry run", "run"])
@pytest.mark.parametrize("mode", MODES)
def test_rows_with_images_are_refused(mode, dry, desk, capfd):
    words = command(desk, mode, MEDIA["a column"], dry=dry)
    before = contents(desk.folder)
    refused(words, "--dataset: | column images: images, video and audio are not supported", capfd)
    assert contents(desk.folder) == before


@pytest.mark.parametrize("mode", ["grpo", "sft"])
@pytest.mark.parametrize("media", MEDIA)
def test_so_are_other_ways_of_writing_them(media, mode, desk, capfd):
    refused(command(desk, mode, MEDIA[media]), "--dataset: | images, video and audio are not supported", capfd)


def test_few_rows_with_images_are_skipped_and_counted_as_other_bad_rows(desk, capsys):
    from swift.cli.main import main

    words = command(desk, "sft", {})
    rows = [{"messages": [{"role": "user", "content": f"{n}?"}, CHAT[-1]], "images": []} for n in range(20)]
    desk.rows([*rows, MODES["sft"][1] | {"images": ["a.png"]}])
    assert main(words) == 0
    assert "images, video and audio are not supported" in capsys.readouterr().out


@pytest.mark.parametrize("tuner", ["full", "lora"])
@pytest.mark.parametrize("dry", [True, False], ids=["dry run", "run"])
@pytest.mark.parametrize("mode", [mode for mode in MODES if mode != "rm"])  # whose class has the tower
def test_a_checkpoint_that_would_lose_its_tower_is_not_trained(mode, dry, tuner, desk, multimodal, capfd):
    plain = {"messages": [{"role": "user", "content": "What?"}, CHAT[-1]]} if mode != "pt" else {}
    words = [*command(desk, mode, plain, model=multimodal, dry=dry), "--tuner_type", tuner]
    refused(words, "--model: | multimodal checkpoint | text part | AutoModelForCausalLM", capfd)


def test_its_text_part_is_trained_and_answers_alone(desk, multimodal, capfd):
    from transformers import AutoModelForCausalLM

    from swift.cli.main import main

    AutoModelForCausalLM.from_pretrained(multimodal).save_pretrained(desk.folder / "text")
    build_tokenizer().save_pretrained(desk.folder / "text")
    plain = {"messages": [{"role": "user", "content": "What?"}, CHAT[-1]]}
    assert main(command(desk, "sft", plain, model=desk.folder / "text")) == 0
    result = desk.folder / "answers.jsonl"
    words = ["infer", "--model", multimodal, "--val_dataset", desk.rows([{"query": "What?"}]), "--result_path", result]
    assert main([*map(str, words), "--max_new_tokens", "2"]) == 0
    assert json.loads(result.read_text())["messages"]
    assert "only its text part is loaded" in capfd.readouterr().err
