"""A recorded step of a distillation again, and training on its record."""

from __future__ import annotations

import json

import pytest
from trl_runs import trained, untimed, weights

from swift.cli.main import main
from swift.trainers.checkpoint import list_checkpoints

MIXED = "--lmbda 0.5 --sft_alpha 0.3 --max_steps 2 --save_steps 1 --record_rollouts all --parity_check off"


def replayed(run_dir, capsys, *words):
    assert main(["replay", str(run_dir), "--json", "true", *words]) == 0
    return json.loads(capsys.readouterr().out)


def test_with_student_and_teacher_a_step_is_that_of_the_log(gkd, capsys):
    resolved = gkd(MIXED)
    run_dir = trained(resolved)
    capsys.readouterr()
    for step, model in (("1", resolved.args.model), ("2", "checkpoint-1")):
        told = replayed(run_dir, capsys, "--step", step, "--model", model)
        logged, again = told["metrics"]["logged"], told["metrics"]["again"]
        assert told["differences"] == [] and again["grad_norm"] == pytest.approx(logged["grad_norm"], rel=1e-6)
        assert 0 < again["distillation/given_frac"] < 1 and again["teacher_divergence"] > 0
    told = replayed(run_dir, capsys, "--step", "2", "--model", "checkpoint-1", "--set", "beta=1")
    assert told["metrics"]["changed"]["loss"] != pytest.approx(told["metrics"]["again"]["loss"], rel=1e-2)
    for words, problem in (
        ([], "--model: none given: gkd compares whole distributions, which are not on record"),
        (
            ["--model", "checkpoint-1", "--set", "teacher_model=x"],
            "--set: teacher_model: x: a replay keeps what the run's has given",
        ),
    ):
        assert main(["replay", str(run_dir), *words]) == 2
        assert problem in capsys.readouterr().err


@pytest.mark.parametrize("way", ["--seq_kd false", pytest.param("--seq_kd true", marks=pytest.mark.long)])
def test_training_on_a_record_is_the_run_that_made_it(gkd, tmp_path, way):
    made = trained(gkd(MIXED, way))
    again = trained(gkd(MIXED, way, f"--replay_from {made} --output_dir {tmp_path / 'again'}"))
    assert untimed(again) == untimed(made)
    ours, theirs = (weights(list_checkpoints(folder)[-1]) for folder in (again, made))
    assert all((ours[name] == theirs[name]).all() for name in theirs)
