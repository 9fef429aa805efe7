"""Images, video and audio, and checkpoints with towers: refused where they are not read, in the dry run, too."""

import base64
import json
import shutil

import pytest
import vlms
from desk import contents, refused

from swift.models.tiny import build_tokenizer
from swift.rollout.engines import images, lmdeploy_api

CHAT = [{"role": "user", "content": "<image>What?"}, {"role": "assistant", "content": "x"}]
ANSWERS = {"chosen": "x", "rejected": "y"}
MODES = {
    "grpo": (["rlhf", "--rlhf_type", "grpo", "--reward_funcs", "format"], {"messages": CHAT}),
    "dpo": (["rlhf", "--rlhf_type", "dpo"], {"messages": CHAT, "rejected_response": "y"}),
    "kto": (["rlhf", "--rlhf_type", "kto"], {"messages": CHAT, "label": True}),
    "rm": (["rlhf", "--rlhf_type", "rm"], {"messages": CHAT, "rejected_response": "y"}),
    "ebft": (["rlhf", "--rlhf_type", "ebft"], {"messages": CHAT, "ground_truth": "x"}),
    "sft": (["sft"], {"messages": CHAT}),
    "seq_cls": (["sft", "--task_type", "seq_cls", "--num_labels", "2"], {"messages": CHAT, "label": 1}),
    "pt": (["pt"], {"text": "What? <image>"}),
}
SEEING = ("grpo", "sft", "seq_cls", "pt", "dpo", "kto", "rm")
"""Modes that take images, if their model does."""
PICTURE = "data:image/png;base64," + base64.b64encode(vlms.image()).decode()
PLAIN = {"messages": [{"role": "user", "content": "What?"}, CHAT[-1]]}
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
    words, row = MODES[mode] if mode != "gkd" else (["rlhf", "--rlhf_type", "gkd"], {})
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


@pytest.fixture(scope="module")
def seeing(tmp_path_factory):
    """A model that sees images."""
    return vlms.build_vlm(tmp_path_factory.mktemp("models") / "seeing", "qwen3_vl")


@pytest.mark.parametrize(
    ("mode", "flags", "problem"),
    [
        ("sft", "--packing true --packing_strategy wrapped", "--packing_strategy: wrapped: cuts rows, and images"),
    ],
)
def test_what_training_without_rollouts_cannot_do_yet_is_refused(mode, flags, problem, seeing, desk, capfd):
    words = command(desk, mode, {"images": [PICTURE]}, model=seeing)
    refused([*words, *flags.split()], problem, capfd)


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        ("--vit_lr 0.1", "--vit_lr: 0.1: nothing is trained there; use --freeze_vit false"),
        ("--rollout_func mine", "--rollout_func: mine: makes completions of texts only"),
        ("--max_length 20", "--max_length: 20: a prompt with images of | cannot be cut"),
        ("--beta 0.1 --ref_model {text}", "--ref_model: | one sees images and one does not"),
    ],
)
def test_what_a_model_that_sees_cannot_do_yet_is_refused_in_the_dry_run(flags, problem, seeing, desk, capfd):
    words = command(desk, "grpo", {"images": [PICTURE]}, model=seeing)
    refused([*words, *flags.format(text=desk.model).split()], problem, capfd)


SHARED = "--sequence_parallel_size 2"


@pytest.mark.parametrize("mode", ["grpo", "sft", "dpo"])
def test_images_are_shared_by_processes_unless_their_tokens_see_each_other(
    mode, seeing, vlm_folders, desk, capfd, monkeypatch
):
    from swift.cli.main import main

    monkeypatch.setenv("NPROC_PER_NODE", "2")
    words = command(desk, mode, {"images": [PICTURE]}, model=seeing)
    assert main([*words, *SHARED.split()]) == 0
    words = command(desk, mode, {"images": [PICTURE]}, model=vlm_folders("gemma3"))
    problem = "--sequence_parallel_size: 2: the model of --model cannot be computed in parts (tokens of an image see"
    refused([*words, *SHARED.split()], problem, capfd)


