"""Calls of a client to a server that fails in every way, without any engine behind it."""

import contextlib
import functools
import gzip
import json
import os
import threading
import time
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from oracle import ask, run
from server_parts import SHORT, link_to, many, spec_of
from sources import outcomes

from swift.errors import EngineDead, EngineError, RequestRefused
from swift.rollout.engines import client, server_client, wire
from swift.rollout.engines.events import Lost, Timeouts
from swift.rollout.engines.pool import EnginePool
from swift.rollout.engines.server_client import ServerClient


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
        info = {"alive": True} if self.path == "/health" else self.server.info
        self.answer(200, info if isinstance(info, bytes) else json.dumps(info).encode())

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])) or b"{}")
        if self.path.startswith("/infer"):
            self.server.calls += 1
            self.server.script(self, body)
        elif self.path == "/reset" and self.server.held is not None:
            self.answer(409, self.server.held)
        else:
            self.server.resets += self.path == "/reset"
            self.server.releases += self.path == "/release"
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
        one.resets = one.releases = one.flooded = 0
        one.over = threading.Event()
        threading.Thread(target=one.serve_forever, daemon=True).start()
        made.append(one)
        return one, f"http://127.0.0.1:{one.server_address[1]}"

    yield make
    for one in made:
        one.shutdown()
        one.server_close()


@pytest.fixture
def no_backoff(monkeypatch):
    monkeypatch.setattr(server_client, "BACKOFF_S", (0.01, 0.01, 0.01))


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
    return EnginePool([ServerClient(url, spec=spec_of(server.model), timeouts=timeouts)])


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
    assert one.calls == len(server_client.BACKOFF_S) + 1
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
    pool = EnginePool([ServerClient(url, spec=spec_of(server.model), timeouts=SHORT), link_to(server)])
    assert len(run(pool, many(8))) == 8
    alone_is_left(pool, server)
    assert url in pool.health().detail and said in pool.health().detail
    pool.close()


def test_a_call_that_waits_in_vain_says_for_whose_requests(server, fake):
    over = threading.Event()
    one, url = fake(lambda handler, _: over.wait(30))
    one.info = {**one.info, "running_of": {"run mine": 2, "clients without a run": 3}}
    engine = ServerClient(url, spec=spec_of(server.model), run_id="mine", timeouts=Timeouts(reply_s=0.3))
    with pytest.raises(Lost) as caught:
        engine._call_route("POST", "/infer/", 0.5, dict, json={})
    over.set()
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
            line = json.dumps({"event": "failed", "ids": ["bad"], **error}).encode()
            handler.answer(200, line + b"\n" + said(body))

    one, url = fake(refuse)
    pool = alone(server, url)
    *done, refused = outcomes(pool, [*many(4), ask("bad")])
    assert isinstance(refused, RequestRefused) and "is odd" in str(refused)
    assert refused.request_id == "bad"
    assert [one.request_id for one in done] == [one.request_id for one in many(4)]
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


def test_a_full_queue_is_waited_for(server, fake, monkeypatch):
    monkeypatch.setattr(client, "BUSY_S", 0.05)
    busy = json.dumps({"error": {"message": "queue: full", "type": "", "code": 429, "kind": "queue"}}).encode()

    def full(handler, body):
        if one.calls <= 6:  # more than failures that count
            handler.answer(429, busy)
            return
        handler.answer(200, said(body))

    one, url = fake(full)
    engine = alone(server, url)
    assert run(engine, [ask("a")])[0].token_ids == [1]
    engine.close()


# --- hosts that are no server of ours, or a hostile one -----------------------------------------------------------


def flood(handler, part, *, head=b"", pause_s=0.0):
    """A reply without end; how many bytes it sent before the client hung up."""
    handler.close_connection, sent = True, 0
    handler.wfile.write(b"HTTP/1.1 200 OK\r\n" + (head or b"Content-Type: application/json\r\n\r\n"))
    with contextlib.suppress(OSError):
        while sent < 1 << 30 and not handler.server.over.wait(pause_s):
            sent += handler.wfile.write(part)
            handler.wfile.flush()
    handler.server.flooded = sent


@functools.cache
def bomb_of(size):
    return gzip.compress(bytes(size))


def zipped(handler, _):
    bomb = bomb_of(64 << 20)
    handler.send_response(200)
    handler.send_header("Content-Encoding", "gzip")
    handler.send_header("Content-Length", str(len(bomb)))
    handler.end_headers()
    handler.wfile.write(bomb)


def tells(**fields):
    """An answer with a field that no engine of the run could give."""
    return lambda handler, body: handler.answer(200, said(body, **fields))


