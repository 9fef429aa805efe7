"""Weight syncs: when they are due, which version they make, and that a failure ends on every rank or on none."""

import contextlib
import json
from dataclasses import replace

import pytest
import torch
from given_weights import Watched
from scripted_engine import CountingSource, ScriptedEngine, lost, two_layers
from small_runs import OneRank
from threaded_ranks import on_ranks

from swift.errors import EngineDead, EngineError, SyncFailed, Unsupported
from swift.rollout.weights.base import Ack, AdapterWeights
from swift.rollout.weights.sync import KEPT_VERSIONS, WeightSync

WALKED = ["layer.0", "layer.1", "end"]


def weight_sync(engine=None, *, value=1.0, made=None, ranks=None, **settings):
    return WeightSync(
        engine, source=lambda: CountingSource(two_layers(value), made), ranks=ranks or OneRank(), **settings
    )


def updates(engine):
    return [event[1] for event in engine.events if event[0] == "update"]


# --- when, and under which number ---------------------------------------------------------------------------------


NOW, LOST = {"current": True}, {"lost": True}
SYNCS = {
    # interval, calls (a step, and what else is asked for), and what is sent: (step, version)
    "every third step": (3, range(8), [(0, 0), (3, 1), (6, 2)]),
    "every step": (1, range(4), [(0, 0), (1, 1), (2, 2), (3, 3)]),
    "a step that is looked at late counts from there": (5, range(0, 14, 2), [(0, 0), (6, 1), (12, 2)]),
    "evaluation gets those of now and moves the next": (
        5,
        [0, (3, NOW), *range(4, 10)],
        [(0, 0), (3, 1), (8, 2)],
    ),
    "what was dropped comes again": (1, [0, 1, (1, LOST)], [(0, 0), (1, 1), (1, 1)]),
    "what was dropped and is old is replaced": (5, [0, 5, (7, LOST)], [(0, 0), (5, 1), (7, 2)]),
}


@pytest.mark.parametrize("case", SYNCS)
def test_when_weights_are_sent_and_under_which_version(case):
    interval, calls, sent = SYNCS[case]
    made, found = weight_sync(ScriptedEngine(), interval=interval), []
    for call in calls:
        step, how = call if isinstance(call, tuple) else (call, {})
        if (ack := made.update(step, **how)) is not None:
            found.append((step, ack.version))
        assert made.update(step, current=how == NOW) is None, "once is enough"
    assert found == sent
    assert all(made.step_of(version) == step for step, version in sent)


def test_an_engine_on_the_trainers_weights_is_told_the_version_and_sent_nothing():
    engine, walked = ScriptedEngine(shares_weights=True), []
    made = weight_sync(engine, made=walked, interval=7)
    assert made.interval == 1, "it samples with the weights of now, whatever the interval"
    for step in range(4):
        made.update(step)
    assert engine.version == made.version == 3
    assert walked == []


def test_syncs_count_as_time_of_their_own():
    phases = []

    def timer(phase):
        phases.append(phase)
        return contextlib.nullcontext()

    made = weight_sync(ScriptedEngine(), timer=timer)
    made.update(0)
    made.update(1)
    made.update(1)
    assert phases == ["sync", "sync"]


# --- one memory for engine and trainer ----------------------------------------------------------------------------


class Borrower(ScriptedEngine):
    """Takes over the trainer's memory after an update, unless `obstacle` says why not."""

    def __init__(self, obstacle="", **settings):
        super().__init__(**settings)
        self.obstacle, self.shared = obstacle, None

    def share(self, parameters):
        self.events.append(("share", sorted(parameters)))
        self.shared = None if self.obstacle else parameters
        return self.obstacle

    def take_shared(self, parameters, version):
        if self.shared is None:
            return None
        if parameters is not self.shared:
            self.shared, self.obstacle = None, "they have moved"
            return None
        self.events.append(("taken", version))
        self.version = version
        return Ack(version, len(parameters), 0, digest="")

    def separate(self):
        self.shared = None


