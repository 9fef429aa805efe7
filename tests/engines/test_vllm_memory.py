"""What a vLLM engine gives back when it sleeps, and when it is closed. One engine for all but the last tests."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from vllm_parts import LIMIT, children_of, drift, model_of, request, requests, require_vllm, sample
from vllm_parts import spec_of as spec

from swift.errors import ConfigError, EngineAsleep, EngineDead, EngineError, Unsupported
from swift.models.tiny import build_tiny
from swift.rollout.engines.spec import build_engine
from swift.rollout.engines.vllm_worker import WorkerExtension, resident_bytes
from swift.rollout.weight_sync.policy import PolicyWeights

require_vllm()
pytestmark = pytest.mark.slow

KV_MIB = 512


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return build_tiny(tmp_path_factory.mktemp("tiny"), arch="llama", size="tiny")


@pytest.fixture(scope="module")
def engine(folder):
    made = build_engine(spec(folder, sleep=True, engine_kwargs={"kv-cache-memory-bytes": KV_MIB << 20}))
    yield made
    made.close()


def greedy(engine):
    return {name: (one.token_ids, one.logprobs) for name, one in sample(engine, requests(8, temperature=0.0)).items()}


def test_sleeping_gives_the_kv_cache_back_and_waking_gives_the_same_tokens(engine):
    assert (engine.capabilities.kv_release, engine.capabilities.sleep_levels) == (True, (0, 1, 2))
    before, full = greedy(engine), resident_bytes()
    report = engine.sleep(1)
    small = resident_bytes()
    assert report.note == ""
    assert report.freed_bytes >= 0.95 * (KV_MIB << 20)
    assert full - small >= 0.95 * (KV_MIB << 20)
    assert engine.wake()
    assert greedy(engine) == before


def test_memory_counts_the_weights_and_what_is_used_of_the_cache(engine, folder):
    numbers = sum(parameter.numel() for parameter in model_of(folder).parameters())
    engine.sleep(1)
    assert engine.memory() == {"weights": 4 * numbers, "kv": 0}
    engine.wake()
    assert engine.memory()["kv"] < 1 << 20
    greedy(engine)
    used = engine.memory()["kv"]
    assert 0 < used < KV_MIB << 20
    freed = engine.sleep(1).freed_bytes
    assert freed >= 0.5 * used
    engine.wake()


def test_asleep_it_neither_samples_nor_takes_weights(engine, folder):
    engine.sleep(1)
    for attempt in (lambda: engine.submit(request()), lambda: list(engine.generate([request()]))):
        with pytest.raises(EngineAsleep, match="asleep \\(kv_cache, weights\\)"):
            attempt()
    with pytest.raises(EngineAsleep, match="takes no weights"):
        engine.load_weights(PolicyWeights(model_of(folder)), 1)
    assert engine.wake()


def test_weights_wake_first_and_take_an_update_before_the_cache_is_back(engine, folder):
    model = model_of(folder)
    engine.sleep(1)
    with pytest.raises(EngineAsleep, match="weights are still asleep"):
        engine.wake(["kv_cache"])
    assert engine.wake(["weights"]) is False
    engine.load_weights(PolicyWeights(model), 3)
    with pytest.raises(EngineAsleep, match="asleep \\(kv_cache\\)"):
        engine.submit(request())
    assert engine.wake(["kv_cache"]) is True
    assert engine.wake() is True
    assert drift(engine, model) <= LIMIT


def test_after_level_2_the_weights_must_be_published(engine, folder):
    model = model_of(folder)
    before = greedy(engine)
    report = engine.sleep(2)
    assert report.note == "weights stay resident (2 MiB)"
    engine.wake()
    with pytest.raises(EngineAsleep, match="publish before sampling"):
        engine.submit(request())
    engine.load_weights(PolicyWeights(model), 4)
    assert greedy(engine) == before


def test_sleep_goes_deeper_but_not_back(engine, folder):
    engine.sleep(1)
    engine.sleep(2)
    engine.sleep(1)
    engine.wake()
    with pytest.raises(EngineAsleep, match="publish"):
        engine.submit(request())
    engine.sleep(1)  # what level 2 dropped does not come back by sleeping less deep
    engine.wake()
    with pytest.raises(EngineAsleep, match="publish"):
        engine.submit(request())
    engine.load_weights(PolicyWeights(model_of(folder)), 5)


def test_level_0_is_awake(engine):
    assert engine.sleep(0).freed_bytes == 0
    assert len(sample(engine, [request(tokens=2)])["r"].token_ids) == 2


def test_requests_in_flight_keep_it_awake(engine):
    engine.submit(request("busy", tokens=2))
    with pytest.raises(EngineError, match="sleep\\(1\\) while 1 requests are outstanding"):
        engine.sleep(1)
    assert [one.request_id for one in engine.stream()] == ["busy"]


def test_an_unknown_tag_is_refused(engine):
    with pytest.raises(Unsupported, match="wake\\(everything\\)"):
        engine.wake(["everything"])
    with pytest.raises(Unsupported, match="sleep\\(3\\)"):
        engine.sleep(3)


def test_memory_that_cannot_be_released_is_said_in_one_line(engine, monkeypatch):
    def refused(self):
        raise OSError(22, "madvise of 8 bytes failed")

    monkeypatch.setattr(WorkerExtension, "swift_release_kv", refused)
    report = engine.sleep(1)
    assert report.freed_bytes == 0
    assert report.note == f"KV cache of {KV_MIB} MiB cannot be released: [Errno 22] madvise of 8 bytes failed"
    engine.wake()
    assert len(sample(engine, [request(tokens=2)])["r"].token_ids) == 2


def test_a_cache_out_of_reach_shows_in_the_capabilities(folder, monkeypatch, caplog):
    monkeypatch.setattr(WorkerExtension, "swift_kv_obstacle", lambda self: "no such system call")
    made = build_engine(spec(folder, sleep=True))
    try:
        assert made.capabilities.kv_release is False
        assert "cannot be released: no such system call" in caplog.text
        assert "cannot be released: no such system call" in made.sleep(1).note
    finally:
        made.close()


def test_a_model_that_the_device_cannot_run_is_refused_at_the_start(tmp_path):
    """Attention heads of 8 numbers: vLLM builds the model on a CPU and fails in the first step."""
    nano = build_tiny(tmp_path / "nano", arch="qwen2", size="nano")
    with pytest.raises(ConfigError, match=r"vLLM cannot run it on this device .*head_dim=8.*--use_vllm false"):
        build_engine(spec(nano))


def test_an_unknown_argument_of_vllm_is_refused_with_the_nearest(folder):
    with pytest.raises(ConfigError, match=r"--vllm_engine_kwargs: max_num_seq: .*nearest: max_num_seqs"):
        build_engine(spec(folder, engine_kwargs={"max_num_seq": 3}))


def test_a_context_that_the_cache_cannot_hold_is_a_lack_of_memory(folder):
    from swift.errors import ResourceError

    with pytest.raises(ResourceError, match="lower --vllm_max_model_len"):
        build_engine(spec(folder, max_model_len=2048, engine_kwargs={"kv_cache_memory_bytes": 1 << 20}))


def test_without_a_limit_the_context_shrinks_to_the_cache(folder, caplog):
    made = build_engine(spec(folder, max_model_len=None, engine_kwargs={"kv_cache_memory_bytes": 1 << 20}))
    try:
        assert 32 <= made.capabilities.max_model_len < 2048
        assert "limited to" in caplog.text
        assert len(sample(made, [request(tokens=4)])["r"].token_ids) == 4
    finally:
        made.close()


def test_closing_leaves_nothing_and_the_engine_says_so(folder, engine):
    segments = set(Path("/dev/shm").iterdir())
    made = build_engine(spec(folder))
    made.submit(request("lost", tokens=3))
    made.close()
    made.close()
    assert made.health() == made.health().__class__(False, 0, "closed")
    for attempt in (lambda: made.submit(request()), lambda: list(made.stream()), made.wake):
        with pytest.raises(EngineDead, match="closed"):
            attempt()
    assert made.info()["engine"] == "vllm"
    assert not made._busy.locked()  # a call of another thread ends with the error above instead of waiting
    assert children_of(os.getpid()) == []
    assert set(Path("/dev/shm").iterdir()) <= segments
    assert len(sample(engine, [request(tokens=2)])["r"].token_ids) == 2  # the other engine goes on


def test_closing_the_last_engine_ends_the_groups_that_vllm_made(folder, engine):
    assert torch.distributed.is_initialized()
    engine.close()
    assert not torch.distributed.is_initialized()
    made = build_engine(spec(folder))
    assert drift(made, model_of(folder), requests(2)) <= LIMIT
    made.close()
    assert not torch.distributed.is_initialized()
