"""When checkpoints are made, which stay, and what is in them."""

import json

import pytest
from cli_runs import assert_same, attempts, completion_rows, log_rows, state_files

from swift.trainers.checkpoint import list_checkpoints

pytestmark = pytest.mark.slow


def names(folder) -> list[str]:
    return [path.name for path in list_checkpoints(folder)]


def evaluations(folder) -> list[dict]:
    return [row for row in log_rows(folder) if "eval_reward" in row]


def test_epochs_are_those_of_the_data(cli):
    flags = {"save_strategy": "epoch", "eval_strategy": "epoch", "num_train_epochs": 1.5, "beta": 0.04}
    folder = cli.finish("epochs", **flags, val_dataset=cli.material / "val.jsonl")  # 22 rows, 2 a step
    assert cli.printed.splitlines()[0] == f"run folder: {folder}"
    assert [line.split(":")[0] for line in cli.printed.splitlines() if line.startswith("sample of")] == [
        "sample of step 11", "sample of step 17"
    ]  # fmt: skip
    assert names(folder) == ["checkpoint-11", "checkpoint-17"]
    assert [row["step"] for row in evaluations(folder)] == [11, 17]
    assert {row["epoch"] for row in evaluations(folder)} == {1.0, 17 / 11}
    seen = [row["prompt_id"] for row in completion_rows(folder) if row["split"] == "train" and row["step"] <= 11]
    assert len(set(seen)) == 22
    versions = {row["step"]: row["weight_version"] for row in completion_rows(folder) if row["split"] == "train"}
    assert versions == {step: step - 1 for step in range(1, 18)}


def test_the_best_checkpoint_stays_and_is_named(cli):
    folder = cli.finish(
        "best",
        max_steps=10,
        save_steps=2,
        eval_steps=1,
        save_total_limit=2,
        load_best_model_at_end="true",
        val_dataset=cli.material / "val.jsonl",
        learning_rate=3e-2,
    )
    state = json.loads((folder / "checkpoint-10" / "trainer_state.json").read_text())
    best_saved = state["best_model_checkpoint"]
    assert best_saved in {str(folder / name) for name in names(folder)}
    assert len(names(folder)) <= 2
    scores = {row["step"]: row["eval_reward"] for row in evaluations(folder)}
    assert state["best_metric"] == max(scores.values())
    assert f"{best_saved.rpartition('/')[2]}" in cli.printed.partition("Everything lies in")[2]


@pytest.mark.long
def test_two_processes_end_with_the_best_checkpoint_too(cli):
    folder = cli.finish(
        "best",
        variables={"NPROC_PER_NODE": 2},
        max_steps=4,
        per_device_train_batch_size=2,
        load_best_model_at_end="true",
        val_dataset=cli.material / "val.jsonl",
    )
    assert names(folder) == ["checkpoint-2", "checkpoint-4"]
    assert "Could not locate the best model" not in cli.printed
    assert json.loads((folder / "checkpoint-4" / "args.json").read_text())["world_size"] == 2
    assert "world_size" not in json.loads((folder / "args.json").read_text())


def test_the_last_step_is_always_saved(cli):
    folder = cli.finish("weights", max_steps=3, save_strategy="no", save_only_model="true")
    assert names(folder) == ["checkpoint-3"]
    assert not (folder / "checkpoint-3" / "optimizer.pt").exists()


@pytest.mark.long
def test_a_finished_run_resumes_to_its_end_at_once_and_can_be_prolonged(cli):
    flags = {"save_steps": 5, "lr_scheduler_type": "constant", "report_to": "tensorboard"}
    folder = cli.finish("done", max_steps=2, **flags)
    before = state_files(folder)
    cli.finish("done", max_steps=2, resume_from_checkpoint="last", **flags)
    assert "checkpoint-2 is the last of 2 steps; raise --max_steps to go on" in cli.printed
    assert "Everything lies in" in cli.printed
    assert names(folder) == ["checkpoint-2"]
    assert_same(state_files(folder), before)
    assert [(row["end_step"], row["reason"]) for row in attempts(folder)] == [(2, "done")] * 2
    cli.finish("done", max_steps=4, resume_from_checkpoint="last", **flags)
    assert [row["step"] for row in log_rows(folder)] == [1, 2, 3, 4]
    assert list((folder / "runs").glob("events.out.tfevents.*"))


def test_the_args_json_of_a_run_starts_it_again(cli):
    first = cli.finish("first", max_steps=2)
    cli.start_printed(f"swift rlhf {first}/args.json --output_dir again", "again").ends(0)
    assert_same(log_rows(cli.folder / "again"), log_rows(first))
