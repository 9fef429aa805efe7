"""Checkpoints that exist whole or not at all, and the rules for continuing from one.

A checkpoint is written into `.tmp-checkpoint-<step>`, sealed with a manifest (size and BLAKE2b digest of every
file), synced to the disk and renamed to `checkpoint-<step>`; the rename is what makes it exist. A kill before it
leaves a staging folder, which the next start removes; a kill after it leaves a whole checkpoint. Removal renames
first too, so no folder called checkpoint-<step> is ever half there.

Staging folders carry no process id, because all ranks write into the same one: the lock of the run folder sees to
it that only one run is alive.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from swift.errors import ConfigError, join_problems
from swift.observability.files import disk_full_is_an_error, fsync_file, write_json, write_text
from swift.observability.run_dir import list_versions
from swift.trainers.resume_settings import SettingsChange, compare_settings

__all__ = [
    "MANIFEST",
    "Manifest",
    "SettingsChange",
    "clean_staging",
    "commit_checkpoint",
    "compare_settings",
    "latest_valid",
    "list_checkpoints",
    "read_state",
    "resolve_resume",
    "rotate",
    "staging_folder",
    "step_of",
    "verify",
    "write_json",
    "write_state",
    "write_text",
]

MANIFEST = "manifest.json"
MANIFEST_FORMAT = 1
STATE = "pipeline_state.msgpack"
_NAME = re.compile(r"checkpoint-(\d+)")
_STAGING = ".tmp-checkpoint-"
_REPLACED = ".tmp-replaced-"
_DELETED = ".tmp-deleted-"
_DIGEST_BYTES = 32
_FLAG = "--resume_from_checkpoint"

T = TypeVar("T")

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What a checkpoint consists of.

    files: path relative to the checkpoint -> (size in bytes, BLAKE2b-256 digest in hex).
    config_hash, dataset_fingerprint: of the run that wrote it; None when not given.
    """

    step: int
    files: dict[str, tuple[int, str]] = field(default_factory=dict)
    config_hash: str | None = None
    dataset_fingerprint: str | None = None

    def to_json(self) -> dict[str, Any]:
        """The content of manifest.json."""
        return {
            "format": MANIFEST_FORMAT,
            "step": self.step,
            "config_hash": self.config_hash,
            "dataset_fingerprint": self.dataset_fingerprint,
            "algorithm": "blake2b-256",
            "files": {name: {"size": size, "digest": digest} for name, (size, digest) in self.files.items()},
        }

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Manifest:
        """The inverse of `to_json`; KeyError or TypeError when it is something else."""
        return cls(
            step=int(content["step"]),
            files={name: (int(entry["size"]), str(entry["digest"])) for name, entry in content["files"].items()},
            config_hash=content["config_hash"],
            dataset_fingerprint=content["dataset_fingerprint"],
        )


# --- writing ----------------------------------------------------------------------------------------------------


def staging_folder(run_dir: Path, step: int) -> Path:
    """Where the checkpoint of `step` is written before it exists; the same on every rank."""
    return run_dir / f"{_STAGING}{step}"


def commit_checkpoint(
    folder: Path,
    final: Path,
    *,
    step: int,
    config_hash: str | None = None,
    dataset_fingerprint: str | None = None,
) -> Manifest:
    """Seal a written folder and give it its name; afterwards the checkpoint is on the disk.

    A checkpoint that already has this name, left by an attempt that went further before this one was resumed, is
    replaced.

    Args:
        folder: the written files, on the same file system as `final`.
        final: `<run_dir>/checkpoint-<step>`.
        step: optimizer steps done.
        config_hash: of the settings that decide the result.
        dataset_fingerprint: of the rows trained on.

    Raises:
        ResourceError: when the disk is full; `final` is then as it was.
    """
    manifest = Manifest(
        step=step, files=_digests(folder), config_hash=config_hash, dataset_fingerprint=dataset_fingerprint
    )
    with disk_full_is_an_error(folder):
        write_json(folder / MANIFEST, manifest.to_json(), indent=1)
        _sync_tree(folder)
        replaced = final.with_name(_REPLACED + final.name)
        if final.exists():
            shutil.rmtree(replaced, ignore_errors=True)
            final.rename(replaced)
        folder.rename(final)
        fsync_file(final.parent)
    shutil.rmtree(replaced, ignore_errors=True)
    return manifest


