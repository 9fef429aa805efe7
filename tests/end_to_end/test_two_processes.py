"""Two training processes do what one does: same data, same gradients, one log; and they end together."""

import time
from collections import Counter

import psutil
import pytest
from cli_runs import (
    assert_close,
    assert_same_run,
    attempts,
    completion_rows,
    error_lines,
    log_rows,
    printed_command,
    sampled,
    state_files,
    terminate,
)
from safetensors.torch import load_file

from swift.observability.jsonl import read_log
from swift.observability.metrics import HELD_UP

pytestmark = pytest.mark.slow

LONG = pytest.mark.long

TWO = {"NPROC_PER_NODE": 2}
REUSED = {
    "beta": 0.05,
    "num_iterations": 2,
    "steps_per_generation": 4,
    "per_device_train_batch_size": 2,
    "max_tokens_per_micro_batch": 90,
}


def worker(run, rank: int) -> psutil.Process:
    """The training process of a rank."""
    for process in psutil.Process(run.process.pid).children():
        if process.environ().get("RANK") == str(rank):
            return process
    raise AssertionError(f"no rank {rank}")


@pytest.mark.parametrize(
    "flags",
    [
        pytest.param({"loss_type": "dapo", "beta": 0}, id="dapo-short-ranks", marks=LONG),
        pytest.param({"loss_type": "grpo", "num_generations": 8, "beta": 0.05}, id="grpo-split-group-kl"),
        pytest.param(
            {"loss_type": "bnpo", "beta": 0, "scale_rewards": "batch", "mini_batch_size": 1}, id="bnpo", marks=LONG
        ),
        pytest.param(
            {"loss_type": "dapo", "num_iterations": 2, "beta": 0.05, "reuse": True}, id="several-updates", marks=LONG
        ),
        pytest.param(
            {"num_iterations": 2, "beta": 0.05, "reuse": True, "max_tokens_per_micro_batch": 90},
            id="limited-tokens",
            marks=LONG,
        ),
        pytest.param({"beta": 0.05, "sequence_parallel_size": 2}, id="shared-rows"),
        pytest.param({"beta": 0.05, "num_iterations": 2, "reuse": True, "taught": True}, id="teacher", marks=LONG),
    ],
)
def test_two_processes_make_the_run_of_one(cli, flags):
    reuse = flags.get("reuse", False)
    common = {name: value for name, value in flags.items() if name not in ("reuse", "taught", "sequence_parallel_size")}
    common |= {"teacher_model": cli.model} if flags.get("taught") else {}
    common |= {"per_device_train_batch_size": 2, "optim": "sgd", "learning_rate": 0.2, "max_grad_norm": 0}
    common |= {"max_steps": 8, "save_steps": 8}
    one = cli.finish("one", **common, gradient_accumulation_steps=4, steps_per_generation=8 if reuse else None)
    two = cli.finish(
        "two",
        **common,
        gradient_accumulation_steps=2,
        steps_per_generation=4 if reuse else None,
        sequence_parallel_size=flags.get("sequence_parallel_size"),
        variables=TWO,
    )
    assert sampled(two) == sampled(one)
    groups = Counter(row["group_id"] for row in completion_rows(two))
    assert set(groups.values()) == {common.get("num_generations", 4)}
    assert_close(two, one)
    if common["beta"] == 0:  # otherwise completions without advantage have a KL
        assert any(row["frac_reward_zero_std"] > 0 for row in log_rows(one)), "no window with less to do on a rank"
    ours, theirs = (state_files(folder)["model.safetensors"] for folder in (two, one))
    start = load_file(cli.model / "model.safetensors")
    moved = max((theirs[name] - start[name]).abs().max() for name in theirs)
    gap = max((ours[name] - theirs[name]).abs().max() for name in theirs)
    assert moved > 1e-2
    assert gap < 1e-5 * max(1, moved)
    assert len(list((two / "logs" / "attempt-1").glob("rank-*.log"))) == 2


