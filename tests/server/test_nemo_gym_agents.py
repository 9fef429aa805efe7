"""NeMo Gym's agents with a policy server of ours: what they hand back is what the policy sampled."""

import json
import signal

import psutil
import pytest
import torch
from nemo_gym_servers import TOOL_RESULT, NemoGym
from oracle import load, logprobs_of
from preloaded import Program
from processes import alive, wait_for
from server_parts import LocalServer, Server

from swift.models.arguments import CheckpointArguments
from swift.models.tiny import build_tiny
from swift.models.tokenizer import load_chat
from swift.observability.jsonl import read_log
from swift.rollout.multi_turn.engine import TrajectoryEngine
from swift.rollout.multi_turn.trajectory import Limits
from swift.rollout.nemo_gym import gym as play
from swift.rollout.nemo_gym.servers import find_servers
from swift.rollout.round_result import fault
from swift.types import Prompt, Request, SamplingParams


@pytest.fixture
def engine(nano_folders):
    server = LocalServer(nano_folders["qwen2"])
    inner = server.engine()
    with NemoGym(policy=server.url) as gym:
        agents = find_servers(gym.url, kind="agents", limit_s=5)
        player = play.NemoGym("run", "odd_agent", 30.0, "policy", [], agents)
        template = load_chat(CheckpointArguments(model=str(nano_folders["qwen2"])))
        player.attach(inner, len(template.tokenizer))
        one = TrajectoryEngine(inner, template, Limits(9, "per_round", 500), player, "--rollout_source: nemo_gym")
        yield one
        one.close()
    inner.close()
    server.stop()


def test_an_assembled_sample_has_the_log_probs_of_the_policy(engine, nano_folders):
    model, template = load(nano_folders["qwen2"]), engine.template
    messages = [{"role": "user", "content": "How many?"}]
    prompt = Prompt("p", messages, template.encode_prompt(messages), {"responses_create_params": {"input": messages}})
    sampling = SamplingParams(max_new_tokens=6, temperature=0.8)
    wanted = [Request(f"p-0/{i}", prompt.token_ids, sampling, prompt) for i in range(4)]
    done = list(engine.generate(wanted))
    for one in done:
        assert (fault(one), one.episode.num_turns, one.episode.prompt_ids) == (None, 2, [])
        expected = logprobs_of(model, prompt.token_ids, one.token_ids, 0.8)
        sampled = torch.tensor(one.mask, dtype=torch.bool)
        assert float((torch.tensor(one.logprobs) - expected)[sampled].abs().max()) < 1e-5
        written = [token for token, kept in zip(one.token_ids, one.mask, strict=True) if not kept]
        assert template.decode(written) == TOOL_RESULT
    assert len({tuple(one.token_ids) for one in done}) == 4


