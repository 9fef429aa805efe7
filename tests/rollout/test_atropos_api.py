"""The trainer's side of the Atropos message API, against a stand-in and the real application: order, traps, bounds."""

from __future__ import annotations

import itertools

import httpx
import pytest
from message_api import KINDS, StandIn, group

from swift.errors import ConfigError, EngineError
from swift.rollout.sources.atropos import api as atropos_api
from swift.rollout.sources.atropos.api import MessageAPI, Registration

WANTED = Registration(
    batch_size=4, max_token_len=33, starting_step=3, num_steps=9, checkpoint_dir="/run", save_checkpoint_interval=5
)


class Time:
    """A clock that only waiting moves."""

    def __init__(self):
        self.now, self.waits = 0.0, []

    def __call__(self):
        return self.now

    def sleep(self, seconds):
        assert seconds > 0
        self.waits.append(seconds)
        self.now += seconds


@pytest.fixture(params=KINDS, ids=lambda kind: kind.__name__)
def server(request):
    return request.param()


def connect(server, clock=None, **settings):
    time = clock or Time()
    api = MessageAPI(
        "http://api", WANTED, group_size=2, timeout_s=settings.pop("timeout_s", 900.0), clock=time, sleep=time.sleep,
        **settings,
    )  # fmt: skip
    api._http = server.client()
    return api


def opened(server, clock=None, **settings):
    api = connect(server, clock, **settings)
    api.open()
    return api


def take(api, seconds=1e9):
    """The next group, waited for."""
    limit = api.clock() + seconds
    while api.clock() < limit:
        if (found := api.next(0.5)) is not None:
            return found
    return None


def post(server, *groups):
    for one in groups:
        server.post(one)
    return groups


def heads(groups):
    return [(one["tokens"] if isinstance(one, dict) else one.tokens)[0][0] for one in groups]


def test_it_registers_and_lets_environments_begin(server):
    api = opened(server)
    assert server.calls == ["/info", "/register", "/info", "/batch"]
    server.add_env(2)  # the real one refuses before the first /batch
    sent = post(server, group(), group())
    assert heads([take(api), take(api)]) == heads(sent)
    assert dict(api.received) == {0: 2}


def test_large_replies_are_compressed(server):
    api = opened(server)
    sent = post(server, *(group(prompt=600) for _ in range(2)))
    assert [take(api).tokens, take(api).tokens] == [one["tokens"] for one in sent]


@pytest.mark.parametrize(("before", "seen"), [("data", "-1"), ("a trainer", "8")])
def test_an_api_in_another_state_is_refused(server, before, seen):
    if before == "data":
        server.post(group())
    else:
        with server.client() as other:
            other.post("/register", json={**vars_of(WANTED), "batch_size": 8})
    with pytest.raises(EngineError, match=f"batch_size {seen}, .* instead of 4, 33.*restart the API"):
        opened(server)


def vars_of(registration):
    return {name: getattr(registration, name) for name in registration.__slots__}


def test_batches_formed_together_come_in_the_order_they_were_sent(server):
    api = opened(server)
    sent = post(server, *(group() for _ in range(6)))
    assert heads([take(api) for _ in range(6)]) == heads(sent)


def test_it_polls_once_a_second():
    server = StandIn()
    api = opened(server)
    assert take(api, 10.0) is None
    assert server.calls.count("/batch") - 1 == pytest.approx(10, abs=1)


def test_a_restarted_api_is_registered_with_again(server):
    api = opened(server)
    server.restart()
    assert take(api, 3.0) is None
    assert api.counters["health/atropos_reregister"] == 1
    sent = post(server, group(), group())
    assert heads([take(api), take(api)]) == heads(sent)


@pytest.mark.parametrize("cause", ["a larger group", "an environment with a share and no data"])
def test_a_queue_that_nothing_comes_out_of_is_told_and_ends_the_run(server, cause, caplog):
    api = opened(server)
    if cause == "a larger group":
        post(server, group(4, env=None), group(env=None), group(8, env=None))
    else:
        server.add_env(2, 0.5)
        server.add_env(2)
        post(server, *(group(env=1) for _ in range(3)))
    assert take(api, 70.0) is None
    assert api.counters["health/starved"] == 1
    assert "groups of more than --num_generations 2 sequences block the queue" in caplog.text
    with pytest.raises(EngineError, match=r"3 groups are queued.*no batch of 4 sequences.*300 s.*min_batch_allocation"):
        take(api, 400.0)
    assert api.clock() == pytest.approx(300, abs=15)


