"""How memory changes hands between trainer and engine: order, failures, remarks. Host and device are the same here."""

import random
import re

import numpy as np
import pytest
import torch
from scripted_engine import CountingSource, ScriptedEngine
from threaded_ranks import on_ranks
from torch import nn

from swift.errors import ConfigError, EngineAsleep, EngineDead, EngineError, ResourceError, SyncFailed
from swift.models.sharded import gathered
from swift.observability import memory as figures
from swift.observability.metrics import MetricStore
from swift.rollout.engines.base import SleepReport
from swift.rollout.weights.sync import WeightSync
from swift.trainers.distributed import Collectives
from swift.trainers.memory import colocate
from swift.trainers.memory.colocate import ColocateCycle
from swift.types import Request, SamplingParams

CPU = torch.device("cpu")
OFFLOAD = {"offload_model": True, "offload_optimizer": True}
MEM = re.compile(
    r"mem step=(\d+) phase=(\w+) dev=cpu alloc=- reserved=- free=\d+ rss=\d+ trainer=(\d+) optim=(\d+) "
    r"engine_w=(\d+|-) engine_kv=(\d+|-) freed=(\d+)$"
)


class SleepyEngine(ScriptedEngine):
    """Sleeps and wakes; everything asked of it joins the events of the trainer. `fail` names calls that raise."""

    def __init__(self, events, *, levels=(0, 1, 2), note="", fail=None, never_whole=False, **settings):
        super().__init__(**settings)
        can = self.capabilities
        self.capabilities = type(can)(**{name: getattr(can, name) for name in can.__slots__} | {"sleep_levels": levels})
        self.events, self.note, self.fail, self.never_whole = events, note, dict(fail or {}), never_whole
        self.asleep, self.dropped = set(), False

    def _call(self, name):
        self.events.append(name)
        if name in self.fail:
            raise self.fail[name]

    def submit(self, request):
        if self.asleep or self.dropped:
            raise EngineAsleep("engine: scripted: asleep")
        super().submit(request)

    def abort_submitted(self, request_ids):
        self._aborting |= set(self._outstanding)

    def sleep(self, level):
        assert not self._outstanding, "requests are outstanding"
        self._call(f"sleep {level}")
        self.asleep, self.dropped = {"weights", "kv_cache"}, level == 2
        return SleepReport(100 << 20, self.note)

    def wake(self, tags):
        self._call(f"wake {' '.join(tags)}")
        assert "weights" not in self.asleep or "weights" in tags
        self.asleep -= set(tags)
        return not self.asleep and not self.never_whole

    def update(self, stream):
        assert "weights" not in self.asleep, "weights are written while they sleep"
        self._call("update")
        self.dropped = False
        return super().update(stream)

    def memory(self):
        return {"weights": 3 << 20, "kv": 0 if self.asleep else 5 << 20}


class Trainer:
    """A model, an optimizer with state, and everything that a cycle needs around them."""

    def __init__(self, *, ranks=None, interval=1, optimizer=True, engine=None, **settings):
        torch.manual_seed(5)
        self.events, self.lines, self.warnings, self.metrics = [], [], [], MetricStore()
        self.model = nn.Linear(64, 64)
        self.optimizer = torch.optim.AdamW(self.model.parameters()) if optimizer else None
        if optimizer:
            self.model(torch.ones(2, 64)).sum().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
        self.engine = SleepyEngine(self.events, **(engine or {}))
        self.ranks = ranks or Collectives()
        self.weight_sync = WeightSync(self.engine, source=self.source, interval=interval, ranks=self.ranks)
        flags = {"sleep_level": 0, "offload_model": False, "offload_optimizer": False, "copies_on_host": True}
        self.cycle = ColocateCycle(
            self.engine,
            self.weight_sync,
            **flags | {"gc_collect_after_offload": False, "limit_s": 60.0} | settings,
            log=self.lines.append,
            metrics=self.metrics,
            ranks=self.ranks,
            device=CPU,
            warn=self.warnings.append,
        )
        self.cycle.attach(self.model, lambda: self.optimizer)
        self.before = self.state()

    def source(self):
        """Weights as a publication reads them."""
        with gathered(self.model.parameters()) as whole:
            return CountingSource({name: whole(p).clone() for name, p in self.model.named_parameters()})

    def state(self):
        moments = [v for state in self.optimizer.state.values() for v in state.values()] if self.optimizer else []
        return [tensor.clone() for tensor in [*self.model.parameters(), *moments]]

    @property
    def model_is_out(self):
        return all(p.untyped_storage().nbytes() == 0 for p in self.model.parameters())

    @property
    def optimizer_is_out(self):
        return all(v.untyped_storage().nbytes() == 0 for s in self.optimizer.state.values() for v in s.values())

    def is_whole(self):
        return all(torch.equal(a, b) for a, b in zip(self.before, self.state(), strict=True))


