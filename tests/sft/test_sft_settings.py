"""Settings of `swift sft` and `swift pt` in runs: streams, packing, evaluation sets, early stopping, the hub."""

import json
import shutil

import huggingface_hub
import pytest
import torch
from test_sft_run import sft
from trl_runs import argv_of, assert_goes_on_exactly, assert_resumes_exactly, in_two, rows, weights

from swift.arguments import parse
from swift.errors import ConfigError, ResourceError
from swift.models.arguments import ModelArguments
from swift.models.policy import load_for_inference
from swift.models.tiny import build_tiny
from swift.models.vision import FILES
from swift.trainers.checkpoint import list_checkpoints
from swift.trainers.grpo.run import run as run_grpo
from swift.trainers.trl.run import run


@pytest.mark.parametrize(
    "flags",
    [
        pytest.param(
            "--packing true --max_length 30 --packing_length 64 --num_train_epochs 2 --max_steps -1", id="packed"
        ),
        pytest.param("--streaming true --shuffle_buffer_size 7 --max_steps 12", id="stream"),
        pytest.param(
            "--streaming true --packing true --max_length 256 --per_device_train_batch_size 2",
            id="packed stream",
            marks=pytest.mark.long,
        ),
    ],
)
def test_a_resumed_run_ends_as_an_uninterrupted_one(sft_argv, flags):
    """The stream of 12 steps goes through its 64 rows one and a half times."""
    argv = sft_argv(flags.split(), "--logging_steps 1 --neftune_noise_alpha 5")
    assert_resumes_exactly(lambda *more: parse("sft", [*argv, *more], {}), at=3)


@pytest.mark.parametrize(
    ("flags", "steps", "saved"),
    [("--max_epochs 2", 5, [3, 5]), ("--packing true --max_length 64 --max_epochs 3", 4, [2, 3, 4])],
)
def test_a_stream_ends_after_its_passes_is_saved_after_each_and_resumed_exactly(sft_argv, sums, flags, steps, saved):
    """64 rows, 24 a step: the first pass ends in the third of five steps, and 8 rows are left; packed they are 32."""
    batch = (
        "--per_device_train_batch_size 8 --gradient_accumulation_steps 3 --save_strategy epoch --eval_strategy epoch"
    )
    argv = sft_argv(flags, batch, "--streaming true --max_steps 50 --logging_steps 1", f"--val_dataset {sums}#4")
    run_dir = sft(argv)
    found = rows(run_dir / "logging.jsonl")
    assert [row["step"] for row in found if "loss" in row] == [*range(1, steps + 1)]
    assert [row["step"] for row in found if "eval_loss" in row] == saved
    assert [int(one.name.partition("-")[2]) for one in list_checkpoints(run_dir)] == saved
    assert_goes_on_exactly(run_dir, lambda *more: parse("sft", [*argv, *more], {}), at=saved[0])


@pytest.mark.parametrize("flags", ["--num_train_epochs 2 --max_steps -1", "--streaming true --max_steps 6"])
def test_the_last_evaluation_can_make_the_last_step_the_best(sft_argv, sums, flags):
    """The stream is evaluated after its pass of four steps, and where the run ends."""
    each = "--eval_strategy epoch --save_strategy epoch --load_best_model_at_end true --learning_rate 1e-3"
    run_dir = sft(sft_argv(flags, each, f"--val_dataset {sums}#4", "--per_device_train_batch_size 16"))
    evaluated = {row["step"]: row["eval_loss"] for row in rows(run_dir / "logging.jsonl") if "eval_loss" in row}
    last = max(evaluated)
    assert len(evaluated) == 2 and min(evaluated, key=evaluated.get) == last
    assert json.loads((run_dir / f"checkpoint-{last}" / "trainer_state.json").read_text())["best_global_step"] == last


