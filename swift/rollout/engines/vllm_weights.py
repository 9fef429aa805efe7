"""How new weights get into a vLLM engine: what it must be sent, an update in parts, and LoRA adapters on disk.

vLLM may repack linear weights when it loads them, and then its parameters cannot be written; its layerwise reload takes
checkpoint tensors and repacks them again. An update is one such reload from the first bucket to the commit: a fused
matrix (q, k, v) that arrives in two parts waits for the second. Where the first reload proves that nothing is repacked,
later updates write the parameters where they lie; see `vllm_direct`.

What vLLM does not check is checked here, before anything is touched: a missing tensor is only logged by it, and a tied
head that is not sent stays as it was.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from swift.errors import EngineDead, SyncFailed
from swift.rollout.engines.expected_weights import ExpectedWeights
from swift.rollout.engines.vllm_direct import Layout, NoLayout
from swift.rollout.weight_sync.base import Ack, AdapterWeights, Bucket, StreamDigest, TensorInfo, WeightUpdate

SHARED_MEMORY = Path("/dev/shm")
"""Where tensors wait for the worker processes of one engine."""


class ReloadUpdate(WeightUpdate):
    """One layerwise reload in all workers of an engine.

    Args:
        engine: name of the receiver.
        manifest: checked before.
        version: of the policy.
        expected: of the engine's model.
        call: calls a method of every worker by name; the replies.
        apart: workers are other processes, tensors reach them as a file in shared memory.
        dtype: of the engine's weights, to say whether they were rounded.
        spoiled: called when the engine's weights are void from now on.
        done: called when all weights are in; resets caches, sets the version and may raise.
        learn: where the tensors should lie afterwards, to be proven by this update; None when that is of no use.
        learned: called with what came of it: "" or why not.
    """

    def __init__(
        self,
        engine: str,
        manifest: Sequence[TensorInfo],
        version: int,
        *,
        expected: ExpectedWeights,
        call: Callable[..., list[Any]],
        apart: bool,
        dtype: str,
        spoiled: Callable[[str], None],
        done: Callable[[int], None],
        learn: Layout | None = None,
        learned: Callable[[str], None] = lambda obstacle: None,
    ) -> None:
        super().__init__(engine, manifest, version)
        self._learn = learn
        self._learned = learned
        self._expected = expected
        self._call = call
        self._apart = apart
        self._dtype = dtype
        self._spoiled = spoiled
        self._done = done
        self._add_head = expected.lacks_head(manifest)
        self._began = time.monotonic()
        self._state = "waiting"  # -> loading -> done | given up

    @property
    def loading(self) -> bool:
        """Whether the model is taken apart at the moment and cannot run."""
        return self._state == "loading"

    def _deliver(self, bucket: Bucket) -> None:
        if self._state in ("done", "given up"):
            raise SyncFailed(f"weights: version {self.version} for {self.engine}: the update is over; begin anew")
        try:
            if self._state == "waiting":
                self._state = "loading"
                self._open()
            self._take(bucket)
        except Exception as error:
            raise self._failed(error) from error

    def _open(self) -> None:
        """Make the engine ready for the first bucket."""
        self._call("swift_begin_update")

    def _take(self, bucket: Bucket) -> None:
        """Bring a bucket into the engine."""
        if self._apart:
            self._send_file(bucket)
            return
        self._call("swift_load", bucket.tensors, self._copies(bucket), bucket.checksums())
        if self._learn is not None:
            self._learn.note(bucket.tensors, bucket.checksums())

    def _close(self) -> dict[str, Any]:
        """End the update in the engine; what it received, and what got nothing."""
        reply = _agreed(self._call("swift_end_update"))
        if self._learn is not None and not reply["missing"]:
            try:
                self._learn.prove()
            except NoLayout as error:
                self._learned(str(error))
            else:
                self._learned("")
        return reply

    def _copies(self, bucket: Bucket) -> dict[str, str]:
        """The tied head -> the embedding, when it does not come by itself and the embedding is in this bucket."""
        names = [name for name, _ in bucket.tensors if self._expected.is_embedding(name)]
        return dict.fromkeys([self._expected.tied], names[0]) if names and self._add_head else {}

    def _send_file(self, bucket: Bucket) -> None:
        from safetensors.torch import save_file

        stored: dict[str, Tensor] = {}
        order: list[tuple[str, str]] = []
        first: dict[tuple[Any, ...], str] = {}
        for name, tensor in bucket.tensors:  # a tied head is the same memory, which a file holds once
            place = first.setdefault((tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype), name)
            order.append((name, place))
            stored.setdefault(place, tensor.detach().cpu().contiguous())
        folder = SHARED_MEMORY if SHARED_MEMORY.is_dir() else None
        handle, path = tempfile.mkstemp(prefix="swift-bucket-", suffix=".safetensors", dir=folder)
        os.close(handle)
        try:
            save_file(stored, path)
            self._call("swift_load_file", path, order, self._copies(bucket))
        finally:
            Path(path).unlink()

    def _finish(self) -> Ack:
        try:
            reply = self._close()
            if reply["missing"]:
                raise ValueError(f"nothing arrived in {', '.join(reply['missing'][:3])}")
            self._done(self.version)
        except Exception as error:
            raise self._failed(error) from error
        self._state = "done"
        notes = ["the tied head was taken from the embedding"] if self._add_head else []
        return Ack(
            version=self.version,
            tensors=reply["tensors"],
            nbytes=reply["nbytes"],
            digest=reply["digest"],
            seconds=time.monotonic() - self._began,
            rounded=any(loses_bits(info.dtype, self._dtype) for info in self.manifest),
            note="; ".join(notes),
        )

    def abort(self) -> None:
        """See `WeightUpdate`; an update of which nothing was delivered leaves the engine as it was."""
        if self._state == "loading":
            self._spoiled(f"the update to version {self.version} was given up half-way")
        if self._state != "done":
            self._state = "given up"

    def _failed(self, error: Exception) -> SyncFailed | EngineDead:
        line = str(error).strip().splitlines()[0] if str(error).strip() else ""
        self._state = "given up"
        self._spoiled(f"the update to version {self.version} failed ({type(error).__name__}: {line})")
        if isinstance(error, SyncFailed | EngineDead):
            return error
        return SyncFailed(
            f"weights: version {self.version} for {self.engine}: {type(error).__name__}: {line}; rebuild the engine"
        )


class DirectUpdate(ReloadUpdate):
    """One update that is written into the engine's parameters where they lie.

    Args:
        layout: proven, and still in place; others as of `ReloadUpdate`.
    """

    def __init__(self, *args: Any, layout: Layout, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._layout = layout
        self._received = StreamDigest()
        self._count = self._bytes = 0

    def _open(self) -> None:
        if not self._layout.in_place():
            raise SyncFailed(f"weights: version {self.version} for {self.engine}: vLLM has moved its parameters")

    def _take(self, bucket: Bucket) -> None:
        self._layout.write(bucket.tensors)
        known = bucket.checksums()
        for name, tensor in bucket.tensors:
            self._received.add(name, tensor, known[name])
            self._count += 1
            self._bytes += tensor.numel() * tensor.element_size()

    def _close(self) -> dict[str, Any]:
        return {
            "tensors": self._count,
            "nbytes": self._bytes,
            "digest": self._received.hexdigest(),
            "missing": [],
        }


def _agreed(replies: list[dict[str, Any]]) -> dict[str, Any]:
    """The workers' common reply."""
    for reply in replies[1:]:
        if reply != replies[0]:
            raise ValueError(f"the workers disagree: {replies[0]}, {reply}")
    return replies[0]


