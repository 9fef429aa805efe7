"""Preference methods of models that see: plain forward passes are the measure."""

from statistics import fmean

import pytest
import torch
import vlms
from image_rows import Plain, assert_same_gradients, data_url, turn
from safetensors.torch import load_file
from torch.nn.functional import logsigmoid
from trl_runs import argv_of, assert_resumes_exactly, in_two, logged, trained, trainer_of, weights, written
from trl_runs import rows as rows_of

from swift.arguments import parse
from swift.cli.main import main
from swift.data.loading import load_rows
from swift.models.vision import placeholder_ids, resized
from swift.rewards.models import open_reward_models
from swift.trainers.checkpoint import list_checkpoints

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
VERDICTS = [
    {"prompt": row["messages"], "images": row["images"], "completion": row["chosen"], "label": number != 1}
    for number, row in enumerate(PAIRS)
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
    resolved = settings("kto", TOWERS, "--dataset_shuffle false", family=family, rows=VERDICTS)
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


SHORT = ("qwen3_vl", "idefics3")
MODELS = [family if family in SHORT else pytest.param(family, marks=pytest.mark.long) for family in vlms.FAMILIES]


def answered(plain, row, answer):
    """Log-probs of a chosen row's tokens that stand for no image, as TRL ends rows, and of those of the answer."""
    prompt, end = row["messages"], plain.tokenizer.eos_token
    alone, whole = (
        plain.text(prompt, add_generation_prompt=True),
        plain.text([*prompt, turn("assistant", answer)]) + end,
    )
    ids, logprobs = plain.logprobs(whole, row["images"])
    texts = torch.tensor([token not in placeholder_ids(plain.model.config) for token in ids[1:]])
    return logprobs[texts], logprobs[-len(plain.ids(whole.removeprefix(alone))) :]


def loss_of(method, plain):
    """The loss of a method as its paper has it, with its settings here."""
    whole, chosen, rejected = [], [], []
    for row in PAIRS:
        text, answer = answered(plain, row, row["chosen"])
        whole, chosen = [*whole, text], [*chosen, answer]
        rejected.append(answered(plain, row, row["rejected"])[1])
    if method == "cpo":
        gained = torch.stack([0.1 * (good.sum() - bad.sum()) for good, bad in zip(chosen, rejected, strict=True)])
        return -logsigmoid(gained).mean() - torch.cat(chosen).mean()
    good, bad = (torch.stack([answer.mean() for answer in answers]) for answers in (chosen, rejected))
    if method == "simpo":
        return -logsigmoid(2 * (good - bad) - 1).mean() - torch.cat(chosen).mean()
    odds = good - bad - (torch.log1p(-good.exp()) - torch.log1p(-bad.exp()))
    return -torch.cat(whole).mean() - 0.1 * logsigmoid(odds).mean()


@pytest.mark.parametrize("family", MODELS)
@pytest.mark.parametrize("method", ["orpo", "simpo", "cpo"])
def test_methods_without_a_reference_are_those_of_plain_rows(method, family, settings, vlm_folders, tmp_path):
    trainer = trainer_of(settings(method, TOWERS, family=family), tmp_path / "run")
    loss = trainer.compute_loss(trainer.model, trainer.data_collator(list(trainer.train_dataset)))
    loss.backward()
    plain = Plain(vlm_folders(family))
    expected = loss_of(method, plain)
    expected.backward()
    assert float(loss.detach()) == pytest.approx(float(expected.detach()), rel=1e-6)
    assert_same_gradients(trainer.model, plain.model, most=2e-6)


def score(plain, head, row, answer):
    """The head's value at the last token of an answer."""
    made = plain.processed(plain.text([*row["messages"], turn("assistant", answer)]), row["images"])
    return head @ plain.model.base_model(**made).last_hidden_state[0, -1]


@pytest.mark.parametrize("family", MODELS)
def test_a_reward_model_is_that_of_plain_rows(family, settings, vlm_folders, tmp_path):
    trainer = trainer_of(settings("rm", TOWERS, family=family), tmp_path / "run")
    loss = trainer.compute_loss(trainer.model, trainer.data_collator(list(trainer.train_dataset)))
    loss.backward()
    plain = Plain(vlm_folders(family))
    head = trainer.model.score.weight[0].detach().clone().requires_grad_()
    scores = [[score(plain, head, row, row[answer]) for answer in ("chosen", "rejected")] for row in PAIRS]
    expected = -torch.stack([logsigmoid(good - bad) for good, bad in scores]).mean()
    expected.backward()
    assert float(loss.detach()) == pytest.approx(float(expected.detach()), rel=1e-6)
    # scores are nearly equal at the start
    assert_same_gradients(trainer.model.base_model, plain.model.base_model, most=4e-6)
    assert torch.dist(trainer.model.score.weight.grad[0], head.grad) < 4e-6 * head.grad.norm()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "tuner"),
    [
        ("qwen3_vl", "full"),
        ("qwen3_vl", "lora"),
        pytest.param("idefics3", "full", marks=pytest.mark.long),
        pytest.param("gemma3", "lora", marks=pytest.mark.long),
        pytest.param("qwen2_5_vl", "full", marks=pytest.mark.long),
        pytest.param("qwen2_5_omni", "full", marks=pytest.mark.long),
    ],
)
def test_a_trained_reward_model_scores_what_it_sees(family, tuner, settings, vlm_folders, tmp_path):
    """As `--reward_model` of grpo does, with images as large as in training, and a row without any among others."""
    run = trained(settings("rm", f"--tuner_type {tuner} --max_pixels 4096 --max_steps 2", family=family))
    flags = ["--rlhf_type grpo --reward_model", str(list_checkpoints(run)[-1])]
    own = {"--model": vlm_folders(family), "--dataset": tmp_path / "rows.jsonl"}
    models = open_reward_models(parse("rlhf", argv_of(own, *flags), {}).args)
    (model,) = models._models
    model.load("cpu", torch.float32)
    rows = load_rows(settings("rm").args, "train", purpose="pair", images=True).examples
    found = model.score([[*row.messages, row.columns["chosen"][0]] for row in rows])
    plain = Plain(vlm_folders(family))
    plain.processor = SmallImages(plain.processor)
    setattr(plain.model, plain.model.base_model_prefix, model._model.base_model)
    with torch.no_grad():
        expected = [float(score(plain, model._model.score.weight[0], row, row["chosen"])) for row in PAIRS]
    assert found == pytest.approx(expected, rel=1e-5, abs=1e-6)
    assert models.blind() == []


