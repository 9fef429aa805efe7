"""`--predict_with_generate`: evaluation samples answers and compares them with those of the rows."""

import importlib.util
import os
import sys
from pathlib import Path
from statistics import mean

import pytest
import torch
from image_rows import Plain, data_url, turn
from test_sft_run import sft
from trl_runs import argv_of, in_two, logged, losses, rows, written

from swift.arguments import parse
from swift.errors import ConfigError, ResourceError
from swift.models.arguments import ModelArguments
from swift.models.policy import load_for_inference
from swift.models.tokenizer import load_chat
from swift.trainers.answers import AnswerEncoder, similarity
from swift.trainers.session import require_packages
from swift.trainers.trl.run import run

OPTIONAL = Path(sys.prefix) / "optional"
with_packages = pytest.mark.skipif(
    not (list(OPTIONAL.glob("rouge_score-*")) or importlib.util.find_spec("rouge_score")),
    reason="make install puts it there",
)


@pytest.fixture
def optional(monkeypatch):
    """Packages that `make install` puts into a folder of their own can be imported."""
    monkeypatch.setattr(sys, "path", [*sys.path, str(OPTIONAL)])


@with_packages
@pytest.mark.usefixtures("optional")
def test_similarity_is_f1_of_words_pairs_and_common_subsequence_and_smoothed_bleu():
    found = similarity("the cat sat", "the cat sat on the mat")
    assert found["rouge-1"] == found["rouge-l"] == pytest.approx(100 * 2 * (1 * 3 / 6) / (1 + 3 / 6), abs=1e-4)
    assert found["rouge-2"] == pytest.approx(100 * 2 * (1 * 2 / 5) / (1 + 2 / 5), abs=1e-4)
    assert found["bleu-4"] == pytest.approx(100 * torch.tensor(-1.0).exp().item() * 0.5**0.25, abs=1e-4)
    for answer in ("", " \n", "..."):
        assert set(similarity(answer, "x").values()) == {0.0}
    assert similarity("...", "...")["rouge-1"] == 100
    chinese = similarity("我来到北京", "我来到上海")
    assert chinese["rouge-1"] == chinese["rouge-l"] == pytest.approx(100 * 2 / 3), "words, not characters"


@with_packages
@pytest.mark.usefixtures("optional")
def test_similarity_of_long_texts():
    words = [f"w{number % 700}" for number in range(3000)]
    found = similarity(" ".join(words), " ".join([*words[1500:], *words[:1500]]))
    assert found["rouge-1"] == 100 and 50 <= found["rouge-l"] < 100


def test_a_chat_that_ends_without_an_answer_is_left_out(nano_folders):
    encoder = AnswerEncoder(load_chat(ModelArguments(model=str(nano_folders["qwen2"]))), None)
    chat = [turn("user", "a?"), turn("assistant", "b"), turn("user", "c")]
    assert encoder(chat[:2], None)["answer"] and encoder(chat, None)["problem"] == "no assistant turn at its end"


def greedy(checkpoint, messages):
    """An answer by transformers alone."""
    named = ModelArguments(model=str(checkpoint))
    template, model = load_chat(named), load_for_inference(named)
    ids = torch.tensor([template.encode_prompt(messages)])
    ends = {"eos_token_id": template.stop_token_ids, "pad_token_id": 0}
    found = model.generate(ids, max_new_tokens=12, do_sample=False, **ends)
    return template.decode(found[0, ids.shape[1] :].tolist())


@with_packages
@pytest.mark.usefixtures("optional")
def test_answers_of_an_evaluation_are_greedy_and_choose_the_best_checkpoint(sft_argv, tmp_path):
    chats = [{"messages": [turn("user", f"{number}?"), turn("assistant", "so a b so")]} for number in range(32)]
    data, val = written(tmp_path / "data.jsonl", chats), written(tmp_path / "val.jsonl", chats[:3])
    flags = "--learning_rate 1e-2 --max_steps 12 --logging_steps 3 --eval_steps 6 --save_steps 6"
    flags += f" --dataset {data} --val_dataset {val}"
    plain = sft(sft_argv(flags))
    run_dir = sft(sft_argv(flags, "--predict_with_generate true --max_new_tokens 12"))
    assert losses(run_dir) == losses(plain), "training is not changed"
    found = [row for row in rows(run_dir / "logging.jsonl") if "eval_loss" in row]
    assert [row["step"] for row in found] == [6, 12]
    for row in found:
        checkpoint = run_dir / f"checkpoint-{row['step']}"
        scores = [similarity(greedy(checkpoint, one["messages"][:-1]), "so a b so") for one in chats[:3]]
        for name in ("rouge-1", "rouge-l", "bleu-4"):
            assert row[f"eval_{name}"] == pytest.approx(mean(score[name] for score in scores))
    assert found[1]["eval_rouge-1"] > 0
    best = max(found, key=lambda row: row["eval_rouge-l"])
    state = (run_dir / "checkpoint-12" / "trainer_state.json").read_text()
    assert f'"best_model_checkpoint": "{run_dir}/checkpoint-{best["step"]}"' in state


