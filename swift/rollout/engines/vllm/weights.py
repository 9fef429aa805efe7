"""Buckets and LoRA adapters for a vLLM engine; an update is one layerwise reload (`VLLMEngine._load`).

vLLM may repack linear weights when it loads them, and then its parameters cannot be written directly. Its layerwise
reload takes checkpoint tensors and repacks them; a fused matrix (q, k, v) is loaded when all its parts have arrived.

vLLM only logs missing tensors, and keeps the old values of a tied head that is not sent. So swift checks the manifest
before the reload.

Each version of a LoRA adapter gets a new id, name and folder, because vLLM caches adapters by their id and does not
read the folder again. The two newest are held.
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
"""Folder of the files that carry buckets to the worker processes of an engine."""


@contextlib.contextmanager
def packed_file(bucket: Bucket) -> Iterator[tuple[str, list[Entry]]]:
    """Context with a file that holds a bucket for the worker processes: its path and table of contents."""
    flat, entries = pack(bucket, "cpu")
    folder = SHARED_MEMORY if SHARED_MEMORY.is_dir() else None
    with tempfile.NamedTemporaryFile(prefix="swift-bucket-", dir=folder) as file:
        flat.numpy().tofile(file.name)
        yield file.name, entries


def save_adapter(adapter: AdapterWeights, folder: Path) -> str:
    """Write an adapter into a new folder in PEFT's format; returns the digest of what is read back from disk."""
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
    """An adapter that the engine holds. request: its `LoRARequest`, with name, id and folder."""

    version: int
    request: Any


class Adapters:
    """The adapters of one engine, oldest first.

    make_request: vLLM's `LoRARequest`; called with keywords, as its positions differ between versions.
    """

    def __init__(self, make_request: Callable[..., Any]) -> None:
        self._make_request = make_request
        self._root: Path | None = None
        self._count = 0
        self.held: list[LoadedAdapter] = []
        self.current: LoadedAdapter | None = None

    def load(self, llm: Any, adapter: AdapterWeights, version: int, *, in_use: Collection[int | None]) -> Ack:
        """Load a version and sample with it from now on.

        in_use: versions of paused requests, which remain loaded. After SyncFailed the previous adapter stays current.
        """
        self._root = self._root or Path(tempfile.mkdtemp(prefix="swift-adapters-"))
        self._count += 1
        folder = self._root / f"{self._count}-policy-v{version}"
        where = f"weights: adapter version {version} for vllm"
        request = self._make_request(lora_name=folder.name, lora_int_id=self._count, lora_path=str(folder))
        try:
            digest = save_adapter(adapter, folder)
            if digest != adapter.digest():
                raise SyncFailed(f"{where}: what was written differs from what was sent")
            with same_randomness():
                llm.add_lora(request)
            if self._count not in llm.list_loras():
                raise SyncFailed(f"{where}: vLLM does not list it after loading it")
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
        """Remove all adapters; the engine samples with the base weights."""
        for adapter in list(self.held):
            self._remove(llm, adapter)
        self.current = None

    def close(self) -> None:
        """Remove all files."""
        if self._root is not None:
            shutil.rmtree(self._root, ignore_errors=True)
        self._root, self.held, self.current = None, [], None
