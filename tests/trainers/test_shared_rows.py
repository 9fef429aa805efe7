"""`--sequence_parallel_size` in the methods of TRL: processes that share rows take the step that one process takes.

The optimizer is SGD with a large learning rate: the weights after one step are the gradient, to its last digits.
"""

from __future__ import annotations

import json
import re
import shutil

import pytest
import torch
from safetensors.torch import load_file
from trl_runs import argv_of, in_two, list_checkpoints, logged, sums, trained, verdicts, weights, written

from swift.arguments import parse
from swift.cli.dry_run import dry_run_trl
from swift.errors import ConfigError

pytestmark = pytest.mark.slow
LONG = pytest.mark.long

STEP = (
    "--optim sgd --learning_rate 100 --lr_scheduler_type constant --weight_decay 0 --max_grad_norm 0 --max_steps 1",
    "--torch_dtype float32 --per_device_train_batch_size 3",
)
LORA, CHECKPOINTING = "--tuner_type lora --init_weights gaussian --lora_dropout 0", "--gradient_checkpointing true"
ZERO2, ZERO3, FSDP = "--deepspeed zero2", "--deepspeed zero3", "--fsdp full_shard"
EVALUATED = "--val_dataset val.jsonl --eval_strategy steps --eval_steps 1 --per_device_eval_batch_size 2"
"""Seven rows, which two groups of processes do not divide."""
PACKED = "--packing true --max_length 128"


def steps(count):
    """Rows of prm: the question and the answer of a sum, which is right or wrong."""
    for number, row in enumerate(sums(count)):
        answer = row["chosen" if number % 3 else "rejected"][0]["content"]
        yield {"prompt": row["prompt"], "completions": ["1+1=2", answer], "labels": [True, number % 3 > 0]}


def chats(count):
    """Rows of gkd."""
    for row in sums(count):
        yield {"messages": [*row["prompt"], *row["chosen"]]}


ROWS = {"kto": verdicts, "prm": steps, "gkd": chats}


@pytest.fixture
def settings(nano_folders, tmp_path, monkeypatch):
    """Resolved settings of a run of a method, as a function of the flags that differ."""
    monkeypatch.chdir(tmp_path)

    def resolved(method, *flags):
        mode, _, kind = method.partition(" ")
        own = {"--model": nano_folders["qwen3"], "--output_dir": tmp_path / "out"}
        if mode == "rlhf":
            rows = list(ROWS.get(kind, sums)(24))
            for number, row in enumerate(rows):  # which differ in length
                (row.get("prompt") or row["messages"])[0]["content"] += " Think about it." * (number % 3)
            own |= {"--rlhf_type": kind, "--dataset": written(tmp_path / "pairs.jsonl", rows)}
            if kind == "gkd":
                own["--teacher_model"] = nano_folders["qwen2"]
        else:
            rows = [{"messages": [*row["prompt"], *row["chosen"]]} for row in sums(60)]
            written(tmp_path / "val.jsonl", rows[:7])
            texts = [{"text": f"{number} is a number. " * (1 + number % 4)} for number in range(60)]
            own |= {"--dataset": written(tmp_path / "rows.jsonl", rows if mode == "sft" else texts)}
        return parse(mode, argv_of(own, *STEP, *flags), {})

    return resolved


def gradient(run_dir, start):
    """What the step took from the weights, by name."""
    after = weights(list_checkpoints(run_dir)[-1])
    return {name: start.get(name, torch.zeros_like(value)) - value for name, value in after.items()}


