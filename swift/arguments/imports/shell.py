"""Shell scripts of ms-swift and TRL: the one command that trains, with the values that the script itself sets."""

from __future__ import annotations

import ast
import operator
import re
import shlex
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from swift.arguments.imports import accelerate
from swift.arguments.imports.draft import known_mode
from swift.arguments.layers import Given, Layer, read_command_line
from swift.arguments.values import show
from swift.errors import ConfigError
from swift.observability.secrets import mask
from swift.plugin.registry import methods

TRAINING = {
    "swift": {name: name for name in ("sft", "rlhf", "pt")},
    "trl": {
        **{name: name for name in ("sft", "grpo", "gkd")},
        **{command: name for name, method in methods.items() for command in method.commands_of_trl},
    },
}
"""Commands that train, and their methods; a script that a launcher starts has the name of one of them."""

LAUNCHERS = ("torchrun", "accelerate", "deepspeed", "python", "python3", "uv", "srun")
LAUNCHED = {
    "nproc_per_node": "NPROC_PER_NODE", "num_processes": "NPROC_PER_NODE", "num_gpus": "NPROC_PER_NODE",
    "nnodes": "NNODES", "num_machines": "NNODES", "node_rank": "NODE_RANK", "machine_rank": "NODE_RANK",
    "master_addr": "MASTER_ADDR", "main_process_ip": "MASTER_ADDR", "master_port": "MASTER_PORT",
    "main_process_port": "MASTER_PORT",
}  # fmt: skip
"""Flags of launchers -> our variables."""

OF_PLATFORM = {"NNODES": "WORLD_SIZE", "NODE_RANK": "RANK", "MASTER_ADDR": "MASTER_ADDR", "MASTER_PORT": "MASTER_PORT"}
"""Our variables -> those of a platform that starts one process per node, which a launch reads itself."""

OF_NODE = ("NODE_RANK", "MASTER_ADDR", "MASTER_PORT")
"""Our variables that may differ between nodes: some name the first node in another way."""

_BEFORE = ("export", "env", "nohup", "exec", "time", "then", "else", "do", "{", "(")
"""Words that a command follows."""
_REST = ("$@", "$*", "${@}")
_QUOTED = r"""('[^']*'|"[^"]*")|"""
_COMMENT = re.compile(_QUOTED + r"(?<!\S)#.*")
_REDIRECTION = re.compile(_QUOTED + r"(?<!\S)\d*(?:&>>?|>>?&?|<)\s*\S+")
_SUBSTITUTION = re.compile(r"\$\(\([^()]*\)\)|\$\([^()]*\)|`[^`]*`")
_ARITHMETIC = re.compile(r"\$\(\(([^()]*)\)\)|(?:\$\(|`)\s*expr\s([^()`]*)[)`]")
_OPERATORS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Mod: operator.mod,
    ast.Div: operator.floordiv,
}  # fmt: skip
_ARRAY = re.compile(r"^[ \t]*(\w+)\+?=\(([^()]*)\)", re.MULTILINE)
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)
_VARIABLE = re.compile(r"\$(?:\{(\w+)(?::?-([^}]*))?\}|(\w+))")
_SHELL_WORD = re.compile(r"[$`]")


@dataclass
class Script:
    """The one command of a script that trains.

    project: swift (ms-swift's, or ours) or trl. environment: variables that it sees, of launchers too. lost: what
    cannot be taken, and why.
    """

    project: str
    command: str
    given: list[Given]
    environment: dict[str, str]
    lost: list[tuple[str, str]] = field(default_factory=list)

    @property
    def mode(self) -> str:
        """The method that is trained."""
        method = TRAINING[self.project][self.command]
        types = [show(item.raw) for item in self.given if item.spelling == "rlhf_type"]
        return known_mode((types or ["dpo"])[-1] if method == "rlhf" else method, "rlhf_type" if types else method)


