"""The queue before the engines: exactly once, jobs at rest, limits; over scripted engines."""

import threading
import time

import pytest
from scripted_engine import ScriptedEngine
from server_parts import ask

from swift.errors import EngineDead, EngineError, PromptTooLong, RequestRefused
from swift.rollout.engines.pool import EnginePool
from swift.rollout.server.front import Front
from swift.rollout.server.limits import Refused

LIMIT_S = 20.0


class Inbox:
    """What a client gets."""

    def __init__(self):
        self.completions, self.failures = [], []
        self.changed = threading.Condition()

    def __call__(self, arrival):
        with self.changed:
            (self.failures if isinstance(arrival, tuple) else self.completions).append(arrival)
            self.changed.notify_all()

    def wait(self, count):
        with self.changed:
            done = lambda: len(self.completions) + sum(len(ids) for ids, _ in self.failures) >= count  # noqa: E731
            assert self.changed.wait_for(done, LIMIT_S), (self.completions, self.failures)
        return {one.request_id: one for one in self.completions}


@pytest.fixture
def made():
    fronts = []

    def make(*engines, queue_limit=1000):
        front = Front(EnginePool(engines or [ScriptedEngine()]), queue_limit=queue_limit)
        fronts.append(front)
        return front

    yield make
    for front in fronts:
        front.close()


def some(count, start=0):
    return [ask(f"g/{i}", [1, 2, 3], seed=start + i, max_new_tokens=40) for i in range(count)]


def test_clients_with_the_same_ids_each_get_their_own_answers(made):
    front, boxes = made(ScriptedEngine(), ScriptedEngine()), [Inbox() for _ in range(4)]
    for index, box in enumerate(boxes):
        front.open(some(20, start=100 * index), box)
    answers = [box.wait(20) for box in boxes]
    time.sleep(0.1)
    assert all(len(box.completions) == 20 and not box.failures for box in boxes)
    assert len({tuple(answer["g/3"].token_ids) for answer in answers}) > 1


def test_requests_that_come_while_others_run_join_them(made):
    front, slow, quick = made(ScriptedEngine(step_s=0.05)), Inbox(), Inbox()
    front.open([ask("g/6", [1], seed=6, max_new_tokens=40)], slow)
    time.sleep(0.1)
    front.open([ask("g/1", [1], seed=4, max_new_tokens=1)], quick)
    quick.wait(1)
    assert slow.completions == []
    slow.wait(1)


def test_a_job_waits_for_what_runs_and_nothing_begins_before_it(made):
    engine = ScriptedEngine(step_s=0.02)
    front, first, second = made(engine), Inbox(), Inbox()
    front.open(some(8), first)
    time.sleep(0.05)
    seen = []
    job = front.do(lambda: seen.append(len(first.completions)))
    front.open(some(8), second)
    job.result(LIMIT_S)
    assert seen == [8]
    assert second.completions == []
    second.wait(8)
    assert engine.overlaps == []


def test_a_hold_lasts_over_several_jobs(made):
    front, box = made(), Inbox()
    front.hold("update")
    front.open(some(1), box)
    front.do(lambda: None).result(LIMIT_S)
    time.sleep(0.2)
    assert box.completions == []
    front.release("update")
    box.wait(1)


def test_what_is_paused_in_flight_goes_on_after_jobs(made):
    engine = ScriptedEngine(step_s=0.02)
    front, box = made(engine), Inbox()
    front.open([ask("g/0", [1], seed=6, max_new_tokens=12)], box)
    time.sleep(0.1)
    front.pause_in_flight()
    front.do(lambda: None).result(LIMIT_S)
    assert box.completions == []
    front.resume()
    assert len(box.wait(1)["g/0"].token_ids) > 1


def test_a_pause_that_fails_leaves_nothing_paused(made):
    class Unwilling(ScriptedEngine):
        def pause(self, mode="wait"):
            raise EngineError("engine: scripted: cannot pause, as told")

    willing = ScriptedEngine(step_s=0.02)
    front, box = made(willing, Unwilling(step_s=0.02)), Inbox()
    front.open([ask(f"{group}/0", [group], seed=6, max_new_tokens=12) for group in range(4)], box)
    time.sleep(0.1)
    with pytest.raises(EngineError, match="cannot pause"):
        front.pause_in_flight()
    assert not front.paused
    box.wait(4)
    assert {one.finish_reason for one in box.completions} == {"stop"}
    assert willing.overlaps == []


def test_an_abort_during_submission_is_not_lost(made):
    entered, go_on = threading.Event(), threading.Event()

    class Slow(ScriptedEngine):
        def submit(self, request):
            entered.set()
            assert go_on.wait(LIMIT_S)
            super().submit(request)

    front, box = made(Slow(step_s=0.05)), Inbox()
    front.open([ask("g/0", [1], seed=6, max_new_tokens=400)], box, owner="me")
    assert entered.wait(LIMIT_S)
    assert front.running_of == {"run me": 1}
    assert front.abort_owned("me") == 1
    go_on.set()
    assert box.wait(1)["g/0"].finish_reason == "abort"


