"""Shell scripts of ms-swift: its flags are ours, so what is left is the shell around them, and old names."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field

from swift.arguments.imports.draft import Renamed, Rule, same
from swift.arguments.imports.trl import take_precision
from swift.arguments.layers import Given, read_command_line
from swift.errors import ConfigError

TRAINING = ("sft", "rlhf", "pt")
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)
_VARIABLE = re.compile(r"\$(?:\{(\w+)\}|(\w+))")
_SHELL_WORD = re.compile(r"[$`]")
_COMMENT = re.compile(r"""('[^']*'|"[^"]*")|(?<!\S)#.*""")
_SUBSTITUTION = re.compile(r"\$\([^()]*\)|`[^`]*`")

RULES: dict[str, Rule] = {
    "rlhf_type": same("the method"),
    "sft_type": Renamed("tuner_type"),
    "model_id_or_path": Renamed("model"),
    "custom_train_dataset_path": Renamed("dataset"),
    "gpu_memory_utilization": Renamed("vllm_gpu_memory_utilization"),
    "bf16": take_precision("bfloat16"),
    "fp16": take_precision("float16"),
}


@dataclass
class Script:
    """The one command of a script that trains. `others`: further commands of swift. `shell`: flags whose values only
    the shell knows.
    """

    command: str
    given: list[Given]
    environment: dict[str, str] = field(default_factory=dict)
    others: list[str] = field(default_factory=list)
    shell: dict[str, str] = field(default_factory=dict)


def read_script(path: str, text: str) -> Script:
    """Understands assignments, `export`, comments, continued lines and quotes, and the commands of swift.

    Raises:
        ConfigError: quotes that do not end, no command that trains, or several.
    """
    variables: dict[str, str] = {}
    found: list[Script] = []
    others: list[str] = []
    text = _COMMENT.sub(lambda one: one[1] or "", text).replace("\\\n", " ")
    for line in _SUBSTITUTION.sub(lambda one: shlex.quote(one[0]), text).splitlines():
        try:
            words = [_expanded(word, variables) for word in shlex.split(line)]
        except ValueError as error:
            raise ConfigError(f"{path}: {line.strip()[:60]}: not a command ({error}); correct its quotes") from error
        words = words[1:] if words[:1] == ["export"] else words
        local: dict[str, str] = {}
        while words and (assigned := _ASSIGNMENT.fullmatch(words[0])):
            local[assigned[1]] = assigned[2]
            words.pop(0)
        if not words:
            variables.update(local)
        elif words[0] == "megatron":
            raise ConfigError(
                f"{path}: megatron {' '.join(words[1:2])}: Megatron is not supported; give a script of swift"
            )
        elif words[0] == "swift" and words[1:2] and words[1] in TRAINING:
            exported = {name: value for name, value in {**variables, **local}.items() if name.isupper()}
            given = read_command_line(words[2:]).given
            found.append(Script(words[1], given, exported, shell=_of_the_shell(given)))
        elif words[0] == "swift":
            others.append(" ".join(words[:2]))
    if len(found) != 1:
        seen = ", ".join(f"swift {one.command}" for one in found) or "none"
        raise ConfigError(f"{path}: {seen}: a script is imported if one command of it trains (swift sft, rlhf or pt)")
    found[0].others = others
    return found[0]


def _expanded(word: str, variables: Mapping[str, str]) -> str:
    """A word with the variables that the script itself has set."""
    return _VARIABLE.sub(lambda one: variables.get(one[1] or one[2], one[0]), word)


def _of_the_shell(given: list[Given]) -> dict[str, str]:
    return {one.spelling: one.shown for one in given if _SHELL_WORD.search(one.shown)}
