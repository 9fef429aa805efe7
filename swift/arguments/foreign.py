"""Names of other projects where ours are expected, read by the tables of `swift.arguments.imports`."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from swift.arguments import absent
from swift.arguments.layers import Given
from swift.arguments.modes import METHODS
from swift.arguments.values import Raw, show
from swift.errors import ConfigError

SAMPLING = ("infer", "rollout")
TRAINING = ("rlhf", "sft", "seq_cls", "pt", *METHODS)
"""Modes whose settings other projects name; `SAMPLING` has of these names that of `--chat_template_kwargs` alone."""


@dataclasses.dataclass(frozen=True, slots=True)
class Translation:
    """The translation of a foreign name: settings of swift, notes, problems."""

    settings: dict[str, Given]
    notes: list[str]
    problems: list[str]


def translation(given: Given, mode: str, where: str, beside: Mapping[str, Raw]) -> Translation | None:
    """The meaning of another project's name in a mode; None if no table has it.

    where: the name with its value. beside: what stands beside it, by the names that are given.
    """
    from swift.arguments.imports import axolotl, ms_swift, trl
    from swift.arguments.imports.draft import NOT_IMPORTED, Draft, text_of

    tables = {"ms-swift": ms_swift.RULES, "TRL": trl.RULES, "Axolotl": axolotl.RULES}
    project = next((name for name, rules in tables.items() if given.spelling in rules), None)
    modes = TRAINING + (SAMPLING if given.spelling == "enable_thinking" else ())
    if project is None or mode not in modes or (project != "ms-swift" and absent.is_replaced(given.spelling)):
        return None
    draft = Draft(mode, beside)
    try:
        draft.translate([(given.spelling, one_value(given))], tables[project])
    except ConfigError as error:
        whys = (problem.removeprefix("--").removesuffix(f"; {NOT_IMPORTED}") for problem in error.problems)
        return Translation({}, [], [f"{given.subject}: {why.removeprefix(f'{given.spelling}: ')}" for why in whys])
    values = {name: text_of(value) for name, value in draft.settings.items()}
    settings = {name: dataclasses.replace(given, raw=_raw(given, value)) for name, value in values.items()}
    notes = [f"{given.subject}: {project}'s name of --{name} {show(value)}" for name, value in values.items()]
    notes += [f"{where}: {why}" for _, fate, why in draft.lines if fate == "same"]
    problems = [f"{where}: {project}'s name: {why}" for _, fate, why in draft.lines if fate == "no counterpart"]
    problems += [f"{where}: {project}'s name; set the variable {name}" for name in draft.environment]
    return Translation(settings, notes, problems)


def one_value(given: Given) -> Raw:
    """The words after a flag as a value: none is a switch, one is no list."""
    if given.source != "command line":
        return given.raw
    words: Any = given.raw
    if len(words) > 1:
        return list(words)
    if words and str(words[0]).startswith("{"):
        with contextlib.suppress(ValueError):  # which is no JSON, and so a word
            return json.loads(words[0])  # type: ignore[no-any-return]
    return words[0] if words else "true"


def _raw(given: Given, value: Any) -> Raw:
    if given.source != "command line":
        return value  # type: ignore[no-any-return]
    if isinstance(value, list):
        return value
    return [json.dumps(value) if isinstance(value, dict) else str(value)]
