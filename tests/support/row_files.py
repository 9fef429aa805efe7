"""Files of rows, and the settings that name them."""

import json

from swift.data.arguments import PromptArguments


def jsonl(path, rows):
    """Write a row, or its text, per line; returns the path."""
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def settings(*datasets, **changes):
    """The settings of prompts from these datasets."""
    return PromptArguments(dataset=[str(one) for one in datasets], **changes)
