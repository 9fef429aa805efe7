"""Which settings may change when a run is resumed.

Each setting says it of itself (`resume` of `swift.flags.Details`). *Fixed* ones decide what is in the checkpoint
(weights, adapters, data order, batches, pipeline state): changing one would continue another run, so it is an error.
*Free* ones decide where the run is watched and how fast it goes, not what it computes; some of them only while weights
are synced after every update. All others may change, with a note: from there it is no longer the run that was started.

The number of processes may change, and how they share batches with it, as long as the batches stay what they are. The
state of optimizers may be cut in another way: by FSDP, by ZeRO, or not at all. Batch sizes count the processes of the
run; those of an elastic run count `batch_processes`, which stay the same whatever processes there are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from swift.data.system import resolve_system
from swift.errors import ConfigError, counted
from swift.flags import flags_of, typed
from swift.observability.secrets import MASK
from swift.trainers.arguments import CUT_AGAIN

SHARING = frozenset(
    {
        "world_size",
        "batch_processes",
        "per_device_train_batch_size",
        "gradient_accumulation_steps",
        "steps_per_generation",
        "generation_batch_size",
    }
)
"""How processes share batches: these may change together."""

OUT_OF_TURN = frozenset(
    {
        "eval_strategy",
        "eval_steps",
        "val_dataset",
        "save_strategy",
        "save_steps",
        "save_only_model",
        "parity_check",
        "sleep_level",
    }
)
"""Free ones that sync weights before `--vllm_sync_interval` is over: evaluation and the repeated parity check need the
weights of then, the first generation after a checkpoint or a sleep of level 2 gets them, and the interval counts from
there. Free only while weights are synced after every update anyway.
"""


@dataclass(frozen=True, slots=True)
class SettingsChange:
    """What differs between a checkpoint's settings and those of the command that resumes it.

    changed: name -> (value then, value now), of every kind.
    problems: error lines of fixed settings; notes: lines about settings that change the run from here on.
    """

    changed: dict[str, tuple[Any, Any]] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def compare_settings(
    saved: Mapping[str, Any], current: Mapping[str, Any], arguments: type, *, divides: bool = False
) -> SettingsChange:
    """Compare two args.json contents, of the checkpoint and of the command that resumes; pure apart from paths.

    arguments: the dataclass whose fields these settings are. divides: whether a trainer of TRL has a loss that does not
    depend on the rows of a micro-batch.

    Names that the former lacks (an older version wrote it) and masked values are passed over. Example: num_generations
    8 -> 4 is a problem, learning_rate 1e-5 -> 1e-6 a note, save_steps neither unless vllm_sync_interval is above 1.
    """
    change = SettingsChange()
    reason = _why_not_shared_otherwise(saved, current, divides)
    flags = flags_of(arguments)
    interval = max(int(settings.get("vllm_sync_interval") or 1) for settings in (saved, current))
    for name, now in current.items():
        if name.startswith("_") or name not in saved or MASK in (saved[name], now):
            continue
        then, kind = saved[name], flags[name].details.resume if name in flags else "noted"
        if _same(then, now) or (name == "system" and _same_system(then, now)):
            continue
        change.changed[name] = (then, now)
        if name in SHARING and reason is None:
            if name == "world_size":
                change.notes.append(f"resume: {counted(now, 'process')} from this step, {then} before; equal batches")
        elif name == "world_size":
            line = f"NPROC_PER_NODE: {counted(now, 'training process')}: the checkpoint was made by {then}"
            change.problems.append(f"{line}{reason} start {counted(then, 'process')}, or start a new run")
        elif name == "batch_processes":  # the other settings, or the processes, say what is wrong
            pass
        elif kind == "fixed" and not (name in ("fsdp", "deepspeed") and _can_be_cut_otherwise(saved, current)):
            change.problems.append(
                f"--{name}: {typed(now)}: the checkpoint was made with {typed(then)} and this setting may not "
                f"change on resume; use --{name} {typed(then)}, or start a new run"
            )
        elif kind in ("noted", "fixed"):
            change.notes.append(f"resume: {name} changes from {typed(then)} to {typed(now)} at this step")
        elif interval > 1 and name in OUT_OF_TURN:
            change.notes.append(
                f"resume: {name} changes from {typed(then)} to {typed(now)} at this step; with --vllm_sync_interval "
                f"{interval} it also decides when the sampler gets new weights"
            )
    return change


def _can_be_cut_otherwise(saved: Mapping[str, Any], current: Mapping[str, Any]) -> bool:
    """Whether a run may shard in another way than the one that made its checkpoint."""
    if saved.get("fsdp") and current.get("fsdp"):
        return True
    whole = current.get("optim") in CUT_AGAIN and current.get("torch_dtype") != "float16"
    return whole and not current.get("load_best_model_at_end")


def _why_not_shared_otherwise(saved: Mapping[str, Any], current: Mapping[str, Any], divides: bool) -> str | None:
    """Why processes cannot share the batches in another way, and what to do; None if they can."""
    other_number, optim = current.get("world_size") != saved.get("world_size"), current.get("optim")
    if other_number and current.get("deepspeed") and optim not in CUT_AGAIN:
        return f", and ZeRO's state of --optim {optim} is cut for that number;"
    if "num_generations" not in current:  # rows are dealt by a data loader
        for name in ("group_by_length", "dataloader_drop_last"):
            if current.get(name):
                return f", and the order of rows depends on it with --{name};"
    if current.get("rlhf_type") == "kto" and current.get("loss_type") in (None, "kto"):
        return ", and the KL of --rlhf_type kto is a mean over the rows of all processes;"
    rows = "per_device_train_batch_size"
    if current.get(rows) != saved.get(rows) and (
        current.get("loss_type") == "bnpo" if "num_generations" in current else not divides
    ):
        return f", and the loss has means over a micro-batch: keep --{rows} {saved.get(rows)};"
    (total, generation), now = _batches(saved), _batches(current)
    if now == (total, generation):
        return None
    if current.get("elastic"):
        names = (rows, "gradient_accumulation_steps", "steps_per_generation", "generation_batch_size")
        kept = " ".join(f"--{name} {saved[name]}" for name in names if saved.get(name))
        return f", with {counted(total, 'row')} a step; use {kept},"
    updates, rest = divmod(total, (current.get("world_size") or 1) * (current.get("per_device_train_batch_size") or 1))
    if not updates or rest:
        return f", with {counted(total, 'row')} a step;"
    steps = f" --steps_per_generation {updates * generation // total}" if current.get("steps_per_generation") else ""
    return f", with {counted(total, 'row')} a step; use --gradient_accumulation_steps {updates}{steps},"


def processes_of_batch(saved: Mapping[str, Any], current: Mapping[str, Any]) -> int:
    """The processes that batch sizes count when an elastic run continues: so many that the batch stays what it is.

    Example: a checkpoint of 4 processes with 2 rows each, resumed by 3 with 2 rows each: 4.
    """
    (total, _), (rows, _) = _batches(saved), _batches({**current, "batch_processes": 1})
    return max(1, total // rows)


def _batches(settings: Mapping[str, Any]) -> tuple[int, int]:
    """Rows (completions) of an update, and of a generation batch, over all processes."""
    processes = settings.get("batch_processes") or settings.get("world_size") or 1
    rows = processes * (settings.get("per_device_train_batch_size") or 1)
    updates = settings.get("gradient_accumulation_steps") or 1
    steps = settings.get("steps_per_generation") or updates
    return rows * updates, settings.get("generation_batch_size") or rows * steps


def _same(then: Any, now: Any) -> bool:
    """Equal values; two spellings of one existing path are equal too."""
    if isinstance(then, list | tuple) and isinstance(now, list | tuple):
        return len(then) == len(now) and all(_same(a, b) for a, b in zip(then, now, strict=True))
    if then == now:
        return True
    if not (isinstance(then, str) and isinstance(now, str)):
        return False
    return Path(now).exists() and Path(then).resolve() == Path(now).resolve()


def _same_system(then: str | None, now: str | None) -> bool:
    """Whether two system prompts are one text. Earlier versions wrote the name of its file down."""
    try:
        return resolve_system(then)[0] == resolve_system(now)[0]
    except ConfigError:  # the file of then is gone
        return False
