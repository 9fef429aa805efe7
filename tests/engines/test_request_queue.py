"""The request queue of an engine: exactly once, jobs at rest, weight updates, limits; over scripted engines."""

import gc
import threading
import time
import weakref

import pytest
import torch
from local_engines import local_pool
from processes import wait_for
from scripted_engine import CountingSource, ScriptedEngine, lost, two_layers

from swift.errors import EngineDead, EngineError, PromptTooLong, RequestRefused, SyncFailed, Unsupported
from swift.rollout.engines.completion_stream import Failure, QueueFull
from swift.rollout.engines.request_queue import RequestQueue
from swift.rollout.weights.base import Bucket
from swift.types import Request, SamplingParams

LIMIT_S = 20.0


class Box:
    """What a client gets."""

    def __init__(self, queue, requests=(), **options):
        self.stream = queue.open(**options)
        self.completions, self.failures = [], []
        if requests:
            self.stream.submit(requests)

    def look(self, timeout_s=0.0):
        for arrival in self.stream.take(timeout_s):
            (self.failures if isinstance(arrival, Failure) else self.completions).append(arrival)
        return self.completions

    def wait(self, count):
        deadline = time.monotonic() + LIMIT_S
        while len(self.completions) + sum(len(one.request_ids) for one in self.failures) < count:
            assert time.monotonic() < deadline, (self.completions, self.failures)
            self.look(0.1)
        return {one.request_id: one for one in self.completions}


@pytest.fixture
def made():
    queues = []

    def make(*engines, **options):
        engine = engines[0] if len(engines) == 1 else local_pool(*engines) if engines else ScriptedEngine()
        queues.append(RequestQueue(engine, **options))
        return queues[-1]

    yield make
    for queue in queues:
        queue.close()


class Slow(ScriptedEngine):
    def take(self, bucket):
        time.sleep(0.2)


def ask(name, prompt=(1, 2, 3), **sampling):
    return Request(name, list(prompt), SamplingParams(**{"max_new_tokens": 40, **sampling}))


def some(count, start=0):
    return [ask(f"g/{i}", seed=start + i) for i in range(count)]


def until(condition):
    assert wait_for(condition, LIMIT_S)


def until_submitted(queue, count):
    until(lambda: len(queue.engine.events) == count)


def test_clients_with_the_same_ids_each_get_their_own_answers(made):
    queue = made(ScriptedEngine(), ScriptedEngine())
    boxes = [Box(queue, some(20, start=100 * index)) for index in range(4)]
    answers = [box.wait(20) for box in boxes]
    assert all(len(box.look()) == 20 and not box.failures for box in boxes)
    assert len({tuple(answer["g/3"].token_ids) for answer in answers}) > 1


def test_what_arrives_is_announced(made):
    arrived = threading.Event()
    box = Box(made(), some(3), notify=arrived.set)
    assert arrived.wait(LIMIT_S)
    box.wait(3)


def test_requests_that_come_while_others_run_join_them(made):
    queue = made(ScriptedEngine(step_s=0.05))
    slow = Box(queue, [ask("g/6", [1], seed=6)])
    time.sleep(0.1)
    Box(queue, [ask("g/1", [1], seed=4, max_new_tokens=1)]).wait(1)
    assert slow.look() == []
    slow.wait(1)


def test_only_one_thread_is_ever_in_the_engine(made):
    engine = ScriptedEngine(step_s=0.01)
    queue = made(engine)
    boxes = [Box(queue, some(6, start=index)) for index in range(3)]
    queue.pause_in_flight()
    queue.do(lambda engine: engine.rebuild()).result(LIMIT_S)
    queue.resume().result(LIMIT_S)
    for box in boxes:
        box.wait(6)
    assert engine.overlaps == []


def test_a_job_waits_for_what_runs_and_nothing_begins_before_it(made):
    queue = made(ScriptedEngine(step_s=0.02))
    first = Box(queue, some(8))
    until_submitted(queue, 8)
    seen = []
    job = queue.do(lambda engine: seen.append(len(first.look())))
    second = Box(queue, some(8))
    job.result(LIMIT_S)
    assert seen == [8]
    assert second.look() == []
    second.wait(8)


