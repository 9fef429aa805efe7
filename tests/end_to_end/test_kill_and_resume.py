"""A run that is killed at any moment, and resumed, is the run that was not."""

import random
import subprocess
import time

import pytest
from cli_runs import Run, assert_same_run, attempts

pytestmark = pytest.mark.slow

STEP_S = 0.08
SAVE_S = 0.04
START_S = 3.0
"""About how long these take; kills are spread over a little more than that."""

EVALUATED = {"eval_strategy": "steps", "eval_steps": 3}
REUSED = {"steps_per_generation": 4, "num_iterations": 2}
LORA = {"tuner_type": "lora", "lora_dropout": 0.1, "beta": 0.1}
FEW = {"logging_steps": 5, "steps_per_generation": 1, "save_total_limit": 2}


def kill_somewhere(run: Run, rng: random.Random) -> bool:
    """SIGKILL while starting, inside of a step or while saving; False when the run ended before."""
    begun_at = run.step
    moment = rng.choice(["start", "step", "step", "save", "save"])
    if moment == "start":
        end = time.monotonic() + rng.uniform(0, START_S)
        run.until(lambda: time.monotonic() > end or run.step > begun_at + 2)
    elif moment == "step":
        goal = begun_at + rng.randint(1, 3)
        run.until(lambda: run.step >= goal)
        time.sleep(rng.uniform(0, STEP_S))
    else:
        for _ in range(rng.randint(1, 2)):
            run.until(lambda: not any(run.folder.glob(".tmp-*")))
            run.until(lambda: any(run.folder.glob(".tmp-*")))
        time.sleep(rng.uniform(0, SAVE_S))
    killed = run.alive
    run.kill()
    return killed


def killed_run(cli, name: str, kills: int, seed: int, **flags):
    """Kill a run so many times, then let it come to its end."""
    rng = random.Random(seed)
    bystander = subprocess.Popen(["sleep", "600"])
    try:
        resume = {}
        for number in range(kills):
            run = cli.start(name, **flags, **resume)
            assert kill_somewhere(run, rng), f"the run ended before kill {number + 1}; give it more steps"
            saved = any(run.folder.glob("checkpoint-*"))
            resume = {"resume_from_checkpoint": "last"} if saved else {}
        folder = cli.finish(name, **flags, **resume)
        assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait()
    return folder


@pytest.mark.timeout(900)
@pytest.mark.parametrize(("kills", "steps"), [(3, 24), pytest.param(20, 120, marks=pytest.mark.long)])
def test_kills_change_nothing(cli, kills, steps):
    flags = {**EVALUATED, **REUSED, "val_dataset": cli.material / "val.jsonl", "beta": 0.05, "max_steps": steps}
    straight = cli.finish("straight", **flags)
    folder = killed_run(cli, "killed", kills, seed=1, **flags)
    assert_same_run(folder, straight)
    ends = [row["reason"] for row in attempts(folder)]
    assert ends[-1] == "done"
    assert set(ends[:-1]) <= {"killed: the process ended without a word"}
    assert not list(folder.glob(".tmp-*"))


@pytest.mark.long
@pytest.mark.parametrize(
    ("seed", "flags"),
    [
        pytest.param(2, {"save_steps": 1}, id="plain", marks=pytest.mark.long),
        pytest.param(3, {**LORA, **FEW, "save_steps": 1}, id="lora-few-logs"),
    ],
)
def test_kills_change_nothing_in_other_runs(cli, seed, flags):
    flags = {"max_steps": 24, **flags}
    straight = cli.finish("straight", **flags)
    assert_same_run(killed_run(cli, "killed", 3, seed, **flags), straight)
