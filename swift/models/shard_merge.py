"""Adapters merged into the files of their base model, which is never loaded.

Each adapter in turn is loaded onto a module tree without data, and PEFT's layers give the tensors that it changes, and
their new values (`swift.models.checkpoint_tensors`). Other tensors are copied as they are. In memory are the adapters,
the tensors of one output file, and one changed tensor in float32. Tensors are named as in the tree. Tensors that
loading fuses into one (experts) are named by their keys in the files, and are fused, merged and split again.
"""

from __future__ import annotations

import copy
import json
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from swift.errors import ConfigError, unusable
from swift.models.adapter_config import check_finite
from swift.models.adapter_merge import check_start, load_adapter
from swift.models.checkpoint_tensors import CheckpointTensor, as_saved, checkpoint_tensors, own_parameters
from swift.models.multimodal import seeing
from swift.models.policy import Head, class_of, load_config, quiet_loading, set_labels
from swift.models.source import ModelSource, head_of, labels_of, weight_files
from swift.models.tuners import adapter_errors

FILE_BYTES = 2 << 30
"""Largest output file, unless one tensor is larger."""


@dataclass(frozen=True, slots=True)
class _Adapter:
    """What an adapter changes, by name. names: of the tree's parameters, by identity."""

    changes: dict[str, CheckpointTensor]
    names: dict[int, str]