@pytest.mark.long
def test_two_processes_end_a_stream_together(sft_argv):
    flags = "--streaming true --max_steps 50 --logging_steps 1 --max_epochs 2 --save_strategy epoch"
    run_dir = in_two(parse("sft", sft_argv(flags, "--per_device_train_batch_size 5"), {}))
    assert [row["step"] for row in rows(run_dir / "logging.jsonl")] == [*range(1, 13)], "128 rows, 10 a step"
    assert [int(one.name.partition("-")[2]) for one in list_checkpoints(run_dir)] == [7, 12]


@pytest.mark.parametrize("arch", ["qwen3_5_text", "qwen3_vl"])
def test_a_step_without_padding_is_that_of_padded_rows_in_hybrids_and_models_that_see(sft_argv, tmp_path, arch):
    model = build_tiny(tmp_path / "model", arch=arch, size="nano")
    flags = f"--model {model} --per_device_train_batch_size 4 --max_steps 2 --logging_steps 1 --save_strategy no"
    streamed, padded = (
        rows(sft(sft_argv(flags, f"--padding_free {value}")) / "logging.jsonl")[:2] for value in ("true", "false")
    )
    for name in ("loss", "grad_norm"):
        assert [row[name] for row in streamed] == pytest.approx([row[name] for row in padded], rel=1e-4)


def test_several_evaluation_sets_have_their_own_loss_and_accuracy_and_one_can_stop_the_run(sft_argv, sums, tmp_path):
    other = shutil.copy(sums, tmp_path / "val.jsonl")
    flags = "--eval_steps 1 --save_steps 2 --early_stopping_patience 2 --early_stopping_threshold 9"
    argv = [*sft_argv(flags, "--metric_for_best_model val_loss"), "--val_dataset", f"{sums}#4", f"{other}#6"]
    run_dir = sft(argv)
    evaluations = [row for row in rows(run_dir / "logging.jsonl") if "loss" not in row]
    assert [row["step"] for row in evaluations] == [1, 1, 2, 2, 3, 3], "no improvement by 9 in the second and third"
    for row, name in zip(evaluations, ("sums", "val") * 3, strict=True):
        assert {f"eval_{name}_loss", f"eval_{name}_mean_token_accuracy"} <= row.keys()
        assert "eval_mean_token_accuracy" not in row
    assert (run_dir / "checkpoint-3").is_dir(), "the last step is saved"
    resumed = sft([*argv, "--resume_from_checkpoint", str(run_dir / "checkpoint-2")])
    assert rows(resumed / "logging.jsonl")[-1]["step"] == 3, "evaluations before the checkpoint count"
    with pytest.raises(ConfigError, match=r"--metric_for_best_model: loss: .*use sums_loss or val_loss"):
        sft([*sft_argv(flags), *argv[-3:]])


def test_several_evaluation_sets_need_no_metric_where_nothing_is_chosen_by_it(sft_argv, sums, tmp_path):
    other = shutil.copy(sums, tmp_path / "val.jsonl")
    run_dir = sft([*sft_argv("--max_steps 1 --eval_steps 1"), "--val_dataset", f"{sums}#4", f"{other}#6"])
    assert [row["step"] for row in rows(run_dir / "logging.jsonl")] == [1, 1, 1]


@pytest.fixture
def asked(monkeypatch):
    """Requests to a hub that accepts all: (name, arguments)."""
    requests = []
    for request in ("create_repo", "upload_folder"):
        monkeypatch.setattr(
            huggingface_hub.HfApi, request, lambda self, _name=request, **given: requests.append((_name, given))
        )
    return requests


def test_the_model_of_a_grpo_run_is_uploaded(nano_folders, sums, tmp_path, asked, capsys):
    own = {
        "--rlhf_type": "grpo", "--model": nano_folders["qwen2"], "--dataset": sums, "--reward_funcs": "format",
        "--tuner_type": "full", "--num_generations": 2, "--per_device_train_batch_size": 2, "--max_steps": 1,
        "--max_completion_length": 4, "--report_to": "none", "--output_dir": tmp_path / "out",
    }  # fmt: skip
    argv = argv_of(own, "--push_to_hub true --hub_model_id me/sums --hub_private_repo true --add_version false")
    assert run_grpo(parse("rlhf", argv, {})) == 0
    (made, repository), (uploaded, what) = asked
    assert (made, repository) == ("create_repo", {"repo_id": "me/sums", "private": True, "exist_ok": True})
    assert (uploaded, what["folder_path"]) == ("upload_folder", tmp_path / "out" / "checkpoint-1")
    assert "checkpoint-1 is uploaded as me/sums" in capsys.readouterr().out