PARAMETERS = two_layers(1.0)


def kinds(engine):
    return [event[0] for event in engine.events]


def test_from_the_first_step_on_engine_and_trainer_are_one_memory():
    engine, walked = Borrower(), []
    made = weight_sync(engine, made=walked, parameters=lambda: PARAMETERS)
    for step in range(4):
        assert made.update(step).version == step
    assert engine.events == [("update", 0), ("update", 1), ("share", sorted(PARAMETERS)), ("taken", 2), ("taken", 3)]
    assert walked == [WALKED, WALKED]
    assert engine.version == made.version == 3


def test_an_obstacle_is_said_once_and_weights_are_sent_as_ever(caplog):
    engine = Borrower(obstacle="its weights are packed")
    made = weight_sync(engine, parameters=lambda: PARAMETERS)
    with caplog.at_level("INFO"):
        for step in range(3):
            made.update(step)
    assert kinds(engine) == ["update", "update", "share", "update"]
    said = [record.message for record in caplog.records]
    assert said == ["weights: engine and trainer keep memory of their own: its weights are packed"]


def test_parameters_that_become_sharded_are_sent_from_then_on():
    engine, found = Borrower(), [PARAMETERS, PARAMETERS, PARAMETERS, {}]
    made = weight_sync(engine, parameters=lambda: found.pop(0))
    for step in range(5):
        made.update(step)
    assert kinds(engine) == ["update", "update", "share", "taken", "update", "update"]


def test_syncs_that_are_rarer_than_steps_share_nothing():
    engine = Borrower()
    made = weight_sync(engine, parameters=lambda: PARAMETERS, interval=2)
    for step in range(5):
        made.update(step)
    assert kinds(engine) == ["update"] * 3


def test_an_adapter_that_is_sent_alone_shares_nothing():
    made = weight_sync(Borrower(), parameters=lambda: PARAMETERS, adapter=lambda: AdapterWeights({}, {}))
    assert made.parameters is None


def test_a_trial_version_is_sent_and_what_follows_is_shared_again():
    engine = Borrower()
    made = weight_sync(engine, parameters=lambda: PARAMETERS)
    made.sync(0)
    made.separate()
    made.send_trial()
    made.refresh()
    made.sync(1)
    made.refresh()
    assert kinds(engine) == ["update", "share", "update", "update", "update", "share", "taken"]


def test_an_engine_that_cannot_take_over_is_rebuilt_and_sent_the_weights():
    engine, walked = Borrower(), []
    made = weight_sync(engine, made=walked, parameters=lambda: PARAMETERS)
    made.sync(0)

    def broken(parameters, version):
        del engine.take_shared
        engine.shared = None
        raise SyncFailed("weights: its caches were not reset")

    engine.take_shared = broken
    made.sync(1)
    assert kinds(engine) == ["update", "share", "rebuild", "update", "share"]
    assert walked == [WALKED, WALKED, WALKED], "the other ranks are followed through the gathers of a failed try"


def test_a_bucket_is_freed_before_the_next_one_is_gathered():
    engine = ScriptedEngine()
    assert WeightSync(engine, source=Watched, ranks=OneRank()).sync(1).tensors == 3
    assert WeightSync(None, source=Watched, ranks=OneRank()).sync(1) is None


# --- over a resume ------------------------------------------------------------------------------------------------


def resumed(made, engine=None):
    """As from a checkpoint of `made`."""
    again = weight_sync(engine or ScriptedEngine(), interval=made.interval)
    again.load_state_dict(json.loads(json.dumps(made.state_dict())))
    return again


def test_the_state_survives_json_and_the_count_goes_on():
    made = weight_sync(ScriptedEngine(), interval=2)
    for step in range(8):
        made.update(step)
    again = resumed(made)
    assert (again.version, again.last_step) == (made.version, made.last_step) == (3, 6)
    assert [again.step_of(version) for version in range(4)] == [0, 2, 4, 6]
    assert again.update(8).version == 4


