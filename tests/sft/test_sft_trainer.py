import json
import math
import os
import random
import signal
from types import SimpleNamespace

import pytest

from swift.errors import NumericError
from swift.trainers.distributed import Collectives
from swift.trainers.session import SignalTrap
from swift.trainers.trl.callbacks import NON_FINITE_LIMIT, EarlyStop, LogLines, StopOnSignal


def state(step: int, max_steps: int = 10) -> SimpleNamespace:
    return SimpleNamespace(
        global_step=step, max_steps=max_steps, is_world_process_zero=True, best_model_checkpoint=None
    )


def control() -> SimpleNamespace:
    return SimpleNamespace(should_save=False, should_training_stop=False)


def test_a_second_interrupt_from_the_keyboard_is_not_held_back():
    with SignalTrap() as trap:
        os.kill(os.getpid(), signal.SIGINT)
        assert trap.caught == "SIGINT"
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


def test_the_run_stops_after_the_step_of_the_signal_but_is_not_interrupted_at_its_end():
    trap = SignalTrap()
    stop = StopOnSignal(trap, Collectives())
    each_step, each_epoch = SimpleNamespace(eval_strategy="steps"), SimpleNamespace(eval_strategy="epoch")
    goes_on = stop.on_step_end(each_step, state(3), control())
    assert not goes_on.should_training_stop and not goes_on.should_save
    trap.caught = "SIGTERM"
    stopped = stop.on_step_end(each_step, state(4), control())
    assert stopped.should_training_stop
    assert stopped.should_save
    finished = StopOnSignal(trap, Collectives())
    assert finished.on_step_end(each_step, state(10), control()).should_save, "the last step is always saved"
    last = finished.on_step_end(each_epoch, state(10), control())
    assert not last.should_save, "its evaluation comes first"
    finished.on_epoch_end(each_epoch, state(10), last)
    assert last.should_save
    assert not finished.interrupted


def test_a_log_line_has_the_time_per_step_and_the_time_left(tmp_path):
    now, said = [0.0], []
    log = LogLines(tmp_path / "logging.jsonl", attempt=2, say=said.append, clock=lambda: now[0])
    log.on_train_begin(SimpleNamespace(gradient_accumulation_steps=1), state(0), None)
    now[0] = 8.0
    log.on_log(None, state(4), None, {"loss": 1.5, "learning_rate": 1e-3, "grad_norm": 1.0, "epoch": 0.4})
    log.on_log(None, state(4), None, {"eval_loss": 0.5, "eval_runtime": 1.0, "epoch": 0.4})
    log.on_log(None, state(4), None, {"train_runtime": 8.0, "train_loss": 1.5})
    log.on_train_end(None, state(4), None)
    training, evaluation = [json.loads(line) for line in (tmp_path / "logging.jsonl").read_text().splitlines()]
    assert training["step_time"] == 2.0
    assert {training["step"], training["max_steps"], training["attempt"]} == {4, 10, 2}
    assert evaluation["eval_loss"] == 0.5
    assert "loss" not in evaluation
    assert said[:2] == [
        "step 4/10 | loss 1.5000 | lr 1.00e-03 | 2.00 s/step | 12s left",
        "step 4/10 | evaluation | loss 0.5000",
    ]


def test_what_a_step_does_is_known_between_its_lines(tmp_path):
    log = LogLines(tmp_path / "logging.jsonl", attempt=1, say=lambda _: None)
    assert log.doing() == "preparation"
    log.on_train_begin(SimpleNamespace(gradient_accumulation_steps=3), state(4), None)
    seen = [log.doing()]
    log.on_substep_end(None, state(4), None)
    seen.append(log.doing())
    after = SimpleNamespace(should_evaluate=True, should_save=True)
    for event in (log.on_step_end, log.on_evaluate, log.on_save):
        event(None, state(5), after)
        seen.append(log.doing())
    assert seen == ["micro-batch 1/3", "micro-batch 2/3", "evaluation", "checkpoint", "micro-batch 1/3"]
    log.on_train_end(None, state(5), None)
    assert (log.step, log.doing()) == (5, "")


def test_a_loss_that_stays_non_finite_ends_the_run(tmp_path):
    log = LogLines(tmp_path / "logging.jsonl", attempt=1, say=lambda _: None)
    bad = {"loss": math.nan, "learning_rate": 1e-3}
    for step in range(1, NON_FINITE_LIMIT):
        log.on_log(None, state(step), None, bad)
    log.on_log(None, state(5), None, {"loss": 1.0, "learning_rate": 1e-3})  # one good line starts the count again
    for step in range(6, 5 + NON_FINITE_LIMIT):
        log.on_log(None, state(step), None, bad)
    with pytest.raises(NumericError, match="lower --learning_rate"):
        log.on_log(None, state(9), None, bad)


def test_a_resumed_run_goes_on_counting_evaluations_with_the_patience_of_its_start():
    before = EarlyStop(1)
    before.early_stopping_patience_counter = 1
    args = SimpleNamespace(load_best_model_at_end=True, metric_for_best_model="loss", eval_strategy="steps")
    now = EarlyStop(3)
    now.on_train_begin(args, SimpleNamespace(stateful_callbacks={"EarlyStop": before.state()}), control())
    assert (now.early_stopping_patience_counter, now.early_stopping_patience) == (1, 3)


def test_the_example_problems_are_worked_correctly():
    from importlib.util import module_from_spec, spec_from_file_location
    from pathlib import Path

    path = Path(__file__).parents[2] / "examples" / "train" / "sft" / "make_sums.py"
    spec = spec_from_file_location("make_sums", path)
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.worked_sum(47, 35) == ("7+5=12,4+3+1=8", 82)
    assert module.worked_difference(52, 17) == ("12-7=5,5-1-1=3", 35)
    draw = random.Random(0)
    for _ in range(300):
        row = module.row(draw)
        question, answer = (turn["content"] for turn in row["messages"])
        assert eval(question.rstrip("=")) == int(row["solution"])
        assert answer.endswith(f"<answer>{row['solution']}</answer>")
        for step in answer.removeprefix("<think>").split("</think>")[0].split(","):
            left, right = step.split("=")
            assert eval(left) == int(right)
