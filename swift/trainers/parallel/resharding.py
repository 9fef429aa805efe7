"""Optimizer state of a checkpoint in a run that shards in another way: not at all, with FSDP2, or with ZeRO.

The state of each parameter is read whole, one after the other, and each process keeps what is its own. Weights are not
read here, but for the float32 ones of which a model has 16 bits.
"""

from __future__ import annotations

import contextlib
import json
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.optim import Optimizer

from swift.models.sharded import is_dtensor
from swift.trainers.distributed import Collectives
from swift.trainers.optimizers.master_weights import MASTER
from swift.trainers.parallel import shards, zero_checkpoints
from swift.trainers.parallel.zero_checkpoints import State

WEIGHT = "fp32"
"""Where a weight stands beside its state."""


@dataclass(frozen=True, slots=True)
class Saved:
    """groups: settings of the optimizer's groups. state_of: a parameter's name and shape -> its state, whole."""

    groups: Sequence[Mapping[str, Any]]
    state_of: Callable[[str, torch.Size], State]


def way_of(checkpoint: Path) -> str:
    """How its run sharded: "fsdp", "zero3", "zero" for the other stages, or "" for none."""
    if (checkpoint / shards.FOLDER).is_dir():
        return "fsdp"
    if any(checkpoint.glob("global_step*/zero_pp_rank_*_model_states.pt")):
        return "zero3"
    return "zero" if any(checkpoint.glob("global_step*")) else ""


@contextlib.contextmanager
def read(checkpoint: Path, names: Sequence[str], ranks: Collectives) -> Iterator[Saved]:
    """The state in a checkpoint of any run; `names` of trained parameters, in the order of the optimizer's groups."""
    way = way_of(checkpoint)
    if not way:
        yield _read_plain(checkpoint, names)
    elif way == "fsdp":
        yield _read_fsdp(checkpoint / shards.FOLDER)
    else:
        with zero_checkpoints.universal(checkpoint, ranks) as folder:
            yield _read_zero(next(folder.glob("global_step*")) / "zero")


def _read_plain(checkpoint: Path, names: Sequence[str]) -> Saved:
    saved = torch.load(checkpoint / "optimizer.pt", map_location="cpu", mmap=True, weights_only=True)
    places = {name: place for place, name in enumerate(names)}

    def state_of(name: str, shape: torch.Size) -> State:
        state = dict(saved["state"].get(places[name], {}))  # nothing of what has never had a gradient
        return state | ({WEIGHT: state.pop(MASTER)} if MASTER in state else {})

    return Saved(saved["param_groups"], state_of)


def _read_fsdp(folder: Path) -> Saved:
    reader = HuggingFaceStorageReader(str(folder))
    known = reader.read_metadata().state_dict_metadata
    values = json.loads((folder / shards.VALUES).read_text(encoding="utf-8"))

    def state_of(name: str, shape: torch.Size) -> State:
        start = f"optimizer.{name}."
        keys = {key: key.removeprefix(start) for key in known if key.startswith(start)} | {f"model.{name}": WEIGHT}
        whole = {key: torch.empty(shape, dtype=torch.float32) for key in keys}
        dcp.load(whole, storage_reader=reader, no_dist=True)
        numbers = {key: torch.tensor(value) for key, value in values["state"][name].items()}
        return {keys[key]: tensor for key, tensor in whole.items()} | numbers

    return Saved(values["param_groups"], state_of)


def _read_zero(folder: Path) -> Saved:
    shared = torch.load(folder / zero_checkpoints.SETTINGS, map_location="cpu")
    common = shared.get("optimizer_state_dict", {}).get("state", {})  # of ZeRO-3: the number of steps is there

    def state_of(name: str, shape: torch.Size) -> State:
        files = {file.stem: torch.load(file) for file in sorted((folder / name).glob("*.pt"))}
        tensors = {key: found["param"] if isinstance(found, dict) else found for key, found in files.items()}
        step = tensors.pop("step", None)
        whole = {key: tensor.detach().view(shape) for key, tensor in tensors.items()}
        return whole | {"step": common[0]["step"].clone() if step is None else step}

    return Saved(shared["param_groups"], state_of)


def load(optimizer: Optimizer, weights: Mapping[str, nn.Parameter], saved: Saved) -> None:
    """Give the optimizer of a run that ZeRO does not shard its state; `weights`: in the order of its groups."""
    own = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    states = {}
    for place, (name, weight) in enumerate(weights.items()):
        state, target = saved.state_of(name, weight.shape), own[place]
        if target is not weight:
            state[MASTER] = state.pop(WEIGHT)
        elif WEIGHT in state:
            weight.detach().copy_(_cut_as(state.pop(WEIGHT), weight))
        states[place] = {key: _cut_as(value, weight) if value.ndim else value for key, value in state.items()}
    groups = optimizer.state_dict()["param_groups"]
    for group, then in zip(filter(_has_parameters, groups), filter(_has_parameters, saved.groups), strict=True):
        group.update({**then, "params": group["params"]})
    optimizer.load_state_dict({"state": states, "param_groups": groups})


def load_schedule(schedule: Any, saved: dict[str, Any]) -> None:
    """Give a schedule its state, but for what it has of each group of the optimizer, which was loaded before."""
    groups, own = schedule.optimizer.param_groups, schedule.state_dict()
    rates = {"base_lrs": [group["initial_lr"] for group in groups], "_last_lr": [group["lr"] for group in groups]}
    kept = {name: own[name] for name in own.keys() & {"lr_lambdas", "min_lrs"}}
    schedule.load_state_dict({**saved, **kept, **{name: rates[name] for name in saved.keys() & rates.keys()}})


def load_zero(
    optimizer: Any, weights: Mapping[str, nn.Parameter], saved: Saved, folder: Path, ranks: Collectives
) -> None:
    """The same for an optimizer of ZeRO, through an empty folder that all processes see; a collective of `ranks`."""
    from deepspeed.utils import safe_get_full_fp32_param

    def states() -> Iterator[tuple[str, State]]:
        for name, weight in weights.items():
            whole = safe_get_full_fp32_param(weight)
            yield name, {WEIGHT: whole, **saved.state_of(name, whole.shape)}

    with ranks.together():
        if ranks.is_main:
            zero_checkpoints.write_universal(folder, states(), list(filter(_has_parameters, saved.groups)))
        else:
            deque(states(), 0)
    zero_checkpoints.read_universal(optimizer, folder)


def _has_parameters(group: Mapping[str, Any]) -> bool:
    """ZeRO has no group without them."""
    return bool(group["params"])


def _cut_as(whole: Tensor, weight: Tensor) -> Tensor:
    """What this process has of a tensor that is cut as a weight is."""
    if not is_dtensor(weight):
        return whole
    from torch.distributed.tensor import distribute_tensor

    cut: Any = weight
    part = distribute_tensor(whole, cut.device_mesh, cut.placements, src_data_rank=None)
    return part.to(cut.device)
