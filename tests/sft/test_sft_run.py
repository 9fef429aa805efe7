import json
import os
import signal
import time
from pathlib import Path

import pytest
import torch
from trl_runs import losses, newest_run, rows, trained, weights

from swift.arguments import parse
from swift.cli.dry_run import dry_run_trl
from swift.errors import ConfigError, Interrupted, NumericError, unfinished
from swift.models.arguments import ModelArguments
from swift.models.policy import load_for_inference
from swift.trainers.checkpoint import list_checkpoints, verify
from swift.trainers.trl.run import plan_line


def sft(argv, mode="sft") -> Path:
    """Runs the mode in this process; the run's folder."""
    return trained(parse(mode, argv, {}))


@pytest.mark.slow
@pytest.mark.parametrize(("model", "tuner"), [("qwen2", "full"), ("llama", "lora"), ("qwen3", "lora")])
def test_the_loss_falls_and_the_final_checkpoint_is_a_usable_model(sft_argv, model, tuner):
    run_dir = sft(sft_argv("--max_steps 12 --learning_rate 1e-2", model=model, tuner=tuner))
    logged = losses(run_dir)
    assert logged[-1][1] < 0.8 * logged[0][1]
    checkpoint = run_dir / "checkpoint-12"
    verify(checkpoint)
    named = ModelArguments(adapters=[str(checkpoint)]) if tuner == "lora" else ModelArguments(model=str(checkpoint))
    assert load_for_inference(named)(input_ids=torch.arange(4)[None]).logits.isfinite().all()
    assert (checkpoint / "tokenizer.json").is_file()


def test_the_run_folder_has_the_files_of_every_mode(sft_argv):
    run_dir = sft(sft_argv("--report_to tensorboard --save_steps 2 --save_total_limit 2 --activation_offloading true"))
    assert json.loads((run_dir / "args.json").read_text())["learning_rate"] == 3e-3
    (attempt,) = rows(run_dir / "attempts.jsonl")
    assert (attempt["end_step"], attempt["exit_code"], attempt["reason"]) == (6, 0, "done")
    assert attempt["command"] == "sft" and parse("sft", [str(run_dir / "args.json")], {}).args.max_steps == 6
    assert [row["step"] for row in rows(run_dir / "logging.jsonl")] == [1, 2, 4, 6]
    assert all(
        {"loss", "learning_rate", "step_time", "max_steps", "attempt"} <= set(r)
        for r in rows(run_dir / "logging.jsonl")
    )
    assert [path.name for path in list_checkpoints(run_dir)] == ["checkpoint-4", "checkpoint-6"]
    assert json.loads((run_dir / "checkpoint-6" / "args.json").read_text())["max_steps"] == 6
    log = (run_dir / "logs" / "attempt-1" / "rank-0.log").read_text()
    assert "step 6/6" in log and f"run folder: {run_dir}" in log
    assert list((run_dir / "runs").glob("events.out.tfevents.*"))
    assert (run_dir / "images" / "optimization.png").is_file()


@pytest.mark.parametrize("warmup", ["--warmup_steps 2", "--warmup_ratio 1", "--warmup_steps 7"])
@pytest.mark.parametrize("schedule", ["polynomial", "linear"])
def test_a_warmup_may_last_to_the_end(sft_argv, schedule, warmup):
    words = f"--lr_scheduler_type {schedule} {warmup} --max_steps 2 --logging_steps 1 --learning_rate 1e-3"
    logged = rows(sft(sft_argv(words)) / "logging.jsonl")
    steps = 7 if warmup.endswith("7") else 2
    assert [row["learning_rate"] for row in logged] == pytest.approx([0.0, 1e-3 / steps])


def test_weights_that_are_not_finite_are_not_saved(sft_argv):
    words = "--weight_decay 1e30 --max_steps 2 --learning_rate 1e-3"
    with pytest.raises(NumericError, match="weights: not finite after step 2, so that they are not saved; lower"):
        sft(sft_argv(words))


def test_checkpoints_and_evaluations_come_at_shares_of_all_steps(sft_argv, sums):
    run_dir = sft([*sft_argv("--save_steps 0.5 --eval_steps 0.34"), "--val_dataset", f"{sums}#4"])
    assert [path.name for path in list_checkpoints(run_dir)] == ["checkpoint-3", "checkpoint-6"]
    assert [row["step"] for row in rows(run_dir / "logging.jsonl") if "eval_loss" in row] == [3, 6]


def test_rows_over_max_length_are_left_out_and_the_plan_is_that_of_the_rest(sft_argv, tmp_path, capsys):
    data = tmp_path / "mixed.jsonl"
    chats = [[{"role": "user", "content": "q"}, {"role": "assistant", "content": "a" * n}] for n in (1, 1, 500)]
    data.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
    flags = f"--dataset {data} --max_length 100 --per_device_train_batch_size 1 --dry_run true"
    assert dry_run_trl(parse("sft", sft_argv(flags), {})) == 0
    printed = capsys.readouterr().out
    assert "train: left out 1 row: 1 (longer than max_length; the first: " in printed
    assert "plan: 2 rows; 1 per device x 1 process x 1 accumulation step = 1 row per step" in printed
    assert not (tmp_path / "out").exists(), "a dry run writes nothing"


def test_a_dry_run_reads_exchanges_with_the_training_template_as_a_run_does(sft_argv, tmp_path, capsys):
    turns = [("user", "2+3?"), ("assistant", "<think>\n2 and 3\n</think>\n\n5"), ("user", "4+4?"), ("assistant", "8")]
    data = tmp_path / "exchanges.jsonl"
    data.write_text(json.dumps({"messages": [{"role": role, "content": text} for role, text in turns]}) + "\n")
    flags = f"--dataset {data} --template qwen3 --per_device_train_batch_size 1"
    assert dry_run_trl(parse("sft", sft_argv(flags), {})) == 0
    assert "train: 1 row," in capsys.readouterr().out


