"""LoRA adapters that are added into the weights of an in-process copy, and taken out again."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from swift.errors import SyncFailed, Unsupported
from swift.rollout.weights.base import AdapterWeights

_PREFIX = "base_model.model."
_LOW_RANK = re.compile(r"(?P<module>.+)\.lora_(?P<embedding>embedding_)?(?P<side>[AB])(?P<bias>\.bias|\.weight)?")

_OTHER_METHODS = (
    "use_dora", "use_qalora", "use_bdlora", "layer_replication", "alora_invocation_tokens", "trainable_token_indices",
    "arrow_config", "target_parameters", "velora_config", "monteclora_config", "kasa_config",
)  # fmt: skip
_OTHER_BASES = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Ways to begin an adapter that change the base weights, which an engine does not have."""


@dataclass(slots=True)
class _LowRank:
    """The tensors of one adapted module."""

    first: Tensor | None = None
    second: Tensor | None = None
    bias: Tensor | None = None
    embedding: bool = False


@dataclass(slots=True)
class _Change:
    """A parameter that becomes `value(its base value in float32)`; `base` keeps that value meanwhile."""

    target: Tensor
    value: Callable[[Tensor], Tensor]
    base: Tensor = field(default_factory=lambda: torch.empty(0))


class FoldedAdapter:
    """A LoRA adapter that can be added into a model's weights and taken out without a trace.

    `W + scaling * B A` is computed in float32 from the kept base values and rounded once to the model's type.

    Args:
        model: without PEFT.
        adapter: as peft saves it; modules that were trained whole (`modules_to_save`) replace those of the model.
        version: of the policy.

    Raises:
        SyncFailed: its tensors do not fit the model or its own config.
        Unsupported: another method than LoRA, or a change to one of two tied modules.
    """

    def __init__(self, model: nn.Module, adapter: AdapterWeights, version: int) -> None:
        self.version = version
        self._config = adapter.config
        self._refuse_other_methods()
        self._parameters = dict(model.named_parameters(remove_duplicate=False))
        self._modules = dict(model.named_modules())
        pairs: dict[str, _LowRank] = {}
        whole: dict[str, Tensor] = {}
        for key, tensor in adapter.tensors.items():
            self._sort(key, tensor, pairs, whole)
        if not adapter.tensors:
            raise self._wrong("adapter_config.json", "comes without tensors")
        bias = self._config.get("bias") or "none"
        has_biases = any(name.endswith(".bias") for name in self._parameters)
        if bias != "none" and has_biases and not any(name.endswith(".bias") for name in whole):
            raise self._wrong(f"bias {bias}", "comes without the biases that it says were trained")
        self._changes = [change for module, pair in pairs.items() for change in self._low_rank(module, pair)]
        self._changes += [self._replaced(name, tensor) for name, tensor in whole.items()]
        self._check_ties()

    @torch.no_grad()
    def fold(self) -> bool:
        """Add the adapter; returns whether rounding took place."""
        for change in self._changes:
            change.base = change.target.detach().clone()
            change.target.copy_(change.value(change.base.float()))
        return any(change.target.dtype != torch.float32 for change in self._changes)

    @torch.no_grad()
    def unfold(self) -> None:
        """Give the parameters their base values back, bit for bit."""
        for change in self._changes:
            change.target.copy_(change.base)

    def to_host(self) -> None:
        """Keep the base values off the model's device."""
        for change in self._changes:
            change.base = change.base.to("cpu")

    def _wrong(self, subject: str, what: str) -> SyncFailed:
        return SyncFailed(f"adapter: version {self.version} for transformers: {subject}: {what}")

    def _refused(self, subject: str, what: str) -> Unsupported:
        return Unsupported(f"adapter: version {self.version} for transformers: {subject}: {what}")

    def _refuse_other_methods(self) -> None:
        config = self._config
        method = str(config.get("peft_type") or "LORA")
        if method != "LORA":
            raise self._refused(f"peft_type {method}", "only LoRA can be folded into weights")
        for name in _OTHER_METHODS:
            if config.get(name):
                raise self._refused(name, "changes more than a low-rank sum; use plain LoRA")
        start = config.get("init_lora_weights")
        if isinstance(start, str) and start.lower().startswith(_OTHER_BASES):
            raise self._refused(f"init_lora_weights {start}", "changes the base weights too; send merged weights")

    def _sort(self, key: str, tensor: Tensor, pairs: dict[str, _LowRank], whole: dict[str, Tensor]) -> None:
        """Put one of peft's tensors where it belongs."""
        if not key.startswith(_PREFIX):
            raise self._wrong(key, f"its name does not begin with {_PREFIX}, as peft writes it")
        name = key.removeprefix(_PREFIX)
        if "lora_magnitude_vector" in name:
            raise self._refused(key, "DoRA changes more than a low-rank sum; use plain LoRA")
        matched = _LOW_RANK.fullmatch(name)
        if matched is None:
            whole[name.replace(".base_layer.", ".")] = tensor
            return
        pair = pairs.setdefault(matched["module"], _LowRank())
        pair.embedding |= matched["embedding"] is not None
        if matched["bias"] == ".bias":
            pair.bias = tensor
        elif matched["side"] == "A":
            pair.first = tensor
        else:
            pair.second = tensor

    def _low_rank(self, module: str, pair: _LowRank) -> Iterator[_Change]:
        """The change of a module's weight, and of its bias where the adapter has one."""
        weight = self._parameter(f"{module}.weight", module)
        if pair.first is None or pair.second is None:
            raise self._wrong(module, f"lora_{'B' if pair.second is None else 'A'} is missing")
        rank, scaling = self._scaling(module)
        first, second = pair.first.to(weight.device).float(), pair.second.to(weight.device).float()
        if first.shape[0] != rank or second.shape[-1] != rank:
            raise self._wrong(module, f"has rank {first.shape[0]}; its config says {rank}")
        # Embeddings and Conv1D (GPT-2) store their weight the other way around than Linear.
        turned = pair.embedding or type(self._modules[module]).__name__ == "Conv1D"
        shape = (second.shape[0], first.shape[1])
        if tuple(weight.shape) != (shape[::-1] if turned else shape):
            raise self._wrong(module, f"changes a weight of shape {list(shape)}; the model's is {list(weight.shape)}")

        def value(base: Tensor) -> Tensor:
            product = second @ first
            return base + scaling * (product.T if turned else product)

        yield _Change(weight, value)
        if pair.bias is not None:
            offset = pair.bias.to(weight.device).float() * scaling
            yield _Change(self._parameter(f"{module}.bias", f"{module}.lora_B.bias"), lambda base: base + offset)

    def _scaling(self, module: str) -> tuple[int, float]:
        """Rank of a module's matrices and the factor of their product, as peft reads them from its config."""
        config = self._config
        rank = int(_by_pattern(config.get("rank_pattern"), module, config["r"]))
        alpha = float(_by_pattern(config.get("alpha_pattern"), module, config["lora_alpha"]))
        return rank, alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)

    def _replaced(self, name: str, tensor: Tensor) -> _Change:
        target = self._parameter(name, name)
        if target.shape != tensor.shape:
            raise self._wrong(name, f"has shape {list(tensor.shape)}; the model's is {list(target.shape)}")
        return _Change(target, lambda base: tensor.detach().to(base.device))

    def _parameter(self, name: str, subject: str) -> Tensor:
        if name not in self._parameters:
            raise self._wrong(subject, "is no module of the model that an adapter can change")
        return self._parameters[name]

    def _check_ties(self) -> None:
        """PEFT changes one user of a tied weight, which a folded weight cannot say."""
        changed = {id(change.target) for change in self._changes}
        names: dict[int, list[str]] = {}
        for name, parameter in self._parameters.items():
            if id(parameter) in changed:
                names.setdefault(id(parameter), []).append(name)
        for tied in names.values():
            if len(tied) > 1:
                raise self._refused(
                    tied[0], f"the model ties it to {tied[1]}; leave both out of the adapter, or train all weights"
                )


def _by_pattern(patterns: dict[str, Any] | None, module: str, otherwise: Any) -> Any:
    """The value of the first pattern that matches the end of a module's name, as peft matches it."""
    for pattern, value in (patterns or {}).items():
        if re.match(rf"(.*\.)?({pattern})$", module):
            return value
    return otherwise
