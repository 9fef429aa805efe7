"""Which reward functions a run uses: names resolved, signatures read, weights counted. No processes.

All problems of a configuration are found together, before any model loads.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from pathlib import PurePath
from typing import Any

from swift.errors import ConfigError, join_problems, nearest
from swift.plugin import orms
from swift.plugin.registry import BUILT_IN
from swift.rewards import contract
from swift.rewards.contract import Signature
from swift.rewards.functions import CosineReward, MathAccuracy, SoftOverlong

logger = logging.getLogger("swift.rewards")

_SAMPLER_FUNCTIONS = ("toolbench", "math")


@dataclass(frozen=True)
class Catalogue:
    """The columns of a run's scores.

    Attributes:
        functions: names of the reward functions, as typed.
        models: names of the reward models: their folder names.
        weights: one per function and model.
        signatures: one per function.
        is_built_in: per function, whether it ships with `swift`.
    """

    functions: list[str]
    models: list[str]
    weights: list[float]
    signatures: list[Signature]
    is_built_in: list[bool]

    @property
    def names(self) -> list[str]:
        """Functions first, then models."""
        return self.functions + self.models

    @property
    def counting_function(self) -> int | None:
        """The function whose counters of ground truths are reported (accuracy and cosine count the same rows)."""
        for index, name in enumerate(self.functions):
            if orms.get(name) in (MathAccuracy, CosineReward):
                return index
        return None

    def of_scope(self, whole_batch: bool) -> list[int]:
        """Positions of the functions that are called per batch, or per group."""
        return [k for k, item in enumerate(self.signatures) if (item.scope == "batch") == whole_batch]


def read_catalogue(args: Any, flags: Mapping[str, Any]) -> Catalogue:
    """Resolves `reward_funcs`, `reward_model` and `reward_weights` of `args`.

    Args:
        args: with these three attributes; plugins are loaded already.
        flags: all flags by name, for the constructors of classes.

    Raises:
        ConfigError: with every problem found.
    """
    functions = [str(name) for name in args.reward_funcs]
    models = model_names(getattr(args, "reward_model", None) or [])
    problems = _name_problems(functions, models)
    signatures: list[Signature] = []
    for name in functions:
        if name in orms:
            try:
                signatures.append(_read(name, orms[name], flags))
            except ConfigError as error:
                problems += error.problems
    given = getattr(args, "reward_weights", None)
    weights = [1.0] * (len(functions) + len(models)) if not given else [float(item) for item in given]
    if len(weights) != len(functions) + len(models):
        shown = " ".join(f"{item:g}" for item in weights)
        wanted = " ".join(functions + models)
        problems.append(
            f"--reward_weights: {shown}: {len(weights)} weights for {len(functions) + len(models)} rewards; "
            f"need {len(functions) + len(models)}: {wanted}"
        )
    join_problems(problems)
    built_in = [orms.origin(name) == BUILT_IN for name in functions]
    return Catalogue(functions, models, weights, signatures, built_in)


def model_names(models: Sequence[str]) -> list[str]:
    """Folder names of reward models, made unique: two called `rm` become `rm` and `rm-2`."""
    names: list[str] = []
    for model in models:
        base = name = PurePath(str(model).rstrip("/")).name
        number = 1
        while name in names:
            number += 1
            name = f"{base}-{number}"
        names.append(name)
    return names


def _name_problems(functions: Sequence[str], models: Sequence[str]) -> list[str]:
    problems = [_unknown(name) for name in functions if name not in orms]
    repeated = {name for name in functions if functions.count(name) > 1}
    problems += [f"--reward_funcs: {name}: given twice; name it once" for name in sorted(repeated)]
    problems += [
        f"--reward_model: {name}: has the name of a reward function; rename the folder"
        for name in sorted(set(functions) & set(models))
    ]
    if not functions and not models:
        problems.append("--reward_funcs: none: a run needs at least one of --reward_funcs and --reward_model")
    return problems


def _unknown(name: str) -> str:
    if name in _SAMPLER_FUNCTIONS:
        return f"--reward_funcs: {name}: scores requests of a sampler, not completions of a training run; use accuracy"
    near = nearest(name, orms)
    hint = f"nearest: {', '.join(near)}; " if near else ""
    plugins = ", ".join(orms.plugins()) or "none"
    return (
        f"--reward_funcs: {name}: unknown reward function; {hint}built-ins: {', '.join(orms.built_ins())}; "
        f"plugins: {plugins}"
    )


def _read(name: str, entry: Any, flags: Mapping[str, Any]) -> Signature:
    signature = contract.signature_of(name, entry)
    if signature.without_self:
        logger.warning(
            "warning: reward function %s: __call__ has no self (%s); called as a static method",
            name,
            signature.where,
        )
    elif inspect.isclass(entry):
        chosen = contract.constructor_arguments(name, entry, flags)
        if entry is SoftOverlong:
            contract.construct(entry, chosen, None, lambda: None)  # refuses impossible lengths right here
    return signature


def flags_of(args: Any) -> dict[str, Any]:
    """The flat arguments by canonical name: fields of a dataclass, or the attributes of a namespace."""
    if is_dataclass(args):
        return {item.name: getattr(args, item.name) for item in fields(args)}
    return {name: value for name, value in vars(args).items() if not name.startswith("_")}


def aliases_of(args: Any) -> dict[str, str]:
    """Alias -> canonical name, as the fields of an arguments dataclass declare them; {} for other objects."""
    if not is_dataclass(args):
        return {}
    declared = [
        (item.name, getattr(details, "aliases", ())) for item in fields(args) for details in item.metadata.values()
    ]
    return {alias: name for name, aliases in declared for alias in aliases}
