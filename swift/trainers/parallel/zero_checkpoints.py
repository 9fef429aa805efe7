"""Checkpoints of DeepSpeed's engines: they hold data only, and are cut again for another number of processes."""

from __future__ import annotations

import contextlib
import functools
import inspect
import io
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from swift.trainers.checkpoint import loading, staging_folder, step_of
from swift.trainers.distributed import Collectives

SETTINGS = "optimizer_state.pt"
"""Of the universal form: what parameters share."""
State = dict[str, Tensor]


def load_safely() -> None:
    """Make engines refuse checkpoints that could run code, and read those of another number of processes.

    DeepSpeed itself unpickles whatever they hold, and asks for a conversion by hand.
    """
    from deepspeed import DeepSpeedEngine

    load = inspect.unwrap(DeepSpeedEngine.load_checkpoint)

    @functools.wraps(load)
    def load_checkpoint(engine: Any, folder: str, *arguments: Any, **named: Any) -> Any:
        with loading(folder), _data_of_engines(), _cut_for(engine, Path(folder)) as own:
            found = load(engine, str(own), *arguments, **named)
            if own != Path(folder):
                _part(engine.optimizer.optimizer, next(own.glob("global_step*")))
            return found

    DeepSpeedEngine.load_checkpoint = load_checkpoint


def _data_of_engines() -> Any:
    """A block in which the plain data of DeepSpeed's engines may be unpickled."""
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address
    from torch.serialization import safe_globals

    return safe_globals([DynamicLossScaler, LossScaler, ZeroStageEnum, fragment_address])


@contextlib.contextmanager
def _cut_for(engine: Any, checkpoint: Path) -> Iterator[Path]:
    """A folder from which `engine` can load: the checkpoint, or its universal form if it is of other processes."""
    parts = list(checkpoint.glob("global_step*/*_optim_states.pt"))
    if not parts or len(parts) == engine.dp_world_size:
        yield checkpoint
        return
    with universal(checkpoint, Collectives()) as folder:
        engine._config.load_universal_checkpoint = True
        try:
            yield folder
        finally:
            engine._config.load_universal_checkpoint = False


# --- the universal form: a file of each parameter and state -------------------------------------------------------


@contextlib.contextmanager
def scratch(checkpoint: Path, name: str, ranks: Collectives) -> Iterator[Path]:
    """A folder beside a checkpoint, there for the block only; a collective of `ranks`."""
    folder = staging_folder(checkpoint.parent, step_of(checkpoint) or 0).with_suffix(f".{name}")
    try:
        with ranks.together():
            if ranks.is_main:
                shutil.rmtree(folder, ignore_errors=True)
                folder.mkdir()
        yield folder
        ranks.barrier()  # not after a failure, which others may not share
    finally:
        if ranks.is_main:
            shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def universal(checkpoint: Path, ranks: Collectives) -> Iterator[Path]:
    """A folder with a checkpoint in this form, made by DeepSpeed's converter; a collective of `ranks`."""
    from deepspeed.checkpoint.ds_to_universal import main

    (source,) = checkpoint.glob("global_step*")
    options = {"num_extract_workers": 1, "num_merge_workers": 1, "keep_temp_folder": False, "strict": True}
    with scratch(checkpoint, "universal", ranks) as folder, _data_of_engines():
        with ranks.together():
            if ranks.is_main:
                paths = {"input_folder": str(source), "output_folder": str(folder / source.name)}
                with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
                    main(SimpleNamespace(**paths, **options, inject_missing_state=True))
                (folder / "latest_universal").write_text(source.name, encoding="utf-8")
        yield folder


def write_universal(folder: Path, states: Iterable[tuple[str, State]], groups: Sequence[Mapping[str, Any]]) -> None:
    """Write the state of each parameter, whole, with its float32 weight as `fp32`, and the settings of groups."""
    import deepspeed

    for name, state in states:
        place = folder / "zero" / name
        place.mkdir(parents=True)
        for key, value in state.items():
            torch.save({"param": value, "cat_dim": 0} if value.ndim else value, place / f"{key}.pt")
    inner = {"state": {0: {"step": state["step"]}}, "param_groups": groups}  # of ZeRO-3
    shared = {"ds_version": deepspeed.__version__, "param_groups": groups, "optimizer_state_dict": inner}
    torch.save(shared, folder / "zero" / SETTINGS)


def read_universal(optimizer: Any, folder: Path) -> None:
    """Give an optimizer of ZeRO the state in a folder."""
    if hasattr(optimizer, "load_hp_checkpoint_state_from_checkpoint_dir_stage3"):
        optimizer.load_hp_checkpoint_state_from_checkpoint_dir_stage3(str(folder))
    else:
        optimizer.load_hp_checkpoint_state_from_checkpoint_dir("bit16_groups", str(folder))
        optimizer.update_lp_params()
    _part(optimizer.optimizer, folder)


def _part(optimizer: Optimizer, folder: Path) -> None:
    """Give groups their settings, and parameters a count of steps each: ZeRO-3 gives all of them those of the first."""
    for group, saved in zip(
        optimizer.param_groups, torch.load(folder / "zero" / SETTINGS)["param_groups"], strict=True
    ):
        group.update({key: value for key, value in saved.items() if key != "params"})
    for state in optimizer.state.values():
        state["step"] = torch.as_tensor(state["step"], dtype=torch.float32).clone()
