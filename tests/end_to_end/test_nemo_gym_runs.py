"""Runs with a stand-in for NeMo Gym that verifies completions, or whose agents make them with a policy server."""

import json
import socket
import sys
from pathlib import Path

import nemo_gym_servers
import pytest
from cli_runs import assert_gone, completion_rows, error_lines, terminate
from nemo_gym_servers import NemoGym, odd_share
from preloaded import Program

from swift.models.tiny import build_tiny
from swift.observability.jsonl import read_log

pytestmark = pytest.mark.slow

STAND_IN = Path(nemo_gym_servers.__file__)


@pytest.fixture
def verified(cli):
    rows = [
        {"responses_create_params": {"input": f"question {n}"}, "agent_ref": {"name": "odd_agent"}, "number": n}
        for n in range(8)
    ]
    (cli.folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with socket.create_server(("127.0.0.1", 0)) as one:
        port = one.getsockname()[1]
    return {
        "dataset": cli.folder / "rows.jsonl",
        "rollout_source": "nemo_gym",
        "nemo_gym_head_port": port,
        "reward_funcs": "reward_env",
        "max_completion_length": 6,
        "save_steps": 1000,
    }


def started_by_run(flags):
    return {**flags, "nemo_gym_auto_start": f"{sys.executable} {STAND_IN} --port {flags['nemo_gym_head_port']}"}


def stand_in_of(run):
    return next(one for one in run.family() if STAND_IN.name in " ".join(one.cmdline()) and one.name() != "sh")


@pytest.mark.long
def test_the_reward_rises_with_a_gym_that_the_run_starts_and_ends(cli, verified):
    run = cli.start("started", **{**started_by_run(verified), "learning_rate": 5e-3, "max_steps": 24})
    run.reach(1)
    stand_in = stand_in_of(run)
    run.ends(0)
    assert_gone([stand_in])
    rows = completion_rows(run.folder)
    assert all(row["excluded"] is None and row["reward"] == odd_share(row["completion"]) for row in rows)
    logs = read_log(run.folder / "logging.jsonl")
    first, last = (sum(row["reward"] for row in part) / 4 for part in (logs[:4], logs[-4:]))
    assert last > first + 0.1, (first, last)
    assert logs[-1]["nemo_gym/verify_s"] > 0
    [log] = run.folder.glob("logs/attempt-*/nemo_gym.log")
    assert "serving" in log.read_text()


@pytest.mark.long
def test_a_gym_of_the_run_that_dies_ends_it_with_its_last_lines(cli, verified):
    run = cli.start("dies", **started_by_run(verified), max_steps=10_000)
    run.reach(2)
    family = run.family()
    stand_in_of(run).kill()
    err = run.ends(4)
    assert "swift: error: --nemo_gym_command: killed by SIGKILL; correct the command; its last lines: serving" in err
    assert "Traceback" not in err
    assert_gone(family)


@pytest.mark.long
def test_a_gym_of_others_that_dies_leaves_samples_out_until_it_is_back_or_too_many_are(cli, verified):
    words = [str(STAND_IN), "--port", str(verified["nemo_gym_head_port"])]
    stand_ins = [Program(words, output=cli.folder / "gym.log")]
    try:
        run = cli.start("other", **verified, max_steps=10_000)
        run.reach(2)
        stand_ins[0].kill()
        stand_ins[0].wait(10)
        assert run.until(lambda: left_out(run.folder))
        stand_ins.append(Program(words, output=cli.folder / "gym.log"))
        assert run.until(lambda: rewarded_again(run.folder))
        stand_ins[1].kill()
        err = run.ends(4)
        assert "swift: error: --max_excluded_frac: 0.5: " in err
        assert "mostly: connection (" in err
    finally:
        for one in stand_ins:
            one.kill()


def left_out(folder):
    return read_log(folder / "logging.jsonl")[-1].get("health/excluded/connection", 0) > 0


def rewarded_again(folder):
    return read_log(folder / "logging.jsonl")[-1].get("health/excluded_samples") == 0


# --- agents that sample with a policy server --------------------------------------------------------------------------


@pytest.fixture
def played(cli):
    rows = [{"responses_create_params": {"input": f"question {n}"}} for n in range(8)]
    (cli.folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {
        "dataset": cli.folder / "rows.jsonl", "rollout_source": "nemo_gym", "nemo_gym_multi_turn": "true",
        "reward_funcs": "reward_env", "per_device_train_batch_size": 8, "gradient_accumulation_steps": 1,
        "max_length": 60, "max_completion_length": 6, "save_steps": 1000,
    }  # fmt: skip


@pytest.mark.parametrize(
    "words", [(), pytest.param(("--use_vllm", "true", "--vllm_max_model_len", "128"), marks=pytest.mark.long)], ids=str
)
def test_a_run_trains_on_what_agents_made_with_its_policy_server(cli, serve, played, words):
    model = build_tiny(cli.folder / "model", size="tiny") if words else cli.model
    server = serve(*words, model=model)
    with NemoGym(policy=server.url) as gym:
        given = {"model": model, "vllm_server_base_url": server.url, "nemo_gym_head": gym.url, "max_steps": 3}
        folder = cli.finish("agents", **played, **given)
    logs = read_log(folder / "logging.jsonl")
    assert len(logs) == 3
    for row in logs:
        assert row["mismatch/logp_abs_diff_max"] < (1e-4 if words else 1e-5)
        assert (row["rollout/num_turns/mean"], row["health/excluded_samples"]) == (2, 0)
        assert row["nemo_gym/run_s"] > 0
        assert (row["off_policy/max"], row["rollout/history_rewritten"]) == (0, 0)
    done = completion_rows(folder)
    assert len({row["completion"] for row in done}) > 12
    assert len({row["weight_version"] for row in done}) == 3
    assert {len(row["turns"]) for row in done} == {3}


@pytest.mark.long
def test_a_run_outlives_a_policy_server_that_is_killed_and_started_again(cli, serve, played):
    server = serve()
    with NemoGym(policy=server.url) as gym:
        given = {"vllm_server_base_url": server.url, "nemo_gym_head": gym.url, "max_steps": 300}
        run = cli.start("agents", **played, **given)
        run.reach(2)
        server.kill()
        killed = run.step
        serve(port=server.port)
        assert run.until(lambda: run.step >= killed + 3 and rewarded_again(run.folder))
        run.ends(75, lambda: terminate(run))
    logs = read_log(run.folder / "logging.jsonl")
    assert sum(row.get("health/engine_restarts", 0) for row in logs) == 1
    last = next(row for row in reversed(logs) if not row["health/excluded_samples"])
    assert (last["mismatch/logp_abs_diff_max"] < 1e-5, last["off_policy/max"]) == (True, 0)


@pytest.mark.long
def test_a_policy_server_that_stays_away_ends_the_run(cli, serve, played):
    server = serve()
    with NemoGym(policy=server.url) as gym:
        given = {"vllm_server_base_url": server.url, "nemo_gym_head": gym.url, "max_steps": 300}
        run = cli.start("agents", **played, **given, vllm_server_timeout=3)
        run.reach(2)
        err = run.ends(4, server.kill)
    (line,) = error_lines(err)
    assert f"server {server.url}: not healthy within 3 s" in line
    assert "Traceback" not in err
