"""`{{NAME}}` and `{{AUTHOR}}` in rows about the model itself, such as those of swift/self-cognition."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from swift.data.arguments import DataArguments
from swift.data.records import RawRow, Record
from swift.errors import ConfigError

PLACEHOLDERS = {"{{NAME}}": "model_name", "{{AUTHOR}}": "model_author"}
"""Text -> the setting that replaces it."""


def fill_placeholders(values: Mapping[str, Any], origin: str, args: DataArguments) -> dict[str, Any]:
    """A row with the names of `--model_name` and `--model_author`, the first ones where its `tag` is zh.

    Raises:
        ConfigError: the row has a placeholder whose setting is not given; the placeholder itself would be trained on.
    """
    place = 0 if values.get("tag") == "zh" else -1

    def name_of(placeholder: str) -> str:
        flag = PLACEHOLDERS[placeholder]
        names: list[str] = getattr(args, flag)
        if not names:
            raise ConfigError(
                f"--{flag}: missing: {placeholder} stands in {origin}; give --{flag} <name>, or --{flag} "
                f"'{placeholder}' to keep the text"
            )
        return names[place]

    def replaced(value: Any) -> Any:
        if isinstance(value, str):
            for placeholder in PLACEHOLDERS:
                if placeholder in value:
                    value = value.replace(placeholder, name_of(placeholder))
            return value
        if isinstance(value, dict):
            return {key: replaced(item) for key, item in value.items()}
        return [replaced(item) for item in value] if isinstance(value, list) else value

    return {key: replaced(value) for key, value in values.items()}


def notes_on_unused_names(records: Iterable[Record], args: DataArguments) -> Iterator[str]:
    """A note for each name whose placeholder is in no row."""
    for placeholder, flag in PLACEHOLDERS.items():
        rows = (record for record in records if isinstance(record, RawRow))
        if getattr(args, flag) and not any(placeholder in str(row.values) for row in rows):
            yield f"note: --{flag}: no effect, for no row has {placeholder}"
