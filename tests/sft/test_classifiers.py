"""Classifiers and regression: rows, first steps, evaluation, resume, labels of `swift infer`, and wrong settings."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from oracle import first_step
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForSequenceClassification, BertConfig, BertForSequenceClassification, BertTokenizer
from trl_runs import argv_of, assert_resumes_exactly, logged, trained, trainer_of, written

from swift.arguments import parse
from swift.cli.infer import run as infer
from swift.cli.main import main
from swift.errors import ConfigError
from swift.trainers.checkpoint import list_checkpoints
from swift.trainers.classification import metrics_of

SINGLE, MULTI, VALUE = "single_label_classification", "multi_label_classification", "regression"
WORDS = {SINGLE: "--num_labels 3", MULTI: f"--num_labels 3 --problem_type {MULTI}", VALUE: "--num_labels 1"}


def label_of(problem, n):
    return {SINGLE: n % 3, MULTI: [k for k in range(3) if n >> k & 1], VALUE: n / 8}[problem]


def texts(problem, count=16):
    return [
        {"messages": [{"role": "user", "content": "a" * (n + 1)}], "label": label_of(problem, n)} for n in range(count)
    ]


@pytest.fixture
def settings(nano_folders, tmp_path):
    def resolved(problem, *flags, rows=None):
        data = written(tmp_path / f"{problem}.jsonl", rows or texts(problem))
        own = {
            "--task_type": "seq_cls", "--model": nano_folders["qwen2"], "--dataset": data, "--max_steps": 4,
            "--output_dir": tmp_path / "out", "--per_device_train_batch_size": 4,
        }  # fmt: skip
        return parse("sft", argv_of(own, WORDS[problem], *flags), {})

    return resolved


def plain_loss(model, rows, problem, pad):
    """transformers' own loss of encoded rows."""
    width = max(len(row["input_ids"]) for row in rows)
    ids = torch.tensor([row["input_ids"] + [pad] * (width - len(row["input_ids"])) for row in rows])
    mask = torch.tensor([[1] * len(row["input_ids"]) + [0] * (width - len(row["input_ids"])) for row in rows])
    labels = [row["labels"] for row in rows]
    if problem == MULTI:
        labels = [[float(k in label) for k in range(3)] for label in labels]
    labels = torch.tensor([int(one) for (one,) in labels] if problem == SINGLE else labels)
    return model(input_ids=ids, attention_mask=mask, labels=labels).loss


@pytest.mark.parametrize(("problem", "tuner"), [(SINGLE, "full"), (MULTI, "full"), (VALUE, "full"), (SINGLE, "lora")])
def test_the_first_step_is_that_of_transformers(settings, tmp_path, problem, tuner):
    resolved = settings(problem, f"--dataset_shuffle false --lora_dropout 0 --tuner_type {tuner}")
    trainer = trainer_of(resolved, tmp_path / "swift")
    rows = [trainer.train_dataset[index] for index in range(4)]
    found, grads = first_step(trainer)
    torch.manual_seed(resolved.args.seed)
    model = AutoModelForSequenceClassification.from_pretrained(
        resolved.args.model, num_labels=1 if problem == VALUE else 3, problem_type=problem, dtype=torch.float32
    )
    model.config.pad_token_id = trainer.processing_class.pad_token_id
    if tuner == "lora":
        model = get_peft_model(model, LoraConfig("SEQ_CLS", r=8, lora_alpha=32, target_modules="all-linear"))
        model.load_state_dict(trainer.model.state_dict())
    loss = plain_loss(model, rows, problem, model.config.pad_token_id)
    loss.backward()
    expected = {name: one.grad for name, one in model.named_parameters() if one.grad is not None}
    assert found == pytest.approx(loss.item(), abs=1e-6) and grads.keys() == expected.keys()
    assert all(torch.allclose(grads[name], expected[name], atol=1e-6) for name in grads)
    assert any("score" in name for name in grads)