@with_packages
@pytest.mark.usefixtures("optional")
@pytest.mark.parametrize("packed", ["", "--packing true --max_length 512"])
def test_answers_about_images(vlm_folders, tmp_path, packed):
    chat = [turn("user", "<image>What?"), turn("assistant", "a b")]
    data = written(tmp_path / "rows.jsonl", [{"messages": chat, "images": [data_url(n)]} for n in range(3)])
    own = {"--model": vlm_folders("qwen3_vl"), "--dataset": data, "--output_dir": tmp_path / "out"}
    flags = "--max_steps 2 --eval_strategy steps --eval_steps 1 --save_strategy no"
    flags += " --predict_with_generate true --max_new_tokens 8"
    argv = argv_of({**own, "--val_dataset": data}, flags, packed.split(), "--learning_rate 1e-30")
    found = [row for row in rows(sft(argv) / "logging.jsonl") if "eval_loss" in row]
    plain = Plain(vlm_folders("qwen3_vl"))
    text = plain.text(chat[:-1], add_generation_prompt=True)
    scores = [similarity(plain.likeliest(text, [data_url(number)], 8), "a b")["bleu-4"] for number in range(3)]
    assert [row["eval_bleu-4"] for row in found] == pytest.approx([mean(scores)] * 2)


@pytest.mark.long
@with_packages
@pytest.mark.usefixtures("optional")
def test_two_processes_share_the_answers(sft_argv, tmp_path):
    chats = [{"messages": [turn("user", f"{number}?"), turn("assistant", "so a b so")]} for number in range(32)]
    data, val = written(tmp_path / "data.jsonl", chats), written(tmp_path / "val.jsonl", chats[:5])
    flags = f"--dataset {data} --val_dataset {val} --learning_rate 1e-2 --max_steps 12 --eval_steps 12"
    flags += " --predict_with_generate true --max_new_tokens 12 --per_device_train_batch_size"
    alone = sft(sft_argv(f"{flags} 8"))
    path = os.pathsep.join([*filter(None, sys.path), str(OPTIONAL)])
    both = in_two(parse("sft", sft_argv(f"{flags} 4"), {}), PYTHONPATH=path)
    for name in ("eval_rouge-l", "eval_bleu-4"):
        assert logged(both, name) == pytest.approx(logged(alone, name)) and min(logged(both, name).values()) > 0


WRONG = [
    ("--sequence_parallel_size 2 --split_dataset_ratio 0.1", "rows are sharded; use --sequence_parallel_size 1"),
    ("", "--predict_with_generate: true: nothing is evaluated; give --val_dataset"),
    ("--fsdp full_shard --split_dataset_ratio 0.1", "--predict_with_generate: true: --fsdp shards the model"),
    ("--truncation_strategy left --split_dataset_ratio 0.1", "rows are cut; use --truncation_strategy delete"),
    ("--packing true --packing_strategy wrapped --split_dataset_ratio 0.1", "use --packing_strategy bfd"),
]


@pytest.mark.parametrize(("flags", "problem"), WRONG)
def test_settings_without_answers_are_refused(sft_argv, flags, problem):
    with pytest.raises(ConfigError, match=problem):
        parse("sft", sft_argv("--predict_with_generate true", flags.split()), {})


def test_a_metric_of_answers_needs_them(sft_argv):
    with pytest.raises(ConfigError, match="--metric_for_best_model: rouge-l: needs --predict_with_generate true"):
        run(parse("sft", sft_argv("--split_dataset_ratio 0.1 --metric_for_best_model rouge-l"), {}))


def test_missing_packages_are_named(sft_argv, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    args = parse("sft", sft_argv("--split_dataset_ratio 0.1 --predict_with_generate true"), {}).args
    with pytest.raises(ResourceError, match="--predict_with_generate: true: needs the package rouge_score, which"):
        require_packages(args)