def sample(engine, count=2):
    return list(engine.sample([Request(f"r{i}", [1, 2], SamplingParams(4, seed=i)) for i in range(count)]))


def test_the_eight_steps_in_their_order(monkeypatch):
    trainer = Trainer(sleep_level=1, gc_collect_after_offload=True, **OFFLOAD)
    events, cycle = trainer.events, trainer.cycle
    for owner, name in ((cycle._optimizer, "optimizer"), (cycle._model, "model")):
        leave, back = owner.leave, owner.come_back
        monkeypatch.setattr(owner, "leave", lambda n=name, do=leave: (events.append(f"{n} out"), do())[1])
        monkeypatch.setattr(owner, "come_back", lambda n=name, do=back: (events.append(f"{n} back"), do())[1])
    monkeypatch.setattr(figures.gc, "collect", lambda: events.append("gc"))
    with cycle(0):
        events.append("sample")
    assert events == [
        "optimizer out", "model out", "gc", "wake weights", "update", ("update", 0), "wake kv_cache", "sample",
        "sleep 1", "model back", "optimizer back",
    ]  # fmt: skip


def test_without_a_new_version_nothing_is_sent_unless_level_2_dropped_the_weights():
    for level, expected in ((1, []), (2, ["update", ("update", 1)])):
        trainer = Trainer(sleep_level=level, interval=10)
        for step in (10, 11):
            with trainer.cycle(step):
                trainer.events.append(f"sample at {step}")
        second = trainer.events[trainer.events.index("sample at 10") :]
        found = [event for event in second if "update" in str(event)]
        # weights of step 11 cannot be sent as those of step 10, so they become a version
        assert found == ([] if not expected else ["update", ("update", 2)])
        with trainer.cycle(11):
            pass
        assert trainer.weight_sync.version == (1 if level == 1 else 2)
        assert trainer.engine.version == trainer.weight_sync.version


def test_evaluation_gets_the_weights_of_now():
    trainer = Trainer(interval=10)
    with trainer.cycle(10):
        pass
    with trainer.cycle(12):
        assert trainer.weight_sync.last_step == 10
    with trainer.cycle(12, current=True):
        assert trainer.weight_sync.last_step == 12


def test_checks_can_have_both_at_once():
    trainer = Trainer(sleep_level=1, **OFFLOAD)
    with trainer.cycle(0, current=True, trainer_stays=True):
        assert trainer.is_whole() and len(sample(trainer.engine)) == 2
    assert trainer.engine.asleep


def test_an_engine_rests_until_its_first_phase():
    trainer = Trainer(sleep_level=2, **OFFLOAD)
    trainer.cycle.sleep()
    trainer.cycle.sleep()
    assert trainer.events == ["sleep 2"]
    with trainer.cycle(0):
        sample(trainer.engine)
    awake = Trainer()
    awake.cycle.sleep()
    assert awake.events == []


