"""Checkpoints of DeepSpeed's engines: they hold data only, and are cut again for another number of processes."""

from __future__ import annotations

import contextlib
import functools
import inspect
import io
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch.optim import Optimizer

from swift.trainers.checkpoint import loading, staging_folder, step_of
from swift.trainers.distributed import Collectives


def load_safely() -> None:
    """Make engines refuse checkpoints that could run code, and read those of another number of processes.

    DeepSpeed itself unpickles whatever they hold, and asks for a conversion by hand.
    """
    from deepspeed import DeepSpeedEngine
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address
    from torch.serialization import safe_globals

    load = inspect.unwrap(DeepSpeedEngine.load_checkpoint)

    @functools.wraps(load)
    def load_checkpoint(engine: Any, folder: str, *arguments: Any, **named: Any) -> Any:
        kinds = [DynamicLossScaler, LossScaler, ZeroStageEnum, fragment_address]
        with loading(folder), safe_globals(kinds), _cut_for(engine, Path(folder)) as own:
            found = load(engine, str(own), *arguments, **named)
            if own != Path(folder):
                _part(engine.optimizer.optimizer, own)
            return found

    DeepSpeedEngine.load_checkpoint = load_checkpoint


@contextlib.contextmanager
def _cut_for(engine: Any, checkpoint: Path) -> Iterator[Path]:
    """A folder from which `engine` can load: the checkpoint, or its universal form if it is of other processes."""
    parts = list(checkpoint.glob("global_step*/*_optim_states.pt"))
    if not parts or len(parts) == engine.dp_world_size:
        yield checkpoint
        return
    ranks, folder = Collectives(), staging_folder(checkpoint.parent, step_of(checkpoint) or 0)
    try:
        with ranks.together():
            if ranks.is_main:
                _make_universal(parts[0].parent, folder)
        engine._config.load_universal_checkpoint = True
        yield folder
    finally:
        engine._config.load_universal_checkpoint = False
        ranks.barrier()
        if ranks.is_main:
            shutil.rmtree(folder, ignore_errors=True)


def _part(optimizer: Optimizer, folder: Path) -> None:
    """Give groups their settings, and parameters a count of steps each: ZeRO-3 gives all of them those of the first."""
    (file,) = folder.glob("*/zero/optimizer_state.pt")
    for group, saved in zip(optimizer.param_groups, torch.load(file)["param_groups"], strict=True):
        group.update({key: value for key, value in saved.items() if key != "params"})
    for state in optimizer.state.values():
        state["step"] = state["step"].clone()


def _make_universal(source: Path, folder: Path) -> None:
    """Write a file of each parameter and state, by DeepSpeed's own converter."""
    from deepspeed.checkpoint.ds_to_universal import main

    shutil.rmtree(folder, ignore_errors=True)
    target = folder / source.name
    options = {"num_extract_workers": 1, "num_merge_workers": 1, "keep_temp_folder": False, "strict": True}
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        main(SimpleNamespace(input_folder=str(source), output_folder=str(target), inject_missing_state=True, **options))
    (folder / "latest_universal").write_text(source.name, encoding="utf-8")
