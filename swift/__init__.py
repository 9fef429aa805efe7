"""`swift`: RL post-training of language models from one command line."""

from __future__ import annotations

from typing import Any

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """`read_rollouts`, imported when it is used: the command line starts without NumPy."""
    if name != "read_rollouts":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from swift.observability.rollout_record import read_rollouts

    return read_rollouts
