"""Checkpoints that are valid or do not exist, and the rules for continuing from one.

A checkpoint is written into `.tmp-checkpoint-<step>`, sealed with a manifest (size and BLAKE2b digest of every
file), synced to the disk and renamed to `checkpoint-<step>`; the rename is what makes it exist. A kill before it
leaves a staging folder, which the next start removes; a kill after it leaves a valid checkpoint. Removal renames
first too, so no folder called checkpoint-<step> is ever incomplete.

Staging folders carry no process id, because all ranks write into the same one: the lock of the run folder prevents a
second run.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, TypeVar

import msgspec

from swift.errors import ConfigError, ResourceError, first_line, join_problems, unusable
from swift.models.export import share
from swift.models.source import read_json
from swift.observability.files import fsync_file, write_json, writing
from swift.observability.run_dir import list_versions
from swift.rollout.saved_state import FORMAT, decode, encode

MANIFEST = "manifest.json"
STATE = "pipeline_state.msgpack"
TRAINER_STATE = "trainer_state.json"
_NAME = re.compile(r"checkpoint-(\d+)")
_STAGING, _REPLACED, _DELETED = ".tmp-checkpoint-", ".tmp-replaced-", ".tmp-deleted-"
_FLAG = "--resume_from_checkpoint"
_DATA_ONLY = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"
"""Makes `torch.load` restrict what it unpickles, also where a library passes `weights_only=False`."""

T = TypeVar("T")

logger = logging.getLogger(__name__)


class FileEntry(msgspec.Struct, frozen=True):
    """size: in bytes. digest: BLAKE2b-256 in hex."""

    size: int
    digest: str


class Manifest(msgspec.Struct, frozen=True):
    """What a checkpoint of `step` consists of; paths in `files` are relative to it."""

    step: int
    files: dict[str, FileEntry]
    format: int = 1
    algorithm: str = "blake2b-256"


# --- writing ----------------------------------------------------------------------------------------------------


def staging_folder(run_dir: Path, step: int) -> Path:
    """Where the checkpoint of `step` is written before it exists; the same on every rank."""
    return run_dir / f"{_STAGING}{step}"


def entries(folder: Path, paths: Sequence[Path]) -> dict[str, FileEntry]:
    """What the manifest of a written folder says about these files of it."""
    names = [path.relative_to(folder).as_posix() for path in paths]
    return dict(zip(names, _map_files(_entry, paths), strict=True))


def commit_checkpoint(
    folder: Path,
    final: Path,
    *,
    step: int,
    known: Mapping[str, FileEntry] | None = None,
    announce: Callable[[Path], object] = lambda final: None,
) -> None:
    """Seal a written folder and give it its name; afterwards the checkpoint is on the disk.

    A checkpoint that already has this name, left by an attempt that went further before this one was resumed, is
    replaced.

    Args:
        folder: the written files, on the same file system as `final`.
        final: `<run_dir>/checkpoint-<step>`.
        step: optimizer steps done.
        known: entries of files that other processes have written, and hashed.
        announce: called just before the checkpoint exists, when nothing has its name.

    Raises:
        ResourceError: when the disk is full, or lacks a known file; `final` is then as it was.
    """
    paths = sorted(path for path in folder.rglob("*") if path.is_file() and path != folder / MANIFEST)
    known = known or {}
    found = {path.relative_to(folder).as_posix(): path for path in paths}
    if missing := sorted(known.keys() - found.keys()):
        raise ResourceError(
            f"disk: {final.parent}: {missing[0]} of another process is not there: its node has another disk; choose "
            "an --output_dir that all nodes share"
        )
    files = {**entries(folder, [path for name, path in found.items() if name not in known]), **known}
    manifest = Manifest(step, dict(sorted(files.items())))
    replaced = final.with_name(_REPLACED + final.name)
    with writing(folder):
        write_json(folder / MANIFEST, msgspec.to_builtins(manifest), indent=1)
        share(folder)
        _map_files(fsync_file, [*paths, folder / MANIFEST])
        for path in [*(path for path in folder.rglob("*") if path.is_dir()), folder]:
            fsync_file(path)
        if final.exists():
            shutil.rmtree(replaced, ignore_errors=True)
            final.rename(replaced)
        announce(final)
        folder.rename(final)
        fsync_file(final.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def write_state(folder: Path, state: Any) -> None:
    """Write what a run holds beside weights and optimizer, as `swift.rollout.saved_state` encodes it."""
    with writing(folder):
        (folder / STATE).write_bytes(encode([FORMAT, state]))


def read_state(checkpoint: Path, kind: type[T]) -> T:
    """The state that `write_state` wrote; a ConfigError if that was another version of swift."""
    try:
        number, state = decode((checkpoint / STATE).read_bytes(), tuple[int, kind])  # type: ignore[valid-type]
        if number != FORMAT:
            raise ValueError(f"format {number}")
        return state
    except (ValueError, TypeError, FileNotFoundError) as error:  # msgspec's errors are ValueErrors
        raise ConfigError(
            f"{_FLAG}: {checkpoint}: its {STATE} was written by another version of swift "
            f"({first_line(error)}); resume with that version, or start from its weights with --model or "
            "--adapters"
        ) from error


def _entry(path: Path) -> FileEntry:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=32))  # type: ignore[arg-type]
        return FileEntry(file.tell(), digest.hexdigest())


def _map_files(function: Callable[[Path], Any], paths: Sequence[Path]) -> list[Any]:
    """`function` of each path, in parallel: hashing and syncing release the interpreter's lock."""
    with ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1)) as pool:
        return list(pool.map(function, paths))


