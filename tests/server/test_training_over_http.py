"""`swift rlhf` with servers: a run whose server is killed and started again is the run of a server that lived."""

import json
import os
import threading
import time

import pytest
from preloaded import Program
from processes import wait_for
from server_parts import KEY, Server

pytestmark = pytest.mark.slow

LIMIT_S = 240
PLUGIN = '''
from swift.plugin import ORM, orms


class Odd(ORM):
    """Share of odd characters."""

    def __call__(self, completions, **kwargs):
        return [sum(ord(c) % 2 for c in text) / max(1, len(text)) for text in completions]


orms["odd"] = Odd
'''


@pytest.fixture(scope="module")
def material(nano_folders, tmp_path_factory):
    folder = tmp_path_factory.mktemp("training")
    rows = [{"prompt": f"question {n}" + "?" * (n % 4), "solution": str(n)} for n in range(1, 17)]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "odd_over_http.py").write_text(PLUGIN)
    return nano_folders["qwen2"], folder


def start(material, output, urls, *words):
    model, folder = material
    command = [
        "-m", "swift", "rlhf", "--rlhf_type", "grpo", "--model", str(model), "--dataset",
        str(folder / "train.jsonl"), "--external_plugins", str(folder / "odd_over_http.py"), "--reward_funcs", "odd",
        "--num_generations", "4", "--per_device_train_batch_size", "8", "--gradient_accumulation_steps", "1",
        "--max_length", "40", "--max_completion_length", "24", "--learning_rate", "1e-3", "--max_steps", "4",
        "--logging_steps", "1", "--save_steps", "100", "--beta", "0", "--report_to", "none", "--add_version", "false",
        "--gradient_checkpointing", "false", "--train_type", "full", "--reward_workers", "1", "--output_dir",
        str(output), "--vllm_server_base_url", *urls, "--vllm_server_api_key", KEY, "--vllm_server_timeout", "120",
        *words,
    ]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    return Program(command, env=environment, output=output.parent / f"{output.name}.log")


def rows(output, name):
    file = output / name
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def until_logged(process, output):
    assert wait_for(lambda: process.poll() is not None or rows(output, "logging.jsonl"), LIMIT_S)
    assert process.poll() is None, (output.parent / f"{output.name}.log").read_text()[-3000:]


def sampled(output):
    return sorted(
        (row["step"], row["group_id"], row["index"], row["completion"]) for row in rows(output, "completions.jsonl")
    )


def finish(process, output, way=""):
    """It trained on what was sampled, with weights that came this way; "" for an adapter."""
    code = process.wait(LIMIT_S)
    assert code == 0, (output.parent / f"{output.name}.log").read_text()[-3000:]
    files = [path for path in (output.parent / f"{output.name}.log", *output.rglob("*")) if path.is_file()]
    assert [path.name for path in files if KEY.encode() in path.read_bytes()] == []
    (log,) = output.glob("logs/attempt-*/rank-0.log")
    assert (f"gets them by {way}: " if way else "") in log.read_text()
    logs = rows(output, "logging.jsonl")
    fresh = [row["mismatch/logp_abs_diff_max"] for row in logs if row["off_policy/max"] == 0]
    assert len(fresh) >= 2
    assert max(fresh) < 1e-5
    return logs


def test_a_restarted_server_a_second_one_and_the_weight_transport_change_nothing(material, tmp_path):
    folder = tmp_path / "weights"
    folder.mkdir()
    servers = [Server(material[0], tmp_path, "--weights_folder", str(folder), key=KEY)]
    by = "--weight_transport"
    try:
        quiet = tmp_path / "quiet"
        finish(start(material, quiet, [servers[0].url], by, "broadcast"), quiet, "broadcast")
        disturbed = tmp_path / "disturbed"
        process = start(material, disturbed, [servers[0].url], by, "http")
        until_logged(process, disturbed)
        servers[0].kill()
        more = ("--weights_folder", str(folder))
        servers.append(Server(material[0], tmp_path, *more, port=servers[0].port, key=KEY))
        logs = finish(process, disturbed, "http")
        assert sampled(disturbed) == sampled(quiet)
        assert max(row.get("health/engine_restarts", 0) for row in logs) == 1
        servers.append(Server(material[0], tmp_path, *more, key=KEY))
        both = tmp_path / "both"
        finish(start(material, both, [servers[1].url, servers[2].url], by, "disk"), both, "disk")
        assert sampled(both) == sampled(quiet)
        for server in servers[1:]:
            with server.client() as http:
                assert http.get("/info").json()["counters"]["decode_rows"] > 0
    finally:
        for server in servers:
            server.kill()
            assert server.left() == []


@pytest.mark.long
@pytest.mark.parametrize("words", ["lora_restart --force_restart true", "lora_only", "none"])
def test_a_weight_bridge_carries_every_version_to_the_server(material, tmp_path, words):
    server, output = Server(material[0], tmp_path, key=KEY), tmp_path / "run"
    try:
        boot = health(server)["boot_id"]
        bridge = ("--weight_bridge", *words.split(), "--vllm_restart_interval", "2", "--train_type", "lora")
        logs = finish(start(material, output, [server.url], *bridge), output, "http" if words == "none" else "")
        assert max(row["off_policy/max"] for row in logs) == 1
        server.wait_until_ready()
        restarts = sum(row.get("health/engine_restarts", 0) for row in logs)
        assert (restarts, health(server)["boot_id"] == boot) == ((1, False) if "restart" in words else (0, True))
    finally:
        server.kill()
        assert server.left() == []


def health(server):
    with server.client() as http:
        return http.get("/health").json()


def test_a_server_that_stays_away_ends_the_run_with_code_4_and_its_address(material, tmp_path):
    server, output = Server(material[0], tmp_path, key=KEY), tmp_path / "run"
    process = start(material, output, [server.url], "--vllm_server_timeout", "3", "--max_steps", "1000")
    try:
        until_logged(process, output)
        server.kill()
        killed = time.monotonic()
        assert process.wait(LIMIT_S) == 4
        assert time.monotonic() - killed < 60
    finally:
        threading.Timer(0, process.kill).start()
        process.wait(10)
        server.kill()
    text = (tmp_path / "run.log").read_text()
    assert f"swift: error: server {server.url}: not healthy within 3 s" in text
    assert "swift rollout --model" in text
    assert "Traceback" not in text
    assert server.left() == []
