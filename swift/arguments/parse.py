"""From command line, config file and environment to the settings of a mode: parsed, completed, checked.

    default < preset < file < environment < command line      after all aliases became canonical names

Every value has a provenance, a flag that changes nothing has a note, and all problems are raised together.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from swift.arguments import known
from swift.arguments.derived import Machine, complete, load_plugins
from swift.arguments.foreign import translation
from swift.arguments.layers import VARIABLES, Given, Layer, read_command_line, read_config, read_environment
from swift.arguments.modes import MODES, command_of, mode_of
from swift.arguments.plugins import plugin_paths, settings_class, unread
from swift.arguments.presets import plan_lines, values_under
from swift.arguments.rlhf import OF_PRESETS
from swift.arguments.values import convert
from swift.data.system import names_file, resolve_system
from swift.errors import ConfigError, join_problems, nearest
from swift.flags import Flag, flags_of, spellings_of
from swift.observability.secrets import MASK, is_masked, mask
from swift.plugin.registry import presets

MOST_SHOWN = 500
"""Characters of a value that a line shows."""
MOST_MODES = 3
"""Modes that a line names."""


@dataclass(slots=True)
class Resolved:
    """The settings of a run and where each comes from.

    args: an instance of the mode's dataclass.
    provenance: canonical name -> source (default, preset, file, env or command line), given_as (the spelling as
        written, None for a default) and rule (why a derived value is what it is, or which paper has a preset's
        value, else None).
    notes: lines to print once.
    environment: variables of the config's ENV block that were not set; the caller sets them.
    config: path of the config file, if any.
    """

    mode: str
    args: Any
    provenance: dict[str, dict[str, str | None]]
    notes: list[str] = field(default_factory=list)
    environment: dict[str, str] = field(default_factory=dict)
    config: str | None = None

    @property
    def command(self) -> str:
        """The word after `swift`."""
        return command_of(self.mode).partition(" ")[0]

    @property
    def given(self) -> set[str]:
        """Canonical names of the settings that the user wrote, wherever, or chose with a preset."""
        return {name for name, origin in self.provenance.items() if origin["source"] != "default"}

    @property
    def preset_lines(self) -> list[str]:
        """What the plan says about `--preset`: its values, where the paper has them, and which are overridden."""
        chosen = getattr(self.args, "preset", "none") != "none"
        return plan_lines(self.args, self.provenance) if chosen else []

    def to_json(self) -> dict[str, Any]:
        """The content of args.json: flat canonical values and `_provenance`; secrets are `***`.

        A system prompt stands there itself, not the file that it came from: it belongs to what is trained. A value that
        a rule or a preset gave stands there once more: whoever starts the run again from this file may have edited it.
        """
        values = {name: mask(name, getattr(self.args, name)) for name in flags_of(self.args.__class__)}
        if values.get("system") and not names_file(text := resolve_system(values["system"])[0] or ""):
            values["system"] = text
        origins = {
            name: {**origin, "value": values[name]} if origin["rule"] else origin
            for name, origin in self.provenance.items()
        }
        return {**values, "_provenance": origins}


def parse(mode: str, argv: Sequence[str], environ: Mapping[str, str]) -> Resolved:
    """The settings of one invocation, `argv` being the words after the mode; `--rlhf_type` may choose another mode.

    A ConfigError has every problem found.
    """
    line = read_command_line(argv)
    file = read_config(line.config) if line.config else Layer()
    environment = {name: value for name, value in file.environment.items() if name not in environ}
    variables = {**environ, **environment}

    mode = mode_of(mode, [file.given, line.given])
    reader = Reader(mode, settings_class(mode))
    reader.problems += line.problems + file.problems
    reader.problems += [
        f"{file.config}: ENV: {name}: {MASK}: stands for a secret; set the variable"
        for name, value in environment.items()
        if value == MASK or is_masked(name, value)
    ]
    layers = [file.given, read_environment(variables, reader.flags), line.given]
    reader.load_plugins(layers)
    layers[0] = [given for given in file.given if not reader.follows(given, file.provenance)]
    for layer in layers:
        reader.take(layer)
    if reader.of_trainer:
        reader.notes.append(f"{file.config}: of the trainer, not used by swift rollout: {', '.join(reader.of_trainer)}")
    reader.miss_secrets()
    reader.lay_preset()

    args = reader.args = reader.cls(**reader.values)
    complete(reader, Machine.look(variables))
    unread = tuple(f"--{name}:" for name in reader.broken)  # reported already
    reader.problems += [reader.with_origin(one) for one in _ask(args, "problems") if not one.startswith(unread)]
    reader.problems += _out_of_place(reader)
    join_problems(reader.problems)
    return Resolved(
        mode=mode,
        args=args,
        provenance=_provenance(reader),
        notes=[*reader.notes, *_ask(args, "notes"), *_without_effect(reader)],
        environment=environment,
        config=line.config,
    )


@dataclass
class Reader:
    """Takes the layers from the lowest to the highest; what it keeps is the values of the highest.

    args: the settings that these values make. rules: name -> why a value is what it is. of_trainer: keys of a server's
    file that only trainers have.
    """

    mode: str
    cls: type
    values: dict[str, Any] = field(default_factory=dict)
    origins: dict[str, Given] = field(default_factory=dict)
    masked: dict[str, Given] = field(default_factory=dict)
    broken: set[str] = field(default_factory=set)
    notes: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    rules: dict[str, str] = field(default_factory=dict)
    of_trainer: list[str] = field(default_factory=list)
    args: Any = None

    def derive(self, name: str, value: Any, rule: str) -> None:
        """Gives a setting a value that follows from others, or from the machine."""
        setattr(self.args, name, value)
        self.rules[name] = rule

    @property
    def flags(self) -> dict[str, Flag]:
        """The settings of the mode."""
        return flags_of(self.cls)

    def load_plugins(self, layers: Sequence[Sequence[Given]]) -> None:
        """Loads `--external_plugins` where a flag, or the choice of a registered entry, is not built in."""
        spellings = spellings_of(self.cls)
        if not any(self._may_be_of_a_plugin(given, spellings) for layer in layers for given in layer):
            return
        try:
            load_plugins(plugin_paths(layers, spellings))
            self.cls = settings_class(self.mode)
        except ConfigError as error:
            self.problems += error.problems

    def _may_be_of_a_plugin(self, given: Given, spellings: Mapping[str, str]) -> bool:
        flag = self.flags.get(spellings.get(given.spelling, ""))
        return flag is None or (flag.details.registry is not None and given.shown not in flag.choices)

    def take(self, layer: Iterable[Given]) -> None:
        """One layer, in the order in which it was written."""
        by_name: dict[str, dict[str, Given]] = {}
        repeated: set[str] = set()
        for name, given in self._named(layer):
            if is_masked(name, given.raw):
                self.masked[name] = given
                continue
            said = by_name.setdefault(name, {})
            if given.spelling in said:
                repeated.add(given.spelling)
            said[given.spelling] = given
        for name, said in by_name.items():
            for given in (said[spelling] for spelling in said if spelling in repeated):
                self.notes.append(f"{given.subject}: given more than once; the last value counts: {self.shown(given)}")
            self._settle(self.flags[name], list(said.values()))

    def _named(self, layer: Iterable[Given]) -> Iterator[tuple[str, Given]]:
        """The values of a layer with the settings that they are for; other projects' names are translated."""
        spellings = spellings_of(self.cls)
        for given in layer:
            if given.spelling in spellings:
                yield spellings[given.spelling], given
            elif found := translation(given, self.mode, f"{given.subject}: {self.shown(given)}"):
                self.notes += found.notes
                self.problems += found.problems
                yield from found.settings.items()
            else:
                self._foreign(given)

    def follows(self, given: Given, provenance: Mapping[str, Any]) -> bool:
        """Whether nobody gave this value of an args.json, then or since: it follows again from those that are given."""
        origin, flag = provenance.get(given.spelling), self.flags.get(given.spelling)
        if flag is None or not isinstance(origin, dict):
            return False
        try:
            return origin.get("source") in ("default", "preset") and bool(
                convert(flag, given.raw) == origin.get("value", flag.default)
            )
        except ValueError:  # edited
            return False

    def miss_secrets(self) -> None:
        """What a run recorded as `***`, and a printed command has, must be given by another layer."""
        for name, given in self.masked.items():
            if name not in self.values:
                fix = ", or set ".join(["write it", *(one for one, names in VARIABLES.items() if name in names)])
                self.problems.append(f"{given.subject}: {self.shown(given)}: {MASK} stands for a secret; {fix}")

    def lay_preset(self) -> None:
        """Puts the values of the preset under those taken so far; their rule is the paper."""
        method = self.values.get("rlhf_type")
        if method in OF_PRESETS and "preset" in self.flags and "preset" not in self.values:
            self.values["preset"], self.rules["preset"] = method, f"that of rlhf_type {method}"
        name = self.values.get("preset", "none")
        if name not in presets:
            return
        values = values_under(name, {**dict.fromkeys(self.broken), **self.values})
        for setting, item in values.items():
            self.values[setting] = item.value
            self.origins[setting] = Given(setting, item.shown, "preset", f"preset {name}", f"preset {name}: {setting}")
            self.rules[setting] = presets[name].source(setting)

    def with_origin(self, problem: str) -> str:
        """A problem, with a remark where its value is one that the user did not write but chose with a preset."""
        given = self.origins.get(problem.partition(":")[0].removeprefix("--"))
        return f"{problem} (the value is that of {given.given_as})" if given and given.source == "preset" else problem

    def _settle(self, flag: Flag, said: list[Given]) -> None:
        """The value of one setting in one layer, from all its spellings there."""
        values = []
        for given in said:
            try:
                values.append(convert(flag, _for_flag(flag, given)))
            except ValueError as error:
                self._refuse(flag, given, str(error))
                return
        if flag.details.joins:
            self.values[flag.name] = [item for value in values for item in value]
        elif any(value != values[0] for value in values):
            shown = ", ".join(f"{given.subject} {self.shown(given)}" for given in said)
            self.problems.append(f"--{flag.name}: {shown}: the same setting with different values; give one of them")
            self.broken.add(flag.name)
        else:
            self.values[flag.name] = values[-1]
        self.origins[flag.name] = said[-1]

    def _refuse(self, flag: Flag, given: Given, reason: str) -> None:
        self.broken.add(flag.name)
        if known.is_known_value(flag.name, given.shown):
            reason = f"known in ms-swift, not supported here; valid: {', '.join(map(str, flag.choices))}"
        self.problems.append(f"{given.subject}: {self.shown(given)}: {reason}")

    def _foreign(self, given: Given) -> None:
        """A name that is no setting of this mode: of another mode, of ms-swift alone, or unknown."""
        name, shown = given.spelling, self.shown(given)
        where = f"{given.subject}: {shown}"
        elsewhere = [mode for mode in MODES if name in spellings_of(settings_class(mode))]
        if known.is_known(name) and known.changes_nothing(name, shown):
            self.notes.append(f"{where}: known in ms-swift; this value changes nothing here")
        elif elsewhere and self.mode == "rollout" and given.source == "file":  # one file for trainer and server
            self.of_trainer.append(name)
        elif elsewhere and _is_default(settings_class(elsewhere[0]), given):
            self.notes.append(f"{where}: not used by swift {command_of(self.mode)}")
        elif elsewhere:
            others = ", ".join([*map(command_of, elsewhere[:MOST_MODES]), *["others"][: len(elsewhere) > MOST_MODES]])
            self.problems.append(f"{where}: not a flag of swift {command_of(self.mode)}; a flag of: {others}")
        elif not known.is_known(name):
            near = nearest(name, spellings_of(self.cls))
            fix = f"nearest: {', '.join(near)}" if near else f"see swift {command_of(self.mode)} --help-all"
            self.problems.append(f"{where}: unknown flag; {fix}")
        else:
            self.problems.append(f"{where}: {known.refusal(name)}")

    def shown(self, given: Given) -> str:
        """A value as notes and error lines show it: a flag without a value is true, secrets are masked."""
        flag = self.flags.get(spellings_of(self.cls).get(given.spelling, ""))
        if given.raw == [] and given.source == "command line" and (flag is None or flag.kind == "bool"):
            return "true"
        text = str(mask(flag.name if flag else given.spelling, given.shown))
        return text if len(text) <= MOST_SHOWN else f"{text[:MOST_SHOWN]}..."


