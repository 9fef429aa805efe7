"""Completions that continue from the states of their prompts, for models whose attention cannot be packed.

Layers that are linear attention, state spaces or short convolutions read a stream from left to right, so that the
segments of a packed stream would run into each other. Their decoder takes the same stream, and computes it in two
passes:

    1. prompts       rows, left-padded: each layer writes what it leaves (`PromptStates`)
    2. completions   rows, right-padded: each layer begins with what its prompt left (`ForkedStates`)

What a layer leaves are keys and values, convolution states and recurrent states. They are part of the graph, so the
gradients of all completions of a prompt add up in its one pass. Neither kind of cache changes when a layer is computed
again, so gradient checkpointing gives the same. There are two passes for any stream, even one without a second token,
because each pass is a collective where weights are sharded.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DynamicLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionCacheLayerMixin,
    LinearAttentionLayer,
)
from transformers.modeling_layers import GradientCheckpointingLayer

from swift.models.attention.interface import decoder_of, is_packed, transformers_model
from swift.models.attention.layout import SegmentLayout
from swift.models.attention.spans import GroupSpans, Span
from swift.models.transfer import to_device

LEAST_STEPS = 2
"""Tokens of a row in the second pass: layers compute a single one in place, without a gradient."""


def enable_forking(model: nn.Module) -> None:
    """Make the decoder of `model`, possibly under PEFT, take packed streams."""
    decoder = decoder_of(model)
    decoder.forward = MethodType(_stream_forward(decoder), decoder)
    if _cache_of(decoder) == "cache_params":  # of Mamba2, whose language model passes on what it knows by name
        hand_down = MethodType(_hand_down, decoder)
        decoder._handing = transformers_model(model).register_forward_pre_hook(hand_down, with_kwargs=True)
    for layer in decoder.modules():
        if isinstance(layer, GradientCheckpointingLayer):
            layer._can_checkpoint_with_cache = True


def disable_forking(model: nn.Module) -> None:
    """Undo `enable_forking`, if it was called."""
    decoder = decoder_of(model)
    vars(decoder).pop("forward", None)
    if "_handing" in vars(decoder):
        vars(decoder).pop("_handing").remove()
    for layer in decoder.modules():
        vars(layer).pop("_can_checkpoint_with_cache", None)


def forks(model: nn.Module) -> bool:
    """Whether the decoder of `model` computes streams in two passes."""
    decoder = decoder_of(model)
    return hasattr(getattr(vars(decoder).get("forward"), "__func__", None), "forks")


def takes_streams(model: nn.Module) -> bool:
    """Whether `model` takes packed streams (`forward.pack`); otherwise it takes rows (`forward.pad`)."""
    return is_packed(model) or forks(model)


def _cache_of(decoder: Any) -> str:
    """What the decoder calls its cache."""
    takes = inspect.signature(type(decoder).forward).parameters
    return "past_key_values" if "past_key_values" in takes else "cache_params"


def _hand_down(decoder: Any, _: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Leave the layout of a stream with the decoder, before the language model on top drops it."""
    decoder._handed = kwargs.pop("attention_layout", None)
    return args, kwargs


