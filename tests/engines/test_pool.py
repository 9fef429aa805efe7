"""Several engines as one: who gets what, and what happens when one of them fails. The engines are scripted."""

import itertools
import threading
import time
from dataclasses import replace

import pytest
import torch
from given_weights import Watched
from local_engines import engines_of, local_pool
from oracle import load, with_noise
from processes import wait_for
from scripted_engine import CountingSource, ScriptedEngine, lost, two_layers, weights_of
from sources import asking, nothing_left, outcomes

from swift.errors import ConfigError, EngineDead, EngineError, NumericError, PromptTooLong, RequestRefused, SyncFailed
from swift.rollout.engines.base import Capabilities, SleepReport
from swift.rollout.engines.pool import common_capabilities
from swift.rollout.engines.spec import EngineSpec, build_engine
from swift.rollout.weights.base import Ack, AdapterWeights, Bucket, WeightStream
from swift.rollout.weights.policy import PolicyWeights
from swift.types import Request, SamplingParams


class Member(ScriptedEngine):
    """Remembers what it was given, and how it was closed."""

    def __init__(self, *, closing_s=0.0, **kwargs):
        super().__init__(**kwargs)
        self.given, self.closing_s = [], closing_s
        self.capabilities = replace(self.capabilities, sleep_levels=(0, 1, 2))

    def submit(self, request):
        super().submit(request)
        self.given.append(request.request_id.partition(":")[2])

    def sleep(self, level):
        self.events.append(("sleep", level))
        return SleepReport(100, "weights stay resident")

    def wake(self, tags=()):
        self.events.append(("wake", tuple(tags)))
        return True

    def close(self):
        time.sleep(self.closing_s)
        super().close()


@pytest.fixture
def pool_of():
    made = []

    def make(*engines, **options):
        made.append(local_pool(*engines, **options))
        return made[-1]

    yield make
    for pool in made:
        pool.close()


def group(name, *, size=4, prompt=(1, 2, 3), new=10, start=0):
    return [
        Request(f"{name}/{i}", list(prompt), SamplingParams(max_new_tokens=new, seed=start + i)) for i in range(size)
    ]


def several(count):
    return [request for n in range(count) for request in group(str(n), start=10 * n)]


def names(requests):
    return [request.request_id for request in requests]


def collected(completions):
    done = {}
    for completion in completions:
        assert completion.request_id not in done, "came twice"
        done[completion.request_id] = completion
    return done


def run(pool, requests):
    done = collected(pool.sample(requests))
    assert set(done) == set(names(requests))
    return done


def test_whole_groups_go_to_the_engine_with_the_fewest_outstanding_tokens(pool_of):
    engines = [Member(), Member()]
    pool = pool_of(*engines)
    small, large, next_small = group("a"), group("b", new=100), group("c")
    run(pool, [*small, *large, *next_small])
    assert engines[0].given == names(small) + names(next_small)
    assert engines[1].given == names(large)


def test_two_groups_of_the_same_prompt_are_not_kept_together(pool_of):
    engines = [Member(), Member()]
    run(pool_of(*engines), [*group("a"), *group("b")])
    assert (engines[0].given, engines[1].given) == (names(group("a")), names(group("b")))


def turn(trajectory, number, new=10):
    return Request(f"{trajectory}#{number}", [1, 2, 3] + [4] * number, SamplingParams(max_new_tokens=new, seed=number))


def test_the_turns_of_a_trajectory_stay_with_the_engine_of_the_first_one(pool_of):
    engines = [Member(), Member()]
    pool = pool_of(*engines)
    trajectories = [f"{name}/{sample}" for name in "ab" for sample in range(2)]
    for number in range(3):  # in every order: the second group has its later turns first
        run(pool, [turn(one, number) for one in sorted(trajectories, reverse=number > 0)])
    homes = [{name.partition("#")[0] for name in engine.given} for engine in engines]
    assert homes == [{"a/0", "a/1"}, {"b/0", "b/1"}]


def test_a_turn_leaves_an_engine_that_has_far_more_to_do_and_stays_where_it_went(pool_of):
    engines = [Member(step_s=0.02), Member()]
    pool = pool_of(*engines)
    run(pool, [turn("a/0", 0)])
    run(pool, [*group("long", new=200, start=6), turn("a/0", 1)])  # the group goes to the same, idle engine
    run(pool, [turn("a/0", 2)])
    assert engines[0].given == ["a/0#0", *names(group("long"))]
    assert engines[1].given == ["a/0#1", "a/0#2"]