@pytest.mark.parametrize("level", [1, 2])
def test_an_engine_dozes_with_its_weights_until_it_is_roused(level):
    trainer = Trainer(sleep_level=level)
    trainer.cycle.doze()
    trainer.cycle.doze()
    trainer.cycle.rouse()
    trainer.cycle.rouse()
    assert trainer.events == ["sleep 1", "wake weights", "wake kv_cache"]
    assert len(sample(trainer.engine)) == 2, "its weights are still there"
    trainer.cycle.sleep()
    with trainer.cycle(0):
        sample(trainer.engine)
    awake = Trainer(sleep_level=0)
    awake.cycle.doze()
    awake.cycle.rouse()
    assert awake.events == []


@pytest.mark.parametrize(("free_mib", "collections"), [(10, 0), (4, 1), (2, 2)])
def test_the_cache_of_torch_is_given_back_where_the_engine_would_not_fit(monkeypatch, free_mib, collections):
    trainer, calls = Trainer(sleep_level=1), []
    trainer.cycle.sleep()  # awake it had 3 MiB of weights and 5 of keys and values
    monkeypatch.setattr(trainer.cycle, "device", torch.device("meta"))
    found = figures.MemoryFigures("meta", 0, 0, free_mib << 20, 0)
    monkeypatch.setattr(colocate, "measure", lambda device: found)
    monkeypatch.setattr(colocate, "collect_garbage", calls.append)
    with trainer.cycle(0):
        monkeypatch.setattr(trainer.cycle, "device", CPU)
    assert len(calls) == collections


@pytest.mark.parametrize(
    ("fail", "stage"),
    [
        ({"wake weights": EngineDead("engine: x: gone")}, "wake weights"),
        ({"update": SyncFailed("weights: lost")}, "update"),
        ({"wake kv_cache": RuntimeError("broken inside")}, "wake kv_cache"),
        ({"sleep 1": EngineDead("engine: x: gone")}, "sleep 1"),
        ({}, "wake kv_cache"),  # and is not complete afterwards
    ],
)
def test_the_trainer_is_whole_after_any_failure_of_the_engine(fail, stage):
    engine = {"fail": fail, "never_whole": not fail}
    trainer = Trainer(sleep_level=1, gc_collect_after_offload=True, engine=engine, **OFFLOAD)
    states = random.getstate(), torch.get_rng_state()
    with pytest.raises(EngineError, match="" if fail else "not fully awake after its weights"), trainer.cycle(0):
        assert stage == "sleep 1", "it sampled with an engine that is not ready"
    assert stage in trainer.events
    assert trainer.is_whole()
    assert random.getstate() == states[0] and torch.equal(torch.get_rng_state(), states[1])


def test_a_failure_inside_puts_the_engine_to_sleep_and_travels_on():
    trainer = Trainer(sleep_level=1, **OFFLOAD)
    with pytest.raises(ZeroDivisionError), trainer.cycle(0):
        for _ in trainer.engine.sample([Request(f"r{i}", [1], SamplingParams(i + 1)) for i in range(9)]):
            raise ZeroDivisionError
    assert trainer.is_whole() and trainer.engine.asleep
    with trainer.cycle(0):
        assert len(sample(trainer.engine)) == 2
        trainer.engine.submit(Request("left", [1], SamplingParams(100)))
    assert trainer.engine.asleep and not trainer.engine._outstanding


@pytest.mark.parametrize("fault", [SyncFailed("engine: x: void"), EngineDead("engine: x: gone")])
def test_an_engine_that_cannot_sleep_after_a_failure_ends_before_the_trainer_comes_back(fault, monkeypatch):
    trainer = Trainer(sleep_level=1, engine={"fail": {"sleep 1": fault}}, **OFFLOAD)
    back = trainer.cycle._model.come_back
    monkeypatch.setattr(trainer.cycle._model, "come_back", lambda: (trainer.events.append("model back"), back())[1])
    with pytest.raises(ZeroDivisionError), trainer.cycle(0):
        raise ZeroDivisionError
    assert trainer.events[-3:] == ["sleep 1", ("close",), "model back"]
    assert trainer.is_whole()
    assert f"engine: scripted: closed, as it cannot sleep after a failure ({fault})" in trainer.lines


