"""What all routes share, over scripted engines: health, restoring, texts beside the event loop, lost engines."""

import asyncio
import threading
import time

import pytest
import torch
from oracle import ask
from server_parts import Wakeful, client_of_service

from swift.errors import EngineDead, EngineError
from swift.rollout.engines.base import Health
from swift.rollout.server import access
from swift.rollout.server import service as service_module
from swift.rollout.server.app import make_app
from swift.rollout.weights.base import Bucket, TensorInfo

LIMIT_S = 20.0


class Engine(Wakeful):
    """Counts looks at its health, which last until `go_on` is set; `broken` fails the reset of its caches."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.looks, self.broken, self.go_on = 0, False, threading.Event()
        self.go_on.set()

    def reset_caches(self):
        if self.broken:
            raise EngineError("engine: scripted: its caches are stuck")

    def health(self):
        self.looks += 1
        assert self.go_on.wait(LIMIT_S)
        return Health(True)


def test_engines_are_looked_at_once_however_many_ask(made):
    engine = Engine()
    service = made(engine, api_key="key")

    async def scene():
        engine.looks = 0
        async with client_of_service(service) as http:
            for _ in range(3):
                replies = await asyncio.gather(*(http.get("/health") for _ in range(20)))
                assert {reply.status_code for reply in replies} == {200}
            return replies[0].json()

    assert asyncio.run(scene()) == {"status": "ok", "alive": True}
    assert engine.looks == 1


def test_an_engine_that_hangs_is_reported_in_bounds(made, monkeypatch):
    monkeypatch.setattr(service_module, "HEALTH_LIMIT_S", 0.2)
    hung, good = Engine(), Engine()
    service = made(hung, good)

    async def scene():
        hung.go_on.clear()
        began = time.monotonic()
        async with client_of_service(service) as http:
            replies = await asyncio.gather(*(http.get("/health") for _ in range(50)))
            assert {reply.status_code for reply in replies} == {503}
            assert "no answer within 0.2 s" in replies[0].json()["detail"]
            assert (hung.looks, good.looks) == (1, 1), "both at the same time, once"
            hung.go_on.set()
            while (reply := await http.get("/health")).status_code != 200:
                assert time.monotonic() - began < LIMIT_S
        return reply.json()

    assert asyncio.run(scene())["status"] == "ok"


def test_health_of_two_engines_says_why_one_is_gone(made):
    service = made(Engine(), Engine(fail_after=0))
    member = service.engine.engines[1]

    async def scene():
        with service.open([ask(f"{i}/0", [1], seed=i) for i in range(8)]) as answers:
            done = []
            while len(done) < 8:
                done += await answers.next(LIMIT_S)
            assert {one.finish_reason for one in done} == {"stop"}
        async with client_of_service(service) as http:
            return (await http.get("/health")).json()

    said = asyncio.run(scene())
    assert member not in service.engine.engines
    assert (said["status"], said["alive"], said["void"]) == ("failing", True, False)
    assert "as it was told to" in said["detail"]


def test_health_answers_however_many_large_bodies_are_read(made, monkeypatch):
    service, begun, go_on = made(Engine()), threading.Event(), threading.Event()

    def decoded(shape, data):
        begun.set()
        assert go_on.wait(LIMIT_S)

    monkeypatch.setattr(access, "LARGE_BYTES", 1)
    monkeypatch.setattr(access, "decoded", decoded)

    async def scene():
        async with client_of_service(service) as http:
            asked = [asyncio.create_task(http.post("/reset", json={})) for _ in range(40)]
            assert await asyncio.to_thread(begun.wait, LIMIT_S)
            try:
                reply = await http.get("/health")
            finally:
                go_on.set()
            await asyncio.gather(*asked, return_exceptions=True)
            return reply.status_code

    assert asyncio.run(scene()) == 200


def test_a_whole_model_under_version_0_is_undone_for_the_next_run(made):
    engine = Engine()
    service = made(engine)
    update = service.queue.updates.begin([TensorInfo.of("a", torch.ones(2))], 0)
    update.feed.ready.result(LIMIT_S)
    service.queue.updates.send(update.number, Bucket([("a", torch.ones(2))])).result(LIMIT_S)
    service.weights_arrived(service.queue.updates.commit(update.number).result(LIMIT_S))
    assert service.engine.version == 0

    async def scene():
        await service.reset("a", "host", rebuild=False)
        service.lease.release("a")
        await service.reset("b", "host", rebuild=False)

    asyncio.run(scene())
    assert engine.events.count(("rebuild",)) == 1, "for the first run; the second finds what it left"


def test_a_reset_of_caches_that_fails_leaves_nothing_paused(made):
    engine = Engine(step_s=0.05)
    service = made(engine)

    async def scene():
        engine.broken = True
        http = client_of_service(service)
        with service.open([ask("g/0", [1], seed=6, max_new_tokens=12)]) as answers:
            while not service.queue.load[0]:
                await asyncio.sleep(0.01)
            reply = await http.post("/reset_prefix_cache")
            assert reply.status_code == 500
            assert "stuck" in reply.json()["error"]["message"]
            async with asyncio.timeout(LIMIT_S):
                while service.queue.paused:
                    await asyncio.sleep(0.01)
            return await answers.next(LIMIT_S)

    assert asyncio.run(scene())[0].finish_reason in ("stop", "length")


def test_the_watch_ends_when_no_engine_is_left(made):
    service = made(Engine(fail_after=1))  # the fingerprint was the one

    async def scene():
        given_up = asyncio.get_running_loop().create_future()
        app = make_app(service, given_up.set_result)
        while not hasattr(app, "router"):
            app = app.app
        async with app.router.lifespan_context(app):
            with service.open([ask("g/0", [1])]) as answers:
                (failure,) = await answers.next(LIMIT_S)
            assert isinstance(failure.error, EngineDead)
            return failure.request_ids, await asyncio.wait_for(given_up, LIMIT_S)

    ids, error = asyncio.run(scene())
    assert ids == ["g/0"]
    assert "as it was told to" in str(error)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "abc", "max_tokens": 2, "logprobs": 0}),
        ("/v1/completions", {"prompt": "abc", "max_tokens": 2, "logprobs": 0, "stream": True}),
        ("/tokenize", {"prompt": "abc"}),
        ("/generate", {"prompt": "abc", "max_tokens": 2}),
    ],
)
def test_texts_of_one_client_do_not_hold_up_the_others(made, path, body):
    service = made(Engine())
    begun, go_on = threading.Event(), threading.Event()

    class Slow:
        """A tokenizer that takes its time over every text."""

        def __call__(self, text, add_special_tokens):
            return {"input_ids": self.work([1, 2, 3])}

        def __len__(self):
            return 10

        def get_vocab(self):
            return {"abc": 1}

        def work(self, result):
            begun.set()
            assert go_on.wait(LIMIT_S)
            return result

    service.template.tokenizer = slow = Slow()
    service.template.decode = lambda ids, skip_special_tokens: slow.work("".join(f"<{one}>" for one in ids))

    async def scene():
        async with client_of_service(service) as http:
            asked = asyncio.create_task(http.post(path, json=body))
            assert await asyncio.to_thread(begun.wait, LIMIT_S)
            other = await asyncio.wait_for(http.get("/health"), 5)
            assert other.status_code == 200
            assert not asked.done()
            go_on.set()
            return await asked

    assert asyncio.run(scene()).status_code == 200
