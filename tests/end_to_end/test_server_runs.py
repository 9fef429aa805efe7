"""`swift rlhf` with servers: a run whose server is killed and started again is the run of a server that lived."""

import pytest
from cli_runs import error_lines, log_rows, sampled

pytestmark = pytest.mark.slow

KEY = "a key for tests"
FLAGS = {
    "vllm_server_api_key": KEY, "per_device_train_batch_size": 8, "gradient_accumulation_steps": 1, "max_length": 40,
    "max_completion_length": 24, "max_steps": 4, "save_steps": 100, "gradient_checkpointing": "false",
}  # fmt: skip


def asked(server, path):
    with server.client() as http:
        return http.get(path).json()


def trained(cli, folder, way=""):
    """The log rows of a run that trained on what was sampled, with weights that came this way; "" for an adapter."""
    files = [path for path in [*cli.folder.glob("std*"), *folder.rglob("*")] if path.is_file()]
    assert [path.name for path in files if KEY.encode() in path.read_bytes()] == []
    (log,) = folder.glob("logs/attempt-*/rank-0.log")
    assert (f"gets them by {way}: " if way else "") in log.read_text()
    logs = log_rows(folder)
    fresh = [row["mismatch/logp_abs_diff_max"] for row in logs if row["off_policy/max"] == 0]
    assert len(fresh) >= 2
    assert max(fresh) < 1e-5
    return logs


@pytest.mark.long
def test_a_restarted_server_a_second_one_and_the_weight_transport_change_nothing(cli, serve):
    weights, killed = cli.folder / "weights", cli.folder / "killed"
    weights.mkdir()
    share = ("--weights_folder", str(weights))
    first = serve(*share, key=KEY)
    quiet = cli.finish("quiet", **FLAGS, vllm_server_base_url=first.url, weight_transport="broadcast")
    trained(cli, quiet, "broadcast")
    run = cli.start(
        "disturbed", **FLAGS, vllm_server_base_url=first.url, weight_transport="http", variables={"WAIT_FOR": killed}
    )
    run.reach(1)
    first.kill()
    killed.touch()
    again = serve(*share, port=first.port, key=KEY)
    run.ends(0)
    logs = trained(cli, run.folder, "http")
    assert sampled(run.folder) == sampled(quiet)
    assert max(row.get("health/engine_restarts", 0) for row in logs) == 1
    second = serve(*share, key=KEY)
    both = cli.finish("both", **FLAGS, vllm_server_base_url=[again.url, second.url], weight_transport="disk")
    trained(cli, both, "disk")
    assert sampled(both) == sampled(quiet)
    for server in (again, second):
        assert asked(server, "info")["counters"]["decode_rows"] > 0


@pytest.mark.long
@pytest.mark.parametrize("bridge", ["lora_restart", "lora_only", "none"])
def test_a_weight_bridge_carries_every_version_to_the_server(cli, serve, bridge):
    server, restarts = serve(key=KEY), bridge == "lora_restart"
    boot = asked(server, "health")["boot_id"]
    flags = {**FLAGS, "weight_bridge": bridge, "vllm_restart_interval": 2, "tuner_type": "lora"}
    flags |= {"force_restart": "true"} if restarts else {}
    logs = trained(cli, cli.finish("run", **flags, vllm_server_base_url=server.url), "http" if bridge == "none" else "")
    assert max(row["off_policy/max"] for row in logs) == 1
    server.wait_until_ready()
    assert sum(row.get("health/engine_restarts", 0) for row in logs) == restarts
    assert (asked(server, "health")["boot_id"] != boot) == restarts


def test_a_server_that_stays_away_ends_the_run_with_code_4_and_its_address(cli, serve):
    server = serve(key=KEY)
    away = {**FLAGS, "vllm_server_base_url": server.url, "vllm_server_timeout": 3, "max_steps": 1000}
    run = cli.start("run", **away)
    run.reach(1)
    err = run.ends(4, server.kill)
    (line,) = error_lines(err)
    assert f"server {server.url}: not healthy within 3 s" in line
    assert "swift rollout --model" in line
    assert "Traceback" not in err