def read_script(path: str, text: str) -> Script:
    """Understands assignments, arrays, `export`, comments, continued lines, quotes, `&&`, pipes and launchers.

    Of commands that differ by their node alone, the first is taken.

    Raises:
        ConfigError: quotes that do not end, no command that trains, or several.
    """
    variables: dict[str, str] = {}
    exported: dict[str, str] = {}
    found: list[Script] = []
    others: list[tuple[str, str]] = []
    for words in _commands(path, text):
        words = _expanded(words, variables)
        local: dict[str, str] = {}
        exports = words[:1] == ["export"]
        while words and (words[0] in _BEFORE or _ASSIGNMENT.fullmatch(words[0])):
            if assigned := _ASSIGNMENT.fullmatch(words.pop(0)):
                local[assigned[1]] = assigned[2]
        if exports or not words:
            variables |= local
            exported |= {name: variables[name] for name in {*local, *words} & variables.keys() if exports}
            continue
        launcher, project, command, flags = _program(words)
        if words[0] in ("megatron", "axolotl"):
            why = "its settings are in a file; give that file" if words[0] == "axolotl" else "Megatron is not supported"
            raise ConfigError(f"{path}: {' '.join(words[:3])}: {why}")
        if words[0].startswith("--"):
            raise ConfigError(f"{path}: {words[0]}: no command precedes it; a comment or an empty line ends a command")
        if command in TRAINING.get(project, {}):
            environment = {name: value for name, value in {**exported, **local}.items() if name.isupper()}
            found.append(_script(project, command, launcher, read_command_line(flags), environment))
        elif project:
            others.append((" ".join(words[:2]), "another command of the script"))
    if len(found) > 1 and all(_but_for_node(script) == _but_for_node(found[0]) for script in found):
        ranks = [script.environment.get("NODE_RANK", "") for script in found]
        if len({*ranks}) == len(found):
            others.append(("NODE_RANK", f"{', '.join(ranks[1:])}: of other nodes, which start the same command"))
            del found[1:]
    if len(found) != 1:
        seen = ", ".join(f"{script.project} {script.command}" for script in found) or "none"
        raise ConfigError(
            f"{path}: {seen}: a script is imported if one command of it trains (swift sft, rlhf or pt; trl <method>)"
        )
    found[0].lost += others
    return found[0]


def _but_for_node(script: Script) -> tuple[Any, ...]:
    """What the nodes of a run have in common."""
    same = {name: value for name, value in script.environment.items() if name not in OF_NODE}
    return script.project, script.command, [(item.spelling, item.raw) for item in script.given], same, script.lost


def _commands(path: str, text: str) -> Iterator[list[str]]:
    """The words of each simple command."""
    text = _COMMENT.sub(lambda match: match[1] or "", text).replace("\\\n", " ")
    arrays: dict[str, str] = {}
    for name, body in _ARRAY.findall(text):
        arrays[name] = f"{arrays.get(name, '')} {' '.join(body.splitlines())}"
    text = _ARRAY.sub("", text)
    for name, body in arrays.items():
        text = re.sub(rf'"?\$\{{{name}\[[@*]\]\}}"?', body.replace("\\", r"\\"), text)
    text = _REDIRECTION.sub(lambda match: match[1] or "", _SUBSTITUTION.sub(lambda match: shlex.quote(match[0]), text))
    lexer = shlex.shlex(text, posix=True, punctuation_chars=";&|\n")
    lexer.whitespace, lexer.whitespace_split, lexer.commenters = " \t\r", True, ""
    words: list[str] = []
    start = 1
    try:
        for word in lexer:
            if word and set(word) <= set(";&|\n"):
                yield words
                words, start = [], lexer.lineno
            else:
                words.append(word)
    except ValueError as error:
        raise ConfigError(f"{path}:{start}: not a command ({error}); correct its quotes") from error
    yield words


