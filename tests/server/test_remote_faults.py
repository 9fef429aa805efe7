"""Servers that are restarted, hang, fail or never were, as the trainer's end sees them."""

import os
import re
import signal
import threading
import time
from dataclasses import replace

import psutil
import pytest
from oracle import PROMPT, ask, difference, load, run, with_adapter, with_noise
from processes import wait_for
from server_parts import KEY, PATIENT, SHORT, LocalServer, Server, link_to, many, own_backend, spec_of

from swift.errors import EngineDead, EngineError
from swift.rollout.engines import server_client
from swift.rollout.engines.events import Timeouts
from swift.rollout.engines.pool import EnginePool
from swift.rollout.engines.server_client import ServerClient
from swift.rollout.weights.policy import PolicyWeights


@pytest.fixture
def own_server(nano_folders, tmp_path):
    """A server process that a test may kill."""
    made = []

    def start(*words, **options):
        made.append(Server(nano_folders["llama"], tmp_path, *words, key=KEY, **options))
        return made[-1]

    yield start
    for one in made:
        if one.process.poll() is None:
            os.kill(one.process.pid, signal.SIGCONT)
            one.kill()
        assert one.left() == []


@pytest.fixture
def local_server(nano_folders):
    """A server of this process that a test may kill."""
    made = []

    def start(**options):
        made.append(LocalServer(nano_folders["llama"], key=KEY, **options))
        return made[-1]

    yield start
    for one in made:
        if one.thread.is_alive():
            one.kill()


def tokens(completions):
    return {one.request_id: one.token_ids for one in completions}


def stream_and(engine, at, act):
    """All of `many`; `act` is called once `at` have come."""
    done = []
    for completion in engine.sample(many()):
        done.append(completion)
        if len(done) == at:
            act()
    assert len(done) == len(many())
    return done


def test_a_restarted_server_gets_weights_and_adapter_again_and_each_request_once(local_server):
    server = local_server()
    model = with_noise(load(server.model), seed=7, scale=0.05)
    engine, port = server.engine(timeouts=PATIENT), server.port
    engine.load_weights(PolicyWeights(model), 1)
    expected = tokens(run(engine, many()))
    server.holding = True
    starting = []

    def restart():
        server.kill()
        starting.append(threading.Thread(target=lambda: starting.append(local_server(port=port))))
        starting[0].start()

    done = stream_and(engine, 1, restart)
    starting[0].join()
    assert tokens(done) == expected
    assert all(one.versions == [(1, 0, len(one.token_ids))] for one in done)
    assert (engine.counters.restarts, engine.version) == (1, 1)
    starting[1].kill()  # between two batches, too
    again = local_server(port=port)
    assert tokens(run(engine, many())) == expected
    one = run(engine, [ask("x", seed=3)])[0]
    assert difference(model, PROMPT, one.token_ids, one.logprobs) < 1e-5
    assert again.client().get("/info").json()["version"] == 1
    policy, adapter = with_adapter(model, seed=3)
    engine.load_adapter(adapter, 4)
    again.kill()
    again = local_server(port=port)
    one = run(engine, [ask("a", seed=1)])[0]
    assert difference(policy, PROMPT, one.token_ids, one.logprobs) < 1e-5
    again.kill()
    local_server(port=port)
    engine.load_weights(PolicyWeights(with_noise(model, seed=2, scale=0.05)), 5)  # the first call to the new server
    one = run(engine, [ask("a", seed=1)])[0]
    assert difference(model, PROMPT, one.token_ids, one.logprobs) < 1e-5
    engine.close()


@pytest.mark.long
@pytest.mark.slow
def test_an_engine_that_dies_behind_the_server_is_replaced_there(own_server):
    server = own_server("--vllm_data_parallel_size", "2")
    model = with_noise(load(server.model), seed=7, scale=0.05)
    engine = server.engine(timeouts=PATIENT)
    engine.load_weights(PolicyWeights(model), 1)
    expected = tokens(run(engine, many()))
    worker = max(server.family, key=lambda one: one.memory_info().rss)
    assert tokens(stream_and(engine, 3, worker.kill)) == expected
    # one that dies while nobody asks: /health names it, and it is replaced
    victim = max(psutil.Process(server.process.pid).children(recursive=True), key=lambda one: one.memory_info().rss)
    victim.kill()
    seen, deadline = set(), time.monotonic() + 60
    with server.client() as http:
        while 200 not in seen or 503 not in seen:
            reply = http.get("/health")
            if reply.status_code == 503:
                assert "(cpu:" in reply.json()["detail"]
                seen.add(503)
            elif 503 in seen:
                seen.add(200)
            assert time.monotonic() < deadline, seen
            time.sleep(0.02)
    server.family += psutil.Process(server.process.pid).children(recursive=True)
    assert tokens(run(engine, many())) == expected
    assert engine.counters.restarts == 2
    assert len(re.findall(r"engine \d \(cpu:\d\): lost \(.*it was replaced", server.text())) == 2
    engine.close()


HOLDS = """
    engine, hold = build(spec), Path({hold!r})
    advance, gave, kept = engine.advance, False, []

    def held():
        nonlocal gave, kept
        while gave and hold.exists():
            time.sleep(0.01)
        ended, kept = kept or advance(), []
        gave = bool(ended) and hold.exists()
        if gave:
            ended, kept = ended[:1], ended[1:]
        return ended

    engine.advance = held
    return engine
"""


