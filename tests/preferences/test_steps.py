"""Process reward models: rows, first steps, resume, learning, and wrong inputs."""

import random
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from oracle import first_step
from transformers import AutoModelForTokenClassification
from transformers.integrations import liger
from trl_runs import (
    argv_of,
    assert_resumes_exactly,
    logged,
    train_as_one_and_as_two,
    trained,
    trainer_of,
    written,
)

from swift.cli.main import main
from swift.models import load_chat
from swift.models.step_scores import steps_of
from swift.rewards.model_files import RewardModelSource
from swift.rewards.models import ProcessRewardModel, open_reward_model
from swift.trainers.preferences.steps import encode, step_metrics
from swift.trainers.rows import IGNORED


def steps(count, seed=0):
    """Sums in steps, of which about half are right."""
    draw = random.Random(seed)
    for _ in range(count):
        lines, labels = [], []
        for _ in range(draw.randint(1, 3)):
            a, b, right = draw.randint(0, 2), draw.randint(0, 2), draw.random() < 0.5
            lines.append(f"{a}+{b}={a + b if right else a + b + 1}")
            labels.append(right)
        yield {"prompt": "add", "completions": lines, "labels": labels}


STREAM = "--streaming true --shuffle_buffer_size 7"


@pytest.fixture
def prm(settings):
    return lambda *flags, rows=32: settings("prm", flags, rows=steps(rows))


def test_the_label_of_a_step_sits_on_the_separator_after_it(settings):
    row = {"prompt": "add", "completions": ["1+1=2", "2+2=5"], "labels": [True, False]}
    args = settings("prm", "--step_separator ##", rows=[row]).args
    template = load_chat(args)
    table, val, _ = encode(args, template)
    ids, labels = table[0]["input_ids"], table[0]["labels"]
    at = [index for index, label in enumerate(labels) if label != IGNORED]
    assert [labels[index] for index in at] == [1, 0] and val is None and at[-1] == len(ids) - 1
    text = template.tokenizer.decode(ids)
    assert text.endswith("1+1=2##2+2=5##")
    assert template.tokenizer.decode(ids[: at[0] + 1]).endswith("1+1=2##")
    args.train_on_last_step_only, args.val_dataset = True, args.dataset
    learnt, judged, _ = encode(args, template)
    assert [label for label in learnt[0]["labels"] if label != IGNORED] == [0]
    assert [label for label in judged[0]["labels"] if label != IGNORED] == [1, 0], "evaluation is of all steps"


def test_steps_are_counted_in_evaluation():
    labels = np.array([[IGNORED, 1, 0], [0, IGNORED, IGNORED]])
    found = np.array([[1, 1, 1], [0, 0, 0]])
    scores = step_metrics(SimpleNamespace(predictions=found, label_ids=labels))
    assert scores == {"accuracy": pytest.approx(2 / 3), "f1": pytest.approx(2 / 3)}
    assert steps_of("a\n\nb\n", "\n") == ["a", "b"] and steps_of("", "\n") == [""]


def test_the_first_step_of_prm_is_that_of_transformers(prm, tmp_path):
    resolved = prm("--dataset_shuffle false")
    found, grads = first_step(trainer_of(resolved, tmp_path / "swift"))
    torch.manual_seed(resolved.args.seed)
    model = AutoModelForTokenClassification.from_pretrained(resolved.args.model, num_labels=2, dtype=torch.float32)
    table, _, _ = encode(resolved.args, load_chat(resolved.args))
    rows = [table[index] for index in range(4)]
    width = max(len(row["labels"]) for row in rows)

    def filled(key, filler):
        return torch.tensor([row[key] + [filler] * (width - len(row[key])) for row in rows])

    ids, labels = filled("input_ids", 0), filled("labels", IGNORED)
    mask = torch.tensor([[1] * len(row["labels"]) + [0] * (width - len(row["labels"])) for row in rows])
    loss = model(input_ids=ids, attention_mask=mask, labels=labels).loss
    loss.backward()
    assert found == pytest.approx(loss.item(), abs=1e-6)
    assert all(torch.allclose(grads[name], p.grad, atol=1e-6) for name, p in model.named_parameters() if name in grads)
    assert any("score" in name or "classifier" in name for name in grads)


@pytest.mark.parametrize("method", ["rm", "prm"])
def test_ligers_kernels_reach_a_model_without_a_language_head_but_not_its_loss(settings, tmp_path, monkeypatch, method):
    given = []
    module = SimpleNamespace(_apply_liger_kernel_to_instance=lambda model, **config: given.append((model, config)))
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers", module)
    monkeypatch.setattr(liger, "is_liger_kernel_available", lambda: True)
    flags = ("--use_liger_kernel true", "--liger_kernel_config", '{"rope": false}', "--max_steps 1")
    trainer = trainer_of(settings(method, flags, rows=steps(8) if method == "prm" else None), tmp_path)
    trainer.train()
    ((model, config),) = given
    assert model is trainer.model and config == {"rope": False, "fused_linear_cross_entropy": False}