def test_vllm_sees_with_torchvision_only(seeing, desk, capfd, monkeypatch):
    monkeypatch.setattr(images, "find_spec", lambda _: None)
    words = [*command(desk, "grpo", PLAIN, model=seeing), "--use_vllm", "true"]
    refused(words, "'torchvision', which it needs for a model that sees images", capfd, code=3)


def test_lmdeploy_sees_with_some_families_only(vlm_folders, desk, capfd, monkeypatch):
    monkeypatch.setattr(lmdeploy_api, "require", lambda: None)
    words = [*command(desk, "grpo", PLAIN, model=vlm_folders("idefics3")), "--use_lmdeploy", "true"]
    refused(words, "--use_lmdeploy: true: LMDeploy takes no images for a model of type idefics3; use", capfd)


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({"images": ["/etc/hostname"]}, "leads out of"),
        ({"images": ["http://127.0.0.1/a.png"]}, "URLs are not read"),
        ({"images": [], "messages": CHAT}, "0 images for 1 place"),
        ({"images": ["a.png", "b.png"]}, "2 images for 1 place"),
        ({"videos": ["a.mp4"]}, "video and audio are not supported"),
    ],
)
def test_bad_rows_of_a_model_that_sees(row, problem, seeing, desk, capfd):
    refused(command(desk, "grpo", row, model=seeing), f"--dataset: | {problem}", capfd)


@pytest.mark.parametrize(
    "setting",
    [
        "--freeze_llm true",
        "--max_pixels 9",
        "--vit_lr 0.1",
        "--aligner_lr 0.1",
        "--vit_gradient_checkpointing false",
    ],
)
def test_settings_of_towers_need_one(setting, desk, capfd):
    words = [*command(desk, "grpo", PLAIN), *setting.split()]
    refused(words, f"{setting.split()[0]}: {setting.split()[1]}: the model has no vision tower here", capfd)


def test_a_variable_of_images_is_named_where_there_is_no_tower(desk, capfd, monkeypatch):
    monkeypatch.setenv("MAX_PIXELS", "1024")
    refused(
        command(desk, "grpo", PLAIN), "--max_pixels: 1024: the model has no vision tower here; unset MAX_PIXELS", capfd
    )


def test_a_tower_that_is_not_there_need_not_be_frozen(desk):
    """Configurations of TRL say so, whatever their model is."""
    from swift.cli.main import main

    towers = ["--freeze_vit", "false", "--freeze_aligner", "false"]
    for tuner in ("full", "lora"):
        assert main([*command(desk, "grpo", PLAIN), *towers, "--tuner_type", tuner]) == 0


def test_a_processor_that_needs_another_package_is_refused(seeing, desk, capfd, monkeypatch):
    def missing(*_):
        raise ModuleNotFoundError("Could not import 'P'") from ModuleNotFoundError("No module named 'a'", name="a")

    monkeypatch.setattr("swift.models.vision.load_processor", missing)
    problem = "--model: | its processor of images cannot be loaded (No module named 'a'); pip install a"
    refused(command(desk, "grpo", PLAIN, model=seeing), problem, capfd)


def test_a_model_that_sees_needs_its_processor(seeing, desk, capfd):
    folder = desk.folder / "blind"
    shutil.copytree(seeing, folder)
    (folder / "preprocessor_config.json").unlink()
    refused(command(desk, "grpo", PLAIN, model=folder), "--model: | its processor of images cannot be loaded", capfd)


def test_few_rows_with_images_are_skipped_and_counted_as_other_bad_rows(desk, capsys):
    from swift.cli.main import main

    words = command(desk, "sft", {})
    rows = [{"messages": [{"role": "user", "content": f"{n}?"}, CHAT[-1]], "images": []} for n in range(20)]
    desk.rows([*rows, MODES["sft"][1] | {"images": ["a.png"]}])
    assert main(words) == 0
    assert "images, video and audio are not supported" in capsys.readouterr().out


