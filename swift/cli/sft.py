"""`swift sft`: supervised fine-tuning."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from swift.cli.mode import start
from swift.startup import collector_resting

if TYPE_CHECKING:
    from swift.arguments import Resolved


def run(words: Sequence[str]) -> int | None:
    """The mode; returns the exit code."""
    return start("sft", words, lambda: _train, workers=True)


def _train(resolved: Resolved) -> int | None:
    if resolved.args.dry_run:
        with collector_resting():
            from swift.cli.dry_run import rehearse_sft

            return rehearse_sft(resolved)
    from swift.trainers.sft import run as train

    return train(resolved)
