"""The receiving end of vLLM's NCCL weight transfer, for trainers that speak it (TRL's `VLLMClient`).

The server's process is the one receiver. NCCL puts the tensors on its GPU; they go on to the engines through main
memory, so that engines of any tensor parallelism and number are reached the same way. vLLM's own communicator and
packing are used, so both ends cut the stream alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from swift.errors import SyncFailed
from swift.rollout.weight_sync.base import TensorInfo, torch_dtype


class NcclReceiver:
    """Takes part in a trainer's NCCL group on the first GPU.

    Args:
        init: vLLM's `init_info`; `source` is the trainer's rank (0), `barrier` asks for one after each tensor.

    Raises:
        SyncFailed: there is no GPU or no vLLM, or the trainer does not come.
    """

    def __init__(self, init: dict[str, Any]) -> None:
        if not torch.cuda.is_available():
            raise SyncFailed("weights: NCCL needs a GPU on the server; use backend gloo, or POST /weights/begin")
        try:
            from vllm.distributed.weight_transfer import nccl_common, packed_tensor
        except ImportError as error:
            raise SyncFailed(f"weights: NCCL transfer needs vLLM on the server ({error})") from error
        self._packing = packed_tensor
        self.packed = bool(init.get("packed", False))
        self.buffer_bytes = int(init.get("packed_buffer_size_bytes") or packed_tensor.DEFAULT_PACKED_BUFFER_SIZE_BYTES)
        self.buffers = int(init.get("packed_num_buffers") or packed_tensor.DEFAULT_PACKED_NUM_BUFFERS)
        self.source, self.barrier = int(init.get("source", 0)), bool(init.get("barrier", False))
        self.device = torch.device("cuda", 0)
        try:
            with torch.cuda.device(self.device):
                self._group: Any = nccl_common.stateless_init_process_group(
                    str(init["master_address"]),
                    int(init["master_port"]),
                    int(init["rank_offset"]),
                    int(init["world_size"]),
                    self.device,
                )
        except (RuntimeError, ValueError) as error:
            raise SyncFailed(f"weights: nccl group: {str(error).splitlines()[0]}") from error

    def receive(self, infos: Sequence[TensorInfo]) -> list[tuple[str, Tensor]]:
        """The tensors of one announcement, in main memory."""
        came: list[tuple[str, Tensor]] = []
        try:
            with torch.cuda.device(self.device):
                if self.packed:
                    self._packing.packed_nccl_broadcast_consumer(
                        iterator=iter([(info.name, (list(info.shape), torch_dtype(info.dtype))) for info in infos]),
                        group=self._group,
                        src=self.source,
                        post_unpack_func=lambda tensors: came.extend((name, one.cpu()) for name, one in tensors),
                        buffer_size_bytes=self.buffer_bytes,
                        num_buffers=self.buffers,
                        device=self.device,
                    )
                    return came
                for info in infos:
                    tensor = torch.empty(info.shape, dtype=torch_dtype(info.dtype), device=self.device)
                    self._group.broadcast(tensor, src=self.source, stream=torch.cuda.current_stream())
                    came.append((info.name, tensor.cpu()))
                    if self.barrier:
                        self._group.group.barrier()
        except RuntimeError as error:
            raise SyncFailed(f"weights: nccl broadcast: {str(error).splitlines()[0]}") from error
        return came

    def close(self) -> None:
        """Leave the group."""
        group, self._group = self._group, None
        if group is not None:
            group.destroy()
