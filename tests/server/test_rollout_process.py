"""The process of `swift rollout`: how it starts, what it refuses, and that nothing of it is left."""

import os
import signal
import socket
import threading

import httpx
import psutil
import pytest
from oracle import PROMPT, ask, difference, load, run, with_noise
from processes import alive, wait_for
from rollout_process import END_LIMIT_S, START_LIMIT_S
from server_parts import KEY, Server, own_backend

from swift.cli.main import main
from swift.rollout.weights.policy import PolicyWeights


def lines(capsys):
    return [line for line in capsys.readouterr().err.splitlines() if line.startswith("swift: error: ")]


def refuses(port):
    """Whether nobody listens there."""
    try:
        socket.create_connection(("127.0.0.1", port), timeout=2).close()
    except OSError:
        return True
    return False


@pytest.mark.slow
@pytest.mark.long
def test_a_signal_lets_requests_end_and_leaves_no_process(nano_folders, tmp_path):
    server = Server(nano_folders["qwen2"], tmp_path, "--vllm_data_parallel_size", "2", key=KEY)
    assert len(server.family) >= 2
    assert f"ready {server.url} model={server.model} weight_version=0" in server.text().splitlines()
    answers = []

    def long_request():
        body = {"prompt": PROMPT, "max_tokens": 100, "n": 8, "ignore_eos": True}
        with server.client() as http:
            answers.append(http.post("/v1/completions", json=body))

    thread = threading.Thread(target=long_request)
    thread.start()
    with server.client() as http:
        while not http.get("/info").json()["running"]:
            assert not answers
    for process in [server.process, *server.family, server.process]:  # as a terminal that closes
        os.kill(process.pid, signal.SIGHUP)
    thread.join(END_LIMIT_S)
    assert answers[0].status_code == 200
    assert len(answers[0].json()["choices"]) == 8
    assert server.process.wait(END_LIMIT_S) == 0
    assert server.left() == []
    assert "Traceback" not in server.text()
    assert refuses(server.port)


@pytest.mark.slow
def test_a_second_signal_that_insists_does_not_wait(nano_folders, tmp_path):
    server = Server(nano_folders["qwen2"], tmp_path)
    answers = []

    def long_request():
        body = {"prompt": PROMPT, "max_tokens": 400, "n": 64, "ignore_eos": True}
        with server.client() as http, pytest.raises(httpx.HTTPError):
            answers.append(http.post("/v1/completions", json=body).raise_for_status())

    thread = threading.Thread(target=long_request)
    thread.start()
    with server.client() as http:
        assert wait_for(lambda: http.get("/info").json()["running"])
    os.kill(server.process.pid, signal.SIGTERM)
    assert wait_for(lambda: refuses(server.port)), "two signals at once are one"
    os.kill(server.process.pid, signal.SIGTERM)
    assert server.process.wait(END_LIMIT_S) == 0
    thread.join(END_LIMIT_S)
    assert not answers
    assert "Traceback" not in server.text()


@pytest.mark.slow
@pytest.mark.long
def test_engines_end_with_a_server_that_is_killed(nano_folders, tmp_path):
    server = Server(nano_folders["qwen2"], tmp_path, "--vllm_data_parallel_size", "2")
    assert server.family
    server.kill()
    assert server.left() == []


HANGS = """
    if spec.tensor_parallel_size > 1:  # as vLLM's, whose title is where its environment was
        worker = (  # vLLM's has imported for seconds by then
            "import time, setproctitle; time.sleep(1.5); setproctitle.setproctitle('title' * 1000); time.sleep(1000)"
        )
        subprocess.Popen([sys.executable, "-c", worker])
        time.sleep(3)
    engine = build(replace(spec, tensor_parallel_size=1, devices=spec.devices[:1]))
    submit = engine.submit

    def submit_or_hang(request):
        if "bad" in request.request_id:
            time.sleep(1000)
        submit(request)

    engine.submit = submit_or_hang
    return engine
"""
HANGING_REQUEST = {"prompts": [PROMPT], "requests": [{"id": "bad", "prompt": 0, "sampling": {"max_new_tokens": 4}}]}


def hanging_server(model, folder, *words, **options):
    """A server whose engine `HANGING_REQUEST` hangs; it may start again once."""
    limits = ("--stall_timeout", "2", "--engine_restarts", "1")
    return Server(model, folder, *own_backend(folder, HANGS), *words, *limits, **options)


