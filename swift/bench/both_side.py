"""Tasks that need both trainers in one process."""

from __future__ import annotations

from swift.bench.agreement import REQUIRED_COSINE
from swift.bench.agreement import agreement as compare
from swift.bench.contest import Gate
from swift.bench.work import Work


def agreement(work: Work, gate: Gate) -> None:
    """Compare gradients; see `swift.bench.agreement`."""
    gate.serve(lambda: {**compare(work), "required": REQUIRED_COSINE})
