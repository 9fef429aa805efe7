"""Metrics of optimizer steps, combined into the values of log lines.

Values are typed: a *mean* (weighted), a *max*, a *min* or a *sum*. Within a step, values of one name are combined by
their type; `commit` ends the step and folds its values into the open window, in which means are averaged over the
steps that had the value, maxima, minima and sums are taken over them; `flush` empties the window.

The state is exact: running totals are plain floats, added in the order of the calls. So a run that is resumed in the
middle of a window logs the same numbers as one that was not, except those that measure time.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import astuple, dataclass
from typing import Any, Literal

Kind = Literal["mean", "max", "min", "sum"]

OUTSIDE_STEP = ("eval", "save")
"""Phases that do not count to a step's time."""

HELD_UP = "time/held_up/"
"""Before `<phase>/rank-<r>`: seconds that the other ranks waited for that one."""


def kind_of(name: str) -> Kind:
    """The type of a value, by its name, where the caller does not give one.

    `health/...` counts, so it is summed, as is `HELD_UP`; `..._max` and `max_...` are maxima, `..._min` and `min_...`
    minima.
    """
    last = name.rsplit("/", 1)[-1]
    if name.startswith(("health/", HELD_UP)):
        return "sum"
    if last.endswith("_max") or last.startswith("max_") or last == "max":
        return "max"
    if last.endswith("_min") or last.startswith("min_") or last == "min":
        return "min"
    return "mean"


@dataclass(slots=True)
class Value:
    """A combined value: `total` is the sum of value * weight (mean), the sum, the maximum or the minimum."""

    kind: Kind
    total: float
    weight: float

    def combine(self, total: float, weight: float) -> None:
        """Combine with a value of the same kind; `total` is value * weight for means."""
        if self.kind == "max":
            self.total = extreme(max, self.total, total)
        elif self.kind == "min":
            self.total = extreme(min, self.total, total)
        else:
            self.total += total
        self.weight += weight


def extreme(choose: Callable[[float, float], float], a: float, b: float) -> float:
    """Maximum or minimum; NaN if one of them is NaN."""
    return math.nan if math.isnan(a) or math.isnan(b) else choose(a, b)


class Values(dict[str, Value]):
    """Combined values by name."""

    def combine(self, name: str, kind: Kind, total: float, weight: float = 1.0) -> None:
        """Combine a value with those of its name; another kind than before is a ValueError."""
        known = self.get(name)
        if known is None:
            self[name] = Value(kind, total, weight)
        elif known.kind != kind:
            raise ValueError(f"{name}: is a {known.kind} and cannot be a {kind} too")
        else:
            known.combine(total, weight)

    def results(self) -> dict[str, float]:
        """The numbers; a mean without weight has none."""
        return {
            name: value.total / value.weight if value.kind == "mean" else value.total
            for name, value in self.items()
            if value.weight or value.kind != "mean"
        }


class MetricStore:
    """The values of the current step and of the open window; `around` is entered in every phase, nested ones too."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.around: Callable[[str], AbstractContextManager[None]] = lambda phase: nullcontext()
        self.waited: Callable[[], float] = lambda: 0.0
        """Seconds that this process has waited for other ranks so far."""
        self.own_s: dict[str, float] = {}
        """Seconds of the current step in phases that `timer` has timed, without waiting for other ranks."""
        self._clock = clock
        self._step, self._window = Values(), Values()
        self._phases: dict[str, float] = {}
        self._timing = False
        self._step_began = clock()

    # --- collecting -----------------------------------------------------------------------------------------------

    def add(self, name: str, value: float, *, kind: Kind | None = None) -> None:
        """Fold a value into the current step, by default as `kind_of(name)`; NaN and infinities are kept."""
        self._step.combine(name, kind or kind_of(name), float(value))

    def add_many(self, values: Mapping[str, float]) -> None:
        """Fold several values."""
        for name, value in values.items():
            self.add(name, value)

    # --- time ---------------------------------------------------------------------------------------------------

    @contextmanager
    def timer(self, phase: str) -> Iterator[None]:
        """Count the seconds inside to `phase`; inside another timer they count to the outer phase only."""
        if self._timing:
            with self.around(phase):
                yield
            return
        self._timing = True
        began, waited = self._clock(), self.waited()
        try:
            with self.around(phase):
                yield
        finally:
            self._timing = False
            seconds = self._clock() - began
            self.add_phase(phase, seconds)
            self.own_s[phase] = self.own_s.get(phase, 0.0) + seconds - (self.waited() - waited)

    def add_phase(self, phase: str, seconds: float) -> None:
        """Count seconds that were measured elsewhere to a phase."""
        self._phases[phase] = self._phases.get(phase, 0.0) + seconds

    def seconds(self, *phases: str) -> float:
        """What the current step has spent in these phases."""
        return sum(self._phases.get(phase, 0.0) for phase in phases)

    # --- steps and windows ----------------------------------------------------------------------------------------

    def commit(self) -> dict[str, float]:
        """End an optimizer step: its values, with `step_time` and `time/<phase>`, join the window, and are returned."""
        now = self._clock()
        outside = self.seconds(*OUTSIDE_STEP)
        self.add("step_time", max(0.0, now - self._step_began - outside))
        for phase, seconds in self._phases.items():
            self.add(f"time/{phase}", seconds, kind="mean")
        values = self._step.results()
        for name, value in values.items():
            self._window.combine(name, self._step[name].kind, value)
        self._step, self._phases, self.own_s = Values(), {}, {}
        self._step_began = now
        return values

    def flush(self) -> dict[str, float]:
        """Empty the window: the values since the last flush, and `tokens_per_s` where `tokens/trained` is known."""
        values, self._window = self._window.results(), Values()
        if values.get("step_time") and "tokens/trained" in values:
            values["tokens_per_s"] = values["tokens/trained"] / values["step_time"]
        return values

    # --- state ----------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Plain values: the current step, the open window and the time spent in the current step."""
        return {
            "step": {name: astuple(value) for name, value in self._step.items()},
            "window": {name: astuple(value) for name, value in self._window.items()},
            "phases": dict(self._phases),
            "elapsed": self._clock() - self._step_began,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue exactly after `state`."""
        self._step, self._window = (
            Values({name: Value(*value) for name, value in state[part].items()}) for part in ("step", "window")
        )
        self._phases = dict(state["phases"])
        self._step_began = self._clock() - state["elapsed"]
