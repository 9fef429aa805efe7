"""Registered losses and estimators: how they are found, and how their own settings are read."""

from __future__ import annotations

import dataclasses
import importlib
import pkgutil
from collections.abc import Mapping
from types import ModuleType
from typing import Any


def import_all(package: ModuleType) -> None:
    """Import every file of a package, so that what they declare is registered."""
    for module in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"{package.__name__}.{module.name}")


def find(registry: Mapping[str, Any], name: str, flag: str) -> Any:
    """The entry of that name.

    Raises:
        ValueError: there is none; the message begins with `flag`.
    """
    if name not in registry:
        raise ValueError(f"{flag}: {name}: unknown; valid: {', '.join(registry)}")
    return registry[name]


def parameters_of(entry: Any, settings: Any) -> Any:
    """An entry's own parameters out of the flat settings of a run; None when it declares none."""
    if entry.parameters is None:
        return None
    names = [field.name for field in dataclasses.fields(entry.parameters)]
    return entry.parameters(**{name: getattr(settings, name) for name in names})
