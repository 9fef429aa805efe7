"""Whole runs of GRPO on prompts with and without images."""

import base64
import json
import shutil
from itertools import pairwise

import pytest
import torch
import vlms
from cli_runs import Cli, assert_close, assert_resumes, completion_rows, log_rows, sampled
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForSequenceClassification

from swift.arguments import parse
from swift.cli.main import main
from swift.data.loading import load_rows
from swift.models.reward_classes import ensure_reward_class
from swift.rewards.model_files import RewardModelSource
from swift.rewards.models import RewardModel
from swift.trainers.checkpoint import list_checkpoints

pytestmark = pytest.mark.slow

FLAGS = {"max_steps": 2, "beta": 0.04, "num_iterations": 2, "columns": None, "max_length": 256}
LORA = {"tuner_type": "lora", "target_modules": "all-linear", "learning_rate": 1e-2}
PLUGIN = """
from swift.plugin import ORM, orms


class Seen(ORM):
    def __call__(self, completions, images, solution, **kwargs):
        assert all(len(shown) == int(number) % 3 for shown, number in zip(images, solution))
        assert all(image.mode == "RGB" for shown in images for image in shown)
        return [len(text) % 5 + sum(image.width for image in shown) / 100 for text, shown in zip(completions, images)]


orms["seen"] = Seen
"""
"""Rows have as many images as their number leaves when divided by three."""
ROWS = """
import swift.models.attention.choice as choice

choice.choose_attention = lambda model: "planted"
choice._forking_gap = lambda model: "planted"
"""
"""A plugin: no model passes a trial."""


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    """A dataset: rows with an image, with two, with none; as files beside it, and as bytes."""
    folder = tmp_path_factory.mktemp("rows")
    for seed in range(5):
        (folder / f"{seed}.png").write_bytes(vlms.image(seed, 64, 64 if seed % 2 else 96))
    lines = []
    for number in range(1, 13):
        names = [f"{(number + place) % 5}.png" for place in range(number % 3)]
        row = {"messages": [{"role": "user", "content": "<image>" * len(names) + f"is it {number}?"}]}
        if number % 2:
            names = [f"data:image/png;base64,{base64.b64encode((folder / one).read_bytes()).decode()}" for one in names]
        lines.append(json.dumps({**row, "images": names, "solution": str(number)}))
    (folder / "rows.jsonl").write_text("\n".join(lines))
    (folder / "seen.py").write_text(PLUGIN)
    return folder


@pytest.fixture
def seeing(material, rows, tmp_path):
    """Runs of a family on those rows."""
    opened = []

    def of(family, **text):
        base = tmp_path / family
        base.mkdir()
        vlms.build_vlm(base, family, **text)
        opened.append(Cli(base, material[1], tmp_path))
        return opened[-1].__enter__()

    yield of
    for cli in opened:
        cli.__exit__()


@pytest.fixture
def data(rows):
    """Flags of a run on the rows."""
    return {**FLAGS, "dataset": rows / "rows.jsonl", "external_plugins": rows / "seen.py", "reward_funcs": "seen"}


def with_plugin(cli, data, text):
    (cli.folder / "plugin.py").write_text(text)
    return {**data, "external_plugins": [data["external_plugins"], cli.folder / "plugin.py"]}


@pytest.mark.parametrize(
    ("family", "flags"),
    [
        ("qwen3_vl", LORA),
        ("gemma3", {}),
        pytest.param("qwen3_5", LORA, marks=pytest.mark.long),
        pytest.param("qwen3_vl", {"tuner_type": "miss", "freeze_vit": "false"}, marks=pytest.mark.long),
        pytest.param("qwen3_vl", {"tuner_type": "lora_llm", "vit_lr": 1e-3}, marks=pytest.mark.long),
        pytest.param("idefics3", {}, marks=pytest.mark.long),
    ],
)
def test_a_run_is_that_of_rows(seeing, data, family, flags, capsys):
    cli = seeing(family)
    streamed = cli.finish("streamed", **data, **flags)
    assert "prompts are not shared" not in cli.printed and "images <- images" in cli.printed
    rows = cli.finish("rows", **with_plugin(cli, data, ROWS), **flags)
    assert "prompts are not shared" in cli.printed
    assert sampled(streamed) == sampled(rows)
    assert len(log_rows(streamed)) == data["max_steps"]
    assert_close(streamed, rows, "loss", "grad_norm", "kl")
    shown = [row["prompt"].count("<image ") for row in completion_rows(streamed)]
    assert {0, 1, 2} >= set(shown) != {0}
    assert main(["replay", str(streamed), "--model", str(cli.model)]) == 2
    assert "the images of this step are not on record; leave --model out" in capsys.readouterr().err
    assert [len(row.get("images", ())) for row in completion_rows(streamed)] == shown, "with their places"