# --- reading ----------------------------------------------------------------------------------------------------


def step_of(checkpoint: Path) -> int | None:
    """The step in a checkpoint's name; None when it is not the name of one."""
    match = _NAME.fullmatch(checkpoint.name)
    return int(match.group(1)) if match else None


def list_checkpoints(run_dir: Path) -> list[Path]:
    """The checkpoints of a run, ascending by step; their content is not looked at."""
    found = [(step, path) for path in run_dir.glob("checkpoint-*") if (step := step_of(path)) is not None]
    return [path for _, path in sorted(found)]


def last_checkpoint(run_dir: Path) -> Path | None:
    """The newest checkpoint of a run; None without any."""
    return next(reversed(list_checkpoints(run_dir)), None)


def verify(checkpoint: Path) -> Manifest:
    """Read every file of a checkpoint and compare it with the manifest. Files added later are not read.

    A ConfigError names each file that is missing, cut off or altered; or what makes it no checkpoint.
    """
    if not checkpoint.is_dir():
        raise ConfigError(f"{_FLAG}: {checkpoint}: no such folder; name a checkpoint-<step> folder, or use last")
    special = sorted(path for path in checkpoint.rglob("*") if not (path.is_file() or path.is_dir()))
    join_problems(
        [
            f"{_FLAG}: {path}: a {'pipe, device or socket' if path.exists() else 'link to nothing'}, not a file; "
            "choose another checkpoint"
            for path in special
        ]
    )
    manifest = _read_manifest(checkpoint)
    present = [name for name in manifest.files if (checkpoint / name).is_file()]
    seen = dict(zip(present, _map_files(_entry, [checkpoint / name for name in present]), strict=True))
    problems = {name: _difference(expected, seen.get(name)) for name, expected in manifest.files.items()}
    join_problems(
        [
            f"{_FLAG}: {checkpoint / name}: {problem}; choose another checkpoint"
            for name, problem in problems.items()
            if problem
        ]
    )
    return manifest


def _difference(expected: FileEntry, seen: FileEntry | None) -> str:
    if seen is None:
        return "missing"
    if seen.size != expected.size:
        return f"incomplete, {seen.size} of {expected.size} bytes"
    return "altered, the digest differs from the manifest's" if seen != expected else ""


def _read_manifest(checkpoint: Path) -> Manifest:
    path = checkpoint / MANIFEST
    try:
        return msgspec.json.decode(path.read_bytes(), type=Manifest)
    except FileNotFoundError as error:
        raise ConfigError(
            f"{_FLAG}: {checkpoint}: not a checkpoint of this tool, it has no {MANIFEST}; "
            "to start from its weights use --model or --adapters"
        ) from error
    except (msgspec.MsgspecError, OSError) as error:
        raise ConfigError(f"{_FLAG}: {path}: incomplete or altered manifest; choose another checkpoint") from error


def latest_valid(run_dir: Path) -> Path | None:
    """The newest checkpoint of a run that is valid; None when there is none. Damaged ones are logged."""
    for checkpoint in reversed(list_checkpoints(run_dir)):
        try:
            verify(checkpoint)
        except ConfigError as error:
            logger.warning("passing over a damaged checkpoint: %s", error)
        else:
            return checkpoint
    return None


# --- tidying ----------------------------------------------------------------------------------------------------


