"""Memory that runs out in a pass of TRL's trainers changes no gradient: the step begins again, in smaller parts."""

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import TrainerCallback
from trl_runs import (
    argv_of,
    in_two,
    logged,
    newest_run,
    sums,
    trained,
    trainer_of,
    verdicts,
    weights,
    words_of_settings,
    written,
)

from swift.arguments import parse
from swift.errors import note_smaller, smaller
from swift.trainers.checkpoint import list_checkpoints
from swift.trainers.trl import parts
from swift.trainers.trl.method import found, method_of

pytestmark = pytest.mark.slow

FP32 = 1e-6
AMPLE = 10**9
TWO = "--gradient_accumulation_steps 2"
CASES = {
    "sft": ("sft", TWO),
    "sft dft": ("sft", f"{TWO} --loss_type dft"),
    "sft lora": ("sft", f"{TWO} --tuner_type lora --lora_dropout 0"),
    "sft packed": ("sft", f"{TWO} --packing true --max_length 200 --per_device_train_batch_size 2"),
    "pt": ("pt", TWO),
    "dpo": ("dpo", TWO),
    "dpo weighted": ("dpo", f"{TWO} --use_weighting true --label_smoothing 0.1 --loss_type sigmoid robust"),
    "dpo precomputed": ("dpo", f"{TWO} --precompute_ref_log_probs true"),
    "dpo lora": ("dpo", f"{TWO} --tuner_type lora"),
    "ipo": ("ipo", TWO),
    "rm": ("rm", f"{TWO} --center_rewards_coefficient 0.1"),
    "simpo": ("simpo", f"{TWO} --cpo_alpha 0"),
}


@pytest.fixture
def settings(nano_folders, tmp_path):
    """Resolved settings of a small run of a method."""

    def resolved(method, *flags):
        rows = list(verdicts(64) if method == "kto" else sums(64))
        for number, row in enumerate(rows):  # of many lengths
            if "chosen" in row:
                row["chosen"][0]["content"] += "!" * (number * 7 % 30)
        if method == "sft":
            rows = [{"messages": row["prompt"] + row["chosen"]} for row in rows]
        if method == "pt":
            rows = [{"text": row["chosen"][0]["content"]} for row in rows]
        data = written(tmp_path / "rows.jsonl", rows)
        own = {
            "--model": nano_folders["qwen2"], "--dataset": data, "--output_dir": tmp_path / "out",
            "--per_device_train_batch_size": 4, "--max_steps": 2,
        }  # fmt: skip
        command = method if method in ("sft", "pt") else "rlhf"
        return parse(command, argv_of(own if command != "rlhf" else {"--rlhf_type": method, **own}, *flags), {})

    return resolved


class Gradients(TrainerCallback):
    """Keeps those of each step."""

    def __init__(self):
        self.steps = []

    def on_pre_optimizer_step(self, args, state, control, model, **kwargs):
        self.steps.append(torch.cat([one.grad.flatten() for one in model.parameters() if one.grad is not None]))


