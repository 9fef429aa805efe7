"""Runs fed by Atropos: with a message API and a policy server of others, and started whole from one command."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import psutil
import pytest
from cli_runs import ROOT, assert_gone, completion_rows, environment, log_rows
from message_api import REAL, StandIn
from rollout_process import RolloutProcess

from swift.models.tiny import build_tiny
from swift.rollout.server.access import LIFETIME_S

pytestmark = pytest.mark.slow

needs_atroposlib = pytest.mark.skipif(not REAL, reason="atroposlib is not installed")
G, LENGTH = 4, 8


class Served(StandIn):
    """The stand-in behind a socket, and an environment beside it: groups of the policy server's answers."""

    def __init__(self, policy, *, logprobs=True):
        super().__init__()
        self.policy, self.logprobs, self.ended = policy, logprobs, threading.Event()
        self.lock = threading.Lock()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def answer(self):
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                with outer.lock:
                    reply = StandIn.answer(outer, httpx.Request(self.command, f"http://api{self.path}", content=body))
                self.send_response(reply.status_code)
                self.send_header("Content-Length", str(len(reply.content)))
                self.end_headers()
                self.wfile.write(reply.content)

            do_GET = do_POST = answer

            def log_message(self, *args):
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_address[1]}"
        self.threads = [
            threading.Thread(target=one, daemon=True) for one in (self.http.serve_forever, self.environment)
        ]
        for thread in self.threads:
            thread.start()

    def restart(self):
        with self.lock:
            self.state = {}
            self.calls.clear()

    def environment(self):
        """Keeps two batches in the queue."""
        while not self.ended.wait(0.05):
            with self.lock:
                waiting = len(self.state.get("queue", ())) if self.calls.count("/batch") else 99
            if waiting < 4:
                made = self.sample()
                with self.lock:
                    if "/batch" in self.calls:  # else the API was restarted meanwhile
                        self.post(made)

    def sample(self):
        prompt = list(range(5, 11))
        # one seed, so that several versions of the weights sample the same tokens
        wanted = {"prompt": {"prompt_token_ids": prompt}, "n": G, "max_tokens": LENGTH, "logprobs": 0, "seed": 7}
        limit_s = 2 * LIFETIME_S  # an update that a killed run leaves open holds requests back that long
        said = httpx.post(f"{self.policy}/generate", json=wanted, timeout=limit_s, trust_env=False).json()
        answers = [[(int(k), v) for (one,) in row for k, v in one.items()] for row in said["logprobs"]]
        tokens = [prompt + [token for token, _ in row] for row in answers]
        return {
            "tokens": tokens,
            "masks": [[-100] * len(prompt) + one[len(prompt) :] for one in tokens],
            "scores": [sum(token % 2 for token in one[len(prompt) :]) / LENGTH for one in tokens],
            "inference_logprobs": [[1.0] * len(prompt) + [v for _, v in row] for row in answers]
            if self.logprobs
            else None,
            "env_id": 0,
        }

    def close(self):
        self.ended.set()
        self.http.shutdown()
        self.http.server_close()
        for thread in self.threads:
            thread.join()


OURS = {
    "rollout_source": "atropos", "dataset": None, "reward_funcs": None, "external_plugins": None, "max_length": 16,
    "max_completion_length": LENGTH, "num_generations": G, "infer_backend": "transformers", "max_steps": 3,
}  # fmt: skip


@pytest.fixture(scope="module")
def policy(tmp_path_factory, nano_folders):
    """The address of a policy server."""
    server = RolloutProcess(nano_folders["qwen2"], tmp_path_factory.mktemp("policy"))
    yield server.url
    server.stop()


@pytest.mark.parametrize("logprobs", [True, pytest.param(False, marks=pytest.mark.long)])
def test_a_run_fed_by_processes_of_others(cli, policy, logprobs):
    api = Served(policy, logprobs=logprobs)
    try:
        folder = cli.finish(
            "run", **OURS, vllm_server_base_url=policy, atropos_url=api.url, parity_check="off", max_staleness=4
        )
    finally:
        api.close()
    rows = log_rows(folder)
    assert [row["step"] for row in rows] == [1, 2, 3]
    done = completion_rows(folder)
    assert len(done) == 3 * 8
    assert all(row["reward"] == pytest.approx(sum(t["reward"] or 0 for t in row["turns"])) for row in done)
    assert {row["excluded"] for row in done} == {None}
    assert [row["off_policy/max"] <= 4 for row in rows] == [True] * 3
    if logprobs:
        gaps = {row["step"]: row["alignment/diff_max"] for row in rows if "alignment/diff_max" in row}
        assert 1 in gaps and max(gaps.values()) < 1e-4, gaps
    else:
        assert not any("alignment/diff_max" in row or "mismatch/logp_abs_diff_mean" in row for row in rows)
    assert rows[-1]["atropos/groups/0"] >= 6


