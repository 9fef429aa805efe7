"""Blocks of strided EBFT: sampled from the policy after prefixes of a document, and encoded by the feature network.

Costs of a micro-batch with L document tokens and C columns of g tokens (`BlockStream`), in tokens that are forwarded:
L + C (g - 1) to sample with a key/value cache that all columns share, L + C g for the features and again to train.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from swift.models.attention.layout import SegmentLayout
from swift.models.attention.spans import Span
from swift.models.attention.strided import BlockStream
from swift.models.autocast import autocasting
from swift.models.features import FeatureNetwork, pool
from swift.models.transfer import to_device
from swift.rollout.engines.transformers.sampling import BatchSampler, Row
from swift.rollout.seeds import sample_uniforms, seed_of
from swift.trainers.rows import IGNORED
from swift.types import Request, SamplingParams

# L document tokens, C columns (block b, sample j at column b n + j), B blocks, n samples of each, g tokens of a block


@dataclass(frozen=True, slots=True)
class Document:
    """A row: its tokens, their labels, where its blocks begin (at least one), and a digest that identifies it."""

    input_ids: Sequence[int]
    labels: Sequence[int]
    anchors: Sequence[int]
    digest: str

    @property
    def targets(self) -> list[int]:
        """Places of the tokens that the cross-entropy counts; the first token has no prediction."""
        return [place for place, label in enumerate(self.labels) if place and label != IGNORED]


@dataclass(frozen=True, slots=True)
class Blocks:
    """The blocks of some documents and what was sampled for them.

    ids: [L] tokens of the documents. tokens: [g, C] sampled.
    """

    stream: BlockStream
    ids: Tensor
    tokens: Tensor

    def inputs(self) -> dict[str, Any]:
        """What a packed model takes: documents and all tokens of the blocks."""
        ids = torch.cat([self.ids, self.tokens.flatten()])
        return stream_inputs(ids, self.stream, self.stream.length if self.tokens.numel() else 0)


def stream_inputs(ids: Tensor, stream: BlockStream, num_steps: int) -> dict[str, Any]:
    """What a packed model takes, for a stream with its first `num_steps` steps."""
    layout: SegmentLayout = stream.layout(num_steps, ids.device)
    positions = to_device(stream.positions(num_steps), ids.device)
    return {"input_ids": ids[None], "position_ids": positions[None], "attention_layout": layout}


def joined_ids(documents: Sequence[Document], device: torch.device | str) -> Tensor:
    """[L] tokens of the documents, one after the other."""
    return to_device([token for document in documents for token in document.input_ids], device)


def block_stream(documents: Sequence[Document], *, num_samples: int, length: int) -> BlockStream:
    """The stream of these documents; samples of a block are neighbours."""
    columns = [
        (index, anchor)
        for index, document in enumerate(documents)
        for anchor in document.anchors
        for _ in range(num_samples)
    ]
    return BlockStream([len(document.input_ids) for document in documents], columns, length)


def block_uniforms(documents: Sequence[Document], num_samples: int, length: int, *key: int | str) -> np.ndarray:
    """[C, g] uniforms in [0, 1), a function of `key` and of each document alone: batches and ranks do not count."""
    parts = []
    for document in documents:
        size = len(document.anchors) * length
        samples = [sample_uniforms(seed_of(*key, document.digest, sample), size) for sample in range(num_samples)]
        parts.append(np.stack(samples, axis=1).reshape(len(document.anchors), length, num_samples).swapaxes(1, 2))
    return np.concatenate([part.reshape(-1, length) for part in parts])


@torch.no_grad()
def sample_blocks(
    model: nn.Module, ids: Tensor, stream: BlockStream, uniforms: np.ndarray, *, temperature: float, top_p: float = 1.0
) -> Tensor:
    """Tokens [g, C] of all columns, sampled together; the end token does not stop a block.

    Args:
        model: packed and in evaluation mode; runs `g` times, whatever is sampled.
        ids: [L] of the documents.
        stream: their blocks.
        uniforms: [C, g], one for each token.
        temperature: above 0.
        top_p: of the nucleus.
    """
    from transformers import DynamicCache

    request = Request("", (), SamplingParams(max_new_tokens=stream.length, temperature=temperature, top_p=top_p))
    sampler = BatchSampler([Row(request)] * len(stream.columns), ids.device)
    uniform_gC = to_device(np.ascontiguousarray(uniforms.T), ids.device)
    anchors, cache = to_device(stream.anchors, ids.device), DynamicCache()
    places, column = (to_device(found, ids.device) for found in stream.predecessors()[0].unique(return_inverse=True))
    inputs = stream_inputs(ids, stream, 0)
    logits = model(**inputs, logits_to_keep=places, past_key_values=cache, use_cache=True).logits[0][column]
    tokens = [sampler.draw(logits, uniform_gC[0])[0]]
    for step in range(1, stream.length):
        logits = model(
            input_ids=tokens[-1][None],
            position_ids=(anchors + step - 1)[None],
            attention_layout=stream.step_layout(step, ids.device),
            past_key_values=cache,
            use_cache=True,
        ).logits[0]
        tokens.append(sampler.draw(logits, uniform_gC[step])[0])
    return torch.stack(tokens)


@torch.no_grad()
def stream_features(network: FeatureNetwork, inputs: dict[str, Any], spans: Tensor) -> Tensor:
    """One vector [S, D] for each of the spans [S, g] of a stream, whose tokens may lie apart."""
    with network.model.active() as module, autocasting(module):
        output = module(**inputs, logits_to_keep=1, output_hidden_states=True, use_cache=False)
    size = spans.shape[1]
    tokens = network.of_tokens([states[0, spans.flatten()] for states in output.hidden_states])
    return pool(tokens, [Span(start, size) for start in range(0, spans.numel(), size)], network.method)


def block_features(network: FeatureNetwork, blocks: Blocks, num_samples: int) -> tuple[Tensor, Tensor]:
    """Features of the samples [B, n, D] and of the document's own continuation [B, D], from one forward pass."""
    stream, device = blocks.stream, blocks.ids.device
    spans = to_device(torch.cat([stream.index().T, stream.references()[::num_samples]]), device)
    sampled, own = stream_features(network, blocks.inputs(), spans).split(
        [len(stream.columns), len(stream.columns) // num_samples]
    )
    return sampled.unflatten(0, (-1, num_samples)), own


def reference_features(network: FeatureNetwork, documents: Sequence[Document], length: int, device: Any) -> Tensor:
    """The latter alone, without samples, [B, D]."""
    stream, ids = block_stream(documents, num_samples=1, length=length), joined_ids(documents, device)
    return stream_features(network, stream_inputs(ids, stream, 0), to_device(stream.references(), device))
