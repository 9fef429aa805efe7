"""The receiving end of vLLM's NCCL weight transfer, for trainers that speak it (TRL's `VLLMClient`).

The server's process is the one receiver. NCCL puts the tensors on its GPU; they go on to the engines through main
memory, so that engines of any tensor parallelism and number are reached the same way. vLLM's own communicator and
packing are used, so both ends cut the stream alike.

Neither joining nor a broadcast has a bound in NCCL, or in a copy that waits for one. Both happen on a thread therefore,
which is left behind when the other side does not come: the communicator is destroyed then, which frees it where it can.
"""

from __future__ import annotations

import importlib
import inspect
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from swift.errors import SyncFailed
from swift.rollout.weight_sync.base import TensorInfo, torch_dtype

LIMIT_S = 120.0
"""Bound on joining, and on each broadcast."""
CLOSE_S = 10.0
"""How long NCCL may take to destroy a communicator."""
USED: dict[str, dict[str, tuple[str, ...]]] = {
    "vllm.distributed.weight_transfer.nccl_common": {
        "stateless_init_process_group": ("master_address", "master_port", "rank", "world_size", "device"),
    },
    "vllm.distributed.weight_transfer.packed_tensor": {
        "packed_nccl_broadcast_consumer": (
            "iterator", "group", "src", "post_unpack_func", "buffer_size_bytes", "num_buffers", "device",
        ),
        "DEFAULT_PACKED_BUFFER_SIZE_BYTES": (),
        "DEFAULT_PACKED_NUM_BUFFERS": (),
    },
}  # fmt: skip
"""Module -> name in it -> parameters that are given. Not among those that every engine needs: few servers use these."""


class NcclReceiver:
    """Takes part in a trainer's NCCL group on the first GPU.

    Args:
        init: vLLM's `init_info`; `source` is the trainer's rank (0), `barrier` asks for one after each tensor.
        limit_s: bound on joining, and on each broadcast.

    Raises:
        SyncFailed: there is no GPU or no vLLM that fits, or the trainer does not come.
    """

    def __init__(self, init: dict[str, Any], *, limit_s: float = LIMIT_S) -> None:
        if not torch.cuda.is_available():
            raise SyncFailed("weights: NCCL needs a GPU on the server; use backend gloo, or POST /weights/begin")
        common, self._packing = _modules()
        self.limit_s = limit_s
        self.packed = bool(init.get("packed", False))
        self.buffer_bytes = int(init.get("packed_buffer_size_bytes") or self._packing.DEFAULT_PACKED_BUFFER_SIZE_BYTES)
        self.buffers = int(init.get("packed_num_buffers") or self._packing.DEFAULT_PACKED_NUM_BUFFERS)
        self.source, self.barrier = int(init.get("source", 0)), bool(init.get("barrier", False))
        self.device = torch.device("cuda", 0)
        host, port = str(init["master_address"]), int(init["master_port"])
        rank, size = int(init["rank_offset"]), int(init["world_size"])
        self._group: Any = None
        came: list[Any] = []

        def join() -> None:
            came.append(common.stateless_init_process_group(host, port, rank, size, self.device))

        self._bounded("nccl group", join, came)
        self._group = came[0]

    def receive(self, infos: Sequence[TensorInfo], how: Mapping[str, Any] | None = None) -> list[tuple[str, Tensor]]:
        """The tensors of one announcement, in main memory.

        Args:
            infos: what comes.
            how: packed, packed_buffer_size_bytes and packed_num_buffers as this announcement says; what it leaves out
                is as in `init`.

        Raises:
            SyncFailed: they did not come; the group is gone then.
        """
        if self._group is None:
            raise SyncFailed("weights: nccl broadcast: its group is gone; initialise it again")
        came: list[tuple[str, Tensor]] = []
        group = self._group
        how = how or {}
        packed = bool(how.get("packed", self.packed))
        buffer_bytes = int(how.get("packed_buffer_size_bytes", self.buffer_bytes))
        buffers = int(how.get("packed_num_buffers", self.buffers))

        def receive() -> None:
            if packed:
                self._packing.packed_nccl_broadcast_consumer(
                    iterator=iter([(info.name, (list(info.shape), torch_dtype(info.dtype))) for info in infos]),
                    group=group,
                    src=self.source,
                    post_unpack_func=lambda tensors: came.extend([(name, one.cpu()) for name, one in tensors]),
                    buffer_size_bytes=buffer_bytes,
                    num_buffers=buffers,
                    device=self.device,
                )
                return
            for info in infos:
                tensor = torch.empty(info.shape, dtype=torch_dtype(info.dtype), device=self.device)
                group.broadcast(tensor, src=self.source, stream=torch.cuda.current_stream())
                came.append((info.name, tensor.cpu()))
                if self.barrier:
                    group.group.barrier()

        self._bounded("nccl broadcast", receive, came)
        return came

    def _bounded(self, what: str, work: Callable[[], None], came: Sequence[object]) -> None:
        """`work` on a thread of its own, as long as `came` grows in time.

        Raises:
            SyncFailed: it stood still, or failed.
        """
        failures: list[BaseException] = []

        def run() -> None:
            try:
                with torch.cuda.device(self.device):
                    work()
            except BaseException as error:  # raised below, in the thread that waits
                failures.append(error)

        thread = threading.Thread(target=run, name=f"weights: {what}", daemon=True)
        thread.start()
        seen = -1
        while thread.is_alive() and len(came) != seen:
            seen = len(came)
            thread.join(self.limit_s)
        if thread.is_alive():
            self.close()
            raise SyncFailed(f"weights: {what}: the trainer did not come within {self.limit_s:g} s")
        if not failures:
            return
        self.close()
        if isinstance(failures[0], RuntimeError | ValueError):
            line = (str(failures[0]).splitlines() or [type(failures[0]).__name__])[0]
            raise SyncFailed(f"weights: {what}: {line}") from failures[0]
        raise failures[0]

    def close(self) -> None:
        """Leave the group; never waits for the others."""
        group, self._group = self._group, None
        if group is not None:
            thread = threading.Thread(target=group.destroy, name="weights: nccl destroy", daemon=True)
            thread.start()
            thread.join(CLOSE_S)


def _modules() -> tuple[Any, Any]:
    """The modules of vLLM, once all that is used of them is there.

    Raises:
        SyncFailed: it is not.
    """
    try:
        found = {name: importlib.import_module(name) for name in USED}
    except ImportError as error:
        raise SyncFailed(f"weights: NCCL transfer needs vLLM on the server ({error})") from error
    missing = [
        f"{module}.{name}" + (f"({', '.join(parameters)})" if parameters else "")
        for module, names in USED.items()
        for name, parameters in names.items()
        if not _fits(getattr(found[module], name, None), parameters)
    ]
    if missing:
        raise SyncFailed(
            f"weights: NCCL transfer: this vLLM has no {'; '.join(missing)}; use backend gloo, or POST /weights/begin"
        )
    common, packing = found.values()
    return common, packing


def _fits(one: Any, parameters: Sequence[str]) -> bool:
    """Whether it is there, and takes these parameters."""
    if not parameters:
        return one is not None
    return callable(one) and set(parameters) <= set(inspect.signature(one).parameters)