HOSTILE = {
    "a line without end": (lambda handler, _: flood(handler, b"a" * (1 << 20)), "a line longer than"),
    "a byte now and then": (lambda handler, _: flood(handler, b"a", pause_s=0.1), "has stalled"),
    "empty lines": (lambda handler, _: flood(handler, b"\n", pause_s=0.01), "has stalled"),
    "a head without end": (lambda handler, _: flood(handler, b"X: y\r\n", head=b"A: b\r\n"), "too"),
    "a head in drops": (lambda handler, _: flood(handler, b"X: y\r\n", head=b"A: b\r\n", pause_s=0.2), "no answer"),
    "a bomb": (zipped, "compressed"),
    "a stranger's request": (tells(request_id="of another"), "'of another'"),
    "a negative id": (tells(token_ids=[-1]), "token id -1: outside of 0.."),
    "an id beyond the vocabulary": (tells(token_ids=[300]), "token id 300: outside of 0.."),
    "an id of 64 bits": (tells(token_ids=[2**63]), "token id 9223372036854775808: outside of 0.."),
    "an id that is true": (tells(token_ids=[True]), "Expected `int`, got `bool`"),
    "an id that is no whole number": (tells(token_ids=[1.5]), "Expected `int`"),
    "tokens of no version": (tells(versions=[[0, 3, 9]]), "versions"),
    "too many tokens": (tells(token_ids=[1] * 300, logprobs=[-1.0] * 300, versions=[[0, 0, 300]]), "300 tokens came"),
}


@pytest.mark.parametrize(("script", "problem"), HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_server_is_given_up_in_one_line_with_bounds_on_size_and_time(
    server, fake, monkeypatch, script, problem
):
    monkeypatch.setattr(server_client, "BACKOFF_S", (0.01,))
    one, url = fake(script)
    engine = alone(server, url, replace(SHORT, reply_s=2.0))
    bomb_of(64 << 20)
    began = time.monotonic()
    with pytest.raises(EngineError) as caught:
        run(engine, [ask("a")])
    one.over.set()
    (line,) = caught.value.problems
    assert url in line and problem in line and len(line) < 500
    assert caught.value.exit_code == 4
    assert time.monotonic() - began < 30, "a limit of the test"
    assert one.flooded < 64 << 20
    engine.close()


WRONG = {
    "a page": b"<html><body>hello</body></html>",
    "a list": b"[]",
    "nothing": b"null",
    "no fields": b'{"status": "ok"}',
    "a number for a text": {"boot_id": 7},
    "a text for a number": {"max_model_len": "long"},
    "no length": {"max_model_len": 0},
    "a list for a model": {"architecture": []},
    "no capabilities": {"capabilities": None},
    "other capabilities": {"capabilities": {"name": "x"}},
    "other counters": {"counters": [1]},
    "deep": b"[" * 100_000,
    "no UTF-8": b'{"boot_id": "\xff"}',
}


@pytest.mark.parametrize("info", WRONG.values(), ids=WRONG)
def test_a_host_that_is_no_server_of_ours_is_one_line_with_code_4_and_keeps_no_lease(server, fake, info):
    one, url = fake(always_500)
    one.info = {**one.info, **info} if isinstance(info, dict) else info
    engine = alone(server, url)
    with pytest.raises(EngineError) as caught:
        engine.capabilities  # noqa: B018
    (line,) = caught.value.problems
    assert url in line and "is this a `swift rollout` server?" in line and len(line) < 500
    assert caught.value.exit_code == 4
    engine.close()
    assert one.resets == one.releases


def test_an_error_that_a_server_tells_changes_nothing_but_its_own_text(server, fake, no_backoff):
    error = {"type": "EngineError", "message": "m", "problems": ["x" * 10_000], "state": {"exit_code": 0, "length": 7}}
    _, url = fake(lambda handler, _: handler.answer(422, json.dumps({"error": error}).encode()))
    engine = alone(server, url)
    with pytest.raises(EngineError) as caught:
        run(engine, [ask("a")])
    assert caught.value.exit_code == 4
    assert len(str(caught.value)) < 5_000
    engine.close()


def test_a_redirect_is_not_followed_with_the_key(server, fake):
    stranger, elsewhere = fake(always_500)

    def redirect(handler, _):
        handler.send_response(307)
        handler.send_header("Location", f"{elsewhere}/infer/")
        handler.send_header("Content-Length", "0")
        handler.end_headers()

    _, url = fake(redirect)
    engine = alone(server, url)
    with pytest.raises(EngineError, match="HTTP 307"):
        run(engine, [ask("a")])
    assert stranger.calls == 0
    engine.close()


@pytest.mark.parametrize("probe", ["../elsewhere", "pipe"])
def test_a_server_names_no_file_here_that_the_client_waits_for(server, fake, tmp_path, probe):
    os.mkfifo(tmp_path / "pipe")
    one, url = fake(always_500)
    if probe == "pipe":
        one.info["boot_id"] = "pipe"
        os.mkfifo(tmp_path / wire.probe_name("pipe"))
        probe = wire.probe_name("pipe")
    one.info |= {"weights_folder": str(tmp_path), "weights_probe": probe}
    engine = alone(server, url)
    assert engine.capabilities.name == "transformers"
    assert engine.engines[0].weights_folder is None
    engine.close()