WHOLE = {
    "gemma3": {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": {}, "vision_config": {}},
    "qwen2_5_vl": {"architectures": ["Qwen2_5_VLForConditionalGeneration"], "vision_config": {"depth": 1}},
    "llava": {"architectures": ["LlavaForConditionalGeneration"], "text_config": {}, "vision_config": {}},
    "qwen2_audio": {"architectures": ["Qwen2AudioForConditionalGeneration"], "audio_config": {}},
    "qwen2_5_omni": {"architectures": ["Qwen2_5OmniForConditionalGeneration"], "thinker_config": {}},
    "llava_qwen": {"architectures": ["LlavaQwenForCausalLM"], "vision_config": {}, "auto_map": {"AutoConfig": "c.C"}},
}
"""Checkpoints that are loaded with their towers or not at all; the last by code of its repository."""


def whole(desk, kind):
    folder = desk.copy_model(kind)
    (folder / "config.json").write_text(json.dumps({"model_type": kind, **WHOLE[kind]}))
    return folder


@pytest.mark.parametrize("kind", WHOLE)
def test_a_checkpoint_without_a_text_part_of_its_own_is_not_used(kind, desk, capfd):
    expected = f"{kind}: a multimodal checkpoint ({kind} with | images, video and audio are not supported"
    words = command(desk, "ebft", PLAIN, model=whole(desk, kind))
    refused(words, f"--model: | {expected}", capfd)


def test_a_checkpoint_that_hears_is_not_used_where_images_are(desk, capfd):
    folder = desk.copy_model("gemma4")
    (folder / "config.json").write_text('{"model_type": "gemma4", "vision_config": {}, "audio_config": {}}')
    expected = "gemma4: a multimodal checkpoint (gemma4 with audio_config): video and audio are not supported"
    refused(command(desk, "grpo", PLAIN, model=folder), f"--model: | {expected}", capfd)


@pytest.mark.parametrize("dry", [True, False], ids=["dry run", "run"])
@pytest.mark.parametrize("mode", [mode for mode in MODES if mode not in SEEING])
def test_nor_is_it_in_modes_without_images(mode, dry, desk, capfd):
    refused(command(desk, mode, PLAIN, model=whole(desk, "gemma3"), dry=dry), "--model: | (gemma3 with", capfd)


BESIDE = {
    "a reference": ("grpo", "--beta 0.1 --ref_model"),
    "the reference of a preference method": ("dpo", "--ref_model"),
    "a teacher": ("gkd", "--teacher_model"),
    "a reward model": ("grpo", "--reward_model"),
}


@pytest.mark.parametrize("dry", [True, False], ids=["dry run", "run"])
@pytest.mark.parametrize("name", BESIDE)
def test_nor_beside_the_model_that_is_trained(name, dry, desk, capfd):
    mode, flags = BESIDE[name]
    words = [*command(desk, mode, PLAIN, dry=dry), *flags.split(), whole(desk, "gemma3")]
    problems = {"a reward model": "has no score head"}
    refused(words, f"gemma3: | {problems.get(name, 'one sees images and one does not')}", capfd)


def test_nor_by_a_server(desk, capfd):
    words = ["rollout", "--use_vllm", "false", "--port", "0", "--model", whole(desk, "qwen2_audio")]
    refused(words, "--model: | (qwen2_audio with", capfd)


@pytest.mark.parametrize("tuner", ["full", "lora"])
@pytest.mark.parametrize("dry", [True, False], ids=["dry run", "run"])
@pytest.mark.parametrize("mode", [mode for mode in MODES if mode not in SEEING])
def test_a_checkpoint_that_would_lose_its_tower_is_not_trained(mode, dry, tuner, desk, multimodal, capfd):
    words = [*command(desk, mode, PLAIN, model=multimodal, dry=dry), "--tuner_type", tuner]
    refused(words, "--model: | multimodal checkpoint | text part | AutoModelForCausalLM", capfd)


def test_its_text_part_is_trained_and_answers_alone(desk, multimodal):
    from transformers import AutoModelForCausalLM

    from swift.cli.main import main

    AutoModelForCausalLM.from_pretrained(multimodal).save_pretrained(desk.folder / "text")
    build_tokenizer().save_pretrained(desk.folder / "text")
    assert main(command(desk, "sft", PLAIN, model=desk.folder / "text")) == 0
    result = desk.folder / "answers.jsonl"
    words = ["infer", "--val_dataset", desk.rows([{"query": "What?"}]), "--result_path", result]
    words += ["--model", desk.folder / "text"]
    assert main([*map(str, words), "--max_new_tokens", "2"]) == 0
    assert json.loads(result.read_text())["messages"]
