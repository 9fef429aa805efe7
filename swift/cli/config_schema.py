"""`swift config-schema [mode]`: the JSON schema of a mode's flags, for editors and programs."""

from __future__ import annotations

import json
from collections.abc import Sequence

from swift.cli.mode import resolve


def run(words: Sequence[str]) -> int | None:
    """Prints the schema; the mode may stand alone or behind `--mode`."""
    from swift.arguments.schema import json_schema

    if words and not words[0].startswith("-"):
        words = ["--mode", *words]
    resolved = resolve("config-schema", words)
    if resolved is not None:
        print(json.dumps(json_schema(resolved.args.mode), indent=2))
    return 0
