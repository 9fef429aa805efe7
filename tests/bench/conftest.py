"""The benchmarks' modules, importable as their scripts import them."""

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BENCHMARKS = ROOT / "benchmarks"


@pytest.fixture(autouse=True)
def benchmarks(monkeypatch):
    known = set(sys.modules)
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    yield BENCHMARKS
    for name in set(sys.modules) - known:
        if getattr(sys.modules[name], "__file__", None) and str(BENCHMARKS) in sys.modules[name].__file__:
            del sys.modules[name]
