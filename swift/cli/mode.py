"""The table of modes and their start: help, settings, the `ENV:` block, worker processes, the mode's function."""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from swift.cli import launcher
from swift.cli.boundary import show_warnings
from swift.cli.console import survive_console
from swift.cli.crew import crew_of
from swift.errors import counted, printable
from swift.startup import collector_resting

if TYPE_CHECKING:
    from swift.arguments import Resolved


@dataclass(frozen=True, slots=True)
class Mode:
    """A mode of the command line.

    summary: one line for `swift --help`. action: `module:function` that takes the resolved settings and returns the
    exit code, None for 0. dry_run: the same for `--dry_run true`. workers: whether NPROC_PER_NODE and NNODES start
    processes of this mode. runs: whether it continues after its console is closed. first: the setting that a first word
    without dashes gives. wraps: whether the action takes the words themselves, of which some are another mode's.
    """

    summary: str
    action: str
    dry_run: str | None = None
    workers: bool = False
    runs: bool = False
    first: str | None = None
    wraps: bool = False


TRL = "swift.trainers.trl.run:run", "swift.cli.dry_run:dry_run_trl"
"""What starts the methods of `swift.trainers.trl.method`, and their dry run."""

MODES = {
    "rlhf": Mode(
        "RL training and preference methods (--rlhf_type grpo, dpo, ...)",
        "swift.trainers.grpo.run:run",
        "swift.cli.dry_run:dry_run_rlhf",
        workers=True,
        runs=True,
    ),
    "sft": Mode("supervised fine-tuning", *TRL, workers=True, runs=True),
    "pt": Mode("pre-training on plain text", *TRL, workers=True, runs=True),
    "rollout": Mode(
        "generation server for trainers on other machines",
        "swift.rollout.server.run:run",
        "swift.cli.dry_run:dry_run_rollout",
        runs=True,
    ),
    "reward-test": Mode("try reward functions on a dataset, without a model", "swift.rewards.reward_test:run"),
    "infer": Mode("answers at the terminal or over a dataset; scores", "swift.cli.infer:run", workers=True),
    "export": Mode("merge an adapter into its base model", "swift.models.export:run"),
    "merge-lora": Mode("merge an adapter into its base model (= export --merge_lora true)", "swift.models.export:run"),
    "plan": Mode("memory and time of a run on any GPU, before it starts", "swift.planning.command:run", wraps=True),
    "doctor": Mode("diagnosis of a run, or of the machine", "swift.observability.doctor:run", first="run"),
    "view": Mode("local page over the files of runs", "swift.viewing.command:run", first="run"),
    "replay": Mode(
        "the loss of a recorded step again, under other settings or models",
        "swift.replay:run",
        first="run",
    ),
    "show": Mode("best and worst completions of a run, as text", "swift.observability.show:run", first="run"),
    "agent-docs": Mode("the documentation as plain text", "swift.cli.agent_docs:run", first="topic"),
    "config-schema": Mode("print the JSON schema of a mode's flags", "swift.cli.mode:print_schema", first="mode"),
    "import-config": Mode(
        "a configuration of Axolotl, TRL or ms-swift as one of swift",
        "swift.arguments.imports.command:run",
        first="file",
    ),
}


def start(name: str, words: Sequence[str]) -> int | None:
    """Runs the mode `name` with the words after it; returns the exit code, None for 0.

    Raises a ConfigError with all problems of the settings before heavy libraries are loaded.
    """
    if name != "rollout":  # whose log has times
        show_warnings()
    if MODES[name].first is not None:
        words = with_first(name, words)
    if MODES[name].wraps:
        if shows_help(name, words):
            return 0
        module, _, function = MODES[name].action.partition(":")
        wrapped: int | None = getattr(importlib.import_module(module), function)(words)
        return wrapped
    resolved = resolve(name, words)
    if resolved is None:
        return 0
    mode = MODES[name] if resolved.mode in ("ebft", "gkd", *MODES) else MODES["sft"]  # all methods of TRL's trainers
    dry = mode.dry_run is not None and resolved.args.dry_run
    if mode.runs and not dry:
        survive_console("stdout", "stderr")
    plan = launcher.plan_launch(os.environ)
    if plan is not None and not mode.workers:
        resolved.notes.append(f"NPROC_PER_NODE, NNODES: {counted(plan.world_size, 'process')}: {name} runs in one")
    elif plan is not None and not dry:
        from swift.devices import count_accelerators, visible_names

        devices = count_accelerators()[0]
        launcher.check_accelerators(plan.local_ranks, devices)
        crew = crew_of(resolved.args, plan, visible_names(devices)) if hasattr(resolved.args, "elastic") else None
        command = [sys.executable, "-m", "swift", name, *words]
        return launcher.launch(command, plan, environ=os.environ, crew=crew)
    if os.environ.get("RANK", "0") == "0":
        for note in resolved.notes:
            print(printable(f"swift: {note}"), file=sys.stderr)
    module, _, function = (str(mode.dry_run) if dry else mode.action).partition(":")
    with collector_resting():
        action = getattr(importlib.import_module(module), function)
    with collector_resting() if dry else contextlib.nullcontext():
        code: int | None = action(resolved)
    return code


def with_first(name: str, words: Sequence[str]) -> Sequence[str]:
    """The words after a mode, with the flag that a first one without dashes stands for."""
    first = MODES[name].first
    return [f"--{first}", *words] if first and words and not words[0].startswith("-") else words


def resolve(mode: str, words: Sequence[str]) -> Resolved | None:
    """The mode's settings, with the variables of a config's `ENV:` block set; None when help was printed."""
    if shows_help(mode, words):
        return None
    from swift.arguments import parse

    resolved = parse(mode, words, os.environ)
    os.environ.update(resolved.environment)
    if resolved.args.debug:
        os.environ["SWIFT_DEBUG"] = "1"  # a config file may ask for it as well
    return resolved


def shows_help(mode: str, words: Sequence[str]) -> bool:
    """Prints the help, if the words ask for it; whether they do."""
    asked = [index for index, word in enumerate(words) if word.partition("=")[0] in ("-h", "--help")]
    if not asked and not {"--help-all", "--help_all"} & set(words):
        return False
    print(help_text(mode, words, asked).rstrip("\n"))
    return True


def help_text(mode: str, words: Sequence[str], asked: Sequence[int]) -> str:
    """The text of `--help` and `--help <flag>`, which are at the places `asked`; without them that of `--help-all`."""
    from swift.arguments.help import load_named_plugins, render, render_flag
    from swift.arguments.layers import read_command_line
    from swift.arguments.modes import mode_of

    mode = mode_of(mode, [read_command_line(words).given])
    load_named_plugins(mode, words)
    if not asked:
        return render(mode, everyday=False)
    following = words[asked[0] + 1 : asked[0] + 2]
    flag = words[asked[0]].partition("=")[2] or (following[0] if following else "")
    return render_flag(mode, flag) if flag.strip("-") and flag != "--external_plugins" else render(mode)


def print_schema(resolved: Resolved) -> None:
    """`swift config-schema [mode]`."""
    import json

    from swift.arguments.schema import json_schema

    print(json.dumps(json_schema(resolved.args.mode, resolved.args.external_plugins), indent=2))