def test_after_a_resume_the_engine_gets_the_weights_before_it_is_used_even_when_none_are_due():
    made = weight_sync(ScriptedEngine(), interval=10)
    for step in range(13):
        made.update(step)
    again = resumed(made)
    assert again.update(12).version == 2, "the weights of step 10 are gone, so these are those of step 12"
    assert again.step_of(2) == 12


def test_after_a_resume_at_a_sync_the_same_version_is_sent_again():
    made = weight_sync(ScriptedEngine())
    made.update(0)
    made.update(1)
    engine = ScriptedEngine()
    again = resumed(made, engine)
    assert again.update(1).version == 1
    assert updates(engine) == [1]


def test_a_run_that_goes_on_after_a_checkpoint_syncs_when_a_resumed_one_does():
    made = weight_sync(ScriptedEngine(), interval=10)
    for step in range(13):
        made.update(step)
    again = resumed(made)
    synced = [[step for step in range(12, 40) if one.update(step) is not None] for one in (made, again)]
    assert synced == [[12, 22, 32]] * 2
    assert made.state_dict() == again.state_dict()


def test_old_versions_are_forgotten_and_count_as_the_oldest_known():
    made = weight_sync(ScriptedEngine(shares_weights=True))
    for step in range(1, KEPT_VERSIONS + 50):
        made.sync(step)
    assert len(made.state_dict()["step_of"]) == KEPT_VERSIONS
    assert made.step_of(made.version) == KEPT_VERSIONS + 49
    assert made.step_of(0) == min(step for _, step in made.state_dict()["step_of"])


# --- failures -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", ["begin", "send", "commit"])
def test_one_lost_update_is_repeated_on_a_rebuilt_engine(stage):
    engine, walked = ScriptedEngine(update_failures=[(stage, lost())]), []
    made = weight_sync(engine, made=walked)
    assert made.sync(1).version == 1
    wanted = ["rebuild", "update"] if stage == "begin" else ["update aborted", "rebuild", "update"]
    assert [event[0] for event in engine.events] == wanted
    assert walked == [WALKED, WALKED]


def test_a_second_loss_is_the_end_and_no_version_is_counted():
    engine = ScriptedEngine(update_failures=[("send", lost()), ("commit", lost())])
    made = weight_sync(engine)
    with pytest.raises(SyncFailed, match="lost on the way"):
        made.sync(1)
    assert (made.version, made.last_step) == (0, 0)
    assert made.due(1)


def test_an_engine_that_cannot_be_rebuilt_is_the_end():
    gone = EngineDead("engine: scripted: cannot be made again")
    made = weight_sync(ScriptedEngine(update_failures=[("send", lost())], rebuild_failure=gone))
    with pytest.raises(EngineDead, match="cannot be made again"):
        made.sync(1)


def test_what_no_engine_anticipated_counts_as_a_lost_update():
    made = weight_sync(ScriptedEngine(update_failures=[("send", BrokenPipeError(32, "broken pipe"))]))
    assert made.sync(1).version == 1
    made = weight_sync(ScriptedEngine(update_failures=[("send", KeyError("x"))] * 2))
    with pytest.raises(SyncFailed, match="KeyError") as caught:
        made.sync(1)
    assert isinstance(caught.value.__cause__, KeyError)


def test_a_wrong_setting_is_not_tried_again():
    engine = ScriptedEngine(update_failures=[("begin", EngineError("engine: scripted: asleep"))])
    with pytest.raises(EngineError, match="asleep"):
        weight_sync(engine).sync(1)
    assert engine.events == []


def test_a_silent_change_on_the_way_is_found():
    class Garbles(ScriptedEngine):
        def update(self, stream):
            return replace(super().update(stream), digest="of something else")

    with pytest.raises(SyncFailed, match="digest"):
        weight_sync(Garbles()).sync(1)


