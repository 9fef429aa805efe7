"""How new weights get into a vLLM engine: what it must be sent, an update in parts, and LoRA adapters on disk.

vLLM repacks linear weights when it loads them, so its parameters cannot be written; its layerwise reload takes
checkpoint tensors and repacks them again. An update is one such reload from the first bucket to the commit: a fused
matrix (q, k, v) that arrives in two parts waits for the second. What vLLM does not check is checked here, before
anything is touched: a missing tensor is only logged by it, and a tied head that is not sent stays as it was.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from swift.errors import ConfigError, EngineDead, SyncFailed, nearest
from swift.rollout.weight_sync.base import Ack, AdapterWeights, Bucket, TensorInfo, WeightUpdate

HEAD = "lm_head.weight"
"""Name of the output layer in checkpoints."""
NOT_WEIGHTS = (r"rotary_emb\.inv_freq$", r"\.attn\.(masked_)?bias$")
"""Tensors that old checkpoints carry and no model reads."""
SHARED_MEMORY = Path("/dev/shm")
"""Where tensors wait for the worker processes of one engine."""


@dataclass(frozen=True, slots=True)
class ExpectedWeights:
    """What a complete update of an engine's model consists of.

    shapes: by name, as in the checkpoint that the engine was built from. tied: the head's name when it shares the
    embedding's weights and may be left out, or "". embedding: name of the embedding. prefix: of the decoder, which
    some checkpoints write and some do not.
    """

    shapes: dict[str, tuple[int, ...]]
    tied: str = ""
    embedding: str = ""
    prefix: str = ""

    @classmethod
    def of_checkpoint(cls, folder: str | Path, *, model_class: Any, tied: bool) -> ExpectedWeights:
        """Reads names and shapes of a folder's safetensors files, no data.

        Args:
            folder: of the checkpoint.
            model_class: transformers' class of the model, or None; says what it ignores in checkpoints.
            tied: the config ties the head to the embedding.

        Raises:
            ConfigError: the folder has no safetensors files.
        """
        from safetensors import safe_open

        files = sorted(Path(folder).glob("*.safetensors"))
        if not files:
            raise ConfigError(f"--model: {folder}: has no safetensors files; weights cannot be synchronised without")
        ignored = [*NOT_WEIGHTS, *(getattr(model_class, "_keys_to_ignore_on_load_unexpected", None) or [])]
        shapes: dict[str, tuple[int, ...]] = {}
        for file in _of_index(Path(folder), files):
            with safe_open(file, framework="pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118 - not a dict
                    if not any(re.search(pattern, name) for pattern in ignored):
                        shapes[name] = tuple(tensors.get_slice(name).get_shape())
        prefix = getattr(model_class, "base_model_prefix", "") or ""
        embedding = _embedding(shapes) if tied else ""
        head = HEAD if tied and embedding else ""
        if head:
            shapes.setdefault(head, shapes[embedding])
        return cls(shapes, head, embedding, f"{prefix}." if prefix else "")

    @property
    def numbers(self) -> int:
        """Parameters of the model, a tied head not counted twice."""
        return sum(_count(shape) for name, shape in self.shapes.items() if name != self.tied)

    def check(self, manifest: Sequence[TensorInfo]) -> list[str]:
        """Why an update with this manifest would not be complete and fitting, one line each; [] when it would."""
        wanted = {self._key(name): shape for name, shape in self.shapes.items()}
        problems, seen = [], set()
        for info in manifest:
            key = self._key(info.name)
            if key in seen:
                problems.append(f"{info.name} comes twice")
            elif key not in wanted:
                near = nearest(info.name, self.shapes, 1)
                problems.append(f"{info.name} is not one of the model's" + (f" (nearest: {near[0]})" if near else ""))
            elif wanted[key] != info.shape:
                problems.append(f"{info.name} has shape {list(info.shape)}, the engine's {list(wanted[key])}")
            seen.add(key)
        missing = [name for name in self.shapes if self._key(name) not in seen and name != self.tied]
        return problems + [f"{name} is missing" for name in missing]

    def check_adapter(self, adapter: AdapterWeights) -> list[str]:
        """What of an adapter the engine would ignore or misread without a word, one line each; [] when nothing.

        An adapter on modules that checkpoints store apart (experts) is checked by name only.
        """
        shapes = {self._key(name): shape for name, shape in self.shapes.items()}
        problems = []
        for name, tensor in adapter.tensors.items():
            found = re.fullmatch(r"base_model\.model\.(.+)\.lora_([AB])\.weight", name)
            if found is None:
                problems.append(f"{name} is not a low-rank matrix of a linear layer, the only thing that vLLM takes")
                continue
            module, side = self._key(found[1]), found[2]
            whole = shapes.get(f"{module}.weight")
            if whole is None:
                if not any(other.startswith(f"{module}.") for other in shapes):
                    problems.append(f"{name} belongs to no layer of the engine's model")
            elif tensor.dim() == 2 and (tensor.shape[1] if side == "A" else tensor.shape[0]) not in whole:
                problems.append(f"{name} has shape {list(tensor.shape)}, its layer {list(whole)}")
        return problems

    def lacks_head(self, manifest: Sequence[TensorInfo]) -> bool:
        """Whether the tied head must be made from the embedding, as it does not come by itself."""
        return bool(self.tied) and all(info.name != self.tied for info in manifest)

    def is_embedding(self, name: str) -> bool:
        """Whether this is the tensor that the head is tied to."""
        return self._key(name) == self._key(self.embedding)

    def _key(self, name: str) -> str:
        return name.removeprefix(self.prefix)


def _of_index(folder: Path, files: list[Path]) -> list[Path]:
    """The files that an index names; folders sometimes hold the same weights twice."""
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        single = folder / "model.safetensors"
        return [single] if single.exists() else files
    return sorted({folder / name for name in json.loads(index.read_text())["weight_map"].values()})


def _embedding(shapes: dict[str, tuple[int, ...]]) -> str:
    names = [name for name in shapes if re.search(r"(^|\.)(embed_tokens|wte|word_embeddings|embed_in)\.weight$", name)]
    return names[0] if len(names) == 1 else ""


def _count(shape: tuple[int, ...]) -> int:
    total = 1
    for size in shape:
        total *= size
    return total


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
    ) -> None:
        super().__init__(engine, manifest, version)
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
                self._call("swift_begin_update")
            if self._apart:
                self._send_file(bucket)
            else:
                self._call("swift_load", bucket.tensors, self._copies(bucket))
        except Exception as error:
            raise self._failed(error) from error

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
            replies = self._call("swift_end_update")
            reply = _agreed(replies)
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
