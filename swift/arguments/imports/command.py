"""`swift import-config FILE`: reads the file, writes our configuration, and says what became of every key."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from swift.arguments.foreign import one_value
from swift.arguments.imports import axolotl, ms_swift, shell, trl
from swift.arguments.imports.draft import Draft, Renamed, Rule, known_mode
from swift.arguments.layers import CONFIG_SUFFIXES, read_config
from swift.arguments.modes import METHODS, command_of, mode_of
from swift.arguments.parse import Resolved, parse
from swift.arguments.plugins import settings_class
from swift.arguments.values import Raw
from swift.errors import ConfigError, counted, join_problems
from swift.flags import spellings_of

OURS = ("ipo", "simpo", "gdpo", "rloo", "ebft", "ebft_strided")
"""Methods that no configuration of TRL asks for by its keys."""

HEADINGS = {"taken": "taken", "added": "added", "same": "nothing to set", "no counterpart": "no counterpart"}


@dataclass(frozen=True, slots=True)
class Imported:
    """A configuration of `project` as ours."""

    project: str
    draft: Draft

    @property
    def command(self) -> str:
        """The words after `swift` that the configuration is for; `rlhf_type` is in the file."""
        return command_of(self.draft.mode).partition(" ")[0]

    def to_yaml(self, source: str, output: str) -> str:
        """Our file; what has no counterpart stands on top of it."""
        lost = [f"#   {key}: {why}" for key, fate, why in self.draft.lines if fate == "no counterpart"]
        head = [f"# swift {self.command} {output}", f"# Made from {source} ({self.project}) by swift import-config."]
        return "\n".join([*head, *(["# No counterpart:", *lost] if lost else []), ""]) + _yaml(self.settings())

    def settings(self) -> dict[str, Any]:
        """The keys of our file."""
        words = ["--rlhf_type", "grpo"] if self.draft.mode == "rlhf" else command_of(self.draft.mode).split()[1:]
        method = {flag.removeprefix("--"): value for flag, value in zip(words[::2], words[1::2], strict=True)}
        environment = {"ENV": self.draft.environment} if self.draft.environment else {}
        return {**method, **self.draft.settings, **environment}

    def report(self) -> Iterator[str]:
        """A line for each key, by what became of it."""
        for fate, heading in HEADINGS.items():
            lines = [(key, why) for key, found, why in self.draft.lines if found == fate]
            if lines:
                yield f"{heading}:"
                yield from (f"  {why}" if key == why.partition(":")[0] else f"  {key} -> {why}" for key, why in lines)


def run(resolved: Resolved) -> None:
    """`swift import-config`.

    Raises:
        ConfigError: the file cannot be read, its project or method is not known, or the output exists.
    """
    args = resolved.args
    imported = import_file(args.file, args.method)
    output = args.output or f"{Path(args.file).stem}-swift.yaml"
    if not output.endswith(CONFIG_SUFFIXES[:2]):
        raise ConfigError(f"--output: {output}: not a YAML file; end its name in {' or '.join(CONFIG_SUFFIXES[:2])}")
    try:
        with Path(output).open("x", encoding="utf-8") as file:
            file.write(imported.to_yaml(args.file, output))
    except OSError as error:
        raise ConfigError(f"--output: {output}: cannot be written ({error.strerror}); give another file") from error
    open_problems = problems_of(imported.command, output)
    if args.json:
        print(json.dumps({"output": output, "lines": imported.draft.lines, "problems": open_problems}))
        return
    print("\n".join(imported.report()))
    if open_problems:
        print("\n".join(["to settle before it runs:", *(f"  {problem}" for problem in open_problems)]))
    keys = counted(sum(fate != "added" for _, fate, _ in imported.draft.lines), "key")
    print(f"{args.file}: {imported.project}, {keys} read; start with: swift {imported.command} {output}")


def problems_of(command: str, path: str) -> list[str]:
    """What `swift <command> <path>` would refuse, as far as settings alone tell."""
    try:
        parse(command, [path], os.environ)
    except ConfigError as error:
        return error.problems
    return []


def import_file(path: str, method: str | None = None) -> Imported:
    """A file of another project as a configuration of ours.

    Args:
        path: YAML or JSON of Axolotl, TRL or ms-swift, or a shell script of ms-swift.
        method: the method of a TRL configuration; None finds the one whose settings it has.

    Raises:
        ConfigError: see `run`.
    """
    if not path.endswith(CONFIG_SUFFIXES):
        return _import_script(path)
    file = read_config(path)
    join_problems(file.problems)
    config = {given.spelling: given.raw for given in file.given}
    if "base_model" in config:
        return _filled("Axolotl", axolotl.mode_of(config), config)
    if config.get("model") and "model_name_or_path" not in config:
        mode = known_mode(str(config.get("rlhf_type") or method or "sft"), f"{path}: rlhf_type")
        return _filled("ms-swift", mode, config, file.environment)
    return _filled("TRL", known_mode(method, "--method") if method else _told_by_keys(path, config), config)


Config = Mapping[str, Any]
PROJECTS: dict[str, tuple[Mapping[str, Rule], Callable[[str, Config, Config], Config], Mapping[str, str]]] = {
    "Axolotl": (axolotl.RULES, axolotl.defaults, axolotl.CAVEATS),
    "TRL": (trl.RULES, lambda mode, config, given: trl.defaults(mode, given), trl.CAVEATS),
    "ms-swift": (ms_swift.RULES, lambda mode, config, given: ms_swift.defaults(mode, given), {}),
}
"""Project -> what becomes of its keys, what it uses where a configuration is silent, and what to say beside that."""


def _filled(project: str, mode: str, config: Mapping[str, Raw], environment: Mapping[str, str] = {}) -> Imported:
    rules, defaults, caveats = PROJECTS[project]
    draft = Draft(mode, config)
    draft.translate(axolotl.flattened(config) if project == "Axolotl" else config.items(), rules)
    draft.add(defaults(mode, config, draft.settings), project, caveats)
    for name, value in environment.items():
        if name == "MAX_PIXELS" and draft.sees:
            draft.take(name, "max_pixels", value)
        else:
            draft.export(name, name, value)
    return Imported(project, draft)


def _import_script(path: str) -> Imported:
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not a UTF-8 text"
        raise ConfigError(f"{path}: script: cannot be read ({reason}); check the path") from error
    script = shell.read_script(path, text)
    config = {given.spelling: one_value(given) for given in script.given}
    if script.project == "trl":
        config = {name.removeprefix("no_"): "false" if name.startswith("no_") else raw for name, raw in config.items()}
    project = {"trl": "TRL", "swift": "ms-swift"}[script.project]
    mode = mode_of(script.mode, [script.given]) if project == "ms-swift" else script.mode
    imported = _filled(project, mode, config, script.environment)
    for name, why in script.lost:
        imported.draft.lose(name, why)
    return imported


def _told_by_keys(path: str, config: Mapping[str, Raw]) -> str:
    """The one mode that has the most of a configuration's keys."""
    names = {rule.name if isinstance(rule := trl.RULES.get(key), Renamed) else key for key in config}
    modes = ["sft", "rlhf", *(method for method in METHODS if method not in OURS)]
    scores = {}
    for mode in modes:
        cls = settings_class(mode)
        replaced = getattr(cls, "REPLACED", {})
        known = {spelling for spelling, name in spellings_of(cls).items() if name not in replaced}
        scores[mode] = len(names & known)
    best = [mode for mode, score in scores.items() if score == max(scores.values())]
    if len(best) > 1:
        fits = ", ".join("grpo" if mode == "rlhf" else mode for mode in best)
        raise ConfigError(f"--method: missing: the keys of {path} fit {fits} alike; give one of them")
    return best[0]


def _yaml(settings: Mapping[str, Any]) -> str:
    import yaml

    return str(yaml.safe_dump(dict(settings), sort_keys=False, allow_unicode=True, width=math.inf))