def loses_bits(source: str, target: str) -> bool:
    """Whether numbers of one torch type are rounded when stored in another."""
    kept = {"float32": {"float32", "bfloat16", "float16"}, "bfloat16": {"bfloat16"}, "float16": {"float16"}}
    return source.startswith(("float", "bfloat")) and source not in kept.get(target, {target})


def save_adapter(adapter: AdapterWeights, folder: Path) -> str:
    """Write an adapter as peft does and read it back; the digest of what lies on disk now.

    Args:
        adapter: of the trainer; bits are kept.
        folder: new.
    """
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


@dataclass(slots=True)
class LoadedAdapter:
    """An adapter that the engine holds."""

    version: int
    number: int
    name: str
    folder: Path


class AdapterShelf:
    """The adapters of an engine on disk: a new number, name and folder for each version.

    vLLM keeps what it has loaded under a number, whatever lies at the path by then, so neither is used twice.
    """

    def __init__(self) -> None:
        self._root: Path | None = None
        self._count = 0
        self.held: list[LoadedAdapter] = []

    def add(self, adapter: AdapterWeights, version: int) -> tuple[LoadedAdapter, str]:
        """Write a version; it is not yet held. Its digest as read back comes second."""
        if self._root is None:
            self._root = Path(tempfile.mkdtemp(prefix="swift-adapters-"))
        self._count += 1
        name = f"policy-v{version}"
        if any(one.name == name for one in self.held):
            name = f"{name}.{self._count}"
        loaded = LoadedAdapter(version, self._count, name, self._root / f"{self._count}-{name}")
        return loaded, save_adapter(adapter, loaded.folder)

    def discard(self, adapter: LoadedAdapter) -> None:
        """Remove one from disk, held or not."""
        self.held = [one for one in self.held if one.number != adapter.number]
        shutil.rmtree(adapter.folder, ignore_errors=True)

    def close(self) -> None:
        """Nothing remains on disk."""
        if self._root is not None:
            shutil.rmtree(self._root, ignore_errors=True)
        self._root = None
        self.held = []
