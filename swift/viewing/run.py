"""One run: what was read of its folder, renewed by a thread of all runs."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from swift.errors import first_line
from swift.observability.jsonl import read_jsonl
from swift.observability.run_dir import ATTEMPTS
from swift.viewing.curves import Log
from swift.viewing.diagnosis import Diagnosis
from swift.viewing.index import Index
from swift.viewing.tokens import TokenTexts, tokens_of

LOOK_S = 1.0
"""Seconds between two looks at the files."""

logger = logging.getLogger(__name__)


class Run:
    """A run folder. problem: why it cannot be read any further, in one line; "" while it can."""

    def __init__(self, folder: Path, name: str) -> None:
        self.folder, self.name, self.problem = folder, name, ""
        self.index, self.log = Index(folder), Log(folder)
        self.texts, self.diagnosis = TokenTexts(folder), Diagnosis(folder)

    def refresh(self) -> Iterator[None]:
        """Read what is new in the log, then in the completions, a block a step."""
        yield from self.log.refresh()
        yield from self.index.refresh()

    def about(self) -> dict[str, Any]:
        """What the page shows of the run as a whole."""
        table, tail = self.index.table, self.index.tail
        attempts = list(read_jsonl(self.folder / ATTEMPTS))
        steps = table.columns["step"]
        return {
            "name": self.name,
            "folder": str(self.folder),
            "last_step": self.log.last_step,
            "reason": attempts[-1]["reason"] if attempts else None,
            "keys": self.log.keys,
            "completions": len(table),
            "groups": len(table.groups),
            "steps": [int(steps.min()), int(steps.max())] if len(table) else None,
            "functions": list(table.rewards),
            "splits": table.words("split"),
            "finish_reasons": table.words("finish_reason"),
            "excluded": table.words("excluded"),
            "read_bytes": tail.offset,
            "bytes": tail.size(),
            "unreadable": table.unreadable + self.log.unreadable,
            "problem": self.problem,
            "diagnosis": self.diagnosis(self.log.last_step),
        }

    def tokens(self, step: int, group_id: str, index: int) -> dict[str, Any] | None:
        """What is on record of a completion of the training split; see `tokens_of`.

        A rollout batch is trained on from its step to the one before the next batch.
        """
        table = self.index.table
        later = table.columns["step"][(table.columns["split"] == table.code("split", "train")) & table.current]
        later = later[later > step]
        end = int(later.min()) if len(later) else np.iinfo(np.int64).max
        return tokens_of(self.folder, range(step, end), group_id, index, self.texts)


class Reader:
    """The thread that renews runs; a context manager that ends it, and processes that diagnose them."""

    def __init__(self, runs: Sequence[Run]) -> None:
        self._runs = runs
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._read, name="view-reader", daemon=True)

    def __enter__(self) -> Reader:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._ended.set()
        self._thread.join()
        for run in self._runs:
            run.diagnosis.close()

    def _read(self) -> None:
        while not self._ended.is_set():
            for run in self._runs:
                try:
                    for _ in run.refresh():
                        if self._ended.is_set():
                            return
                    run.problem = ""
                except Exception as error:  # the page shows it; the files may be readable at the next look
                    if not run.problem:
                        logger.warning("%s cannot be read", run.folder, exc_info=error)
                    run.problem = f"{type(error).__name__}: {first_line(error)}"
            self._ended.wait(LOOK_S)
