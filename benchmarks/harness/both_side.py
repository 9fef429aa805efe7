"""Tasks that need both trainers in one process."""

from __future__ import annotations

from harness.agreement import REQUIRED_COSINE
from harness.agreement import agreement as compare
from harness.contest import Gate
from harness.work import Work


def agreement(work: Work, gate: Gate) -> None:
    """Compare gradients; see `harness.agreement`."""
    gate.serve(lambda: {**compare(work), "required": REQUIRED_COSINE})
