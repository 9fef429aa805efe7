"""From command line, config file and environment to the settings of a mode: parsed, completed, checked.

    default < preset < file < environment < command line      after all spellings became canonical names

Nothing is decided quietly: every value has a provenance, a flag that changes nothing has a note, and all
problems are raised together. `swift.arguments.later` is no part of this: what a later version brings parses.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from swift.arguments import idle, later
from swift.arguments.derived import Machine, derive
from swift.arguments.layers import ConfigFile, Given, read_command_line, read_config, read_environment
from swift.arguments.modes import MODES
from swift.arguments.presets import PRESETS, plan_lines, values_under
from swift.arguments.values import convert, mask
from swift.arguments.vocabulary import known_flag, later_value, replaced_flag
from swift.errors import ConfigError, join_problems, nearest, suggest
from swift.flags import Flag, aliases_of, flags_of, spellings_of


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
    def given(self) -> set[str]:
        """Canonical names of the settings that the user wrote, wherever, or chose with a preset."""
        return {name for name, origin in self.provenance.items() if origin["source"] != "default"}

    @property
    def preset_lines(self) -> list[str]:
        """What the plan says about `--preset`: its values, where the paper has them, and which are overridden."""
        chosen = getattr(self.args, "preset", "none") != "none"
        return plan_lines(self.args, self.provenance) if chosen else []

    @property
    def aliases(self) -> dict[str, str]:
        """Other spelling -> canonical name."""
        return aliases_of(type(self.args))

    def later(self) -> list[str]:
        """Problems: what these settings ask for and this version does not have; see `swift.arguments.later`."""
        return later.check(self.args, self.given)

    def to_json(self) -> dict[str, Any]:
        """The content of args.json: flat canonical values and `_provenance`; secrets are `***`."""
        values = {name: mask(name, getattr(self.args, name)) for name in flags_of(type(self.args))}
        return {**values, "_provenance": self.provenance}


def parse(mode: str, argv: Sequence[str], environ: Mapping[str, str]) -> Resolved:
    """The settings of one invocation, `argv` being the words after the mode.

    Raises:
        ConfigError: with every problem found.
    """
    if mode not in MODES:
        raise ConfigError(f"mode: {mode}: unknown mode; {suggest(mode, list(MODES))}")
    line = read_command_line(argv)
    file = read_config(line.config) if line.config else ConfigFile()
    environment = {name: value for name, value in file.environment.items() if name not in environ}
    variables = {**environ, **environment}

    reader = _Reader(mode, MODES[mode])
    reader.problems += line.problems + file.problems
    reader.take(file.given)
    reader.take(given for given in read_environment(variables) if given.spelling in reader.flags)
    reader.take(line.given)
    sources = reader.lay_preset()

    args = MODES[mode](**reader.values)
    rules = {**sources, **_complete(args, reader, Machine.look(variables))}
    reader.problems += [
        reader.with_origin(problem) for problem in _ask(args, "problems") if not reader.already_reported(problem)
    ]
    join_problems(reader.problems)
    return Resolved(
        mode=mode,
        args=args,
        provenance=_provenance(reader, rules),
        notes=[*reader.notes, *_ask(args, "notes"), *_without_effect(args, reader)],
        environment=environment,
        config=line.config,
    )


@dataclass
class _Reader:
    """Takes the layers from the lowest to the highest; what it keeps is the values of the highest."""

    mode: str
    cls: type
    values: dict[str, Any] = field(default_factory=dict)
    origins: dict[str, Given] = field(default_factory=dict)
    broken: set[str] = field(default_factory=set)
    notes: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    @property
    def flags(self) -> dict[str, Flag]:
        """The settings of the mode."""
        return flags_of(self.cls)

    def take(self, layer: Iterable[Given]) -> None:
        """One layer, in the order in which it was written."""
        spellings = spellings_of(self.cls)
        by_name: dict[str, dict[str, Given]] = {}
        repeated: set[str] = set()
        for given in layer:
            if given.spelling not in spellings:
                self._foreign(given)
                continue
            said = by_name.setdefault(spellings[given.spelling], {})
            if given.spelling in said:
                repeated.add(given.spelling)
            said[given.spelling] = given
        for name, said in by_name.items():
            for given in (said[spelling] for spelling in said if spelling in repeated):
                self.notes.append(f"{given.subject}: given more than once; the last value counts: {self.shown(given)}")
            self._settle(self.flags[name], list(said.values()))

    def lay_preset(self) -> dict[str, str]:
        """Values of the preset under those taken so far; returns setting -> the paper that has the value."""
        name = self.values.get("preset", "none")
        if name == "none":
            return {}
        values = values_under(name, {**dict.fromkeys(self.broken), **self.values})
        for setting, item in values.items():
            self.values[setting] = item.value
            self.origins[setting] = Given(setting, item.shown, "preset", f"preset {name}", f"preset {name}: {setting}")
        return {setting: PRESETS[name].source(setting) for setting in values}

    def with_origin(self, problem: str) -> str:
        """A problem, with a remark where its value is one that the user did not write but chose with a preset."""
        given = self.origins.get(problem.partition(":")[0].removeprefix("--"))
        return f"{problem} (the value is that of {given.given_as})" if given and given.source == "preset" else problem

    def already_reported(self, problem: str) -> bool:
        """Whether a problem is about a setting whose value could not be read in the first place."""
        return any(problem.startswith(f"--{name}:") for name in self.broken)

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
        part = later_value(flag.name, given.shown)
        if part is not None:
            valid = ", ".join(map(str, flag.choices))
            reason = f"known, not implemented in this version (comes with: {part}); valid: {valid}"
        self.problems.append(f"{given.subject}: {self.shown(given)}: {reason}")

    def _foreign(self, given: Given) -> None:
        """A name that is no setting of this mode: of another mode, of another version, or unknown."""
        name, shown = given.spelling, self.shown(given)
        elsewhere = [mode for mode, cls in MODES.items() if name in spellings_of(cls)]
        known, instead = known_flag(name), replaced_flag(name)
        if elsewhere:
            if _is_default(MODES[elsewhere[0]], given):
                self.notes.append(f"{given.subject}: {shown}: not used by swift {self.mode}")
            else:
                self.problems.append(
                    f"{given.subject}: {shown}: known, not implemented in swift {self.mode}; "
                    f"a flag of: {', '.join(elsewhere)}"
                )
        elif instead is not None:
            self.problems.append(f"{given.subject}: {shown}: known, not implemented under this name; {instead}")
        elif known is None:
            near = nearest(name, spellings_of(self.cls))
            fix = f"nearest: {', '.join(near)}" if near else f"see swift {self.mode} --help-all"
            self.problems.append(f"{given.subject}: {shown}: unknown flag; {fix}")
        elif known.changes_nothing(shown):
            self.notes.append(f"{given.subject}: {shown}: accepted, changes nothing in this version")
        else:
            self.problems.append(
                f"{given.subject}: {shown}: known, not implemented in this version (comes with: {known.part}); "
                f"leave it out"
            )

    def shown(self, given: Given) -> str:
        """A value as notes and error lines show it: a flag without a value is true, secrets are masked."""
        flag = self.flags.get(spellings_of(self.cls).get(given.spelling, ""))
        if given.raw == [] and given.source == "command line" and (flag is None or flag.kind == "bool"):
            return "true"
        return str(mask(flag.name if flag else given.spelling, given.shown))


def _for_flag(flag: Flag, given: Given) -> Any:
    """The raw value as the flag's type wants it: words of a command line are a list only for list flags."""
    if given.source != "command line":
        return given.raw
    words = given.raw
    assert isinstance(words, list)
    if not words and flag.kind == "bool":
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


