"""What becomes of the keys of another project's configuration: settings of ours, and a line for each key.

A project is a table of `Rule`s for the names and values that differ. A key without a rule is a setting of ours if we
have its name, by `swift.flags` as on the command line, and else has no counterpart.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from swift.arguments import known
from swift.arguments.modes import METHODS, MODES, command_of
from swift.arguments.plugins import settings_class
from swift.arguments.values import Raw, convert, show
from swift.errors import ConfigError, nearest
from swift.flags import flags_of, spellings_of
from swift.observability.secrets import is_secret, mask

NOT_IMPORTED = "the file is not imported"
"""How a line ends that refuses a whole file."""

Fate = Literal["taken", "same", "added", "no counterpart"]


@dataclass(slots=True)
class Draft:
    """Our configuration as it is made. `config`: the other one; `lines`: key, what became of it, and in which words."""

    mode: str
    config: Mapping[str, Any] = field(default_factory=dict, repr=False)
    settings: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    lines: list[tuple[str, Fate, str]] = field(default_factory=list)

    @property
    def cls(self) -> type:
        """The settings of the mode."""
        return settings_class(self.mode)

    @property
    def sees(self) -> bool:
        """Whether rows of the mode may have images."""
        return bool(getattr(self.cls, "SEES", False))

    def take(self, key: str, name: str, raw: Any) -> None:
        """The setting `name` (or alias) gets the value of `key`, if it is one."""
        canonical = spellings_of(self.cls).get(name)
        if canonical is None and show(text_of(raw)).lower() == "false" and _is_switch(name):
            self.same(key, "false changes nothing here")
            return
        if canonical is None:
            self.lose(key, self._foreign(name, show(text_of(raw))))
            return
        if instead := getattr(self.cls, "REPLACED", {}).get(canonical):
            self.lose(key, f"{show(text_of(raw))}: no option of swift {command_of(self.mode)}; {instead}")
            return
        if is_secret(canonical):
            self.lose(key, f"a secret; give --{canonical} on the command line")
            return
        flag = flags_of(self.cls)[canonical]
        try:
            value = convert(flag, text_of(raw))
        except ValueError as error:
            self.lose(key, f"--{canonical}: {show(text_of(raw))}: {error}")
            return
        if self.settings.setdefault(canonical, value) != value:
            self.lose(key, f"{show(text_of(raw))}: contradicts --{canonical} {self.settings[canonical]}, given before")
        else:
            self.lines.append((key, "taken", f"{canonical}: {shown(canonical, value)}"))

    def export(self, key: str, name: str, value: Any) -> None:
        """A variable of the environment, in the `ENV:` block; secrets stay where they are."""
        if is_secret(name):
            self.lose(key, f"a secret; set the variable {name}")
            return
        self.environment[name] = show(text_of(value))
        self.lines.append((key, "taken", f"ENV: {name}: {self.environment[name]}"))

    def same(self, key: str, why: str) -> None:
        """A key that changes nothing here."""
        self.lines.append((key, "same", why))

    def lose(self, key: str, why: str) -> None:
        """A key that cannot be taken."""
        self.lines.append((key, "no counterpart", why))

    def add(self, defaults: Mapping[str, Any], project: str, caveats: Mapping[str, str]) -> None:
        """Values that the other project uses where a configuration is silent, and we do not.

        caveats: settings -> where its default is not quite this value.
        """
        replaced: Mapping[str, str] = getattr(self.cls, "REPLACED", {})
        flags = {name: flag for name, flag in flags_of(self.cls).items() if name not in replaced}
        for name, value in defaults.items():
            if name in flags and name not in self.settings and flags[name].default != value:
                self.settings[name] = value
                why = f"{name}: {shown(name, value)}, as {project} has it by default{caveats.get(name, '')}"
                self.lines.append((name, "added", why))

    def translate(self, entries: Iterable[tuple[str, Raw]], rules: Mapping[str, Rule]) -> None:
        """Every key of a configuration."""
        for key, raw in entries:
            if raw in (None, "", [], {}):
                self.same(key, "has no value")
            elif rule := rules.get(key):
                rule(self, key, raw)
            else:
                self._take_by_name(key, raw)

    def _take_by_name(self, key: str, raw: Raw) -> None:
        name, text = key.rpartition(".")[2], show(text_of(raw))
        if name not in spellings_of(self.cls) and known.is_known(name) and known.changes_nothing(name, text):
            self.same(key, f"{text} changes nothing here")
        elif name not in spellings_of(self.cls) and known.asks_nothing(name, text_of(raw)):
            self.same(key, f"{text}: not used by swift {command_of(self.mode)}")
        else:
            self.take(key, name, raw)

    def _foreign(self, name: str, text: str) -> str:
        text = mask(name, text)
        elsewhere = [command_of(mode) for mode in MODES if name in spellings_of(settings_class(mode))]
        if elsewhere:
            return f"{text}: not a setting of swift {command_of(self.mode)}; one of: {', '.join(elsewhere)}"
        if known.is_known(name):
            return f"{text}: {known.refusal(name).removeprefix('known in ms-swift, ')}"
        near = nearest(name, spellings_of(self.cls), 1, likeness=0.75)
        return f"unknown to swift{'; nearest: ' + near[0] if near else ''}"


def _is_switch(name: str) -> bool:
    """Whether some mode has the setting, which is off by default."""
    found = (flags_of(cls)[spellings_of(cls)[name]] for cls in map(settings_class, MODES) if name in spellings_of(cls))
    return any(flag.default is False for flag in found)


Rule = Callable[[Draft, str, Any], None]
"""What becomes of a key with a value."""


@dataclass(frozen=True, slots=True)
class Renamed:
    """The setting `name`; `values`: their words for values, in lower case -> ours."""

    name: str
    values: Mapping[str, str] = field(default_factory=dict)

    def __call__(self, draft: Draft, key: str, raw: Any) -> None:
        """See `Rule`."""
        draft.take(key, self.name, self.values.get(show(text_of(raw)).lower(), raw))


def same(why: str, *values: str) -> Rule:
    """Changes nothing here, if the value is one of `values` (or any, without them)."""

    def rule(draft: Draft, key: str, raw: Any) -> None:
        text = show(text_of(raw))
        if not values or text.lower() in values:
            draft.same(key, why)
        else:
            draft.lose(key, f"{text}: swift: {why}")

    return rule


def refused(why: str, *off: str) -> Rule:
    """What cannot be left out without making the run another one; `off`: values that ask for nothing.

    The rule raises ConfigError.
    """

    def rule(draft: Draft, key: str, raw: Any) -> None:
        text = show(text_of(raw))
        if text.lower() not in off:
            raise ConfigError(f"{key}: {text if len(text) < 60 else '...'}: {why}; {NOT_IMPORTED}")
        draft.same(key, f"{text} changes nothing")

    return rule


def lost(why: str) -> Rule:
    """No counterpart, and why."""
    return lambda draft, key, raw: draft.lose(key, why)


def variable(name: str) -> Rule:
    """A variable of the environment."""
    return lambda draft, key, raw: draft.export(key, name, raw)


def where_true(**settings: str) -> Rule:
    """A switch: these settings if it is on, nothing if it is off."""

    def rule(draft: Draft, key: str, raw: Any) -> None:
        if show(text_of(raw)).lower() == "false":
            draft.same(key, "false changes nothing here")
            return
        for name, value in settings.items():
            draft.take(key, name, value)

    return rule


def known_mode(name: str, subject: str) -> str:
    """The mode of a method or command of another project.

    Raises:
        ConfigError: we have none of this name.
    """
    mode = "rlhf" if name == "grpo" else name
    if mode not in ("rlhf", "sft", "pt", *METHODS):
        trained = ("sft", "grpo", *METHODS)
        raise ConfigError(f"{subject}: {name}: not a method of swift; valid: {', '.join(trained)}")
    return mode


def text_of(raw: Any) -> Raw:
    """A native value of YAML as a configuration of ours would have it: texts, lists of texts, maps, None."""
    if isinstance(raw, bool):
        return str(raw).lower()
    if isinstance(raw, list):
        return [text_of(item) for item in raw]
    return raw if raw is None or isinstance(raw, dict | str) else str(raw)


def shown(name: str, value: Any) -> str:
    """A value as a line shows it."""
    value = mask(name, value)
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
