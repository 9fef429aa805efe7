"""Several engines as one: who gets what, and what happens when one of them fails. The engines are scripted."""

import threading
import time
from dataclasses import replace

import pytest
from scripted_engine import CountingSource, ScriptedEngine, lost, two_layers

from swift.errors import ConfigError, EngineDead, EngineError, PromptTooLong, RequestRefused, SyncFailed
from swift.rollout.engines.base import Capabilities, SleepReport
from swift.rollout.engines.pool import EnginePool, common_capabilities
from swift.rollout.weights.base import Bucket
from swift.types import Request, SamplingParams


class Member(ScriptedEngine):
    """Remembers what it was given, and how it was closed."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.given, self.buckets = [], []
        self.closing_s = 0.0

    def submit(self, request):
        super().submit(request)
        self.given.append(request.request_id)

    def begin_update(self, manifest, version):
        update = super().begin_update(manifest, version)
        deliver = update._deliver

        def noting(bucket):
            self.buckets.append(bucket)
            deliver(bucket)

        update._deliver = noting
        return update

    def sleep(self, level):
        self.events.append(("sleep", level))
        return SleepReport(100, "weights stay resident")

    def wake(self, tags=()):
        self.events.append(("wake", tuple(tags)))
        return True

    def close(self):
        time.sleep(self.closing_s)
        super().close()


def group(name, *, size=4, prompt=(1, 2, 3), new=10, start=0):
    return [
        Request(f"{name}/{i}", list(prompt), SamplingParams(max_new_tokens=new, seed=start + i)) for i in range(size)
    ]


def names(requests):
    return [request.request_id for request in requests]


def run(pool, requests):
    done = {}
    for completion in pool.generate(requests):
        assert completion.request_id not in done, "came twice"
        done[completion.request_id] = completion
    assert set(done) == set(names(requests))
    return done


def test_whole_groups_go_to_the_engine_with_the_fewest_outstanding_tokens():
    engines = [Member(), Member()]
    pool = EnginePool(engines)
    small, large, next_small = group("a"), group("b", new=100), group("c")
    for request in [*small, *large, *next_small]:
        pool.submit(request)
    assert engines[0].given == names(small) + names(next_small)
    assert engines[1].given == names(large)
    assert len(list(pool.stream())) == 12


def test_two_groups_of_the_same_prompt_are_not_kept_together():
    engines = [Member(), Member()]
    pool = EnginePool(engines)
    run(pool, [*group("a"), *group("b")])
    assert (engines[0].given, engines[1].given) == (names(group("a")), names(group("b")))


def test_completions_come_as_they_finish_and_what_is_submitted_meanwhile_joins():
    slow, quick = Member(step_s=0.1), Member()
    pool = EnginePool([slow, quick])
    first, second, third = group("slow"), group("quick"), group("third")
    for request in [*first, *second]:
        pool.submit(request)
    came = []
    for completion in pool.stream():
        came.append(completion.request_id)
        if len(came) == 1:
            for request in third:
                pool.submit(request)
    assert came[0].startswith("quick")
    assert sorted(came) == sorted(names([*first, *second, *third]))
    assert slow.overlaps == []


def test_samples_do_not_depend_on_the_engine():
    requests = [request for n in range(4) for request in group(str(n), start=10 * n)]
    alone, together = EnginePool([Member()]), EnginePool([Member(), Member(), Member()])
    single = {name: one.token_ids for name, one in run(alone, requests).items()}
    assert single == {name: one.token_ids for name, one in run(together, requests).items()}


def test_a_dead_engines_requests_move_to_the_others_exactly_once():
    engines = [Member(fail_after=2, step_s=0.01), Member(step_s=0.01)]
    pool = EnginePool(engines)
    done = run(pool, [request for n in range(4) for request in group(str(n), start=10 * n)])
    assert {one.finish_reason for one in done.values()} == {"stop"}
    assert pool.engines == [engines[1]]
    assert pool.health().alive
    assert "it died, as it was told to" in pool.health().detail
    run(pool, group("later"))


def test_what_was_aborted_on_a_dead_engine_is_not_sampled_again():
    pool = EnginePool([Member(fail_after=0, step_s=0.05), Member(step_s=0.01)])
    for request in group("a"):
        pool.submit(request)
    pool.abort(["a/1"])
    done = {one.request_id: one.finish_reason for one in pool.stream()}
    assert done == {"a/0": "stop", "a/1": "abort", "a/2": "stop", "a/3": "stop"}


def test_the_last_engine_takes_the_pool_with_it():
    pool = EnginePool([Member(fail_after=1), Member(fail_after=1)])
    with pytest.raises(EngineDead, match="as it was told"):
        run(pool, [*group("a"), *group("b")])
    with pytest.raises(EngineDead):
        pool.submit(group("c")[0])
    assert not pool.health().alive


def test_another_failure_is_raised_and_leaves_a_usable_pool():
    failing = Member(fail_after=0, failure=EngineError("engine: scripted: one request was bad"))
    pool = EnginePool([failing, Member(step_s=0.02)])
    with pytest.raises(EngineError, match="one request was bad"):
        run(pool, [*group("a"), *group("b")])
    pool.abort()
    list(pool.stream())
    failing.fail_after = None
    run(pool, [*group("a"), *group("b")])


class Refusing(Member):
    """Raises at its second completion once, and keeps what else it has, as an engine of another process does."""

    refusal = None

    def stream(self):
        for completion in super().stream():
            yield completion
            if self.refusal is not None:
                failure, self.refusal = self.refusal, None
                raise failure


def test_nothing_of_a_refused_round_is_left_in_the_engine():
    refusing = Refusing()
    refusing.refusal = EngineError("engine: scripted: one request was bad")
    pool = EnginePool([refusing])
    with pytest.raises(EngineError, match="one request was bad"):
        run(pool, group("a", size=8))
    assert not refusing._outstanding
    pool.load_weights(CountingSource(two_layers(1)), 1)
    run(pool, group("a", size=8))


def test_a_refused_request_takes_no_other_with_it():
    class Picky(Member):
        def _step(self):
            if self.counters.decode_steps == 1:
                del self._outstanding["a/5"]
                self.counters.decode_steps += 1
                raise RequestRefused("a/5", "request: a/5: is not taken, as told")
            self.counters.decode_steps += 1
            return super()._step()

    pool = EnginePool([Picky()])
    wanted = group("a", size=8)
    for request in wanted:
        pool.submit(request)
    done = []
    with pytest.raises(RequestRefused, match="as told"):
        done.extend(pool.stream())
    assert pool.outstanding == set(names(wanted)) - {"a/5"} - {one.request_id for one in done}
    done += pool.stream()
    assert len(done) == 7
    assert not pool.outstanding


def test_a_pause_that_one_engine_refuses_pauses_none():
    class Unwilling(Member):
        def pause(self, mode="wait"):
            raise EngineError("engine: scripted: cannot pause, as told")

    pool = EnginePool([Member(), Unwilling()])
    for request in [*group("a"), *group("b")]:
        pool.submit(request)
    with pytest.raises(EngineError, match="cannot pause"):
        pool.pause("keep")
    assert len(list(pool.stream())) == 8


def test_a_prompt_that_is_too_long_for_one_engine_is_refused():
    pool = EnginePool([Member(max_model_len=100), Member(max_model_len=20)])
    assert pool.capabilities.max_model_len == 20
    with pytest.raises(PromptTooLong):
        pool.submit(group("a", prompt=[1] * 20)[0])
    with pytest.raises(EngineError, match="outstanding already"):
        for _ in range(2):
            pool.submit(group("a")[0])


def test_abort_reaches_every_engine():
    pool = EnginePool([Member(step_s=0.05), Member(step_s=0.05)])
    for request in [*group("a"), *group("b")]:
        pool.submit(request)
    pool.abort(["a/0", "b/3"])
    reasons = {one.request_id: one.finish_reason for one in pool.stream()}
    assert {name for name, reason in reasons.items() if reason == "abort"} == {"a/0", "b/3"}
    assert len(reasons) == 8


def test_a_caller_that_leaves_early_leaves_nothing_behind():
    pool = EnginePool([Member(step_s=0.02), Member(step_s=0.02)])
    stream = pool.generate([*group("a"), *group("b")])
    next(stream)
    stream.close()
    assert list(pool.stream()) == []
    run(pool, [*group("a"), *group("b")])


def test_pause_from_another_thread_ends_the_stream_and_resume_goes_on():
    engines = [Member(step_s=0.05), Member(step_s=0.05)]
    pool = EnginePool(engines)
    for request in [*group("a"), *group("b")]:
        pool.submit(request)
    timer = threading.Timer(0.12, lambda: pool.pause("keep"))
    timer.start()
    before = [one.request_id for one in pool.stream()]
    timer.join()
    pool.load_weights(CountingSource(two_layers(2)), 1)
    pool.resume()
    after = list(pool.stream())
    assert sorted(before + [one.request_id for one in after]) == sorted(names([*group("a"), *group("b")]))
    assert any(len(one.versions) == 2 for one in after)
    assert [engine.overlaps for engine in engines] == [[], []]


@pytest.mark.parametrize("mode", ["abort", "wait", "keep"])
def test_a_paused_pool_delivers_what_ended_and_keeps_the_rest(mode):
    pool = EnginePool([Member(step_s=0.01), Member(step_s=0.01)])
    for request in [*group("a"), *group("b")]:
        pool.submit(request)
    pool.pause(mode)
    paused = [one.finish_reason for one in pool.stream()]
    assert set(paused) == {"abort": {"abort"}, "wait": {"stop"}, "keep": set()}[mode]
    pool.resume()
    assert len(paused) + len(list(pool.stream())) == 8


# --- weights -----------------------------------------------------------------------------------------------------


def test_an_update_reaches_every_engine_with_the_same_buckets():
    engines = [Member(), Member(), Member()]
    pool = EnginePool(engines)
    ack = pool.load_weights(CountingSource(two_layers(5)), 3)
    assert (ack.version, ack.tensors) == (3, 2)
    assert [engine.version for engine in engines] == [3, 3, 3]
    assert len({engine.weights for engine in engines}) == 1
    for ours, theirs in zip(engines[0].buckets, engines[1].buckets, strict=True):
        assert ours is theirs
    assert all("checksums" in bucket.made for bucket in engines[0].buckets)
    assert pool.version == 3


def test_an_update_that_misses_one_engine_voids_the_pool_until_it_is_rebuilt():
    engines = [Member(), Member(update_failures=[("send", lost())])]
    pool = EnginePool(engines)
    with pytest.raises(SyncFailed, match="lost on the way"):
        pool.load_weights(CountingSource(two_layers(5)), 1)
    assert ("update aborted", 1) in engines[0].events
    with pytest.raises(SyncFailed, match="void"):
        pool.submit(group("a")[0])
    assert not pool.health().alive
    pool.rebuild()
    assert [engine.events[-1] for engine in engines] == [("rebuild",)] * 2
    assert pool.load_weights(CountingSource(two_layers(5)), 1).version == 1
    run(pool, group("a"))


def test_an_update_that_one_engine_refuses_is_not_begun_anywhere():
    engines = [Member(), Member(update_failures=[("begin", lost())])]
    pool = EnginePool(engines)
    with pytest.raises(SyncFailed):
        pool.begin_update(CountingSource(two_layers(5)).manifest(), 1)
    assert ("update aborted", 1) in engines[0].events
    run(pool, group("a"))


def test_engines_that_confirm_different_things_are_not_believed():
    class Liar(Member):
        def begin_update(self, manifest, version):
            update = super().begin_update(manifest, version)
            update.commit = lambda: replace(type(update).commit(update), digest="0" * 32)
            return update

    pool = EnginePool([Member(), Liar()])
    with pytest.raises(SyncFailed, match="different things"):
        pool.load_weights(CountingSource(two_layers(5)), 1)
    with pytest.raises(SyncFailed, match="void"):
        pool.submit(group("a")[0])


def test_a_dead_engine_does_not_keep_the_others_from_an_update():
    dead = Member(update_failures=[("begin", EngineDead("engine: scripted: gone"))])
    alive = Member()
    pool = EnginePool([dead, alive])
    assert pool.load_weights(CountingSource(two_layers(5)), 1).version == 1
    assert pool.engines == [alive]


@pytest.mark.parametrize("stage", ["begin", "send", "commit"])
def test_an_engine_that_dies_during_an_update_in_flight_loses_no_request(stage):
    dying = Member(step_s=0.02, update_failures=[(stage, EngineDead("engine: scripted: gone"))])
    alive = Member(step_s=0.02)
    pool = EnginePool([dying, alive])
    wanted = [request for n in range(4) for request in group(str(n), start=10 * n)]
    for request in wanted:
        pool.submit(request)
    came = []
    for completion in pool.stream():
        came.append(completion)
        if len(came) == 2:
            pool.pause("keep")
            assert pool.load_weights(CountingSource(two_layers(5)), 1).version == 1
            pool.resume()
    assert sorted(one.request_id for one in came) == sorted(names(wanted))
    assert {one.finish_reason for one in came} == {"stop"}
    assert pool.engines == [alive]


def test_an_engine_that_dies_while_another_refuses_an_update_undoes_the_rest():
    dying = Member(update_failures=[("begin", EngineDead("engine: scripted: gone"))])
    refusing, third = Member(update_failures=[("begin", lost())]), Member()
    pool = EnginePool([dying, refusing, third])
    with pytest.raises(SyncFailed, match="lost on the way"):
        pool.begin_update(CountingSource(two_layers(5)).manifest(), 1)
    assert ("update aborted", 1) in third.events


def test_no_update_while_requests_are_outstanding():
    pool = EnginePool([Member()])
    pool.submit(group("a")[0])
    with pytest.raises(EngineError, match="outstanding"):
        pool.begin_update(CountingSource(two_layers(5)).manifest(), 1)
    assert len(list(pool.stream())) == 1


# --- the rest ----------------------------------------------------------------------------------------------------


def test_what_the_pool_can_do_is_what_each_engine_can_do():
    one = Capabilities(
        "vllm", "full", True, False, 100, lora=True, max_lora_rank=16, sleep_levels=(0, 1, 2), kv_release=True,
        in_flight_updates=True, transports=("shared_memory", "broadcast"), devices=("cuda:1",),
    )  # fmt: skip
    other = Capabilities(
        "vllm", "raw", True, False, 80, lora=False, sleep_levels=(0, 1), transports=("broadcast",), devices=("cuda:2",)
    )
    both = common_capabilities([one, other])
    assert (both.logprob_support, both.max_model_len, both.lora, both.max_lora_rank) == ("raw", 80, False, 0)
    assert (both.sleep_levels, both.kv_release, both.in_flight_updates) == ((0, 1), False, False)
    assert (both.transports, both.devices) == (("broadcast",), ("cuda:1", "cuda:2"))


def test_sleep_and_wake_reach_every_engine():
    engines = [Member(), Member()]
    pool = EnginePool(engines)
    report = pool.sleep(1)
    assert (report.freed_bytes, report.note) == (200, "weights stay resident")
    assert pool.wake(("weights",)) is True
    assert [engine.events for engine in engines] == [[("sleep", 1), ("wake", ("weights",))]] * 2


def test_close_ends_all_engines_at_the_same_time_and_a_running_stream():
    engines = [Member(step_s=0.05, stuck="close"), Member(step_s=0.05, stuck="close")]
    for engine in engines:
        engine.closing_s = 0.5
    pool = EnginePool(engines)
    ended = []

    def sample():
        with pytest.raises(EngineDead):
            run(pool, [*group("a"), *group("b")])
        ended.append(time.monotonic())

    thread = threading.Thread(target=sample)
    thread.start()
    time.sleep(0.2)
    began = time.monotonic()
    pool.close()
    assert time.monotonic() - began < 0.95
    thread.join(5)
    assert ended
    assert ended[0] - began < 2.5


def test_an_engine_that_does_not_start_closes_the_others():
    class Unready(Member):
        @property
        def capabilities(self):
            raise EngineDead("engine 1: did not start")

        @capabilities.setter
        def capabilities(self, value):
            pass

    first = Member()
    with pytest.raises(EngineDead, match="did not start"):
        EnginePool([first, Unready()])
    assert ("close",) in first.events


def test_counters_are_sums():
    engines = [Member(), Member()]
    engines[0].counters.restarts, engines[1].counters.restarts = 1, 2
    engines[0].counters.decode_rows = 10
    assert (EnginePool(engines).counters.restarts, EnginePool(engines).counters.decode_rows) == (3, 10)


def test_a_bucket_without_tensors_is_no_bucket_to_fail_on():
    pool = EnginePool([Member(), Member()])
    source = CountingSource(two_layers(5))
    update = pool.begin_update(source.manifest(), 1)
    update.send(Bucket([]))
    for bucket in source.buckets():
        update.send(bucket)
    assert update.commit().version == 1


def test_an_adapter_that_every_engine_refuses_changes_nothing(monkeypatch):
    pool = EnginePool([Member(), Member()])

    def refuse(adapter, version):
        raise ConfigError("--vllm_max_lora_rank: 8: the adapter has rank 16; set it to 16")

    for engine in pool.engines:
        monkeypatch.setattr(engine, "load_adapter", refuse)
    with pytest.raises(ConfigError, match="rank 16"):
        pool.load_adapter(None, 1)
    assert len(list(pool.generate(group("a")))) == 4
    pool.close()
