"""Clients that hang up, stall, or send what no client should: nothing of it stays, and nothing of it is a 500."""

import asyncio
import json
import socket
import tracemalloc

import pytest
from scripted_engine import ScriptedEngine
from server_parts import scripted_service

from swift.rollout.server.app import make_app

MIB = 1 << 20


class Engine(ScriptedEngine):
    def wake(self, tags=()):
        return True


@pytest.fixture
def made(tmp_path):
    services = []

    def make(**options):
        services.append(scripted_service([Engine(**options)], tmp_path))
        return services[-1], make_app(services[-1])

    yield make
    for service in services:
        service.close()


def call(app, path, *messages, query=b"", kind=b"application/json"):
    """One request, as a web server would pass it on; the client hangs up when `messages` are used up."""
    coming, sent = list(messages), []
    scope = {
        "type": "http", "asgi": {"version": "3.0", "spec_version": "2.3"}, "http_version": "1.1", "method": "POST",
        "scheme": "http", "path": path, "raw_path": path.encode(), "root_path": "", "query_string": query,
        "headers": [(b"content-type", kind)], "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 80),
    }  # fmt: skip

    async def receive():
        if coming and coming[0] is None:
            await asyncio.sleep(60)
        return coming.pop(0) if coming else {"type": "http.disconnect"}

    async def send(message):
        await asyncio.sleep(0.05)  # as a web server that waits for its socket
        sent.append(message)

    asyncio.run(asyncio.wait_for(app(scope, receive, send), 30))
    return sent


def body(content, *, more=False):
    return {"type": "http.request", "body": content, "more_body": more}


@pytest.mark.parametrize(
    ("path", "content"),
    [
        ("/infer/", {"prompts": [[1]], "requests": [{"id": "a", "prompt": 0, "sampling": {"max_new_tokens": 4000}}]}),
        ("/v1/completions", {"prompt": [1], "max_tokens": 4000, "stream": True, "seed": 6}),
    ],
)
def test_a_client_that_is_gone_before_the_first_byte_leaves_no_request(made, path, content):
    service, app = made(step_s=0.1)
    began = len(service.engine.engines[0].transport.engine.events)
    call(app, path, body(json.dumps(content).encode()))
    asyncio.run(asyncio.sleep(0.2))
    events = service.engine.engines[0].transport.engine.events[began:]
    assert [event[0] for event in events] in ([], ["submit", "abort"]), "aborted, if it was begun at all"


@pytest.mark.parametrize("how", ["hangs up", "never sends the rest", "leaves pieces"])
def test_an_adapter_that_is_abandoned_on_the_way_is_forgotten(made, monkeypatch, how):
    from swift.rollout.server import access

    _, app = made()
    monkeypatch.setattr(access, "SILENCE_S", 0.2)
    part = body(bytes(32 * MIB), more=how != "leaves pieces")
    coming = {"hangs up": [part], "never sends the rest": [part, None], "leaves pieces": [part]}[how]
    query = b"lora_name=x&version=1" + (b"&offset=0&total=%d" % (64 * MIB) if how == "leaves pieces" else b"")
    del part
    tracemalloc.start()
    try:
        sent = call(app, "/v1/load_lora_adapter", *coming, query=query, kind=b"application/x-safetensors")
        held = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert held < 8 * MIB, f"{held / MIB:.0f} MiB are still held"
    if how == "never sends the rest":
        assert sent[0]["status"] == 408


@pytest.mark.parametrize(
    ("path", "content"),
    [
        ("/v1/completions", b'{"prompt": "a\\ud800 and the rest"}'),
        ("/v1/completions", b'{"prompt": "a", "stop": "\\ud800"}'),
        ("/v1/completions", b'{"prompt": "a", "stop": "\\u0000", "max_tokens": 1}'),
        ("/v1/completions", b'{"prompt": "a", "structured_outputs": {"regex": "a\\u0000"}, "max_tokens": 1}'),
        ("/v1/completions", b'{"prompt": "a\xff"}'),
        ("/v1/completions", b'{"prompt": [1, true], "max_tokens": 1}'),
        ("/v1/completions", b'{"prompt": [-1], "max_tokens": 1}'),
        ("/v1/completions", b'{"prompt": [[1], "a", 5], "max_tokens": 1}'),
        ("/v1/completions", b'{"prompt": [99999999999999999999999], "max_tokens": 1}'),
        ("/v1/completions", b'{"prompt": "a", "seed": 1e400}'),
        ("/v1/completions", b'{"prompt": "a", "seed": -1}'),
        ("/v1/chat/completions", b'{"messages": [{"role": "user", "content": "\\udc00 x"}]}'),
        ("/v1/chat/completions", b'{"messages": [{"role": 5}]}'),
        ("/tokenize", b'{"prompt": "\\ud83d x"}'),
        ("/generate", b'{"prompt": {"prompt_token_ids": "ab"}}'),
        ("/infer/", b'{"prompts": [[1]], "requests": [{"id": "\\ud800 x", "prompt": 0, "sampling": {}}]}'),
        ("/v1/load_lora_adapter", b'{"lora_name": "x", "lora_path": "a\\u0000b"}'),
        ("/weights/begin", b'{"version": 1, "manifest": [["a", "os", [1]]]}'),
        ("/weights/begin", b'{"version": 1, "manifest": [["a", "float32", [-1]]]}'),
        ("/reset", b'{"run_id": ""}'),
        ("/infer/", b"[" * 100_000),
    ],
)
def test_text_that_no_tokenizer_takes_and_numbers_out_of_range_are_the_clients_fault(http, path, content):
    reply = http.post(path, content=content, headers={"Content-Type": "application/json"})
    assert reply.status_code == 422, reply.text
    assert reply.json()["error"]["code"] == 422


def test_a_nul_character_in_a_prompt_is_text(http):
    reply = http.post("/v1/completions", json={"prompt": "a\0b", "max_tokens": 1})
    assert reply.status_code == 200, reply.text


@pytest.mark.parametrize("where", ["target", "header"])
def test_heads_of_requests_are_bounded(server, where):
    long = b"a" * (4 * MIB)
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as raw:
        try:
            raw.sendall(b"GET /" + (long if where == "target" else b"health HTTP/1.1\r\nHost: x\r\nX: " + long))
            answer = raw.recv(1000)
        except ConnectionError:  # it hung up while we were still sending
            answer = b""
    assert answer == b"" or answer.startswith(b"HTTP/1.1 400")