def test_a_job_may_sample_on_its_own(made):
    queue = made(ScriptedEngine(step_s=0.05))
    job = queue.do(lambda engine: engine.generate(ask("mine", seed=6)))
    box = Box(queue, some(2))
    assert job.result(LIMIT_S).request_id == "mine"
    assert len(box.wait(2)) == 2


def test_a_job_that_is_cancelled_in_time_is_not_carried_out(made):
    queue = made(ScriptedEngine(step_s=0.02))
    box = Box(queue, some(4))
    until_submitted(queue, 4)
    seen = []
    assert queue.do(seen.append).cancel()
    box.wait(4)
    queue.do(lambda engine: None).result(LIMIT_S)
    assert seen == []


def test_a_job_that_raises_hands_its_error_over_and_others_go_on(made):
    queue = made()

    def bad(engine):
        raise EngineError("x: y: z")

    with pytest.raises(EngineError):
        queue.do(bad).result(LIMIT_S)
    assert queue.do(lambda engine: 5).result(LIMIT_S) == 5


def test_what_is_paused_in_flight_goes_on_after_jobs(made):
    queue = made(ScriptedEngine(step_s=0.02))
    box = Box(queue, [ask("g/0", [1], seed=6)])
    until_submitted(queue, 1)
    queue.pause_in_flight()
    queue.do(lambda engine: None).result(LIMIT_S)
    time.sleep(0.1)
    assert box.look() == []
    queue.resume().result(LIMIT_S)
    assert len(box.wait(1)["g/0"].token_ids) > 1


def test_a_pause_that_fails_leaves_nothing_paused(made):
    class Unwilling(ScriptedEngine):
        def pause(self):
            raise Unsupported("engine: scripted: cannot pause, as told")

    willing = ScriptedEngine(step_s=0.02)
    queue = made(willing, Unwilling(step_s=0.02))
    box = Box(queue, [ask(f"{group}/0", [group], seed=6, max_new_tokens=12) for group in range(4)])
    time.sleep(0.1)
    with pytest.raises(Unsupported):
        queue.pause_in_flight()
    assert not queue.paused
    box.wait(4)
    assert {one.finish_reason for one in box.completions} == {"stop"}
    assert willing.overlaps == []


def test_an_engine_that_cannot_be_held_is_not_paused(made):
    class Never(ScriptedEngine):
        def hold(self):
            raise Unsupported("engine: scripted: cannot be held, as told")

    queue = made(Never())
    with pytest.raises(Unsupported):
        queue.pause_in_flight()
    assert not queue.paused
    Box(queue, some(2)).wait(2)


def test_a_pause_waits_for_a_job_that_samples(made):
    queue = made(ScriptedEngine(step_s=0.03))
    job = queue.do(lambda engine: engine.generate(ask("mine", seed=6)))
    queue.pause_in_flight()
    assert job.result(LIMIT_S).finish_reason == "stop"
    queue.resume().result(LIMIT_S)
    Box(queue, some(2)).wait(2)


def test_caches_are_reset_between_two_tokens(made):
    class Cached(ScriptedEngine):
        def reset_caches(self):
            self.events.append(("reset",))

    engine = Cached(step_s=0.05)
    queue = made(engine)
    box = Box(queue, [ask("g/0", [1], seed=6)])
    until_submitted(queue, 1)
    queue.reset_caches().result(LIMIT_S)
    assert box.look() == []
    box.wait(1)
    assert [event[0] for event in engine.events if event[0] in ("pause", "reset", "resume")] == [
        "pause", "reset", "resume"
    ]  # fmt: skip