def test_groups_that_the_api_keeps_back_are_hinted_at(server, caplog):
    api = opened(server, timeout_s=100.0)
    server.add_env(2)
    server.post(group(3))  # waits in a buffer that /status does not show
    with pytest.raises(EngineError, match=r"--atropos_timeout: 100 s.*0 groups are queued.*last answer was no batch"):
        take(api, 200.0)
    assert "0 groups queued; groups so far: none" in caplog.text
    assert "the API groups of another size than an environment's group_size" in caplog.text


def test_failed_calls_are_repeated_with_growing_pauses():
    server, clock = StandIn(), Time()
    api = opened(server, clock)
    server.fails = [httpx.Response(500)] * 6
    post(server, group(), group())
    clock.waits.clear()
    assert take(api) is not None
    assert sum(clock.waits) == pytest.approx(2 + 4 + 8 + 16 + 30 + 30)


def test_batches_that_have_come_are_there_although_the_next_call_fails(monkeypatch):
    server = StandIn()
    api = opened(server)
    sent = post(server, *(group() for _ in range(4)))
    form, replies = server.batch, iter([None, None, httpx.Response(500)])
    monkeypatch.setattr(server, "batch", lambda: next(replies, None) or form())
    assert heads([take(api, 5.0) for _ in range(4)]) == heads(sent)
    assert dict(api.received) == {0: 4}


def test_time_in_which_nobody_waits_is_no_time_without_data(caplog):
    server, clock = StandIn(), Time()
    api = opened(server, clock, timeout_s=100.0)
    post(server, *(group() for _ in range(3)))
    take(api)
    clock.now += 700.0  # a long step
    take(api)
    clock.now += 700.0
    api.begin_wait()
    assert take(api, 50.0) is None
    assert caplog.text == ""
    with pytest.raises(EngineError, match="--atropos_timeout: 100 s"):
        take(api, 60.0)


@pytest.mark.parametrize("reply", [{"json": {"batch": [{"tokens": 1}]}}, {"text": "no JSON"}])
def test_a_reply_that_cannot_be_read_counts_as_failed(reply):
    server = StandIn()
    api = opened(server, timeout_s=5.0)
    server.fails = [httpx.Response(200, **reply)] * 20
    with pytest.raises(EngineError, match=r"--atropos_timeout: 5 s.*its last answer was"):
        take(api)


def test_an_api_that_does_not_answer_ends_the_start():
    def refuse(request):
        raise httpx.ConnectError("Connection refused", request=request)

    api = connect(StandIn())
    api._http = httpx.Client(transport=httpx.MockTransport(refuse), base_url="http://api")
    with pytest.raises(EngineError, match=r"--atropos_url: http://api: no answer within 30 s .*Connection refused"):
        api.open()


def test_another_server_is_no_message_api():
    server = StandIn()
    server.fails = [httpx.Response(404)]
    with pytest.raises(ConfigError, match="/info answers 404; give the address of an Atropos message API"):
        opened(server)


GARBAGE = ["<html>", "null", "[]", "1", '{"batch_size": "many", "queue_size": [], "batch": [{"tokens": 1}]}',
           "[" * 100_000, "\udcff"]  # fmt: skip


@pytest.mark.parametrize("text", GARBAGE, ids=lambda text: text[:12])
@pytest.mark.parametrize("path", ["info", "register", "batch", "status"])
def test_a_lying_api_ends_the_run_in_one_line(monkeypatch, path, text):
    server = StandIn()
    monkeypatch.setattr(
        server, path, lambda *body: httpx.Response(200, content=text.encode("utf-8", "surrogateescape")), raising=False
    )
    with pytest.raises(EngineError) as found:
        api = opened(server, timeout_s=50.0)
        while True:
            api.next(0.5)
    (line,) = found.value.problems
    assert line.startswith(("--atropos_url: http://api: no answer within 30 s (/", "--atropos_timeout: 50 s: no data"))


class Endless(httpx.SyncByteStream):
    """A reply without end."""

    sent = 0

    def __iter__(self):
        while True:
            Endless.sent += 1 << 20
            yield b" " * (1 << 20)


def test_an_endless_reply_is_cut():
    server = StandIn()
    api = opened(server, timeout_s=1.0)
    server.batch = lambda: httpx.Response(200, stream=Endless())
    with pytest.raises(EngineError, match="its last answer was /batch: its reply is longer than 64 MiB"):
        take(api)
    assert Endless.sent < 1 << 28


def test_an_api_that_never_runs_out_of_batches_and_environments_is_taken_from_in_turns(monkeypatch):
    monkeypatch.setattr(atropos_api, "TAKEN_BYTES", 100_000)
    server = StandIn()
    api = opened(server)
    server.batch = lambda: {"batch": [group(env=next(numbers)) for _ in range(10)]}
    numbers = itertools.count()
    for _ in range(3000):
        assert take(api) is not None
        assert len(api._groups) < 2000
    assert len(api.received) == 65 and sum(api.received.values()) >= 3000