@pytest.mark.slow
@pytest.mark.long
def test_processes_of_a_hung_engine_end_before_the_server_starts_again(nano_folders, tmp_path):
    server = hanging_server(nano_folders["qwen2"], tmp_path, "--vllm_tensor_parallel_size", "2")
    for last in (False, True):
        children = [one for one in psutil.Process(server.process.pid).children() if alive(one.pid)]
        titled = [one for one in children if one.cmdline()[0].startswith("title")]
        assert len(titled) == 1
        with server.client() as http:
            http.post("/infer/", json=HANGING_REQUEST)
        assert wait_for(lambda: not alive(titled[0].pid), END_LIMIT_S), f"{last}: its memory is needed"  # noqa: B023
        if not last:
            with server.client() as http:
                http.get("/info")
    assert server.process.wait(END_LIMIT_S) == 4


@pytest.mark.long
@pytest.mark.slow
def test_a_hung_engine_becomes_a_new_process_at_the_same_port_until_restarts_are_used_up(nano_folders, tmp_path):
    server = hanging_server(nano_folders["qwen2"], tmp_path, key=KEY)
    assert server.family == [], "no Ray, no other process"
    engine, model = server.engine(), with_noise(load(server.model), seed=1, scale=0.05)
    engine.load_weights(PolicyWeights(model), 1)
    done = run(engine, [ask("a"), ask("b", seed=2)])
    boot = server.client().get("/info").json()["boot_id"]
    with server.client() as other:  # somebody else's request hangs it, and the trainer's are sampled nevertheless
        reply = other.post("/infer/", json=HANGING_REQUEST)
    assert "no progress for 2 s; its thread is in submit_or_hang" in reply.text
    assert [one.token_ids for one in run(engine, [ask("a"), ask("b", seed=2)])] == [one.token_ids for one in done]
    assert difference(model, PROMPT, done[0].token_ids, done[0].logprobs) < 1e-5
    info = server.client().get("/info").json()
    assert (info["version"], info["boot_id"] != boot, engine.counters.restarts) == (1, True, 1)
    assert "no progress for 2 s; its thread is in submit_or_hang" in server.text()
    assert "the server starts again" in server.text()
    with server.client() as other:
        other.post("/infer/", json=HANGING_REQUEST)
    assert server.process.wait(END_LIMIT_S) == 4
    assert "swift: error: engine: no progress for 2 s" in server.text()
    engine.close()


KEEPS = """
    try:
        os.kill(os.getpid(), signal.SIGTERM)
    except BaseException:
        {kept}
    return build(spec)
"""


@pytest.mark.parametrize("kept", ["pass", "raise RuntimeError('no cluster') from None"])
@pytest.mark.slow
def test_a_signal_that_a_library_keeps_ends_the_start(nano_folders, tmp_path, kept):
    server = Server(nano_folders["qwen2"], tmp_path, *own_backend(tmp_path, KEEPS.format(kept=kept)), wait=False)
    assert server.process.wait(END_LIMIT_S) == 0
    assert "swift: stopped before it was ready" in server.text()


WAITS = """
    Path({begun!r}).touch()
    while not Path({go_on!r}).exists():
        time.sleep(0.01)
    return build(spec)
"""


@pytest.mark.long
@pytest.mark.slow
def test_a_signal_during_the_start_leaves_no_process(nano_folders, tmp_path):
    begun, go_on = tmp_path / "begun", tmp_path / "go-on"
    waiting = own_backend(tmp_path, WAITS.format(begun=str(begun), go_on=str(go_on)))
    server = Server(nano_folders["qwen2"], tmp_path, *waiting, "--vllm_data_parallel_size", "2", wait=False)
    assert wait_for(lambda: begun.exists() or server.process.poll() is not None, START_LIMIT_S)
    server.family = psutil.Process(server.process.pid).children(recursive=True)
    server.process.send_signal(signal.SIGTERM)
    go_on.touch()  # if a library keeps the signal, the start is completed
    assert server.process.wait(2 * END_LIMIT_S) == 0, server.text()
    assert server.left() == []
    assert "stopped before it was ready" in server.text()
    assert "Traceback" not in server.text()


