"""Servers that are restarted, hang, fail or never were, as the trainer's end sees them."""

import json
import os
import signal
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import psutil
import pytest
from server_parts import KEY, PROMPT, LocalServer, Server, ask, gap, link_to, load, run, spec_of, with_noise

from swift.errors import EngineDead, EngineError, RequestRefused
from swift.rollout.engines import dispatch, remote, wire
from swift.rollout.engines.pool import EnginePool
from swift.rollout.engines.remote import server_engine
from swift.rollout.engines.transport import Lost, Timeouts
from swift.rollout.weights.policy import PolicyWeights

SHORT = Timeouts(server_s=2.0, poll_s=0.2, reply_s=3.0, heartbeat_s=0.5)
PATIENT = Timeouts(server_s=120.0, poll_s=0.2, reply_s=5.0, heartbeat_s=1.0)


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


def many(count=24):
    return [ask(f"g{i // 4}/{i}", [*PROMPT, i // 4], seed=i, max_new_tokens=200) for i in range(count)]


def tokens(completions):
    return {one.request_id: one.token_ids for one in completions}


def stream_and(engine, at, act):
    """All of `many`; `act` is called once `at` have come."""
    done = []
    for request in many():
        engine.submit(request)
    for completion in engine.stream():
        done.append(completion)
        if len(done) == at:
            act()
    assert len(done) == len(many())
    return done


def test_a_restarted_server_gets_weights_and_adapter_again_and_each_request_once(local_server):
    from test_rollout_weights import adapted

    server = local_server()
    model = with_noise(load(server.model), 7)
    engine, port = server.engine(timeouts=PATIENT), server.port
    engine.load_weights(PolicyWeights(model), 1)
    expected = tokens(run(engine, many()))
    starting = []

    def restart():
        server.kill()
        starting.append(threading.Thread(target=lambda: starting.append(local_server(port=port))))
        starting[0].start()

    done = stream_and(engine, 3, restart)
    starting[0].join()
    assert tokens(done) == expected
    assert all(one.versions == [(1, 0, len(one.token_ids))] for one in done)
    assert (engine.counters.restarts, engine.health().version) == (1, 1)
    starting[1].kill()  # between two batches, too
    again = local_server(port=port)
    assert tokens(run(engine, many())) == expected
    one = run(engine, [ask("x", seed=3)])[0]
    assert gap(model, PROMPT, one.token_ids, one.logprobs) < 1e-5
    assert again.client().get("/info").json()["version"] == 1
    policy, adapter = adapted(model, seed=3)
    engine.load_adapter(adapter, 4)
    again.kill()
    again = local_server(port=port)
    one = run(engine, [ask("a", seed=1)])[0]
    assert gap(policy, PROMPT, one.token_ids, one.logprobs) < 1e-5
    again.kill()
    local_server(port=port)
    engine.load_weights(PolicyWeights(with_noise(model, 2)), 5)  # the first call to the new server
    one = run(engine, [ask("a", seed=1)])[0]
    assert gap(model, PROMPT, one.token_ids, one.logprobs) < 1e-5
    engine.close()


@pytest.mark.slow
def test_an_engine_that_dies_behind_the_server_is_replaced_there(own_server):
    server = own_server("--vllm_data_parallel_size", "2")
    model = with_noise(load(server.model), 7)
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
                assert "engine 0" in reply.json()["detail"] or "process" in reply.json()["detail"]
                seen.add(503)
            elif 503 in seen:
                seen.add(200)
            assert time.monotonic() < deadline, seen
            time.sleep(0.02)
    server.family += psutil.Process(server.process.pid).children(recursive=True)
    assert tokens(run(engine, many())) == expected
    assert engine.counters.restarts == 2
    engine.close()


@pytest.mark.slow
def test_a_server_that_hangs_is_given_up_in_a_bounded_time_and_one_that_comes_back_is_used(own_server):
    server = own_server()
    engine = server.engine(timeouts=PATIENT)
    expected = tokens(run(engine, many()))

    def hang_for_a_while():
        os.kill(server.process.pid, signal.SIGSTOP)
        threading.Timer(8.0, os.kill, (server.process.pid, signal.SIGCONT)).start()

    assert tokens(stream_and(engine, 2, hang_for_a_while)) == expected
    (link,) = engine.engines
    link.timeouts = link.transport.timeouts = SHORT
    for request in many():
        engine.submit(request)
    started = 0.0
    with pytest.raises(EngineDead) as caught:
        for _ in engine.stream():
            if not started:
                os.kill(server.process.pid, signal.SIGSTOP)
                started = time.monotonic()
    assert time.monotonic() - started < 20
    assert server.url in str(caught.value)
    engine.close()


def test_a_pool_of_servers_goes_on_with_those_that_are_left(local_server, tmp_path):
    folder = tmp_path / "weights"
    folder.mkdir()
    one, two = (local_server(weights_folder=folder) for _ in range(2))
    model = load(one.model)
    pool = EnginePool([link_to(server, timeouts=PATIENT, run_id="pool") for server in (one, two)])
    for version in range(1, 4):
        pool.load_weights(PolicyWeights(with_noise(model, version), bucket_bytes=50_000), version)
    expected = tokens(run(pool, many()))
    first = pool.engines[0]
    first.timeouts = first.transport.timeouts = SHORT
    assert tokens(stream_and(pool, 2, one.kill)) == expected
    deadline = time.monotonic() + 30
    while len(pool.engines) == 2:  # it is looked for while the other one samples
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert one.url in pool.health().detail
    two.kill()  # the files of the pool outlive the server that was given up
    two = local_server(weights_folder=folder, port=two.port)
    assert tokens(run(pool, many())) == expected
    assert pool.engines[0].sent_by == "disk"
    pool.load_weights(PolicyWeights(with_noise(model, 8)), 4)
    last = run(pool, [ask("x", seed=3)])[0]
    assert gap(model, PROMPT, last.token_ids, last.logprobs) < 1e-5
    rest = pool.engines[0]
    rest.timeouts = rest.transport.timeouts = SHORT
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
    assert f"held by run {first.engines[0].transport.run_id}" in str(caught.value)
    assert f"process {os.getpid()}" in str(caught.value)
    assert time.monotonic() - started < 10
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
        assert engine.engines[0].transport.run_id in reply.json()["error"]["message"]
    assert http.post("/v1/completions", json={"prompt": PROMPT, "max_tokens": 1}).status_code == 200


def test_no_server_at_all_is_one_line_with_address_seconds_and_what_to_do():
    quick = Timeouts(server_s=0.5, poll_s=0.1)
    engine = EnginePool([server_engine("http://127.0.0.1:9", spec=spec_of("/models/mine"), timeouts=quick)])
    started = time.monotonic()
    with pytest.raises(EngineError) as caught:
        engine.capabilities  # noqa: B018
    assert time.monotonic() - started < 5
    (line,) = caught.value.problems
    for part in ("http://127.0.0.1:9", "0.5 s", "swift rollout --model /models/mine --host 127.0.0.1 --port 9"):
        assert part in line
    assert caught.value.exit_code == 4
    engine.close()


def test_a_wrong_key_is_said_at_once_and_not_shown(server):
    engine = server_engine(server.url, spec=spec_of(server.model), api_key="wrong one", timeouts=SHORT)
    with pytest.raises(EngineError, match="--vllm_server_api_key") as caught:
        engine.capabilities  # noqa: B018
    assert "wrong one" not in str(caught.value)
    engine.close()


# --- a server that fails, without any engine --------------------------------------------------------------------------


class Fake(BaseHTTPRequestHandler):
    """Says it is well, and then does what `script` says with POST /infer/."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def answer(self, status, body, kind="application/json"):
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self):
        self.answer(200, json.dumps(self.server.info).encode())

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])) or b"{}")
        if self.path.startswith("/infer"):
            self.server.calls += 1
            self.server.script(self, body)
        elif self.path == "/reset" and self.server.held is not None:
            self.answer(409, self.server.held)
        else:
            self.answer(200, b'{"asleep": "", "version": 0, "released": true}')


@pytest.fixture
def fake(server, http):
    """Makes fake servers that look like the real one."""
    made = []

    def make(script):
        one = ThreadingHTTPServer(("127.0.0.1", 0), Fake)
        one.daemon_threads = True
        one.info = {**http.get("/info").json(), "alive": True, "weights_folder": None}
        one.calls, one.script, one.held = 0, script, None
        threading.Thread(target=one.serve_forever, daemon=True).start()
        made.append(one)
        return one, f"http://127.0.0.1:{one.server_address[1]}"

    yield make
    for one in made:
        one.shutdown()
        one.server_close()


@pytest.fixture
def no_backoff(monkeypatch):
    monkeypatch.setattr(remote, "BACKOFF_S", (0.01, 0.01, 0.01))


def said(body, *, end=True, count=None, times=1, **fields):
    """The reply to POST /infer/ of a server that samples one token for each request."""
    lines = [
        {
            "event": "completion",
            "completion": {
                "request_id": entry["id"],
                "token_ids": [1],
                "logprobs": [-0.5],
                "finish_reason": "length",
                "text": "",
                "versions": [[0, 0, 1]],
                **fields,
            },
        }
        for entry in body["requests"][:count]
    ]
    return "".join(json.dumps(line) + "\n" for line in [*lines * times, *[{"event": "end"}] * end]).encode()


def alone(server, url, timeouts=SHORT):
    """The engine behind a fake of this server."""
    return EnginePool([server_engine(url, spec=spec_of(server.model), timeouts=timeouts)])


def alone_is_left(pool, server):
    """The other one is given up after some more failures; no request suffers by them."""
    deadline = time.monotonic() + 30
    while [one.name for one in pool.engines] != [f"server {server.url}"]:
        assert time.monotonic() < deadline
        assert len(run(pool, many(8))) == 8


def always_500(handler, _):
    handler.answer(500, b"oops")


def test_failures_without_progress_are_bounded(server, fake, no_backoff):
    one, url = fake(always_500)
    engine = alone(server, url)
    with pytest.raises(EngineDead, match="HTTP 500"):
        run(engine, [ask("a")])
    assert one.calls == len(remote.BACKOFF_S) + 1
    assert not engine.health().alive
    engine.close()


HELD = {"message": "server: held by run x", "type": "", "code": 409, "kind": "held", "expires_in_s": 50.0}


@pytest.mark.parametrize(
    ("info", "held", "said"),
    [
        ({}, None, "HTTP 500"),
        ({"boot_id": "another", "dtype": "bfloat16"}, None, "it computes in bfloat16"),
        ({"run_id": "x"}, json.dumps({"error": HELD}).encode(), "held by run x"),
    ],
    ids=["fails", "came back as another", "taken by another run"],
)
def test_a_pool_quarantines_a_server_that_cannot_be_used(server, fake, no_backoff, info, held, said):
    def changed(handler, body):
        one.held, one.info = held, {**one.info, **info}
        always_500(handler, body)

    one, url = fake(changed)
    pool = EnginePool([server_engine(url, spec=spec_of(server.model), timeouts=SHORT), link_to(server)])
    assert len(run(pool, many(8))) == 8
    alone_is_left(pool, server)
    assert url in pool.health().detail and said in pool.health().detail
    pool.close()


def test_a_call_that_waits_in_vain_says_for_whose_requests(server, fake):
    one, url = fake(lambda handler, _: time.sleep(1.5))
    one.info = {**one.info, "running_of": {"run mine": 2, "clients without a run": 3}}
    engine = server_engine(url, run_id="mine", timeouts=Timeouts(reply_s=0.3))
    with pytest.raises(Lost) as caught:
        engine.transport._get("POST", "/infer/", 0.5, json={})
    assert str(caught.value) == (
        "no answer to /infer/ within 0.5 s; it waits for requests of others: 3 of clients without a run"
    )
    engine.close()


@pytest.mark.parametrize("when", ["at once", "while others run"])
def test_a_request_that_the_server_does_not_take_costs_no_other(server, fake, when):
    def refuse(handler, body):
        bad = [entry["id"] for entry in body["requests"]].index("bad") if one.calls == 1 else None
        if bad is None:
            handler.answer(200, said(body))
        elif when == "at once":
            handler.answer(
                422, json.dumps(wire.error_body(RequestRefused("bad", "request: bad: is odd"), 422)).encode()
            )
        else:
            del body["requests"][bad]
            error = wire.error_body(RequestRefused("7:bad", "request: 7:bad: is odd"), 500)
            line = json.dumps({"event": "failed", "ids": ["bad"], "fatal": False, **error}).encode()
            handler.answer(200, line + b"\n" + said(body))

    one, url = fake(refuse)
    pool = alone(server, url)
    for request in [*many(4), ask("bad")]:
        pool.submit(request)
    done = []
    with pytest.raises(RequestRefused, match="is odd") as caught:
        done.extend(pool.stream())
    assert caught.value.request_id == "bad"
    assert sorted(one.request_id for one in [*done, *pool.stream()]) == sorted(one.request_id for one in many(4))
    pool.close()


def test_a_failure_that_passes_is_tried_again(server, fake, no_backoff):
    def sometimes(handler, body):
        if one.calls <= 2:
            always_500(handler, body)
            return
        handler.answer(200, said(body, times=2))

    one, url = fake(sometimes)
    engine = alone(server, url)
    assert [done.token_ids for done in run(engine, many(3))] == [[1]] * 3
    engine.close()


def test_a_stream_that_is_cut_off_is_no_end(server, fake, no_backoff):
    def cut(handler, body):
        handler.answer(200, said(body, count=1, end=False))

    one, url = fake(cut)
    engine = alone(server, url)
    assert len(run(engine, many(3))) == 3  # one at a time: each is progress
    assert one.calls == 3
    engine.close()


@pytest.mark.parametrize(
    ("logprobs", "problem"),
    [([0.5], "log-prob 0.5"), ([-0.5, -0.5], "2 log-probs for 1 tokens"), ([float("nan")], "malformed")],
)
def test_a_completion_that_cannot_be_is_an_error(server, fake, logprobs, problem):
    def wrong(handler, body):
        handler.answer(200, said(body, logprobs=logprobs))

    _, url = fake(wrong)
    engine = alone(server, url)
    with pytest.raises(EngineError, match=problem):
        run(engine, [ask("a")])
    engine.close()


def test_a_request_that_takes_too_long_is_tried_twice_and_then_an_error(server, fake):
    aborted = threading.Event()

    def slow(handler, body):
        aborted.wait(10)
        aborted.clear()
        handler.answer(200, said(body, finish_reason="abort"))

    one, url = fake(slow)
    engine = alone(server, url, Timeouts(server_s=2, request_s=0.5, reply_s=20.0))
    transport = engine.engines[0].transport
    tell, told = transport.abort, []

    def telling(ids):
        told.append(ids)
        tell(ids)
        aborted.set()

    transport.abort = telling
    done = run(engine, [ask("a")])[0]
    assert (done.finish_reason, told, one.calls) == ("error", [["a"], ["a"]], 2)
    assert engine.late == 2
    engine.close()


def test_a_full_queue_is_waited_for(server, fake, monkeypatch):
    monkeypatch.setattr(dispatch, "BUSY_S", 0.05)
    busy = json.dumps({"error": {"message": "queue: full", "type": "", "code": 429, "kind": "queue"}}).encode()

    def full(handler, body):
        if one.calls <= 10:
            handler.answer(429, busy)
            return
        handler.answer(200, said(body))

    one, url = fake(full)
    engine = alone(server, url)
    assert run(engine, [ask("a")])[0].token_ids == [1]
    engine.close()


def test_close_ends_a_stream_of_another_thread(engine):
    for request in many(400):
        engine.submit(request)
    ended, begun = [], threading.Event()

    def stream():
        try:
            for _ in engine.stream():
                begun.set()
        except EngineDead as error:
            ended.append(error)

    thread = threading.Thread(target=stream)
    thread.start()
    assert begun.wait(60)
    engine.close()
    thread.join(10)
    assert not thread.is_alive()
    assert len(ended) == 1
