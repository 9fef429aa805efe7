"""GKD of models that see: the divergence from a teacher on plain rows, and answers that are sampled with images."""

import shutil

import pytest
import torch
import vlms
from image_rows import Plain, data_url, turn
from torch.nn.functional import kl_div
from transformers import AutoModelForImageTextToText
from trl_runs import argv_of, assert_resumes_exactly, in_two, logged, trained, written

from swift.arguments import parse
from swift.errors import ConfigError
from swift.models.vision import placeholder_ids
from swift.trainers.checkpoint import list_checkpoints

ANSWER = turn("assistant", "a b")
ROWS = [
    {"messages": [turn("user", "<image>What?"), ANSWER], "images": [data_url(0)]},
    {"messages": [turn("user", "<image>or, say, <image>?"), turn("assistant", "c")],
     "images": [data_url(1), data_url(2)]},
    {"messages": [turn("user", "Nothing"), turn("assistant", "yes, no")], "images": []},
]  # fmt: skip
TOWERS = "--freeze_vit false --freeze_aligner false"
SHORT = ("qwen3_vl", "gemma3")
BETA = 0.3


@pytest.fixture
def settings(vlm_folders, tmp_path):
    """Resolved settings of a small run with another model of the family as teacher, as a function of the flags."""

    def resolved(*flags, family="qwen3_vl", teacher=None, rows=ROWS):
        theirs = teacher or tmp_path / "teacher"
        if not theirs.exists():
            shutil.copytree(vlm_folders(family), theirs)
            model = AutoModelForImageTextToText.from_pretrained(theirs)
            torch.manual_seed(5)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(0.05 * torch.randn_like(parameter))
            model.save_pretrained(theirs)
        own = {
            "--rlhf_type": "gkd", "--model": vlm_folders(family), "--teacher_model": theirs, "--max_steps": 2,
            "--dataset": written(tmp_path / "rows.jsonl", rows), "--output_dir": tmp_path / "out",
            "--per_device_train_batch_size": 3, "--lmbda": 0, "--beta": BETA, "--max_completion_length": 4,
        }  # fmt: skip
        return parse("rlhf", argv_of(own, *flags), {})

    return resolved


def answered(plain, row):
    """Log-probs of all tokens [T, V] where each token of the answer is predicted."""
    alone = plain.text(row["messages"][:-1], add_generation_prompt=True)
    whole = plain.text(row["messages"])
    count = len(plain.ids(whole.removeprefix(alone)))
    logits = plain.model(**plain.processed(whole, row["images"])).logits[0, -1 - count : -1]
    never = placeholder_ids(plain.model.config)  # no answer can have them
    return logits[:, [token for token in range(logits.shape[1]) if token not in never]].log_softmax(-1)


PLAIN = (
    "--optim sgd --learning_rate 1 --lr_scheduler_type constant --warmup_ratio 0 --weight_decay 0 --max_grad_norm 1e9 "
    "--max_steps 1 --dataset_shuffle false --parity_check off"
)
"""One step, which moves each weight by its gradient."""


@pytest.mark.parametrize(
    "family", [one if one in SHORT else pytest.param(one, marks=pytest.mark.long) for one in vlms.FAMILIES]
)
def test_the_divergence_and_its_gradient_are_those_of_plain_rows(family, settings, vlm_folders, tmp_path):
    """beta KL(teacher | mixture) + (1 - beta) KL(student | mixture), equation 1 of arXiv:2306.13649."""
    run_dir = trained(settings(PLAIN, TOWERS, family=family))
    student, teacher = Plain(vlm_folders(family)), Plain(tmp_path / "teacher")
    ours = torch.cat([answered(student, row) for row in ROWS])
    with torch.no_grad():
        theirs = torch.cat([answered(teacher, row) for row in ROWS])
    mixed = (BETA * theirs.exp() + (1 - BETA) * ours.exp()).log()
    parts = [kl_div(mixed, one, log_target=True, reduction="sum") for one in (theirs, ours)]
    expected = (BETA * parts[0] + (1 - BETA) * parts[1]) / len(ours)
    assert logged(run_dir)[1, 1] == pytest.approx(float(expected.detach()), rel=1e-4)
    expected.backward()
    moved = AutoModelForImageTextToText.from_pretrained(list_checkpoints(run_dir)[-1]).state_dict()
    gaps, norms = 0.0, 0.0
    for name, parameter in student.model.named_parameters():
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        gaps += float((parameter.detach() - moved[name] - gradient).square().sum())
        norms += float(gradient.square().sum())
    assert gaps < 1e-10 * norms and norms > 0


@pytest.mark.slow
@pytest.mark.parametrize("flags", ["--lmbda 1", pytest.param("--seq_kd true", marks=pytest.mark.long)])
def test_answers_are_sampled_with_the_images_of_their_prompts(flags, settings):
    found = logged(trained(settings(flags)), "distillation/given_frac")
    assert set(found.values()) == {0.0 if flags == "--lmbda 1" else 1.0}


@pytest.mark.slow
@pytest.mark.parametrize("flags", ["--lmbda 1", pytest.param("--seq_kd true", marks=pytest.mark.long)])
def test_a_run_resumes_to_the_last_bit(flags, settings):
    more = f"{flags} --tuner_type lora --max_steps 4 --per_device_train_batch_size 1"
    assert_resumes_exactly(lambda *saving: settings(more, *saving))


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("sharing", ["", "--fsdp full_shard", "--deepspeed zero2", "--deepspeed zero3"])
def test_two_processes_take_the_steps_of_one(sharing, settings, tmp_path):
    """One of them gets a row without images."""
    flags = [TOWERS, "--per_device_train_batch_size 1 --dataset_shuffle false --max_steps 3 --learning_rate 1e-5"]
    rows = [ROWS[0], ROWS[2], ROWS[1], ROWS[2], ROWS[2], ROWS[2]]
    own = ["--gradient_accumulation_steps 2", "--output_dir", str(tmp_path / "one")]
    one = trained(settings(*flags, *own, rows=rows))
    two = in_two(settings(*flags, sharing.split(), "--output_dir", str(tmp_path / "two"), rows=rows))
    for name in ("loss", "grad_norm"):
        assert logged(one, name) == pytest.approx(logged(two, name), rel=1e-4)


def test_a_teacher_of_another_family_is_refused(settings, vlm_folders, tmp_path):
    with pytest.raises(ConfigError, match="--teacher_model: "):
        trained(settings(teacher=vlm_folders("idefics3")))
