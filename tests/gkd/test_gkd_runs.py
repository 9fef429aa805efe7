"""Runs of generalized knowledge distillation: TRL's step, whose answers, resume, sharded processes, wrong inputs."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from oracle import first_step
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl.experimental.gkd import GKDConfig, GKDTrainer
from trl_runs import (
    argv_of,
    assert_goes_on_exactly,
    assert_resumes_exactly,
    chats,
    in_two,
    logged,
    rows,
    train_as_one_and_as_two,
    trained,
    weights,
    written,
)

from swift.cli.main import main
from swift.trainers.checkpoint import list_checkpoints

PLAIN = "--dataset_shuffle false --optim sgd --lr_scheduler_type constant --warmup_ratio 0 --learning_rate 1"
PLAIN += " --max_grad_norm 0 --weight_decay 0 --max_steps 1"
"""A step that takes the gradient itself from the weights."""


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
def test_the_first_step_is_trls(gkd, teacher, tmp_path, beta):
    resolved = gkd(PLAIN, f"--lmbda 0 --temperature 0.7 --beta {beta}")
    run_dir = trained(resolved)
    start = load_file(f"{resolved.args.model}/model.safetensors")
    after = weights(list_checkpoints(run_dir)[-1])
    with Path(resolved.args.dataset[0]).open() as lines:
        table = Dataset.from_list([json.loads(line) for line in lines])
    config = GKDConfig(
        output_dir=str(tmp_path / "trl"), use_cpu=True, bf16=False, report_to="none", per_device_train_batch_size=4,
        gradient_checkpointing=False, lmbda=0.0, beta=beta, temperature=0.7, max_length=512, seed=resolved.args.seed,
        train_sampling_strategy="sequential",
    )  # fmt: skip
    bare = GKDTrainer(
        AutoModelForCausalLM.from_pretrained(resolved.args.model, dtype=torch.float32),
        AutoModelForCausalLM.from_pretrained(teacher, dtype=torch.float32),
        args=config,
        train_dataset=table,
        processing_class=AutoTokenizer.from_pretrained(resolved.args.model),
    )
    expected, theirs = first_step(bare)
    assert logged(run_dir)[1, 1] == pytest.approx(expected, abs=1e-6) and expected > 1e-3
    for name in after:
        assert torch.allclose(start[name] - after[name], theirs[name], atol=1e-6), name


def test_the_cross_entropy_of_given_answers_is_added(gkd, tmp_path):
    """At temperature 1, whatever that of the divergence is; and not for the model's own answers."""
    runs = [
        rows(trained(gkd(PLAIN, f"--sft_alpha {alpha} --lmbda {lmbda} --temperature 0.7")) / "logging.jsonl")[0]
        for alpha, lmbda in ((0, 0), (0.5, 0), (0.5, 1), (0, 1))
    ]
    without, both, own, plain = runs
    assert both["loss"] == pytest.approx(both["teacher_divergence"] + 0.5 * both["distillation/sft_loss"], rel=1e-5)
    assert without["loss"] == pytest.approx(both["teacher_divergence"], rel=1e-6) and both["distillation/sft_loss"] > 1
    assert own["loss"] == pytest.approx(plain["loss"], rel=1e-6) and "distillation/sft_loss" not in own
    args = gkd().args
    model, tokenizer = AutoModelForCausalLM.from_pretrained(args.model), AutoTokenizer.from_pretrained(args.model)
    total = count = 0
    for row in list(chats(4)):
        whole = tokenizer.apply_chat_template(row["messages"], tokenize=False)
        prompt = tokenizer.apply_chat_template(row["messages"][:1], tokenize=False, add_generation_prompt=True)
        ids, start = tokenizer(whole)["input_ids"], len(tokenizer(prompt)["input_ids"])
        logprobs = model(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
        total -= float(logprobs[torch.arange(start - 1, len(ids) - 1), ids[start:]].sum())
        count += len(ids) - start
    assert both["distillation/sft_loss"] == pytest.approx(total / count, rel=1e-4)


def test_rows_are_sampled_given_or_the_teachers(gkd):
    flags = "--max_steps 8 --logging_steps 8 --learning_rate 1e-15"
    shares = {}
    for more in ("--lmbda 0", "--lmbda 1", "--lmbda 0.5", "--lmbda 0.5 --seq_kd true"):
        run_dir = trained(gkd(flags, more))
        row = rows(run_dir / "logging.jsonl")[-1]
        texts = {entry["completion"].strip() for entry in rows(run_dir / "completions.jsonl")}
        shares[more] = row["distillation/given_frac"], bool(texts & {"5", "3"})
    assert shares["--lmbda 0"] == (1.0, True) and shares["--lmbda 1"] == (0.0, False)
    assert 0.2 < shares["--lmbda 0.5"][0] < 0.8 and shares["--lmbda 0.5"][1]
    assert 0.2 < shares["--lmbda 0.5 --seq_kd true"][0] < 0.8 and not shares["--lmbda 0.5 --seq_kd true"][1]


def test_the_likeliest_tokens_of_a_local_teacher_are_inside_the_bound(gkd):
    exact = rows(trained(gkd(PLAIN, "--lmbda 0")) / "logging.jsonl")[0]
    found = rows(trained(gkd(PLAIN, "--lmbda 0 --gkd_logits_topk 32")) / "logging.jsonl")[0]
    bound = found["distillation/error_bound_mean"]
    assert found["loss"] <= exact["loss"] + 1e-6 <= found["loss"] + bound + 2e-6
    assert 0 < bound <= found["distillation/error_bound_max"]


def test_an_evaluation_is_the_divergence_on_held_out_answers(gkd, tmp_path):
    val = written(tmp_path / "val.jsonl", list(chats(40))[32:])
    flags = f"--val_dataset {val} --eval_steps 1 --max_steps 1 --eval_on_start true --learning_rate 1e-15 --lmbda 1"
    found = logged(trained(gkd(flags)), "eval_loss")
    again = rows(trained(gkd(PLAIN, "--lmbda 0 --per_device_train_batch_size 8", f"--dataset {val}")) / "logging.jsonl")
    assert [found[1, 0], found[1, 1]] == pytest.approx([again[0]["loss"]] * 2, rel=1e-6)


def test_a_student_comes_closer_to_its_teacher(gkd):
    losses = logged(trained(gkd("--lmbda 0.3 --max_steps 40")))
    assert losses[1, 40] < losses[1, 1] / 2


def test_an_adapter_on_the_output_layer_learns(gkd):
    """Its logits are computed whole, since no weight alone gives them."""
    run_dir = trained(gkd("--tuner_type lora --target_modules q_proj lm_head --save_steps 1 --max_steps 2"))
    before, after = (weights(run_dir / f"checkpoint-{step}") for step in (1, 2))
    assert any(not torch.equal(before[name], after[name]) for name in after if "lm_head" in name)


@pytest.mark.long
def test_two_processes_have_the_losses_of_one(gkd, tmp_path):
    train_as_one_and_as_two(lambda *flags: gkd("--lmbda 0.5", *flags), tmp_path)


WAYS = ["--deepspeed zero2", "--deepspeed zero3", "--fsdp full_shard"]


@pytest.mark.long
@pytest.mark.parametrize("way", ["zero3", "zero3_offload"])
def test_a_teacher_that_is_sharded_alone_teaches_the_same(gkd, tmp_path, way):
    flags = "--lmbda 0.5 --max_steps 2"
    whole = in_two(gkd(flags, f"--output_dir {tmp_path / 'whole'}"))
    cut = in_two(gkd(flags, f"--teacher_deepspeed {way} --output_dir {tmp_path / 'cut'}"))
    assert logged(cut) == pytest.approx(logged(whole), rel=1e-5) and logged(cut)[1, 1] > 0


STREAM = "--streaming true --shuffle_buffer_size 7"


@pytest.mark.parametrize(
    "flags",
    [
        "--lmbda 0.5",
        pytest.param("--lmbda 0.5 --seq_kd true --tuner_type lora", marks=pytest.mark.long),
        pytest.param(STREAM, marks=pytest.mark.long),
        pytest.param("--lmbda 0.5 --steps_per_generation 2", marks=pytest.mark.long),
    ],
)
def test_a_resumed_run_is_the_undisturbed_one(gkd, flags):
    assert_resumes_exactly(lambda *more: gkd(flags, *more))


@pytest.mark.long
@pytest.mark.parametrize("way", WAYS)
def test_sharded_processes_sample_and_resume_exactly(gkd, tmp_path, way):
    flags = ("--lmbda 0.6 --seq_kd true --save_steps 2 --parity_check off", way, f"--output_dir {tmp_path / 'two'}")
    run_dir = in_two(gkd(*flags))
    assert logged(run_dir)[1, 4] > 0
    assert_goes_on_exactly(run_dir, lambda *more: gkd(*flags, *more), run=in_two)


UNTRAINED = {"messages": [{"role": "user", "content": "p"}, {"role": "assistant", "content": "a", "loss": False}]}
TEACHER = "--teacher_model MODEL"
WRONG = {
    "no teacher": (None, (), "--teacher_model: missing"),
    "teacher nowhere": (None, "--teacher_model ./nowhere", "--teacher_model"),
    "share above one": (None, "--teacher_model x --lmbda 1.5", "--lmbda"),
    "answer without loss": ([UNTRAINED], TEACHER, 'an answer with "loss": false'),
    "no answers": ([{"query": "q"}], (TEACHER, "--lmbda 0.5"), "none is a response"),
    "rewards": (None, (TEACHER, "--reward_funcs format"), "--reward_funcs: format: not an option"),
    "an engine for nothing": (None, (TEACHER, "--lmbda 0 --use_vllm true"), "--use_vllm: true: --lmbda 0 samples"),
    "teacher without turns": (None, (TEACHER, "--lmbda 1 --seq_kd true"), "--seq_kd: true: --lmbda 1 leaves"),
    "cut answers": (None, (TEACHER, "--truncation_strategy left"), "--truncation_strategy: left"),
    "too long": (None, (TEACHER, "--max_length 5"), "--max_length: 5: all of 8 rows longer"),
    "a metric of rewards": (
        None,
        (TEACHER, "--val_dataset DATA --metric_for_best_model reward"),
        "reward: not measured",
    ),
    "another tokenizer": (None, "--teacher_model OTHER", "give a model with the same tokenizer"),
    "policy as a second sampler": (None, (TEACHER, "--seq_kd true --tuner_type lora"), "policy without its adapter"),
}


def with_other_tokens(model, folder):
    """A copy in which two tokens have each other's ids."""
    shutil.copytree(model, folder)
    text = (folder / "tokenizer.json").read_text()
    content = json.loads(text)
    first, second = list(content["model"]["vocab"])[:2]
    vocab = content["model"]["vocab"]
    vocab[first], vocab[second] = vocab[second], vocab[first]
    (folder / "tokenizer.json").write_text(json.dumps(content))
    return folder


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.parametrize("dry", ["true", "false"])
def test_wrong_inputs_are_one_line(nano_folders, tmp_path, capsys, name, dry):
    data, flags, expected = WRONG[name]
    data, model = written(tmp_path / "rows.jsonl", data or chats(8)), nano_folders["qwen2"]
    own = {"--rlhf_type": "gkd", "--model": model, "--dataset": data, "--output_dir": tmp_path / "out"}
    named = {"MODEL": str(model), "DATA": str(data), "OTHER": str(with_other_tokens(model, tmp_path / "other"))}
    words = [named.get(word, word) for word in argv_of({**own, "--strict": "true", "--dry_run": dry}, flags)]
    assert main(["rlhf", *words]) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("swift: error: ")]
    assert len(lines) == 1 and expected in lines[0]
    assert not (tmp_path / "out").exists()
