"""Collecting what trainers of other makes broadcast; over a receiver of this test's making."""

import asyncio
import threading
import time

import httpx
import pytest
import torch
from scripted_engine import ScriptedEngine
from server_parts import scripted_service

from swift.errors import SyncFailed
from swift.rollout.server import transfer as transfer_module
from swift.rollout.server.app import make_app
from swift.rollout.server.transfer import Transfer, infos_of

LIMIT_S = 20.0
NAMES = ["a", "b", "c", "d"]


class Trainer:
    """Broadcasts what is announced once `go_on` is set."""

    def __init__(self):
        self.go_on, self.seen = threading.Event(), []

    def receive(self, infos, how):
        assert self.go_on.wait(LIMIT_S)
        self.seen.append(([info.name for info in infos], dict(how)))
        return [(info.name, torch.zeros(info.shape)) for info in infos]

    def close(self):
        pass


@pytest.fixture
def joined(monkeypatch):
    """A transfer that has met its trainer, the trainer, and what was brought to the engines."""
    trainer, brought = Trainer(), []
    monkeypatch.setattr(transfer_module, "join", lambda init: trainer)
    made = Transfer(NAMES, {}, lambda tensors, version: brought.append([name for name, _ in tensors]))
    made.connect({})
    yield made, trainer, brought
    trainer.go_on.set()
    made.close()


def expect_all(made):
    for info in infos_of(NAMES, ["float32"] * 4, [[2]] * 4):
        made.expect(info)


def in_threads(count, work):
    outcomes = []

    def one():
        try:
            outcomes.append(work())
        except SyncFailed as error:
            outcomes.append(error)

    threads = [threading.Thread(target=one) for _ in range(count)]
    for thread in threads:
        thread.start()
    return threads, outcomes


def test_everybody_who_waits_learns_that_all_has_come(joined):
    made, trainer, brought = joined
    expect_all(made)
    threads, outcomes = in_threads(5, lambda: made.settle(LIMIT_S))
    time.sleep(0.1)
    assert outcomes == []
    trainer.go_on.set()
    for thread in threads:
        thread.join(LIMIT_S)
    assert outcomes == [None] * 5
    assert brought == [NAMES]
    made.settle(0.1)


def test_a_broadcast_that_does_not_come_is_an_error_for_all_who_wait(joined):
    made, _, _ = joined
    expect_all(made)
    threads, outcomes = in_threads(2, lambda: made.settle(0.3))
    for thread in threads:
        thread.join(LIMIT_S)
    assert ["did not come within 0.3 s" in str(one) for one in outcomes] == [True, True]


def test_loading_may_take_longer_than_a_broadcast(joined):
    made, trainer, brought = joined
    trainer.go_on.set()
    load = made.load
    made.load = lambda tensors, version: (time.sleep(0.6), load(tensors, version))
    expect_all(made)
    made.settle(0.2)
    assert brought == [NAMES]


def test_what_an_announcement_says_of_the_way_reaches_the_receiver(joined, tmp_path):
    _, trainer, _ = joined
    trainer.go_on.set()
    service = scripted_service([ScriptedEngine()], tmp_path)
    how = {"packed": True, "packed_buffer_size_bytes": 4096, "packed_num_buffers": 2}

    async def scene():
        app = httpx.ASGITransport(make_app(service))
        async with httpx.AsyncClient(transport=app, base_url="http://server") as http:
            await http.post("/init_weight_transfer_engine", json={"init_info": {}})
            await http.post("/start_weight_update")
            for name, more in (("a", how), ("b", {}), ("c", {"packed": None, "is_checkpoint_format": True})):
                info = {"names": [name], "dtype_names": ["float32"], "shapes": [[2]], **more}
                reply = await http.post("/update_weights", json={"update_info": info})
                assert reply.status_code == 200, reply.text
            return await http.post("/update_weights", json={"update_info": {**info, "packed_num_buffers": 0}})

    try:
        assert asyncio.run(scene()).status_code == 422
    finally:
        service.close()
    assert trainer.seen == [(["a"], how), (["b"], {}), (["c"], {})]
