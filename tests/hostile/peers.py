"""What a peer over HTTP may do to us: a server that lies to trainers, and requests that are wrong for a server."""

from __future__ import annotations

import contextlib
import gzip
import json
import random
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx
from commands import changed, damaged

ENDLESS = b"x" * (1 << 20)


class Liar(ThreadingHTTPServer):
    """Stands before a server and changes what it replies, from a certain reply on.

    rng: chooses the lie, the same for all replies. after: number of replies that are passed on as they are.
    """

    daemon_threads = True

    def __init__(self, rng: random.Random, url: str, after: int) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.rng, self.after = rng, after
        self.upstream = httpx.Client(base_url=url, timeout=30, trust_env=False)
        self.lie = rng.choice(LIES)
        self.url = f"http://127.0.0.1:{self.server_port}"

    def __enter__(self) -> Liar:
        threading.Thread(target=self.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()
        self.server_close()
        self.upstream.close()

    def handle_error(self, *_: object) -> None:
        """The other side may hang up at any time."""


class Handler(BaseHTTPRequestHandler):
    """Passes requests on."""

    server: Liar

    def answer(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        kept = {name: value for name, value in self.headers.items() if name.lower() not in ("host", "content-length")}
        reply = self.server.upstream.request(self.command, self.path, content=body, headers=kept)
        self.server.after -= 1
        if self.server.after >= 0:
            self.send(reply.status_code, reply.content, reply.headers.get("content-type", ""))
        else:
            self.server.lie(self, reply)

    do_GET = do_POST = do_PUT = do_DELETE = answer

    def send(self, status: int, body: bytes, kind: str = "application/json", **headers: str) -> None:
        self.send_response(status)
        for name, value in {"content-type": kind, "content-length": str(len(body)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(body)

    def pour(self, pieces: Any, **headers: str) -> None:
        """A body without a length, until the other side hangs up or a minute is over."""
        self.send_response(200)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        end = time.monotonic() + 60
        with contextlib.suppress(OSError):
            while time.monotonic() < end:
                self.wfile.write(next(pieces))
                self.wfile.flush()

    def log_message(self, *_: object) -> None:
        pass


def lie_of_value(handler: Handler, reply: httpx.Response) -> None:
    """JSON with other values; other bytes if it is no JSON."""
    rng = handler.server.rng
    try:
        body = "\n".join(json.dumps(changed(rng, json.loads(line))) for line in reply.text.splitlines()).encode()
    except ValueError:
        body = damaged(rng, reply.content)
    handler.send(reply.status_code, body, reply.headers.get("content-type", ""))


def lie_of_kind(handler: Handler, reply: httpx.Response) -> None:
    body = handler.server.rng.choice([b"<html>", b"null", b"[]", b"7", b"{}", b"", b"\xff\xfe", b"[" * 100_000])
    handler.send(200, body)


def lie_of_status(handler: Handler, reply: httpx.Response) -> None:
    status = handler.server.rng.choice([204, 302, 401, 404, 409, 418, 422, 500, 503])
    handler.send(status, reply.content, location="http://127.0.0.1:9/")


def lie_of_length(handler: Handler, reply: httpx.Response) -> None:
    """A body that does not end."""

    def pieces() -> Any:
        while True:
            yield ENDLESS

    handler.pour(pieces(), content_type="application/json")


def lie_of_time(handler: Handler, reply: httpx.Response) -> None:
    """One byte a second."""

    def pieces() -> Any:
        for byte in reply.content * 1000:
            yield bytes([byte])
            time.sleep(1)

    handler.pour(pieces(), content_type="application/json")


def lie_of_compression(handler: Handler, reply: httpx.Response) -> None:
    handler.send(200, gzip.compress(b"[" + b" " * (1 << 30), 1), content_encoding="gzip")


def lie_of_silence(handler: Handler, reply: httpx.Response) -> None:
    handler.connection.close()


LIES = [
    lie_of_value, lie_of_value, lie_of_value, lie_of_value, lie_of_kind, lie_of_status, lie_of_length, lie_of_time,
    lie_of_compression, lie_of_silence,
]  # fmt: skip

ROUTES = [
    "/infer/", "/versions", "/reset", "/release", "/pause", "/resume", "/hold", "/abort_requests",
    "/reset_prefix_cache", "/sleep", "/wake_up", "/v1/models", "/tokenize", "/v1/completions", "/v1/chat/completions",
    "/generate", "/weights/begin", "/weights/connect", "/weights/bucket", "/weights/commit", "/weights/abort",
    "/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/info", "/health", "/metrics", "/nothing",
]  # fmt: skip

BODIES: list[dict[str, Any]] = [
    {"model": "m", "messages": [{"role": "user", "content": "1+1="}], "max_tokens": 4},
    {"model": "m", "prompt": "1+1=", "max_tokens": 4, "temperature": 0.5, "top_p": 0.9, "seed": 1, "stop": ["2"]},
    {"prompt_token_ids": [1, 2], "sampling_params": {"max_tokens": 4, "n": 2}},
    {"prompts": [[1, 2], [3]], "request_ids": ["a", "b"], "path": "/dev/zero", "version": 1, "lora_name": "a"},
    {"model": "m", "messages": [{"role": "user", "content": "1"}], "tools": [{}], "stream": True, "logprobs": True},
]


def random_request(rng: random.Random) -> dict[str, Any]:
    """A request as `httpx.Client.request` takes it."""
    method = rng.choice(["POST", "POST", "POST", "POST", "GET", "PUT", "DELETE"])
    value = changed(rng, rng.choice(BODIES)) if rng.random() < 0.8 else {"prompt": "x" * (40 << 20)}
    body = json.dumps(value).encode()
    if rng.random() < 0.3:
        body = damaged(rng, body)
    kinds = ["application/json", "application/json", "application/msgpack", "text/plain", "application/octet-stream"]
    headers = {"content-type": rng.choice(kinds)}
    if rng.random() < 0.1:
        headers[rng.choice(["x-run-id", "content-encoding", "authorization", "expect"])] = rng.choice(
            ["gzip", "a" * 9000]
        )
    query = rng.choice(
        ["", "", "", "?path=/dev/zero", "?" + "a" * 9000, f"?offset={rng.choice(['-1', 'x', '9' * 30])}"]
    )
    return {"method": method, "url": rng.choice(ROUTES) + query, "content": body, "headers": headers}
