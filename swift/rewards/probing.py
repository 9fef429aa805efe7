"""The result of one probe call: a function on one sample, outside of training."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from swift.rewards.protocol import Outcome


@dataclass(frozen=True)
class ProbeResult:
    """What a function gave for one sample.

    `kind` is "ok", or what went wrong ("exception", "contract", "timeout", "crash", "not_finite") with one
    line of `detail`; `value` is None then, and where the function does not apply. `seconds` is the duration.
    """

    kind: str
    value: float | None
    detail: str
    seconds: float
    counters: dict[str, int] = field(default_factory=dict)


def probe_result(outcome: Outcome) -> ProbeResult:
    """Reads the outcome of a call on a single sample."""
    if outcome.kind != "ok":
        return ProbeResult(outcome.kind, None, outcome.detail, outcome.seconds, outcome.counters)
    (value,) = outcome.values
    if value is not None and not math.isfinite(value):
        return ProbeResult("not_finite", None, f"returned {value}", outcome.seconds, outcome.counters)
    return ProbeResult("ok", value, "", outcome.seconds, outcome.counters)
