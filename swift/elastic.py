"""What the launcher of an elastic run (`--elastic true`) and its training processes tell each other.

Rank 0 writes a file, a line for each start and for each checkpoint. Swift's launcher reads it and chooses the flags of
the next start. torchrun starts the same command again, so there the processes read it themselves; it is in
`--output_dir`, and its name has torchrun's `--rdzv_id`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

BATCH_PROCESSES = "SWIFT_BATCH_PROCESSES"
"""Environment variable: the processes that batch sizes count, however many share the batches now."""

PROGRESS_FILE = "SWIFT_PROGRESS_FILE"
"""Environment variable: the file."""

RUN_ID = "TORCHELASTIC_RUN_ID"
"""Environment variable of torchrun; `UNNAMED` without `--rdzv_id`."""

UNNAMED = "none"

_START, _END = "start ", "no step follows"


class Progress(NamedTuple):
    """Of the newest start. checkpoint: the newest one that it can be continued from, "" for none; None: no start yet.

    made: how many it has made. ends: whether no step follows. processes: that batch sizes count.
    """

    checkpoint: str | None = None
    made: int = 0
    ends: bool = False
    processes: int = 0


def batch_processes(environ: Mapping[str, str], processes: int) -> int:
    """The processes that batch sizes count, of a start without a checkpoint."""
    return int(environ.get(BATCH_PROCESSES) or processes)


def note_start(checkpoint: Path | None, processes: int) -> None:
    """Note the checkpoint that a start begins with, if any, and the processes that its batch sizes count; rank 0."""
    _append(f"{_START}{processes} {checkpoint or ''}\n")


def note_checkpoint(checkpoint: Path, *, ends: bool = False) -> None:
    """Note a checkpoint just before it exists, so that none exists that is not noted; rank 0.

    ends: whether no step follows.
    """
    _append(f"{checkpoint}\n" + f"{_END}\n" * ends)


def note_end() -> None:
    """The run is done, rank 0: another one of this name begins anew."""
    if RUN_ID in os.environ and (file := os.environ.get(PROGRESS_FILE)):
        Path(file).unlink()


def read_progress(file: Path) -> Progress:
    """What rank 0 has noted so far, in whole lines; without a checkpoint that was noted last and does not exist."""
    found, noted = Progress(), [""]
    for line in file.read_text(encoding="utf-8").split("\n")[:-1] if file.exists() else []:
        if line.startswith(_START):
            processes, _, checkpoint = line.removeprefix(_START).partition(" ")
            found, noted = Progress(processes=int(processes)), [checkpoint]
        elif line == _END:
            found = found._replace(ends=True)
        else:
            noted.append(line)
    if not found.processes:
        return found
    made = next((number for number in range(len(noted) - 1, 0, -1) if Path(noted[number]).exists()), 0)
    return found._replace(checkpoint=noted[made], made=made)


def _append(text: str) -> None:
    if file := os.environ.get(PROGRESS_FILE):
        with Path(file).open("a", encoding="utf-8") as progress:
            progress.write(text)
