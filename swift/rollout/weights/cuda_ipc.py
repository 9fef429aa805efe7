"""Buckets on a GPU that trainer and engine share: the engine maps the trainer's memory, nothing is copied between them.

The bucket is packed into one allocation. What travels is the allocation's handle and its place, as JSON: the fields
that torch's own pickling would send, without the pickle. Devices are named by UUID, since each process numbers those it
sees. Each handle is for one receiver: torch counts its users, and the sender's memory returns to
the allocator once every receiver has let go of it.
"""

from __future__ import annotations

import base64
from typing import Any

import torch
from torch import Tensor

from swift.errors import SyncFailed
from swift.rollout.weights.base import Bucket
from swift.rollout.weights.packing import pack, staged, unpack

FIELDS = (
    "device", "handle", "storage_bytes", "storage_offset", "counter_handle", "counter_offset",
    "event_handle", "event_sync",
)  # fmt: skip
"""What `UntypedStorage._share_cuda_` returns, in its order."""


def header_for(bucket: Bucket) -> dict[str, Any]:
    """How one receiver finds the bucket; the bucket must live until it has answered. JSON-safe."""
    flat, entries = staged(bucket, "cuda_ipc", lambda: pack(bucket))
    return {
        "entries": [list(entry) for entry in entries],
        "size": flat.numel(),
        "uuid": device_uuid(flat.device),
        "storage": encode(flat.untyped_storage()._share_cuda_()),
    }


def receive(header: dict[str, Any]) -> list[tuple[str, Tensor]]:
    """The tensors in the sender's memory; nothing may refer to them once the receiver has answered.

    Raises:
        SyncFailed: this process does not see that device, or cannot map its memory.
    """
    device = find_device(header["uuid"])
    fields = decode(header["storage"])
    fields[0] = device
    torch.cuda.init()
    try:
        storage = torch.UntypedStorage._new_shared_cuda(*fields)  # type: ignore[attr-defined]
    except RuntimeError as error:
        line = (str(error).strip().splitlines() or ["unknown"])[0]
        raise SyncFailed(f"weights: memory of GPU {header['uuid']}: cannot be mapped ({line})") from error
    flat = torch.empty(0, dtype=torch.uint8, device=torch.device("cuda", device)).set_(storage)
    return unpack(flat[: header["size"]], header["entries"])


def release() -> None:
    """Give back mappings that nothing refers to; on both sides, after an update."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
        torch.cuda.ipc_collect()


def encode(fields: tuple[Any, ...]) -> dict[str, Any]:
    """A storage's handle as JSON: bytes in base 64.

    Raises:
        SyncFailed: torch describes handles in another way than this code knows.
    """
    if len(fields) != len(FIELDS):
        raise SyncFailed(
            f"weights: CUDA IPC: torch {torch.__version__} describes a handle by {len(fields)} fields, not "
            f"{len(FIELDS)}; choose the broadcast transport"
        )
    return {
        name: {"b64": base64.b64encode(value).decode()} if isinstance(value, bytes) else value
        for name, value in zip(FIELDS, fields, strict=True)
    }


def decode(state: dict[str, Any]) -> list[Any]:
    """The inverse of `encode`."""
    return [
        base64.b64decode(value["b64"], validate=True) if isinstance(value, dict) else value
        for value in (state[name] for name in FIELDS)
    ]


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
