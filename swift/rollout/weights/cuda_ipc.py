"""Buckets on a GPU that trainer and engine share: the engine maps the trainer's memory, nothing is copied between them.

The bucket is packed into one allocation, and torch's own description of it travels through Ray. Devices are named by
UUID, since each process numbers those it sees. Each description is for one receiver: torch counts its users, and the
sender's memory returns to the allocator once every receiver has let go of it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

from swift.errors import SyncFailed, first_line
from swift.rollout.weights.base import Bucket
from swift.rollout.weights.packing import pack, unpack

DEVICE = 6
"""Place of the device's number among the arguments of `rebuild_cuda_tensor`."""


def header_for(bucket: Bucket) -> dict[str, Any]:
    """How one receiver finds the bucket, which must live until it has answered."""
    flat, entries = bucket.once("cuda_ipc", lambda: pack(bucket))
    if flat.device.type != "cuda":
        raise SyncFailed(
            f"weights: --weight_transport ipc: the trainer's tensors lie on {flat.device}; use auto or object_store"
        )
    return {"entries": entries, "uuid": device_uuid(flat.device), "memory": reduce_tensor(flat)[1]}


def receive(header: dict[str, Any]) -> list[tuple[str, Tensor]]:
    """The tensors in the sender's memory; nothing may refer to them once the receiver has answered.

    Raises:
        SyncFailed: this process does not see that device, or cannot map its memory.
    """
    memory = list(header["memory"])
    memory[DEVICE] = find_device(header["uuid"])
    torch.cuda.init()
    try:
        flat = rebuild_cuda_tensor(*memory)
    except RuntimeError as error:
        raise SyncFailed(f"weights: memory of GPU {header['uuid']}: cannot be mapped ({first_line(error)})") from error
    return unpack(flat, header["entries"])


def release() -> None:
    """Give back mappings that nothing refers to; on both sides, after an update."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
        torch.cuda.ipc_collect()


def device_uuid(device: torch.device) -> str:
    """Names a GPU in the same way in every process."""
    return str(torch.cuda.get_device_properties(device).uuid)


def find_device(uuid: str) -> int:
    """This process's number of a GPU.

    Raises:
        SyncFailed: it does not see it.
    """
    for index in range(torch.cuda.device_count()):
        if device_uuid(torch.device("cuda", index)) == uuid:
            return index
    raise SyncFailed(f"weights: GPU {uuid}: is not visible to the engine; choose the broadcast transport")
