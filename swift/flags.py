"""What one setting is: a dataclass field with a default, a type, and the text below it.

    learning_rate: float | None = flag(above=0)
    '''Peak learning rate.'''

The annotation decides how a value is read: bool, int, float, str, `list[...]`, `dict`, `Literal` for choices,
`| None` where the setting may be absent. The text under the field is its help; help, docs and schema read it
from here and from nowhere else. The first sentence stands alone in short lists.

Dataclasses of such fields sit beside the component that reads them; `swift.arguments` composes them. Each may have
`problems()`, what is wrong with its settings, and `notes()`, remarks about settings that work, one line each. An entry
of a registry (a loss, a reward function, an engine, ...) may have such a dataclass too, as its attribute `parameters`.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import itertools
import json
import re
import sys
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

Kind = Literal["bool", "int", "float", "str", "dict"]
Resume = Literal["fixed", "noted", "free"]
"""What a changed setting means on resume: an error, since it decides what is in the checkpoint; a line, since it makes
another run from there; nothing, since it decides where the run is watched and how fast it goes."""

_NEED = re.compile(r"(\w*)([=<]?)(.*)")
SECRET: dict[str, bool | None] = {}
"""`secret` of every flag that has been read, by each of its names."""
BOUNDS = {"gt": "above", "ge": "at least", "lt": "below", "le": "at most"}
"""Names of bounds: those of pydantic -> those of messages."""
REQUIRED = "required"
"""`unset` of a setting that must be given."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Details:
    """Properties of a field besides its type and default.

    aliases: other names. values: other words for values, in lower case -> the value. above, at_least, below, at_most:
    bounds of a number, or of each number of a list. group: heading in the help; None means the class's `GROUP`.
    everyday: whether the short help shows it. unset: meaning of the default None, in words, or `REQUIRED`. needs: the
    setting without which this one has no effect: a switch, `name=value|value` of a choice, or `name<number`. strict:
    whether it is then refused instead of noted. joins: whether values given under different aliases are concatenated
    instead of contradicting each other. registry: name of the registry in `swift.plugin.registry` whose entries are
    choices (too); their attribute `summary`, if any, is part of the help. lists: name of a registry whose built-in
    entries the help names; other values are allowed as well. secret: whether the value is never
    shown; False: it contains no secret, whatever its keys are called; None: its URLs and keys may contain some.
    resume: whether it may change when a run is resumed.
    """

    aliases: Sequence[str] = ()
    values: Mapping[str, str] = dataclasses.field(default_factory=dict)
    above: float | None = None
    at_least: float | None = None
    below: float | None = None
    at_most: float | None = None
    group: str | None = None
    everyday: bool = True
    unset: str | None = None
    needs: str | None = None
    strict: bool = False
    joins: bool = False
    registry: str | None = None
    lists: str | None = None
    secret: bool | None = None
    resume: Resume = "noted"

    @property
    def bounds(self) -> dict[str, float]:
        """The bounds that are given, by pydantic's names."""
        bounds = {"gt": self.above, "ge": self.at_least, "lt": self.below, "le": self.at_most}
        return {name: bound for name, bound in bounds.items() if bound is not None}


