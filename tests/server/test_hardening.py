"""Clients that hang up, stall, or send what no client should: nothing of it stays, and nothing of it is a 500."""

import asyncio
import contextlib
import json
import os
import select
import socket
import struct
import threading
import time
import tracemalloc
from dataclasses import replace

import pytest
from oracle import load
from processes import wait_for
from server_parts import KEY, PROMPT, LocalServer, Wakeful

from swift.rollout.server import access, process, texts
from swift.rollout.server.app import make_app

MIB = 1 << 20


def call(app, path, *messages, query=b"", **headers):
    """One request, as a web server would pass it on; the client hangs up when `messages` are used up."""
    coming, sent = list(messages), []
    headers = {"content-type": b"application/json", **headers}
    scope = {
        "type": "http", "asgi": {"version": "3.0", "spec_version": "2.3"}, "http_version": "1.1", "method": "POST",
        "scheme": "http", "path": path, "raw_path": path.encode(), "root_path": "", "query_string": query,
        "headers": [(name.encode(), value) for name, value in headers.items()],
        "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 80),
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
    service = made(Wakeful(step_s=0.1))
    began = len(service.engine.engines[0].engine.events)
    call(make_app(service), path, body(json.dumps(content).encode()))
    assert wait_for(lambda: service.queue.load == (0, 0))
    events = service.engine.engines[0].engine.events[began:]
    assert [event[0] for event in events] in ([], ["submit", "abort"]), "aborted, if it was begun at all"


@pytest.mark.parametrize("how", ["hangs up", "never sends the rest", "leaves pieces"])
def test_an_adapter_that_is_abandoned_on_the_way_is_forgotten(made, monkeypatch, how):
    service = made(Wakeful())
    service.lease.take("mine", "", time.monotonic())
    monkeypatch.setattr(access, "SILENCE_S", 0.2)
    part = body(bytes(32 * MIB), more=how != "leaves pieces")
    coming = {"hangs up": [part], "never sends the rest": [part, None], "leaves pieces": [part]}[how]
    query = b"version=1" + (b"&offset=0&total=%d" % (64 * MIB) if how == "leaves pieces" else b"")
    upload = {"content-type": b"application/x-safetensors", "x-swift-run": b"mine"}
    del part
    tracemalloc.start()
    try:
        sent = call(make_app(service), "/v1/load_lora_adapter", *coming, query=query, **upload)
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
        ("/weights/begin", b'{"version": 1, "manifest": [["a", "os", [1]]]}'),
        ("/weights/begin", b'{"version": 1, "manifest": [["a", "float32", [-1]]]}'),
        ("/weights/bucket", b'{"update": 1, "broadcast": {"entries": [], "size": 4, "invitation": {}}}'),
        ("/weights/bucket", b'{"update": 1, "broadcast": {"entries": [["a", "float32", [2]]], "size": 8}}'),
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


# --- clients that say nothing ----------------------------------------------------------------------------------------


@pytest.fixture
def small(nano_folders, monkeypatch):
    """A server with room for 64 connections, which waits half a second for its clients."""
    monkeypatch.setattr(access, "SILENCE_S", 0.5)
    monkeypatch.setattr(process, "_connections", lambda: 64)
    server = LocalServer(nano_folders["qwen2"], key=KEY)
    yield server
    server.stop()


def ended(connection, limit_s=20.0):
    """Whether the server hangs up in time, which takes as long as it does."""
    connection.settimeout(limit_s)
    try:
        while connection.recv(1 << 16):
            pass
    except ConnectionError:
        return True
    except TimeoutError:
        return False
    return True


def connect(server, head=b""):
    made = socket.create_connection(("127.0.0.1", server.port), timeout=5)
    made.sendall(head)
    return made


def test_silent_clients_go_and_do_not_keep_others_out(small):
    heads = [b"", b"GET /health HTTP/1.1\r\nHost: x\r\n"]
    began = time.monotonic()
    silent = [connect(small, heads[n % 2]) for n in range(120)]
    with small.client() as http:
        assert http.get("/health").status_code == 200
    assert all(map(ended, silent))
    assert time.monotonic() - began < 60, "a limit of the test"


@pytest.mark.parametrize("part", [b"X: y\r\n", b"GET"])
def test_a_head_that_comes_in_drops_gets_no_more_time(small, part):
    dropping = connect(small, b"GET /health HTTP/1.1\r\n" if part != b"GET" else b"")
    began = time.monotonic()
    with pytest.raises(ConnectionError):
        while time.monotonic() - began < 20:
            dropping.sendall(part[:1] if part == b"GET" else part)
            time.sleep(0.05)


@pytest.mark.parametrize("path", ["health", "infer/"])
def test_chunks_of_a_byte_are_not_read(small, path):
    chunks = connect(small, b"POST /%s HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n" % path.encode())
    sent = 0
    with pytest.raises(ConnectionError):
        while sent < 100 * MIB:
            sent += chunks.send(b"1\r\na\r\n" * 1000)
    assert sent < 20 * MIB, "what the sockets hold"


def posted(path, length):
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {length}\r\n\r\n".encode()


def test_a_body_that_comes_in_drops_is_refused(small):
    dropping = connect(small, posted("/tokenize", 1000))
    began = time.monotonic()
    dropping.settimeout(0.05)
    answer = b""
    while not answer and time.monotonic() - began < 20:
        dropping.sendall(b" ")
        with contextlib.suppress(TimeoutError):
            answer = dropping.recv(1000)
    assert answer.startswith(b"HTTP/1.1 408")


def test_a_client_that_does_not_take_its_answer_is_cut_off(small):
    small.service.template.tokenizer = lambda text, add_special_tokens: {"input_ids": [100_000] * 2_000_000}
    deaf = connect(small, posted("/tokenize", 15) + b'{"prompt": "a"}')
    assert deaf.recv(8) == b"HTTP/1.1"
    assert wait_for(lambda: not small.uvicorn.server_state.connections)
    deaf.close()


# --- long texts -------------------------------------------------------------------------------------------------------


@pytest.fixture
def tokenized(server, monkeypatch):
    """Lengths of the texts that the server's tokenizer gets."""
    lengths, plain = [], server.service.template.tokenizer.__class__.__call__

    def noting(tokenizer, text, **more):
        lengths.append(len(text))
        return plain(tokenizer, text, **more)

    monkeypatch.setattr(server.service.template.tokenizer.__class__, "__call__", noting)
    return lengths


def said_by(text, **more):
    return {"messages": [{"role": "user", "content": text, **more}]}


LONG = "long " * 40_000
TOOL = {"type": "function", "function": {"name": "a", "description": LONG, "parameters": {}}}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": LONG}),
        ("/v1/completions", {"prompt": ["a", LONG]}),
        ("/generate", {"prompt": LONG}),
        ("/tokenize", {"prompt": LONG}),
        ("/tokenize", said_by(LONG)),
        ("/v1/chat/completions", said_by(LONG)),
        ("/v1/chat/completions", said_by([{"type": "text", "text": LONG}])),
        ("/v1/chat/completions", said_by("a", reasoning_content=LONG)),
        ("/v1/chat/completions", {**said_by("a"), "tools": [TOOL]}),
        ("/v1/chat/completions", {**said_by("a"), "chat_template_kwargs": {"a": {LONG: [1]}}}),
    ],
)
def test_a_text_that_cannot_fit_the_context_is_refused_before_it_is_tokenized(http, tokenized, path, body):
    reply = http.post(path, json=body)
    assert reply.status_code == 422, reply.text
    assert "too long for the context of 512 tokens" in reply.json()["error"]["message"]
    assert max(tokenized, default=0) < len(LONG)