def test_the_model_is_uploaded_without_what_only_a_resumed_run_needs(sft_argv, asked):
    run_dir = sft(sft_argv("--push_to_hub true --hub_model_id me/sums --max_steps 1"))
    (made, repository), (uploaded, what) = asked
    assert (made, uploaded) == ("create_repo", "upload_folder")
    assert repository["repo_id"] == what["repo_id"] == "me/sums"
    sharded = ["global_step2/zero_pp_rank_0_optim_states.pt", "latest", "zero_to_fp32.py", "pytorch_model_fsdp.bin"]
    names = [*sharded, *(path.name for path in (run_dir / "checkpoint-1").iterdir())]
    kept = list(huggingface_hub.utils.filter_repo_objects(names, ignore_patterns=what["ignore_patterns"]))
    assert what["folder_path"] == run_dir / "checkpoint-1"
    assert {"model.safetensors", "config.json", "tokenizer.json"} <= set(kept) and not set(kept) & set(sharded)
    assert not [
        name for name in kept if name.startswith(("optimizer", "rng", "scheduler", "trainer", "args", "manifest"))
    ]


@pytest.mark.parametrize("tuner", ["full", "lora"])
def test_the_upload_of_a_model_that_sees_has_its_processor(sft_argv, vlm_folders, asked, tuner):
    folder = vlm_folders("qwen3_vl")
    sft(sft_argv(f"--model {folder} --push_to_hub true --hub_model_id me/sees --max_steps 1", tuner=tuner))
    what = asked[-1][1]
    names = [path.name for path in what["folder_path"].iterdir()]
    kept = set(huggingface_hub.utils.filter_repo_objects(names, ignore_patterns=what["ignore_patterns"]))
    files = {name for name in FILES if (folder / name).exists()}
    assert "preprocessor_config.json" in files and files <= kept


@pytest.mark.slow
@pytest.mark.long
def test_an_adapter_of_a_model_that_is_compiled_and_sharded_has_the_names_of_any_other(sft_argv):
    argv = sft_argv("--max_steps 1", tuner="lora")
    plain = weights(sft(argv) / "checkpoint-1")
    argv += ["--torch_compile", "true", "--torch_compile_backend", "eager", "--fsdp", "full_shard"]
    found = weights(in_two(parse("sft", argv, {}), count=1) / "checkpoint-1")
    assert found.keys() == plain.keys()
    assert all(torch.allclose(found[name], plain[name], atol=1e-4) for name in plain)


def test_pre_training_needs_no_chat_template_and_saves_a_model(nano_folders, sft_argv, tmp_path):
    model = shutil.copytree(nano_folders["qwen2"], tmp_path / "base")
    (model / "chat_template.jinja").unlink()
    data = tmp_path / "texts.jsonl"
    data.write_text("".join(json.dumps({"text": "abc" * n}) + "\n" for n in range(1, 40)))
    argv = sft_argv(f"--model {model} --dataset {data} --val_dataset {data} --max_length 32 --packing true")
    run_dir = sft([*argv, "--packing_strategy", "bfd_split"], "pt")
    evaluations = [row["eval_loss"] for row in rows(run_dir / "logging.jsonl") if "eval_loss" in row]
    assert evaluations and load_for_inference(ModelArguments(model=str(run_dir / "checkpoint-6"))) is not None
    assert "attn" not in (run_dir / "checkpoint-6" / "config.json").read_text()
    with pytest.raises(ConfigError, match=r"--template: none: the tokenizer of .* has no chat template"):
        sft(argv)


