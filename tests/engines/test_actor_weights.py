"""Every way of sending weights to an engine elsewhere, by the same test: sampler and trainer agree on log-probs."""

import copy
import os
import signal
import time
from itertools import product
from pathlib import Path

import pytest
import torch
from oracle import ask, gap, load, run
from processes import wait_for

from swift.errors import SyncFailed
from swift.rollout.engines import cluster
from swift.rollout.engines.actor_client import ActorClient
from swift.rollout.engines.events import Timeouts
from swift.rollout.engines.pool import EnginePool
from swift.rollout.engines.spec import EngineSpec
from swift.rollout.weights.base import AdapterWeights, WeightStream
from swift.rollout.weights.policy import PolicyWeights
from swift.types import Request, SamplingParams

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("ray_cluster")]

UPDATES = 3
TOLERANCE = 1e-5
ARCHITECTURES = {"qwen2": True, "llama": False}
"""Architecture -> whether its head is tied to its embedding."""


class Trainer:
    """A model that changes, and the worker that should follow."""

    def __init__(self, folder, logs, *, workers=1):
        self.model = load(folder)
        self.first = copy.deepcopy(self.model.state_dict())
        self.generator = torch.Generator().manual_seed(3)
        spec = EngineSpec(backend="transformers", model=str(folder), max_model_len=64)
        self.clients = [
            ActorClient(
                spec,
                name=f"engine {index} (cpu:{index})",
                log_file=Path(logs) / f"{index}.log",
                timeouts=Timeouts(start_s=120, heartbeat_s=1.0, sync_s=30.0, close_s=3.0),
                restarts=100,
                uses=cluster.use(),
            )
            for index in range(workers)
        ]
        self.workers = [EnginePool([client]) for client in self.clients]
        self.version = 0

    @torch.no_grad()
    def step(self):
        """As an optimizer would: in place."""
        for parameter in self.model.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=self.generator))
        self.version += 1
        return PolicyWeights(self.model, bucket_bytes=40_000)

    def gap(self, engine):
        """Largest difference of log-probs over some samples."""
        wanted = [ask(f"r/{i}", [5, 6 + i], seed=i, max_new_tokens=8) for i in range(4)]
        done = run(engine, wanted)
        assert {version for one in done for version, _, _ in one.versions} == {self.version}
        return max(gap(self.model, *pair) for pair in zip(wanted, done, strict=True))

    def close(self):
        for worker in self.workers:
            worker.close()


def pairs(*short):
    """Architecture and transport; long but for these."""
    return pytest.mark.parametrize(
        ("trainer", "transport"),
        [
            pytest.param(*pair, marks=[] if pair in short else [pytest.mark.long])
            for pair in product(ARCHITECTURES, ["object_store", "broadcast"])
        ],
        indirect=["trainer"],
    )


def on(*short):
    """The architecture; long but for these."""
    made = [pytest.param(arch, marks=[] if arch in short else [pytest.mark.long]) for arch in ARCHITECTURES]
    return pytest.mark.parametrize("trainer", made, indirect=True)


@pytest.fixture(scope="module")
def trainer(request, ray_cluster, nano_folders, tmp_path_factory):
    one = Trainer(nano_folders[request.param], tmp_path_factory.mktemp("logs"))
    assert one.model.config.tie_word_embeddings is ARCHITECTURES[request.param]
    yield one
    one.close()


@pairs(("llama", "broadcast"))
def test_after_each_update_the_sampler_is_the_trainer(trainer, transport):
    (worker,) = trainer.workers
    trainer.clients[0].weight_transport = transport
    for _ in range(UPDATES):
        source = trainer.step()
        assert len(list(source.buckets())) > 1
        ack = worker.load_weights(source, trainer.version)
        assert (ack.version, ack.tensors) == (trainer.version, len(source.manifest()))
        assert trainer.gap(worker) <= TOLERANCE