def _complete(args: Any, reader: _Reader, machine: Machine) -> dict[str, str]:
    """Fills derived values; returns name -> rule."""
    rules = {**_implied_engine(args, reader), **_from_kwargs(args, reader), **derive(args, machine)}
    evaluates = getattr(args, "eval_strategy", "no") != "no"
    if evaluates and not args.val_dataset and not args.split_dataset_ratio:
        args.eval_strategy = "no"
        rules["eval_strategy"] = "no: there is no evaluation data"
        if reader.origins.keys() & {"eval_strategy", "eval_steps"}:
            reader.notes.append("evaluation: off: neither --val_dataset nor --split_dataset_ratio is given")
    return rules


def _implied_engine(args: Any, reader: _Reader) -> dict[str, str]:
    """A vLLM mode or a server address asks for vLLM, unless another backend is named."""
    if not hasattr(args, "rlhf_type"):
        return {}
    rules = {}
    asked = [name for name in ("vllm_mode", "vllm_server_host", "vllm_server_base_url") if getattr(args, name)]
    if args.infer_backend == "vllm":
        asked = ["infer_backend"]
    elif args.infer_backend or args.use_lmdeploy:
        asked = []
    if asked and "use_vllm" in reader.origins and not args.use_vllm:
        reader.problems.append(f"--use_vllm: false: contradicts --{asked[0]}; drop --{asked[0]}, or --use_vllm true")
    elif asked and not args.use_vllm:
        args.use_vllm = True
        rules["use_vllm"] = f"true because --{asked[0]} is given"
    if args.infer_backend == "lmdeploy" and not args.use_lmdeploy:
        args.use_lmdeploy = True
        rules["use_lmdeploy"] = "true because --infer_backend lmdeploy is given"
    if args.vllm_mode is None and (args.vllm_server_host or args.vllm_server_base_url):
        args.vllm_mode = "server"
        rules["vllm_mode"] = "server because its address is given"
    return rules


def _from_kwargs(args: Any, reader: _Reader) -> dict[str, str]:
    """Entries of `--generation_kwargs` that have a flag become its value; name -> rule."""
    rules: dict[str, str] = {}
    for name, value in args.flags_in_kwargs().items() if hasattr(args, "flags_in_kwargs") else ():
        raw = [str(item) for item in value] if isinstance(value, list) else str(value)
        try:
            converted = convert(reader.flags[name], raw)
        except ValueError as error:
            reader.problems.append(f"--generation_kwargs: {name}: {value}: {error}")
            continue
        if name in reader.origins and getattr(args, name) != converted:
            reader.notes.append(f"--generation_kwargs: {name}: {value}: beats {reader.origins[name].subject}")
        setattr(args, name, converted)
        rules[name] = "from --generation_kwargs"
    return rules


def _ask(args: Any, question: str) -> Iterator[str]:
    """The answers of every class that the mode is made of, general classes first."""
    for cls in reversed(type(args).__mro__):
        if question in cls.__dict__:
            yield from getattr(cls, question)(args)


def _without_effect(args: Any, reader: _Reader) -> Iterator[str]:
    for name, given in reader.origins.items():
        flag = reader.flags[name]
        if getattr(args, name) == flag.default:
            continue
        if not flag.has_effect(args):
            yield f"{given.subject}: {reader.shown(given)}: no effect without {flag.needs_text}"
        elif given.source != "preset" and (why := idle.reason(name, args)):
            yield f"{given.subject}: {reader.shown(given)}: {why}"


def _provenance(reader: _Reader, rules: Mapping[str, str]) -> dict[str, dict[str, str | None]]:
    return {
        name: {
            "source": reader.origins[name].source if name in reader.origins else "default",
            "given_as": reader.origins[name].given_as if name in reader.origins else None,
            "rule": rules.get(name),
        }
        for name in reader.flags
    }