def _stream_forward(decoder: Any) -> Any:
    """A decoder's forward, which also takes a packed stream with its `attention_layout`."""
    takes, cache = inspect.signature(type(decoder).forward).parameters, _cache_of(decoder)

    def forward(
        self: Any,
        *args: Any,
        attention_layout: SegmentLayout | None = None,
        position_ids: Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        own = type(self).forward
        attention_layout = attention_layout or vars(self).pop("_handed", None)
        if attention_layout is None:
            if position_ids is not None:
                kwargs["position_ids"] = position_ids
            return own(self, *args, **kwargs)
        given_ids = args[0] if args else kwargs.pop("input_ids", None)
        name = "input_ids" if given_ids is not None else "inputs_embeds"
        stream = given_ids if given_ids is not None else kwargs.pop(name)
        rows: ForkedRows = attention_layout.view_of(ForkedRows)
        prompts = PromptStates(self.config)
        completions = ForkedStates(prompts, rows.prompt_S)
        outputs = []
        for index, positions, mask, states in (
            (rows.prompts_RP, rows.positions_RP, rows.mask_RP, prompts),
            (rows.completions_SL, rows.positions_SL, rows.mask_SM, completions),
        ):
            given = {**kwargs, name: stream[0][index], "attention_mask": mask, cache: states}
            if "position_ids" in takes:
                if position_ids is not None and position_ids.ndim == 3:  # of images: [3, 1, T]
                    positions = position_ids[:, 0][:, index]
                given["position_ids"] = positions
            outputs.append(own(self, **given))
        completions.require_read()
        return rows.joined(outputs)

    forward.__signature__ = inspect.signature(type(decoder).forward)  # type: ignore[attr-defined]  # transformers looks
    forward.forks = True  # type: ignore[attr-defined]
    return forward


class ForkedRows:
    """The rows of both passes over a stream of groups.

    Attributes:
        prompts_RP: [R, P] places of the stream; those of the left padding are 0.
        completions_SL: [S, L] places likewise, padded on the right.
        positions_RP, positions_SL: of these tokens in their sequence.
        mask_RP: [R, P] 1 except in the padding; None if there is none, because transformers reads a mask on the host.
        mask_SM: [S, P + L] of the prompt of each row, then ones: what follows a completion changes nothing before it.
        prompt_S: [S] the row of each completion's prompt.
    """

    def __init__(self, groups: Sequence[GroupSpans], device: torch.device | str) -> None:
        assert not any(group.prefixes for group in groups), "forked completions see their whole prompt"
        prompts = [group.prompt for group in groups]
        own = [(row, span) for row, group in enumerate(groups) for span in group.completions if span.length]
        self.is_empty = not own
        if self.is_empty:  # a pass all the same
            own = [(0, Span(prompts[0].start, 0))]
        width = max(span.length for span in prompts)
        steps = max(LEAST_STEPS, *(span.length for _, span in own))
        places = [[0] * (width - span.length) + list(range(span.start, span.stop)) for span in prompts]
        rows = [list(range(span.start, span.stop)) + [0] * (steps - span.length) for _, span in own]
        self.prompts_RP, self.completions_SL = to_device(places, device), to_device(rows, device)
        positions = [[0] * (width - span.length) + list(range(span.length)) for span in prompts]
        self.positions_RP = to_device(positions, device)
        firsts = [(prompts[row].length, max(0, span.length - 1)) for row, span in own]
        self.positions_SL = to_device([[first + min(i, last) for i in range(steps)] for first, last in firsts], device)
        self.mask_RP: Tensor | None = None
        self.mask_SM: Tensor | None = None
        if any(span.length < width for span in prompts):
            mask = [[0] * (width - span.length) + [1] * span.length for span in prompts]
            self.mask_RP = to_device(mask, device)
            self.mask_SM = to_device([mask[row] + [1] * steps for row, _ in own], device)
        self.prompt_S = to_device([row for row, _ in own], device)
        found: dict[int, int] = {}  # place of the stream -> that in the rows of both passes, one after the other
        for row, span in enumerate(prompts):
            last = (row + 1) * width
            found |= dict(zip(range(span.start, span.stop), range(last - span.length, last), strict=True))
        for row, (_, span) in enumerate(own):
            first = len(prompts) * width + row * steps
            found |= dict(zip(range(span.start, span.stop), range(first, first + span.length), strict=True))
        self.place_T = to_device([found[place] for place in range(len(found))], device)

    def joined(self, outputs: Sequence[Any]) -> Any:
        """The output of both passes as that of the stream: [1, T, H] instead of [R, P, H] and [S, L, H]."""

        def stream(parts: Sequence[Tensor]) -> Tensor:
            states = torch.cat([part.flatten(0, -2) for part in parts]).index_select(0, self.place_T)
            if self.is_empty:  # where weights are sharded, its backward pass is a collective, too
                states = states + 0.0 * parts[1].flatten()[0]
            return states

        first, second = outputs
        hidden = getattr(first, "hidden_states", None)
        if hidden is not None:
            first.hidden_states = tuple(stream(pair)[None] for pair in zip(hidden, second.hidden_states, strict=True))
        routed = getattr(first, "router_logits", None)  # [tokens, experts] of each layer
        if routed is not None:
            first.router_logits = tuple(map(stream, zip(routed, second.router_logits, strict=True)))
        first.last_hidden_state = stream([first.last_hidden_state, second.last_hidden_state])[None]
        for name in ("past_key_values", "cache_params"):
            if name in first:
                first[name] = None
        return first


# --- states ----------------------------------------------------------------------------------------------------------


class PromptStates(Cache):
    """What the prompts leave in each layer of a model with this config; the first write counts."""

    def __init__(self, config: Any) -> None:
        super().__init__(layers=[WRITERS[_kind(layer)](layer) for layer in DynamicCache(config=config).layers])


class ForkedStates(Cache):
    """What each completion begins with: row `prompt_S[s]` of the prompts' states, for completion s. Nothing is kept."""

    def __init__(self, prompts: PromptStates, prompt_S: Tensor) -> None:
        super().__init__(layers=[READERS[_kind(layer)](layer, prompt_S) for layer in prompts.layers])

    def require_read(self) -> None:
        """Raises NotImplementedError: a layer has computed completions without what its prompts left."""
        for number, layer in enumerate(self.layers):
            if layer.prompts.has_kept and not layer.was_read:
                raise NotImplementedError(f"layer {number} forgets the states of prompts")


def _kind(layer: Any) -> tuple[bool, bool]:
    """Whether a layer has states of linear attention, and keys and values."""
    return isinstance(layer, LinearAttentionCacheLayerMixin), isinstance(layer, CacheLayerMixin)


class _Writer:
    """Keeps what a layer leaves, and gives back what it is given."""

    record_past = is_sliding = False

    def __init__(self, like: Any) -> None:
        self.attended: tuple[Tensor, Tensor] | None = None
        self.convolved: dict[int, Tensor] = {}
        self.recurrent: dict[int, Tensor] = {}
        self.has_previous_state = dict.fromkeys(range(getattr(like, "number_of_states", 0)), False)

    @property
    def has_kept(self) -> bool:
        return self.attended is not None or bool(self.convolved or self.recurrent)

    def update(self, key: Tensor, value: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        self.attended = self.attended or (key, value)
        return key, value

    def update_conv_state(
        self, states: Tensor, state_idx: int = 0, conv_kernel_size: int | None = None, **_: Any
    ) -> Tensor:
        size = conv_kernel_size or states.shape[-1]
        if size > states.shape[-1]:
            states = nn.functional.pad(states, (size - states.shape[-1], 0))
        if state_idx not in self.convolved:
            self.convolved[state_idx] = states[..., -size:].clone()  # a view would keep all of them
        return states

    def update_recurrent_state(self, states: Tensor, state_idx: int = 0, **_: Any) -> Tensor:
        self.recurrent.setdefault(state_idx, states)
        return states

    def get_seq_length(self) -> int:
        return 0

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return query_length, 0


class _Reader:
    """Puts what the layer of the prompts has kept before what a layer is given."""

    record_past = is_sliding = False

    def __init__(self, prompts: _Writer, prompt_S: Tensor) -> None:
        self.prompts, self.prompt_S, self.was_read = prompts, prompt_S, False

    def _forked(self, states: Tensor) -> Tensor:
        self.was_read = True
        return states.index_select(0, self.prompt_S)

    @property
    def has_previous_state(self) -> dict[int, bool]:
        return dict.fromkeys(self.prompts.convolved, True)

    @property
    def conv_states(self) -> dict[int, Tensor]:
        return {number: self._forked(states) for number, states in self.prompts.convolved.items()}

    @property
    def recurrent_states(self) -> dict[int, Tensor]:
        return {number: self._forked(states) for number, states in self.prompts.recurrent.items()}

    def update(self, key: Tensor, value: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        assert self.prompts.attended is not None
        keys, values = map(self._forked, self.prompts.attended)
        return torch.cat([keys, key], 2), torch.cat([values, value], 2)

    def update_conv_state(self, states: Tensor, state_idx: int = 0, **_: Any) -> Tensor:
        return torch.cat([self._forked(self.prompts.convolved[state_idx]), states], -1)

    def update_recurrent_state(self, states: Tensor, state_idx: int = 0, **_: Any) -> Tensor:
        return states

    def get_seq_length(self) -> int:
        return 0 if self.prompts.attended is None else self.prompts.attended[0].shape[2]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return query_length + self.get_seq_length(), 0


def _classes(base: type) -> dict[tuple[bool, bool], Any]:
    """By `_kind`, since models ask for the classes of transformers' layers."""
    kinds = {(True, False): LinearAttentionLayer, (False, True): DynamicLayer}
    kinds[True, True] = LinearAttentionAndFullAttentionLayer
    return {kind: type(base.__name__, (base, upstream), {}) for kind, upstream in kinds.items()}


WRITERS, READERS = _classes(_Writer), _classes(_Reader)