@pytest.mark.long
def test_two_ranks_share_what_rank_0_was_sent(cli, policy):
    api = Served(policy)
    try:
        folder = cli.finish(
            "run", **OURS, vllm_server_base_url=policy, atropos_url=api.url, parity_check="off", save_steps=3,
            gradient_accumulation_steps=1, variables={"NPROC_PER_NODE": 2},
        )  # fmt: skip
    finally:
        api.close()
    done = completion_rows(folder)
    assert len({(row["group_id"], row["index"]) for row in done}) == len(done) == 3 * 8
    assert api.calls.count("/register") == 1


@pytest.mark.long
def test_a_run_goes_on_from_its_checkpoint(cli, policy):
    api = Served(policy)
    try:
        flags = {**OURS, "vllm_server_base_url": policy, "atropos_url": api.url, "save_steps": 2, "max_steps": 6}
        run = cli.start("run", **flags)
        run.reach(3)
        run.kill()
        api.restart()
        folder = cli.finish("run", **flags, resume_from_checkpoint="last")
    finally:
        api.close()
    assert [row["step"] for row in log_rows(folder)] == [1, 2, 3, 4, 5, 6]
    assert api.state["starting_step"] in (2, 4)
    assert api.state["num_steps"] == 6


# --- the real thing ---------------------------------------------------------------------------------------------------


@pytest.fixture
def whole(cli):
    """Flags of a run that starts message API, policy server and the example's environment."""
    example = ROOT / "examples" / "train" / "grpo" / "atropos" / "digits_env.py"
    shutil.copy(example, cli.folder)
    return {
        **OURS, "atropos_env": f"{sys.executable} {cli.folder / example.name} serve", "num_generations": 8,
        "per_device_train_batch_size": 16, "gradient_accumulation_steps": 1, "max_length": 64,
        "max_completion_length": 16,
    }  # fmt: skip


def parts(run):
    """Name -> process of what a run has started."""
    words = {"api": "run_api", "server": "rollout", "environment": "digits_env.py"}
    found = {}
    for process in psutil.Process(run.process.pid).children():
        line = process.cmdline()
        found |= {name: process for name, word in words.items() if any(word in one for one in line)}
    return found


@needs_atroposlib
@pytest.mark.long
def test_one_command_trains_on_the_real_message_api(cli, whole):
    model = build_tiny(cli.folder / "model", size="tiny")
    folder = cli.finish("run", **{**whole, "model": model, "max_steps": 32, "per_device_train_batch_size": 32})
    rewards = [row["reward"] for row in log_rows(folder)]
    assert sum(rewards[:3]) / 3 < 0.2
    assert sum(rewards[-3:]) / 3 > 0.5
    fresh = [row["alignment/diff_max"] for row in log_rows(folder) if "alignment/diff_max" in row]  # of present weights
    assert fresh and max(fresh) < 1e-3
    assert any(row["off_policy/max"] > 0 for row in log_rows(folder))  # the server knows what sampled the others
    logs = {path.name for path in (folder / "logs").rglob("*.log")}
    assert {"atropos-api.log", "rollout-server.log", "environment-0.log"} <= logs


@needs_atroposlib
@pytest.mark.long
def test_the_example_runs_as_installed(tmp_path):
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    script = tmp_path / "examples" / "train" / "grpo" / "atropos" / "digits.sh"
    ended = subprocess.run(
        ["bash", str(script), "--max_steps", "2"],
        cwd="/", env=environment(PATH=path), capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    [folder] = (tmp_path / "output" / "atropos" / "run").glob("v*")
    assert len(log_rows(folder)) == 2


@needs_atroposlib
@pytest.mark.long
@pytest.mark.parametrize("part", ["api", "server", "environment"])
def test_a_part_that_is_killed_ends_the_run_with_its_name(cli, whole, part):
    run = cli.start("run", **{**whole, "max_steps": 500})
    run.reach(2)
    family, started = run.family(), parts(run)
    assert set(started) == {"api", "server", "environment"}
    started[part].send_signal(signal.SIGKILL)
    killed = time.monotonic()
    code, _, err = run.wait()
    assert time.monotonic() - killed < 30
    name = {"api": "atropos-api", "server": "rollout-server", "environment": "environment-0"}[part]
    advice = "correct the command" if part == "environment" else "correct the error in its last lines"
    assert (code, f"{name}: killed by SIGKILL; {advice}; its last lines:" in err) == (4, True), err
    assert_gone(family)


@needs_atroposlib
@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_run_that_is_ended_leaves_nothing_behind(cli, whole, number):
    run = cli.start("run", **{**whole, "max_steps": 500})
    run.reach(1)
    family = run.family()
    ports = [one.laddr.port for p in family for one in p.net_connections() if one.status == psutil.CONN_LISTEN]
    assert len(ports) >= 2
    run.process.send_signal(number)
    run.wait()
    assert_gone(family, 20)
    for port in ports:
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"http://127.0.0.1:{port}/", trust_env=False)