@pytest.mark.slow
@pytest.mark.long
def test_a_server_that_hangs_is_given_up_in_a_bounded_time_and_one_that_comes_back_is_used(
    own_server, tmp_path, monkeypatch
):
    hold = tmp_path / "hold"  # a completion given while it is there is the last
    server = own_server(*own_backend(tmp_path, HOLDS.format(hold=str(hold))))
    engine = server.engine(timeouts=replace(PATIENT, reply_s=3.0))
    expected = tokens(run(engine, many()))
    (link,) = engine.engines

    def hang():
        os.kill(server.process.pid, signal.SIGSTOP)
        hold.unlink()

    def come_back():
        assert wait_for(lambda: link.replacing, 60.0)
        os.kill(server.process.pid, signal.SIGCONT)

    def hang_until_that_is_noticed():
        hang()
        threading.Thread(target=come_back).start()

    hold.touch()
    assert tokens(stream_and(engine, 1, hang_until_that_is_noticed)) == expected
    link.timeouts = SHORT
    monkeypatch.setattr(server_client, "BACKOFF_S", (0.1, 0.1))
    hold.touch()
    with pytest.raises(EngineDead, match=server.url):
        stream_and(engine, 1, hang)
    engine.close()


def test_a_pool_of_servers_goes_on_with_those_that_are_left(local_server, tmp_path, monkeypatch):
    monkeypatch.setattr(server_client, "BACKOFF_S", (0.1, 0.1, 0.1))
    folder = tmp_path / "weights"
    folder.mkdir()
    one, two = (local_server(weights_folder=folder) for _ in range(2))
    model = load(one.model)
    pool = EnginePool([link_to(server, timeouts=PATIENT, run_id="pool") for server in (one, two)])
    for version in range(1, 4):
        pool.load_weights(PolicyWeights(with_noise(model, seed=version, scale=0.05), bucket_bytes=50_000), version)
    expected = tokens(run(pool, many()))
    first = pool.engines[0]
    first.timeouts = SHORT
    one.holding = True
    assert tokens(stream_and(pool, 2, one.kill)) == expected
    assert wait_for(lambda: len(pool.engines) == 1, 30.0)  # it is looked for while the other one samples
    assert one.url in pool.health().detail
    two.kill()  # the files of the pool outlive the server that was given up
    two = local_server(weights_folder=folder, port=two.port)
    assert tokens(run(pool, many())) == expected
    assert pool.engines[0].sent_by == "disk"
    pool.load_weights(PolicyWeights(with_noise(model, seed=8, scale=0.05)), 4)
    last = run(pool, [ask("x", seed=3)])[0]
    assert difference(model, PROMPT, last.token_ids, last.logprobs) < 1e-5
    rest = pool.engines[0]
    rest.timeouts = SHORT
    two.kill()
    with pytest.raises(EngineDead):
        run(pool, many())
    pool.close()
    assert not list(folder.glob("run-*"))


def test_a_second_trainer_is_told_who_holds_the_server(server):
    first = server.engine()
    assert first.capabilities.name == "transformers"
    second = server.engine()
    started = time.monotonic()
    with pytest.raises(EngineError) as caught:
        second.capabilities  # noqa: B018
    assert f"held by run {first.engines[0].run_id}" in str(caught.value)
    assert f"process {os.getpid()}" in str(caught.value)
    assert time.monotonic() - started < 30
    first.close()
    assert second.capabilities.name == "transformers"
    second.close()


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/weights/begin", {"version": 1, "manifest": []}),
        ("/reset", {"run_id": "other"}),
        *((path, {}) for path in ("/pause", "/sleep", "/reset_prefix_cache", "/resume", "/v1/unload_lora_adapter")),
    ],
)
def test_what_another_run_may_not_do_is_refused_with_the_holders_name(server, http, engine, path, body):
    assert engine.capabilities.lora
    for headers in ({"X-Swift-Run": "other"}, {}):
        reply = http.post(path, json=body, headers=headers)
        assert reply.status_code == 409, reply.text
        assert engine.engines[0].run_id in reply.json()["error"]["message"]
    assert http.post("/v1/completions", json={"prompt": PROMPT, "max_tokens": 1}).status_code == 200


def test_no_server_at_all_is_one_line_with_address_seconds_and_what_to_do():
    quick = Timeouts(server_s=0.5, poll_s=0.1)
    engine = EnginePool([ServerClient("http://127.0.0.1:9", spec=spec_of("/models/mine"), timeouts=quick)])
    started = time.monotonic()
    with pytest.raises(EngineError) as caught:
        engine.capabilities  # noqa: B018
    assert time.monotonic() - started < 30
    (line,) = caught.value.problems
    for part in ("http://127.0.0.1:9", "0.5 s", "swift rollout --model /models/mine --host 127.0.0.1 --port 9"):
        assert part in line
    assert caught.value.exit_code == 4
    engine.close()


def test_a_wrong_key_is_said_at_once_and_not_shown(server):
    engine = ServerClient(server.url, spec=spec_of(server.model), api_key="wrong one", timeouts=SHORT)
    with pytest.raises(EngineError, match="--vllm_server_api_key") as caught:
        engine.capabilities  # noqa: B018
    assert "wrong one" not in str(caught.value)
    engine.close()
