"""Registered losses and estimators: how one is found, and how its own settings are read."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any


def find(registry: Mapping[str, Any], name: str, flag: str) -> Any:
    """The entry of that name; a ValueError, which begins with `flag`, if there is none."""
    if name not in registry:
        raise ValueError(f"{flag}: {name}: unknown; valid: {', '.join(registry)}")
    return registry[name]


def parameters_of(entry: Any, settings: Any) -> Any:
    """An entry's own parameters out of the flat settings of a run; None when it declares none."""
    if entry.parameters is None:
        return None
    names = [field.name for field in dataclasses.fields(entry.parameters)]
    return entry.parameters(**{name: getattr(settings, name) for name in names})
