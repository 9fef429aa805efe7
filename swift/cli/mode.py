"""How a mode starts: help, parse, the `ENV:` block, checks, worker processes, and then its function."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from swift.cli import launcher
from swift.errors import join_problems

if TYPE_CHECKING:
    from swift.arguments import Resolved

Action = Callable[["Resolved"], "int | None"]


def start(mode: str, words: Sequence[str], action: Callable[[], Action], *, workers: bool = False) -> int | None:
    """Runs one mode.

    Args:
        mode: name of the mode, as `swift.arguments` knows it.
        words: the command line after the mode.
        action: imports and returns what does the work; called only when everything is checked.
        workers: whether NPROC_PER_NODE and NNODES start processes of this mode.

    Returns:
        The exit code, None for 0.

    Raises:
        ConfigError: all that is wrong with the settings, before anything heavy is loaded.
    """
    resolved = resolve(mode, words)
    if resolved is None:
        return 0
    plan = launcher.plan_launch(os.environ)
    if plan is not None and not workers:
        resolved.notes.append(f"NPROC_PER_NODE, NNODES: {plan.world_size} processes: {mode} runs in one")
    if plan is not None and workers and not getattr(resolved.args, "dry_run", False):
        from swift.cli.devices import count_accelerators

        launcher.check_accelerators(plan.local_ranks, count_accelerators()[0])
        return launcher.launch([sys.executable, "-m", "swift", mode, *words], plan, environ=os.environ)
    if os.environ.get("RANK", "0") == "0":
        for note in resolved.notes:
            print(f"swift: {note}", file=sys.stderr)
    return action()(resolved)


def resolve(mode: str, words: Sequence[str]) -> Resolved | None:
    """The mode's settings, with the variables of a config's `ENV:` block set; None when help was printed."""
    from swift.arguments import parse

    if (text := help_wanted(mode, words)) is not None:
        print(text.rstrip("\n"))
        return None
    resolved = parse(mode, words, os.environ)
    os.environ.update(resolved.environment)
    join_problems(resolved.later())
    if resolved.args.debug:
        os.environ["SWIFT_DEBUG"] = "1"  # a config file may ask for it as well
    return resolved


def help_wanted(mode: str, words: Sequence[str]) -> str | None:
    """The text that `--help`, `--help-all` or `--help <flag>` asks for; None without such a word."""
    for index, word in enumerate(words):
        if word in ("-h", "--help") or word.startswith("--help="):
            from swift.arguments.help import render, render_flag

            _, equals, flag = word.partition("=")
            if not equals and index + 1 < len(words):
                flag = words[index + 1]
            return render_flag(mode, flag) if flag else render(mode)
        if word.replace("_", "-") == "--help-all":
            from swift.arguments.help import render

            return render(mode, everyday=False)
    return None
