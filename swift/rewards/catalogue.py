"""The reward functions of a run: names resolved, signatures read. No processes.

All problems of a configuration are reported together, before any model loads.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Mapping, Sequence
from dataclasses import is_dataclass
from pathlib import PurePath
from typing import Any

from swift.data.spec import map_collecting_problems
from swift.errors import ConfigError, join_problems, nearest
from swift.flags import spellings_of
from swift.plugin import orms
from swift.plugin.import_path import is_import_path, register_import_path
from swift.plugin.registry import Registration
from swift.rewards import contract
from swift.rewards.contract import Signature

logger = logging.getLogger("swift.rewards")

_SAMPLER_FUNCTIONS = ("math",)

TRL_FUNCTIONS = ("accuracy_reward", "reasoning_accuracy_reward", "think_format_reward")
"""Names in `trl.rewards` that TRL's own command line accepts."""


def read_signatures(args: Any, flags: Mapping[str, Any]) -> list[Signature]:
    """The signatures of `reward_funcs`, in order, whose plugins are loaded; a ConfigError has every problem found.

    flags: all flags by name, for the constructors of classes.
    """
    functions = [str(name) for name in args.reward_funcs]
    known = [name for name in functions if name in orms or name in TRL_FUNCTIONS or is_import_path(name)]
    found = dict(zip(known, map_collecting_problems(known, find), strict=True))
    problems = [_unknown(name) for name in functions if name not in found]
    repeated = {name for name in functions if functions.count(name) > 1}
    problems += [f"--reward_funcs: {name}: given twice; name it once" for name in sorted(repeated)]
    problems += [
        f"--reward_model: {name}: has the name of a reward function; rename the folder"
        for name in sorted(set(functions) & set(model_names(args.reward_model)))
    ]
    join_problems(problems)
    signatures: list[Signature] = []
    for name in functions:
        entry = found[name].entry
        try:
            signature = contract.signature_of(name, entry, origin=found[name].origin)
            if inspect.isclass(entry) and not signature.without_self:
                contract.constructor_arguments(name, entry, {**flags, "args": None, "tokenizer": None})
        except ConfigError as error:
            problems += error.problems
            continue
        if signature.without_self:
            warning = "warning: reward function %s: __call__ has no self (%s); called as a static method"
            logger.warning(warning, name, signature.where)
        signatures.append(signature)
    join_problems(problems)
    return signatures


def find(name: str) -> Registration:
    """The entry of a reward function; one that is named by its import path is registered first."""
    if name not in orms:
        path = f"trl.rewards.{name}" if name in TRL_FUNCTIONS else name
        register_import_path(orms, name, flag="--reward_funcs", path=path)
    return orms.registrations[name]


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
        f"plugins: {plugins}; or an import path such as package.module.function"
    )


def run_flags(args: Any) -> dict[str, Any]:
    """The settings of a run by canonical name and by alias: fields of a dataclass, or attributes of a namespace."""
    if not is_dataclass(args):
        return dict(vars(args))
    kind: Any = type(args)
    return {spelling: getattr(args, name) for spelling, name in spellings_of(kind).items()}