def test_a_turn_whose_engine_is_dead_goes_to_another(pool_of):
    engines = [Member(fail_after=1), Member()]
    pool = pool_of(*engines)
    run(pool, [turn("a/0", 0)])
    run(pool, [turn("a/0", 1)])
    run(pool, [turn("a/0", 2)])
    assert engines[1].given == ["a/0#1", "a/0#2"]


def test_completions_come_as_they_finish_and_what_is_submitted_meanwhile_joins(pool_of):
    slow, quick = Member(step_s=0.1), Member()
    pool = pool_of(slow, quick)
    first, second, third = group("slow"), group("quick"), group("third")
    came = []
    with asking(pool, *first, *second) as caller:
        for completion in caller.completions():
            came.append(completion.request_id)
            if len(came) == 1:
                caller.ask(*third)
    assert came[0].startswith("quick")
    assert sorted(came) == sorted(names([*first, *second, *third]))
    assert slow.overlaps == []


def test_samples_do_not_depend_on_the_engine(pool_of):
    alone, together = run(pool_of(Member()), several(4)), run(pool_of(Member(), Member(), Member()), several(4))
    assert {name: one.token_ids for name, one in alone.items()} == {
        name: one.token_ids for name, one in together.items()
    }


# --- failures ----------------------------------------------------------------------------------------------------


def test_a_dead_engines_requests_move_to_the_others_exactly_once(pool_of):
    engines = [Member(fail_after=2, step_s=0.01), Member(step_s=0.01)]
    pool = pool_of(*engines)
    done = run(pool, several(4))
    assert {one.finish_reason for one in done.values()} == {"stop"}
    assert engines_of(pool) == [engines[1]]
    assert pool.health().alive
    assert "it died, as it was told to" in pool.health().detail
    run(pool, group("later"))


def test_while_an_engine_is_replaced_the_others_sample_and_the_new_one_has_its_weights(pool_of):
    go_on, made = threading.Event(), []

    def another():
        assert go_on.wait(60)
        made.append(Member())
        return made[-1]

    pool = pool_of(Member(fail_after=2, step_s=0.01), Member(step_s=0.01), again=another)
    pool.load_weights(CountingSource(two_layers(3)), 5)
    expected = run(pool_of(Member()), several(4))
    assert set(run(pool, several(4))) == set(expected)  # though the first engine is not there
    assert made == []
    go_on.set()
    assert wait_for(lambda: made)
    done = run(pool, [*group("x"), *group("y")])
    assert {one.versions[0][0] for one in done.values()} == {5}
    assert made[0].weights == weights_of(two_layers(3))
    assert made[0].given
    assert (pool.counters.restarts, pool.version) == (1, 5)


def test_an_engine_that_is_not_given_its_weights_back_does_not_sample(pool_of):
    refused = EngineError("engine: scripted: no room for an update, as told")
    pool = pool_of(Member(fail_after=2), again=lambda: Member(update_failures=[("begin", refused)]))
    pool.load_weights(CountingSource(two_layers(3)), 5)
    with pytest.raises(SyncFailed, match=r"invalid.*no room"):
        run(pool, several(4))
    with pytest.raises(SyncFailed, match="invalid"):
        run(pool, group("later"))
    pool.load_weights(CountingSource(two_layers(4)), 6)
    assert {one.versions[0][0] for one in run(pool, group("again")).values()} == {6}


def test_an_engine_whose_weights_nobody_kept_samples_again_with_the_next_ones(pool_of):
    made = []

    def another():
        made.append(Member())
        return made[-1]

    dying, living = Member(fail_after=2), Member(step_s=0.01)
    pool = pool_of(dying, living, again=another)
    pool.load_weights(CountingSource(two_layers(3)), 5)
    for client in pool.engines:
        client._kept = None  # as after a broadcast
    done = run(pool, several(4))
    assert wait_for(lambda: made and not pool.engines[0].replacing)
    done |= run(pool, [*group("x"), *group("y")])
    assert {one.versions[0][0] for one in done.values()} == {5}
    assert made[0].given == []
    pool.load_weights(CountingSource(two_layers(4)), 6)
    run(pool, [*group("x"), *group("y")])
    assert made[0].given
    for client, member in zip(pool.engines, (made[0], living), strict=True):
        client._kept, member.fail_after = None, member.delivered
    with pytest.raises(EngineDead, match="none of them has it"):
        run(pool, several(4))