@pytest.mark.long
def test_two_processes_have_the_losses_of_one(prm, tmp_path):
    train_as_one_and_as_two(prm, tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("flags", [(), "--tuner_type lora", STREAM])
def test_prm_resumes_exactly(settings, flags):
    assert_resumes_exactly(lambda *more: settings("prm", flags, more, rows=steps(32)))


@pytest.mark.long
def test_a_process_reward_model_learns_a_rule_and_scores_as_a_reward(prm, tmp_path):
    val = written(tmp_path / "val.jsonl", steps(64, seed=1))
    run_dir = trained(
        prm(
            f"--val_dataset {val} --max_steps 600 --eval_steps 600 --save_steps 600",
            "--per_device_train_batch_size 16 --per_device_eval_batch_size 16",
            rows=1024,
        )
    )
    assert logged(run_dir, "eval_accuracy")[1, 600] > 0.9 and logged(run_dir, "eval_f1")[1, 600] > 0.9
    model = open_reward_model(RewardModelSource("prm", run_dir / "checkpoint-600", None), False)
    model.load("cpu", torch.float32)
    assert isinstance(model, ProcessRewardModel)

    def chat(text):
        return [{"role": "user", "content": "add"}, {"role": "assistant", "content": text}]

    good, mixed = chat("1+1=2\n2+0=2"), chat("1+1=2\n2+0=3")
    by_step = model.step_scores([good, mixed])
    assert min(by_step[0]) > 0.5 and by_step[1][0] > 0.5 > by_step[1][1]
    assert model.score([good, mixed]) == pytest.approx([min(one) for one in by_step], abs=1e-5)


ROW = {"prompt": "p", "completions": ["a", "b"], "labels": [True, False]}
WRONG = {
    "no labels": ("prm", [{"prompt": "p", "completions": ["a"]}], (), "no labels"),
    "no steps": ("prm", [{"prompt": "p", "labels": [True]}], (), "no completions"),
    "fewer labels": ("prm", [ROW, {**ROW, "labels": [True]}], (), "each step has one label"),
    "label no truth value": ("prm", [ROW, {**ROW, "labels": [0, 2]}], (), "true or false"),
    "no step": ("prm", [ROW, {**ROW, "completions": [], "labels": []}], (), "must be lists"),
    "empty step": ("prm", [ROW, {**ROW, "completions": ["a", " "]}], (), "empty"),
    "empty separator": ("prm", [ROW], ("--step_separator", ""), "--step_separator"),
    "separator of an adapter": ("prm", [ROW], "--step_separator ## --tuner_type lora", "--step_separator"),
    "tuner of heads too": ("prm", [ROW], "--tuner_type vera", "--tuner_type: vera: PEFT cannot keep it out"),
    "too long": ("prm", [ROW], "--max_length 3", "longer than max_length"),
    "two presets": ("rloo", [{"query": "q"}], "--preset dapo --reward_funcs format", "--preset: dapo"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_inputs_are_one_line(nano_folders, tmp_path, capsys, name):
    method, rows, flags, expected = WRONG[name]
    data = written(tmp_path / "rows.jsonl", rows)
    model = str(nano_folders["qwen2"])
    own = {"--rlhf_type": method, "--model": model, "--dataset": data, "--output_dir": tmp_path / "out"}
    words = argv_of({**own, "--strict": "true"}, flags)
    assert main(["rlhf", *(model if word == "MODEL" else word for word in words)]) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("swift: error: ")]
    assert len(lines) == 1 and expected in lines[0]
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("method", "setting"), [("gdpo", "scale_rewards"), ("rloo", "advantage_estimator")])
def test_gdpo_and_rloo_are_presets_of_grpo(method, setting):
    from swift.arguments import parse

    words = ["--rlhf_type", method, "--model", "m", "--dataset", "d", "--reward_funcs", "format"]
    resolved = parse("rlhf", words, {})
    assert resolved.mode == "rlhf" and getattr(resolved.args, setting) == method
    assert resolved.preset_lines and resolved.provenance["preset"]["rule"]
    assert parse("rlhf", [*words, "--beta", "0.5"], {}).args.beta == 0.5
    assert parse("rlhf", ["--rlhf_type", "grpo", *words[2:]], {}).args.preset == "none"
