"""How many floating-point operations a step needs: the floor that no trainer can go below.

Counted are matrix products, 2 per multiply-add, of a step that computes nothing twice::

    prefill    each prompt once                                     P tokens, a head for its last one
    decode     each token but the last of a completion once         L - 1 tokens with a head, against a cache
    forward    prompt once per group, then L - 1 tokens             heads where a token is predicted
    backward   twice the forward pass: gradients of inputs and of weights

With KL one more forward pass comes on top. Not counted: normalisations, softmax, rotary positions, embedding lookups,
the optimizer, sampling; they are no products, and on a CPU they are small beside them. A token in a layer costs

    2 (h n d + 2 h m d + n d h + 3 h f)     projections q, k, v, o and a gated MLP: n heads, m key/value heads of size d
    4 n d c                                 scores and their weighted sum over c visible tokens, itself included

and 2 h V in the head. For causal attention the visible tokens of p prompt tokens sum to p (p + 1) / 2, and those of k
tokens behind a prompt to k p + k (k + 1) / 2.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Dimensions:
    """Of a decoder with gated MLPs."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_size: int
    intermediate: int
    vocab: int

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Dimensions:
        """From the content of a model's config.json."""
        heads = config["num_attention_heads"]
        return cls(
            hidden=config["hidden_size"],
            layers=config["num_hidden_layers"],
            heads=heads,
            kv_heads=config.get("num_key_value_heads") or heads,
            head_size=config.get("head_dim") or config["hidden_size"] // heads,
            intermediate=config["intermediate_size"],
            vocab=config["vocab_size"],
        )

    @property
    def per_token(self) -> int:
        """Projections and MLP of one token in all layers."""
        q_and_o = 2 * self.hidden * self.heads * self.head_size
        k_and_v = 2 * self.hidden * self.kv_heads * self.head_size
        return 2 * self.layers * (q_and_o + k_and_v + 3 * self.hidden * self.intermediate)

    @property
    def per_visible(self) -> int:
        """Attention of one token to one token in all layers."""
        return 4 * self.layers * self.heads * self.head_size

    @property
    def per_prediction(self) -> int:
        """The head of one token."""
        return 2 * self.hidden * self.vocab


@dataclass(frozen=True, slots=True)
class StepFlops:
    """Operations of a step by phase."""

    prefill: int
    decode: int
    reference: int
    forward: int
    backward: int

    @property
    def generation(self) -> int:
        """Sampling."""
        return self.prefill + self.decode

    @property
    def training(self) -> int:
        """Forward and backward passes."""
        return self.reference + self.forward + self.backward

    @property
    def total(self) -> int:
        """The whole step."""
        return self.generation + self.training


def step_flops(
    model: Dimensions, prompt_tokens: Sequence[int], completion_tokens: Sequence[Sequence[int]], *, reference: bool
) -> StepFlops:
    """Operations of one optimizer step.

    Args:
        model: its dimensions.
        prompt_tokens: of each group.
        completion_tokens: of each completion of each group, at least 1.
        reference: whether a reference model scores the completions too.
    """
    prefill = decode = forward = 0
    for prompt, lengths in zip(prompt_tokens, completion_tokens, strict=True):
        whole_prompt = prompt * model.per_token + prompt * (prompt + 1) // 2 * model.per_visible
        behind = sum(_behind(model, prompt, length - 1) for length in lengths)
        later = sum(length - 1 for length in lengths)
        prefill += whole_prompt + model.per_prediction
        decode += behind + later * model.per_prediction
        forward += whole_prompt + behind + (1 + later) * model.per_prediction
    return StepFlops(prefill, decode, forward if reference else 0, forward, 2 * forward)


def _behind(model: Dimensions, prompt: int, tokens: int) -> int:
    """The layers' part of `tokens` tokens that follow a prompt."""
    return tokens * model.per_token + (tokens * prompt + tokens * (tokens + 1) // 2) * model.per_visible