def _for_flag(flag: Flag, given: Given) -> Any:
    """The raw value as the flag's type wants it: words of a command line are a list only for list flags."""
    if given.source != "command line":
        return given.raw
    words = given.raw
    assert isinstance(words, list)
    if not words and (flag.kind == "bool" or "true" in flag.details.values):
        return "true"
    if not words:
        raise ValueError("no value; give one")
    if flag.is_list:
        return [word for word in words if word != ""]
    return words[0] if len(words) == 1 else words


def _is_default(cls: type, given: Given) -> bool:
    flag = flags_of(cls)[spellings_of(cls)[given.spelling]]
    try:
        return bool(convert(flag, _for_flag(flag, given)) == flag.default)
    except ValueError:
        return False


def _ask(args: Any, question: str) -> Iterator[str]:
    """The answers of every class that the mode is made of, general classes first."""
    for cls in reversed(type(args).__mro__):
        if question in cls.__dict__:
            yield from getattr(cls, question)(args)


def _without_effect(reader: Reader) -> Iterator[str]:
    """Settings that the user wrote for this run and that change nothing; values of a preset fit each other."""
    ignored = unread(reader.args)
    for name, given in reader.origins.items():
        flag = reader.flags[name]
        if given.source in ("preset", "env") or getattr(reader.args, name) == flag.default:
            continue
        if not flag.has_effect(reader.args):
            yield f"{given.subject}: {reader.shown(given)}: no effect without {flag.needs_text}"
        elif name in ignored:
            yield f"{given.subject}: {reader.shown(given)}: no effect with {ignored[name]}, which does not read it"


def _out_of_place(reader: Reader) -> Iterator[str]:
    """Settings that the user wrote and that the mode refuses, because another one decides what they would."""
    replaced: Mapping[str, str] = getattr(reader.args, "REPLACED", {})
    for name, given in reader.origins.items():
        flag, where = reader.flags[name], f"{given.subject}: {reader.shown(given)}"
        if flag.details.strict and not flag.has_effect(reader.args):
            yield f"{where}: no effect without {flag.needs_text}; leave it out"
        elif name in replaced and reader.values.get(name) != flag.default:
            yield f"{where}: not an option of swift {command_of(reader.mode)}; {replaced[name]}"


def _provenance(reader: Reader) -> dict[str, dict[str, str | None]]:
    found = {}
    for name in reader.flags:
        given = reader.origins.get(name)
        source, given_as = (given.source, given.given_as) if given else ("default", None)
        found[name] = {"source": source, "given_as": given_as, "rule": reader.rules.get(name)}
    return found
