"""Runs that go on with other numbers of processes: resumed by hand, and by the launcher after processes were killed."""

import os
import random
import re
import shutil
import time
from collections import Counter

import psutil
import pytest
from cli_runs import assert_close, attempts, completion_rows, log_rows, sampled

pytestmark = [pytest.mark.slow, pytest.mark.long]

KILLS = int(os.environ.get("ELASTIC_KILLS", "4"))
"""Processes that are killed; the acceptance has 20."""
SEED = int(os.environ.get("ELASTIC_SEED", "1"))
FOUR = {"NPROC_PER_NODE": 4}
FLAGS = {
    "elastic": "true",
    "optim": "sgd",
    "learning_rate": 0.2,
    "max_grad_norm": 0,
    "gradient_accumulation_steps": 1,
    "per_device_train_batch_size": 2,  # 8 completions of 2 prompts, which three processes share unevenly
    "save_steps": 1,
    "save_total_limit": 2,
}


ADAM = {"optim": "adamw_torch", "learning_rate": 1e-3}


@pytest.mark.parametrize(
    "sharding", [{}, {"fsdp": "full_shard"}, {"deepspeed": "zero2", **ADAM}, {"deepspeed": "zero3", **ADAM}]
)
def test_three_processes_then_two_go_on_with_the_run_of_four(cli, sharding):
    flags = {**FLAGS, **sharding, "save_total_limit": None, "max_steps": 6}
    straight = source = cli.finish("straight", variables=FOUR, **flags)
    for processes, step in ((3, 2), (2, 4)):
        folder = cli.folder / f"by-{processes}"
        shutil.copytree(source / f"checkpoint-{step}", folder / f"checkpoint-{step}")
        cli.finish(folder.name, variables={"NPROC_PER_NODE": processes}, **flags, resume_from_checkpoint="last")
        assert f"elastic: {processes} processes share the batches of 4" in cli.printed
        assert sampled(folder) == sampled(straight)[8 * step :]
        for mine, other in zip(log_rows(folder), log_rows(straight)[step:], strict=True):
            assert mine["loss"] == pytest.approx(other["loss"], rel=1e-3, abs=1e-5)
        source = folder


FSDP, ZERO2, ZERO3 = {"fsdp": "full_shard"}, {"deepspeed": "zero2"}, {"deepspeed": "zero3"}


@pytest.mark.parametrize("tuner", ["full", "lora"])
def test_a_run_goes_on_sharded_in_any_other_way(cli, tuner):
    """Each checkpoint is read by the next way, and the first by the last; with other processes, too."""
    flags = {**FLAGS, **ADAM, "tuner_type": tuner, "save_total_limit": None, "lr_scheduler_type": "constant"}
    flags["per_device_train_batch_size"] = 4
    straight = source = cli.finish("straight", variables={"NPROC_PER_NODE": 2}, **flags, max_steps=15)
    ways = [FSDP, ZERO3, ZERO2, {}, ZERO3, FSDP, ZERO2]
    for number, way in enumerate(ways, 1):
        folder, step = cli.folder / f"{number}", 2 * number - 1
        shutil.copytree(source / f"checkpoint-{step}", folder / f"checkpoint-{step}")
        more = {"resume_from_checkpoint": "last", "max_steps": step + 2, **way}
        cli.finish(folder.name, variables={"NPROC_PER_NODE": 1 + number % 2}, **flags, **more)
        assert sampled(folder) == [row for row in sampled(straight) if step < row[0] <= step + 2]
        for mine, other in zip(log_rows(folder), log_rows(straight)[step : step + 2], strict=True):
            for name in ("loss", "grad_norm"):
                assert mine[name] == pytest.approx(other[name], rel=1e-3, abs=1e-5), (way, name)
        source = folder


def workers(run):
    """The training processes by rank."""
    found = {}
    for process in psutil.Process(run.process.pid).children():
        try:
            found[int(process.environ()["RANK"])] = process
        except (KeyError, psutil.Error):  # not a worker, or just about to end
            continue
    return found


