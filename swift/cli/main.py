"""The console script: `swift <mode> [config] [--flag value ...]`. Routes, and loads only the mode that is asked for."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import swift
from swift.cli.boundary import guarded
from swift.errors import ConfigError, suggest
from swift.startup import QuickEnd


@dataclass(frozen=True, slots=True)
class Mode:
    """A mode of the command line: the module whose `run(argv)` does it, and one line for `swift --help`."""

    module: str
    summary: str


MODES = {
    "rlhf": Mode("swift.cli.rlhf", "online RL training (--rlhf_type grpo)"),
    "sft": Mode("swift.cli.sft", "supervised fine-tuning"),
    "rollout": Mode("swift.cli.rollout", "a generation server for trainers on other machines"),
    "reward-test": Mode("swift.cli.reward_test", "try reward functions on a dataset, without a model"),
    "infer": Mode("swift.cli.infer", "generate, interactively or over a dataset"),
    "export": Mode("swift.cli.export", "convert a model or fold an adapter in"),
    "merge-lora": Mode("swift.cli.merge_lora", "fold a LoRA adapter into its base model"),
    "config-schema": Mode("swift.cli.config_schema", "print the JSON schema of a mode's flags"),
}
PLANNED = {
    "pt": "pre-training",
    "doctor": "environment check",
    "plan": "memory and time plan",
    "view": "browse completions",
    "agent-docs": "docs for programs",
    "sample": "sampling",
    "eval": "benchmarks",
    "deploy": "serving",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command.

    Args:
        argv: the words after `swift`; None takes them from the process.

    Returns:
        The exit code (see `swift.cli.boundary`). Errors are printed, not raised.
    """
    if argv is not None:
        return _run(list(argv))
    end = QuickEnd()
    end.arm()
    end.exit_code = _run(sys.argv[1:])
    return end.exit_code


def _run(words: list[str]) -> int:
    return guarded(lambda: route(words), debug=lambda: debug_wanted(words))


def route(words: Sequence[str]) -> int | None:
    """Runs the mode that `words` name.

    Raises:
        ConfigError: no mode, an unknown one, or one that is planned only.
    """
    if not words:
        raise ConfigError(f"mode: none given; valid: {', '.join(MODES)}; `swift --help` explains them")
    first = words[0]
    if first in ("-h", "--help", "help", "--help-all", "--help_all"):
        print(overview())
        return 0
    if first in ("-V", "--version", "version"):
        print(f"swift {swift.__version__}")
        return 0
    name = first.replace("_", "-")
    if name in PLANNED:
        raise ConfigError(f"{name}: {PLANNED[name]}: planned, not in this version; available: {', '.join(MODES)}")
    if name not in MODES:
        raise ConfigError(f"mode: {first}: unknown; {suggest(name, [*MODES, *PLANNED])}")
    return importlib.import_module(MODES[name].module).run(list(words[1:]))


def overview() -> str:
    """The text of `swift --help`."""
    width = max(map(len, [*MODES, *PLANNED]))
    lines = [
        f"swift {swift.__version__}: RL post-training of language models from one command line",
        "",
        "usage: swift <mode> [config.yaml] [--flag value ...]",
        "",
        "modes:",
        *(f"  {name:<{width}}  {mode.summary}" for name, mode in MODES.items()),
        "",
        "planned, not in this version:",
        *(f"  {name:<{width}}  {summary}" for name, summary in PLANNED.items()),
        "",
        "swift <mode> --help          the everyday flags of a mode",
        "swift <mode> --help-all      all of them",
        "swift <mode> --help <flag>   one flag: type, default, choices, aliases, meaning",
    ]
    return "\n".join(lines)


def debug_wanted(words: Sequence[str]) -> bool:
    """Whether tracebacks of anticipated errors are wanted: SWIFT_DEBUG=1 or `--debug true`.

    Looks at the words themselves, because the error may be that they cannot be parsed.
    """
    if os.environ.get("SWIFT_DEBUG", "").lower() in ("1", "true", "yes", "on"):
        return True
    for word, following in zip(words, [*words, ""][1:], strict=True):
        if word.startswith("--debug="):
            following = word.partition("=")[2]
        elif word != "--debug":
            continue
        return following.startswith("-") or following.lower() in ("", "1", "true", "yes", "on")
    return False