def flag(default: Any = None, **details: Any) -> Any:
    """A field of an arguments dataclass, with its `Details`; lists and dicts are copied for each instance."""
    metadata = {"flag": Details(**details)}
    if isinstance(default, list | dict):
        return dataclasses.field(default_factory=lambda: type(default)(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


@dataclass(frozen=True, slots=True, eq=False)
class Flag:
    """A setting as help, schema and the parser see it.

    spellings: the canonical name, then the aliases. built_in: the values of a `Literal`. needs: as in `Details`, or the
    choice of the entry that declares the setting. owner: the dataclass that defines it.
    """

    name: str
    spellings: tuple[str, ...]
    kind: Kind
    is_list: bool
    optional: bool
    built_in: tuple[Any, ...]
    default: Any
    group: str
    needs: str
    details: Details
    owner: type

    @property
    def choices(self) -> tuple[Any, ...]:
        """All values that are allowed, those of plugins last; () allows any."""
        entries = registered(self.details.registry) if self.details.registry else ()
        return (*self.built_in, *(name for name in entries if name not in self.built_in))

    @property
    def help(self) -> str:
        """The text under the field, one paragraph, and what its registries say of their entries."""
        entries = registered(self.details.registry) if self.details.registry else {}
        summaries = {name: getattr(entry, "summary", "") for name, entry in entries.items()}
        parts = [f"{name}: {summary}." for name, summary in summaries.items() if summary]
        if self.details.lists and (listed := registered(self.details.lists)):
            parts.append(f"Built in: {', '.join(listed.built_ins())}.")
        return " ".join([help_texts(self.owner).get(self.name, ""), *parts])

    @property
    def summary(self) -> str:
        """The first sentence of the help."""
        first, dot, _ = self.help.partition(". ")
        return first + "." if dot else self.help

    @property
    def valid(self) -> str:
        """The choices or the range, in words; "" when neither is bounded."""
        bounds = (f"{BOUNDS[name]} {bound:.10g}" for name, bound in self.details.bounds.items())
        return ", ".join(map(str, self.choices)) or " and ".join(bounds)

    def has_effect(self, args: Any) -> bool:
        """Whether the settings `args` of a mode switch on what this one needs."""
        name, sign, wanted = _NEED.fullmatch(self.needs).groups()  # type: ignore[union-attr]
        if not hasattr(args, name):
            return True
        value = getattr(args, name)
        if sign == "<":
            return bool(value < float(wanted))
        return bool(set(value if isinstance(value, list) else [value]) & set(wanted.split("|")) if sign else value)

    @property
    def needs_text(self) -> str:
        """What the setting needs, as it is typed; "" when nothing."""
        words = self.needs.replace("=", " ").replace("|", " or ").replace("<", " below ")
        return f"--{words}" if words else ""


def typed(value: Any) -> str:
    """A value as it would be typed."""
    if value is None or value == [] or value == {}:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        return " ".join(map(typed, value))
    return json.dumps(value) if isinstance(value, dict) else str(value)


def registered(registry: str) -> Any:
    """The entries of a registry of `swift.plugin.registry`, by name; {} before something has loaded it."""
    return getattr(sys.modules.get("swift.plugin.registry"), registry, {})


@functools.cache
def flags_of(cls: type) -> dict[str, Flag]:
    """The settings of a dataclass and of its bases, by canonical name, in order of definition."""
    hints = typing.get_type_hints(cls)
    flags = {}
    for field in dataclasses.fields(cls):
        details: Details = field.metadata.get("flag", Details())
        owner: Any = next(base for base in cls.__mro__ if field.name in inspect.get_annotations(base))
        hint, optional = hints[field.name], False
        if typing.get_origin(hint) in (typing.Union, types.UnionType):  # Literal | None is still the former
            members = [member for member in typing.get_args(hint) if member is not types.NoneType]
            assert len(members) == 1, f"{field.name}: a setting has one type, or one type or None"
            hint, optional = members[0], True
        is_list = typing.get_origin(hint) is list
        if is_list:
            hint = typing.get_args(hint)[0]
        choices = typing.get_args(hint) if typing.get_origin(hint) is Literal else ()
        kind: Any = type(choices[0]) if choices else typing.get_origin(hint) or hint
        group: Any = details.group or getattr(owner, "GROUP", "Plugins")
        spellings = (field.name, *details.aliases)
        SECRET.update(dict.fromkeys(spellings, details.secret))
        flags[field.name] = Flag(
            name=field.name,
            spellings=spellings,
            kind=kind.__name__,
            is_list=is_list,
            optional=optional,
            built_in=choices,
            default=field.default if field.default_factory is dataclasses.MISSING else field.default_factory(),
            group=group,
            needs=details.needs or getattr(cls, "NEEDS", {}).get(owner, ""),
            details=details,
            owner=owner,
        )
    return flags


@functools.cache
def spellings_of(cls: type) -> dict[str, str]:
    """Every name and alias of every setting -> canonical name."""
    return {spelling: flag.name for flag in flags_of(cls).values() for spelling in flag.spellings}


@functools.cache
def help_texts(cls: type) -> dict[str, str]:
    """The texts under the fields that `cls` itself defines, each joined to one line."""
    tree = _module_tree(cls.__module__)
    body = next(node.body for node in tree.body if isinstance(node, ast.ClassDef) and node.name == cls.__name__)
    texts = {}
    for field, text in itertools.pairwise(body):
        match field, text:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(words))):
                texts[name] = " ".join(words.split())
    return texts


@functools.cache
def _module_tree(module: str) -> ast.Module:
    return ast.parse(inspect.getsource(sys.modules[module]))
