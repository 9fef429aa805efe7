"""Registries: named parts that `swift` ships and that users' plugins add.

A registry is a dictionary: `orms["name"] = entry`, or `@losses.register("name")` above a class or function. It
remembers who assigned each entry: a module of `swift` (built-in), the plugin file being loaded, or the running
program. A replaced built-in is announced; two plugin files that register one name are refused.

An entry declares its own settings as a dataclass of `swift.flags.flag` fields:

    @losses.register("mine", parameters=MineParameters)

`Registry.parameters_of` gives them back. This module imports no other part of `swift`; the built-in entries of a
registry are imported from its `package` on first use.
"""

from __future__ import annotations

import importlib
import logging
import pkgutil
import sys
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass, is_dataclass, replace
from typing import Any, TypeVar

logger = logging.getLogger("swift.plugin")

BUILT_IN = "built-in"
SESSION = "this program"
IMPORTED = "import path"

Entry = TypeVar("Entry")


class ORM:
    """Base of a reward function written as a class; one instance lives in every reward worker.

    Subclasses define `__call__(self, completions, **kwargs) -> list[float | None]`: one entry per
    completion, None where the function does not apply. `scope` is "sample" (calls may be split down to one
    sample), "group" (never less than the completions of one prompt) or "batch" (one call per generation
    batch). `judges` is what the reward is about: whether the "answer" is right, the "form" of a text, or a "penalty",
    of which 0 is the best value; alerts and `swift doctor` expect of the latter two that they tell nothing of answers.
    """

    scope = "sample"
    judges = "answer"

    def __init__(self, args: Any = None, **kwargs: Any) -> None:
        self.args = args

    def __call__(self, completions: list[str], *args: Any, **kwargs: Any) -> Any:
        """Scores `completions`; every keyword is a list of the same length, except `trainer_state`."""
        raise NotImplementedError(f"{type(self).__name__} does not define __call__")


class AsyncORM(ORM):
    """Base of a reward function that awaits something, for example a judge behind HTTP.

    Calls of different groups overlap in one worker; a call over its time limit is cancelled.
    """

    async def __call__(self, completions: list[str], *args: Any, **kwargs: Any) -> Any:
        """As `ORM.__call__`, awaited."""
        raise NotImplementedError(f"{type(self).__name__} does not define __call__")


@dataclass(frozen=True)
class Registration:
    """An entry, who registered it, and the dataclass of its own settings (None: it has none)."""

    entry: Any
    origin: str
    parameters: type | None


class Registry(MutableMapping[str, Any]):
    """A mapping of named parts with the origin of each.

    Args:
        key: the name that users import: "orms".
        kind: what the entries are, for messages: "reward function".
        package: module that registers the built-in entries, or package whose modules do; None for none.
    """

    def __init__(self, key: str, kind: str, package: str | None = None) -> None:
        self.key, self.kind = key, kind
        self._package = package
        self._registered: dict[str, Registration] = {}

    @property
    def registrations(self) -> dict[str, Registration]:
        """All registrations by name, the built-in ones included."""
        package, self._package = self._package, None
        if package is not None:
            for module in pkgutil.iter_modules(getattr(importlib.import_module(package), "__path__", ())):
                importlib.import_module(f"{package}.{module.name}")
        return self._registered

    def register(self, name: str, *, parameters: type | None = None) -> Callable[[Entry], Entry]:
        """A decorator that registers a class or function under `name`, as users write it on the command line.

        parameters: dataclass of the entry's own settings, one `swift.flags.flag` per field.
        """
        origin = _origin()

        def add(entry: Entry) -> Entry:
            self.add(name, Registration(entry, origin, parameters))
            return entry

        return add

    def add(self, name: str, registration: Registration) -> None:
        """Registers under `name`; a replaced built-in is announced and leaves its settings to an entry without any."""
        origin = registration.origin
        known = self._registered if origin == BUILT_IN else self.registrations
        before = known.get(name)
        if before is not None and before.origin == BUILT_IN and origin != BUILT_IN:
            what = getattr(registration.entry, "__name__", type(registration.entry).__name__)
            logger.warning("note: %s of %s replaces the built-in %s %r", what, origin, self.kind, name)
            if registration.parameters is None:
                registration = replace(registration, parameters=before.parameters)
        self._registered[name] = registration
        if _recording is not None and origin != BUILT_IN:
            _recording[self.key, name] = registration

    def __setitem__(self, name: str, entry: Any) -> None:
        declared = getattr(entry, "parameters", None)
        parameters = declared if isinstance(declared, type) and is_dataclass(declared) else None
        self.add(name, Registration(entry, _origin(), parameters))

    def __getitem__(self, name: str) -> Any:
        return self.registrations[name].entry

    def __delitem__(self, name: str) -> None:
        del self.registrations[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.registrations)

    def __len__(self) -> int:
        return len(self.registrations)

    def origin(self, name: str) -> str:
        """Who registered an entry: `BUILT_IN`, a plugin file as given, `SESSION`, or `IMPORTED` by its path."""
        return self.registrations[name].origin

    def parameters_of(self, name: str) -> type | None:
        """The dataclass of an entry's own settings; None when it declares none."""
        return self.registrations[name].parameters

    def built_ins(self) -> list[str]:
        """Names whose present entry ships with `swift`, sorted."""
        return sorted(name for name in self if self.origin(name) == BUILT_IN)

    def plugins(self) -> list[str]:
        """Names registered by plugins or by the running program, sorted."""
        return sorted(name for name in self if self.origin(name) != BUILT_IN)