class SmallImages:
    """A processor whose images have at most 4096 pixels."""

    def __init__(self, processor):
        self.processor = processor

    def __call__(self, *, images, **more):
        return self.processor(images=images and [resized(image, 4096) for image in images], **more)


@pytest.mark.slow
@pytest.mark.long
def test_an_adapter_scores_merged_what_it_scored(settings, tmp_path):
    run = trained(settings("rm", TOWERS, "--tuner_type lora --learning_rate 1e-2"))
    merged, adapter = tmp_path / "merged", list_checkpoints(run)[-1]
    assert main(["merge-lora", "--adapters", str(adapter), "--output_dir", str(merged)]) == 0
    chats = [
        {"messages": [*row["messages"], turn("assistant", row["chosen"])], "images": row["images"]} for row in PAIRS
    ]
    data, found = str(written(tmp_path / "chats.jsonl", chats)), []
    for number, model in enumerate((["--adapters", str(adapter)], ["--model", str(merged)])):
        file = tmp_path / f"{number}.jsonl"
        assert main(["infer", *model, "--val_dataset", data, "--result_path", str(file)]) == 0
        found.append([line["score"] for line in rows_of(file)])
    assert found[0] == pytest.approx(found[1], rel=1e-5)
    assert len(set(found[0])) == len(PAIRS)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("method", ["rm", "simpo", "dpo", "dpo lora"])
@pytest.mark.parametrize("sharing", ["", "--fsdp full_shard", "--deepspeed zero2", "--deepspeed zero3"])
def test_two_processes_take_the_steps_of_one(method, sharing, settings, tmp_path):
    """One of them gets a row without images."""
    method, *tuner = method.split()
    flags = [TOWERS, "--per_device_train_batch_size 1 --dataset_shuffle false --max_steps 3"]
    flags += ["--optim sgd --weight_decay 0 --learning_rate 0.1 --max_grad_norm 10"]
    flags += ["--cpo_alpha 0"] if method == "simpo" else []  # which weighs a mean over tokens
    flags += ["--tuner_type lora --lora_dropout 0 --gradient_checkpointing true"] if tuner else []
    rows = [PAIRS[0], PAIRS[2], PAIRS[1], PAIRS[2], PAIRS[2], PAIRS[2]]
    own = ["--gradient_accumulation_steps 2", "--output_dir", str(tmp_path / "one")]
    one = trained(settings(method, *flags, *own, rows=rows))
    two = in_two(settings(method, *flags, sharing.split(), "--output_dir", str(tmp_path / "two"), rows=rows))
    for name in ("loss", "grad_norm"):
        assert logged(one, name) == pytest.approx(logged(two, name), rel=1e-5)
    ours, theirs = (weights(list_checkpoints(run)[-1]) for run in (two, one))
    assert ours.keys() == theirs.keys()
    assert max(float((ours[name] - theirs[name]).abs().max()) for name in theirs) < 1e-6