def test_a_job_that_raises_hands_its_error_over_and_others_go_on(made):
    front = made()

    def bad():
        raise EngineError("x: y: z")

    with pytest.raises(EngineError):
        front.do(bad).result(LIMIT_S)
    assert front.do(lambda: 5).result(LIMIT_S) == 5


def test_the_queue_has_a_limit_and_takes_all_or_none(made):
    front, box = made(ScriptedEngine(step_s=0.05), queue_limit=10), Inbox()
    front.open(some(6), box)
    with pytest.raises(Refused) as caught:
        front.open(some(5), box)
    assert (caught.value.status, caught.value.kind) == (429, "queue")
    box.wait(6)
    front.open(some(10), box)
    box.wait(16)


def test_what_no_engine_takes_is_refused_before_anything_is_queued(made):
    front, box = made(), Inbox()
    with pytest.raises(PromptTooLong):
        front.open([ask("a"), ask("b", [1] * 5000)], box)
    with pytest.raises(Refused, match="comes twice"):
        front.open([ask("a"), ask("a")], box)
    assert front.load == (0, 0)


def test_a_cancelled_ticket_is_aborted_and_silent(made):
    engine = ScriptedEngine(step_s=0.05)
    front, box = made(engine), Inbox()
    ticket = front.open(some(8), box)
    time.sleep(0.1)
    front.cancel(ticket)
    count = len(box.completions)
    deadline = time.monotonic() + LIMIT_S
    while front.load != (0, 0):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert len(box.completions) == count


def test_requests_are_aborted_by_their_owner(made):
    front, mine, theirs = made(ScriptedEngine(step_s=0.05)), Inbox(), Inbox()
    front.open(some(4), mine, owner="me")
    front.open(some(4), theirs, owner="them")
    time.sleep(0.1)
    front.abort_owned("me")
    assert {one.finish_reason for one in mine.wait(4).values()} <= {"abort", "stop"}
    assert {one.finish_reason for one in theirs.wait(4).values()} == {"stop"}


def test_a_failure_reaches_exactly_those_it_concerns(made):
    bad = ScriptedEngine(step_s=0.02, fail_after=0, failure=EngineError("engine: broke, as told"))
    front, box = made(bad, ScriptedEngine(step_s=0.02)), Inbox()
    front.open([ask(f"{group}/0", [group], seed=group, max_new_tokens=8) for group in range(1, 9)], box)
    done = box.wait(8)
    failed = [name for ids, error in box.failures for name in ids]
    assert sorted([*done, *failed]) == sorted(f"{group}/0" for group in range(1, 9))
    assert 0 < len(failed) < 8
    front.open([ask("again/0", [9], max_new_tokens=2)], box)
    box.wait(9)


def test_a_request_that_the_engine_does_not_take_fails_alone(made):
    class Picky(ScriptedEngine):
        def _step(self):
            bad = next((name for name, row in self._outstanding.items() if row.request.prompt_ids == [66]), None)
            if bad is not None:
                del self._outstanding[bad]
                raise RequestRefused(bad, "request: is not taken, as told")
            return super()._step()

    front, trainer, agent = made(Picky(step_s=0.02)), Inbox(), Inbox()
    front.open(some(20), trainer)
    time.sleep(0.03)
    front.open([ask("g/0", [66], seed=6, max_new_tokens=40)], agent)
    agent.wait(1)
    assert len(trainer.wait(20)) == 20
    assert trainer.failures == []
    ((ids, error),) = agent.failures
    assert ids == ["g/0"]
    assert isinstance(error, RequestRefused)
    assert front.load == (0, 0)


def test_an_engine_that_dies_gives_its_requests_to_the_others(made):
    front, box = made(ScriptedEngine(fail_after=1), ScriptedEngine()), Inbox()
    front.open([ask(f"{group}/0", [group], seed=group, max_new_tokens=8) for group in range(1, 9)], box)
    assert len(box.wait(8)) == 8
    assert box.failures == []


def test_the_last_engine_takes_everything_with_it(made):
    front, box = made(ScriptedEngine(fail_after=2)), Inbox()
    front.open(some(8), box)
    box.wait(8)
    ((ids, error),) = box.failures
    assert isinstance(error, EngineDead)
    assert len(ids) == 6


def test_closing_tells_whoever_waits(made):
    front, box = made(ScriptedEngine(step_s=5.0)), Inbox()
    front.open(some(3), box)
    time.sleep(0.1)
    front.close()
    box.wait(3)
    assert all(isinstance(error, EngineDead) for _, error in box.failures)
    with pytest.raises(EngineDead):
        front.open(some(1), box)
    with pytest.raises(EngineDead):
        front.do(lambda: None)