Recorded = dict[tuple[str, str], Registration]
"""(key of the registry, name) -> registration."""

_loading: str | None = None
_recording: Recorded | None = None


def _origin() -> str:
    """The origin of an assignment: a module of this package, the plugin being loaded, or the program."""
    module = str(sys._getframe(2).f_globals.get("__name__", ""))
    if module.partition(".")[0] == __name__.partition(".")[0]:
        return BUILT_IN
    return _loading or SESSION


@contextmanager
def registering(origin: str) -> Iterator[Recorded]:
    """Entries that are assigned inside the block, in any registry, come from `origin`, a plugin's path; yields them."""
    global _loading, _recording
    before = _loading, _recording
    _loading, _recording = origin, {}
    try:
        yield _recording
    finally:
        _loading, _recording = before


def register_again(entries: Recorded, origin: str) -> None:
    """Registers the recorded entries of a plugin once more."""
    for (key, name), registration in entries.items():
        REGISTRIES[key].add(name, replace(registration, origin=origin))


orms = Registry("orms", "reward function", package="swift.rewards.functions")
"""Reward functions by name: classes, instances, functions or async functions."""


def judging(*kinds: str) -> set[str]:
    """Names of reward functions whose `ORM.judges` is one of these."""
    return {name for name, entry in orms.items() if getattr(entry, "judges", ORM.judges) in kinds}


rm_plugins = Registry("rm_plugins", "reward model plugin", package="swift.rewards.rm_plugin")
"""Classes of `--reward_model_plugin` by name, which score rows with a reward model."""

losses = Registry("losses", "loss", package="swift.rl.losses")
"""Losses of `--loss_type` by name."""

advantages = Registry("advantages", "advantage estimator", package="swift.rl.estimators")
"""Estimators of `--advantage_estimator` by name."""

optimizers = Registry("optimizers", "optimizer")
"""Optimizers of `--optim` by name."""

backends = Registry("backends", "inference backend")
"""Inference backends by name: functions that take an `EngineSpec` and return an `InferenceEngine`."""

rollout_functions = Registry("rollout_functions", "rollout function")
"""Rollout functions by name: `function(prompts, rollout)`; see `swift.rollout.sources.function`."""

multi_turns = Registry("multi_turns", "multi-turn scheduler", package="swift.rollout.multi_turn")
"""Schedulers (classes or instances of `MultiTurnScheduler`) and functions `f(rows) -> rows` by name."""

envs = Registry("envs", "environment", package="swift.rollout.gym_env")
"""Environments of `--gym_env` by name: subclasses of `Env`."""

tools = Registry("tools", "tool")
"""Functions of `--rollout_tools` by the name that the policy calls; annotations and docstring are their schema."""

tool_parsers = Registry("tool_parsers", "format of tool calls", package="swift.rollout.sources.multi_turn.tool_formats")
"""Formats of `--tool_parser` by name: response templates of transformers, which define the syntax of tool calls."""

methods = Registry("methods", "method of rlhf", package="swift.methods")
"""Methods of `--rlhf_type` that learn from given answers, by name: a `swift.trainers.trl.method.Method` each."""

presets = Registry("presets", "preset", package="swift.arguments.presets")
"""Values of papers for `--preset`, by name."""

inference_backends, rollout_funcs = backends, rollout_functions  # older names

_ALL = (
    orms, rm_plugins, losses, advantages, optimizers, backends, rollout_functions, multi_turns, envs, tools,
    tool_parsers, methods, presets,
)  # fmt: skip
REGISTRIES: Mapping[str, Registry] = {registry.key: registry for registry in _ALL}
"""All registries by the name that users import."""
