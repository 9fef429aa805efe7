"""Estimates of what one token costs in a training pass: bytes of activations, and floating point operations.

Counted for a decoder layer of transformers (Llama, Qwen, Mistral and the like), per token, is what autograd keeps until
the backward pass. With element size e, hidden size h, query width q (heads times head size), key width k and
intermediate size i:

    two norms        2 x (4 h + 2 e h)    the input in fp32; the normalised states; the output
    two more norms   (4 + 2 e) (q + k)    of queries and keys, which some models have
    attention        8 e q                queries, keys and values, as they are and gathered; outputs
    MLP              4 e i                gate, up, activation, product (of each expert that a token visits)

One layer more is counted for what the backward pass itself holds. With gradient checkpointing a layer keeps its input
only, and one layer at a time is computed again. A head that is applied as a whole holds a token's logits and their
gradient, 2 e V; one that goes in blocks holds next to nothing per token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Widths and depth of a decoder. query, key_value: heads times head size. intermediate: of a token."""

    hidden: int
    layers: int
    query: int
    key_value: int
    intermediate: int
    vocabulary: int

    @classmethod
    def of(cls, config: Any) -> ModelShape:
        """From a config of transformers; widths that it does not have are the usual multiples of its hidden size."""
        config = config.get_text_config()
        hidden = int(config.hidden_size)
        heads = _width(config, "num_attention_heads") or 1
        kv_heads = _width(config, "num_key_value_heads") or heads
        head_size = _width(config, "head_dim") or hidden // heads
        intermediate = _width(config, "intermediate_size") or 4 * hidden
        expert = _width(config, "moe_intermediate_size")
        if expert:
            intermediate = expert * (_width(config, "num_experts_per_tok") or 1)
        return cls(
            hidden=hidden,
            layers=int(config.num_hidden_layers),
            query=heads * head_size,
            key_value=kv_heads * head_size,
            intermediate=intermediate,
            vocabulary=int(config.vocab_size),
        )

    def forward_flops(self) -> tuple[int, int, int]:
        """FLOPs of one token in a forward pass: linear layers of the decoder, attention, output layer.

        Those of attention are for each token that it attends to.
        """
        projections = self.hidden * (2 * self.query + 2 * self.key_value)
        linear = 2 * self.layers * (projections + 3 * self.hidden * self.intermediate)
        return linear, 4 * self.layers * self.query, 2 * self.hidden * self.vocabulary


def activation_bytes(shape: ModelShape, *, element: int, checkpointing: bool, whole_logits: bool) -> int:
    """Bytes per token of a pass, as in the module's docstring.

    Args:
        shape: of the model.
        element: bytes of a number that layers compute with.
        checkpointing: gradient checkpointing.
        whole_logits: whether the logits of all completion tokens exist at once.
    """
    norms = 2 * (4 * shape.hidden + 2 * element * shape.hidden)
    norms += (4 + 2 * element) * (shape.query + shape.key_value)
    layer = norms + 8 * element * shape.query + 4 * element * shape.intermediate
    kept = shape.layers * (element * shape.hidden if checkpointing else layer)
    logits = 2 * element * shape.vocabulary if whole_logits else 0
    return kept + layer + logits


def layer_configs(config: Any) -> list[Any]:
    """The config of each layer, which is that of the model unless layers differ (Gemma 4)."""
    if getattr(config, "is_heterogeneous", False):
        return list(config.per_layer_config)
    return [config] * (getattr(config, "num_hidden_layers", None) or 0)


def _width(config: Any, name: str) -> int:
    """A number of the config, the largest of its layers; 0 where it has none."""
    values = [getattr(layer, name, None) or 0 for layer in layer_configs(config)]
    return int(max((max(value) if isinstance(value, list | tuple) else value for value in values), default=0))