class MergedModel:
    """The model of `source` with its adapters merged, in order.

    Args:
        source: base and adapters.
        args: settings of the model.
        dtype: of its tensors; None keeps the types of the base's files.

    Attributes:
        config: of the merged model. A head that was trained apart from the embedding is not tied to it any more.

    Raises:
        ConfigError: a quantised base, or an adapter that does not fit or cannot be merged.
    """

    def __init__(self, source: ModelSource, args: Any, dtype: torch.dtype | None = None) -> None:
        self._base, self._args = source.base, args
        self._labels = labels_of(source.base, *source.adapters)
        head = head_of(source.base, *source.adapters)
        tree = self._tree(head)
        self.config = load_config(source.base, args)
        self.config.architectures = [type(tree).__name__]
        if head:
            self.config.num_labels, self.config.problem_type = tree.config.num_labels, tree.config.problem_type
        if dtype is not None:
            self.config.dtype = dtype
        self._tied = tree._tied_weights_keys or {} if seeing(self.config).tie_word_embeddings else {}
        self._files, self._fused = _stored(tree, source.base)
        self._adapters: list[_Adapter] = []
        for folder in source.adapters:
            self._adapters.append(self._adapter(folder))
        changed = {
            name: fused for name, fused in self._fused.items() if any(name in each.changes for each in self._adapters)
        }
        self._parts = {key: fused for fused in changed.values() for key in fused.parts}
        self._apart: tuple[str, dict[str, Tensor]] = ("", {})  # the fused tensor that was taken apart last
        own = {
            key for name in tree.state_dict() for key in (self._fused[name].parts if name in self._fused else [name])
        }
        self._described = self._describe(own if head else set(self._files), dtype)

    def write(self, folder: Path, file_bytes: int = FILE_BYTES) -> None:
        """Writes the safetensors files, and their index if there are several.

        Raises:
            ConfigError: a merged weight is not finite.
            OSError: it cannot write.
        """
        from huggingface_hub import split_torch_state_dict_into_shards
        from safetensors.torch import save_file

        order = sorted(self._described, key=lambda name: self._parts[name].name if name in self._parts else "")
        names = {self._files[name].key if name in self._files else name: name for name in order}
        described = {key: self._described[name] for key, name in names.items()}
        plan = split_torch_state_dict_into_shards(described, max_shard_size=file_bytes)
        for file, keys in plan.filename_to_tensors.items():
            tensors = {key: self._merged(names[key], described[key].dtype) for key in keys}
            save_file(tensors, folder / file, {"format": "pt"})
            del tensors  # before the next ones are made
        if plan.is_sharded:
            index = {"metadata": plan.metadata, "weight_map": plan.tensor_to_filename}
            (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")

    def _tree(self, head: Head | None) -> Any:
        """The base without data, each parameter one of its own."""
        import transformers

        config = load_config(self._base, self._args)
        if hasattr(config, "quantization_config"):
            raise ConfigError(
                f"--model: {self._base}: holds quantised weights, into which no adapter can be merged; give the model "
                "that it was made from"
            )
        config.get_text_config().tie_word_embeddings = seeing(config).tie_word_embeddings = False
        kind = class_of(config, self._args, head)
        if head != head_of(self._base):
            set_labels(config, head, self._labels)
        with torch.device("meta"), quiet_loading(), unusable(f"--model: {self._base}: cannot be merged"):
            return getattr(transformers, kind).from_config(
                config, dtype=torch.float32, trust_remote_code=self._args.trust_remote_code
            )

    def _adapter(self, folder: Path) -> _Adapter:
        from peft import PeftConfig, get_peft_model
        from safetensors.torch import load_file

        with adapter_errors(folder):
            check_finite(folder)
            config: Any = PeftConfig.from_pretrained(str(folder))
            check_start(config.to_dict())
            if hasattr(config, "init_lora_weights"):
                config.init_lora_weights = True
            tree = self._tree(head_of(self._base, folder))
            policy = get_peft_model(tree, config, low_cpu_mem_usage=True)
            load_adapter(policy, load_file(folder / "adapter_model.safetensors"))
        changed = [
            tensor for tensor in checkpoint_tensors(policy) if not all(source.is_meta for source in tensor.sources)
        ]
        adapter = _Adapter({tensor.name: tensor for tensor in changed}, own_parameters(policy))
        known = {*self._files, *self._fused, *self._tied}.union(*(other.changes for other in self._adapters))
        wanted = {adapter.names[id(source)] for tensor in changed for source in tensor.sources if source.is_meta}
        if lacking := sorted(wanted - known):
            raise ConfigError(
                f"--adapters: {folder}: {lacking[0]}: the model's files store it in another form, into which nothing "
                "can be merged"
            )
        return adapter

    def _describe(self, names: set[str], dtype: torch.dtype | None) -> dict[str, Tensor]:
        """The merged model's tensors without data: `names` as far as there are files, and what adapters bring."""
        described = {name: stored.described() for name, stored in self._files.items() if name in names}
        usual = Counter(tensor.dtype for tensor in described.values()).most_common(1)[0][0]
        changes = [change for adapter in self._adapters for change in adapter.changes.values()]
        changed = {change.name for change in changes}
        if apart := [pair for pair in self._tied.items() if changed.intersection(pair)]:
            self.config.get_text_config().tie_word_embeddings = seeing(self.config).tie_word_embeddings = False
        for head, embedding in apart:
            described.setdefault(head, described[embedding])
            described.setdefault(embedding, described[head])
        for change in changes:
            if change.name in self._fused:
                continue  # described by its parts
            described.setdefault(change.name, torch.empty(change.shape, dtype=usual, device="meta"))
        return {
            name: tensor.to(dtype) if tensor.is_floating_point() and dtype else tensor
            for name, tensor in described.items()
        }

    def _merged(self, name: str, dtype: torch.dtype) -> Tensor:
        """A tensor as it is written."""
        if fused := self._parts.get(name):
            if self._apart[0] != fused.name:
                self._apart = ("", {})
                self._apart = (fused.name, fused.taken_apart(self._read(fused.name)))
            tensor = self._apart[1][name]
        elif any(name in adapter.changes for adapter in self._adapters) or name not in self._files:
            tensor = self._read(name)
        else:
            return self._files[name].read().to(dtype)
        tensor = tensor.to(dtype).contiguous()
        if not bool(tensor.isfinite().all()):
            raise ConfigError(
                f"--adapters: {name}: merging gives values that are not finite ({str(dtype).removeprefix('torch.')}); "
                "check lora_alpha and the adapter's weights, or give another --torch_dtype"
            )
        return tensor

    def _read(self, name: str, depth: int | None = None) -> Tensor:
        """A tensor with the first `depth` adapters merged; all of them with None."""
        for at in reversed(range(len(self._adapters) if depth is None else depth)):
            adapter = self._adapters[at]
            if change := adapter.changes.get(name):
                return change.read(
                    lambda source: self._read(adapter.names[id(source)], at).float() if source.is_meta else source  # noqa: B023
                )
        return (self._fused.get(name) or self._files.get(name) or self._files[self._tied[name]]).read()


@dataclass(frozen=True, slots=True)
class _Stored:
    """A tensor in a file."""

    file: Path
    key: str

    def read(self) -> Tensor:
        with safe_open(self.file, framework="pt") as tensors:
            found: Tensor = tensors.get_tensor(self.key)
        return found

    def described(self) -> Tensor:
        """Its type and shape, without data."""
        with safe_open(self.file, framework="pt") as tensors:
            found = tensors.get_slice(self.key)
            shape = found.get_shape()
            part = found[:0] if shape else tensors.get_tensor(self.key)
        return torch.empty(shape, dtype=part.dtype, device="meta")


@dataclass(frozen=True, slots=True)
class _Fused:
    """A tensor of the tree that loading makes of several in the files.

    parts: by their keys, each with the pattern of `converter` (transformers') that it fits.
    """

    tree: Any
    name: str
    converter: Any
    parts: dict[str, tuple[str, _Stored]] = field(default_factory=dict)

    def read(self) -> Tensor:
        from transformers.core_model_loading import dot_natural_key

        converter = copy.deepcopy(self.converter)
        for key in sorted(self.parts, key=dot_natural_key):
            pattern, stored = self.parts[key]
            converter.add_tensor(self.name, key, pattern, stored.read())
        found = converter.convert(self.name, model=self.tree, config=self.tree.config)[self.name]
        tensor: Tensor = found[0] if isinstance(found, list) else found
        return tensor

    def taken_apart(self, tensor: Tensor) -> dict[str, Tensor]:
        """The parts that make `tensor`."""
        return {key: tensor.clone() for key, tensor in as_saved(self.tree, {self.name: tensor}).items()}


def _stored(tree: Any, folder: Path) -> tuple[dict[str, _Stored], dict[str, _Fused]]:
    """The tensors of a folder's files: by their names in the tree, or keys; and what some of them make together."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, rename_source_key

    mapping, wanted = get_model_conversion_mapping(tree), tree.state_dict()
    converters = [conversion for conversion in mapping if isinstance(conversion, WeightConverter)]
    renamings = [conversion for conversion in mapping if not isinstance(conversion, WeightConverter)]
    by_pattern = {pattern: converter for converter in reversed(converters) for pattern in converter.source_patterns}
    stored: dict[str, _Stored] = {}
    fused: dict[str, _Fused] = {}
    for file in weight_files(folder):
        with safe_open(file, framework="pt") as tensors:
            for key in tensors.keys():  # noqa: SIM118 - not a dict
                name, pattern = rename_source_key(key, renamings, converters, tree.base_model_prefix, wanted)
                part = stored[name if pattern is None else key] = _Stored(file, key)
                if pattern is not None:
                    fused.setdefault(name, _Fused(tree, name, by_pattern[pattern])).parts[key] = (pattern, part)
    return stored, {name: tensor for name, tensor in fused.items() if _is_whole(tensor, wanted)}


def _is_whole(fused: _Fused, wanted: dict[str, Tensor]) -> bool:
    """Whether taking it apart gives what it is made of."""
    return fused.name in wanted and as_saved(fused.tree, {fused.name: wanted[fused.name]}).keys() == fused.parts.keys()
