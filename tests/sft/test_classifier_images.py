"""Classifiers that see: plain forward passes are the measure, in training and in `swift infer`."""

import json

import pytest
import torch
import vlms
from image_rows import Plain, assert_same_gradients, data_url, turn
from torch.nn.functional import cross_entropy
from trl_runs import argv_of, assert_resumes_exactly, logged, trained, trainer_of, written

from swift.arguments import parse
from swift.cli.main import main
from swift.trainers.checkpoint import list_checkpoints

ROWS = [
    {"messages": [turn("user", "<image>What?")], "images": [data_url(0)], "label": 2},
    {"messages": [turn("user", "<image>or <image>?"), turn("assistant", "a")], "images": [data_url(1), data_url(2)],
     "label": 0},
    {"messages": [turn("user", "Nothing")], "images": [], "label": 1},
]  # fmt: skip
TOWERS = "--freeze_vit false --freeze_aligner false"
SHORT = ("qwen3_vl", "gemma3")


@pytest.fixture
def settings(vlm_folders, tmp_path):
    """Resolved settings of a small run, as a function of the flags that differ."""

    def resolved(*flags, family="qwen3_vl"):
        own = {
            "--task_type": "seq_cls", "--num_labels": 3, "--model": vlm_folders(family), "--max_steps": 2,
            "--dataset": written(tmp_path / "rows.jsonl", ROWS), "--output_dir": tmp_path / "out",
            "--per_device_train_batch_size": 3,
        }  # fmt: skip
        return parse("sft", argv_of(own, *flags), {})

    return resolved


def plain_logits(plain, head, row):
    """The head's values at the last token of a text, ready to be continued or finished."""
    finished = row["messages"][-1]["role"] == "assistant"
    text = plain.text(row["messages"], add_generation_prompt=not finished)
    hidden = plain.model.base_model(**plain.processed(text, row["images"])).last_hidden_state
    return head @ hidden[0, -1]


@pytest.mark.parametrize(
    ("family", "way"),
    [
        *((one, "") if one in SHORT else pytest.param(one, "", marks=pytest.mark.long) for one in vlms.FAMILIES),
        *(("qwen3_vl", way) for way in ("--padding_free true", "--packing true --packing_length 512")),
    ],
)
def test_a_classifier_is_that_of_plain_rows(family, way, settings, vlm_folders, tmp_path):
    trainer = trainer_of(settings(TOWERS, way.split(), family=family), tmp_path / "run")
    assert len(trainer.train_dataset) == (1 if "packing true" in way else 3)
    loss = trainer.compute_loss(trainer.model, trainer.data_collator(list(trainer.train_dataset)))
    loss.backward()
    plain = Plain(vlm_folders(family))
    head = trainer.model.score.weight.detach().clone().requires_grad_()
    logits = torch.stack([plain_logits(plain, head, row) for row in ROWS])
    expected = cross_entropy(logits, torch.tensor([row["label"] for row in ROWS]))
    expected.backward()
    assert float(loss.detach()) == pytest.approx(float(expected.detach()), rel=1e-6)
    assert_same_gradients(trainer.model.base_model, plain.model.base_model, most=2e-6)
    assert torch.dist(trainer.model.score.weight.grad, head.grad) < 2e-6 * head.grad.norm()


@pytest.mark.slow
@pytest.mark.parametrize("tuner", ["full", pytest.param("lora", marks=pytest.mark.long)])
def test_a_trained_classifier_labels_what_it_sees(tuner, settings, vlm_folders, tmp_path):
    flags = f"{TOWERS} --tuner_type {tuner} --learning_rate 1e-2 --max_steps 20 --lora_dropout 0"
    run = trained(settings(flags))
    last = list_checkpoints(run)[-1]
    words = ["--adapters" if tuner == "lora" else "--model", str(last)]
    asked, found = tmp_path / "asked.jsonl", tmp_path / "found.jsonl"
    written(asked, ROWS)
    assert main(["infer", *words, "--val_dataset", str(asked), "--result_path", str(found)]) == 0
    labels = [json.loads(line)["label"] for line in found.read_text().splitlines()]
    assert labels == [row["label"] for row in ROWS]
    assert min(logged(run).values()) < 0.5


@pytest.mark.slow
@pytest.mark.long
def test_a_run_resumes_to_the_last_bit(settings):
    more = ["--tuner_type lora --max_steps 4 --per_device_train_batch_size 1"]
    assert_resumes_exactly(lambda *saving: settings(*more, *saving))
