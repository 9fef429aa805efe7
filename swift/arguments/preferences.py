"""The settings of `swift rlhf --rlhf_type dpo` and the other methods that learn from given answers."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

from swift.arguments.common import TrainerModeArguments
from swift.arguments.rlhf import MethodArguments
from swift.flags import flag
from swift.plugin.registry import methods


@dataclass(kw_only=True)
class PreferenceArguments(TrainerModeArguments, MethodArguments):
    """What all methods that learn from given answers have."""

    max_length: int | None = flag(at_least=1, group="Data", unset="the model's context", resume="fixed")
    """Maximum length of prompt and answer together, in tokens. Longer rows are left out and counted."""


@functools.cache
def settings_of(name: str) -> type:
    """The settings of a method: its own, and those that all have."""
    method: Any = methods[name]
    text = f"`swift rlhf --rlhf_type {name}`: {method.summary}."
    body = {"__doc__": text, "__module__": __name__, "SEES": method.sees}
    cls = type(f"{name.upper()}Arguments", (method.parameters, PreferenceArguments), body)
    return dataclass(kw_only=True)(cls)
