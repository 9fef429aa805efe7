"""What runs inside a vLLM worker: vLLM adds this class to its worker, and its methods are called by name.

The worker may live in this process (then tensors are handed over as they are) or be one of several tensor-parallel
processes (then they come in a broadcast, or as a file in shared memory). All names start with `swift_`, so that they
can clash with nothing of vLLM.
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

from swift.rollout.engines.vllm.single_copy import NotShareable, SingleCopy
from swift.rollout.engines.vllm.versions import load_vllm, pack_experts_anew
from swift.rollout.weights.base import Live
from swift.rollout.weights.broadcast import Announcement, BroadcastReceiver, Entry, unpack
from swift.rollout.weights.digest import StreamDigest

MADV_DONTNEED = 4
"""Linux: pages are given back at once and read as zeros when touched again."""
LIBC = ctypes.CDLL(None, use_errno=True)
"""The C library of this process."""


class WorkerExtension:
    """Weights in parts, one copy with the trainer, and KV memory that can be given back on a CPU."""

    vllm_config: Any
    model_runner: Any
    device: Any
    rank: int
    _swift_receiver: BroadcastReceiver | None = None

    def swift_begin_update(self) -> None:
        """All weights will come anew; until `swift_end_update` the model cannot run."""
        lora = getattr(self, "lora_config", None) or getattr(self.vllm_config, "lora_config", None)
        names = (name for name, _ in self.model_runner.get_model().named_parameters())
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
            tensors: as sent; they are counted and digested while the model takes them.
            copies: further name -> name among `tensors`: a tied head that does not come by itself. Not counted.
            known: checksums by name, where sender and receiver look at the same memory; else they are computed here.
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
        """The same from a file of one run of bytes with its table of contents; see `broadcast.pack`."""
        self.swift_load(unpack(torch.from_numpy(np.fromfile(path, dtype=np.uint8)), entries), copies)

    def swift_receive(self, header: dict[str, Any], copies: Mapping[str, str]) -> None:
        """The same out of a broadcast, in which each worker takes part; see `BroadcastSender.announce`."""
        if self._swift_receiver is None:
            self._swift_receiver = BroadcastReceiver(self.device)
        bucket = self._swift_receiver.receive(Announcement([], header=header).for_rank(self.rank))
        self.swift_load(bucket.tensors, copies)

    def swift_end_update(self) -> dict[str, Any]:
        """Finish; what was received, and which of the engine's parameters got nothing."""
        runner = self.model_runner
        with load_vllm().set_config(self.vllm_config):
            load_vllm().end_reload(runner.get_model(), runner.model_config)
        reset = getattr(runner, "reset_lora_state", None)  # 0.26 lets adapters survive
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

    def swift_share(self, live: Live, tied: str, embedding: str) -> SingleCopy | str:
        """Make the trainer's tensors views of this worker's, for a caller in the same process; or why not."""
        config = self.vllm_config.model_config
        if config.quantization is not None:
            return "its weights are quantised"
        if getattr(config, "use_mla", False):
            return "latent attention keeps products of its weights"
        try:
            return SingleCopy(self.model_runner.get_model(), live, tied=tied, embedding=embedding)
        except NotShareable as error:
            return str(error)

    def swift_segments(self) -> str:
        """What the names of this worker's shared memory begin with."""
        return os.environ.get("VLLM_DIST_IDENT", "")

    def swift_kv_bytes(self) -> int:
        """Size of the KV cache."""
        return sum(size for _, size in self._swift_kv()[0])

    def swift_release_kv(self) -> tuple[int, str]:
        """Give the pages of the KV cache back to the system; bytes by which this process became smaller, and why none.

        Nothing may be cached or running. The pages read as zeros afterwards, like a new cache.
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
        storages = {(one.untyped_storage().data_ptr(), one.untyped_storage().nbytes()) for one in tensors}
        return sorted(one for one in storages if one[1]), all(one.device.type == "cpu" for one in tensors)


def load_part(worker: Any, tensors: Iterator[tuple[str, Tensor]]) -> set[str] | None:
    """Load some tensors; the names of the engine's own parameters that they filled, if the model says so."""
    with load_vllm().set_config(worker.vllm_config):
        loaded: set[str] | None = worker.model_runner.get_model().load_weights(tensors)
    return loaded


def kv_tensors(caches: Any) -> list[Tensor]:
    """All tensors of a runner's `kv_caches`, which holds tensors or, for recurrent layers, lists of them."""
    if isinstance(caches, Tensor):
        return [caches]
    return [tensor for part in caches for tensor in kv_tensors(part)]