def test_an_engine_that_neither_sleeps_nor_closes_does_not_hide_the_error(monkeypatch):
    gone = EngineDead("engine: x: gone")
    trainer = Trainer(sleep_level=1, engine={"fail": {"sleep 1": gone}}, **OFFLOAD)

    def close():
        raise RuntimeError("stuck")

    monkeypatch.setattr(trainer.engine, "close", close)
    with pytest.raises(ZeroDivisionError), trainer.cycle(0):
        raise ZeroDivisionError
    assert trainer.is_whole()
    assert "engine: scripted: not closed after a failure (stuck)" in trainer.lines


def test_memory_that_does_not_suffice_is_named_with_the_flags_that_help():
    full = torch.OutOfMemoryError("CUDA out of memory")
    trainer = Trainer(sleep_level=1, engine={"fail": {"wake kv_cache": full}})
    expected = r"too little to wake its KV cache; .*--gc_collect_after_offload true"
    with pytest.raises(ResourceError, match=expected), trainer.cycle(0):
        pass


def test_a_trainer_that_does_not_fit_back_gets_a_second_try(monkeypatch):
    trainer = Trainer(sleep_level=1, **OFFLOAD)
    resize, failed = torch.UntypedStorage.resize_, []

    def full_once(storage, nbytes):
        if nbytes and not failed:
            failed.append(nbytes)
            raise torch.OutOfMemoryError("CUDA out of memory")
        return resize(storage, nbytes)

    monkeypatch.setattr(torch.UntypedStorage, "resize_", full_once)
    with trainer.cycle(0):
        pass
    assert failed and trainer.is_whole()


def test_an_engine_that_hangs_ends_the_process(monkeypatch):
    ended = []
    monkeypatch.setattr(colocate, "end_process", ended.append)
    trainer = Trainer(sleep_level=1, limit_s=0.05)
    wake = trainer.engine.wake

    def slow(tags):
        for _ in range(1000):
            if ended:
                break
            torch.zeros(1).add_(1)
            colocate.threading.Event().wait(0.01)
        return wake(tags)

    monkeypatch.setattr(trainer.engine, "wake", slow)
    with trainer.cycle(0):
        pass
    assert re.match(r"engine: scripted: wake\(weights\): no end after 0 s", str(ended[0]))


def test_random_generators_go_on_as_if_nothing_had_been_sampled():
    def draws():
        return random.random(), float(np.random.rand()), float(torch.rand(()))

    trainer = Trainer(sleep_level=1, **OFFLOAD)
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)
    states = random.getstate(), np.random.get_state(), torch.get_rng_state(), torch.initial_seed()
    expected = draws()
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.set_rng_state(states[2])
    inside = []
    for step in (0, 1, 1):
        with trainer.cycle(step):
            inside.append(draws())
    assert torch.initial_seed() == states[3]
    assert draws() == expected
    assert inside[0] != inside[1], "every step would see the same draws"
    assert inside[1] == inside[2], "a resumed run would see other draws"
    assert expected not in inside


def test_on_a_cpu_nothing_moves_and_one_line_says_so():
    trainer = Trainer(sleep_level=1, copies_on_host=False, gc_collect_after_offload=True, **OFFLOAD)
    with trainer.cycle(0):
        assert trainer.is_whole()
    note = (
        "--offload_model, --offload_optimizer: true: moves nothing on a CPU, where host and device are the same memory"
    )
    assert trainer.cycle.notes == [note]


def test_a_model_that_the_engine_samples_with_stays():
    trainer = Trainer(engine={"shares_weights": True}, **OFFLOAD)
    with trainer.cycle(0):
        assert not trainer.model_is_out and trainer.optimizer_is_out
    assert "--offload_model: true: the model stays" in trainer.cycle.notes[0]
    assert trainer.is_whole()


