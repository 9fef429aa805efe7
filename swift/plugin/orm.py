"""The names under which 3.x plugins import the built-in reward functions: those of `swift.rewards.orm`."""

from __future__ import annotations

import importlib
from typing import Any


def __getattr__(name: str) -> Any:
    return getattr(importlib.import_module("swift.rewards.orm"), name)
