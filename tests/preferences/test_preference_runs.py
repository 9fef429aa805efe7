import os
import sys
from pathlib import Path

import pytest
import torch
from trl_runs import (
    assert_goes_on_exactly,
    assert_resumes_exactly,
    in_two,
    logged,
    sums,
    train_as_one_and_as_two,
    trained,
    trainer_of,
    verdicts,
    weights,
    written,
)

from swift.arguments import parse
from swift.cli.dry_run import dry_run_trl
from swift.errors import ConfigError
from swift.observability.jsonl import read_log
from swift.trainers.grpo.run import run as run_grpo
from swift.trainers.trl import frame
from swift.trainers.trl.method import method_of
from swift.trainers.trl.run import run

OPTIONAL = Path(sys.prefix) / "optional"
METHODS = ("dpo", "ipo", "kto", "orpo", "simpo", "cpo", "rm")
LORA = "--tuner_type lora"
WAYS = ["--deepspeed zero2", "--deepspeed zero3", "--fsdp full_shard"]


FAST = [("dpo", LORA), ("kto", ()), ("rm", LORA)]
PISSA = (LORA, "--init_weights pissa_niter_4")
REST = [
    *((method, tuner) for method in METHODS for tuner in ((), LORA) if (method, tuner) not in FAST),
    ("dpo", "--precompute_ref_log_probs true"),
    ("dpo", "--sync_ref_model true --ref_model_sync_steps 1"),
    ("kto", ("--precompute_ref_log_probs true", LORA)),
    ("dpo", (LORA, "--use_dora true")),
    ("dpo", PISSA),
    ("rm", PISSA),
    *((method, "--streaming true --shuffle_buffer_size 7") for method in METHODS),
]


@pytest.mark.parametrize(("method", "flags"), FAST)
def test_a_resumed_run_ends_with_the_weights_and_logs_of_an_undisturbed_one(settings, method, flags):
    run_dir = assert_resumes_exactly(lambda *more: settings(method, flags, more))
    assert not [path for path in (run_dir / "checkpoint-4").iterdir() if path.is_dir()], "an adapter of the reference"


@pytest.mark.long
@pytest.mark.parametrize(("method", "flags"), REST)
def test_resume_is_exact_for_the_other_methods_tuners_and_references(settings, method, flags):
    assert_resumes_exactly(lambda *more: settings(method, flags, more))


@pytest.mark.parametrize(("method", "loss"), [("dpo", 0.6931), ("ipo", 25.0), ("kto", 0.5)])
def test_an_adapter_of_a_16_bit_model_starts_as_its_reference(settings, method, loss):
    run_dir = trained(settings(method, f"{LORA} --torch_dtype bfloat16 --max_steps 1 --logging_steps 1"))
    assert logged(run_dir, "loss")[1, 1] == pytest.approx(loss, abs=1e-4)


@pytest.mark.parametrize(("method", "accuracy"), [("dpo", "rewards/accuracies"), ("rm", "accuracy")])
def test_evaluation_has_accuracy_and_margin(settings, tmp_path, capsys, method, accuracy):
    val = written(tmp_path / "val.jsonl", sums(8, seed=1))
    run_dir = trained(settings(method, f"--val_dataset {val} --eval_steps 4"))
    evaluations = logged(run_dir, f"eval_{accuracy}")
    assert [step for _, step in evaluations] == [4] and 0 <= evaluations[1, 4] <= 1
    assert logged(run_dir, accuracy).keys() == {(1, step) for step in (1, 2, 3, 4)}
    (row,) = (row for row in read_log(run_dir / "logging.jsonl") if "eval_loss" in row)
    measured = {name.removeprefix("eval_") for name in row if name.startswith("eval_")}
    assert measured <= set(method_of(method).evaluated), "what --metric_for_best_model may name"
    out = capsys.readouterr().out
    assert "prompt <- prompt; chosen <- chosen; rejected <- rejected" in out
    assert (run_dir / "images" / "preference.png").is_file()
    assert "evaluation | loss" in out and "accuracy" in out.split("evaluation | loss")[1]


def test_a_batch_of_one_row_has_the_answer_of_another_row_of_its_step(settings, tmp_path):
    steps = "--per_device_train_batch_size 1 --gradient_accumulation_steps 4 --max_steps 1"
    resolved = settings("kto", steps, "--dataset_shuffle false")
    assert any("the KL of a pass is that of a single row" in note for note in resolved.notes)
    trainer = trainer_of(resolved, tmp_path / "swift")
    rows = trainer.train_dataset[:4]
    answers = rows["completion_ids"]
    assert rows["KL_completion_ids"] == [answers[-1], *answers[:-1]]
    assert len(next(iter(trainer.get_train_dataloader()))["label"]) == 1
    trainer.train()
    assert trainer.state.global_step == 1 and trainer.args.per_device_train_batch_size == 1


