"""Fixtures shared by all tests: tiny models, built once per session."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest


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


@pytest.fixture(autouse=True)
def clean_registry():
    """What a test registers is gone after it."""
    from swift.plugin import orms

    entries, origins = dict(orms), dict(orms.origins)
    yield
    dict.clear(orms)
    dict.update(orms, entries)
    orms.origins.clear()
    orms.origins.update(origins)
