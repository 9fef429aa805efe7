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
def vlm_folders(tmp_path_factory):
    """Folders of tiny models that see, by family, made when they are asked for."""
    from vlms import build_vlm

    made = {}

    def of(family):
        if family not in made:
            made[family] = build_vlm(tmp_path_factory.mktemp(family), family)
        return made[family]

    return of


@pytest.fixture(scope="session")
def small_model():
    """Makes a random two-layer decoder; see `small_models`."""
    from small_models import small_model

    return small_model


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