def test_an_abort_during_submission_is_not_lost(made):
    entered, go_on = threading.Event(), threading.Event()

    class Slow(ScriptedEngine):
        def submit(self, request):
            entered.set()
            assert go_on.wait(LIMIT_S)
            super().submit(request)

    queue = made(Slow(step_s=0.05))
    box = Box(queue, [ask("g/0", [1], seed=6, max_new_tokens=400)], owner="me")
    assert entered.wait(LIMIT_S)
    assert queue.running_by_owner == {"me": 1}
    assert queue.abort(lambda stream: stream.owner == "me") == 1
    go_on.set()
    assert box.wait(1)["g/0"].finish_reason == "abort"


def test_no_abort_is_lost_whenever_it_comes(made):
    queue = made(ScriptedEngine(step_s=0.002))
    for number in range(150):
        box = Box(queue, [ask(f"g/{i}", seed=6 * (4 * number + i)) for i in range(4)])  # each takes ten steps at least
        time.sleep(0.0002 * (number % 7))
        assert queue.abort(lambda stream, box=box: stream is box.stream) == 4
        assert {one.finish_reason for one in box.wait(4).values()} == {"abort"}
    assert queue.load == (0, 0)


def test_a_job_is_carried_out_when_what_waited_beside_it_is_aborted(made):
    queue = made(ScriptedEngine(step_s=0.03))
    running = Box(queue, [ask("run", seed=6)])
    until_submitted(queue, 1)
    job = queue.do(lambda engine: "done")
    waiting = Box(queue, some(3), owner="waits")
    assert queue.abort(lambda stream: stream.owner == "waits") == 3
    assert {one.finish_reason for one in waiting.wait(3).values()} == {"abort"}
    running.wait(1)
    assert job.result(LIMIT_S) == "done"


def test_a_closed_queue_cannot_be_paused(made):
    queue = made()
    queue.close()
    with pytest.raises(EngineDead, match="closed"):
        queue.pause_in_flight()


def test_requests_are_aborted_by_stream_and_by_owner(made):
    queue = made(ScriptedEngine(step_s=0.05))
    mine, theirs = Box(queue, some(4), owner="me"), Box(queue, some(4), owner="them")
    until_submitted(queue, 8)
    assert queue.abort(lambda stream: stream is mine.stream, ["g/0", "unknown"]) == 1
    assert queue.abort(lambda stream: stream.owner == "me") >= 3
    assert {one.finish_reason for one in mine.wait(4).values()} <= {"abort", "stop"}
    assert mine.wait(4)["g/0"].finish_reason == "abort"
    assert {one.finish_reason for one in theirs.wait(4).values()} == {"stop"}


def test_a_closed_stream_is_aborted_and_silent(made):
    queue = made(ScriptedEngine(step_s=0.05))
    box = Box(queue, some(8))
    until_submitted(queue, 8)
    box.stream.close()
    until(lambda: queue.load == (0, 0))
    assert box.look() == []


def test_the_queue_has_a_limit_and_takes_all_or_none(made):
    queue = made(ScriptedEngine(step_s=0.05), limit=10)
    box = Box(queue, some(6))
    with pytest.raises(QueueFull):
        Box(queue, some(5))
    box.wait(6)
    Box(queue, some(10)).wait(10)


def test_what_the_engine_does_not_take_is_refused_before_anything_is_queued(made):
    queue = made()
    with pytest.raises(PromptTooLong):
        Box(queue, [ask("a"), ask("b", [1] * 5000)])
    with pytest.raises(RequestRefused):
        Box(queue, [ask("a"), ask("a")])
    assert queue.load == (0, 0)


def test_a_failure_reaches_exactly_those_it_concerns(made):
    bad = ScriptedEngine(step_s=0.02, fail_after=0, failure=EngineError("engine: broke, as told"))
    queue = made(bad, ScriptedEngine(step_s=0.02))
    box = Box(queue, [ask(f"{group}/0", [group], seed=group, max_new_tokens=8) for group in range(1, 9)])
    done = box.wait(8)
    failed = [name for failure in box.failures for name in failure.request_ids]
    assert sorted([*done, *failed]) == sorted(f"{group}/0" for group in range(1, 9))
    assert 0 < len(failed) < 8
    Box(queue, [ask("again/0", [9], max_new_tokens=2)]).wait(1)


