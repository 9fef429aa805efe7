"""The tensors of a complete weight update of an engine's model, read from the checkpoint of the engine.

Engines do not check updates: a missing tensor is at best logged. So manifests are checked before an update.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from swift.errors import ConfigError, first_line, nearest
from swift.models.activation_memory import layer_configs
from swift.models.multimodal import NOT_LOADED
from swift.models.source import weight_files
from swift.rollout.engines.spec import EngineSpec
from swift.rollout.weights.base import AdapterWeights, TensorInfo, WeightSource

HEAD = "lm_head.weight"
"""Name of the output layer in checkpoints."""
NOT_WEIGHTS = (r"rotary_emb\.inv_freq$", r"\.attn\.(masked_)?bias$", *(rf"^{name}\." for name in NOT_LOADED))
"""Tensors of old checkpoints that no model reads, and of modules that no training loads."""


@dataclass(frozen=True, slots=True)
class ExpectedWeights:
    """The tensors of a complete weight update of an engine's model.

    shapes: by name, as in the checkpoint of the engine. tied: name of the head if it is tied to the embedding and may
    be missing, or "". embedding: name of the embedding. prefix: of the decoder's names, which some checkpoints omit.
    """

    shapes: dict[str, tuple[int, ...]]
    tied: str = ""
    embedding: str = ""
    prefix: str = ""

    @classmethod
    def of_checkpoint(cls, folder: str | Path, *, model_class: Any, tied: bool) -> ExpectedWeights:
        """Read names and shapes of a folder's safetensors files, no data.

        Args:
            folder: of the checkpoint.
            model_class: transformers' class of the model, or None; has the names that it ignores in checkpoints.
            tied: whether the config ties the head to the embedding.

        Raises:
            ConfigError: the folder has no safetensors files.
        """
        from safetensors import safe_open

        files = weight_files(Path(folder))
        if not files:
            raise ConfigError(f"--model: {folder}: has no safetensors files; weight sync needs them")
        ignored = [*NOT_WEIGHTS, *(getattr(model_class, "_keys_to_ignore_on_load_unexpected", None) or [])]
        shapes: dict[str, tuple[int, ...]] = {}
        for file in files:
            with safe_open(file, framework="pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118 - not a dict
                    if not any(re.search(pattern, name) for pattern in ignored):
                        shapes[name] = tuple(tensors.get_slice(name).get_shape())
        prefix = getattr(model_class, "base_model_prefix", "") or ""
        embedding = _embedding(shapes) if tied else ""
        head = f"{'thinker.' * embedding.startswith('thinker.')}{HEAD}" if embedding else ""
        if head:
            shapes.setdefault(head, shapes[embedding])
        return cls(shapes, head, embedding, f"{prefix}." if prefix else "")

    @classmethod
    def of_model(cls, folder: str | Path, config: Any) -> ExpectedWeights:
        """`of_checkpoint` for a folder and its transformers config."""
        import transformers

        text = config.get_text_config()
        tied = getattr(text, "tie_word_embeddings", False) or getattr(config, "tie_word_embeddings", False)
        name = (getattr(config, "architectures", None) or [""])[0]
        return cls.of_checkpoint(folder, model_class=getattr(transformers, name, None), tied=bool(tied))

    @property
    def numbers(self) -> int:
        """Number of parameters of the model; a tied head is not counted."""
        return sum(math.prod(shape) for name, shape in self.shapes.items() if name != self.tied)

    def check(self, manifest: Sequence[TensorInfo]) -> list[str]:
        """Problems of an update with this manifest, one line each; [] if it is complete and fits."""
        return manifest_problems(manifest, self.shapes, optional={self.tied}, key=self._key)

    def check_adapter(self, adapter: AdapterWeights) -> list[str]:
        """Problems of an adapter that the engine would not report, one line each; [] if there are none.

        Matrices on modules that checkpoints store separately (experts) are checked by name only.
        """
        shapes = {self._key(name): shape for name, shape in self.shapes.items()}
        problems = []
        for name, tensor in adapter.tensors.items():
            parts = re.fullmatch(r"base_model\.model\.(.+)\.lora_([AB])\.weight", name)
            if parts is None:
                problems.append(f"{name} is not a low-rank matrix of a linear layer, the only thing that vLLM takes")
                continue
            module, side = self._key(parts[1]), parts[2]
            shape = shapes.get(f"{module}.weight")
            if shape is None:
                if not any(other.startswith(f"{module}.") for other in shapes):
                    problems.append(f"{name} belongs to no layer of the engine's model")
            elif tensor.dim() == 2 and (tensor.shape[1] if side == "A" else tensor.shape[0]) not in shape:
                problems.append(f"{name} has shape {list(tensor.shape)}, its layer {list(shape)}")
        return problems

    def lacks_head(self, manifest: Sequence[TensorInfo]) -> bool:
        """Whether an update has no tied head, so that the head must be copied from the embedding."""
        return bool(self.tied) and all(info.name != self.tied for info in manifest)

    def is_embedding(self, name: str) -> bool:
        """Whether a tensor is the embedding that the head is tied to."""
        return self._key(name) == self._key(self.embedding)

    def _key(self, name: str) -> str:
        return name.removeprefix(self.prefix)


def manifest_problems(
    manifest: Sequence[TensorInfo],
    shapes: Mapping[str, tuple[int, ...]],
    *,
    optional: Collection[str],
    key: Callable[[str], str] = str,
) -> list[str]:
    """Problems of an update with this manifest, one line each; [] if it is complete and fits.

    Args:
        manifest: of the update.
        shapes: of the model's tensors by name.
        optional: names that may be missing.
        key: function under which names of manifest and model are compared.
    """
    wanted = {key(name): shape for name, shape in shapes.items()}
    problems, seen = [], set()
    for info in manifest:
        name = key(info.name)
        if name in seen:
            problems.append(f"{info.name} comes twice")
        elif name not in wanted:
            near = nearest(info.name, shapes, 1)
            problems.append(f"{info.name} is not one of the model's" + (f" (nearest: {near[0]})" if near else ""))
        elif wanted[name] != info.shape:
            problems.append(f"{info.name} has shape {list(info.shape)}, the engine's {list(wanted[name])}")
        seen.add(name)
    return problems + [f"{name} is missing" for name in shapes if key(name) not in seen and name not in optional]


def few(problems: Sequence[str]) -> str:
    """The first three problems and the number of the others."""
    more = f" (and {len(problems) - 3} more)" if len(problems) > 3 else ""
    return "; ".join(problems[:3]) + more


def _embedding(shapes: dict[str, tuple[int, ...]]) -> str:
    """Name of the embedding; "" if it is ambiguous or missing."""
    names = [name for name in shapes if re.search(r"(^|\.)(embed_tokens|wte|word_embeddings|embed_in)\.weight$", name)]
    return names[0] if len(names) == 1 else ""


def merged_adapters(spec: EngineSpec) -> WeightSource:
    """The weights of a spec's model with its adapters merged, in the spec's dtype."""
    from swift.models.arguments import CheckpointArguments, SeeingArguments
    from swift.models.policy import load_for_inference
    from swift.rollout.weights.policy import PolicyWeights

    args = (SeeingArguments if spec.sees else CheckpointArguments)(
        model=spec.model,
        adapters=list(spec.adapters),
        torch_dtype=cast(Any, spec.dtype),
        trust_remote_code=spec.trust_remote_code,
    )
    return PolicyWeights(load_for_inference(args, device="cpu"))


def model_config(spec: EngineSpec) -> Any:
    """The model's config, as transformers reads it. Raises ConfigError: it cannot be read."""
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(spec.model, trust_remote_code=spec.trust_remote_code, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"--model: {spec.model}: config.json: {first_line(error)}") from error


def kv_token_bytes(config: Any, *, width: int, ranks: int = 1) -> int:
    """Bytes of one token in the KV cache of a plain decoder, over all layers; 0 if not known.

    Args:
        config: of the decoder.
        width: bytes of a value.
        ranks: number of tensor-parallel ranks.
    """
    total = 0
    for layer in layer_configs(config):
        if heads := getattr(layer, "num_attention_heads", None):
            kv_heads = getattr(layer, "num_key_value_heads", None) or heads
            size = getattr(layer, "head_dim", None) or layer.hidden_size // heads
            total += 2 * max(1, kv_heads // ranks) * size * width
    return total