WRONG = [
    ("sft", "--push_to_hub true", "--push_to_hub: true: --hub_model_id is missing"),
    ("sft", "--loss_scale agentflan", "--loss_scale: agentflan: .*default"),
    ("sft", "--loss_scale last_round --assistant_only_loss false", "--assistant_only_loss: false: contradicts"),
    ("sft", "--loss_scale all --assistant_only_loss true", "--assistant_only_loss: true: contradicts --loss_scale all"),
    ("sft", "--completion_only_loss true --loss_scale all", "--completion_only_loss: true: contradicts"),
    ("sft", "--completion_only_loss true --assistant_only_loss false", "contradicts --assistant_only_loss"),
    ("sft", "--packing true --packing_strategy ffd", "--packing_strategy: ffd: .*bfd"),
    ("sft", "--packing true --max_length 1", "--max_length: 1: a packed row of one token predicts nothing"),
    ("sft", "--packing true --max_length 64 --packing_length 32", "--packing_length: 32: shorter than --max_length 64"),
    ("sft", "--packing true --torch_compile true", "--torch_compile: true: --packing true"),
    ("sft", "--packing true --group_by_length true", "--group_by_length: true: packed rows are equally long"),
    ("sft", "--streaming true", "--max_steps: -1: a stream has no known end"),
    ("sft", "--streaming true --max_steps 3 --split_dataset_ratio 0.5", "a stream cannot be split"),
    ("sft", "--max_epochs 2", "--max_epochs: 2: .* use --num_train_epochs 2"),
    (
        "sft",
        "--streaming true --max_steps 3 --save_strategy epoch --dataloader_num_workers 2",
        "--save_strategy: epoch: other processes read the stream",
    ),
    ("sft", "--streaming true --max_steps 3 --dataset org/name#:3", "a stream has no known number of rows"),
    ("sft", "--early_stopping_patience 2", "--early_stopping_patience: 2: nothing is evaluated"),
    ("sft", "--neftune_noise_alpha -1", "--neftune_noise_alpha: -1: out of range"),
    ("sft", "--use_liger_kernel true", "--use_liger_kernel: true: needs the package liger_kernel"),
    ("sft", '--use_liger_kernel true --liger_kernel_config {"fused_linear_cross_entropy":true}', "replaces the model"),
    ("sft", "--paking true", "--paking: true: unknown flag; nearest: packing"),
    ("sft", "--max_length 3", "--dataset: no usable row .*longer than max_length"),
    ("sft", "--push_to_hub true --hub_model_id a/b", "--push_to_hub: a/b: the hub refuses create_repo"),
    (
        "sft",
        "--target_modules lm_head",
        "--target_modules: lm_head: the loss is computed from the weight",
    ),
    ("pt", "", "messages has a user turn; plain text has assistant turns only"),
    ("pt", "--system s", "--system: s: plain text has no chat template"),
    ("pt", "--template qwen3", "--template: qwen3: plain text has no chat template"),
    ("pt", "--loss_scale all", "--loss_scale: all: not a flag of swift pt"),
]


@pytest.mark.parametrize(("mode", "flags", "problem"), WRONG)
def test_a_wrong_input_is_one_line_before_anything_is_written(nano_folders, sums, tmp_path, mode, flags, problem):
    argv = ["--model", str(nano_folders["qwen2"]), "--dataset", str(sums), "--output_dir", str(tmp_path / "out")]
    with pytest.raises((ConfigError, ResourceError), match=problem) as caught:
        run(parse(mode, [*argv, *flags.split()], {}))
    assert caught.value.exit_code in (2, 3)
    assert not (tmp_path / "out").exists()


def test_a_metric_that_no_evaluation_gives_is_one_line(nano_folders, sums, tmp_path):
    argv = ["--model", str(nano_folders["qwen2"]), "--dataset", str(sums), "--output_dir", str(tmp_path / "out")]
    flags = "--metric_for_best_model nothing --load_best_model_at_end true --split_dataset_ratio 0.2 --max_steps 1"
    flags += " --eval_strategy steps --save_strategy steps --eval_steps 1 --save_steps 1 --report_to none"
    with pytest.raises(ConfigError, match=r"nothing: not measured; there are: .*loss"):
        run(parse("sft", [*argv, *flags.split()], {}))
