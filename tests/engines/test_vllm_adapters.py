"""LoRA adapters in a vLLM engine: only the adapter travels, a new one for each version. One engine for all."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from oracle import load
from peft import LoraConfig, get_peft_model
from vllm_parts import LIMIT, drift, ended, request, requests, require_vllm, sample
from vllm_parts import spec_of as spec

from swift.errors import ConfigError, EngineError, SyncFailed, Unsupported
from swift.models.tiny import build_tiny
from swift.rollout.engines.spec import build_engine
from swift.rollout.engines.vllm.weights import save_adapter
from swift.rollout.weights.base import AdapterWeights
from swift.rollout.weights.policy import PolicyWeights, adapter_weights

require_vllm()
pytestmark = pytest.mark.slow

ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return build_tiny(tmp_path_factory.mktemp("qwen3"), arch="qwen3", size="tiny")


@pytest.fixture(scope="module")
def made(folder):
    """The engine and what it logged at the start."""
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("swift").addHandler(handler)
    engine = build_engine(spec(folder, lora=True, max_lora_rank=6))
    logging.getLogger("swift").removeHandler(handler)
    yield engine, lines
    engine.close()


@pytest.fixture
def engine(made):
    yield made[0]
    made[0].drop_adapter()


def tuned(folder, seed=None, rank=4, targets=ALL):
    with torch.random.fork_rng():
        torch.manual_seed(seed or 0)
        model = get_peft_model(load(folder), LoraConfig(r=rank, lora_alpha=8, target_modules=targets)).eval()
    if seed is not None:
        change(model, seed)
    return model


@torch.no_grad()
def change(model, seed):
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.02)


def folders_of(engine):
    return [Path(one.request.lora_path) for one in engine._adapters.held]


def test_slow_adapters_on_a_cpu_are_announced_once(made):
    assert sum("adapters decode 5 to 10 times slower on a CPU" in line for line in made[1]) == 1


def test_ten_versions_leave_no_drift_and_two_stay_on_disk_until_the_adapter_is_dropped(engine, folder):
    model = tuned(folder)
    for version in range(1, 11):
        change(model, version)
        adapter = adapter_weights(model)
        ack = engine.load_adapter(adapter, version)
        assert (ack.version, engine.version, ack.tensors) == (version, version, len(adapter.tensors))
        assert ack.digest == adapter.digest()
        assert drift(engine, model, requests(2)) <= LIMIT
    held = folders_of(engine)
    assert [folder.name for folder in held] == ["9-policy-v9", "10-policy-v10"]
    assert sorted(held[0].parent.iterdir()) == sorted(held)
    assert len(engine._llm.list_loras()) == 2
    engine.drop_adapter()
    assert engine.version == 0
    assert drift(engine, load(folder)) <= LIMIT
    assert not any(path.exists() for path in held)
    assert sample(engine, [request(tokens=3)])["r"].versions == [(0, 0, 3)]


def test_the_same_version_again_is_another_adapter(engine, folder):
    """A level-2 sleep or a resumed run sends a version twice; vLLM must not serve the first one."""
    first, second = tuned(folder, seed=1), tuned(folder, seed=2)
    engine.load_adapter(adapter_weights(first), 3)
    assert drift(engine, first, requests(2)) <= LIMIT
    engine.load_adapter(adapter_weights(second), 3)
    assert drift(engine, second, requests(2)) <= LIMIT


def test_a_rank_above_the_limit_is_refused_with_the_flag(engine, folder):
    with pytest.raises(ConfigError, match="--vllm_max_lora_rank: 8: the adapter has rank 9; set it to 9"):
        engine.load_adapter(adapter_weights(tuned(folder, rank=9)), 1)
    assert drift(engine, load(folder), requests(2)) <= LIMIT


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda name: name.replace("_proj", "_nothing"), "belongs to no layer of the engine's model"),
        (lambda name: name.replace("lora_A", "modules_to_save"), "is not a low-rank matrix of a linear layer"),
    ],
    ids=["unknown", "whole"],
)
def test_what_vllm_would_silently_ignore_is_refused(engine, folder, spoil, words):
    good = tuned(folder, seed=1)
    engine.load_adapter(adapter_weights(good), 1)
    sent = adapter_weights(good)
    name = next(name for name in sent.tensors if "lora_A" in name)
    tensors = {spoil(one) if one == name else one: tensor for one, tensor in sent.tensors.items()}
    with pytest.raises(Unsupported, match=f"{words}.*--vllm_enable_lora false"):
        engine.load_adapter(AdapterWeights(sent.config, tensors), 2)
    assert engine.version == 1
    assert drift(engine, good, requests(2)) <= LIMIT


def test_an_adapter_that_vllm_refuses_fails_and_the_former_one_stays(engine, folder):
    good = tuned(folder, seed=1)
    engine.load_adapter(adapter_weights(good), 1)
    sent = adapter_weights(good)
    with pytest.raises(SyncFailed, match=r"weights: adapter version 2 for vllm: .*DoRA"):
        engine.load_adapter(AdapterWeights({**sent.config, "use_dora": True}, sent.tensors), 2)
    assert engine.version == 1
    assert [path.name.split("-", 1)[1] for path in folders_of(engine)] == ["policy-v1"]
    assert drift(engine, good, requests(2)) <= LIMIT


def test_kept_requests_end_with_the_adapter_they_began_with(engine, folder):
    old, new = tuned(folder, seed=1), tuned(folder, seed=2)
    engine.load_adapter(adapter_weights(old), 5)
    alone = sample(engine, [request("k", seed=4, tokens=20)])["k"]
    engine.submit(request("k", seed=4, tokens=20))
    engine.submit(request("brief", seed=4, tokens=3))
    next(ended(engine))
    engine.pause()
    with pytest.raises(EngineError, match=r"kept requests sample with an adapter|below LoRA layers"):
        engine.load_weights(PolicyWeights(load(folder)), 6)
    engine.load_adapter(adapter_weights(new), 6)
    engine.resume()
    (kept,) = ended(engine)
    assert (kept.token_ids, kept.versions) == (alone.token_ids, [(5, 0, len(alone.token_ids))])
    assert drift(engine, new, requests(2)) <= LIMIT


def test_adapters_travel_bit_for_bit(tmp_path):
    """Every 16-bit pattern, infinities and NaN payloads included."""
    from safetensors.torch import load_file

    patterns = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    adapter = AdapterWeights(
        {"r": 256}, {"base_model.model.x.lora_A.weight": patterns.view(torch.bfloat16).view(256, 256)}
    )
    assert save_adapter(adapter, tmp_path / "a") == adapter.digest()
    written = load_file(tmp_path / "a" / "adapter_model.safetensors")["base_model.model.x.lora_A.weight"]
    assert torch.equal(written.view(torch.int16).flatten(), patterns)


def test_adapters_of_the_spec_are_merged_into_the_first_weights(folder, tmp_path):
    model = tuned(folder, seed=5, targets=["q_proj", "down_proj"])
    model.save_pretrained(tmp_path / "adapter")
    engine = build_engine(spec(folder, adapters=(str(tmp_path / "adapter"),)))
    try:
        assert engine.version == 0
        assert drift(engine, model) <= LIMIT
        engine.rebuild()
        assert drift(engine, model) <= LIMIT
    finally:
        engine.close()