def start(model, folder, server, gym, **more):
    """A run whose completions agents make; its log is run.log."""
    rows = [{"responses_create_params": {"input": f"question {n}"}} for n in range(8)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = {
        "rlhf_type": "grpo", "model": model, "dataset": folder / "rows.jsonl", "tuner_type": "full",
        "rollout_source": "nemo_gym", "nemo_gym_multi_turn": "true", "reward_funcs": "reward_env",
        "vllm_server_base_url": server.url, "num_generations": 4, "per_device_train_batch_size": 8,
        "gradient_accumulation_steps": 1, "max_length": 60, "max_completion_length": 6, "learning_rate": 1e-3,
        "max_steps": 3, "logging_steps": 1, "save_steps": 100, "report_to": "none", "add_version": "false",
        "reward_workers": 1, "output_dir": folder / "run", "beta": 0, "nemo_gym_head": gym.url, **more,
    }  # fmt: skip
    given = [str(word) for name, value in flags.items() for word in (f"--{name}", value)]
    return Program(["-m", "swift", "rlhf", *given], output=folder / "run.log")


def logs_of(folder):
    path = folder / "run" / "logging.jsonl"
    return read_log(path) if path.exists() else []


def until(folder, run, condition):
    """Wait for the log rows that make it true."""
    assert wait_for(lambda: run.poll() is not None or condition(logs_of(folder)), 120.0)
    assert run.poll() is None, (folder / "run.log").read_text()[-3000:]


@pytest.mark.slow
@pytest.mark.parametrize(
    "words", [(), pytest.param(("--use_vllm", "true", "--vllm_max_model_len", "128"), marks=pytest.mark.long)], ids=str
)
def test_a_run_trains_on_what_agents_made_with_its_policy_server(nano_folders, tmp_path, words):
    model = build_tiny(tmp_path / "model", size="tiny") if words else nano_folders["qwen2"]
    server = Server(model, tmp_path, *words)
    try:
        with NemoGym(policy=server.url) as gym:
            run = start(model, tmp_path, server, gym)
            assert run.wait(240) == 0, (tmp_path / "run.log").read_text()[-3000:]
    finally:
        server.kill()
    logs = logs_of(tmp_path)
    assert len(logs) == 3
    for row in logs:
        assert row["mismatch/logp_abs_diff_max"] < (1e-4 if words else 1e-5)
        assert (row["rollout/num_turns/mean"], row["health/excluded_samples"]) == (2, 0)
        assert row["nemo_gym/run_s"] > 0
        assert (row["off_policy/max"], row["rollout/history_rewritten"]) == (0, 0)
    done = read_log(tmp_path / "run" / "completions.jsonl")
    assert len({row["completion"] for row in done}) > 12
    assert len({row["weight_version"] for row in done}) == 3
    assert {len(row["turns"]) for row in done} == {3}


@pytest.mark.slow
@pytest.mark.long
def test_a_run_outlives_a_policy_server_that_is_killed_and_started_again(nano_folders, tmp_path):
    servers = [Server(nano_folders["qwen2"], tmp_path)]
    try:
        with NemoGym(policy=servers[0].url) as gym:
            run = start(nano_folders["qwen2"], tmp_path, servers[0], gym, max_steps=300)
            until(tmp_path, run, lambda logs: len(logs) >= 2)
            servers[0].kill()
            killed = len(logs_of(tmp_path))
            servers.append(Server(nano_folders["qwen2"], tmp_path, port=servers[0].port))
            until(tmp_path, run, lambda logs: any(not row["health/excluded_samples"] for row in logs[killed + 2 :]))
            family = psutil.Process(run.pid).children(recursive=True)
            run.send_signal(signal.SIGTERM)
            run.wait(60)
            assert all(not alive(one.pid) for one in family)
        logs = logs_of(tmp_path)
        assert sum(row.get("health/engine_restarts", 0) for row in logs) == 1
        last = next(row for row in reversed(logs) if not row["health/excluded_samples"])
        assert (last["mismatch/logp_abs_diff_max"] < 1e-5, last["off_policy/max"]) == (True, 0)
    finally:
        for one in servers:
            one.kill()


@pytest.mark.slow
@pytest.mark.long
def test_a_policy_server_that_stays_away_ends_the_run(nano_folders, tmp_path):
    server = Server(nano_folders["qwen2"], tmp_path)
    try:
        with NemoGym(policy=server.url) as gym:
            run = start(nano_folders["qwen2"], tmp_path, server, gym, max_steps=300, vllm_server_timeout=3)
            until(tmp_path, run, lambda logs: len(logs) >= 2)
            family = psutil.Process(run.pid).children(recursive=True)
            server.kill()
            assert run.wait(60) == 4
            assert wait_for(lambda: all(not alive(one.pid) for one in family), 10.0)
    finally:
        server.kill()
    text = (tmp_path / "run.log").read_text()
    assert f"swift: error: server {server.url}: not healthy within 3 s" in text
    assert "Traceback" not in text
