"""Which reward functions a run uses: names resolved, signatures read. No processes.

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
from swift.flags import aliases_of
from swift.plugin import orms
from swift.plugin.registry import BUILT_IN
from swift.rewards import contract
from swift.rewards.contract import Signature

logger = logging.getLogger("swift.rewards")

_SAMPLER_FUNCTIONS = ("toolbench", "math")


@dataclass(frozen=True)
class Catalogue:
    """The columns of a run's scores: functions as typed, then models by folder name.

    `signatures` and `is_built_in` have one entry per function, `weights` one per function and model.
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
        """The function whose counters of ground truths are reported: others would count the same rows again."""
        counting = (k for k, name in enumerate(self.functions) if getattr(orms[name], "counts_ground_truths", False))
        return next(counting, None)

    def of_scope(self, whole_batch: bool) -> list[int]:
        """Positions of the functions that are called per batch, or per group."""
        return [k for k, item in enumerate(self.signatures) if (item.scope == "batch") == whole_batch]


def read_catalogue(args: Any, flags: Mapping[str, Any]) -> Catalogue:
    """Resolves `reward_funcs`, `reward_model` and `reward_weights` of `args`.

    Args:
        args: with these three attributes, checked by `RewardArguments`; plugins are loaded already.
        flags: all flags by name, for the constructors of classes.

    Raises:
        ConfigError: with every problem found.
    """
    functions = [str(name) for name in args.reward_funcs]
    models = model_names(args.reward_model)
    problems = [_unknown(name) for name in functions if name not in orms]
    repeated = {name for name in functions if functions.count(name) > 1}
    problems += [f"--reward_funcs: {name}: given twice; name it once" for name in sorted(repeated)]
    problems += [
        f"--reward_model: {name}: has the name of a reward function; rename the folder"
        for name in sorted(set(functions) & set(models))
    ]
    signatures: list[Signature] = []
    for name in functions:
        if name in orms:
            try:
                signatures.append(_read(name, orms[name], flags))
            except ConfigError as error:
                problems += error.problems
    join_problems(problems)
    weights = [float(item) for item in args.reward_weights or [1.0] * (len(functions) + len(models))]
    return Catalogue(functions, models, weights, signatures, [orms.origin(name) == BUILT_IN for name in functions])


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
        contract.constructor_arguments(name, entry, {**flags, "args": None, "tokenizer": None})
    return signature


def run_flags(args: Any) -> dict[str, Any]:
    """The settings of a run by canonical name and by alias: of a dataclass, or the attributes of a namespace."""
    if not is_dataclass(args):
        return dict(vars(args))
    named = {item.name: getattr(args, item.name) for item in fields(args)}
    return {alias: named[name] for alias, name in aliases_of(type(args)).items()} | named
