"""Whether a ReAct answer calls the tool of the ground truth with its arguments."""

from __future__ import annotations

from typing import Any

from swift.errors import parse_json
from swift.plugin.registry import ORM, orms

_ACTION, _INPUT, _RESULT = "Action:", "Action Input:", "Observation:"


@orms.register("toolbench")
class Toolbench(ORM):
    """1.0 if the last `Action:` and its `Action Input:` equal those of `solution`.

    Inputs are equal as JSON objects, or as texts if neither is JSON. A text without them calls the tool `none` with {}.
    """

    def __call__(self, completions: list[str], solution: list[str], **kwargs: Any) -> list[float]:
        """One reward per completion."""
        return [float(call_of(text) == call_of(truth)) for text, truth in zip(completions, solution, strict=True)]


def call_of(text: str) -> tuple[str, Any]:
    """The tool and the arguments of a ReAct text, up to the result that may follow.

    >>> call_of("I look it up. Action: search Action Input: [1] Observation:")
    ('search', [1])
    """
    text = text.partition(_RESULT)[0]
    _, named, tail = text.rpartition(_ACTION)
    _, given, arguments = text.rpartition(_INPUT)
    tool = tail.partition(_INPUT)[0].strip() if named else "none"
    try:
        return tool, parse_json(arguments) if given else {}
    except ValueError:
        return tool, arguments.strip()
