"""Supervised tuning of models that see: plain forward passes are the measure."""

import pytest
import torch
import vlms
from image_rows import Plain, assert_same_gradients, data_url, turn
from safetensors.torch import load_file
from trl_runs import argv_of, assert_resumes_exactly, in_two, logged, trained, trainer_of, weights, written

from swift.arguments import parse
from swift.trainers.checkpoint import list_checkpoints

ASKED, ANSWER = turn("user", "<image>What?"), turn("assistant", "a b")
ROWS = [
    {"messages": [ASKED, ANSWER], "images": [data_url(0)]},
    {"messages": [ASKED, ANSWER, turn("user", "or <image>?"), ANSWER], "images": [data_url(1), data_url(2)]},
    {"messages": [turn("user", "Nothing"), turn("assistant", "yes")], "images": []},
]
TOWERS = "--freeze_vit false --freeze_aligner false"


@pytest.fixture
def settings(vlm_folders, tmp_path):
    """Resolved settings of a small run, as a function of the flags that differ."""

    def resolved(*flags, family="qwen3_vl", rows=ROWS):
        own = {
            "--model": vlm_folders(family), "--dataset": written(tmp_path / "rows.jsonl", rows),
            "--output_dir": tmp_path / "out", "--per_device_train_batch_size": 3, "--max_steps": 2,
        }  # fmt: skip
        return parse("sft", argv_of(own, *flags), {})

    return resolved


def answers_in(plain, ids):
    """Whether each token is one of an answer or ends one."""
    start, (end,) = plain.ids("<|im_start|>assistant\n"), plain.ids("<|im_end|>")
    found, inside = [], False
    for place, token in enumerate(ids):
        found.append(inside)
        inside = token != end if inside else ids[: place + 1][-len(start) :] == start
    return torch.tensor(found)


@pytest.mark.parametrize("family", vlms.FAMILIES)
def test_loss_and_gradients_are_those_of_plain_rows(family, settings, vlm_folders, tmp_path):
    trainer = trainer_of(settings(TOWERS, family=family), tmp_path / "run")
    loss = trainer.compute_loss(trainer.model, trainer.data_collator(list(trainer.train_dataset)))
    loss.backward()
    plain = Plain(vlm_folders(family))
    learnt = []
    for row in ROWS:
        ids, logprobs = plain.logprobs(plain.text(row["messages"]), row["images"])
        learnt.append(logprobs[answers_in(plain, ids)[1:]])
    expected = -torch.cat(learnt).mean()
    expected.backward()
    assert float(loss.detach()) == pytest.approx(float(expected.detach()), rel=1e-6)
    assert_same_gradients(trainer.model, plain.model, most=1e-6)


@pytest.mark.parametrize("family", vlms.FAMILIES)
def test_a_batch_of_texts_needs_no_pixels(family, settings, tmp_path):
    trainer = trainer_of(settings(TOWERS, family=family, rows=ROWS[2:]), tmp_path / "run")
    batch = trainer.data_collator(list(trainer.train_dataset))
    assert batch.keys() == {"input_ids", "attention_mask", "labels"}
    trainer.compute_loss(trainer.model, batch).backward()


def test_loss_scale_all_leaves_out_the_tokens_of_images(settings, tmp_path):
    trainer = trainer_of(settings("--loss_scale all"), tmp_path / "run")
    for row in trainer.train_dataset:
        learnt = [label for label in row["labels"] if label != -100]
        assert learnt == [token for token in row["input_ids"] if token >= 0]


@pytest.mark.slow
@pytest.mark.parametrize("flags", ["--tuner_type lora", f"--tuner_type full {TOWERS}"])
def test_a_run_resumes_to_the_last_bit(flags, settings, tmp_path):
    more = [flags, "--max_steps 4 --per_device_train_batch_size 1"]
    run = assert_resumes_exactly(lambda *saving: settings(*more, *saving))
    checkpoint = list_checkpoints(run)[-1]
    assert (checkpoint / "preprocessor_config.json").exists()


@pytest.mark.slow
@pytest.mark.parametrize("trained_parts", ["language model", pytest.param("all", marks=pytest.mark.long)])
def test_full_tuning_keeps_every_tensor(trained_parts, settings, vlm_folders):
    run = trained(settings("--learning_rate 1e-2", TOWERS if trained_parts == "all" else []))
    before, after = load_file(vlm_folders("qwen3_vl") / "model.safetensors"), weights(list_checkpoints(run)[-1])
    assert before.keys() == after.keys()
    moved = {name for name in after if not before[name].equal(after[name])}
    assert any("language_model" in name for name in moved)
    assert any("visual" in name for name in moved) == (trained_parts == "all")


@pytest.mark.slow
@pytest.mark.parametrize(
    "sharing",
    [
        TOWERS,
        pytest.param("--fsdp full_shard", marks=pytest.mark.long),
        pytest.param("--deepspeed zero2", marks=pytest.mark.long),
    ],
)
def test_two_processes_take_the_steps_of_one(settings, tmp_path, sharing):
    """One of them gets a row without images, so that its tower has no gradient, or is not computed."""
    flags = ["--per_device_train_batch_size 1 --dataset_shuffle false --learning_rate 1e-5"]
    rows = [ROWS[0], ROWS[2], ROWS[1], ROWS[2]]
    alone = [TOWERS] if sharing == TOWERS else []
    own = [*alone, "--gradient_accumulation_steps 2", "--output_dir", str(tmp_path / "one")]
    one = trained(settings(*flags, *own, rows=rows))
    two = in_two(settings(*flags, sharing, "--output_dir", str(tmp_path / "two"), rows=rows))
    for name in ("loss", "grad_norm"):
        assert logged(one, name) == pytest.approx(logged(two, name), rel=1e-5)


def test_cached_rows_have_their_images_and_depend_on_the_processor(settings, tmp_path, monkeypatch):
    def rows_of(*flags):
        monkeypatch.setattr("swift.data.image_store._prompts", {})
        trainer = trainer_of(settings("--dataset_num_proc 2", *flags), tmp_path / "run")
        return trainer.train_dataset["input_ids"], trainer.data_collator(list(trainer.train_dataset))

    (ids, batch), (again, cached) = rows_of(), rows_of()
    assert ids == again and batch["pixel_values"].equal(cached["pixel_values"])
    small, _ = rows_of("--max_pixels 2048")
    assert [len(row) for row in small] < [len(row) for row in ids]


def test_rows_with_images_are_split_off_for_evaluation(settings, tmp_path):
    trainer = trainer_of(settings("--split_dataset_ratio 0.3 --eval_steps 1"), tmp_path / "run")
    assert (len(trainer.train_dataset), len(trainer.eval_dataset)) == (2, 1)
    assert trainer.evaluate()["eval_loss"] > 0
