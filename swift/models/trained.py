"""System prompt, chat template and size of images of the training, from the args.json beside a checkpoint's weights.

The file is untrusted data: no path in it is opened, and nothing in it is run.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

from swift.data.system import names_file
from swift.errors import ConfigError
from swift.models.source import has_tokenizer, locate, read_json
from swift.models.templates import names

RECORD = "args.json"
SHOWN = 60
"""Characters of a system prompt that the note shows."""


def take_trained(args: Any, given: Collection[str]) -> list[str]:
    """Give `system`, `template`, `chat_template_kwargs` and `max_pixels` their values of the training.

    Those that the user gave stay.

    Args:
        args: settings with these; changed in place.
        given: names of the settings that the user wrote.

    Returns:
        A note on the values taken, if any.

    Raises:
        ConfigError: a value of the file is of another type.
    """
    source = locate(args)
    folder = next((path for path in (*reversed(source.adapters), source.base) if (path / RECORD).is_file()), None)
    if folder is None:
        return []
    file = folder / RECORD
    recorded, taken, left = read_json(file), [], []
    system = _typed(file, recorded, "system", str)
    if system and system.strip() and "system" not in given:
        if names_file(system):
            left.append(f"system {_shown(system)} is a file there, and is not read")
        else:
            args.system = system
            taken.append(f"system prompt {_shown(system)} ({len(system)} characters)")
    template = _typed(file, recorded, "template", str)
    if template and "template" not in given and not has_tokenizer(folder):  # which brings its template
        if template in names():
            args.template = template
            taken.append(f"template {template}")
        else:
            left.append(f"template {_shown(template)} is not built in, and is not read")
    variables = _typed(file, recorded, "chat_template_kwargs", dict)
    if variables and "chat_template_kwargs" not in given:
        args.chat_template_kwargs = variables
        taken.append(f"chat_template_kwargs {_shown(variables)}")
    pixels = _typed(file, recorded, "max_pixels", int)
    if pixels and args.SEES and "max_pixels" not in given:
        args.max_pixels = pixels
        taken.append(f"max_pixels {pixels}")
    lines = [f"as in training: {', '.join(taken)}, from {file}; --system, --template and so on override it"] * bool(
        taken
    )
    return [*lines, *(f"warning: {file}: {value}; give it as a flag" for value in left)]


def trained_pixels(*folders: Path) -> int | None:
    """The `max_pixels` that the first of these folders with a record was trained with.

    Raises:
        ConfigError: see `take_trained`.
    """
    file = next((folder / RECORD for folder in folders if (folder / RECORD).is_file()), None)
    return None if file is None else _typed(file, read_json(file), "max_pixels", int)


def _typed(file: Path, recorded: dict[str, Any], name: str, kind: type) -> Any:
    value = recorded.get(name)
    if value is not None and not isinstance(value, kind):
        wanted = {str: "text", int: "whole number"}.get(kind, "object")
        raise ConfigError(f"{file}: {name}: {_shown(value)}: is no {wanted}; correct it")
    return value


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= SHOWN else f'{text[:SHOWN]}..."'
