"""The console script: `swift <mode> [config] [--flag value ...]`. Loads only the mode that runs."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

import swift
from swift.cli.boundary import run_command
from swift.cli.console import survive_console
from swift.cli.leaving import leave_in_time
from swift.cli.mode import MODES, start
from swift.errors import ConfigError, suggest


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command, `argv` or that of the process; returns its exit code. Errors are printed, not raised."""
    survive_console("stderr")
    words = sys.argv[1:] if argv is None else list(argv)
    code = run_command(
        lambda: route(words), debug=lambda: wanted(words, "debug"), as_json=lambda: wanted(words, "json")
    )
    if argv is None:
        leave_in_time(code)
    return code


def route(words: Sequence[str]) -> int | None:
    """Runs the mode that `words` name."""
    if not words:
        raise ConfigError(
            f"mode: none given; start with swift sft or swift rlhf --rlhf_type grpo; valid: {', '.join(MODES)}; "
            "`swift --help` explains them"
        )
    first = words[0]
    if first in ("-h", "--help", "help", "--help-all", "--help_all"):
        print(overview())
        return 0
    if first in ("-V", "--version", "version"):
        print(f"swift {swift.__version__}")
        return 0
    name = first.replace("_", "-")
    if name not in MODES:
        from swift.arguments.known import nearest_mode

        if nearest := nearest_mode(name):
            raise ConfigError(f"mode: {first}: not a mode of swift; use {nearest}")
        raise ConfigError(f"mode: {first}: unknown; {suggest(name, list(MODES))}")
    return start(name, list(words[1:]))


def overview() -> str:
    """The text of `swift --help`."""
    width = max(map(len, MODES))
    lines = [
        f"swift {swift.__version__}: RL post-training of language models from one command line",
        "",
        "usage: swift <mode> [config.yaml] [--flag value ...]",
        "",
        "modes:",
        *(f"  {name:<{width}}  {mode.summary}" for name, mode in MODES.items()),
        "",
        "swift <mode> --help          the everyday flags of a mode",
        "swift <mode> --help-all      all of them",
        "swift <mode> --help <flag>   one flag: type, default, choices, aliases, meaning",
    ]
    return "\n".join(lines)


def wanted(words: Sequence[str], name: str) -> bool:
    """Whether `--debug true` (or SWIFT_DEBUG=1), or another flag like it, was given.

    Looks at the words themselves, because the error may be that they cannot be parsed.
    """
    if name == "debug" and os.environ.get("SWIFT_DEBUG", "").lower() in ("1", "true", "yes", "on"):
        return True
    for word, following in zip(words, [*words, ""][1:], strict=True):
        if word.startswith(f"--{name}="):
            following = word.partition("=")[2]
        elif word != f"--{name}":
            continue
        return following.startswith("-") or following.lower() in ("", "1", "true", "yes", "on")
    return False
