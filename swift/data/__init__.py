"""From `--dataset` to prompts: where rows come from, what their columns mean, in which order they are used.

    spec ─► source (files, hub, reasoning_gym) ─► records ─► column plan ─► Rows ─► PromptDataset ─► PromptSource
    text    rows with file and line               good/bad    messages + columns   token ids        order, resume

One row becomes `messages` (the prompt) and `columns` (all the rest, under the row's own names, plain JSON
values). Nothing is guessed quietly: a row that cannot be understood carries its file and line and is counted,
an ambiguous column is an error that shows its fix, and the mapping that was taken is one line to print.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from swift.data.loading import Rows, load_rows
    from swift.data.prompts import PromptDataset, load_prompts
    from swift.data.report import DataReport
    from swift.data.sampler import PromptStream, StreamItem
    from swift.data.source import IndexedPrompts, PromptSource, SourceItem, StreamingPrompts, open_prompts
    from swift.data.spec import DatasetSpec, parse_spec
    from swift.data.system import resolve_system

__all__ = [
    "DataReport",
    "DatasetSpec",
    "IndexedPrompts",
    "PromptDataset",
    "PromptSource",
    "PromptStream",
    "Rows",
    "SourceItem",
    "StreamItem",
    "StreamingPrompts",
    "load_prompts",
    "load_rows",
    "open_prompts",
    "parse_spec",
    "resolve_system",
]

_HOME = {
    "DataReport": "report",
    "DatasetSpec": "spec",
    "IndexedPrompts": "source",
    "PromptDataset": "prompts",
    "PromptSource": "source",
    "PromptStream": "sampler",
    "Rows": "loading",
    "SourceItem": "source",
    "StreamItem": "sampler",
    "StreamingPrompts": "source",
    "load_prompts": "prompts",
    "load_rows": "loading",
    "open_prompts": "source",
    "parse_spec": "spec",
    "resolve_system": "system",
}


def __getattr__(name: str) -> Any:
    """Loads a public name when it is first used: the arguments of this package must stay cheap to import."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
