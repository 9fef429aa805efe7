"""How new weights get into a vLLM engine: one layerwise reload for each update (`VLLMEngine._load`).

vLLM may repack linear weights when it loads them, and then its parameters cannot be written; its layerwise reload takes
checkpoint tensors and repacks them again. A fused matrix (q, k, v) that arrives in two parts waits for the second.

What vLLM does not check is checked before anything is touched: a missing tensor is only logged by it, and a tied head
that is not sent stays as it was.

A LoRA adapter gets a new number, name and folder for each version, because vLLM keeps what it has loaded under a
number, whatever lies at the path by then; the two newest are held.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import tempfile
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from swift.errors import SyncFailed, first_line
from swift.rollout.engines.process import same_randomness
from swift.rollout.engines.vllm.settings import HELD_ADAPTERS
from swift.rollout.weights.base import Ack, AdapterWeights, Bucket
from swift.rollout.weights.broadcast import Entry, pack

SHARED_MEMORY = Path("/dev/shm")
"""Where tensors wait for the worker processes of one engine."""


@contextlib.contextmanager
def packed_file(bucket: Bucket) -> Iterator[tuple[str, list[Entry]]]:
    """A file that holds a bucket for the worker processes: its path and its table of contents."""
    flat, entries = pack(bucket, "cpu")
    folder = SHARED_MEMORY if SHARED_MEMORY.is_dir() else None
    with tempfile.NamedTemporaryFile(prefix="swift-bucket-", dir=folder) as file:
        flat.numpy().tofile(file.name)
        yield file.name, entries


def save_adapter(adapter: AdapterWeights, folder: Path) -> str:
    """Write an adapter into a new folder as peft does and read it back; the digest of what is on disk now."""
    from safetensors.torch import load_file, save_file

    folder.mkdir(parents=True)
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in adapter.tensors.items()}
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(adapter.config))
    return AdapterWeights(adapter.config, load_file(folder / "adapter_model.safetensors")).digest()


def adapter_rank(adapter: AdapterWeights) -> int:
    """The largest rank in an adapter."""
    ranks = [int(tensor.shape[0]) for name, tensor in adapter.tensors.items() if ".lora_A." in name]
    return max(ranks, default=int(adapter.config.get("r", 0)))


@dataclass(frozen=True, slots=True)
class LoadedAdapter:
    """An adapter that the engine holds. request: vLLM's for it, with name, number and folder."""

    version: int
    request: Any


class Adapters:
    """The adapters of one engine, oldest first.

    make_request: vLLM's `LoRARequest`; its fields differ between versions, so they are given by name.
    """

    def __init__(self, make_request: Callable[..., Any]) -> None:
        self._make_request = make_request
        self._root: Path | None = None
        self._count = 0
        self.held: list[LoadedAdapter] = []
        self.current: LoadedAdapter | None = None

    def load(self, llm: Any, adapter: AdapterWeights, version: int, *, in_use: Collection[int | None]) -> Ack:
        """Load a version and sample with it from now on; those `in_use` by paused requests are held as well.

        After SyncFailed the former one stays.
        """
        self._root = self._root or Path(tempfile.mkdtemp(prefix="swift-adapters-"))
        self._count += 1
        folder, where = self._root / f"{self._count}-policy-v{version}", f"weights: adapter version {version} for vllm"
        request = self._make_request(lora_name=folder.name, lora_int_id=self._count, lora_path=str(folder))
        try:
            digest = save_adapter(adapter, folder)
            if digest != adapter.digest():
                raise SyncFailed(f"{where}: what was written differs from what was sent")
            with same_randomness():
                llm.add_lora(request)
            if self._count not in llm.list_loras():
                raise SyncFailed(f"{where}: it is not among the loaded ones afterwards")
        except BaseException as error:
            shutil.rmtree(folder, ignore_errors=True)
            if not isinstance(error, Exception) or isinstance(error, SyncFailed):
                raise
            raise SyncFailed(f"{where}: {type(error).__name__}: {first_line(error)}") from error
        self.current = LoadedAdapter(version, request)
        self.held.append(self.current)
        for old in self.held[:-HELD_ADAPTERS]:
            if old.version not in in_use:
                self._remove(llm, old)
        return Ack(version, len(adapter.tensors), adapter.nbytes, digest)

    def _remove(self, llm: Any, adapter: LoadedAdapter) -> None:
        llm.remove_lora(adapter.request.lora_int_id)
        self.held.remove(adapter)
        shutil.rmtree(adapter.request.lora_path, ignore_errors=True)

    def drop(self, llm: Any) -> None:
        """Sample with the base weights again; nothing is held."""
        for adapter in list(self.held):
            self._remove(llm, adapter)
        self.current = None

    def close(self) -> None:
        """Nothing remains on disk."""
        if self._root is not None:
            shutil.rmtree(self._root, ignore_errors=True)
        self._root, self.held, self.current = None, [], None
