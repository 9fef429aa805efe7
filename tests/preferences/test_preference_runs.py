import json
from pathlib import Path

import pytest
import torch
from preloaded import run_ranks
from safetensors.torch import load_file
from small_pairs import sums, written

from swift.cli.dry_run import rehearse_trl
from swift.trainers.trl.run import run

METHODS = ("dpo", "ipo", "kto", "orpo", "simpo", "cpo", "rm")
LORA = ("--tuner_type", "lora")


def trained(resolved) -> Path:
    """Runs the method in this process; the run's folder."""
    assert run(resolved) == 0
    folders = Path(resolved.args.output_dir).glob("v*-*")
    return max(folders, key=lambda path: int(path.name[1:].split("-")[0]))


def logged(run_dir, key="loss"):
    rows = [json.loads(line) for line in (run_dir / "logging.jsonl").read_text().splitlines()]
    return {(row["attempt"], row["step"]): row[key] for row in rows if key in row}


def weights(checkpoint):
    (file,) = checkpoint.glob("*model.safetensors")
    return load_file(file)


def assert_resumes_exactly(settings, method, *flags):
    flags = ("--save_steps", "2", *flags)
    run_dir = trained(settings(method, *flags))
    straight = weights(run_dir / "checkpoint-4")
    assert trained(settings(method, *flags, "--resume_from_checkpoint", str(run_dir / "checkpoint-2"))) == run_dir
    resumed = weights(run_dir / "checkpoint-4")
    assert straight.keys() == resumed.keys()
    assert all(torch.equal(straight[name], resumed[name]) for name in straight)
    losses = logged(run_dir)
    assert [losses[2, step] for step in (3, 4)] == [losses[1, step] for step in (3, 4)]
    return run_dir


FAST = [("dpo", LORA), ("kto", ()), ("orpo", ()), ("rm", LORA)]
REST = [
    *((method, tuner) for method in METHODS for tuner in ((), LORA) if (method, tuner) not in FAST),
    ("dpo", ("--precompute_ref_log_probs", "true")),
    ("dpo", ("--sync_ref_model", "true", "--ref_model_sync_steps", "1")),
    ("kto", ("--precompute_ref_log_probs", "true", *LORA)),
]


@pytest.mark.parametrize(("method", "flags"), FAST)
def test_a_resumed_run_ends_with_the_weights_and_logs_of_an_undisturbed_one(settings, method, flags):
    run_dir = assert_resumes_exactly(settings, method, *flags)
    assert not [path for path in (run_dir / "checkpoint-4").iterdir() if path.is_dir()], "an adapter of the reference"


@pytest.mark.long
@pytest.mark.parametrize(("method", "flags"), REST)
def test_resume_is_exact_for_the_other_methods_tuners_and_references(settings, method, flags):
    assert_resumes_exactly(settings, method, *flags)


@pytest.mark.parametrize(("method", "accuracy"), [("dpo", "rewards/accuracies"), ("rm", "accuracy")])
def test_evaluation_has_accuracy_and_margin(settings, tmp_path, capsys, method, accuracy):
    val = written(tmp_path / "val.jsonl", sums(8, seed=1))
    run_dir = trained(settings(method, "--val_dataset", str(val), "--eval_steps", "4"))
    evaluations = logged(run_dir, f"eval_{accuracy}")
    assert [step for _, step in evaluations] == [4] and 0 <= evaluations[1, 4] <= 1
    assert logged(run_dir, accuracy).keys() == {(1, step) for step in (1, 2, 3, 4)}
    out = capsys.readouterr().out
    assert "prompt <- prompt; chosen <- chosen; rejected <- rejected" in out
    assert "evaluation: loss" in out and "accuracy" in out.split("evaluation: loss")[1]


@pytest.mark.parametrize("method", ["dpo", "kto", "rm"])
def test_a_dry_run_plans_and_writes_nothing(settings, tmp_path, capsys, method):
    assert rehearse_trl(settings(method, "--dry_run", "true")) == 0
    out = capsys.readouterr().out
    assert "plan: 32 rows; 4 per device x 1 process" in out and "train: 32 rows" in out
    assert not (tmp_path / "out").exists()


def test_the_reference_of_an_adapter_to_start_from_is_that_adapter(settings):
    start = trained(settings("dpo", *LORA, "--max_steps", "2", "--learning_rate", "1e-2")) / "checkpoint-2"
    again = trained(settings("dpo", *LORA, "--adapters", str(start), "--max_steps", "2"))
    rewards = logged(again, "rewards/margins")
    assert rewards[1, 1] == pytest.approx(0, abs=1e-5), "policy and reference are the same at the first step"
    assert abs(rewards[1, 2]) > 1e-4


def test_a_reference_of_its_own_is_compared_with(settings, nano_folders):
    other = settings("dpo", "--ref_model", str(nano_folders["llama"]), "--max_steps", "1")
    assert abs(logged(trained(other), "rewards/margins")[1, 1]) > 1e-4


@pytest.mark.long
@pytest.mark.parametrize("method", METHODS)
def test_two_processes_train_the_model_that_one_does(settings, tmp_path, method):
    flags = ("--dataset_shuffle", "false") if method == "kto" else ()
    alone = settings(method, *flags, "--gradient_accumulation_steps", "2", "--output_dir", str(tmp_path / "one"))
    two = settings(method, *flags, "--output_dir", str(tmp_path / "two"))
    words = [word for name in two.given for word in (f"--{name}", *_words(getattr(two.args, name)))]
    run_ranks(["-m", "swift", "rlhf", *words], tmp_path / "logs", limit_s=240)
    alone = trained(alone)
    (together,) = (tmp_path / "two").glob("v*-*")
    ours, theirs = weights(alone / "checkpoint-4"), weights(together / "checkpoint-4")
    assert all(torch.allclose(ours[name], theirs[name], atol=5e-4) for name in ours)


def _words(value):
    return [str(one) for one in value] if isinstance(value, list) else [str(value)]