def write_state(folder: Path, state: Any) -> None:
    """Write what a run holds beside weights and optimizer, as `swift.rollout.saved_state` encodes it."""
    from swift.rollout.saved_state import FORMAT, encode

    with disk_full_is_an_error(folder):
        (folder / STATE).write_bytes(encode([FORMAT, state]))


def read_state(checkpoint: Path, kind: type[T]) -> T:
    """The state that `write_state` wrote.

    Raises:
        ConfigError: another version of swift wrote it.
    """
    from swift.rollout.saved_state import FORMAT, decode

    try:
        number, state = decode((checkpoint / STATE).read_bytes(), tuple[int, kind])  # type: ignore[valid-type]
        if number != FORMAT:
            raise ValueError(f"format {number}")
        return state
    except (ValueError, TypeError, FileNotFoundError) as error:  # msgspec's errors are ValueErrors
        raise ConfigError(
            f"{_FLAG}: {checkpoint}: its {STATE} was written by another version of swift "
            f"({str(error).splitlines()[0]}); resume with that version, or start from its weights with --model or "
            "--adapters"
        ) from error


def _files(folder: Path) -> list[Path]:
    """All files below `folder` except the manifest, sorted."""
    return sorted(path for path in folder.rglob("*") if path.is_file() and path != folder / MANIFEST)


def _digest(path: Path) -> tuple[int, str]:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=_DIGEST_BYTES))  # type: ignore[arg-type]
        return file.tell(), digest.hexdigest()


def _map_files(function: Callable[[Path], Any], paths: Sequence[Path]) -> list[Any]:
    """`function` of each path, in parallel: hashing and syncing release the interpreter's lock."""
    with ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1)) as pool:
        return list(pool.map(function, paths))


def _digests(folder: Path) -> dict[str, tuple[int, str]]:
    paths = _files(folder)
    names = [path.relative_to(folder).as_posix() for path in paths]
    return dict(zip(names, _map_files(_digest, paths), strict=True))


def _sync_tree(folder: Path) -> None:
    _map_files(fsync_file, [path for path in folder.rglob("*") if path.is_file()])
    for path in [*(path for path in folder.rglob("*") if path.is_dir()), folder]:
        fsync_file(path)


# --- reading ----------------------------------------------------------------------------------------------------


def step_of(checkpoint: Path) -> int | None:
    """The step in a checkpoint's name; None when it is not the name of one."""
    match = _NAME.fullmatch(checkpoint.name)
    return int(match.group(1)) if match else None


def list_checkpoints(run_dir: Path) -> list[Path]:
    """The checkpoints of a run, ascending by step; their content is not looked at."""
    found = [(step, path) for path in run_dir.glob("checkpoint-*") if (step := step_of(path)) is not None]
    return [path for _, path in sorted(found)]


def verify(checkpoint: Path) -> Manifest:
    """Read every file of a checkpoint and compare it with the manifest. Files added later are not looked at.

    Raises:
        ConfigError: naming each file that is missing, cut off or altered; or what makes it no checkpoint.
    """
    if not checkpoint.is_dir():
        raise ConfigError(f"{_FLAG}: {checkpoint}: no such folder; name a checkpoint-<step> folder, or use last")
    manifest = _read_manifest(checkpoint)
    present = [name for name in manifest.files if (checkpoint / name).is_file()]
    seen = dict(zip(present, _map_files(_digest, [checkpoint / name for name in present]), strict=True))
    join_problems(
        [
            f"{_FLAG}: {checkpoint / name}: {problem}; choose another checkpoint"
            for name, expected in manifest.files.items()
            if (problem := _difference(expected, seen.get(name))) is not None
        ]
    )
    return manifest


def _difference(expected: tuple[int, str], seen: tuple[int, str] | None) -> str | None:
    if seen is None:
        return "missing"
    if seen[0] != expected[0]:
        return f"torn, {seen[0]} of {expected[0]} bytes"
    return "altered, the digest differs from the manifest's" if seen[1] != expected[1] else None


