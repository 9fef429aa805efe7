"""A Ray cluster that exists already: engines join it with its token, and leave it running."""

import os
import re
import signal
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
from actor_parts import PATHS
from processes import wait_for
from scripted_engine import ScriptedEngine

from swift.errors import ConfigError
from swift.rollout.engines import cluster, guard
from swift.rollout.placement import check_transport
from swift.trainers.engines import check_in_flight

pytestmark = pytest.mark.slow

JOIN = """
import sys
from pathlib import Path
from swift.rollout.engines import cluster
if __name__ == "__main__":
    shared = cluster.use(sys.argv[1], Path(sys.argv[2]))
    from actor_parts import working_pool
    shared.users += 1
    places = cluster.places(shared, [1, 1], [("cpu:0",), ("cpu:1",)])
    working_pool(Path(sys.argv[3]), [shared, shared], places).close()
    print("done", flush=True)
"""


@pytest.mark.long
def test_engines_join_a_cluster_with_its_token_and_leave_it_running():
    tmp_path = Path(tempfile.mkdtemp(prefix="ray-"))  # short: Ray puts sockets there
    token = tmp_path / "token"
    token.write_text("0123456789abcdef0123456789abcdef")
    environment = {
        **os.environ, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token), "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "PYTHONPATH": PATHS,
    }  # fmt: skip
    head = [
        Path(sys.executable).with_name("ray"), "start", "--head", "--block", "--num-cpus=2",
        "--include-dashboard=false", "--node-ip-address=127.0.0.1", "--port=26379", f"--temp-dir={tmp_path}",
    ]  # fmt: skip
    started = subprocess.Popen(head, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        assert any("Ray runtime started" in line for line in started.stdout)
        plain = {name: value for name, value in environment.items() if not name.startswith("RAY_AUTH")}
        command = [sys.executable, "-c", JOIN, "127.0.0.1:26379", str(token), str(tmp_path)]
        joined = subprocess.run(command, capture_output=True, text=True, timeout=150, env=plain, check=False)
        assert joined.stdout.endswith("done\n"), joined.stderr[-3000:]
        assert started.poll() is None
    finally:
        started.terminate()
        started.wait(30)
        started.stdout.close()


HEAD = """
import os, sys, tempfile
from pathlib import Path
from swift.rollout.engines import cluster
head = cluster.start_head(cluster.NodeSpec("node 0", "127.0.0.2", ("cpu:1",), 0))
print(head.address, head.token, flush=True)
sys.stdin.readline()
from actor_parts import working_pool
head.nodes = ("node 0", "node 1")
uses = [cluster.use(), cluster.use()]
places = cluster.places(head, [1, 1], [("cpu:1",), ("cpu:1",)])
pool = working_pool(Path(tempfile.mkdtemp()), uses, places)
pids = [client.instance.pid for client in pool.engines]
variables = [word for pid in pids for word in Path(f"/proc/{pid}/environ").read_text().split(chr(0))]
print(*sorted({word for word in variables if word.startswith(cluster.MARKER + "=")}), flush=True)
sys.stdin.readline()
"""
NODE = """
import sys
from swift.rollout.engines import cluster
node = cluster.start_node(sys.argv[1], sys.argv[2], cluster.NodeSpec("node 1", "127.0.0.3", ("cpu:1",), 0), 60.0)
print(node.folder, flush=True)
sys.stdin.readline()
"""


DRIVER = """
import os, sys, time
import psutil
from swift.rollout.engines import cluster
cluster.use()
import ray
own = [one for one in psutil.process_iter(["ppid", "cmdline"]) if one.info["ppid"] == os.getpid()]
found = next(one for one in own if sys.argv[1] in " ".join(one.info["cmdline"] or ()))
getattr(found, sys.argv[2])()
while True:
    kept = ray.put(bytes(2_000_000))
    time.sleep(0.1)
"""


def without_ray():
    """The environment of a process that is in no cluster."""
    return {name: value for name, value in os.environ.items() if not name.startswith("RAY_")} | {"PYTHONPATH": PATHS}


@pytest.fixture
def two_nodes():
    """Processes that form a cluster of two nodes; ended after the test."""
    started = []

    def start(code, *words):
        process = subprocess.Popen(
            [sys.executable, "-c", code, *words],
            env=without_ray(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def said(process):
    line = process.stdout.readline()
    assert line, process.stderr.read()[-3000:]
    return line.split()


def go_on(process):
    process.stdin.write("\n")
    process.stdin.flush()


def alive(folders):
    """Processes of these clusters, and what is left of their folders."""
    processes = [pid for folder in folders for pid in guard.marked(f"{cluster.MARKER}={folder}".encode())]
    return processes + [folder for folder in folders if Path(folder).exists()]


@pytest.mark.long
def test_nodes_form_one_cluster_with_an_engine_on_each_and_leave_nothing(two_nodes):
    head = two_nodes(HEAD)
    address, token = said(head)
    wrong = two_nodes(NODE, address, "f" * 32)
    node = two_nodes(NODE, address, token)
    (folder,) = said(node)
    go_on(head)
    owners = [owner.partition("=")[2] for owner in said(head)]
    assert len(owners) == 2
    assert folder in owners
    wrong.wait(90)
    assert "has not joined the Ray cluster" in wrong.stderr.read()
    node.kill()
    head.kill()
    assert wait_for(lambda: not alive(owners), 10.0)


@pytest.mark.long
@pytest.mark.parametrize(
    ("process", "how", "name"),
    [
        ("raylet/raylet", "terminate", "raylet"),
        ("raylet/raylet", "kill", "raylet"),
        ("gcs_server", "kill", "GCS server"),
    ],
)
def test_a_process_that_ray_ends_does_not_end_without_a_word(process, how, name):
    words = [sys.executable, "-c", DRIVER, process, how]
    ran = subprocess.run(words, env=without_ray(), capture_output=True, text=True, timeout=300, check=False)
    assert ran.returncode == 1
    lines = [line for line in ran.stderr.splitlines() if line.startswith("swift: ")]
    assert len(lines) == 1, ran.stderr
    (line,) = lines
    assert line.startswith(f"swift: error: ray: its {name} has ended (killed, or no memory was left), and Ray ended")
    assert line.endswith("resume from the last checkpoint (--resume_from_checkpoint last)")


LEFT = """
import os, tempfile
from pathlib import Path
import psutil
from actor_parts import scripted_engine_in_actor
from swift.errors import EngineDead
pool = scripted_engine_in_actor(Path(tempfile.mkdtemp()), timeouts={"start_s": 300.0})
(client,) = pool.engines
client.connect()
(raylet,) = [one for one in psutil.Process().children(recursive=True) if one.name() == "raylet"]
raylet.terminate()
raylet.wait(30)
try:
    client.recover(client.instance, "ended")
except EngineDead as error:
    print(error.problems[0], flush=True)
os._exit(0)
"""


@pytest.mark.long
def test_no_engine_is_waited_for_that_has_no_place_any_more():
    words = [sys.executable, "-c", LEFT]
    ran = subprocess.run(words, env=without_ray(), capture_output=True, text=True, timeout=150, check=False)
    assert "ray: its raylet has ended (terminated, or its node is taken away)" in ran.stdout, ran.stderr[-2000:]


def test_a_process_without_the_marker_is_remembered_when_its_parent_has_ended():
    """As Ray's agents are, which write their title over their environment."""
    script = "env -i sleep 60 >&- 2>&- & echo $!; read x"
    parent = subprocess.Popen(["sh", "-c", script], env={**os.environ, "MARK": "1"}, stdin=-1, stdout=-1, text=True)
    child = int(parent.stdout.readline())
    known = guard.descendants(os.getpid(), b"MARK=1", {})
    assert set(known) == {parent.pid, child}
    parent.communicate("\n")
    known = guard.descendants(os.getpid(), b"MARK=1", known)
    assert set(known) == {child}
    os.kill(child, signal.SIGKILL)
    assert wait_for(lambda: not guard.descendants(os.getpid(), b"MARK=1", known))


def test_a_guard_that_finishes_ends_processes_without_the_marker_too():
    script = "env -i sleep 60 >&- 2>&- & echo $!; wait"
    parent = subprocess.Popen(["sh", "-c", script], env={**os.environ, "MARK": "2"}, stdout=-1, text=True)
    child = int(parent.stdout.readline())
    watch = guard.start("MARK=2")
    assert wait_for(lambda: signal.SIGUSR2 in caught(watch.pid))
    guard.finish(watch, "MARK=2")
    assert wait_for(lambda: not guard.start_time(child))
    parent.wait(10)
    parent.stdout.close()


def caught(pid):
    """Signals that a process handles."""
    mask = int(re.search(r"SigCgt:\s*(\w+)", Path(f"/proc/{pid}/status").read_text())[1], 16)
    return {number for number in signal.valid_signals() if mask >> (number - 1) & 1}


@pytest.mark.long
def test_a_local_cluster_asks_for_its_token_even_if_ray_was_imported_without_one():
    """As vLLM does; Ray reads its environment at that moment."""
    code = """
import ray
from ray._raylet import AuthenticationMode, get_authentication_mode
assert get_authentication_mode() != AuthenticationMode.TOKEN
from swift.rollout.engines import cluster
one = cluster.use()
assert get_authentication_mode() == AuthenticationMode.TOKEN
assert ray.get(ray.remote(lambda: 3).remote()) == 3
one.close()
"""
    command = [sys.executable, "-c", code]
    found = subprocess.run(command, check=False, env=without_ray(), capture_output=True, text=True, timeout=120)
    assert found.returncode == 0, found.stderr


@pytest.mark.parametrize(
    ("mode", "settings", "flag"),
    [
        ("dedicated", {"weight_transport": "http"}, "--weight_transport: http"),
        ("dedicated", {"weight_transport": "disk"}, "--weight_transport: disk"),
        ("server", {"weight_transport": "object_store"}, "--weight_transport: object_store"),
        ("colocate", {"weight_transport": "broadcast"}, "--weight_transport: broadcast"),
        ("server", {"ray_address": "auto"}, "--ray_address: auto"),
        ("dedicated", {"ray_address": "10.0.0.1:6379"}, "--ray_token_file"),
    ],
)
def test_what_does_not_fit_the_placement_is_refused(mode, settings, flag):
    with pytest.raises(ConfigError, match=flag):
        check_transport(mode, **{"weight_transport": "auto", "ray_address": None, "ray_token_file": None, **settings})


@pytest.mark.parametrize(
    ("mode", "way"),
    [
        ("dedicated", "object_store"), ("dedicated", "broadcast"), ("server", "disk"),
        ("server", "http"), ("server", "broadcast"), ("colocate", "auto"),
    ],
)  # fmt: skip
def test_what_fits_is_accepted(mode, way):
    check_transport(mode, weight_transport=way, ray_address=None, ray_token_file=None)


def test_in_flight_updates_need_an_engine_that_can_be_paused():
    engine = ScriptedEngine()
    check_in_flight(engine)
    engine.capabilities = replace(engine.capabilities, in_flight_updates=False)
    with pytest.raises(ConfigError, match="--in_flight_updates: true: the engine scripted"):
        check_in_flight(engine)