def test_the_plan_counts_the_steps_that_the_trainer_makes(sft_argv, capsys):
    flags = ["--num_train_epochs", "1.5", "--gradient_accumulation_steps", "3", "--max_steps", "-1"]
    resolved = parse("sft", sft_argv(flags), {})
    assert plan_line(resolved.args, range(64), 1).endswith("24 rows per step; 3 steps per epoch, 5 steps")
    run_dir = sft(sft_argv(flags))
    assert list_checkpoints(run_dir)[-1].name == "checkpoint-5"


def test_evaluation_uses_the_validation_rows_and_finds_the_best_checkpoint(sft_argv, sums, capsys):
    run_dir = sft(
        sft_argv(
            f"--val_dataset {sums}#16 --save_steps 3 --eval_steps 3",
            "--load_best_model_at_end true --metric_for_best_model eval_loss",
        )
    )
    evaluations = [row for row in rows(run_dir / "logging.jsonl") if "eval_loss" in row]
    assert [row["step"] for row in evaluations] == [3, 6]
    assert f"best: {run_dir / 'checkpoint-6'}" in capsys.readouterr().out


def test_gradient_accumulation_equals_a_larger_batch(sft_argv):
    once = sft(sft_argv("--per_device_train_batch_size 8"))
    twice = sft(sft_argv("--per_device_train_batch_size 4 --gradient_accumulation_steps 2"))
    for (_, a), (_, b) in zip(losses(once), losses(twice), strict=True):
        assert a == pytest.approx(b, rel=1e-4)


def test_a_run_that_fails_in_a_step_is_saved_before_it_and_resumed_exactly(sft_argv, tmp_path, monkeypatch):
    from swift.trainers.sft import SFT
    from swift.trainers.trl.frame import trainer_class

    argv = sft_argv("--gradient_accumulation_steps 2 --lora_dropout 0.3", tuner="lora")
    straight = weights(sft(argv) / "checkpoint-6")
    trainer = trainer_class(SFT)
    original = trainer.compute_loss

    def broken(self, *args, **named):
        loss = original(self, *args, **named)  # and with it dropout draws
        if self.state.global_step == 3:
            raise RuntimeError("broken")
        return loss

    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="broken"):
        patch.setattr(trainer, "compute_loss", broken)
        sft(argv)
    run_dir = newest_run(tmp_path / "out")
    assert "checkpoint-3 is its last checkpoint; resume: " in unfinished().advice()
    sft([*argv, "--resume_from_checkpoint", str(run_dir / "checkpoint-3")])
    resumed = weights(run_dir / "checkpoint-6")
    assert all(torch.equal(straight[name], resumed[name]) for name in straight)


def test_resuming_from_last_from_nothing_and_with_other_batches(sft_argv):
    with pytest.raises(ConfigError, match="--resume_from_checkpoint"):
        sft(sft_argv("--resume_from_checkpoint last"))
    run_dir = sft(sft_argv("--save_steps 3 --max_steps 3"))
    changed = sft_argv(f"--per_device_train_batch_size 4 --resume_from_checkpoint {run_dir / 'checkpoint-3'}")
    with pytest.raises(ConfigError, match=r"--per_device_train_batch_size: 4: .*made with 8"):
        sft(changed)
    assert sft(sft_argv("--resume_from_checkpoint last --max_steps 4")) == run_dir
    assert (run_dir / "checkpoint-4").is_dir()


def test_a_start_that_fails_leaves_no_folder(sft_argv, tmp_path):
    with pytest.raises(ConfigError, match="--target_modules"):
        sft(sft_argv("--target_modules nothing", tuner="lora"))
    assert not (tmp_path / "out").exists()


def test_a_signal_ends_the_run_with_a_checkpoint_that_can_be_resumed(sft_argv, tmp_path, monkeypatch):
    from swift.trainers.trl import callbacks

    straight = losses(sft(sft_argv("--logging_steps 1")))
    original = callbacks.StopOnSignal.on_step_end

    def interrupt(self, args, state, control, **kwargs):
        if state.global_step == 3:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.01)
        return original(self, args, state, control, **kwargs)

    monkeypatch.setattr(callbacks.StopOnSignal, "on_step_end", interrupt)
    with pytest.raises(Interrupted, match=r"SIGTERM.*checkpoint-3 is saved.*--resume_from_checkpoint") as caught:
        sft(sft_argv("--logging_steps 1"))
    assert caught.value.exit_code == 75
    run_dir = newest_run(tmp_path / "out")
    assert rows(run_dir / "attempts.jsonl")[0]["exit_code"] == 75
    monkeypatch.undo()
    again = sft_argv(f"--logging_steps 1 --resume_from_checkpoint {run_dir / 'checkpoint-3'}")
    assert sft(again) == run_dir
    assert losses(run_dir) == straight


def test_a_signal_while_the_trainer_is_made_ends_the_start(sft_argv, tmp_path, monkeypatch):
    from swift.trainers.trl import frame

    original = frame.build_trainer

    def interrupted(*args, **named):
        trainer = original(*args, **named)
        os.kill(os.getpid(), signal.SIGTERM)
        return trainer

    monkeypatch.setattr(frame, "build_trainer", interrupted)
    with pytest.raises(Interrupted, match=r"stopped before the first step, there is no checkpoint yet"):
        sft(sft_argv())
    assert not list_checkpoints(newest_run(tmp_path / "out"))