def rotate(run_dir: Path, limit: int | None, *, keep: str | Path | None = None) -> None:
    """Remove the oldest checkpoints until `limit` remain; None removes nothing.

    `keep`, the best one, stays whatever its age, and so does the newest: with a limit of 1 two may remain.
    """
    checkpoints = list_checkpoints(run_dir)
    if not limit or len(checkpoints) <= limit:
        return
    best = Path(keep).name if keep else None
    protected = [path for path in checkpoints if path.name == best or path == checkpoints[-1]]
    others = [path for path in checkpoints if path not in protected]
    for path in others[: len(others) - max(0, limit - len(protected))]:
        doomed = path.with_name(_DELETED + path.name)
        shutil.rmtree(doomed, ignore_errors=True)
        path.rename(doomed)
        shutil.rmtree(doomed)


def clean_staging(run_dir: Path) -> None:
    """Remove what a killed run left incomplete; only while holding the run's lock.

    A checkpoint that was being replaced when the kill came gets its name back.
    """
    for path in [path for prefix in (_STAGING, _REPLACED, _DELETED) for path in run_dir.glob(f"{prefix}*")]:
        final = run_dir / path.name.removeprefix(_REPLACED)
        if path.name.startswith(_REPLACED) and not final.exists():
            path.rename(final)
        else:
            shutil.rmtree(path)


# --- resuming ---------------------------------------------------------------------------------------------------


def resolve_resume(resume_from_checkpoint: str, output_dir: str | Path) -> tuple[Path, Path]:
    """The run folder and the checkpoint to continue from, both absolute; the checkpoint is verified.

    resume_from_checkpoint: a checkpoint, a run folder or an output folder (their newest valid checkpoint), or `last`:
    the newest run under `output_dir` that has a valid checkpoint.
    """
    last = resume_from_checkpoint == "last"
    folder = Path(output_dir if last else resume_from_checkpoint).expanduser().absolute()
    if step_of(folder) is not None or (folder / MANIFEST).exists():
        verify(folder)
        _require_training_state(folder)
        return folder.parent, folder
    if not last and not folder.is_dir():
        raise ConfigError(f"{_FLAG}: {folder}: no such folder; name a checkpoint-<step> folder, or use last")
    for run_dir in [folder, *reversed(list_versions(folder))]:
        checkpoint = latest_valid(run_dir)
        if checkpoint is not None:
            _require_training_state(checkpoint)
            return run_dir, checkpoint
    raise ConfigError(
        f"{_FLAG}: {resume_from_checkpoint}: no valid checkpoint in {folder} or its v<N>-* runs; "
        "leave the flag out to start a new run"
    )


def has_training_state(checkpoint: Path) -> bool:
    """Whether it has the optimizer's file (optimizer.pt, optimizer.bin), FSDP's shards or DeepSpeed's folder."""
    return any(path.name.startswith(("optimizer", "fsdp_state", "global_step")) for path in checkpoint.iterdir())


@contextlib.contextmanager
def loading(checkpoint: str | Path) -> Iterator[None]:
    """A block in which libraries load a checkpoint; they unpickle tensors and plain data only, whatever they ask for.

    Raises:
        ConfigError: the checkpoint holds other objects, or does not fit the run.
    """
    before = os.environ.get(_DATA_ONLY)
    os.environ[_DATA_ONLY] = "1"
    with unusable(f"{_FLAG}: {checkpoint}: cannot be loaded", "; choose another checkpoint"):
        try:
            yield
        except UnpicklingError as error:
            raise ConfigError(
                f"{_FLAG}: {checkpoint}: optimizer, schedule or random state hold objects that could run code; "
                "choose another checkpoint"
            ) from error
        finally:
            os.environ.pop(_DATA_ONLY)
            if before is not None:
                os.environ[_DATA_ONLY] = before


class _TrainerState(msgspec.Struct):
    """What transformers' trainer_state.json must hold."""

    global_step: int
    max_steps: int = 0
    train_batch_size: int | None = None
    logging_steps: float | None = None
    eval_steps: float | None = None
    save_steps: float | None = None
    epoch: float | None = None
    best_metric: float | None = None
    best_global_step: int | None = None
    best_model_checkpoint: str | None = None
    log_history: list[dict[str, Any]] = []
    stateful_callbacks: dict[str, dict[str, Any] | list[Any]] = {}


def _require_training_state(checkpoint: Path) -> None:
    file = checkpoint / TRAINER_STATE
    with unusable(f"{_FLAG}: {file}: cannot be used", "; choose another checkpoint"):
        state = msgspec.convert(read_json(file), _TrainerState)
        if step_of(checkpoint) not in (None, state.global_step):
            raise ValueError(f"global_step {state.global_step}")
    if not has_training_state(checkpoint):
        raise ConfigError(
            f"{_FLAG}: {checkpoint}: holds the weights only (it was saved with --save_only_model true); "
            "to start from its weights use --model or --adapters"
        )