# --- several ranks ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", ["begin", "send", "commit"])
@pytest.mark.parametrize("broken", [0, 1, 2])
def test_a_loss_on_one_rank_repeats_the_update_on_all_of_them(stage, broken):
    engines = [ScriptedEngine(update_failures=[(stage, lost())] if rank == broken else []) for rank in range(3)]
    walked = [[] for _ in range(3)]

    def synced(ranks):
        return weight_sync(engines[ranks.rank], made=walked[ranks.rank], ranks=ranks).sync(1)

    acks = on_ranks(3, synced)
    assert [ack.version for ack in acks] == [1, 1, 1]
    assert len({ack.digest for ack in acks}) == 1
    assert walked == [[WALKED, WALKED]] * 3, "every rank takes part in every gather"
    assert [("rebuild",) in engine.events for engine in engines] == [rank == broken for rank in range(3)]
    assert len({engine.weights for engine in engines}) == 1


@pytest.mark.parametrize("second", ["begin", "commit", "rebuild"])
def test_a_rank_that_fails_twice_ends_all_with_its_error(second):
    def synced(ranks):
        walked = []
        script = {}
        if ranks.rank == 1:
            failures = [("send", lost()), None if second == "rebuild" else (second, lost(2))]
            script = {"update_failures": failures, "rebuild_failure": lost(2) if second == "rebuild" else None}
        made = weight_sync(ScriptedEngine(**script), made=walked, ranks=ranks)
        try:
            made.sync(1)
        except SyncFailed as error:
            return str(error), made.version, walked
        raise AssertionError("it went well")

    ends = on_ranks(2, synced)
    assert ends == [(str(lost(2)), 0, [WALKED, WALKED])] * 2


def test_ranks_without_an_engine_gather_along_and_hear_of_the_failure():
    def synced(ranks):
        walked = []
        engine = ScriptedEngine(update_failures=[("begin", lost())] * 2) if ranks.rank == 0 else None
        with pytest.raises(SyncFailed):
            weight_sync(engine, made=walked, ranks=ranks).sync(1)
        return walked

    assert on_ranks(2, synced) == [[WALKED, WALKED]] * 2


def test_an_engine_over_several_ranks_is_made_anew_on_all_of_them():
    def synced(ranks):
        failures = [("send", lost())] if ranks.rank == 1 else []
        engine = ScriptedEngine(update_failures=failures, tensor_parallel_size=2)
        weight_sync(engine, ranks=ranks).sync(1)
        return ("rebuild",) in engine.events

    assert on_ranks(2, synced) == [True, True]


# --- adapters -----------------------------------------------------------------------------------------------------


class TakesAdapters(ScriptedEngine):
    """Notes adapters, after failing as often as it is told."""

    def __init__(self, *failures):
        super().__init__()
        self.failures = list(failures)

    def load_adapter(self, adapter, version):
        if self.failures:
            raise self.failures.pop(0)
        self.version = version
        return Ack(version, len(adapter.tensors), 8, adapter.digest())


def adapter():
    return AdapterWeights({"r": 2}, {"base_model.model.x.lora_A.weight": torch.ones(2)})


def test_with_an_adapter_only_the_adapter_is_sent():
    engine, walked = TakesAdapters(), []
    made = weight_sync(engine, made=walked, adapter=adapter)
    assert made.sync(1).tensors == 1
    assert engine.version == 1 and walked == []


def test_a_lost_adapter_is_sent_again_to_a_rebuilt_engine():
    engine = TakesAdapters(lost())
    assert weight_sync(engine, adapter=adapter).sync(1).version == 1
    assert engine.events == [("rebuild",)]


def test_an_engine_that_takes_no_adapters_ends_every_rank():
    def synced(ranks):
        refusal = Unsupported("engine: scripted: cannot do LoRA adapters")
        engine = TakesAdapters(refusal) if ranks.rank == 0 else None
        with pytest.raises(Unsupported):
            weight_sync(engine, ranks=ranks, adapter=adapter).sync(1)
        return True

    assert on_ranks(2, synced) == [True, True]
