"""Fixtures shared by all tests: tiny models, built once per session."""

from __future__ import annotations

import os
import re
import tempfile
from collections import Counter

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
if "HF_DATASETS_CACHE" not in os.environ:  # tokenised rows are not left in the user's cache
    CACHE = tempfile.TemporaryDirectory(prefix="swift-tests-")
    os.environ["HF_DATASETS_CACHE"] = CACHE.name

import pytest


def group_of(nodeid):
    """What one process runs: a file, or the cases of one backend, which share its engine."""
    file, _, case = nodeid.partition("::")
    backend = re.search(r"\[((?:actor-)?(?:vllm|transformers)|pool|remote|lmdeploy)\b", case)
    return backend[1] if backend and "/test_conformance_" in file else file


def pytest_xdist_make_scheduler(config, log):
    """Not xdist's groups: its 3.8 cannot set them with pytest 9.2, whose node ids are read-only."""
    from xdist.scheduler import LoadFileScheduling

    class ByGroup(LoadFileScheduling):
        def _split_scope(self, nodeid):
            return group_of(nodeid)

    config.option.loadscopereorder = False  # else by the number of tests
    return ByGroup(config, log)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items):
    """The groups that take longest come first: no process is left alone with one at the end."""
    slow = Counter(group_of(item.nodeid) for item in items if item.get_closest_marker("slow"))
    items.sort(key=lambda item: -slow[group_of(item.nodeid)])


@pytest.fixture(scope="session")
def nano_folders(tmp_path_factory):
    """Folders of nano models, one per architecture."""
    from swift.models.tiny import build_tiny

    root = tmp_path_factory.mktemp("nano")
    return {arch: build_tiny(root / arch, arch=arch, size="nano") for arch in ("qwen2", "llama", "qwen3")}


@pytest.fixture(params=["qwen2", "llama", "qwen3"])
def nano_folder(request, nano_folders):
    """Each nano architecture in turn."""
    return nano_folders[request.param]


@pytest.fixture(scope="session")
def small_model():
    """Makes a random two-layer decoder of any architecture, with a sliding window of 8 where it has one."""

    def make(arch, **settings):
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM

        sizes = {
            "vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2,
            "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 8, "sliding_window": 8,
            "max_position_embeddings": 256, "bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0,
            "initializer_range": 0.2,
        }  # fmt: skip
        special = {
            "gpt2": {"n_inner": 32, "n_positions": 256, "sliding_window": None},
            "gpt_oss": {"num_local_experts": 2, "num_experts_per_tok": 1, "layer_types": ["full_attention"] * 2},
            "mixtral": {"num_local_experts": 2, "num_experts_per_tok": 1, "sliding_window": None},
            "qwen3_moe": {
                "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "sliding_window": None,
            },
            "deepseek_v3": {
                "q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 6,
                "n_routed_experts": 2, "num_experts_per_tok": 1, "n_group": 1, "topk_group": 1,
                "moe_intermediate_size": 16, "sliding_window": None, "head_dim": 4,
            },
            "gpt_neox": {"sliding_window": None},
            "nemotron": {"sliding_window": None},
        }  # fmt: skip
        torch.manual_seed(0)
        config = AutoConfig.for_model(arch, **{**sizes, **special.get(arch, {}), **settings})
        return AutoModelForCausalLM.from_config(config).train()

    return make


@pytest.fixture(autouse=True)
def clean_registry():
    """What a test registers is gone after it; a built-in entry whose module it imported stays."""
    from swift.plugin import REGISTRIES
    from swift.plugin.registry import BUILT_IN

    before = {key: dict(registry.registrations) for key, registry in REGISTRIES.items()}
    yield
    for key, registry in REGISTRIES.items():
        imported = {name: one for name, one in registry.registrations.items() if one.origin == BUILT_IN}
        registry.registrations.clear()
        registry.registrations.update(imported | before[key])
