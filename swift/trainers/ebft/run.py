"""`swift rlhf --rlhf_type ebft`: starts the mode that `--ebft_mode` names."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from swift.arguments import Resolved

MODES = {"structured": "swift.trainers.ebft.structured"}
"""`--ebft_mode` -> the module with its `run`, which trains and returns the exit code."""


def run(resolved: Resolved) -> int:
    """The mode; returns the exit code."""
    module: Any = importlib.import_module(MODES[resolved.args.ebft_mode])
    return int(module.run(resolved))
