"""The part of swift inside a vLLM worker: vLLM adds this class to its worker class, and calls its methods by name.

A worker in this process gets the tensors themselves. Worker processes (tensor parallelism) receive them in a broadcast,
or read them from a file in shared memory. All names start with `swift_`, to avoid names of vLLM.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import psutil
import torch
from torch import Tensor

from swift.models.multimodal import NOT_LOADED
from swift.rollout.engines.vllm.single_copy import NotShareable, SingleCopy
from swift.rollout.engines.vllm.versions import load_vllm, pack_experts_anew
from swift.rollout.weights.base import PolicyParameters
from swift.rollout.weights.broadcast import Announcement, BroadcastReceiver, Entry, unpack
from swift.rollout.weights.digest import StreamDigest

MADV_DONTNEED = 4
"""Linux: the system takes the pages back at once; they read as zeros afterwards."""
LIBC = ctypes.CDLL(None, use_errno=True)
"""The C library of this process."""


class WorkerExtension:
    """Updates in buckets, weights shared with the trainer, and release of the KV cache on a CPU."""

    vllm_config: Any
    model_runner: Any
    device: Any
    rank: int
    _swift_receiver: BroadcastReceiver | None = None

    def swift_begin_update(self) -> None:
        """Begin an update of all weights; the model cannot run until `swift_end_update`."""
        lora = getattr(self, "lora_config", None) or getattr(self.vllm_config, "lora_config", None)
        own = [name for name, _ in self.model_runner.get_model().named_parameters()]
        names = [name for name in own if not f"thinker.{name}".startswith(NOT_LOADED)]
        self._swift_expected = {name.replace(".base_layer.", ".") if lora else name for name in names}
        self._swift_loaded: set[str] | None = set()
        self._swift_digest = StreamDigest()
        self._swift_count = self._swift_bytes = 0
        if load_vllm().platform.is_cpu():
            pack_experts_anew(self.model_runner.get_model())
        with load_vllm().set_config(self.vllm_config):
            load_vllm().begin_reload(self.model_runner.get_model())

    def swift_load(
        self, tensors: Sequence[tuple[str, Tensor]], copies: Mapping[str, str], known: Mapping[str, int] | None = None
    ) -> None:
        """Load some tensors.

        Args:
            tensors: as sent; they are counted and digested while the model loads them.
            copies: name -> name among `tensors`, for a tied head that is not sent. Copies are not counted.
            known: checksums by name, if sender and receiver share the memory; None: they are computed here.
        """

        def counted() -> Iterator[tuple[str, Tensor]]:
            for name, tensor in tensors:
                self._swift_digest.add(name, tensor, (known or {}).get(name))
                self._swift_count += 1
                self._swift_bytes += tensor.numel() * tensor.element_size()
                yield name, tensor
            found = dict(tensors)
            yield from ((new, found[old]) for new, old in copies.items())

        loaded = load_part(self, counted())
        if loaded is None or self._swift_loaded is None:
            self._swift_loaded = None
        else:
            self._swift_loaded |= loaded

    def swift_load_file(self, path: str, entries: Sequence[Entry], copies: Mapping[str, str]) -> None:
        """`swift_load` of the tensors in a file; entries: its table of contents, see `broadcast.pack`."""
        self.swift_load(unpack(torch.from_numpy(np.fromfile(path, dtype=np.uint8)), entries), copies)

    def swift_receive(self, header: dict[str, Any], copies: Mapping[str, str]) -> None:
        """`swift_load` of the tensors of a broadcast, which every worker joins; see `BroadcastSender.announce`."""
        if self._swift_receiver is None:
            self._swift_receiver = BroadcastReceiver(self.device)
        bucket = self._swift_receiver.receive(Announcement([], header=header).for_rank(self.rank))
        self.swift_load(bucket.tensors, copies)

    def swift_leave_broadcast(self) -> None:
        """Release the group of former broadcasts."""
        if self._swift_receiver is not None:
            self._swift_receiver.close()

    def swift_end_update(self) -> dict[str, Any]:
        """End the update; returns counts, digest, and the engine's parameters that were not loaded."""
        runner = self.model_runner
        with load_vllm().set_config(self.vllm_config):
            load_vllm().end_reload(runner.get_model(), runner.model_config)
        reset = getattr(runner, "reset_lora_state", None)  # 0.26 keeps adapters
        if reset is not None:
            reset()
        quantized = self.vllm_config.model_config.quantization is not None
        unknown = quantized or self._swift_loaded is None
        missing = [] if unknown else sorted(self._swift_expected - (self._swift_loaded or set()))
        return {
            "tensors": self._swift_count,
            "nbytes": self._swift_bytes,
            "digest": self._swift_digest.hexdigest(),
            "missing": missing,
        }

    def swift_share(self, parameters: PolicyParameters, tied: str, embedding: str) -> SingleCopy | str:
        """Make the trainer's tensors views of this worker's weights; returns the reason if they cannot be.

        The caller is in the same process.
        """
        config = self.vllm_config.model_config
        if config.quantization is not None:
            return "its weights are quantised"
        if getattr(config, "use_mla", False):
            return "latent attention keeps products of its weights"
        try:
            return SingleCopy(self.model_runner.get_model(), parameters, tied=tied, embedding=embedding)
        except NotShareable as error:
            return str(error)

    def swift_segments(self) -> str:
        """Prefix of the names of this worker's shared memory."""
        return os.environ.get("VLLM_DIST_IDENT", "")

    def swift_kv_bytes(self) -> int:
        """Size of the KV cache, in bytes."""
        return sum(size for _, size in self._swift_kv()[0])

    def swift_release_kv(self) -> tuple[int, str]:
        """Return the pages of the KV cache to the system; they read as zeros afterwards, like a new cache.

        Nothing may be cached or running. Returns the bytes by which this process became smaller, and the reason why
        nothing was released, or "".
        """
        kv, on_cpu = self._swift_kv()
        if sys.platform != "linux":
            return 0, f"{sys.platform} has no MADV_DONTNEED that zeroes pages"
        if not kv or not on_cpu:
            return 0, "it is not in main memory" if kv else "the engine shows no KV cache"
        before = psutil.Process().memory_info().rss
        for address, size in kv:
            start = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE  # whole pages only
            length = max(0, (address + size - start) // mmap.PAGESIZE * mmap.PAGESIZE)
            if length and LIBC.madvise(ctypes.c_void_p(start), ctypes.c_size_t(length), MADV_DONTNEED):
                return 0, f"madvise of {length} bytes failed ({os.strerror(ctypes.get_errno())})"
        return before - psutil.Process().memory_info().rss, ""

    def _swift_kv(self) -> tuple[list[tuple[int, int]], bool]:
        """Address and size of each storage of the KV cache (layers often share one); whether all are on the CPU."""
        tensors = kv_tensors(self.model_runner.kv_caches)
        storages = {(tensor.untyped_storage().data_ptr(), tensor.untyped_storage().nbytes()) for tensor in tensors}
        on_cpu = all(tensor.device.type == "cpu" for tensor in tensors)
        return sorted((address, size) for address, size in storages if size), on_cpu


def load_part(worker: Any, tensors: Iterator[tuple[str, Tensor]]) -> set[str] | None:
    """Load some tensors; returns the engine's parameters that were filled, None if the model does not report them."""
    with load_vllm().set_config(worker.vllm_config):
        loaded: set[str] | None = worker.model_runner.get_model().load_weights(tensors)
    return loaded


def kv_tensors(caches: Any) -> list[Tensor]:
    """All tensors of a runner's `kv_caches`, which holds tensors or lists of tensors (recurrent layers)."""
    if isinstance(caches, Tensor):
        return [caches]
    return [tensor for part in caches for tensor in kv_tensors(part)]
