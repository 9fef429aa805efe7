"""`swift plan --measured`: the times of a run of the same command take the place of the estimates."""

import json
from types import SimpleNamespace

import pytest

from swift.cli.main import main
from swift.errors import ConfigError
from swift.observability.jsonl import JsonlWriter
from swift.planning.measured import measured_in

SETTINGS = {"num_generations": 8, "per_device_train_batch_size": 8}


@pytest.fixture
def run(tmp_path):
    """The folder of a run whose first step takes longer."""

    def made(steps=5, **settings):
        (tmp_path / "args.json").write_text(json.dumps({**SETTINGS, **settings}))
        rows = [
            {"attempt": 1, "step": 2 * n, "num_tokens": 600 * n, "step_time": 30.0 if n == 1 else 2.0 + n / 10,
             "time/generate": 1.5, "time/train": 0.5, "time/reward/accuracy": 0.1, "loss": 0.0}
            for n in range(1, steps + 1)
        ]  # fmt: skip
        (tmp_path / "logging.jsonl").unlink(missing_ok=True)
        JsonlWriter(tmp_path / "logging.jsonl").write(*rows, {"attempt": 1, "step": 2 * steps, "eval_reward": 1.0})
        return tmp_path

    return made


ARGS = SimpleNamespace(**SETTINGS)


def test_a_step_is_that_of_the_log_without_its_beginning(run):
    folder = run()
    assert measured_in(str(folder), ARGS) == (pytest.approx(2.35), {"generate": 1.5, "train": 0.5}, 300.0)
    assert measured_in(str(folder / "logging.jsonl"), ARGS) == measured_in(str(folder), ARGS)


def test_another_run_and_a_short_one_are_refused(run, tmp_path):
    with pytest.raises(ConfigError, match=r": its run had --num_generations 4; give a run of this command"):
        measured_in(str(run(num_generations=4)), ARGS)
    with pytest.raises(ConfigError, match="fewer than three log lines with times"):
        measured_in(str(run(steps=2)), ARGS)
    with pytest.raises(ConfigError, match="fewer than three log lines with times"):
        measured_in(str(tmp_path / "nothing"), ARGS)
    (tmp_path / "args.json").write_text("[")
    with pytest.raises(ConfigError, match=r"--measured: .*: cannot be read"):
        measured_in(str(tmp_path), ARGS)


@pytest.mark.slow
def test_the_plan_tells_hours_and_cost_of_what_was_measured(run, nano_folders, capsys):
    words = (
        f"plan --rlhf_type grpo --reward_funcs accuracy --dataset rows.jsonl --model {nano_folders['qwen2']} "
        "--tuner_type full --num_generations 8 --per_device_train_batch_size 8 --max_completion_length 16 --beta 0 "
        f"--device h100-80gb --max_steps 3600 --price_per_hour 2 --measured {run()}"
    )
    assert main(words.split()) == 0
    out = capsys.readouterr().out
    assert "time of a step (measured): 2.35 s: generate 1.5 s, train 0.5 s; 128 tokens/s" in out
    assert "run: 3600 steps, 2.35 hours; 4.70 at 2 an hour and device" in out
    assert main([*words.split(), "--json", "true"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (
        found["measured"]
        and found["step_seconds"] == {"generate": 1.5, "train": 0.5}
        and found["seconds"] == pytest.approx(2.35)
    )