@pytest.mark.parametrize(
    ("method", "way", "flags", "ranks", "size"),
    [
        ("rlhf dpo", (), (), 2, 2),
        pytest.param("rlhf dpo", (), LORA, 2, 2, marks=LONG),
        pytest.param("rlhf dpo", ZERO3, (), 2, 2, marks=LONG),
        pytest.param("rlhf dpo", ZERO3, LORA, 2, 2, marks=LONG),
        ("rlhf dpo", FSDP, (), 2, 2),
        pytest.param("rlhf dpo", FSDP, LORA, 2, 2, marks=LONG),
        pytest.param("rlhf dpo", ZERO2, (), 4, 2, marks=LONG),
        pytest.param("rlhf dpo", (), CHECKPOINTING, 4, 4, marks=LONG),
        pytest.param("rlhf dpo", (), "--precompute_ref_log_probs true", 4, 2, marks=LONG),
        pytest.param("rlhf kto", (), (), 4, 2, marks=LONG),
        pytest.param("rlhf ipo", (), (), 2, 2, marks=LONG),
        pytest.param("rlhf orpo", (), (), 4, 2, marks=LONG),
        pytest.param("rlhf cpo", (), (), 4, 2, marks=LONG),
        pytest.param("rlhf simpo", FSDP, (), 2, 2, marks=LONG),
        pytest.param("sft", (), EVALUATED, 4, 2, marks=LONG),
        ("rlhf rm", (), (), 2, 2),
        pytest.param("rlhf rm", FSDP, LORA, 4, 2, marks=LONG),
        pytest.param("rlhf prm", (), (), 4, 2, marks=LONG),
        pytest.param("rlhf gkd", (), "--lmbda 0.5", 4, 2, marks=LONG),
        ("sft", (), PACKED, 2, 2),
        pytest.param("sft", (), "--padding_free true", 4, 4, marks=LONG),
        pytest.param("sft", ZERO3, PACKED, 4, 2, marks=LONG),
        pytest.param("sft", FSDP, LORA, 4, 2, marks=LONG),
        pytest.param("sft", FSDP, PACKED, 4, 4, marks=LONG),
        pytest.param("sft", (), "--streaming true --shuffle_buffer_size 7", 4, 2, marks=LONG),
        pytest.param("pt", (), (), 4, 2, marks=LONG),
    ],
)
def test_processes_that_share_rows_take_the_step_of_one(settings, tmp_path, method, way, flags, ranks, size):
    batches = ranks if method == "rlhf gkd" else ranks // size  # gkd is GRPO's trainer, whose batch stays
    if flags == EVALUATED:  # whose last batches depend on the number of batches at a time
        alone = in_two(settings(method, flags, f"--output_dir {tmp_path / 'one'}"), count=batches)
    else:
        accumulated = f"--gradient_accumulation_steps {batches} --output_dir {tmp_path / 'one'}"
        alone = trained(settings(method, flags, accumulated))
    sharing = f"--sequence_parallel_size {size} --output_dir {tmp_path / 'several'}"
    together = in_two(settings(method, flags, way, sharing), count=ranks)
    resolved = settings(method, flags)
    start = load_file(f"{resolved.args.model}/model.safetensors") if resolved.args.tuner_type == "full" else {}
    ours, theirs = gradient(together, start), gradient(alone, start)
    assert ours.keys() == theirs.keys()
    norm = sum(float(one.norm() ** 2) for one in theirs.values()) ** 0.5
    gap = sum(float((ours[name] - theirs[name]).norm() ** 2) for name in theirs) ** 0.5
    limit = 5e-6 if method == "rlhf rm" else 1e-6  # nearly equal scores are subtracted: more of float32's rounding
    assert norm > 2 and gap < limit * norm, (gap, norm)
    for name in ("loss", "grad_norm", "eval_loss"):
        assert logged(together, name) == pytest.approx(logged(alone, name), rel=1e-5)


REFUSED = {
    "heads": ("sft", "qwen3", {}, "--sequence_parallel_size 8", "the model of --model has 4 heads"),
    "own attention": ("sft", "gpt2", {}, "", "the model of --model cannot be computed in parts ("),
    "router": (
        "rlhf dpo",
        "qwen3_moe",
        {},
        "--router_aux_loss_coef 0.01",
        "this model's router has a loss of whole rows",
    ),
    "noise": ("sft", "qwen3", {}, "--neftune_noise_alpha 5", "does not go with --neftune_noise_alpha 5.0"),
    "processes": ("sft", "qwen3", {}, "--sequence_parallel_size 5", "does not divide the 8 processes of this run"),
    "copies": ("sft", "qwen3", {}, "--fsdp full_shard --fsdp_replicas 8", "--fsdp_replicas: 8: each copy needs"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_shared_is_refused_before_weights_are_loaded(
    settings, nano_folders, small_model, tmp_path, monkeypatch, name
):
    method, arch, config, flags, problem = REFUSED[name]
    folder = tmp_path / "model"
    shutil.copytree(nano_folders["qwen3"], folder)
    vocab = json.loads((folder / "config.json").read_text())["vocab_size"]
    small_model(arch, vocab_size=vocab, **config).save_pretrained(folder)
    monkeypatch.setenv("NPROC_PER_NODE", "8")
    resolved = settings(method, "--sequence_parallel_size 2" if "_parallel_" not in flags else (), flags or ())
    resolved.args.model = str(folder)
    with pytest.raises(ConfigError, match=re.escape(problem)):
        dry_run_trl(resolved)
