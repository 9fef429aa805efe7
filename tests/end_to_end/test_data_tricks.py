"""Whole runs with dynamic sampling, training on parts, the replay buffer, second tries and the KL in the reward."""

from collections import Counter

import pytest
from cli_runs import assert_close, attempts, completion_rows, log_rows, sampled

pytestmark = pytest.mark.slow

TWO = {"NPROC_PER_NODE": 2}
BASE = {"beta": 0, "per_device_train_batch_size": 16, "max_steps": 5, "save_steps": 3, "learning_rate": 0.2}
BASE |= {"optim": "sgd", "max_grad_norm": 0}
HALF = {**BASE, "per_device_train_batch_size": 8}
DEDICATED = {"infer_backend": "transformers", "vllm_mode": "dedicated", "parity_check": "off"}


@pytest.mark.long
def test_groups_without_signal_are_replaced_and_two_processes_train_on_what_one_does(cli):
    one = cli.finish("one", **BASE, dynamic_sample=True)
    two = cli.finish("two", **HALF, dynamic_sample=True, variables=TWO)
    assert sampled(two) == sampled(one)
    assert_close(two, one, "loss", "grad_norm", "reward", "dynamic_sample/launched", "dynamic_sample/dropped_tokens")
    rows = completion_rows(one)
    per_step = Counter(row["step"] for row in rows if row["used"])
    spread = {}
    for row in (row for row in rows if row["excluded"] is None):
        spread.setdefault((row["used"], row["group_id"]), set()).add(row["reward"])
    assert all(len(rewards) > 1 for (used, _), rewards in spread.items() if used)
    dropped = [group for used, group in spread if not used]
    assert dropped and all(len(spread[False, group]) == 1 for group in dropped)
    assert set(per_step) == {1, 2, 3, 4, 5} and max(per_step.values()) == 32
    launched = sum(row["dynamic_sample/launched"] for row in log_rows(one))
    assert launched == len({row["group_id"] for row in rows})


@pytest.mark.long
def test_a_run_with_everything_that_replaces_groups_resumes_with_the_same_groups(cli):
    flags = {**BASE, "dynamic_sample": True, "max_resample_times": 0, "replay_buffer_size": 4, "async_generate": True}
    flags |= {**DEDICATED, "reroll_start_fraction": 0.2, "reroll_fail_reward": 0.5}
    folder = cli.finish("cut", **{**flags, "save_total_limit": None})
    whole = sampled(folder)
    assert sum(row["replay/groups"] for row in log_rows(folder)) > 0
    assert any(row["group_id"].endswith("-1") for row in completion_rows(folder)), "no prompt was tried again"
    cli.finish("cut", **{**flags, "resume_from_checkpoint": folder / "checkpoint-3"})
    assert [one["attempt"] for one in attempts(folder)] == [1, 2]
    assert sampled(folder) == whole


@pytest.mark.long
def test_two_processes_training_on_parts_train_what_one_does_on_the_whole(cli):
    twice = {"num_iterations": 2, "max_steps": 6}  # samples change hands between the visits
    whole = cli.finish("whole", **{**BASE, **twice}, parity_check="off")
    flags = {**HALF, **twice, **DEDICATED, "num_infer_workers": 1, "cpu_devices": 3, "streaming_partial_batch": True}
    flags |= {"streaming_min_groups": 3, "skip_zero_advantage_batches": False}
    parts = cli.finish("parts", **flags, variables=TWO)
    assert sampled(parts) == sampled(whole)
    assert_close(parts, whole, "loss", "grad_norm", "ratio/max", "tokens/trained")
    assert max(row["ratio/max"] for row in log_rows(whole)) > 1.001, "no second visit moved anything"


@pytest.mark.long
def test_the_kl_in_the_reward_is_the_same_on_two_processes(cli):
    flags = {"advantage_estimator": "rloo", "beta": 0.5}
    one = cli.finish("one", **{**BASE, **flags})
    two = cli.finish("two", **{**HALF, **flags}, variables=TWO)
    none = cli.finish("none", **{**BASE, **flags, "kl_in_reward": False, "beta": 0})
    # such steps are so large that after three of them a rounding makes another token
    assert sampled(two)[:24] == sampled(one)[:24] == sampled(none)[:24]
    assert_close(two, one, "loss", "grad_norm", "reward", "kl_in_reward", steps=3)
    assert log_rows(one)[0]["kl_in_reward"] == pytest.approx(0.0, abs=1e-3)
    assert all("kl_in_reward" not in row for row in log_rows(none))
    first, last = (
        [[row["advantage"] for row in completion_rows(folder) if row["step"] == step] for folder in (one, none)]
        for step in (1, 5)
    )
    assert first[0] == pytest.approx(first[1], abs=1e-3), "at the first step policy and reference are one"
    assert last[0] != pytest.approx(last[1], abs=1e-3)
    assert not any("kl" in row for row in log_rows(one)), "the loss has no KL"
