"""What supervised tuning and pre-training learn, and that several processes learn the same."""

import json
import math
import runpy
import sys
from collections import Counter
from pathlib import Path

import pytest
from test_sft_run import sft
from trl_runs import losses, rows, train_as_one_and_as_two

from swift.arguments import parse

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("packing", ["true", "false"])
def test_32_rows_are_memorised(sft_argv, sums, packing):
    flags = (f"--dataset {sums}#32", "--packing", packing, "--max_length 128 --max_steps 400")
    run_dir = sft(sft_argv(flags, "--learning_rate 1e-2 --logging_steps 50"))
    assert losses(run_dir)[-1][1] < 0.1


@pytest.mark.parametrize(
    "flags",
    [
        (),
        "--packing true --max_length 64",
        "--streaming true --shuffle_buffer_size 7",
        "--streaming true --packing true --max_length 256",
    ],
    ids=["rows", "packed", "stream", "packed stream"],
)
def test_two_processes_train_on_the_rows_that_one_does(sft_argv, tmp_path, flags):
    def make(*more):
        return parse("sft", sft_argv(flags, "--per_device_train_batch_size 2", more), {})

    together = train_as_one_and_as_two(make, tmp_path, rel=1e-3)
    assert len(list(tmp_path.glob("two/v*"))) == 1
    assert (together / "logs" / "attempt-1" / "rank-1.log").exists()


def stories(path, monkeypatch, *words):
    """The texts that the example's script writes."""
    monkeypatch.setattr(sys, "argv", ["make_stories.py", str(path), *words])
    runpy.run_path(str(ROOT / "examples" / "train" / "sft" / "make_stories.py"), run_name="__main__")
    return [json.loads(line)["text"] for line in path.read_text().splitlines()]


def bigram_loss(texts, held_out):
    """Cross-entropy in nats per character, the end included, of a bigram model with add-one smoothing."""
    pairs = Counter(pair for text in texts for pair in zip("\0" + text, text + "\0", strict=True))
    firsts = Counter("".join("\0" + text for text in texts))
    scored = [pair for text in held_out for pair in zip("\0" + text, text + "\0", strict=True)]
    return -sum(math.log((pairs[pair] + 1) / (firsts[pair[0]] + len(firsts))) for pair in scored) / len(scored)


def test_the_perplexity_of_held_out_text_falls_below_that_of_a_bigram_model(tmp_path, monkeypatch):
    from swift.models.tiny import build_tiny

    texts = stories(tmp_path / "stories.jsonl", monkeypatch, "--rows", "600")
    held_out = stories(tmp_path / "held_out.jsonl", monkeypatch, "--rows", "60", "--seed", "1")
    model = build_tiny(tmp_path / "base", arch="qwen2", size="tiny")
    argv = {
        "--model": model, "--dataset": tmp_path / "stories.jsonl", "--val_dataset": tmp_path / "held_out.jsonl",
        "--output_dir": tmp_path / "out", "--tuner_type": "full", "--max_length": 512, "--learning_rate": "2e-3",
        "--packing": "true", "--packing_strategy": "bfd_split", "--gradient_accumulation_steps": 1,
        "--per_device_train_batch_size": 4, "--per_device_eval_batch_size": 8, "--num_train_epochs": 3,
        "--gradient_checkpointing": "false", "--report_to": "none", "--save_strategy": "no", "--eval_strategy": "epoch",
    }  # fmt: skip
    run_dir = sft([str(word) for pair in argv.items() for word in pair], "pt")
    *_, found = [row["eval_loss"] for row in rows(run_dir / "logging.jsonl") if "eval_loss" in row]
    assert found < bigram_loss(texts, held_out)