@pytest.mark.slow
@pytest.mark.parametrize(
    "method",
    [
        "dpo",
        pytest.param("ipo", marks=pytest.mark.long),
        "kto",
        pytest.param("orpo", marks=pytest.mark.long),
        pytest.param("rm", marks=pytest.mark.long),
    ],
)
def test_a_run_resumes_to_the_last_bit(method, settings):
    more = ["--tuner_type lora --max_steps 4 --per_device_train_batch_size 2"]
    assert_resumes_exactly(lambda *saving: settings(method, *more, *saving))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "family"),
    [
        ("kto", "qwen3_vl"),
        *(pytest.param(*one, marks=pytest.mark.long) for one in (("kto", "gemma3"), ("dpo", "qwen3_vl"))),
    ],
)
def test_log_probs_of_the_reference_are_the_same_before_training(method, family, settings, tmp_path):
    flags = ["--dataset_shuffle false --max_steps 3 --learning_rate 1e-2"]
    rows, found = VERDICTS if method == "kto" else PAIRS, []
    for ahead in ("false", "true"):
        own = f"--precompute_ref_log_probs {ahead} --output_dir {tmp_path / ahead}"
        found.append(logged(trained(settings(method, *flags, own, family=family, rows=rows)), "loss"))
    assert found[0] == pytest.approx(found[1], rel=1e-6)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("family", ["qwen3_vl", "idefics3"])
@pytest.mark.parametrize("method", ["dpo", "dpo lora", "kto", "orpo", "cpo", "simpo", "rm"])
def test_processes_that_share_rows_take_the_step_of_one(method, family, settings, vlm_folders, tmp_path):
    method, *tuner = method.split()
    given = [TOWERS, "--per_device_train_batch_size 3 --dataset_shuffle false --max_steps 2 --optim sgd"]
    given += ["--learning_rate 1 --weight_decay 0 --max_grad_norm 0 --lr_scheduler_type constant"]
    given += ["--tuner_type lora --init_weights gaussian --lora_dropout 0"] if tuner else []
    rows = VERDICTS if method == "kto" else PAIRS
    one = trained(settings(method, *given, "--output_dir", str(tmp_path / "one"), family=family, rows=rows))
    sharing = ["--sequence_parallel_size 2", "--output_dir", str(tmp_path / "two")]
    two = in_two(settings(method, *given, *sharing, family=family, rows=rows))
    for name in ("loss", "grad_norm"):
        assert logged(two, name) == pytest.approx(logged(one, name), rel=1e-5)
    ours, theirs = (weights(list_checkpoints(run)[-1]) for run in (two, one))
    start = {} if tuner else load_file(vlm_folders(family) / "model.safetensors")
    moved = sum(float((theirs[name] - start.get(name, 0)).square().sum()) for name in theirs) ** 0.5
    gap = sum(float((theirs[name] - ours[name]).square().sum()) for name in theirs) ** 0.5
    assert gap < 1e-5 * moved, (gap, moved)


STREAMED = ("dpo", "kto", "orpo", "rm")


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("method", STREAMED)
def test_a_stream_takes_the_steps_of_a_table(method, settings, tmp_path):
    flags = [TOWERS, "--dataset_shuffle false --per_device_train_batch_size 3 --max_steps 2"]
    rows = VERDICTS if method == "kto" else PAIRS
    table = trained(settings(method, *flags, "--output_dir", str(tmp_path / "table"), rows=rows))
    flags = [*flags, "--streaming true", "--output_dir", str(tmp_path / "stream")]
    stream = trained(settings(method, *flags, rows=rows))
    for name in ("loss", "grad_norm"):
        assert logged(stream, name) == logged(table, name)