def test_an_engine_that_cannot_sleep_is_refused():
    with pytest.raises(ConfigError, match=r"--sleep_level: 2: the scripted engine .* valid: 0, 1"):
        Trainer(sleep_level=2, engine={"levels": (0, 1)})


def test_the_model_moves_without_an_optimizer_and_frozen_models_move_with_it():
    trainer, reference = Trainer(optimizer=False, **OFFLOAD), nn.Linear(4, 4)
    trainer.cycle.attach(trainer.model, lambda: None, beside=[reference])
    before = reference.weight.detach().clone()
    with trainer.cycle(0):
        assert trainer.model_is_out and reference.weight.untyped_storage().nbytes() == 0
    assert trainer.is_whole() and torch.equal(reference.weight, before)


def test_every_phase_has_its_lines():
    trainer = Trainer(sleep_level=1, engine={"note": "weights stay resident (3 MiB)"}, **OFFLOAD)
    trainer.model = nn.Linear(1024, 1024, bias=False)
    trainer.cycle.attach(trainer.model, lambda: None)
    for step in (0, 1):
        with trainer.cycle(step):
            pass
    found = [MEM.match(line).groups() for line in trainer.lines if line.startswith("mem ")]
    assert [one[:4] for one in found[:3]] == [
        ("0", "before", "4", "0"), ("0", "generate", "0", "0"), ("0", "after", "4", "0"),
    ]  # fmt: skip
    assert [one[0] for one in found] == ["0"] * 3 + ["1"] * 3
    assert [one[4:6] for one in found[:3]] == [("3", "5"), ("3", "5"), ("3", "0")]
    assert found[2][6] == "100", "the engine's sleep freed it"
    assert trainer.lines.count("engine: scripted: weights stay resident (3 MiB)") == 1
    values = trainer.metrics.commit()
    names = {"rss_mib_max", "free_mib_min", "trainer_freed_mib", "engine_freed_mib"}
    assert {name for name in values if name.startswith("memory/")} == {f"memory/{name}" for name in names}
    assert values["memory/engine_freed_mib"] == 100.0 and values["memory/rss_mib_max"] > 50
    assert "health/memory_not_freed" not in values and "time/memory" in trainer.metrics.flush()


def test_memory_that_is_not_freed_is_counted_each_time_and_said_once(monkeypatch):
    monkeypatch.setattr(figures, "TOO_SMALL", 0)
    monkeypatch.setattr(colocate, "freed_between", lambda before, after: 10 << 20)
    monkeypatch.setattr(colocate.Offloader, "resident_bytes", lambda self: 50 << 20)
    trainer = Trainer(**OFFLOAD)
    for step in (0, 1):
        with trainer.cycle(step):
            pass
        values = trainer.metrics.commit()
        assert values["health/memory_not_freed"] == 1.0
        assert values["memory/trainer_freed_mib"] == 10.0
    assert trainer.warnings == [
        "memory: cpu: only 10 of 100 MiB of the trainer were freed; --gc_collect_after_offload true releases the "
        "cache; see docs/memory.md"
    ]


@pytest.mark.parametrize("call", ["wake weights", "wake kv_cache", "sleep 1", "update"])
def test_the_failure_of_one_rank_is_raised_on_all_and_every_trainer_is_whole(call):
    def rank(collectives):
        fail = {call: EngineDead(f"engine: rank {collectives.rank}: gone")} if collectives.rank == 1 else {}
        trainer = Trainer(sleep_level=1, engine={"fail": fail}, ranks=collectives, **OFFLOAD)
        trainer.engine.rebuild_failure = EngineDead("engine: rank 1: gone for good")
        with pytest.raises(EngineDead, match="engine: rank 1: gone"), trainer.cycle(0):
            assert call == "sleep 1"
        return trainer.is_whole()

    assert on_ranks(2, rank) == [True, True]
