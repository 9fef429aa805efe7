"""Real vLLM in an actor that is killed in the middle of decoding."""

import os
import signal

import pytest
from actor_parts import family, pid_of
from oracle import gap, load, with_noise
from processes import alive, wait_for

from swift.rollout.engines import cluster
from swift.rollout.engines.actor_client import ActorClient
from swift.rollout.engines.events import Timeouts
from swift.rollout.engines.pool import EnginePool
from swift.rollout.engines.spec import EngineSpec
from swift.rollout.weights.policy import PolicyWeights
from swift.types import Request, SamplingParams

pytest.importorskip("vllm")
pytestmark = pytest.mark.slow

PROMPTS = [[40 + i, 41, 42, 43] for i in range(4)]


def greedy(prefix):
    return [
        Request(f"{prefix}{p}/{s}", prompt, SamplingParams(max_new_tokens=120, temperature=0.0, seed=s))
        for p, prompt in enumerate(PROMPTS)
        for s in range(4)
    ]


@pytest.fixture
def start(engine_folders, tmp_path, monkeypatch):
    """Makes a vLLM engine in an actor; nothing of it is left afterwards."""
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    before, made = family(), []  # of other tests in this process

    def make(way=None, **fields):
        spec = EngineSpec(
            backend="vllm", model=str(engine_folders["llama"]), max_model_len=256, max_num_seqs=8, enforce_eager=True,
            **fields,
        )  # fmt: skip
        client = ActorClient(
            spec, name="engine 0 (cpu:0)", log_file=tmp_path / "log", timeouts=Timeouts(start_s=300),
            uses=cluster.use(), restarts=1, weight_transport=way,
        )  # fmt: skip
        made.append(EnginePool([client]))
        return made[-1]

    yield make
    for worker in made:
        worker.close()
    assert wait_for(lambda: set(family()) <= set(before)), family()


@pytest.mark.long
def test_vllm_killed_in_decode_comes_back_with_its_weights_and_every_request_once(engine_folders, start):
    worker, model = start(cores=(max(os.sched_getaffinity(0)),)), with_noise(load(engine_folders["llama"]), seed=1)
    ack = worker.load_weights(PolicyWeights(model), 1)
    expected = {one.request_id[1:]: one.token_ids for one in worker.sample(greedy("a"))}
    first, came = pid_of(worker), {}
    for completion in worker.sample(greedy("b")):
        assert completion.request_id not in came, "came twice"
        came[completion.request_id] = completion
        if len(came) == 3:
            os.kill(first, signal.SIGKILL)
    assert {name[1:]: one.token_ids for name, one in came.items()} == expected
    assert {version for one in came.values() for version, _, _ in one.versions} == {1}
    assert (worker.counters.restarts, worker.version, ack.version) == (1, 1, 1)
    assert pid_of(worker) != first
    assert not alive(first)
    (done,) = worker.sample(greedy("c")[:1])
    assert gap(model, greedy("c")[0], done) < 1e-5


@pytest.mark.long
@pytest.mark.parametrize("way", ["object_store", "broadcast"])
def test_two_tensor_parallel_ranks_inside_an_actor_sample_with_the_weights_they_are_sent(engine_folders, start, way):
    worker, model = start(way, tensor_parallel_size=2, devices=("cpu:0", "cpu:1")), load(engine_folders["llama"])
    assert worker.capabilities.tensor_parallel_size == 2
    assert worker.receivers == 2
    wanted = greedy("a")[:4]
    for version in (1, 2):
        worker.load_weights(PolicyWeights(with_noise(model, seed=version), move_model_batches=2), version)
        done = {one.request_id: one for one in worker.sample(wanted)}
        assert max(gap(model, request, done[request.request_id]) for request in wanted) < 1e-5
