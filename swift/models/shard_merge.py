"""Adapters merged into the files of their base model, which is never loaded.

A module tree without data carries each adapter in turn, and PEFT's layers say which tensors an adapter changes, and to
what (`swift.models.checkpoint_tensors`). Other tensors are copied as they are. In memory are the adapters, the tensors
of one output file, and one changed tensor in float32. Tensors go by their names in the tree; those that the files
store in another form (experts one by one, say) by their keys in the files, and no adapter can change them.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from swift.errors import ConfigError, unusable
from swift.models.adapter_merge import check_start, load_adapter
from swift.models.checkpoint_tensors import CheckpointTensor, checkpoint_tensors, own_parameters
from swift.models.policy import HEADS, Head, load_config, quiet_loading
from swift.models.source import ModelSource, head_of, weight_files
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
        head = head_of(source.base, *source.adapters)
        tree = self._tree(head)
        self.config = load_config(source.base, args)
        self.config.architectures = [type(tree).__name__]
        if head:
            self.config.num_labels = tree.config.num_labels
        if dtype is not None:
            self.config.dtype = dtype
        self._tied = tree._tied_weights_keys or {} if self.config.get_text_config().tie_word_embeddings else {}
        self._files = _stored(tree, source.base)
        self._adapters: list[_Adapter] = []
        for folder in source.adapters:
            self._adapters.append(self._adapter(folder))
        self._described = self._describe(set(tree.state_dict()) if head else set(self._files), dtype)

    def write(self, folder: Path, file_bytes: int = FILE_BYTES) -> None:
        """Writes the safetensors files, and their index if there are several. Raises OSError: it cannot."""
        from huggingface_hub import split_torch_state_dict_into_shards
        from safetensors.torch import save_file

        names = {self._files[name].key if name in self._files else name: name for name in self._described}
        described = {key: self._described[name] for key, name in names.items()}
        plan = split_torch_state_dict_into_shards(described, max_shard_size=file_bytes)
        for file, keys in plan.filename_to_tensors.items():
            tensors = {key: self._read(names[key]).to(described[key].dtype).contiguous() for key in keys}
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
        config.get_text_config().tie_word_embeddings = config.tie_word_embeddings = False
        kind, _, labels = HEADS[head]
        if head != head_of(self._base):
            config.num_labels = labels
        with torch.device("meta"), quiet_loading(), unusable(f"--model: {self._base}: cannot be merged"):
            return getattr(transformers, kind).from_config(
                config, dtype=torch.float32, trust_remote_code=self._args.trust_remote_code
            )

    def _adapter(self, folder: Path) -> _Adapter:
        from peft import PeftConfig, get_peft_model
        from safetensors.torch import load_file

        with adapter_errors(folder):
            config: Any = PeftConfig.from_pretrained(str(folder))
            check_start(config.to_dict())
            if hasattr(config, "init_lora_weights"):
                config.init_lora_weights = True
            tree = self._tree(head_of(self._base, folder))
            policy = get_peft_model(tree, config, low_cpu_mem_usage=True)
            load_adapter(policy, load_file(folder / "adapter_model.safetensors"))
        changed = [one for one in checkpoint_tensors(policy) if not all(source.is_meta for source in one.sources)]
        adapter = _Adapter({one.name: one for one in changed}, own_parameters(policy))
        known = {*self._files, *self._tied}.union(*(one.changes for one in self._adapters))
        wanted = {adapter.names[id(source)] for one in changed for source in one.sources if source.is_meta}
        if lacking := sorted(wanted - known):
            raise ConfigError(
                f"--adapters: {folder}: {lacking[0]}: the model's files store it in another form, into which nothing "
                "can be merged"
            )
        return adapter

    def _describe(self, names: set[str], dtype: torch.dtype | None) -> dict[str, Tensor]:
        """The merged model's tensors without data: `names` as far as there are files, and what adapters bring."""
        described = {name: stored.described() for name, stored in self._files.items() if name in names}
        usual = Counter(one.dtype for one in described.values()).most_common(1)[0][0]
        changes = [change for adapter in self._adapters for change in adapter.changes.values()]
        changed = {change.name for change in changes}
        if apart := [pair for pair in self._tied.items() if changed.intersection(pair)]:
            self.config.get_text_config().tie_word_embeddings = self.config.tie_word_embeddings = False
        for head, embedding in apart:
            described.setdefault(head, described[embedding])
            described.setdefault(embedding, described[head])
        for change in changes:
            described.setdefault(change.name, torch.empty(change.shape, dtype=usual, device="meta"))
        return {name: one.to(dtype) if one.is_floating_point() and dtype else one for name, one in described.items()}

    def _read(self, name: str, depth: int | None = None) -> Tensor:
        """A tensor with the first `depth` adapters merged; all of them with None."""
        for at in reversed(range(len(self._adapters) if depth is None else depth)):
            adapter = self._adapters[at]
            if change := adapter.changes.get(name):
                return change.read(
                    lambda one: self._read(adapter.names[id(one)], at).float() if one.is_meta else one  # noqa: B023
                )
        return (self._files.get(name) or self._files[self._tied[name]]).read()


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


def _stored(tree: Any, folder: Path) -> dict[str, _Stored]:
    """The tensors of a folder's files, by their names in the tree."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, rename_source_key

    mapping, wanted, stored = get_model_conversion_mapping(tree), tree.state_dict(), {}
    converters = [one for one in mapping if isinstance(one, WeightConverter)]
    renamings = [one for one in mapping if not isinstance(one, WeightConverter)]
    for file in weight_files(folder):
        with safe_open(file, framework="pt") as tensors:
            for key in tensors.keys():  # noqa: SIM118 - not a dict
                name, _ = rename_source_key(key, renamings, converters, tree.base_model_prefix, wanted)
                converted = any(converter.rename_source_key(key)[1] for converter in converters)
                stored[key if converted else name] = _Stored(file, key)
    return stored