SETS = [("dpo", "rewards/margins"), ("kto", "kl"), ("orpo", "rewards/accuracies"), ("rm", "accuracy")]


@pytest.mark.parametrize(
    ("method", "metric"), [SETS[0], *(pytest.param(*one, marks=pytest.mark.long) for one in SETS[1:])]
)
def test_several_evaluation_sets_have_metrics_of_their_own(settings, tmp_path, capsys, method, metric):
    make = verdicts if method == "kto" else sums
    easy, hard = (written(tmp_path / f"{name}.jsonl", make(8, seed=n)) for n, name in enumerate(("easy", "hard"), 1))
    flags = f"--val_dataset {easy} {hard} --eval_steps 2 --max_steps 2 --metric_for_best_model hard_loss"
    run_dir = trained(settings(method, (flags, "--early_stopping_patience 1")))
    for name in ("easy", "hard"):
        assert (
            logged(run_dir, f"eval_{name}_loss").keys() == logged(run_dir, f"eval_{name}_{metric}").keys() == {(1, 2)}
        )
    assert method != "dpo" or "margin" in capsys.readouterr().out.split("evaluation of hard | ")[1].splitlines()[0]


@pytest.mark.long
@pytest.mark.parametrize(
    ("method", "flags"), [("dpo", PISSA), ("kto", LORA), ("orpo", LORA), ("simpo", ()), ("rm", LORA)]
)
def test_a_run_ends_with_its_best_weights(settings, tmp_path, method, flags):
    val = written(tmp_path / "val.jsonl", (verdicts if method == "kto" else sums)(8, seed=1))
    flags = (flags, f"--learning_rate 1 --val_dataset {val} --eval_steps 2 --save_steps 2")
    resolved = settings(method, flags, "--eval_on_start true --load_best_model_at_end true")
    made = []
    with pytest.MonkeyPatch.context() as patch:
        build = frame.build_trainer
        patch.setattr(frame, "build_trainer", lambda *a, **k: made.append(build(*a, **k)) or made[0])
        run_dir = trained(resolved)
    saved = weights(run_dir / f"checkpoint-{made[0].state.best_global_step}")
    made[0].save_model(tmp_path / "end")
    ended = weights(tmp_path / "end")
    assert all(torch.equal(saved[name], ended[name]) for name in saved)


@pytest.mark.parametrize("method", ["dpo", "kto", "rm"])
def test_a_dry_run_plans_and_writes_nothing(settings, tmp_path, capsys, method):
    assert dry_run_trl(settings(method, "--dry_run true")) == 0
    out = capsys.readouterr().out
    assert "plan: 32 rows; 4 per device x 1 process" in out and "train: 32 rows" in out
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "tuner", ["ia3", *(pytest.param(one, marks=pytest.mark.long) for one in ("lora", "vera", "boft"))]
)
def test_the_reference_of_an_adapter_to_start_from_is_that_adapter(settings, tuner):
    flags = ("--tuner_type", tuner, "--max_steps 2 --learning_rate 1e-1")
    start = trained(settings("dpo", flags)) / "checkpoint-2"
    rewards = logged(trained(settings("dpo", flags, f"--adapters {start}")), "rewards/margins")
    assert rewards[1, 1] == pytest.approx(0, abs=1e-5), "policy and reference are the same at the first step"
    assert abs(rewards[1, 2]) > 1e-4


@pytest.mark.long
@pytest.mark.skipif(not list(OPTIONAL.glob("bitsandbytes-*")), reason="make install puts bitsandbytes there")
def test_on_quantised_weights_the_reference_is_the_adapter_in_full_precision(settings, tmp_path):
    flags = (LORA, "--quant_method bnb --quant_bits 4 --learning_rate 1e-1")

    def run(name, *more):
        resolved = settings("dpo", flags, f"--max_steps 2 --output_dir {tmp_path / name}", more)
        return in_two(resolved, count=1, PYTHONPATH=os.pathsep.join([*filter(None, sys.path), str(OPTIONAL)]))

    again = run("again", "--adapters", str(run("first") / "checkpoint-2"))
    assert logged(again, "rewards/margins")[1, 1] == pytest.approx(0, abs=1e-6)


HEAD = (LORA, "--target_modules q_proj lm_head")