def test_an_engine_whose_adapter_was_dropped_can_be_replaced(pool_of):
    class Adapted(Member):
        def load_adapter(self, adapter, version):
            self.version = version
            return Ack(version, len(adapter.tensors), adapter.nbytes, adapter.digest())

        def drop_adapter(self):
            self.version = 0

    pool = pool_of(Adapted(lora=True, fail_after=2), again=lambda: Adapted(lora=True))
    pool.load_adapter(AdapterWeights({}, {"a": torch.ones(2)}), 1)
    pool.drop_adapter()
    assert {one.versions[0][0] for one in run(pool, several(2)).values()} == {0}
    assert pool.counters.restarts == 1


def test_what_was_aborted_on_a_dead_engine_is_not_sampled_again(pool_of):
    pool = pool_of(Member(fail_after=0, step_s=0.05), Member(step_s=0.01))
    with asking(pool, *group("a")) as caller:
        pool.abort(["a/1"])
        done = {one.request_id: one.finish_reason for one in caller.completions()}
    assert done == {"a/0": "stop", "a/1": "abort", "a/2": "stop", "a/3": "stop"}


def test_the_last_engine_takes_the_pool_with_it(pool_of):
    pool = pool_of(Member(fail_after=1), Member(fail_after=1))
    with pytest.raises(EngineDead, match="as it was told"):
        run(pool, [*group("a"), *group("b")])
    with pytest.raises(EngineDead):
        run(pool, group("c"))
    assert not pool.health().alive


def test_another_failure_is_raised_and_leaves_a_usable_pool(pool_of):
    failing = Member(fail_after=0, failure=EngineError("engine: scripted: one request was bad"))
    pool = pool_of(failing, Member(step_s=0.02))
    with pytest.raises(EngineError, match="one request was bad"):
        run(pool, [*group("a"), *group("b")])
    assert nothing_left(pool)
    assert not failing._outstanding
    pool.load_weights(CountingSource(two_layers(1)), 1)
    run(pool, [*group("a"), *group("b")])


def test_a_refused_request_takes_no_other_with_it(pool_of):
    class Picky(Member):
        def _step(self):
            self.counters.decode_steps += 1
            if self.counters.decode_steps == 2:
                name = next(name for name in self._outstanding if name.endswith("a/5"))
                del self._outstanding[name]
                raise RequestRefused(name, "request: a/5: is not taken, as told")
            return super()._step()

    pool = pool_of(Picky())
    wanted = group("a", size=8)
    ended = dict(zip(names(wanted), outcomes(pool, wanted), strict=True))
    assert isinstance(ended.pop("a/5"), RequestRefused)
    assert {one.finish_reason for one in ended.values()} == {"stop"}
    assert len(run(pool, wanted)) == 8


def test_an_error_in_sending_reaches_the_caller(pool_of):
    pool = pool_of(Member())

    def post(instance, requests):
        raise TypeError("no JSON, as told")

    pool.engines[0].post = post
    with pytest.raises(TypeError, match="as told"):
        run(pool, group("a"))
    assert nothing_left(pool)


def test_the_last_engine_of_several_is_alone(pool_of):
    pool = pool_of(Member(fail_after=0), Member())
    assert [client.alone for client in pool.engines] == [False, False]
    run(pool, group("a"))
    assert wait_for(lambda: [client.alone for client in pool.engines] == [True])  # once the failure is told


def test_what_an_engine_cannot_even_queue_fails_with_its_cause(pool_of):
    class Puzzled(Member):
        def check_length(self, request):
            if request.request_id == "a/1":
                raise AttributeError("no such thing, as told")
            super().check_length(request)

    pool = pool_of(Puzzled())
    ended = dict(zip(names(group("a")), outcomes(pool, group("a")), strict=True))
    assert "AttributeError: no such thing, as told" in str(ended.pop("a/1"))
    assert {one.finish_reason for one in ended.values()} == {"stop"}


@pytest.mark.parametrize("logprobs", [[float("nan")], [0.1], [], [float("-inf")]])
def test_impossible_logprobs_are_an_error_that_names_engine_and_request(pool_of, logprobs):
    class Broken(Member):
        def _step(self):
            ended = super()._step()
            for one in ended:
                if one.request_id.endswith("a/2"):
                    one.token_ids, one.logprobs = [5], logprobs
            return ended

    pool = pool_of(Broken())
    with pytest.raises(NumericError, match="engine 0: request a/2: "):
        run(pool, group("a"))
    assert nothing_left(pool)