def test_an_engine_that_failed_and_lives_goes_on(made):
    queue = made(ScriptedEngine(fail_after=2, failure=EngineError("engine: broke, as told")))
    box = Box(queue, some(8))
    box.wait(8)
    assert sum(len(failure.request_ids) for failure in box.failures) == 6
    assert len(Box(queue, some(4)).wait(4)) == 4
    assert queue.health().alive


def test_requests_that_an_engine_forgets_fail(made):
    class Forgetful(ScriptedEngine):
        def submit(self, request):
            super().submit(request)
            if request.request_id.endswith("g/2"):
                self.lose.add(request.request_id)

    box = Box(made(Forgetful()), some(4))
    assert set(box.wait(4)) == {"g/0", "g/1", "g/3"}
    assert [failure.request_ids for failure in box.failures] == [["g/2"]]


@pytest.mark.parametrize("failure", [EngineDead("engine: died, as told"), RuntimeError("CUDA error, as told")])
def test_an_engine_that_dies_tells_everybody_and_takes_nothing_more(made, failure):
    queue = made(ScriptedEngine(fail_after=2, failure=failure))
    box = Box(queue, some(8))
    box.wait(8)
    assert sum(len(failed.request_ids) for failed in box.failures) == 6
    assert all(isinstance(failed.error, EngineDead) for failed in box.failures)
    assert not queue.health().alive
    with pytest.raises(EngineDead):
        Box(queue, some(1))
    with pytest.raises(EngineDead):
        queue.do(lambda engine: None)


def test_closing_tells_whoever_waits(made):
    queue = made(ScriptedEngine(step_s=0.2))
    box = Box(queue, some(3))
    until_submitted(queue, 3)
    job = queue.do(lambda engine: None)
    queue.close()
    box.wait(3)
    assert all(isinstance(failure.error, EngineDead) for failure in box.failures)
    with pytest.raises(EngineDead):
        job.result(LIMIT_S)
    with pytest.raises(EngineDead):
        Box(queue, some(1))


def test_closing_ends_an_open_update(made):
    queue = made()
    update = queue.updates.begin(CountingSource(two_layers(1.0)).manifest(), 1)
    update.feed.ready.result(LIMIT_S)
    began = time.monotonic()
    queue.close()
    with pytest.raises(SyncFailed, match="given up"):
        update.job.result(LIMIT_S)
    assert time.monotonic() - began < 5


# --- weights ----------------------------------------------------------------------------------------------------------


def begun(queue, manifest, version=1):
    update = queue.updates.begin(manifest, version)
    update.feed.ready.result(LIMIT_S)
    return update.number


def send(queue, value, version=1):
    source = CountingSource(two_layers(value))
    number = begun(queue, source.manifest(), version)
    for bucket in source.buckets():
        queue.updates.send(number, bucket).result(LIMIT_S)
    return number


def ended(queue):
    """Whether no update is open."""
    return queue.do(lambda engine: True).result(LIMIT_S)


def test_an_update_replaces_all_weights_and_nothing_is_sampled_meanwhile(made):
    queue = made()
    before = Box(queue, some(4)).wait(4)
    number = send(queue, 2.0)
    during = Box(queue, some(4))
    time.sleep(0.1)
    assert during.look() == []
    ack = queue.updates.commit(number).result(LIMIT_S)
    assert (ack.version, ack.tensors) == (1, 2)
    after = during.wait(4)
    assert after["g/0"].versions == [(1, 0, len(after["g/0"].token_ids))]
    assert [after[name].token_ids != before[name].token_ids for name in before].count(True) >= 3


def test_an_update_in_flight_divides_completions_by_version(made):
    queue = made(ScriptedEngine(step_s=0.03))
    box = Box(queue, [ask("g/0", [1], seed=6)])
    time.sleep(0.15)
    queue.pause_in_flight()
    number = send(queue, 2.0)
    resumed = queue.resume()  # too early: the update holds the engine
    time.sleep(0.1)
    assert not resumed.done()
    queue.updates.commit(number).result(LIMIT_S)
    assert [version for version, _, _ in box.wait(1)["g/0"].versions] == [0, 1]


