"""Who owns a server while its engines are slow, and while its owner is silent; over scripted engines."""

import asyncio
import threading

import pytest
from oracle import ask
from server_parts import Wakeful, client_of_service

from swift.rollout.engines import wire
from swift.rollout.server.access import Refused

LIMIT_S = 20.0


class Engine(Wakeful):
    """`slow` is set while it restores its caches, which lasts until `go_on` is set."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.slow, self.go_on = threading.Event(), threading.Event()
        self.go_on.set()

    def reset_caches(self):
        self.slow.set()
        assert self.go_on.wait(LIMIT_S)


def test_a_run_that_waits_for_its_reset_keeps_the_server(made):
    engine = Engine()
    service = made(engine, lifetime_s=0.1)

    async def scene():
        engine.go_on.clear()
        reset = asyncio.create_task(service.reset("a", "host 1", rebuild=False))
        assert await asyncio.to_thread(engine.slow.wait, LIMIT_S)
        await asyncio.sleep(0.3)
        with pytest.raises(Refused, match="held by run a"):
            await service.reset("b", "host 2", rebuild=False)
        engine.go_on.set()
        return await reset

    assert asyncio.run(scene())["new_run"] is True
    service.authorize("a")


def test_a_stream_is_no_sign_of_life_of_its_client(made):
    service, renewed = made(Engine()), []

    async def scene():
        await service.reset("a", "host 1", rebuild=False)
        body = wire.encode(wire.InferRequest.of([ask(f"g/{seed}", [1], seed=seed) for seed in range(6)], 0))
        headers = {wire.RUN_HEADER: "a", "Content-Type": "application/json"}
        service.lease.renew = lambda run, now: renewed.append(run)
        async with client_of_service(service) as http:
            reply = await http.post("/infer/", content=body, headers=headers)
        assert reply.text.count('"completion"') > 1, reply.text

    asyncio.run(scene())
    assert renewed == ["a"]


def test_engines_that_a_silent_run_has_paused_go_on_for_the_others(made):
    service = made(Engine(), lifetime_s=0.1)

    async def scene():
        watching = asyncio.create_task(service.watch())
        await service.reset("a", "host 1", rebuild=False)
        service.queue.pause_in_flight()
        with service.open([ask("g/0", [1], seed=1)]) as answers:
            (arrival,) = await answers.next(LIMIT_S)
        watching.cancel()
        return arrival

    assert asyncio.run(scene()).finish_reason == "stop"
    with pytest.raises(Refused, match="does not hold this server"):
        service.authorize("a")  # comes back, and has to begin anew


def test_engines_that_nobody_owns_stay_paused(made):
    service = made(Engine(), lifetime_s=0.1)

    async def scene():
        watching = asyncio.create_task(service.watch())
        await asyncio.to_thread(service.queue.pause_in_flight)
        await asyncio.sleep(1.5)
        watching.cancel()

    asyncio.run(scene())
    assert service.queue.paused


def test_a_job_that_waits_too_long_says_for_whom(made):
    engine = Engine()
    service = made(engine, drain_s=0.3)
    engine.stuck = "close"

    async def scene():
        wanted = [ask("g/0", [1])]
        with service.open(wanted, "other"), service.open(wanted):
            while service.queue.load[0] < 2:
                await asyncio.sleep(0.01)
            running = service.info()["running_of"]
            with pytest.raises(Refused) as caught:
                await service.do(lambda engine: None)
        return caught.value.problem, running

    problem, running = asyncio.run(scene())
    assert "1 of clients without a run, 1 of run other" in problem
    assert running == {"clients without a run": 1, "run other": 1}