@pytest.mark.parametrize(
    "family",
    [
        "gemma3",
        pytest.param("qwen2_vl", marks=pytest.mark.long),
        pytest.param("qwen2_5_vl", marks=pytest.mark.long),
        pytest.param("qwen2_5_omni", marks=pytest.mark.long),
        pytest.param("qwen3_vl", marks=pytest.mark.long),
        pytest.param("qwen3_vl_moe", marks=pytest.mark.long),
        pytest.param("idefics3", marks=pytest.mark.long),
        pytest.param("internvl", marks=pytest.mark.long),
        pytest.param("llava_onevision", marks=pytest.mark.long),
        pytest.param("qwen3_5", marks=pytest.mark.long),
    ],
)
@pytest.mark.long
def test_what_rows_are_sampled_with_is_what_they_are_trained_with(seeing, data, family):
    cli = seeing(family)
    folder = cli.finish("rows", **data)
    assert max(row["mismatch/logp_abs_diff_max"] for row in log_rows(folder)) < 1e-5


@pytest.mark.parametrize("frozen", [True, pytest.param(False, marks=pytest.mark.long)])
def test_full_tuning_keeps_every_tensor_and_resumes_to_the_last_bit(seeing, data, frozen):
    cli = seeing("qwen3_vl")
    parts = {} if frozen else {"freeze_vit": "false", "freeze_aligner": "false", "vit_lr": 1e-4, "aligner_lr": 1e-3}
    flags = {**data, "max_steps": 4, "tuner_type": "full", **parts}
    straight = cli.finish("straight", **flags)
    checkpoint = list_checkpoints(straight)[-1]
    before, after = (load_file(folder / "model.safetensors") for folder in (cli.model, checkpoint))
    assert before.keys() == after.keys()
    moved = {name for name in after if not before[name].equal(after[name])}
    assert any("language_model" in name for name in moved)
    assert any("visual.blocks" in name for name in moved) == any("merger" in name for name in moved) == (not frozen)
    assert (checkpoint / "preprocessor_config.json").exists()
    assert_resumes(cli, straight, 2, **flags)


@pytest.mark.long
def test_a_stream_takes_the_steps_of_a_table_and_resumes_to_the_last_bit(seeing, data):
    cli = seeing("qwen3_vl")
    flags = {**data, "dataset_shuffle": "false", "max_steps": 8}
    table = cli.finish("table", **flags)
    stream = cli.finish("stream", **flags, streaming="true")
    assert sampled(stream) == sampled(table)
    assert_close(stream, table, "loss", "grad_norm", "kl")
    assert_resumes(cli, stream, 4, **flags, streaming="true")


TOWER = {"freeze_vit": "false", "freeze_aligner": "false", "max_steps": 6}
GATHER = "ds3_gather_for_generation"
ZERO3, FSDP = {"deepspeed": "zero3"}, {"fsdp": "full_shard"}
SHARED = {"sequence_parallel_size": 2}
SPREAD = {
    "ddp": {}, "tower": TOWER, "zero2": {"deepspeed": "zero2"}, "zero2 tower": {"deepspeed": "zero2", **TOWER},
    "zero3": ZERO3, "zero3 tower": {**ZERO3, **TOWER}, "zero3 lora": {**ZERO3, **TOWER, **LORA},
    "zero3 on shards": {**ZERO3, **TOWER, GATHER: "false"},
    "fsdp": FSDP, "fsdp tower": {**FSDP, **TOWER}, "fsdp lora": {**FSDP, **LORA},
    "fsdp on shards": {**FSDP, **TOWER, GATHER: "false"},
    "shared": SHARED, "shared tower": {**SHARED, **TOWER}, "shared lora": {**SHARED, **TOWER, **LORA},
    "shared fsdp": {**SHARED, **TOWER, **FSDP}, "shared stream": {**SHARED, "streaming": "true"},
}  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("flags", SPREAD.values(), ids=SPREAD)
def test_two_processes_take_the_steps_of_one(seeing, data, flags):
    """Some micro-batches have no images, so that the tower has no gradient there, or is not computed."""
    cli = seeing("qwen3_vl")
    data = {**data, **flags, "learning_rate": 1e-5}
    alone = {name: value for name, value in data.items() if name not in ("fsdp", "deepspeed", GATHER, *SHARED)}
    one = cli.finish("one", **alone)
    two = cli.finish("two", variables={"NPROC_PER_NODE": 2}, **data, gradient_accumulation_steps=1)
    assert sampled(two) == sampled(one)
    assert_close(two, one, "loss", "grad_norm", "kl")