def kill_at_random(run, kills, chance):
    """Kill a training process so many times, each a random time after the run has gone on; returns those killed."""
    killed, seen = 0, [0]
    while killed < kills and run.until(lambda: run.step > 0 and len(attempts(run.folder)) > seen[-1]):
        seen.append(len(attempts(run.folder)))
        time.sleep(chance.uniform(0, 3))
        there = workers(run)
        if len(there) > 2:  # the last two are left alone: without a checkpoint they might be killed to the last
            there[chance.choice(sorted(there))].kill()
            killed += 1
    return killed


@pytest.mark.timeout(300 + 100 * KILLS)
def test_processes_killed_at_random_change_nothing(cli):
    """Up to the rounding of sums, which other numbers of processes add up in another order."""
    steps = 11 * max(2, KILLS)  # trials come at ever greater distances
    flags = {**FLAGS, "max_steps": steps}
    straight = cli.finish("straight", variables=FOUR, **flags)
    run = cli.start("elastic", variables=FOUR, **flags)
    killed = kill_at_random(run, KILLS, random.Random(SEED))
    code, _, err = run.wait()
    assert code == 0, err
    notes = re.findall(r"swift: note: (?:lost .*; )?with (\d) process", err)
    assert killed >= 1 and sum("lost rank" in line for line in err.splitlines()) >= killed
    assert {"3", "4"} <= set(notes), err
    assert_undisturbed(run.folder, straight, steps)


def assert_undisturbed(folder, straight, steps):
    """Every prompt is trained once in an epoch, on the completions of the run without losses."""
    assert len(log_rows(folder)) == steps
    assert sampled(folder) == sampled(straight)
    per_epoch = 11 * 8  # completions of 22 prompts, two in each step
    rows = completion_rows(folder)
    for start in range(0, len(rows), per_epoch):
        times = Counter(row["prompt"] for row in rows[start : start + per_epoch])
        assert len(times) == 22 and set(times.values()) == {4}
    assert_close(folder, straight, "loss", "reward", "grad_norm")


GATE = """
import os
import time
from pathlib import Path

from swift.plugin import orms


class Gated(orms["odd"]):
    def __call__(self, completions, trainer_state, **kwargs):
        while Path(os.environ["GATES"], str(trainer_state.global_step)).exists():
            time.sleep(0.01)
        return super().__call__(completions, trainer_state=trainer_state, **kwargs)


orms["gated"] = Gated
"""


@pytest.mark.timeout(900)
def test_four_processes_then_three_then_two_then_four_are_one_run(cli):
    """A closed gate holds the run after a step, until a process is killed there."""
    gates, plugin, steps = cli.folder / "gates", cli.folder / "gate.py", 22
    gates.mkdir()
    plugin.write_text(GATE)
    plugins = [cli.material / "odd_plugin.py", plugin]
    flags = {**FLAGS, "external_plugins": plugins, "reward_funcs": "gated", "save_steps": 2, "max_steps": steps}
    variables = {**FOUR, "GATES": gates}
    straight = cli.finish("straight", variables=variables, **flags)
    for step in (2, 3):
        (gates / str(step)).touch()
    run = cli.start("elastic", variables=variables, **flags)
    for processes, step, killed in ((4, 2, 1), (3, 3, 0)):
        run.reach(step)
        assert run.until((run.folder / "checkpoint-2").exists)
        there = workers(run)
        assert sorted(there) == list(range(processes))
        assert_close(run.folder, straight, "loss", "reward", "grad_norm", steps=step)
        there[killed].kill()
        (gates / str(step)).unlink()
    code, _, err = run.wait()
    assert code == 0, err
    assert re.findall(r"swift: note: (?:lost .*; )?with (\d) process", err) == ["3", "2", "4"]
    assert_undisturbed(run.folder, straight, steps)