@pytest.mark.parametrize("problem", [SINGLE, MULTI])
def test_accumulation_changes_neither_loss_nor_gradient(settings, tmp_path, problem):
    once = "--optim sgd --max_grad_norm 0 --max_steps 1 --dataset_shuffle false"
    more = "--per_device_train_batch_size 2 --gradient_accumulation_steps 2"
    whole = trained(settings(problem, once, f"--output_dir {tmp_path}/whole"))
    parts = trained(settings(problem, once, more, f"--output_dir {tmp_path}/parts"))
    for name in ("loss", "grad_norm"):
        assert logged(whole, name) == pytest.approx(logged(parts, name), rel=1e-4)


def labelled(tmp_path, rows, *words):
    file = tmp_path / f"{len(list(tmp_path.iterdir()))}-labels.jsonl"
    data = written(tmp_path / "asked.jsonl", rows)
    assert infer(parse("infer", [*map(str, words), "--val_dataset", str(data), "--result_path", str(file)], {})) == 0
    return [json.loads(line) for line in file.read_text().splitlines()]


@pytest.mark.parametrize("problem", [SINGLE, MULTI, VALUE])
def test_labels_of_a_trained_adapter_are_those_of_the_merged_model(settings, tmp_path, capsys, problem):
    rows, lora = texts(problem), f"--tuner_type lora --val_dataset {tmp_path}/{problem}.jsonl"
    last = list_checkpoints(trained(settings(problem, lora)))[-1]
    lines = labelled(tmp_path, rows, "--adapters", last, "--truncation_strategy", "right")
    printed = capsys.readouterr().out
    assert "--truncation_strategy: not used by a classifier" in printed
    with (last.parent / "logging.jsonl").open() as logs:
        measured = [json.loads(line) for line in logs if "eval_loss" in line][-1]
    if problem == VALUE:
        assert all(isinstance(line["label"], float) and "probabilities" not in line for line in lines)
        squares = [(line["label"] - row["label"]) ** 2 for line, row in zip(lines, rows, strict=True)]
        assert measured["eval_mse"] == pytest.approx(np.mean(squares), rel=1e-4) and "mean squared error" in printed
    else:
        right = np.mean([line["label"] == row["label"] for line, row in zip(lines, rows, strict=True)])
        assert measured["eval_accuracy"] == pytest.approx(right) and f"accuracy: {right:.4f} of 16 rows" in printed
        total = sum(map(sum, (line["probabilities"] for line in lines)))
        assert problem == MULTI or total == pytest.approx(len(rows), abs=1e-4)
    assert main(["merge-lora", "--adapters", str(last), "--output_dir", str(tmp_path / "merged")]) == 0
    bare = labelled(
        tmp_path, [{"query": row["messages"][0]["content"]} for row in rows], "--model", tmp_path / "merged"
    )
    key = "label" if problem == VALUE else "probabilities"
    assert all(one[key] == pytest.approx(other[key], abs=1e-4) for one, other in zip(lines, bare, strict=True))
    plain = AutoModelForSequenceClassification.from_pretrained(tmp_path / "merged")
    assert plain.config.problem_type == problem and plain.config.num_labels == (1 if problem == VALUE else 3)


def test_a_resumed_run_is_the_undisturbed_one(settings):
    assert_resumes_exactly(lambda *flags: settings(MULTI, "--tuner_type lora", *flags))


def test_an_encoder_reads_texts_without_a_chat_template(settings, tmp_path):
    names = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"{'a' * n}" for n in range(1, 20))]
    (tmp_path / "vocab.txt").write_text("\n".join(names))
    folder = tmp_path / "bert"
    BertTokenizer(str(tmp_path / "vocab.txt"), model_max_length=64).save_pretrained(folder)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    BertForSequenceClassification(BertConfig(vocab_size=len(names), num_labels=3, **sizes)).save_pretrained(folder)
    resolved = settings(SINGLE, f"--dataset_shuffle false --model {folder}")
    found = labelled(tmp_path, texts(SINGLE), "--model", list_checkpoints(trained(resolved))[-1])
    assert {len(line["probabilities"]) for line in found} == {3}
    trainer = trainer_of(resolved, tmp_path / "swift")
    assert trainer.train_dataset[3]["input_ids"] == [2, 8, 3], "[CLS] aaaa [SEP]"