@pytest.mark.parametrize("method", ["dpo", "ipo", "kto"])
def test_an_adapter_on_an_output_layer_whose_weight_the_loss_reads_is_refused(settings, tmp_path, method):
    for start in (dry_run_trl, run):
        with pytest.raises(ConfigError, match=r"--target_modules: lm_head: .*--modules_to_save lm_head"):
            start(settings(method, HEAD))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("method", "flags"), [("orpo", HEAD), ("simpo", HEAD), ("dpo", (LORA, "--modules_to_save lm_head"))]
)
def test_an_output_layer_learns_where_the_loss_can_see_it(settings, method, flags):
    run_dir = trained(settings(method, flags, "--save_steps 1 --max_steps 2"))
    before, after = (weights(run_dir / f"checkpoint-{step}") for step in (1, 2))
    assert any(not torch.equal(before[name], after[name]) for name in after if "lm_head" in name)


@pytest.mark.parametrize("init", ["false", "pissa"])
def test_the_reference_of_an_adapter_is_its_start_without_dropout(settings, tmp_path, init):
    flags = (LORA, "--init_weights", init, "--lora_dropout 0.5 --gradient_checkpointing false")
    trainer = trainer_of(settings("dpo", flags), tmp_path)
    batch = next(iter(trainer.get_train_dataloader()))
    assert trainer.model.training
    first, again = (torch.stack(trainer.compute_ref_log_probs(trainer.model, batch)) for _ in range(2))
    trainer.model.eval()
    policy = trainer.model(batch["input_ids"], attention_mask=batch["attention_mask"], labels=None).logits
    logps = policy[:, :-1].log_softmax(-1).gather(-1, batch["input_ids"][:, 1:, None])[..., 0]
    own = (logps * batch["completion_mask"][:, 1:]).sum(1).view(2, -1)
    assert torch.equal(first, again)
    assert torch.allclose(first, own, atol=1e-4)


@pytest.mark.long
def test_precomputed_log_probs_are_those_of_the_settings(settings):
    flags = "--precompute_ref_log_probs true --max_steps 1"
    for more in ((), "--ld_alpha 0.2"):  # the second finds the file of the first
        run_dir = trained(settings("dpo", flags, more, rows=uneven(8)))
        assert logged(run_dir, "rewards/margins")[1, 1] == pytest.approx(0, abs=1e-5)


def uneven(count):
    """Pairs whose rejected answer is longer."""
    for pair in sums(count):
        yield {**pair, "rejected": [{"role": "assistant", "content": "I do not know"}]}


def test_a_reference_of_its_own_is_compared_with(settings, nano_folders):
    other = settings("dpo", f"--ref_model {nano_folders['llama']} --max_steps 1")
    assert abs(logged(trained(other), "rewards/margins")[1, 1]) > 1e-4


@pytest.mark.parametrize("tuner", ["full", pytest.param("lora", marks=pytest.mark.long)])
def test_a_reward_model_serves_grpo_at_once(settings, nano_folders, tmp_path, tuner):
    trained_model = trained(settings("rm", "--max_steps 2", "--tuner_type", tuner)) / "checkpoint-2"
    flags = {
        "rlhf_type": "grpo",
        "model": nano_folders["qwen2"],
        "dataset": tmp_path / "pairs.jsonl",
        "reward_model": trained_model,
        "output_dir": tmp_path / "grpo",
        "max_steps": 1,
        "num_generations": 2,
        "max_completion_length": 4,
        "report_to": "none",
    }
    assert run_grpo(parse("rlhf", [str(word) for name, one in flags.items() for word in (f"--{name}", one)], {})) == 0
    (run_dir,) = (tmp_path / "grpo").glob("v0-*")
    assert logged(run_dir, "reward")[1, 1] != 0


@pytest.mark.long
@pytest.mark.parametrize(
    ("method", "flags"),
    [*((method, ()) for method in METHODS), ("dpo", "--precompute_ref_log_probs true")],
)
def test_two_processes_train_the_model_that_one_does(settings, tmp_path, method, flags):
    train_as_one_and_as_two(lambda *more: settings(method, flags, more), tmp_path)


SHARDED = [
    *(("dpo", way, flags) for way in WAYS for flags in ((), LORA)),
    *(("dpo", way, "--precompute_ref_log_probs true") for way in WAYS),
    *((method, WAYS[1], ()) for method in ("kto", "orpo", "rm")),
]


@pytest.mark.long
@pytest.mark.parametrize(("method", "way", "flags"), SHARDED)
def test_sharded_processes_train_the_model_that_one_does_and_resume(settings, tmp_path, method, way, flags):
    def make(*more):
        return settings(method, flags, "--save_steps 2", more)

    together = train_as_one_and_as_two(make, tmp_path, way)
    assert_goes_on_exactly(together, lambda *more: make(f"--output_dir {together.parent}", way, more), run=in_two)
