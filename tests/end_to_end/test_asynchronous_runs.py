"""Whole runs with `--async_generate true`: delays, kills and processes change nothing of what is trained on."""

from collections import Counter

import pytest
from cli_runs import (
    assert_same,
    completion_rows,
    engines_of,
    error_lines,
    log_rows,
    state_files,
)

from swift.observability.jsonl import read_log

pytestmark = pytest.mark.slow

PLUGIN = '''
import asyncio
import os
import random
import time

from swift.plugin import AsyncORM, inference_backends, orms
from swift.rollout.engines.transformers import TransformersEngine, build

SECONDS = float(os.environ.get("DELAYS", 0))


class Hesitant(TransformersEngine):
    """Takes its time wherever it can."""

    def submit(self, request):
        time.sleep(random.uniform(0, SECONDS / 20))
        super().submit(request)

    def advance(self):
        ended = super().advance()
        time.sleep(sum(random.uniform(0, SECONDS) for _ in ended or ()))
        return ended

    def update(self, stream):
        time.sleep(random.uniform(0, SECONDS))
        return super().update(stream)


def hesitant(spec):
    engine = build(spec)
    engine.__class__ = Hesitant
    return engine


inference_backends["hesitant"] = hesitant


class Odd(AsyncORM):
    """Share of odd characters, after a while."""

    async def __call__(self, completions, trainer_state, **kwargs):
        await asyncio.sleep(random.SystemRandom().uniform(0, 5 * SECONDS))
        if trainer_state.global_step >= int(os.environ.get("FAIL_FROM_STEP", 10**9)):
            raise RuntimeError("the judge is away")
        return [sum(ord(c) % 2 for c in text) / max(1, len(text)) for text in completions]


orms["odd"] = Odd
'''
DELAYS = {"DELAYS": "0.03"}
STEPS = 7
SETTINGS = {
    "infer_backend": "hesitant", "vllm_mode": "dedicated", "async_generate": "true", "max_length": 40,
    "gradient_checkpointing": "false", "max_steps": STEPS, "save_steps": 3, "learning_rate": 1e-2,
}  # fmt: skip


@pytest.fixture(scope="module")
def plugin(tmp_path_factory):
    path = tmp_path_factory.mktemp("plugin") / "hesitant.py"
    path.write_text(PLUGIN)
    return {**SETTINGS, "external_plugins": path}


@pytest.fixture(scope="module")
def straight(finished, plugin):
    """An undisturbed run."""
    return finished(**plugin)


def launches(folder):
    """The groups that were trained on, step by step."""
    rows = completion_rows(folder)
    return {step: {row["group_id"] for row in rows if row["step"] == step} for step in range(1, STEPS + 1)}


@pytest.mark.long
def test_each_step_but_the_first_is_one_step_off_policy_and_says_so(straight):
    rows = log_rows(straight)
    assert (
        [row["off_policy/max"] for row in rows] == [row["off_policy/mean"] for row in rows] == [0] + [1] * (STEPS - 1)
    )
    versions = {row["step"]: row["weight_version"] for row in completion_rows(straight)}
    assert list(versions.values()) == [0, 0, *range(1, STEPS - 1)]
    waits = [(row["time/wait_rollout"], row["time/wait_train"]) for row in read_log(straight / "logging.jsonl")]
    assert all(0 <= wait <= 60 for pair in waits for wait in pair) and all(map(any, zip(*waits, strict=True)))
    gaps = [row["mismatch/logp_abs_diff_max"] for row in rows]
    assert gaps[0] <= 1e-5 < min(gaps[1:])


@pytest.mark.long
def test_delays_a_killed_engine_a_kill_and_a_resume_change_no_bit(cli, plugin, straight):
    run = cli.start("killed", **plugin, variables=DELAYS)
    run.reach(1)
    for engine in engines_of(run):
        engine.kill()
    run.reach(5)
    run.kill()
    folder = cli.finish("killed", **plugin, resume_from_checkpoint="last", variables=DELAYS)
    restarts = "health/engine_restarts"
    assert sum(row[restarts] for row in log_rows(folder)) == 1
    ours, theirs = ([{**row, restarts: None} for row in log_rows(one)] for one in (folder, straight))
    assert_same(ours, theirs)
    assert_same(completion_rows(folder), completion_rows(straight))
    assert_same(state_files(folder), state_files(straight))


@pytest.mark.long
def test_rewards_that_fail_end_the_run_and_a_resume_misses_no_prompt(cli, plugin, straight):
    run = cli.start("judged", **plugin, variables={**DELAYS, "FAIL_FROM_STEP": "1"})
    run.reach(1)
    (line,) = error_lines(run.ends(5))
    assert "--reward_funcs: odd: failed on every sample" in line
    folder = cli.finish("judged", **plugin, resume_from_checkpoint="last")
    assert launches(folder) == launches(straight)
    assert set(Counter(row["group_id"] for row in completion_rows(folder)).values()) == {4}


@pytest.mark.long
def test_two_training_processes_share_the_engine_of_one(cli, plugin, straight):
    folder = cli.finish("two", **plugin, per_device_train_batch_size=2, variables={**DELAYS, "NPROC_PER_NODE": 2})
    assert launches(folder) == launches(straight)
    ours, theirs = (
        [row["completion"] for row in completion_rows(one) if row["weight_version"] == 0] for one in (folder, straight)
    )
    assert ours == theirs
    assert [row["off_policy/max"] for row in log_rows(folder)] == [0] + [1] * (STEPS - 1)