def _read_manifest(checkpoint: Path) -> Manifest:
    path = checkpoint / MANIFEST
    try:
        return Manifest.from_json(json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError as error:
        raise ConfigError(
            f"{_FLAG}: {checkpoint}: not a checkpoint of this tool, it has no {MANIFEST}; "
            "to start from its weights use --model or --adapters"
        ) from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{_FLAG}: {path}: torn or altered manifest; choose another checkpoint") from error


def latest_valid(run_dir: Path) -> Path | None:
    """The newest checkpoint of a run that is whole; None when there is none. Damaged ones are logged."""
    for checkpoint in reversed(list_checkpoints(run_dir)):
        try:
            verify(checkpoint)
        except ConfigError as error:
            logger.warning("passing over a damaged checkpoint: %s", error)
        else:
            return checkpoint
    return None


# --- tidying ----------------------------------------------------------------------------------------------------


def rotate(run_dir: Path, limit: int | None, *, keep: str | Path | None = None) -> list[Path]:
    """Remove the oldest checkpoints until `limit` remain.

    Args:
        run_dir: the run's folder.
        limit: most checkpoints, the one to keep included; None or 0 removes nothing.
        keep: a checkpoint that stays whatever its age, the best one. The newest always stays too, so with a limit
            of 1 two may remain.

    Returns:
        the removed checkpoints.
    """
    checkpoints = list_checkpoints(run_dir)
    if not limit or limit < 0 or len(checkpoints) <= limit:
        return []
    best = Path(keep).name if keep else None
    protected = [path for path in checkpoints if path.name == best or path == checkpoints[-1]]
    others = [path for path in checkpoints if path not in protected]
    stay = max(0, limit - len(protected))
    removed = others[: len(others) - stay]
    for path in removed:
        doomed = path.with_name(_DELETED + path.name)
        shutil.rmtree(doomed, ignore_errors=True)
        path.rename(doomed)
        shutil.rmtree(doomed)
    return removed


def clean_staging(run_dir: Path) -> list[Path]:
    """Remove what a killed run left half-written or half-deleted; only while holding the run's lock.

    A checkpoint that was being replaced when the kill came gets its name back.

    Returns:
        the folders that were found.
    """
    left = sorted(path for prefix in (_STAGING, _REPLACED, _DELETED) for path in run_dir.glob(f"{prefix}*"))
    for path in left:
        final = run_dir / path.name.removeprefix(_REPLACED)
        if path.name.startswith(_REPLACED) and not final.exists():
            path.rename(final)
        else:
            shutil.rmtree(path)
    return left


# --- resuming ---------------------------------------------------------------------------------------------------


def resolve_resume(resume_from_checkpoint: str, output_dir: str | Path) -> tuple[Path, Path]:
    """The run folder and the checkpoint to continue from.

    Args:
        resume_from_checkpoint: a checkpoint, a run folder or an output folder (their newest whole checkpoint), or
            `last`: the newest run under `output_dir` that has a whole checkpoint.
        output_dir: where `last` looks.

    Returns:
        (run folder, checkpoint), both absolute; the checkpoint is verified.

    Raises:
        ConfigError: when there is no such checkpoint, a file of it is missing, torn or altered, or it holds the
            weights only.
    """
    last = resume_from_checkpoint == "last"
    folder = Path(output_dir if last else resume_from_checkpoint).expanduser().absolute()
    if step_of(folder) is not None or (folder / MANIFEST).exists():
        manifest = verify(folder)
        _require_training_state(folder, manifest)
        return folder.parent, folder
    if not last and not folder.is_dir():
        raise ConfigError(f"{_FLAG}: {folder}: no such folder; name a checkpoint-<step> folder, or use last")
    for run_dir in [folder, *reversed(list_versions(folder))]:
        checkpoint = latest_valid(run_dir)
        if checkpoint is not None:
            _require_training_state(checkpoint, _read_manifest(checkpoint))
            return run_dir, checkpoint
    raise ConfigError(
        f"{_FLAG}: {resume_from_checkpoint}: no whole checkpoint in {folder} or its v<N>-* runs; "
        "leave the flag out to start a new run"
    )


def _require_training_state(checkpoint: Path, manifest: Manifest) -> None:
    """The optimizer's file (optimizer.pt, optimizer_0/...) or DeepSpeed's folder (global_step<k>) must be there."""
    if any(name.startswith(("optimizer", "global_step")) for name in manifest.files):
        return
    raise ConfigError(
        f"{_FLAG}: {checkpoint}: holds the weights only (it was saved with --save_only_model true); "
        "to start from its weights use --model or --adapters"
    )
