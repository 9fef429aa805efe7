"""From command line, config file and environment to the settings of a mode: parsed, completed, checked.

    default < preset < file < environment < command line      after all aliases became canonical names

Every value has a provenance, a flag that changes nothing has a note, and all problems are raised together.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from swift.arguments import absent, known
from swift.arguments.derived import Machine, complete, load_plugins
from swift.arguments.foreign import one_value, translation
from swift.arguments.layers import VARIABLES, Given, Layer, read_command_line, read_config, read_environment
from swift.arguments.modes import MODES, command_of, mode_of
from swift.arguments.plugins import CHOICES, plugin_paths, settings_class
from swift.arguments.presets import plan_lines, values_under
from swift.arguments.rlhf import OF_PRESETS
from swift.arguments.values import Raw, convert, show
from swift.data.system import names_file, resolve_system
from swift.errors import ConfigError, join_problems, nearest
from swift.flags import Flag, flags_of, registered, spellings_of
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
        """Lines of the plan about `--preset`: its values, their places in the paper, and which are overridden."""
        chosen = getattr(self.args, "preset", "none") != "none"
        return plan_lines(self.args, self.provenance) if chosen else []

    def to_json(self) -> dict[str, Any]:
        """The content of args.json: flat canonical values and `_provenance`; secrets are `***`.

        A system prompt is written itself, not the file that it came from. The provenance repeats a value that a rule or
        a preset gave: a run that starts from this file compares the two to detect an edited value.
        """
        values = {name: mask(name, getattr(self.args, name)) for name in flags_of(self.args.__class__)}
        if values.get("system") and not names_file(text := resolve_system(values["system"])[0] or ""):
            values["system"] = text
        origins = {
            name: {**origin, "value": values[name]} if origin["rule"] else origin
            for name, origin in self.provenance.items()
        }
        return {**values, "_provenance": origins}


def _load_methods(command: str, layers: Sequence[Sequence[Given]]) -> None:
    """Loads `--external_plugins` if `--rlhf_type` has the name of no method."""
    method = [show(item.raw) for layer in layers for item in layer if item.spelling == "rlhf_type"][-1:]
    rlhf = flags_of(MODES["rlhf"])
    if command == "rlhf" and method and method[0] not in rlhf["rlhf_type"].choices:
        load_plugins(plugin_paths(layers, spellings_of(MODES["rlhf"])))


def parse(mode: str, argv: Sequence[str], environ: Mapping[str, str], *, machine: Machine | None = None) -> Resolved:
    """The settings of one invocation, `argv` being the words after the mode; `--rlhf_type` may choose another mode.

    machine: what defaults depend on; None looks at this one. A ConfigError has every problem found.
    """
    line = read_command_line(argv)
    file = read_config(line.config) if line.config else Layer()
    environment = {name: value for name, value in file.environment.items() if name not in environ}
    variables = {**environ, **environment}

    _load_methods(mode, [file.given, line.given])
    mode = mode_of(mode, [file.given, line.given])
    _refuse_task([*file.given, *line.given])
    cls = settings_class(mode)
    reader = Reader(mode, cls, flags_of(cls))
    reader.problems += line.problems + file.problems
    reader.problems += [
        f"{file.config}: ENV: {name}: {MASK}: stands for a secret; set the variable"
        for name, value in environment.items()
        if value == MASK or is_masked(name, value)
    ]
    layers = [file.given, read_environment(variables, reader.flags), line.given]
    reader.load_plugins(layers)
    layers[0] = [given for given in file.given if not reader.was_derived(given, file.provenance)]
    for layer in layers:
        reader.take(layer)
    if reader.of_trainer:
        reader.notes.append(f"{file.config}: of the trainer, not used by swift rollout: {', '.join(reader.of_trainer)}")
    if reader.masked:
        reader.require_secrets()
    reader.apply_preset()

    args = reader.args = reader.cls(**reader.values)
    complete(reader, machine or Machine.detect(variables))
    reported = tuple(f"--{name}:" for name in reader.broken)
    problems = [problem for problem in _collect(args, "problems") if not problem.startswith(reported)]
    reader.problems += [*map(reader.with_origin, problems), *_refused(reader)]
    join_problems(reader.problems)
    origins = {name: reader.origins.get(name) for name in reader.flags}
    return Resolved(
        mode=mode,
        args=args,
        provenance={
            name: {
                "source": given.source if given else "default",
                "given_as": given.given_as if given else None,
                "rule": reader.rules.get(name),
            }
            for name, given in origins.items()
        },
        notes=[*reader.notes, *_collect(args, "notes"), *_without_effect(reader)],
        environment=environment,
        config=line.config,
    )


def _refuse_task(given: Iterable[Given]) -> None:
    """Raises ConfigError with one line, for a kind of model of which all other flags would be refused, too."""
    for item in given:
        if item.spelling == "task_type" and (task := show(item.raw)) in absent.values_of("task_type"):
            raise ConfigError(f"{item.subject}: {task}: not trained here; use sentence-transformers or ms-swift")


@dataclass
class Reader:
    """Reads the layers from the lowest to the highest; the value of the highest layer wins.

    flags: the settings of `cls`. args: the settings made of the values. rules: name -> reason of a value. of_trainer:
    keys of a server's file that only trainers have.
    """

    mode: str
    cls: type
    flags: dict[str, Flag]
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

    def load_plugins(self, layers: Sequence[Sequence[Given]]) -> None:
        """Loads `--external_plugins` if a flag, or the choice of a registered entry, is not built in."""
        spellings = spellings_of(self.cls)
        flags = [(self.flags.get(spellings.get(given.spelling, "")), given) for layer in layers for given in layer]
        if all(flag and (flag.details.registry is None or show(given.raw) in flag.choices) for flag, given in flags):
            return
        try:
            load_plugins(plugin_paths(layers, spellings))
            self.cls = settings_class(self.mode)
            self.flags = flags_of(self.cls)
        except ConfigError as error:
            self.problems += error.problems

    def take(self, layer: Iterable[Given]) -> None:
        """Reads one layer, in the order in which it was written; other projects' names are translated."""
        spellings = spellings_of(self.cls)
        layer = list(layer)
        beside = {item.spelling: one_value(item) for item in layer}
        by_name: dict[str, dict[str, Given]] = {}
        repeated: set[str] = set()
        for item in layer:
            own = spellings.get(item.spelling)
            for name, given in ({own: item} if own else self._translate(item, beside)).items():
                if is_masked(name, given.raw):
                    self.masked[name] = given
                    continue
                by_spelling = by_name.setdefault(name, {})
                if given.spelling in by_spelling:
                    repeated.add(given.spelling)
                by_spelling[given.spelling] = given
        for name, by_spelling in by_name.items():
            for given in (given for spelling, given in by_spelling.items() if spelling in repeated):
                self.notes.append(f"{given.subject}: given more than once; the last value counts: {self.shown(given)}")
            self._merge(self.flags[name], list(by_spelling.values()))

    def was_derived(self, given: Given, provenance: Mapping[str, Any]) -> bool:
        """Whether a value of an args.json was derived and not edited since, so that it is derived again."""
        origin, flag = provenance.get(given.spelling), self.flags.get(given.spelling)
        if flag is None or not isinstance(origin, dict):
            return False
        try:
            return origin.get("source") in ("default", "preset") and bool(
                convert(flag, given.raw) == origin.get("value", flag.default)
            )
        except ValueError:  # edited
            return False

    def require_secrets(self) -> None:
        """Secrets that a run recorded as `***` must be given by another layer."""
        for name, given in self.masked.items():
            if name not in self.values:
                variables = [variable for variable, names in VARIABLES.items() if name in names]
                fix = ", or set ".join(["write it", *variables])
                self.problems.append(f"{given.subject}: {self.shown(given)}: {MASK} stands for a secret; {fix}")

    def apply_preset(self) -> None:
        """Takes the values of the preset for settings that no layer gave; their rule is the paper."""
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
        """A problem, with a remark if its value comes from a preset."""
        given = self.origins.get(problem.partition(":")[0].removeprefix("--"))
        return f"{problem} (the value is that of {given.given_as})" if given and given.source == "preset" else problem

    def _merge(self, flag: Flag, by_spelling: list[Given]) -> None:
        """The value of one setting in one layer, from all its spellings there."""
        values = []
        for given in by_spelling:
            try:
                values.append(convert(flag, _for_flag(flag, given)))
            except ValueError as error:
                self._refuse(flag, given, str(error))
                return
        if flag.details.joins:
            self.values[flag.name] = [item for value in values for item in value]
        elif any(value != values[0] for value in values):
            shown = ", ".join(f"{given.subject} {self.shown(given)}" for given in by_spelling)
            self.problems.append(f"--{flag.name}: {shown}: the same setting with different values; give one of them")
            self.broken.add(flag.name)
        else:
            self.values[flag.name] = values[-1]
        self.origins[flag.name] = by_spelling[-1]

    def _refuse(self, flag: Flag, given: Given, reason: str) -> None:
        self.broken.add(flag.name)
        if known.is_known_value(flag.name, show(given.raw)):
            reason = f"known in ms-swift, not supported here; valid: {', '.join(map(str, flag.choices))}"
        self.problems.append(f"{given.subject}: {self.shown(given)}: {reason}")

    def _translate(self, given: Given, beside: Mapping[str, Raw]) -> Mapping[str, Given]:
        """The settings that a name of another project stands for.

        Otherwise {}, and a note or a problem: a name of another mode, one of ms-swift alone, or an unknown one.
        """
        name, shown = given.spelling, self.shown(given)
        where = f"{given.subject}: {shown}"
        if found := translation(given, self.mode, where, beside):
            self.notes += found.notes
            self.problems += found.problems
            return found.settings
        elsewhere = [mode for mode in MODES if name in spellings_of(settings_class(mode))]
        if known.is_known(name) and known.changes_nothing(name, shown):
            self.notes.append(f"{where}: {known.no_effect(name)}")
        elif elsewhere and self.mode == "rollout" and given.source == "file":  # one file for trainer and server
            self.of_trainer.append(name)
        elif known.asks_nothing(name, one_value(given)):
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
        return {}

    def shown(self, given: Given) -> str:
        """A value as notes and error lines show it: a flag without a value is true, secrets are masked."""
        flag = self.flags.get(spellings_of(self.cls).get(given.spelling, ""))
        if given.raw == [] and given.source == "command line" and (flag is None or flag.kind == "bool"):
            return "true"
        text = str(mask(flag.name if flag else given.spelling, show(given.raw)))
        return text if len(text) <= MOST_SHOWN else f"{text[:MOST_SHOWN]}..."