def test_a_bucket_out_of_order_ends_the_update(made):
    queue = made()
    number = begun(queue, CountingSource(two_layers(1.0)).manifest())
    assert [info.name for info in queue.updates.renew(number)] == ["layer.0", "layer.1"]
    with pytest.raises(SyncFailed, match=r"tensor 0 is layer\.1"):
        queue.updates.send(number, Bucket([("layer.1", torch.ones(4))])).result(LIMIT_S)
    with pytest.raises(SyncFailed, match="is not open"):
        queue.updates.commit(number).result(LIMIT_S)
    assert ("update aborted", 1) in queue.engine.events
    Box(queue, some(1)).wait(1)


def test_a_bucket_that_comes_before_the_last_one_was_taken_is_refused(made):
    queue = made(Slow())
    source = CountingSource(two_layers(1.0))
    number = begun(queue, source.manifest())
    first, second = source.buckets()
    taken = queue.updates.send(number, first)
    with pytest.raises(SyncFailed, match="one at a time"):
        queue.updates.send(number, second)
    taken.result(LIMIT_S)
    queue.updates.send(number, second).result(LIMIT_S)
    assert queue.updates.commit(number).result(LIMIT_S).tensors == 2


def test_an_update_that_is_refused_is_not_begun(made):
    queue = made(ScriptedEngine(update_failures=[("begin", lost())]))
    update = queue.updates.begin(CountingSource(two_layers(1.0)).manifest(), 1)
    with pytest.raises(SyncFailed, match="lost on the way"):
        update.feed.ready.result(LIMIT_S)
    with pytest.raises(SyncFailed, match="is not open"):
        queue.updates.renew(update.number)
    Box(queue, some(1)).wait(1)


def test_the_error_of_an_update_is_not_kept(made):
    """It refers to the memory of the engine, which a rebuild frees."""
    queue = made(ScriptedEngine(update_failures=[("send", lost())]))
    source = CountingSource(two_layers(1.0))
    bucket = next(source.buckets())
    kept = weakref.ref(bucket.tensors[0][1])
    del source.tensors
    number = begun(queue, CountingSource(two_layers(1.0)).manifest())
    taken = queue.updates.send(number, bucket)
    del bucket
    with pytest.raises(SyncFailed, match="lost on the way"):
        taken.result(LIMIT_S)
    del taken
    until(lambda: gc.collect() >= 0 and kept() is None)


def test_an_update_that_gets_no_bucket_is_given_up(made):
    queue = made(silence_s=0.2)
    update = queue.updates.begin(CountingSource(two_layers(1.0)).manifest(), 1)
    with pytest.raises(SyncFailed, match=r"no bucket came for 0\.2 s"):
        update.job.result(LIMIT_S)
    Box(queue, some(1)).wait(1)


def test_a_commit_that_fails_ends_the_update_and_what_was_paused_goes_on(made):
    queue = made(ScriptedEngine(step_s=0.03, update_failures=[("commit", lost())]))
    box = Box(queue, [ask("g/0", [1], seed=6)])
    until_submitted(queue, 1)
    queue.pause_in_flight()
    number = send(queue, 1.0)
    queue.resume()
    with pytest.raises(SyncFailed):
        queue.updates.commit(number).result(LIMIT_S)
    assert ended(queue)
    box.wait(1)


def test_an_update_that_was_left_open_is_aborted_by_the_next_or_by_its_number(made):
    queue = made()
    manifest = CountingSource(two_layers(1.0)).manifest()
    first = begun(queue, manifest, 1)
    second = begun(queue, manifest, 2)
    queue.updates.abort(first).result(LIMIT_S)
    assert queue.updates.renew(second)
    queue.updates.abort(second).result(LIMIT_S)
    queue.updates.abort(second).result(LIMIT_S)
    assert ended(queue)
    assert [event for event in queue.engine.events if event[0] == "update aborted"] == [
        ("update aborted", 1), ("update aborted", 2)
    ]  # fmt: skip
