"""Which completions are meant, and the groups that they are in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from swift.errors import ConfigError
from swift.viewing.index import Table

Order = Literal["spread", "step", "reward", "length"]


@dataclass(frozen=True, slots=True)
class Filter:
    """Conditions on completions, all of which hold; None and "" are no conditions.

    function: whose reward is meant by `least` and `most`; "" is the total. excluded: `no`, `yes`, or a reason. text: in
    the prompt, the completion or a later turn; case matters.
    """

    first_step: int | None = None
    last_step: int | None = None
    split: str = ""
    prompt_id: str = ""
    function: str = ""
    least: float | None = None
    most: float | None = None
    excluded: str = ""
    finish_reason: str = ""
    text: str = ""

    def rows(self, table: Table) -> np.ndarray:
        """[R] Which rows are meant. The last answer is kept: pages and orders of one filter follow each other."""
        asked, wanted = table.cache.get("rows", (None, None))
        if asked != self:
            wanted = self._rows(table)
            table.cache["rows"] = self, wanted
        return np.asarray(wanted)

    def _rows(self, table: Table) -> np.ndarray:
        columns, wanted = table.columns, table.current.copy()
        for name, word in (("split", self.split), ("prompt_id", self.prompt_id), ("finish_reason", self.finish_reason)):
            if word:
                wanted &= columns[name] == table.code(name, word)
        if self.first_step is not None:
            wanted &= columns["step"] >= self.first_step
        if self.last_step is not None:
            wanted &= columns["step"] <= self.last_step
        if self.least is not None or self.most is not None:
            values = rewards(table, self.function)
            wanted &= values >= (-np.inf if self.least is None else self.least)  # NaN is in no range
            wanted &= values <= (np.inf if self.most is None else self.most)
        if self.excluded in ("no", "yes"):
            wanted &= (columns["excluded"] == table.code("excluded", None)) == (self.excluded == "no")
        elif self.excluded:
            wanted &= columns["excluded"] == table.code("excluded", self.excluded)
        return table.containing(self.text, wanted) if self.text else wanted


def rewards(table: Table, function: str) -> np.ndarray:
    """[R] The rewards of a function, NaN where null; of "" the weighted totals."""
    if function and function not in table.rewards:
        raise ConfigError(f"function: {function}: not a reward of this run; valid: {', '.join(table.rewards)}")
    return table.rewards[function] if function else table.columns["reward"]


def groups(table: Table, wanted: np.ndarray, function: str, order: Order, descending: bool) -> dict[str, np.ndarray]:
    """The groups with a wanted row, N of them, in order.

    Each array is [N]: `first` row, `matches`, and of the whole group `size`, `excluded`, mean, minimum and maximum of
    the reward and its `spread` (standard deviation), mean `length` in tokens. NaN where no completion has a reward.
    """
    every = statistics(table, function)
    rows = np.flatnonzero(wanted)
    matches = np.bincount(table.columns["group"][rows], minlength=len(every["size"]))
    found = np.flatnonzero(matches)
    chosen = {name: values[found] for name, values in every.items()} | {"matches": matches[found]}
    keys = chosen[{"step": "step", "spread": "spread", "reward": "mean", "length": "length"}[order]].astype(float)
    keys = np.where(np.isnan(keys), np.inf, -keys if descending else keys)  # groups without a value come last
    places = np.lexsort((chosen["first"], keys))
    return {name: values[places] for name, values in chosen.items()}


def statistics(table: Table, function: str) -> dict[str, np.ndarray]:
    """Of each group of the table, in the order of their numbers, what `groups` tells; computed once per function."""
    key = "statistics", function
    if key not in table.cache:
        table.cache[key] = _statistics(table, function)
    found: dict[str, np.ndarray] = table.cache[key]
    return found


def _statistics(table: Table, function: str) -> dict[str, np.ndarray]:
    group, values = table.columns["group"], rewards(table, function)
    number, known = len(table.groups), ~np.isnan(values)
    size = np.bincount(group, minlength=number)

    def total(of: np.ndarray, where: Any = slice(None)) -> np.ndarray:
        return np.bincount(group[where], weights=of[where].astype(float), minlength=number)

    first = np.zeros(number, np.int64)
    first[group[::-1]] = np.arange(len(group))[::-1]  # the last that is written counts
    least, greatest = np.full(number, np.inf), np.full(number, -np.inf)
    np.minimum.at(least, group[known], values[known])
    np.maximum.at(greatest, group[known], values[known])
    with np.errstate(invalid="ignore", divide="ignore"):
        scored = np.bincount(group[known], minlength=number)
        mean = total(values, known) / scored
        spread = np.sqrt(total((values - mean[group]) ** 2, known) / scored)
    nothing = scored == 0
    return {
        "first": first,
        "step": table.columns["step"][first],
        "size": size,
        "excluded": total(table.columns["excluded"] != table.code("excluded", None)).astype(int),
        "mean": mean,
        "least": np.where(nothing, np.nan, least),
        "greatest": np.where(nothing, np.nan, greatest),
        "spread": spread,
        "length": total(table.columns["completion_tokens"]) / np.maximum(size, 1),
    }
