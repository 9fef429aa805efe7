"""JSON bodies: long ones leave the event loop to others, and a wrong one is the caller's fault whatever its length."""

import asyncio
import json
import threading
import time

import httpx
import pytest
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, model_validator
from scripted_engine import ScriptedEngine
from server_parts import scripted_service

from swift.rollout.server import bodies
from swift.rollout.server.app import make_app
from swift.rollout.server.limits import Refused


class Noted(BaseModel):
    """Notes the thread that reads it."""

    prompt: list[list[int]]
    word: str = ""

    @model_validator(mode="after")
    def note(self):
        threads.append(threading.get_ident())
        return self


threads = []


class Http:
    def __init__(self, data, kind="application/json"):
        self.data, self.headers = data, {"content-type": kind}

    async def body(self):
        return self.data


def prompts(count):
    return {"prompt": [list(range(100_000, 100_400))] * count, "word": "é"}


@pytest.mark.parametrize(("count", "aside"), [(2, False), (200, True)])
def test_only_long_bodies_are_parsed_in_a_thread_and_both_mean_the_same(count, aside):
    threads.clear()
    data = json.dumps(prompts(count)).encode()
    assert (len(data) >= bodies.LARGE_BYTES) == aside
    found = asyncio.run(bodies.read(Http(data), Noted))
    assert found.model_dump() == prompts(count)
    assert (threads != [threading.get_ident()]) == aside


def test_other_threads_take_turns_while_a_long_body_is_parsed():
    data, turns, done = json.dumps(prompts(3000)).encode(), [], threading.Event()

    def tick():
        while not done.wait(0.001):
            turns.append(1)

    other = threading.Thread(target=tick)
    other.start()
    time.sleep(0.02)
    turns.clear()
    bodies.validated(Noted, data)
    during = len(turns)
    done.set()
    other.join()
    assert during >= 5, "the parser keeps the interpreter to itself"


@pytest.mark.parametrize("filler", [0, bodies.LARGE_BYTES])
@pytest.mark.parametrize(
    "content", [b"{", b"\x80\x04", b"[" * 100_000, b'{"prompt": [[' + b"1" * 5000 + b"]]}", b'"\xff"']
)
def test_what_is_no_json_is_refused(content, filler):
    with pytest.raises(Refused, match="body: not what its content type says"):
        bodies.validated(Noted, b" " * filler + content)


@pytest.mark.parametrize("filler", [0, bodies.LARGE_BYTES])
def test_what_has_another_shape_is_refused(filler):
    with pytest.raises(RequestValidationError) as caught:
        bodies.validated(Noted, b" " * filler + b'{"prompt": [[1], ["x"]]}')
    assert caught.value.errors()[0]["loc"] == ("prompt", 1, 0)


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "none"])
def test_another_content_type_is_refused(kind):
    """A page in somebody's browser may send these without asking."""
    with pytest.raises(Refused, match=f"body: its content type is {kind}; send application/json"):
        asyncio.run(bodies.read(Http(b"{}", kind), Noted))


@pytest.mark.parametrize("kind", ["application/json", "application/json; charset=utf-8", "application/problem+json"])
def test_the_kinds_of_json_are_read(kind):
    assert asyncio.run(bodies.read(Http(b'{"prompt": []}', kind), Noted)).prompt == []


def test_a_route_reads_long_bodies_and_names_what_is_wrong_with_them(tmp_path):
    service = scripted_service([ScriptedEngine()], tmp_path)
    wrong = {"model": "scripted", "prompt": [[1, 2]] * 100_000, "max_tokens": "many"}

    async def scene():
        transport = httpx.ASGITransport(app=make_app(service))
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as http:
            many = await http.post("/v1/completions", json={**wrong, "max_tokens": 1})
            odd = await http.post("/v1/completions", json=wrong)
            short = await http.post("/v1/completions", json={**wrong, "prompt": [1]})
            return many, odd, short

    try:
        many, odd, short = asyncio.run(scene())
    finally:
        service.close()
    assert (many.status_code, odd.status_code, short.status_code) == (422, 422, 422)
    assert "4096" in many.json()["error"]["message"]
    assert odd.json() == short.json()
    assert odd.json()["error"]["message"].startswith("max_tokens: ")