class Short:
    """Passes of a trainer of more than `room` tokens fail, and those of these `numbers`."""

    def __init__(self, monkeypatch, mode, *, room=AMPLE, numbers=(), place="forward"):
        self.room, self.numbers, self.place = room, numbers, place
        self.made = self.failed = self.largest = 0
        trainer = found(method_of(mode).trainer)
        self.usual = trainer.compute_loss

        def compute_loss(trainer, model, inputs, *args, **more):
            return self.of_trainer(trainer, model, inputs, *args, **more)

        monkeypatch.setattr(trainer, "compute_loss", compute_loss)

    def fail(self, *_):
        self.failed += 1
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    def of_trainer(self, trainer, model, inputs, *args, **more):
        self.largest = max(self.largest, parts.tokens_of(inputs))
        loss = self.usual(trainer, model, inputs, *args, **more)
        fails = parts.tokens_of(inputs) > self.room or self.made in self.numbers
        self.made += 1
        if fails and self.place == "forward":
            self.fail()
        if fails:
            trained_ones = [one for one in model.parameters() if one.requires_grad]
            middle = trained_ones[len(trained_ones) // 2]
            handle = middle.register_hook(lambda _: (handle.remove(), self.fail()))
        return loss


def gradients(resolved, folder, monkeypatch, **short):
    """Of each step; and lines, log lines, and how often a pass has failed."""
    with monkeypatch.context() as patched:
        memory = Short(patched, resolved.mode, **short)
        trainer, kept, lines = trainer_of(resolved, folder), Gradients(), []
        trainer.say = lines.append
        trainer.add_callback(kept)
        trainer.train()
    logs = [row for row in trainer.state.log_history if "loss" in row]
    return kept.steps, lines, logs, memory


def gap(ours, theirs):
    return float((ours - theirs).norm() / theirs.norm())


@pytest.mark.parametrize("case", CASES)
def test_the_gradient_stays_what_it_is(settings, tmp_path, monkeypatch, case):
    method, flags = CASES[case]
    resolved = settings(method, flags)
    expected, none, theirs, ample = gradients(resolved, tmp_path / "ample", monkeypatch)
    draw = random.Random(case)
    for number, place in enumerate(("forward", "backward")):
        short = {"room": int(ample.largest * draw.uniform(0.3, 0.9)), "numbers": (number,), "place": place}
        found, lines, ours, memory = gradients(resolved, tmp_path / f"short-{number}", monkeypatch, **short)
        assert memory.failed == len(lines) >= 1 and not none
        assert all(line.startswith("memory: ran out in a micro-batch of ") for line in lines)
        # the second step begins with weights that Adam has made of gradients with other roundings
        assert gap(found[0], expected[0]) < FP32 and gap(found[1], expected[1]) < 1e-3
        assert [row["loss"] for row in ours] == pytest.approx([row["loss"] for row in theirs], rel=1e-4)
        assert [row["num_tokens"] for row in ours if "num_tokens" in row] == [
            row["num_tokens"] for row in theirs if "num_tokens" in row
        ]


@pytest.mark.parametrize(
    "case",
    [
        ("kto", ""),
        ("orpo", ""),
        ("cpo", ""),
        ("dpo", "--rpo_alpha 0.1"),
        ("dpo", "--loss_type bco_pair"),
        ("dpo", "--per_device_train_batch_size 1"),
    ],
    ids=str,
)
def test_what_depends_on_the_parts_or_has_one_row_ends(settings, tmp_path, monkeypatch, case):
    method, flags = case
    with pytest.raises(torch.OutOfMemoryError):
        gradients(settings(method, *([flags] if flags else [])), tmp_path / "short", monkeypatch, numbers=(0,))


def test_one_of_several_processes_does_not_begin_again_alone(settings, tmp_path, monkeypatch):
    resolved = settings("dpo")
    Short(monkeypatch, "dpo", numbers=(0,))
    trainer = trainer_of(resolved, tmp_path / "short")
    monkeypatch.setattr(trainer.collectives, "active", True)
    trainer._part = {"input_ids": torch.zeros(8, 4)}
    assert not trainer._can_part(None)
    with pytest.raises(torch.OutOfMemoryError):
        trainer.train()
    assert smaller() == ["--per_device_train_batch_size", "2", "--gradient_accumulation_steps", "2"]
    note_smaller()  # no flags for the next one
    monkeypatch.setattr(trainer.collectives, "active", False)
    assert trainer._can_part(None)


SITE = """
import os
from pathlib import Path

import torch
from transformers import Trainer

usual = Trainer.training_step

def training_step(self, model, inputs, *rest):
    rows = next(value.shape[0] for name, value in inputs.items() if name.endswith("input_ids"))
    if os.environ["RANK"] == "1" and self.state.global_step == 2 and rows > int(os.environ["ROWS"]):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
    return usual(self, model, inputs, *rest)

if "RANK" in os.environ:
    Trainer.training_step = training_step
"""


@pytest.mark.long  # each start waits for a process that waits for the one that is gone
@pytest.mark.parametrize(
    ("method", "sharding"), [("dpo", ""), ("sft", "--deepspeed zero3"), ("rm", "--fsdp full_shard")]
)
def test_a_run_of_several_processes_starts_again_with_fewer_rows(settings, tmp_path, method, sharding):
    """One of them runs out of memory; the others wait for it in a collective, until the launcher ends them."""
    own = ["--max_steps 4 --save_steps 2 --save_total_limit 9", *([sharding] if sharding else [])]
    ample = in_two(settings(method, *own))
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(SITE)
    resolved = settings(method, *own, f"--output_dir {tmp_path / 'short'}")
    variables = {
        "NPROC_PER_NODE": "2", "ROWS": "4" if method in ("dpo", "rm") else "2",
        "PYTHONPATH": f"{tmp_path / 'site'}:{Path(__file__).parents[2]}",
    }  # fmt: skip
    command = [sys.executable, "-m", "swift", resolved.command, *words_of_settings(resolved)]
    ended = subprocess.run(
        command, check=False, env={**os.environ, **variables}, capture_output=True, text=True, timeout=600
    )
    assert ended.returncode == 0, ended.stderr
    (note,) = [line for line in ended.stderr.splitlines() if line.startswith("swift: note: the run starts again: ")]
    assert "--per_device_train_batch_size 2 --gradient_accumulation_steps 2" in note and "checkpoint-2" in note
    short = newest_run(tmp_path / "short")
    for name, rel in (("loss", 1e-4), ("grad_norm", 1e-3)):
        found, expected = ([*logged(one, name).values()] for one in (short, ample))
        assert len(found) == 4 and found == pytest.approx(expected, rel=rel)
    ours, theirs = (weights(list_checkpoints(one)[-1]) for one in (short, ample))
    assert all(torch.allclose(ours[name], theirs[name], atol=1e-4) for name in ours)


@pytest.mark.parametrize("method", ["sft", "dpo"])
def test_a_run_says_it_and_goes_on(settings, monkeypatch, capsys, method):
    memory = Short(monkeypatch, method, room=200)
    run_dir = trained(settings(method))
    said = [line for line in capsys.readouterr().out.splitlines() if "memory: ran out" in line]
    assert len(said) == memory.failed >= 1
    assert len(logged(run_dir)) == 2


def test_a_stream_is_parted_between_its_sequences():
    bounds = torch.tensor([0, 3, 5, 9, 10], dtype=torch.int32)
    batch = {
        "input_ids": torch.arange(10)[None], "labels": torch.arange(10)[None], "cu_seq_lens_q": bounds,
        "cu_seq_lens_k": bounds, "max_length_q": 4, "max_length_k": 4,
        "seq_idx": torch.tensor([[0, 0, 0, 1, 1, 2, 2, 2, 2, 3]]),
    }  # fmt: skip
    found = list(parts.parted(batch, "rows", 5))
    assert [part["input_ids"].tolist() for part in found] == [[[0, 1, 2, 3, 4]], [[5, 6, 7, 8, 9]]]
    assert [part["cu_seq_lens_q"].tolist() for part in found] == [[0, 3, 5], [0, 4, 5]]
    assert [part["max_length_q"] for part in found] == [3, 4]
    assert [part["seq_idx"].tolist() for part in found] == [[[0, 0, 0, 1, 1]], [[0, 0, 0, 0, 1]]]
    assert [parts.count(part, "rows") for part in parts.parted(batch, "rows", 1)] == [1, 1, 1, 1]


def test_pairs_stay_together():
    batch = {"input_ids": torch.tensor([[1], [2], [3], [-1], [-2], [-3]]), "margin": torch.tensor([1.0, 2.0, 3.0])}
    found = list(parts.parted(batch, "pairs", 4))
    assert [part["input_ids"].flatten().tolist() for part in found] == [[1, 2, -1, -2], [3, -3]]
    assert [part["margin"].tolist() for part in found] == [[1.0, 2.0], [3.0]]