@pytest.mark.long
@pairs()
def test_a_worker_that_was_replaced_has_the_last_update_and_takes_the_next(trainer, transport):
    (worker,) = trainer.workers
    trainer.clients[0].weight_transport = transport
    worker.load_weights(trainer.step(), trainer.version)
    os.kill(trainer.clients[0].instance.pid, signal.SIGKILL)
    assert trainer.gap(worker) <= TOLERANCE  # it was replaced on the way
    worker.load_weights(trainer.step(), trainer.version)
    assert trainer.gap(worker) <= TOLERANCE


@pytest.mark.long
@on("qwen2")
def test_an_adapter_arrives_and_survives_a_restart_with_its_base(trainer):
    from peft import LoraConfig, get_peft_model

    (worker,) = trainer.workers
    worker.load_weights(trainer.step(), trainer.version)
    base = copy.deepcopy(trainer.model)
    tuned = get_peft_model(base, LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "down_proj"]))
    follower = copy.copy(trainer)
    follower.model = tuned
    for _ in range(3):
        with torch.no_grad():
            for name, parameter in tuned.named_parameters():
                if "lora_" in name:
                    parameter.copy_(0.1 * torch.randn(parameter.shape, generator=trainer.generator))
        trainer.version += 1
        follower.version = trainer.version
        worker.load_adapter(adapter_of(tuned), trainer.version)
        assert follower.gap(worker) <= TOLERANCE
    os.kill(trainer.clients[0].instance.pid, signal.SIGKILL)
    assert follower.gap(worker) <= TOLERANCE
    worker.drop_adapter()
    trainer.version = worker.version
    assert trainer.gap(worker) <= TOLERANCE


def adapter_of(model):
    from swift.models.checkpoint_tensors import read_adapter

    return AdapterWeights(*read_adapter(model))


@pytest.mark.long
@on("llama")
def test_weights_and_sleep_survive_a_restart(trainer):
    from swift.errors import EngineAsleep

    (worker,) = trainer.workers
    worker.load_weights(trainer.step(), trainer.version)
    worker.sleep(1)
    os.kill(trainer.clients[0].instance.pid, signal.SIGKILL)
    with pytest.raises(EngineAsleep, match="asleep"):
        list(worker.sample([Request("r", [1], SamplingParams(max_new_tokens=1))]))
    assert worker.wake() is True
    assert trainer.gap(worker) <= TOLERANCE


@pytest.mark.long
def test_one_broadcast_serves_several_workers_and_is_renewed_when_one_is_replaced(nano_folders, tmp_path):
    one = Trainer(nano_folders["llama"], tmp_path, workers=2)
    try:
        for client in one.clients:
            client.weight_transport = "broadcast"
        pool = EnginePool(one.clients)
        pool.load_weights(one.step(), one.version)
        sender = one.clients[0].broadcaster
        assert sender is one.clients[1].broadcaster
        first = sender._group
        pool.load_weights(one.step(), one.version)
        assert (one.clients[0].broadcaster, sender._group) == (sender, first)
        assert one.gap(pool) <= TOLERANCE

        os.kill(one.clients[1].instance.pid, signal.SIGKILL)
        assert one.gap(pool) <= TOLERANCE
        assert wait_for(lambda: one.clients[1].outdated)
        assert one.gap(pool) <= TOLERANCE
        pool.load_weights(one.step(), one.version)
        assert one.clients[0].broadcaster is not sender
        assert one.gap(pool) <= TOLERANCE

        def fail_in_the_middle(bucket):
            os.kill(one.clients[0].instance.pid, signal.SIGKILL)
            time.sleep(0.5)
            return bucket

        source = one.step()
        stream = WeightStream(source.manifest(), map(fail_in_the_middle, source.buckets()), one.version)
        began = time.monotonic()
        with pytest.raises(SyncFailed, match=r"engine 0|broadcast"):
            pool.update(stream)
        assert time.monotonic() - began < 45
        pool.rebuild()
        pool.load_weights(source, one.version)
        assert one.gap(pool) <= TOLERANCE
    finally:
        one.close()
