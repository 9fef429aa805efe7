"""vLLM takes new weights of mixtures of experts, which it packs on a CPU, again and again."""

import copy

import pytest
import torch
from experts import ENGINE_SIZES, EXPERTS, on_experts
from vllm_parts import LIMIT, drift, require_vllm, spec_of

from swift.models.tiny import build_tokenizer
from swift.rollout.engines.spec import build_engine
from swift.rollout.engines.vllm import worker
from swift.rollout.weights.policy import PolicyWeights

require_vllm()
pytestmark = pytest.mark.slow


def engine_of(model, folder):
    model.save_pretrained(folder)
    build_tokenizer(256).save_pretrained(folder)
    return build_engine(spec_of(folder, dtype="float32"))


@pytest.mark.parametrize(
    "arch", ["qwen3_moe", pytest.param("mixtral", marks=pytest.mark.long)]
)  # whose experts vLLM pads, or not
def test_lora_on_experts_is_sampled_with_after_every_sync(small_model, tmp_path, monkeypatch, arch):
    model = small_model(arch, **ENGINE_SIZES, **EXPERTS[arch][0]).eval()
    engine = engine_of(model, tmp_path)
    try:
        assert drift(engine, model) < LIMIT
        for version in (1, 2, 3):
            policy = on_experts(arch, copy.deepcopy(model), seed=version)
            engine.load_weights(PolicyWeights(policy), version)
            assert drift(engine, policy) < LIMIT
            assert drift(engine, model) > 0.1
        if torch.accelerator.is_available() or arch == "qwen3_moe":
            return
        monkeypatch.setattr(worker, "pack_experts_anew", lambda _: None)
        engine.load_weights(PolicyWeights(policy), 4)
        assert drift(engine, policy) > 0.1, "vLLM packs experts again by itself; delete pack_experts_anew"
    finally:
        engine.close()