def test_three_bodies_of_60_mib_are_refused_and_others_are_answered_meanwhile(server, http):
    body = json.dumps({"prompt": "a word " * (60 * MIB // 7)}).encode()
    codes, began = [], time.monotonic()

    def ask_for_much():
        with server.client() as client:
            headers = {"Content-Type": "application/json"}
            codes.append(client.post("/v1/completions", content=body, headers=headers, timeout=60).status_code)

    clients = [threading.Thread(target=ask_for_much) for _ in range(3)]
    for one in clients:
        one.start()
    waits = []
    while any(one.is_alive() for one in clients):
        asked = time.monotonic()
        assert http.get("/health").status_code == 200
        assert http.post("/v1/completions", json={"prompt": "a", "max_tokens": 1}).status_code == 200
        waits.append(time.monotonic() - asked)
    assert codes == [422] * 3
    assert max(waits) < 10 and time.monotonic() - began < 60, "limits of the test"


def test_a_long_text_is_tokenized_in_turns_until_it_is_too_long(server, http, tokenized, monkeypatch):
    monkeypatch.setattr(texts, "TURN", 64)
    fits = "The quick brown fox. " * 5
    ids = http.post("/tokenize", json={"prompt": fits}).json()["tokens"]
    assert max(tokenized) == len(fits) and min(tokenized) <= 64
    assert server.service.template.tokenizer(fits)["input_ids"] == ids
    tokenized.clear()
    reply = http.post("/tokenize", json={"prompt": "\u00e9\u4e00\U0001f600" * 200})
    assert "tokens: too long for the context" in reply.json()["error"]["message"]
    assert max(tokenized) <= 64


def test_others_are_answered_while_a_long_text_is_tokenized(server, http, monkeypatch):
    monkeypatch.setattr(texts, "TURN", 64)
    begun, others, codes = threading.Event(), threading.Event(), []
    kind = server.service.template.tokenizer.__class__
    plain = kind.__call__

    def waiting(tokenizer, text, **more):
        if len(text) > 64:
            begun.set()
            others.wait(20)
        return plain(tokenizer, text, **more)

    monkeypatch.setattr(kind, "__call__", waiting)

    def ask_for_much():
        with server.client() as client:
            codes.append(client.post("/tokenize", json={"prompt": "a" * 100}).status_code)

    thread = threading.Thread(target=ask_for_much)
    thread.start()
    assert begun.wait(20)
    assert http.post("/tokenize", json={"prompt": "a"}, timeout=10).status_code == 200
    others.set()
    thread.join()
    assert codes == [200]


def test_large_bodies_have_room_for_some_of_them_and_the_room_comes_back(server, http, monkeypatch):
    monkeypatch.setattr(access, "LIMITS", replace(access.LIMITS, bodies_bytes=8 * MIB))
    begun = [connect(server, posted("/v1/completions", 5 * MIB) + b" " * (5 * MIB - 1)) for _ in range(2)]
    refused, _, _ = select.select(begun, [], [], 20)
    assert [one.recv(12) for one in refused] == [b"HTTP/1.1 429"]
    for one in begun:
        one.close()
    body = b'{"prompt": [1], "max_tokens": 1, "user": "' + b"a" * (5 * MIB) + b'"}'
    headers = {"Content-Type": "application/json"}
    assert wait_for(lambda: http.post("/v1/completions", content=body, headers=headers).status_code == 200)


# --- many that vanish -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["vanish", "never read"])
def test_hundreds_of_streams_whose_clients_are_gone_leave_no_slot_and_others_are_answered(server, http, how):
    length = 480 if how == "vanish" else 100
    body = {"prompt": PROMPT, "max_tokens": length, "ignore_eos": True, "stream": True}
    content = json.dumps(body).encode()
    asked = [connect(server, posted("/v1/completions", len(content)) + content) for _ in range(300)]
    assert wait_for(lambda: sum(server.service.queue.load) > 100)
    if how == "vanish":
        for one in asked:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            one.close()
    reply = http.post("/v1/completions", json={"prompt": PROMPT, "max_tokens": 2}, timeout=120)
    assert reply.status_code == 200
    assert wait_for(lambda: server.service.queue.load == (0, 0), 120)
    for one in asked:
        one.close()
    assert wait_for(lambda: not server.uvicorn.server_state.tasks, 60)
    assert not server.service.queue._streams and not server.service.queue._waiting


# --- what is logged ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("when", ["in its body", "in its stream", "in its lines", "before its answer"])
def test_a_client_that_leaves_is_one_line_at_most_and_nothing_stays(server, caplog, when):
    body = {"prompt": PROMPT, "max_tokens": 400, "n": 8, "ignore_eos": True, "stream": when == "in its stream"}
    if when == "in its lines":
        samples = [{"id": str(n), "prompt": 0, "sampling": {"max_new_tokens": 400}} for n in range(64)]
        body = {"prompts": [PROMPT], "requests": samples}
    content = json.dumps(body).encode()
    length = len(content) + (100 if when == "in its body" else 0)
    path = "/infer/" if when == "in its lines" else "/v1/completions"
    leaving = connect(server, posted(path, length) + content)
    asked = server.uvicorn.server_state.tasks
    assert wait_for(lambda: asked if when == "in its body" else any(server.service.queue.load))
    leaving.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # a reset, as of a kill
    leaving.close()
    assert wait_for(lambda: not server.uvicorn.server_state.tasks and server.service.queue.load == (0, 0))
    assert len(caplog.records) <= 1
    assert not any(record.exc_info for record in caplog.records)


ODD = ["a" * 300, "a" * 70_000, "\0", "x\0y", "\ud800", "é\u202e\U0001f600", "../../etc/passwd", "/", "%00", " ", "\n"]
FIELDS = {
    "/v1/completions": ["model", "prompt", "stop", "structured_outputs.regex", "user"],
    "/v1/chat/completions": ["model", "messages.content", "messages.role", "tools.name", "chat_template_kwargs.a"],
    "/tokenize": ["model", "prompt", "messages.content"],
    "/generate": ["prompt", "stop"],
    "/infer/": ["id"],
    "/reset": ["name"],
    "/release": ["run_id"],
    "/abort_requests": ["request_ids"],
    "/weights/bucket": ["path", "digest"],
    "/weights/begin": ["manifest"],
}


def body_with(path, field, text):
    whole = {
        "/v1/completions": {"prompt": [1], "max_tokens": 1},
        "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1},
        "/tokenize": {} if field in ("prompt", "messages.content") else {"prompt": "a"},
        "/generate": {"prompt": "a", "max_tokens": 1},
        "/infer/": {"prompts": [[1]], "requests": [{"id": text, "prompt": 0, "sampling": {"max_new_tokens": 1}}]},
        "/reset": {"run_id": "odd"},
        "/weights/bucket": {"update": 1, "path": "x"},
        "/weights/begin": {"version": 1, "manifest": [[text, "float32", [1]], ["a", text, [1]]]},
    }.get(path, {})
    name, _, inner = field.partition(".")
    value = {"structured_outputs": {inner: text}, "request_ids": [text], "chat_template_kwargs": {inner: text}}
    value |= {"messages": [{"role": "user", "content": "a", inner: text}]}
    value |= {"tools": [{"type": "function", "function": {inner: text}}]}
    return whole if name in ("id", "manifest") else {**whole, name: value.get(name, text)}


@pytest.mark.parametrize(("path", "field"), [(path, field) for path, fields in FIELDS.items() for field in fields])
def test_odd_texts_are_taken_or_refused_and_no_defect(http, caplog, path, field):
    for text in ODD:
        content = json.dumps(body_with(path, field, text)).encode()
        reply = http.post(path, content=content, headers={"Content-Type": "application/json"})
        assert reply.status_code in (200, 404, 409, 422, 501), (text[:20], reply.text)
    assert not any(record.exc_info for record in caplog.records)
    http.post("/weights/abort", json={})
    http.post("/release", json={"run_id": "odd"})


@pytest.mark.parametrize("kind", ["pipe", "circle", "device", "folder", "socket", "pipe behind a link"])
def test_a_path_that_is_no_file_is_refused_and_nothing_waits_for_it(server, http, engine, weights_folder, kind):
    path = weights_folder / kind.replace(" ", "-")
    match kind:
        case "pipe":
            os.mkfifo(path)
        case "circle":
            path.symlink_to(path)
        case "device":
            path.symlink_to("/dev/zero")
        case "folder":
            path.mkdir()
        case "socket":
            with socket.socket(socket.AF_UNIX) as made:
                made.bind(str(path))
        case _:
            path.symlink_to(weights_folder / "pipe")
    assert engine.capabilities.lora
    run_id = {"X-Swift-Run": engine.engines[0].run_id}
    shapes = [[n, str(t.dtype)[6:], list(t.shape)] for n, t in load(server.model).named_parameters()]
    begun = http.post("/weights/begin", json={"version": 1, "manifest": shapes}, headers=run_id)
    assert begun.status_code == 200, begun.text
    body = {"update": begun.json()["update"], "path": path.name}
    reply = http.post("/weights/bucket", json=body, headers=run_id, timeout=10)
    assert reply.status_code in (409, 422), reply.text
    assert any(word in reply.json()["error"]["message"] for word in ("cannot be read", "no path", "not below"))
    assert http.post("/weights/abort", headers=run_id, timeout=10).status_code == 200
    assert http.get("/health", timeout=10).status_code in (200, 503)
    engine.rebuild()


@pytest.mark.parametrize("name", ["a" * 300, "%00", "%ed%a0%80", "%ff", "..%2f..", "%F0%9F%98%80"])
def test_odd_names_in_queries_and_heads_are_no_defect(http, caplog, name):
    for path in (f"/v1/load_lora_adapter?version={name}", f"/weights/bucket?update={name}", f"/{name}"):
        reply = http.post(path, content=b"x", headers={"Content-Type": "application/x-safetensors"})
        assert reply.status_code in (404, 409, 422), reply.text
    reply = http.post("/resume", headers={b"X-Swift-Run": b"\xff\xfe" + name.encode()})
    assert reply.status_code in (409, 422), reply.text
    assert not any(record.exc_info for record in caplog.records)
