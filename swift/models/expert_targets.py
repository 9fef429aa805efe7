"""Resolution of the names of `--target_modules` in a mixture of experts.

transformers fuses experts into parameters of three dimensions. PEFT takes the names of the projections before that
(gate_proj, w1) for the fused parameters alone: it ignores linear layers of the same name (dense layers, shared
experts) and the rest of a regular expression. So names are resolved here, to modules and to parameters.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from swift.errors import ConfigError

if TYPE_CHECKING:
    from torch import nn


HEADS = {"score", "classifier"}
"""Heads of reward models, which PEFT trains in full by default."""


@dataclass(frozen=True, slots=True)
class Targets:
    """Suffixes of names for PEFT. widths: fused parameter -> number of projections in it."""

    modules: list[str]
    parameters: set[str] = field(default_factory=set)
    widths: dict[str, int] = field(default_factory=dict)


def fused_projections(model: nn.Module) -> dict[str, str]:
    """Whole names that projections of experts, and routers, had before fusing -> the last part of their parameter."""
    from peft.utils.transformers_weight_conversion import _MODEL_TO_CONVERSION_PATTERN, _MOE_TARGET_MODULE_MAPPING

    kind = _MODEL_TO_CONVERSION_PATTERN.get(getattr(getattr(model, "config", None), "model_type", None))
    parts = _MOE_TARGET_MODULE_MAPPING.get(kind, {})
    return {
        f"{name.removesuffix(new)}{old}": new
        for name, _ in model.named_parameters()
        for old, new in parts.items()
        if name.endswith(f".{new}")
    }


def resolve(model: nn.Module, targets: str | list[str]) -> Targets | None:
    """The modules and parameters of a mixture that PEFT would convert; None for other models.

    Args:
        model: without adapter.
        targets: "all-linear", a regular expression, or suffixes of names.

    Raises:
        ConfigError: one of several projections that are one parameter.
    """
    from torch import nn

    fused = fused_projections(model)
    if not fused:
        return None
    heads = {getattr(model, "get_output_embeddings", lambda: None)(), *(getattr(model, name, None) for name in HEADS)}
    linear = {name for name, module in model.named_modules() if isinstance(module, nn.Linear) and module not in heads}
    if targets == "all-linear":
        named: Iterable[str] = {_last(name) for name in linear | fused.keys()}
    elif isinstance(targets, str):
        every = {name for name, _ in model.named_modules()} | fused.keys()
        named = [name for name in every if re.fullmatch(targets, name)]
    else:
        named = targets
    found, present = Targets([]), set()
    old_names = {_last(name) for name in fused}
    for target in sorted(named):
        if _last(target) not in old_names:
            found.modules.append(target)
            continue
        if any(_fits(target, name) for name in linear - fused.keys()):
            found.parameters.add(f"{target}.weight")
        for new in {new for name, new in fused.items() if _fits(target, name)}:
            found.parameters.add(target.removesuffix(_last(target)) + new)
            present.add(target)
    for target in present:
        _check_whole(target, present, fused, found.widths)
    return found


def _last(name: str) -> str:
    return name.rpartition(".")[2]


def _fits(suffix: str, name: str) -> bool:
    return f".{name}".endswith(f".{suffix}")


def _check_whole(target: str, present: set[str], fused: dict[str, str], widths: dict[str, int]) -> None:
    """Refuses a part of a fused parameter."""
    prefix, new = target.removesuffix(_last(target)), next(new for name, new in fused.items() if _fits(target, name))
    parts = sorted({_last(name) for name, other in fused.items() if other == new})
    if missing := [part for part in parts if prefix + part not in present]:
        raise ConfigError(
            f"--target_modules: {target}: the model holds {' and '.join(parts)} of its experts as one parameter, which "
            f"has one adapter; name {' '.join(prefix + part for part in missing)}, too"
        )
    if len(parts) > 1:
        widths[new] = len(parts)