@pytest.mark.long
def test_a_signal_and_a_resume_change_nothing_and_the_number_of_processes_is_kept(cli):
    flags = {**REUSED, "teacher_model": cli.model, "max_steps": 14, "save_steps": 100}
    straight = cli.finish("straight", variables=TWO, **flags)
    run = cli.start("stopped", variables=TWO, **flags)
    run.reach(3)
    err = run.ends(75, lambda: terminate(run))
    assert err.count("swift: signal: SIGTERM: stopped at step") == 1
    command = printed_command(err)
    assert command.startswith("NPROC_PER_NODE=2 swift rlhf ")
    err = cli.start_printed(command.removeprefix("NPROC_PER_NODE=2 "), "stopped").ends(2)
    (line,) = error_lines(err)
    assert line.startswith("swift: error: NPROC_PER_NODE: 1 training process: the checkpoint was made by 2, with ")
    err = cli.start_printed(command, "stopped").ends(0)
    assert_same_run(run.folder, straight)


@pytest.mark.long
@pytest.mark.parametrize("rank", [0, 1])
def test_the_death_of_one_rank_ends_all_with_one_line(cli, rank):
    run = cli.start("dead", variables=TWO, max_steps=2000, save_steps=3)
    run.reach(4)
    begun = time.monotonic()
    err = run.ends(4, worker(run, rank).kill)
    assert time.monotonic() - begun < 60
    assert error_lines(err) == [
        f"swift: error: worker: rank {rank}: killed by SIGKILL; the kernel does this when memory runs out"
    ]
    assert "Traceback" not in err
    step = run.step
    folder = cli.finish("dead", variables=TWO, max_steps=step + 2, save_steps=3, resume_from_checkpoint="last")
    assert [row["step"] for row in log_rows(folder)] == list(range(1, step + 3))


@pytest.mark.long
def test_failing_rewards_end_all_ranks_with_one_line(cli):
    run = cli.start("judged", variables={**TWO, "FAIL_FROM_STEP": 2}, max_steps=2000)
    run.reach(1)
    (line,) = error_lines(run.ends(5))
    assert "--reward_funcs: odd: failed on every sample" in line
    assert "RuntimeError: the judge is away" in (run.folder / "logs" / "attempt-1" / "rewards.log").read_text()
    assert attempts(run.folder)[-1]["exit_code"] == 5


SLOW = """
import os
import time

import swift.trainers.grpo.step as step
from swift.rollout.engines.transformers.sampling import BatchSampler


def delayed(function, seconds):
    def slow(*args, **kwargs):
        time.sleep(seconds)
        return function(*args, **kwargs)

    return slow


if os.environ.get("RANK") == "1":
    step.policy_loss = delayed(step.policy_loss, 0.4)
else:
    BatchSampler.draw = delayed(BatchSampler.draw, 0.05)
"""


@LONG
def test_the_rank_that_the_others_wait_for_is_named_with_its_phase(cli, tmp_path):
    plugin = tmp_path / "slow_plugin.py"
    plugin.write_text((cli.material / "odd_plugin.py").read_text() + SLOW)
    folder = cli.finish("slow", variables=TWO, external_plugins=plugin, max_steps=6, beta=0)
    waits = Counter()
    for row in read_log(folder / "logging.jsonl"):
        waits.update({key: seconds for key, seconds in row.items() if key.startswith(HELD_UP)})
    trains, samples = (f"{HELD_UP}{phase}/rank-" for phase in ("train", "generate"))
    assert waits[trains + "1"] > 6 * 0.3 and waits[trains + "0"] < 0.1 * waits[trains + "1"]
    assert waits[samples + "0"] > 6 * 0.2 and waits[samples + "1"] < 0.1 * waits[samples + "0"]


@LONG
def test_a_signal_before_the_first_step_stops_all_ranks(cli):
    mark = cli.folder / "imported"
    run = cli.start("early", max_steps=4, variables={**TWO, "MARK_IMPORT": mark})
    assert run.until(mark.exists)
    err = run.ends(75, lambda: terminate(run))
    assert err.count("there is no checkpoint yet; start again: NPROC_PER_NODE=2 swift rlhf") == 1
    assert "Traceback" not in err
    assert not run.folder.exists()
