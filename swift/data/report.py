"""The report on a dataset after reading: mapping, skipped rows, lengths, notes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from swift.data.records import BadRow
from swift.errors import counted

SHOWN = 5
"""How many bad rows are shown; all are counted."""


@dataclass(slots=True)
class DataReport:
    """Counts and one-line notes of one split.

    `mappings` maps a dataset's name to its column line, such as `prompt <- messages; to rewards: solution`.
    `first_bad` are the first bad rows as `file:line: reason`. `num_truncated` counts prompts cut so far (they
    are cut when they are first used); `num_deleted` those left out, and `deleted_for` is the reason.
    """

    split: str = "train"
    mappings: dict[str, str] = field(default_factory=dict)
    num_skipped: int = 0
    first_bad: list[str] = field(default_factory=list)
    num_truncated: int = 0
    num_deleted: int = 0
    deleted_for: str = "the length of the prompt"
    notes: list[str] = field(default_factory=list)
    _seen: set[str] = field(default_factory=set, repr=False)

    def skip(self, bad: BadRow) -> None:
        """Counts a bad row, once even if a stream reads it in several epochs."""
        if bad.origin in self._seen:
            return
        self._seen.add(bad.origin)
        self.num_skipped += 1
        if len(self.first_bad) < SHOWN:
            self.first_bad.append(str(bad))

    def lines(self) -> list[str]:
        """The report as lines to print, the mapping first; one mapping shared by all datasets is one line."""
        lines = [f"{name}: {line}" for name, line in self.mappings.items()]
        if len(set(self.mappings.values())) == 1:
            lines = [*self.mappings.values()][:1]
        lines += self.notes
        if self.num_skipped:
            count = counted(self.num_skipped, "bad row")
            lines.append(
                f"{self.split} data: {count} skipped (--strict true stops instead), the first: {self.first_bad[0]}"
            )
        if self.num_deleted:
            lines.append(f"{self.split} data: {counted(self.num_deleted, 'row')} deleted for {self.deleted_for}")
        if self.num_truncated:
            lines.append(f"{self.split} data: {counted(self.num_truncated, 'prompt')} truncated")
        return lines


def first_few(problems: Sequence[str], total: str) -> list[str]:
    """The first of many problems; `total` is the text with their number."""
    return [*problems[:SHOWN], *([f"{total}: the first {SHOWN} are listed"] if len(problems) > SHOWN else [])]