def test_a_request_that_takes_too_long_is_tried_twice_and_given_up_alone(pool_of):
    class Endless(Member):
        def _step(self):
            for name, row in self._outstanding.items():
                row.length = 1 << 30 if name.endswith("a/1") else row.length
            return super()._step()

    pool = pool_of(Endless(step_s=0.01))
    done = run(pool, [replace(one, limit_s=0.5) for one in group("a")])
    assert done["a/1"].finish_reason == "error"
    assert {one.finish_reason for name, one in done.items() if name != "a/1"} == {"stop"}
    assert pool.counters.late == 2


def test_a_prompt_that_is_too_long_for_one_engine_is_refused(pool_of):
    pool = pool_of(Member(max_model_len=100), Member(max_model_len=20))
    assert pool.capabilities.max_model_len == 20
    with pytest.raises(PromptTooLong):
        run(pool, group("a", prompt=[1] * 20))
    with pytest.raises(EngineError, match="outstanding already"):
        run(pool, [group("a")[0]] * 2)


def test_a_paused_pool_goes_on_with_new_weights(pool_of):
    engines = [Member(step_s=0.05), Member(step_s=0.05)]
    pool = pool_of(*engines)
    wanted = [*group("a"), *group("b")]
    with asking(pool, *wanted) as caller:
        time.sleep(0.12)
        caller.hold()
        caller.ask(*group("later"))
        pool.load_weights(CountingSource(two_layers(2)), 1)
        caller.release()
        done = collected(caller.completions())
    assert sorted(done) == sorted(names([*wanted, *group("later")]))
    assert any(len(one.versions) == 2 for one in done.values())
    assert {one.versions[0][0] for name, one in done.items() if name.startswith("later")} == {1}
    assert [engine.overlaps for engine in engines] == [[], []]


# --- weights -----------------------------------------------------------------------------------------------------


def test_an_update_reaches_every_engine(pool_of):
    engines = [Member(), Member(), Member()]
    pool = pool_of(*engines)
    source = CountingSource(two_layers(5))
    ack = pool.update(WeightStream(source.manifest(), [Bucket([]), *source.buckets()], 3, from_trainer=True))
    assert (ack.version, ack.tensors) == (3, 2)
    assert [engine.version for engine in engines] == [3, 3, 3]
    assert {engine.weights for engine in engines} == {weights_of(two_layers(5))}
    assert pool.version == 3


def test_a_bucket_is_freed_before_the_next_one_is_gathered(pool_of):
    assert pool_of(Member(), Member()).load_weights(Watched(), 1).tensors == 3


@pytest.mark.parametrize("stage", ["send", "commit"])
def test_an_update_that_misses_one_engine_voids_the_pool_until_it_is_rebuilt(pool_of, stage):
    engines = [Member(), Member(update_failures=[(stage, lost())])]
    pool = pool_of(*engines)
    with pytest.raises(SyncFailed, match="lost on the way"):
        pool.load_weights(CountingSource(two_layers(5)), 1)
    assert (("update aborted", 1) in engines[0].events) == (stage == "send")
    assert all(client.invalid for client in pool.engines)
    assert pool.version == 0
    with pytest.raises(SyncFailed, match="invalid"):
        run(pool, group("a"))
    assert not pool.health().alive
    pool.rebuild()
    assert [engine.events[-1] for engine in engines] == [("rebuild",)] * 2
    assert pool.load_weights(CountingSource(two_layers(5)), 1).version == 1
    run(pool, group("a"))


def test_an_update_that_one_engine_refuses_is_not_begun_anywhere(pool_of):
    engines = [
        Member(), Member(update_failures=[("begin", lost())]),
        Member(update_failures=[("begin", EngineDead("engine: scripted: gone"))]),
    ]  # fmt: skip
    pool = pool_of(*engines)
    with pytest.raises(SyncFailed, match="lost on the way"):
        pool.load_weights(CountingSource(two_layers(5)), 1)
    assert ("update aborted", 1) in engines[0].events
    assert engines_of(pool) == engines[:2]
    run(pool, group("a"))


