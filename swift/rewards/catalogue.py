"""Which reward functions a run uses: names resolved, signatures read. No processes.

All problems of a configuration are found together, before any model loads.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Mapping, Sequence
from dataclasses import is_dataclass
from pathlib import PurePath
from typing import Any

from swift.data.spec import each
from swift.errors import join_problems, nearest
from swift.flags import spellings_of
from swift.plugin import orms
from swift.plugin.import_path import is_import_path, register_import_path
from swift.plugin.registry import Registration
from swift.rewards import contract
from swift.rewards.contract import Signature

logger = logging.getLogger("swift.rewards")

_SAMPLER_FUNCTIONS = ("toolbench", "math")

TRL_FUNCTIONS = ("accuracy_reward", "reasoning_accuracy_reward", "think_format_reward")
"""Names of `trl.rewards` that TRL's own command line knows."""


def read_signatures(args: Any, flags: Mapping[str, Any]) -> list[Signature]:
    """The signatures of `reward_funcs`, in order, whose plugins are loaded; a ConfigError has every problem found.

    flags: all flags by name, for the constructors of classes.
    """
    functions = [str(name) for name in args.reward_funcs]
    known = [name for name in functions if is_known(name)]
    found = dict(zip(known, each(known, find), strict=True))
    problems = [_unknown(name) for name in functions if name not in found]
    repeated = {name for name in functions if functions.count(name) > 1}
    problems += [f"--reward_funcs: {name}: given twice; name it once" for name in sorted(repeated)]
    problems += [
        f"--reward_model: {name}: has the name of a reward function; rename the folder"
        for name in sorted(set(functions) & set(model_names(args.reward_model)))
    ]
    join_problems(problems)
    return each(functions, lambda name: _read(name, found[name], flags))


def is_known(name: str) -> bool:
    """Whether a name is registered, one of TRL's, or may be an import path."""
    return name in orms or name in TRL_FUNCTIONS or is_import_path(name)


def find(name: str) -> Registration:
    """The entry of a reward function, registered by its import path if need be."""
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


def _read(name: str, found: Registration, flags: Mapping[str, Any]) -> Signature:
    entry = found.entry
    signature = contract.signature_of(name, entry, origin=found.origin)
    if signature.without_self:
        said = "warning: reward function %s: __call__ has no self (%s); called as a static method"
        logger.warning(said, name, signature.where)
    elif inspect.isclass(entry):
        contract.constructor_arguments(name, entry, {**flags, "args": None, "tokenizer": None})
    return signature


def run_flags(args: Any) -> dict[str, Any]:
    """The settings of a run by canonical name and by alias: of a dataclass, or the attributes of a namespace."""
    if not is_dataclass(args):
        return dict(vars(args))
    kind: Any = type(args)
    return {spelling: getattr(args, name) for spelling, name in spellings_of(kind).items()}