def _expanded(words: list[str], variables: Mapping[str, str]) -> list[str]:
    """Words with the variables that the script itself has set; one that holds flags becomes several words."""
    values: list[str] = []
    for word in words:
        value = _VARIABLE.sub(lambda match: variables.get(match[1] or match[3], match[2] or match[0]), word)
        value = _ARITHMETIC.sub(lambda match: _computed(match, variables), value)
        if word not in _REST:
            values += shlex.split(value) if value.startswith("--") and _VARIABLE.fullmatch(word) else [value]
    return values


def _computed(found: re.Match[str], variables: Mapping[str, str]) -> str:
    """The number that `$((...))` or `$(expr ...)` comes to; the text itself where it is more than whole numbers."""
    text = re.sub(r"[A-Za-z_]\w*", lambda match: variables.get(match[0], match[0]), found[1] or found[2])
    try:
        return str(_integer(ast.parse(text.replace("\\", "").strip(), mode="eval").body))
    except (SyntaxError, KeyError, ZeroDivisionError, TypeError):
        return found[0]


def _integer(node: Any) -> int:
    if isinstance(node, ast.BinOp):
        return _OPERATORS[type(node.op)](_integer(node.left), _integer(node.right))
    if not isinstance(node, ast.Constant) or type(node.value) is not int:
        raise TypeError
    return node.value


def _program(words: list[str]) -> tuple[list[str], str, str, list[str]]:
    """The words of a launcher, project and command that it starts, and the words after them."""
    for at, word in enumerate(words if words[0] in LAUNCHERS else words[:1]):
        if word in TRAINING and at + 1 < len(words):
            return words[:at], word, words[at + 1], words[at + 2 :]
        if word.endswith(".py"):
            return words[:at], "swift" if "swift/" in word else "trl", Path(word).stem, words[at + 1 :]
    return [], "", "", []


def _take_accelerate(
    beside: dict[str, Given], line: Layer, environment: dict[str, str], lost: list[tuple[str, str]]
) -> None:
    """Takes processes and sharding from the flags of `accelerate launch` and from its file."""
    settings: Mapping[str, Any] = {}
    if file := beside.pop("config_file", None):
        path = show(file.raw)
        settings = accelerate.read_settings(path)
        if not settings:
            lost.append((file.spelling, f"{path}: cannot be read here; its processes and sharding are not imported"))
    flags = [name for name in beside if name in ("num_processes", *accelerate.VARIABLES)]
    settings = {**settings, **{name: show(beside.pop(name).raw) for name in flags}}
    for name, value in accelerate.environment(settings):
        environment.setdefault(name, value)
    if not {"deepspeed", "fsdp"} & {item.spelling for item in line.given}:
        line.given += [
            Given(name, [value], "command line", f"--{name}", f"--{name}")
            for name, value in accelerate.sharding(settings)
        ]


def _script(project: str, command: str, launcher: list[str], line: Layer, environment: dict[str, str]) -> Script:
    lost = [("command line", problem) for problem in line.problems]
    if line.config:
        lost.append(("config", f"{line.config}: a file of settings; import it as well"))
    beside = {item.spelling: item for item in read_command_line(launcher[1:]).given}
    if launcher[:1] == ["accelerate"]:
        _take_accelerate(beside, line, environment, lost)
    for item in beside.values():
        if item.spelling in LAUNCHED:
            environment.setdefault(LAUNCHED[item.spelling], show(item.raw))
        else:
            lost.append(
                (
                    item.spelling,
                    f"{mask(item.spelling, show(item.raw))}: of {launcher[0]}, which starts the command there",
                )
            )
    for name in [name for name, value in environment.items() if _SHELL_WORD.search(value)]:
        value = environment.pop(name)
        by_platform = value.strip("${}") == OF_PLATFORM.get(name)
        why = "set by the platform, and read by swift" if by_platform else "known to the shell alone; set it"
        lost.append((name, f"{mask(name, value)}: {why}"))
    unknown = [item for item in line.given if _SHELL_WORD.search(show(item.raw))]
    for item in unknown:
        lost.append((item.spelling, f"{mask(item.spelling, show(item.raw))}: known to the shell alone; give its value"))
    return Script(project, command, [item for item in line.given if item not in unknown], environment, lost)