@pytest.mark.parametrize("stage", ["begin", "send", "commit"])
def test_an_engine_that_dies_during_an_update_in_flight_loses_no_request(pool_of, stage):
    dying = Member(step_s=0.02, update_failures=[(stage, EngineDead("engine: scripted: gone"))])
    alive = Member(step_s=0.02)
    pool = pool_of(dying, alive)
    came = []
    with asking(pool, *several(4)) as caller:
        for completion in caller.completions():
            came.append(completion)
            if len(came) == 2:
                caller.hold()
                if stage != "begin":  # then nobody has to know
                    with pytest.raises(SyncFailed, match="gone"):
                        pool.load_weights(CountingSource(two_layers(5)), 1)
                    pool.rebuild()
                assert pool.load_weights(CountingSource(two_layers(5)), 1).version == 1
                caller.release()
    assert sorted(collected(came)) == sorted(names(several(4)))
    assert {one.finish_reason for one in came} == {"stop"}
    if stage == "begin":
        assert engines_of(pool) == [alive]


def test_an_engine_may_begin_long_after_the_others(pool_of):
    class Begins(Member):
        def update(self, stream):
            time.sleep(0.6)
            return super().update(stream)

    pool = pool_of(Member(), Begins(), sync_s=0.5)
    assert pool.load_weights(CountingSource(two_layers(5)), 1).version == 1


def test_no_thread_waits_for_an_engine_that_dies_after_its_begin(pool_of):
    class Dies(Member):
        def update(self, stream):
            time.sleep(0.2)
            pool.engines[0].dead = EngineDead("engine 0: gone")
            return super().update(stream)

    pool = pool_of(Member(), Dies())
    assert pool.load_weights(CountingSource(two_layers(5)), 1).version == 1
    assert wait_for(lambda: not [one for one in threading.enumerate() if one.name.startswith("weights of")])


def test_an_adapter_that_every_engine_refuses_changes_nothing(pool_of):
    class Refusing(Member):
        def load_adapter(self, adapter, version):
            raise ConfigError("--vllm_max_lora_rank: 8: the adapter has rank 16; set it to 16")

    pool = pool_of(Refusing(lora=True), Refusing(lora=True))
    with pytest.raises(ConfigError, match="rank 16"):
        pool.load_adapter(None, 1)
    assert len(list(pool.sample(group("a")))) == 4


# --- the rest ----------------------------------------------------------------------------------------------------


def test_what_the_pool_can_do_is_what_each_engine_can_do():
    one = Capabilities(
        "vllm", "full", False, 100, lora=True, sleep_levels=(0, 1, 2), in_flight_updates=True, devices=("cuda:1",),
    )  # fmt: skip
    other = Capabilities("vllm", "raw", False, 80, lora=False, sleep_levels=(0, 1), devices=("cuda:2",))
    both = common_capabilities([one, other])
    assert (both.logprob_support, both.max_model_len, both.lora) == ("raw", 80, False)
    assert (both.sleep_levels, both.in_flight_updates) == ((0, 1), False)
    assert both.devices == ("cuda:1", "cuda:2")


def test_sleep_and_wake_reach_every_engine_and_counters_are_sums(pool_of):
    engines = [Member(), Member()]
    pool = pool_of(*engines)
    report = pool.sleep(1)
    assert (report.freed_bytes, report.note) == (200, "weights stay resident")
    assert pool.wake(("weights",)) is True
    assert [engine.events for engine in engines] == [[("sleep", 1), ("wake", ("weights",))]] * 2
    for client in pool.engines:
        client.instance_counters.decode_rows = 5
    assert pool.counters.decode_rows == 10


def test_close_ends_all_engines_at_the_same_time_and_whoever_waits_is_told(pool_of):
    pool = pool_of(*(Member(step_s=0.05, stuck="close", closing_s=1.0) for _ in range(2)))
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
    assert time.monotonic() - began < 1.8
    thread.join(5)
    assert ended
    assert ended[0] - began < 4


def test_engines_that_were_made_anew_are_invited_into_a_new_group_of_broadcasts(nano_folders, pool_of):
    model = load(nano_folders["llama"])
    spec = EngineSpec(backend="transformers", model=str(nano_folders["llama"]), max_model_len=64)
    pool = pool_of(build_engine(spec), build_engine(spec), sync_s=20.0)
    for client in pool.engines:
        client.weight_transport = "broadcast"
    groups = []
    for version in range(1, 5):
        pool.load_weights(PolicyWeights(with_noise(model, seed=version), move_model_batches=2), version)
        groups.append(pool.engines[0].broadcaster)
        assert pool.engines[1].broadcaster is groups[-1]
        if version == 2:
            pool.rebuild()
        if version == 3:
            pool.engines[1].instance = object()  # another process
    assert [one is other for one, other in itertools.pairwise(groups)] == [True, False, False]
    for client in pool.engines:
        assert all(torch.equal(a, b) for a, b in zip(client.engine.model.parameters(), model.parameters(), strict=True))
