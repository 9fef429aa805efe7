"""Preference methods of models that see: plain forward passes are the measure."""

from statistics import fmean

import pytest
import torch
import vlms
from image_rows import Plain, assert_same_gradients, data_url, turn
from torch.nn.functional import logsigmoid
from trl_runs import argv_of, assert_resumes_exactly, trainer_of, written

from swift.arguments import parse

PAIRS = [
    {"messages": [turn("user", "<image>What?")], "images": [data_url(0)], "chosen": "a b", "rejected": "c"},
    {
        "messages": [turn("user", "<image>or <image>?")],
        "images": [data_url(1), data_url(2)],
        "chosen": "d",
        "rejected": "e f g",
    },
    {"messages": [turn("user", "Nothing")], "images": [], "chosen": "h i", "rejected": "j"},
]
TOWERS = "--freeze_vit false --freeze_aligner false"


@pytest.fixture
def settings(vlm_folders, tmp_path):
    """Resolved settings of a small run, as a function of the flags that differ."""

    def resolved(method, *flags, family="qwen3_vl", rows=PAIRS):
        own = {
            "--rlhf_type": method, "--model": vlm_folders(family), "--dataset": written(tmp_path / "rows.jsonl", rows),
            "--output_dir": tmp_path / "out", "--per_device_train_batch_size": 3, "--max_steps": 2,
        }  # fmt: skip
        return parse("rlhf", argv_of(own, *flags), {})

    return resolved


def moved(trainer):
    """Away from the reference, where losses are symmetric."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in trainer.model.parameters():
            parameter += 0.01 * torch.randn(parameter.shape, generator=generator)
    return trainer


def answer_logp(plain, row, answer):
    """The log-prob of an answer."""
    prompt = row["messages"]
    alone, whole = plain.text(prompt, add_generation_prompt=True), plain.text([*prompt, turn("assistant", answer)])
    _, logprobs = plain.logprobs(whole, row["images"])
    return logprobs[-len(plain.ids(whole.removeprefix(alone))) :].sum()


@pytest.mark.parametrize("family", vlms.FAMILIES)
def test_dpo_is_that_of_plain_rows(family, settings, vlm_folders, tmp_path):
    trainer = moved(trainer_of(settings("dpo", TOWERS, family=family), tmp_path / "run"))
    loss = trainer.compute_loss(trainer.model, trainer.data_collator(list(trainer.train_dataset)))
    loss.backward()
    reference, plain = Plain(vlm_folders(family)), Plain(vlm_folders(family))
    plain.model.load_state_dict(trainer.model.state_dict())
    expected = 0.0
    for row in PAIRS:
        with torch.no_grad():
            start = answer_logp(reference, row, row["chosen"]) - answer_logp(reference, row, row["rejected"])
        gained = answer_logp(plain, row, row["chosen"]) - answer_logp(plain, row, row["rejected"]) - start
        expected = expected - logsigmoid(0.1 * gained) / len(PAIRS)
    expected.backward()
    assert float(loss.detach()) == pytest.approx(float(expected.detach()), rel=1e-6)
    assert_same_gradients(trainer.model, plain.model, most=2e-6)


@pytest.mark.parametrize("family", ["qwen3_vl", "gemma3", pytest.param("idefics3", marks=pytest.mark.long)])
def test_kto_is_that_of_plain_rows(family, settings, vlm_folders, tmp_path):
    """Its estimate of the KL has the answers of other rows, after the images of this one."""
    rows = [{**row, "label": number != 1} for number, row in enumerate(PAIRS)]
    files = [
        {"prompt": row["messages"], "images": row["images"], "completion": row["chosen"], "label": row["label"]}
        for row in rows
    ]
    resolved = settings("kto", TOWERS, "--dataset_shuffle false", family=family, rows=files)
    trainer = moved(trainer_of(resolved, tmp_path / "run"))
    loss = trainer.compute_loss(trainer.model, trainer.data_collator(list(trainer.train_dataset)))
    loss.backward()
    reference, plain = Plain(vlm_folders(family)), Plain(vlm_folders(family))
    plain.model.load_state_dict(trainer.model.state_dict())

    def ratio(row, answer):
        with torch.no_grad():
            start = answer_logp(reference, row, answer)
        return answer_logp(plain, row, answer) - start

    others = [rows[place - 1]["chosen"] for place in range(len(rows))]
    kl = max(0.0, fmean(float(ratio(row, other)) for row, other in zip(rows, others, strict=True)))
    gained = [ratio(row, row["chosen"]) - kl for row in rows]
    signs = [1 if row["label"] else -1 for row in rows]
    expected = sum(1 - torch.sigmoid(0.1 * sign * gain) for sign, gain in zip(signs, gained, strict=True)) / len(rows)
    expected.backward()
    assert float(loss.detach()) == pytest.approx(float(expected.detach()), rel=1e-6)
    assert_same_gradients(trainer.model, plain.model, most=2e-6)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["dpo", pytest.param("ipo", marks=pytest.mark.long), "kto"])
def test_a_run_resumes_to_the_last_bit(method, settings):
    more = ["--tuner_type lora --max_steps 4 --per_device_train_batch_size 2"]
    assert_resumes_exactly(lambda *saving: settings(method, *more, *saving))