@pytest.mark.long
def test_a_reward_model_gets_the_images_of_prompts_and_split_rows_keep_theirs(seeing, data, tmp_path):
    cli = seeing("qwen3_vl")
    judge = shutil.copytree(cli.model, tmp_path / "judge")
    ensure_reward_class(AutoConfig.from_pretrained(judge))
    torch.manual_seed(0)
    AutoModelForSequenceClassification.from_pretrained(judge, num_labels=1).save_pretrained(judge)
    flags = {**data, "reward_model": judge, "max_steps": 2, "eval_steps": 1, "val_dataset": None}
    folder = cli.finish("judged", **flags, split_dataset_ratio=0.3)
    model = RewardModel(RewardModelSource("judge", judge, None), False)
    model.load("cpu", torch.float32)
    prompts = load_rows(parsed(data["dataset"]), "train", purpose="prompt", images=True).examples
    asked = {number: one.messages for one in prompts if (number := one.columns["solution"])}
    found = completion_rows(folder)
    chats = [[*asked[row["columns"]["solution"]], {"role": "assistant", "content": row["completion"]}] for row in found]
    assert [row["rewards"]["judge"] for row in found] == pytest.approx(model.score(chats), rel=1e-4, abs=1e-5)
    held_out = load_rows(parsed(folder / "val_dataset.jsonl"), "train", purpose="prompt", images=True).examples
    assert len(held_out) == 4
    assert {one.digest for one in held_out} < {one.digest for one in prompts}
    assert {row["split"] for row in found} == {"train", "eval"}


def parsed(file):
    return parse(
        "rlhf", ["--rlhf_type", "grpo", "--model", "m", "--reward_funcs", "format", "--dataset", str(file)], {}
    ).args


@pytest.mark.long
def test_equal_texts_with_other_images_are_other_prompts(seeing, data):
    cli = seeing("qwen3_vl")
    content = [vlms.image(seed, 64, 64) for seed in range(4)]
    turns = [{"role": "user", "content": "<image>What is it?"}]
    lines = [
        {"messages": turns, "images": [f"data:;base64,{base64.b64encode(one).decode()}"], "solution": "1"}
        for one in content
    ]
    (cli.folder / "equal.jsonl").write_text("\n".join(map(json.dumps, lines)))
    folder = cli.finish("equal", **{**data, "dataset": cli.folder / "equal.jsonl", "num_iterations": 1})
    found = completion_rows(folder)
    assert len({row["prompt_id"] for row in found}) == len({row["prompt"] for row in found}) > 1
    assert max(row["mismatch/logp_abs_diff_max"] for row in log_rows(folder)) < 1e-5
    texts = {}
    for row in found:
        texts.setdefault(row["prompt_id"], []).append(row["completion"])
    assert all(one != other for one, other in pairwise(texts.values()))


SYNCS = {"max_steps": 3, "num_iterations": 1, "learning_rate": 1e-3, "use_vllm": "true", "max_pixels": 80 * 80}
APART = {"vllm_mode": "dedicated"}


@pytest.mark.long
@pytest.mark.parametrize(
    ("family", "flags"),
    [
        ("qwen3_vl", {"vllm_mode": "colocate", "tuner_type": "full", "freeze_vit": "false", "freeze_aligner": "false"}),
        ("qwen3_vl", {**APART, **LORA}),
        ("qwen2_5_vl", APART),
        ("qwen2_5_omni", APART),
        ("idefics3", {"vllm_mode": "colocate"}),
        ("internvl", {"vllm_mode": "colocate"}),
    ],
)
def test_vllm_samples_with_what_the_trainer_sees(seeing, data, family, flags):
    """Three updates of all weights reach the engine, in this process or as a Ray actor, which gets the images, too."""
    pytest.importorskip("torchvision", reason="vLLM needs torchvision for models that see", exc_type=Exception)
    cli = seeing(family, **vlms.VLLM)
    folder = cli.finish("vllm", **{**data, **SYNCS, **flags})
    assert [row["mismatch/logp_abs_diff_max"] < 1e-4 for row in log_rows(folder)] == [True] * SYNCS["max_steps"]
    assert any("<image " in row["prompt"] for row in completion_rows(folder))
    assert max(row["grad_norm"] for row in log_rows(folder)) > 0


@pytest.mark.long
@pytest.mark.parametrize("place", ["server", "actor"])
def test_transformers_elsewhere_sample_and_train_as_in_the_trainer(seeing, data, serve, place):
    """Rows with bytes and files reach the engine, and updates of the tower as well."""
    cli = seeing("qwen3_vl")
    tower = {"tuner_type": "full", "freeze_vit": "false", "freeze_aligner": "false", "learning_rate": 1e-3}
    flags = {**data, **tower, "max_steps": 3, "num_iterations": 1, "max_pixels": 80 * 80}
    own = cli.finish("own", **flags)
    if place == "server":
        server = serve("--max_pixels", str(80 * 80), model=cli.model, key="a key")
        elsewhere = {"vllm_server_base_url": server.url, "vllm_server_api_key": server.key}
    else:
        elsewhere = {"vllm_mode": "dedicated", "infer_backend": "transformers"}
    folder = cli.finish("elsewhere", **flags, **elsewhere)
    assert sampled(folder) == sampled(own)
    assert_close(folder, own, "loss", "grad_norm", "kl")
    assert [row["mismatch/logp_abs_diff_max"] < 1e-5 for row in log_rows(folder)] == [True] * 3
    assert any("<image " in row["prompt"] for row in completion_rows(folder))
