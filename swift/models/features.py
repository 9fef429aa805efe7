"""Feature vectors of token sequences from the hidden states of a frozen model: the feature network of EBFT.

`phi` of arXiv:2603.12248: hidden states of a few layers, side by side, each token of unit length, then pooled over a
span. The network is the policy as the run began (`FeatureNetwork`); nothing here has a gradient.

N tokens of a stream, S spans, F = number of layers x hidden size.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from swift.models.attention.interface import transformers_model
from swift.models.attention.spans import Span
from swift.models.autocast import autocasting
from swift.models.forward import TokenSequence, arrange
from swift.models.reference import ReferenceModel, load_reference
from swift.models.transfer import to_device

logger = logging.getLogger(__name__)

FeatureNorm = Literal["concat", "per_layer"]
EmbedMethod = Literal["last_token", "mean_pooling", "completion_mean", "concat"]


def feature_layers(fractions: Sequence[float], num_layers: int) -> list[int]:
    """Indices into `hidden_states` (0 are the embeddings): `max(1, min(L, floor(f L)))` of each depth f.

    Example: .25, .5 and .75 of 30 layers are 7, 15 and 22.

    Depths of the same layer count once: .25, .5 and .75 of 3 layers are 1 and 2.
    """
    # .58 of 50 is 29, though the product of these floats is below it
    layers = [max(1, min(num_layers, int(round(fraction * num_layers, 9)))) for fraction in fractions]
    return list(dict.fromkeys(layers))


def token_features(hidden_states: Sequence[Tensor], layers: Sequence[int], norm: FeatureNorm = "concat") -> Tensor:
    """Features [..., F] of each token in fp32 at least, of the model's hidden states [..., H].

    norm: one L2 norm over all layers (`concat`), or one for each layer (`per_layer`).
    """
    chosen = [hidden_states[layer] for layer in layers]
    chosen = [states.to(torch.promote_types(states.dtype, torch.float32)) for states in chosen]
    if norm == "per_layer":
        return torch.cat([normalize(states, dim=-1) for states in chosen], dim=-1)
    return normalize(torch.cat(chosen, dim=-1), dim=-1)


def pool(token_features: Tensor, spans: Sequence[Span], method: EmbedMethod) -> Tensor:
    """One vector of each span of a stream.

    Args:
        token_features: [N, F]; spans may overlap.
        spans: S of them, none of which is empty.
        method: last_token; mean_pooling and completion_mean are the mean over the span, which differ in the span that
            they are given; concat: tokens floor(T/4), floor(T/2), floor(3T/4) of T, side by side.

    Returns:
        [S, F], or [S, 3 F] with concat.
    """
    assert all(span.length > 0 for span in spans), "an empty span has no features"

    def tokens(places: list[int]) -> Tensor:
        return token_features[to_device(places, token_features.device)]

    if method == "last_token":
        return tokens([span.stop - 1 for span in spans])
    if method == "concat":
        quarters = [[span.start + quarter * span.length // 4 for span in spans] for quarter in (1, 2, 3)]
        return torch.cat([tokens(places) for places in quarters], dim=-1)
    return torch.stack([token_features[span.start : span.stop].mean(dim=0) for span in spans])


class FeatureNetwork:
    """The policy as a run began, frozen: a LoRA policy without its training, or a copy of a fully tuned one.

    Args:
        model: gives the module, without gradient and in evaluation mode; prepared before the first pass.
        fractions: depths of the layers, see `feature_layers`.
        norm: of a token. method: of pooling.
    """

    def __init__(
        self, model: ReferenceModel, *, fractions: Sequence[float], norm: FeatureNorm, method: EmbedMethod
    ) -> None:
        self.model, self.norm, self.method = model, norm, method
        with model.active() as module:
            config = transformers_model(module).config.get_text_config()
            self.layers = feature_layers(fractions, config.num_hidden_layers)

    def of_tokens(self, hidden_states: Sequence[Tensor]) -> Tensor:
        """`token_features` as configured."""
        return token_features(hidden_states, self.layers, self.norm)

    @torch.no_grad()
    def of_sequences(self, sequences: Sequence[TokenSequence], *, device: torch.device | str = "cpu") -> Tensor:
        """Features [S, F] of completions behind their prompts; neighbours with the same prompt share its pass.

        A completion without tokens has the features of the last token of its prompt. One forward pass.
        """
        # one more token, because the last one of a completion is no input
        longer = [TokenSequence(sequence.prompt_ids, [*sequence.completion_ids, 0]) for sequence in sequences]
        with self.model.active() as module, autocasting(module):
            tokens = arrange(module, longer, device=device)
            hidden = module(**tokens.inputs, logits_to_keep=1, output_hidden_states=True, use_cache=False).hidden_states
        features = self.of_tokens([states.flatten(0, 1) for states in hidden])
        if self.method == "mean_pooling":
            pairs = [[features[span.start : span.stop] for span in pair] for pair in tokens.spans]
            return torch.stack([torch.cat(pair).mean(dim=0) for pair in pairs])
        spans = [own if own.length else Span(prompt.stop - 1, 1) for prompt, own in tokens.spans]
        return pool(features, spans, self.method)


def load_features(args: Any, policy: nn.Module, reference: ReferenceModel | None = None) -> FeatureNetwork:
    """The feature network of a policy that was just loaded and not yet trained or resumed, by `--ebft_...` settings.

    Args:
        args: with those settings.
        policy: what `load_policy` returned, not wrapped.
        reference: the KL reference, which is used if it is the same model.
    """
    own = copy.copy(args)
    own.ref_model = None
    same = reference is not None and args.ref_model in (None, args.model) and not args.sync_ref_model
    model = reference if same else load_reference(own, policy)
    assert model is not None
    depths = args.ebft_feature_layers
    network = FeatureNetwork(model, fractions=depths, norm=args.ebft_feature_norm, method=args.ebft_embed_method)
    if len(network.layers) < len(depths):
        given, found = (" ".join(f"{number:g}" for number in some) for some in (depths, network.layers))
        logger.warning(
            "--ebft_feature_layers: %s: are the layers %s of this model, each of which counts once", given, found
        )
    return network
