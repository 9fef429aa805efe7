"""Weights and optimizer of a model under FSDP2 in a checkpoint: each process writes its own shards, as safetensors.

torch.distributed.checkpoint knows which part of which tensor a shard is, so any number of processes can read them,
cut in another way. In its usual format it would pickle; here numbers are safetensors, and all else is JSON.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.optim import Optimizer

from swift.models.checkpoint_tensors import is_peft
from swift.trainers.distributed import Collectives

FOLDER = "fsdp_state"
"""Of a checkpoint."""
VALUES = "values.json"
FILE_BYTES = 1 << 30
"""Size of a file: twice as much memory again is needed while it is written."""


class Shards:
    """The state that a model and its optimizer have now.

    copied: into the memory of the host, so that it can be written while training goes on. Without, it must be written
    before the next step.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer, *, copied: bool) -> None:
        state = get_optimizer_state_dict(model, optimizer)
        self._tensors = _weights(model) | _tensors(state)
        self._values = {
            "state": {name: {key: _plain(value) for key, value in _values(own)} for name, own in _states(state)},
            "param_groups": state["param_groups"],
        }
        if copied:
            stager = DefaultStager(StagingOptions(False, False, False, False))
            self._tensors = cast(dict[str, Tensor], stager.stage(self._tensors))
            stager.close()

    def write(self, folder: Path, ranks: Collectives) -> list[Path]:
        """Write the shards of this process into a folder that all see; returns its files. A collective of `ranks`."""
        with ranks.together():
            folder.mkdir(parents=True, exist_ok=True)
        numbers, filled = {}, 0
        for name, tensor in self._tensors.items():
            numbers[name] = 1 + filled // (FILE_BYTES * ranks.world_size)
            filled += tensor.nbytes
        writer = HuggingFaceStorageWriter(str(folder), numbers, save_distributed=True)
        writer.per_thread_copy_ahead = 0  # else each process would open a context on the first GPU, on another thread
        _raising(lambda: dcp.save(self._tensors, storage_writer=writer, process_group=ranks.group))
        if ranks.is_main:
            (folder / VALUES).write_text(json.dumps(self._values), encoding="utf-8")
        return sorted(folder.glob(f"shard-{ranks.rank + 1:05d}-*"))


def load_weights(folder: Path, model: nn.Module) -> None:
    """The weights that `Shards.write` wrote; a collective."""
    tensors = _read(folder, _weights(model))
    state: dict[str, Any] = {name.removeprefix("model."): value for name, value in tensors.items()}
    set_model_state_dict(model, state, options=StateDictOptions(strict=False))  # frozen ones, second names of tied ones


def load_optimizer(folder: Path, model: nn.Module, optimizer: Optimizer) -> None:
    """The optimizer's state that `Shards.write` wrote; a collective."""
    state = get_optimizer_state_dict(model, optimizer)
    _read(folder, _tensors(state))  # in place
    saved = json.loads((folder / VALUES).read_text(encoding="utf-8"))
    for name, own in _states(state):
        own.update({key: _like(saved["state"][name][key], value) for key, value in _values(own)})
    for group, then in zip(_groups(state), saved["param_groups"], strict=True):
        if group["params"] != then["params"]:
            raise ValueError("other parameters are trained")
        group.update({key: _like(then[key], value) for key, value in group.items() if key in then})
    set_optimizer_state_dict(model, optimizer, state)


def _weights(model: nn.Module) -> dict[str, Any]:
    """Parameters and buffers, tied ones once; of a model with adapters, what is trained."""
    first = dict(model.named_parameters())
    tied = {name for name, _ in model.named_parameters(remove_duplicate=False) if name not in first}
    state = get_model_state_dict(model, options=StateDictOptions(ignore_frozen_params=is_peft(model)))
    return {f"model.{name}": value for name, value in state.items() if name not in tied}


def _states(state: Any) -> Any:
    """The optimizer's state of each parameter, by its name."""
    return state["state"].items()


def _groups(state: Any) -> Any:
    return state["param_groups"]


def _tensors(state: Any) -> dict[str, Tensor]:
    """What an optimizer's state has in tensors of the size of parameters."""
    return {
        f"optimizer.{name}.{key}": value
        for name, own in _states(state)
        for key, value in own.items()
        if isinstance(value, Tensor) and value.ndim
    }


def _values(own: dict[str, Any]) -> list[tuple[str, Any]]:
    """The rest of the state of a parameter."""
    return [(key, value) for key, value in own.items() if not (isinstance(value, Tensor) and value.ndim)]


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, Tensor) else value


def _like(saved: Any, value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.new_tensor(saved)
    return tuple(saved) if isinstance(value, tuple) else saved


def _read(folder: Path, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors, with the numbers of the folder."""
    _raising(lambda: dcp.load(tensors, storage_reader=HuggingFaceStorageReader(str(folder))))
    return tensors


def _raising(call: Callable[[], Any]) -> None:
    """`call`, with the error of a process itself in place of torch's, which is no Exception and lists all of them."""
    try:
        call()
    except CheckpointException as error:
        raise next(failure for failure, _ in error.failures.values()) from error