def test_a_port_in_use_is_named_before_a_model_is_loaded(server, nano_folders, capsys):
    assert main(["rollout", "--model", str(nano_folders["qwen2"]), "--use_vllm", "false", "--port", str(server.port),
                 "--dry_run", "true"]) == 3  # fmt: skip
    (line,) = lines(capsys)
    assert f"--port: {server.port}: cannot be used on 127.0.0.1 (Address already in use)" in line


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--vllm_tensor_parallel_size 3", "does not divide the 4 attention heads of the model"),
        ("--vllm_data_parallel_size 3 --cpu_devices 2", "--vllm_data_parallel_size: 3: 3 engines of 1 devices need 3"),
        ("--vllm_max_model_len 5000", "--vllm_max_model_len: 5000: longer than the model's context of 1024"),
        ("--weights_folder /nowhere/at/all", "--weights_folder: /nowhere/at/all: is no folder"),
        ("--host no.such.host.invalid --api_key x", "--host: no.such.host.invalid: no such address"),
        (f"--host {'a' * 70} --api_key x", "aaa: no such address"),
        ("--host 192.0.2.1 --api_key x", "--host: 192.0.2.1: no such address here (Cannot assign requested address)"),
        ("--infer_backend vlm", "--infer_backend: vlm: no such backend; nearest: vllm"),
    ],
)
def test_wrong_settings_are_named_before_weights_are_loaded(nano_folders, capsys, monkeypatch, words, said):
    monkeypatch.delenv("SWIFT_API_KEY", raising=False)
    more = [] if "--infer_backend" in words else ["--use_vllm", "false"]
    command = ["rollout", "--model", str(nano_folders["qwen2"]), "--port", "0", "--dry_run", "true", *more]
    assert main([*command, *words.split()]) == 2
    assert any(said in line for line in lines(capsys))


def test_the_dry_run_shows_engines_and_warns_of_a_server_without_a_key(nano_folders, capsys):
    words = ["--host", "0.0.0.0", "--allow_unauthenticated", "true", "--vllm_data_parallel_size", "2"]
    command = ["rollout", "--model", str(nano_folders["qwen2"]), "--use_vllm", "false", "--port", "0"]
    assert main([*command, "--dry_run", "true", *words]) == 0
    out, err = capsys.readouterr()
    assert "transformers, 2 engines on cpu:0, cpu:1" in out
    assert "warning: --allow_unauthenticated" in err


def test_the_key_comes_from_the_environment_and_is_not_shown(nano_folders, capsys, monkeypatch):
    monkeypatch.setenv("SWIFT_API_KEY", "not-for-everybody")
    command = ["rollout", "--model", str(nano_folders["qwen2"]), "--use_vllm", "false", "--port", "0"]
    assert main([*command, "--dry_run", "true", "--host", "0.0.0.0"]) == 0
    out, err = capsys.readouterr()
    assert "transformers, 1 engine" in out
    assert "not-for-everybody" not in out + err


@pytest.mark.slow
@pytest.mark.long
def test_a_server_whose_engines_may_not_be_started_again_ends_with_code_4(nano_folders, tmp_path):
    server = Server(nano_folders["qwen2"], tmp_path, "--engine_restarts", "0", "--vllm_data_parallel_size", "2")
    for worker in [one for one in server.family if "EngineActor" in " ".join(one.cmdline())]:
        worker.kill()
    assert server.process.wait(END_LIMIT_S) == 4
    (line,) = [line for line in server.text().splitlines() if line.startswith("swift: error: ")]
    assert "(cpu:" in line
    assert "--engine_restarts 0 within an hour are used up" in line
    assert "Traceback" not in server.text()
    assert server.left() == []


@pytest.mark.long
@pytest.mark.slow
def test_a_vllm_server_samples_what_the_trainer_would(tmp_path, monkeypatch):
    pytest.importorskip("vllm")
    from swift.models.tiny import build_tiny

    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    server = Server(
        build_tiny(tmp_path / "model", size="tiny"), tmp_path, "--use_vllm", "true", "--vllm_enforce_eager", "true",
        "--vllm_max_model_len", "256", key=KEY,
    )  # fmt: skip
    model, engine = load(server.model), server.engine()
    for version in (1, 2):
        with_noise(model, seed=version, scale=0.05)
        engine.load_weights(PolicyWeights(model), version)
        for one in run(engine, [ask(f"g/{i}", seed=i) for i in range(8)]):
            assert one.versions == [(version, 0, len(one.token_ids))]
            assert difference(model, PROMPT, one.token_ids, one.logprobs) < 1e-5
    engine.close()
    assert server.stop() == 0
    assert server.left() == []
