"""Messages to and from a reward worker: jobs and outcomes."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from swift.plugin.numbers import is_finite

OutcomeKind = Literal["ok", "exception", "contract", "timeout", "crash", "not_finite"]

Payload = Mapping[str, Any]
"""{"completions": texts, "keywords": lists of the same length and `trainer_state`} of one or more whole groups."""


@dataclass(frozen=True)
class LoadSpec:
    """What a worker loads before its first call.

    Attributes:
        functions: names in the registry; jobs refer to them by position.
        plugins: plugin files, absolute.
        flags: the settings of the run by canonical name and by alias.
        tokenizer: folder of the policy's tokenizer, for classes that take one.
        timeout_s: limit of a call.
        memory_bytes: limit of the worker's own memory, and of each file that it writes; None means no limit.
    """

    functions: list[str]
    plugins: list[str]
    flags: dict[str, Any]
    tokenizer: str | None
    timeout_s: float
    memory_bytes: int | None


@dataclass(frozen=True)
class Job:
    """One call: a function, by position, on some samples (None: all) of a payload."""

    function: int
    payload: Payload
    samples: list[int] | None
    seed: int

    def arguments(self) -> tuple[list[str], dict[str, Any]]:
        """Completions and keywords of the samples; the function may change the lists."""
        completions, keywords = self.payload["completions"], self.payload["keywords"]
        chosen = range(len(completions)) if self.samples is None else self.samples
        return [completions[index] for index in chosen], {
            name: value if name == "trainer_state" else [value[index] for index in chosen]
            for name, value in keywords.items()
        }


def is_ordered(values: Any) -> bool:
    """Whether values can be matched with completions by index: a list, tuple, array or tensor; no set or text."""
    return all(hasattr(values, name) for name in ("__len__", "__getitem__")) and not isinstance(
        values, str | bytes | bytearray | memoryview | Mapping
    )


@dataclass
class Outcome:
    """The result of one call.

    `values` has one entry per sample when `kind` is "ok"; otherwise `detail` is one line about the failure.
    `seconds` is the duration; `counters` what the function counted (unparsed ground truths). `columns` and
    `metrics` are what it logged (`swift.rewards.trl_convention`).
    """

    kind: OutcomeKind
    values: list[float | None] = field(default_factory=list)
    detail: str = ""
    seconds: float = 0.0
    counters: dict[str, int] = field(default_factory=dict)
    columns: dict[str, list[Any]] = field(default_factory=dict)
    metrics: dict[str, list[float]] = field(default_factory=dict)

    @property
    def value(self) -> float | None:
        """The value of a call on one sample; None if the call failed."""
        return self.values[0] if self.kind == "ok" else None

    def checked(self) -> Outcome:
        """The same outcome, or a failure if a value is NaN, infinite or too large."""
        wrong = next((value for value in self.values if value is not None and not is_finite(value)), None)
        return self if wrong is None else replace(self, kind="not_finite", values=[], detail=f"returned {wrong}")


def call_seed(run_seed: int, prompt_id: str, group_id: str) -> int:
    """The seed of every call on this group: a pure function of run, prompt and group (63 bits)."""
    digest = hashlib.sha256(f"{run_seed}\0{prompt_id}\0{group_id}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1