def _for_flag(flag: Flag, given: Given) -> Any:
    """The raw value in the form of the flag's type: words of a command line are a list only for list flags."""
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


def _collect(args: Any, method: Literal["problems", "notes"]) -> Iterator[str]:
    """The lines of this method of every class that the mode is made of, general classes first."""
    for cls in reversed(type(args).__mro__):
        if method in cls.__dict__:
            yield from getattr(cls, method)(args)


def _without_effect(reader: Reader) -> Iterator[str]:
    """Settings that the user gave for this run and that change nothing. Values of a preset are not checked."""
    ignored: dict[str, str] = {}  # settings that a chosen entry does not read -> the choice
    for choice, registry in CHOICES.items():
        chosen = getattr(reader.args, choice, None)
        entry = registered(registry).get(chosen) if isinstance(chosen, str) else None
        ignored |= dict.fromkeys(getattr(entry, "unread", ()), f"--{choice} {chosen}")
    for name, given in reader.origins.items():
        flag = reader.flags[name]
        if given.source in ("preset", "env") or getattr(reader.args, name) == flag.default:
            continue
        if flag.needs and not flag.has_effect(reader.args):
            yield f"{given.subject}: {reader.shown(given)}: no effect without {flag.needs_text}"
        elif name in ignored:
            yield f"{given.subject}: {reader.shown(given)}: no effect with {ignored[name]}, which does not read it"


def _refused(reader: Reader) -> Iterator[str]:
    """Settings that the user gave and that the mode refuses, because another setting replaces them."""
    replaced: Mapping[str, str] = getattr(reader.args, "REPLACED", {})
    for name, given in reader.origins.items():
        flag = reader.flags[name]
        if flag.details.strict and not flag.has_effect(reader.args):
            reason = f"no effect without {flag.needs_text}; leave it out"
        elif name in replaced and reader.values.get(name) != flag.default:
            reason = f"not an option of swift {command_of(reader.mode)}; {replaced[name]}"
        else:
            continue
        yield f"{given.subject}: {reader.shown(given)}: {reason}"
