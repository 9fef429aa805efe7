"""Settings that registered losses, advantage estimators, rewards, optimizers, engines and rollout functions declare.

An entry of a registry may have `parameters`: a dataclass of fields made with `swift.flags.flag`. They are flags of
every mode that has the choice, act where the entry is chosen, and stand in `--help`, the schema and args.json like
all others.

    @dataclass
    class ClampParameters:
        clamp_at: float = flag(2.0, above=0)
        '''Largest ratio.'''

    @losses.register("clamp", parameters=ClampParameters)
    def clamp(...): ...

`--external_plugins clamp.py --loss_type clamp --clamp_at 3` then sets `args.clamp_at`.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from swift.arguments.modes import MODES, is_method
from swift.arguments.preferences import settings_of
from swift.errors import ConfigError, suggest
from swift.flags import flags_of, registered, spellings_of

if TYPE_CHECKING:
    from swift.arguments.layers import Given

CHOICES = {
    "loss_type": "losses",
    "advantage_estimator": "advantages",
    "optim": "optimizers",
    "infer_backend": "backends",
    "reward_funcs": "orms",
    "rollout_func": "rollout_functions",
}
"""Setting that chooses an entry -> the registry of `swift.plugin.registry`."""


def settings_class(mode: str) -> type:
    """The settings of a mode, those of registered entries included."""
    if mode not in MODES and not is_method(mode):
        raise ConfigError(f"mode: {mode}: unknown mode; {suggest(mode, list(MODES))}")
    base = MODES[mode] if mode in MODES else settings_of(mode)
    owners: dict[type, list[str]] = {}
    flags = flags_of(base)
    choices = [name for name in CHOICES if name in flags and (flags[name].details.registry or not flags[name].built_in)]
    if choices:
        importlib.import_module("swift.plugin")
    for choice in choices:
        registry = registered(CHOICES[choice])
        for name in registry:
            parameters = registry.parameters_of(name)
            if parameters is not None and not issubclass(base, parameters):
                owners.setdefault(parameters, [choice]).append(name)
    return _extended(base, tuple((owner, tuple(names)) for owner, names in owners.items()))


def plugin_paths(layers: Sequence[Iterable[Given]], spellings: Mapping[str, str]) -> list[str]:
    """The files of `--external_plugins`, from the highest of the layers that names any."""
    for layer in reversed(layers):
        given = [item.raw for item in layer if spellings.get(item.spelling) == "external_plugins"]
        if given:
            return [str(path) for raw in given for path in (raw if isinstance(raw, list) else [raw])]
    return []


def entry_of(args: Any, choice: str) -> Any:
    """The registered entry that the setting `choice` names."""
    return registered(CHOICES[choice])[getattr(args, choice)]


@functools.cache
def _extended(cls: type, owners: tuple[tuple[type, tuple[str, ...]], ...]) -> type:
    if not owners:
        return cls
    taken = set(spellings_of(cls))
    for owner, (choice, *names) in owners:
        own = set(spellings_of(owner))
        if clash := sorted(own & taken):
            raise ConfigError(
                f"--{choice}: {names[0]}: its parameter {clash[0]} is the name of another setting; rename it"
            )
        taken |= own
    needs = {
        owner: f"{choice}={'|'.join(names)}"
        for owner, (choice, *names) in owners
        if choice != "reward_funcs"  # a reward function of a plugin may read any setting
    }
    body = {"__doc__": cls.__doc__, "__module__": cls.__module__, "NEEDS": needs}
    return dataclasses.dataclass(kw_only=True)(type(cls.__name__, (*(owner for owner, _ in owners), cls), body))