def test_a_stream_of_rows_trains_the_same_steps(settings, tmp_path):
    table, stream = (
        trained(settings(VALUE, f"--dataset_shuffle false --output_dir {tmp_path}/{name}", flags))
        for name, flags in (("table", "--max_steps 2"), ("stream", "--max_steps 2 --streaming true"))
    )
    assert logged(table, "loss") == logged(stream, "loss")


def test_metrics_count_rows_and_labels():
    logits, truth = np.array([[1.0, -1.0, 2.0], [-1.0, -1.0, 1.0]]), np.array([[1, 0, 1], [0, 1, 1]])
    scores = metrics_of(SimpleNamespace(predictions=logits, label_ids=truth), problem=MULTI)
    assert scores == {"accuracy": 0.5, "f1": pytest.approx(6 / 7)}


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        ("--num_labels 2", "label 2: not one of 0 to 1 (--num_labels 2)"),
        ("--num_labels 2 --problem_type regression", "1 numbers as label, not 2"),
        ("--num_labels 1 --problem_type single_label_classification", "--num_labels: 1: one class teaches nothing"),
        ("--use_chat_template false --template chatml", "--template: chatml: contradicts --use_chat_template false"),
        ("--metric_for_best_model mse", "--metric_for_best_model: mse: not measured; there are: accuracy, loss"),
        ("--packing_strategy wrapped", "--packing_strategy: wrapped: not a flag of swift sft --task_type seq_cls"),
    ],
)
def test_wrong_settings_are_refused_in_one_line(settings, capsys, flags, line):
    with pytest.raises(ConfigError) as refused:
        trained(settings(SINGLE, flags, "--strict true"))
    assert line in str(refused.value)


def gradients(trainer, rows):
    """Loss of rows, and its gradients."""
    trainer.model.zero_grad()
    batch = trainer.data_collator(rows)
    loss = trainer.compute_loss(trainer.model.train(), trainer._prepare_inputs(batch))
    loss.backward()
    named = trainer.model.named_parameters()
    return float(loss.detach()), {name: one.grad.clone() for name, one in named if one.grad is not None}, batch


@pytest.mark.parametrize("tuner", ["full", "lora"])
@pytest.mark.parametrize("problem", [SINGLE, MULTI, VALUE])
@pytest.mark.parametrize("way", ["--padding_free true", "--packing true --packing_length 200"])
def test_streams_have_the_loss_and_gradient_of_padded_rows(settings, tmp_path, problem, tuner, way):
    flags = f"--tuner_type {tuner} --lora_dropout 0 --dataset_shuffle false --load_from_cache_file false"
    plain = trainer_of(settings(problem, flags), tmp_path / "plain")
    stream = trainer_of(settings(problem, flags, way), tmp_path / "stream")
    rows = list(stream.train_dataset)
    ids = [one for row in rows for one in (row["input_ids"] if "packing true" in way else [row["input_ids"]])]
    order = [next(row for row in plain.train_dataset if row["input_ids"] == one) for one in ids]
    assert len(order) == 16 and (len(rows) < 16) == ("packing true" in way)
    stream.model.load_state_dict(plain.model.state_dict())
    found, ours, batch = gradients(stream, rows)
    expected, theirs, _ = gradients(plain, order)
    assert batch["input_ids"].shape == (1, sum(map(len, ids)))
    assert found == pytest.approx(expected, abs=1e-5) and ours.keys() == theirs.keys()
    assert all(torch.allclose(ours[name], theirs[name], atol=1e-5) for name in theirs)


def test_a_packed_classifier_is_evaluated_as_a_padded_one_and_resumed_exactly(settings):
    flags = (
        "--split_dataset_ratio 0.3 --eval_steps 2 --max_steps 4 --learning_rate 1e-30 --per_device_eval_batch_size 3"
    )
    plain, packed = (
        trained(settings(SINGLE, flags, way)) for way in ("--padding_free false", "--packing true --packing_length 64")
    )
    for name in ("eval_loss", "eval_accuracy"):
        assert logged(packed, name) == pytest.approx(logged(plain, name), abs=1e-5)
    assert_resumes_exactly(lambda *more: settings(SINGLE, "--packing true --packing_length 64 --max_steps 4", *more))
