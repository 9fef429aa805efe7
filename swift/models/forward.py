"""One forward pass over a packed stream of prompts and completions: the trainer's view of a rollout.

Layout of a stream (no padding anywhere): for each group its prompt segment once, then the completion segments
that share it. A completion of n tokens contributes its first n - 1 tokens as inputs, because the last token
predicts nothing. With P = 3 prompt tokens and completions (a b c) and (d e)::

    stream      p0 p1 p2 | a  b  | d
    position    0  1  2  | 3  4  | 3
    predicts    .  .  a,d| b  c  | e

Each completion segment attends to [its prompt ; itself]. The layout travels to the attention layers through
transformers' attention interface (`AttentionInterface`), so any decoder model that uses that interface works
without a patch. A group of one is plain packing: nothing else changes when prompts are not shared.

Sliding windows, soft caps of attention scores and attention sinks come to the attention function with each layer's call
(`Variant`). Models whose layers need more than this (recurrent or linear attention layers, positions that are not
rotary) are found by `choose_attention`, keep their own attention and take the padded path, which is slower and equal.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from swift.models.segments import GroupSpans, SegmentLayout, Span, Variant, attended

ATTENTION_NAME = "swift_segments"

UNSUPPORTED_EXTRAS = ("position_bias",)
"""What some layers hand to their attention function and packed attention would leave out."""

PACKED_LAYERS = {"full_attention", "sliding_attention"}
"""Types of layers that can be packed, as configurations name them."""


class DecodeLayout:
    """Attention of one new token per row to its row of the key/value cache.

    Args:
        mask: [R, 1, 1, K] bool, False where the cache holds left padding, or None when no row is padded.
    """

    def __init__(self, mask: Tensor | None) -> None:
        self.mask = mask

    def attend_grouped(
        self, query: Tensor, key: Tensor, value: Tensor, scale: float | None, variant: Variant
    ) -> Tensor:
        """Query heads of a key/value head become query positions, so that no head is ever repeated.

        Args:
            query: [R, H, 1, D].
            key: [R, Hkv, K, D]; the last position is that of the new token.
            value: [R, Hkv, K, Dv].
            scale: softmax scale; None means 1 / sqrt(D).
            variant: of the layer.

        Returns:
            [R, 1, H, Dv]
        """
        num_rows, num_heads, _, head_size = query.shape
        num_kv = key.shape[1]
        grouped = query.view(num_rows, num_kv, -1, head_size)
        mask, variant = self.mask, variant.within(key.shape[2])
        if variant.window is not None:
            key, value = key[:, :, -variant.window :], value[:, :, -variant.window :]
            mask = None if mask is None else mask[..., -variant.window :]
        if variant.sinks is not None:
            variant = replace(variant, sinks=variant.sinks.view(num_kv, -1))
        found = attended(grouped, key, value, mask=mask, scale=scale, variant=variant)
        return found.reshape(num_rows, 1, num_heads, value.shape[3])


def _segment_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    attention_layout: SegmentLayout | DecodeLayout | None = None,
    **extras: Any,
) -> tuple[Tensor, None]:
    """The attention function registered with transformers; see `AttentionInterface` for the contract.

    Raises:
        NotImplementedError: the layer does not pass the layout on, or wants more than plain attention.
    """
    if attention_layout is None:
        raise NotImplementedError("its layers do not pass the packed layout on to attention")
    for name in UNSUPPORTED_EXTRAS:
        if extras.get(name) is not None:
            raise NotImplementedError(f"its attention takes {name}")
    window = extras.get("sliding_window")
    variant = Variant(window if window and window > 0 else None, extras.get("softcap"), extras.get("s_aux"))
    if isinstance(attention_layout, DecodeLayout):
        return attention_layout.attend_grouped(query, key, value, scaling, variant), None
    return attention_layout.attend(query, key, value, scaling, variant), None


def enable_packed_attention(model: nn.Module) -> None:
    """Make `model` (a transformers decoder, possibly under PEFT) take `attention_layout` in its forward."""
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION_NAME, _segment_attention)
    transformers_model(model).set_attn_implementation(ATTENTION_NAME)


def is_packed(model: nn.Module) -> bool:
    """Whether `model` takes packed streams (`packed_logits`); otherwise it takes rows (`padded_logits`)."""
    return transformers_model(model).config.get_text_config()._attn_implementation == ATTENTION_NAME


def choose_attention(model: nn.Module) -> str | None:
    """Give `model` packed attention where that computes what its own attention does, which is tried out.

    Returns:
        why the model keeps its own attention, in a few words; None when it is packed now.
    """
    if is_packed(model):
        return None
    base = transformers_model(model)
    if (chosen := base.config.get_text_config()._attn_implementation) in ("flash_attention_2", "flex_attention"):
        return f"--attn_impl asks for {chosen}, which computes padded rows"
    if has_soft_cap(base.config) and base.config.get_text_config()._attn_implementation == "sdpa":
        base.set_attn_implementation("eager")
    obstacle = packing_obstacle(model)
    if obstacle is None:
        own = base.config.get_text_config()._attn_implementation
        obstacle = _packing_gap(model)
        if obstacle is not None:
            base.set_attn_implementation(own)
    return obstacle


def has_soft_cap(config: Any) -> bool:
    """Whether attention caps its scores, which transformers' sdpa leaves out without a word."""
    return bool(getattr(config.get_text_config(), "attn_logit_softcapping", None))


def _packing_gap(model: nn.Module) -> str | None:
    """Enable packing and compare the logits of a few sequences with those of before."""
    device = next(model.parameters()).device
    size = min(97, transformers_model(model).config.get_text_config().vocab_size)
    ids = [(7 * i + 3) % size for i in range(32)]
    sequences = [
        TokenSequence(ids[prompt], ids[completion])
        for prompt in (slice(0, 6), slice(6, 10))
        for completion in (slice(10, 15), slice(20, 23), slice(15, 22))
    ]
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            own_NV = torch.cat([padded_logits(model, [one], device=device) for one in sequences]).float()
            enable_packed_attention(model)
            tokens = pack(sequences, device=device)
            asked = _noted_calls(tokens.layout)
            gap_N = (packed_logits(model, tokens).float() - own_NV).abs().mean(-1)
    except NotImplementedError as error:
        return str(error)
    except Exception as error:  # whatever a model does with what it does not expect; its own attention goes on
        return f"packing fails ({type(error).__name__}: {(str(error).splitlines() or [''])[0][:120]})"
    finally:
        model.train(was_training)
    config = transformers_model(model).config.get_text_config()
    if len(asked) < (getattr(config, "num_hidden_layers", None) or 1):
        return "not all of its layers ask transformers' attention interface"
    if sum(variant.window is not None for variant in asked) < _num_windows(config):
        return "not all of its layers hand their sliding window to attention"
    worst = max(float(gap_N[tokens.sequence_index == i].mean()) for i in range(len(sequences)))
    tolerance = 1e-2 if next(model.parameters()).dtype == torch.float32 else 1e-1
    return "packed logits differ from its own" if worst > tolerance * float(own_NV.std()) else None


def _noted_calls(layout: SegmentLayout) -> list[Variant]:
    """A list that grows with each layer that asks for attention, by what it asks for."""
    calls: list[Variant] = []
    attend = layout.attend

    def noted(query: Tensor, key: Tensor, value: Tensor, scale: float | None, variant: Variant) -> Tensor:
        calls.append(variant)
        return attend(query, key, value, scale, variant)

    layout.attend = noted  # type: ignore[method-assign, assignment]
    return calls


def _num_windows(config: Any) -> int:
    """How many layers have a sliding window, which a trial on short sequences does not show."""
    kinds = getattr(config, "layer_types", None)
    if kinds:
        return sum(kind == "sliding_attention" for kind in kinds)
    windowed = getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True)
    return config.num_hidden_layers if windowed else 0


def packing_obstacle(model: nn.Module) -> str | None:
    """Why packed segments would be wrong for this model, in a few words; None when they are right."""
    base = transformers_model(model)
    config = base.config.get_text_config()
    others = set(getattr(config, "layer_types", None) or []) - PACKED_LAYERS
    if others:
        return f"layers of type {', '.join(sorted(others))}"
    if not getattr(base, "_supports_attention_backend", False):
        return "the model does not use transformers' attention interface"
    if not (hasattr(config, "rope_parameters") or hasattr(config, "rope_theta")):
        return "no rotary positions"
    if _num_windows(config) and not _masks_windows(base):
        return "a sliding window that its own attention does not know"
    return None


def _masks_windows(base: nn.Module) -> bool:
    """Whether the model's own code makes masks of sliding windows; some pass a window on and have none."""
    files = {type(module).__module__ for module in base.modules()}
    return any(hasattr(sys.modules[file], "create_sliding_window_causal_mask") for file in files)


def transformers_model(model: nn.Module) -> Any:
    """The transformers model below wrappers (DDP, PEFT)."""
    model = getattr(model, "module", model)
    unwrap = getattr(model, "get_base_model", None)
    return unwrap() if callable(unwrap) else model


@dataclass(slots=True)
class TokenSequence:
    """Token ids of one completion with its prompt, as sampled."""

    prompt_ids: Sequence[int]
    completion_ids: Sequence[int]


@dataclass(slots=True)
class PackedTokens:
    """A packed stream and where it predicts each completion token.

    input_ids, position_ids: [1, T] int64. predict_index: [N] stream index whose hidden state predicts target n.
    target_ids: [N] the completion tokens, sequence after sequence. sequence_index: [N] which sequence.
    """

    input_ids: Tensor
    position_ids: Tensor
    predict_index: Tensor
    target_ids: Tensor
    sequence_index: Tensor
    num_sequences: int
    layout: SegmentLayout


def pack(
    sequences: Sequence[TokenSequence],
    *,
    share_prompts: bool = True,
    device: torch.device | str = "cpu",
) -> PackedTokens:
    """Pack completions into one stream; neighbours with equal prompt ids share one prompt segment.

    Args:
        sequences: S completions with at least one token each and at least one prompt token.
        share_prompts: compute a prompt once for neighbouring completions of it.
        device: where the tensors go.

    Returns:
        the stream, with T = sum of prompt lengths (shared ones once) + sum of (completion length - 1).
    """
    ids: list[np.ndarray] = []
    positions: list[np.ndarray] = []
    predict: list[np.ndarray] = []
    targets: list[np.ndarray] = []
    groups: list[tuple[Span, list[Span]]] = []
    end = 0
    for prompt, completions in _prompt_groups(sequences, share_prompts):
        prompt_span = Span(end, prompt.size)
        spans: list[Span] = []
        groups.append((prompt_span, spans))
        ids.append(prompt)
        positions.append(np.arange(prompt.size))
        end = prompt_span.stop
        for completion in completions:
            own = Span(end, completion.size - 1)
            end = own.stop
            spans.append(own)
            ids.append(completion[:-1])
            positions.append(np.arange(prompt.size, prompt.size + own.length))
            predict += [np.array([prompt_span.stop - 1]), np.arange(own.start, own.stop)]
            targets.append(completion)
    layout = SegmentLayout([GroupSpans(span, tuple(rest)) for span, rest in groups], device)
    owners = np.repeat(np.arange(len(targets)), [one.size for one in targets])

    def tensor(values: np.ndarray) -> Tensor:
        return torch.from_numpy(values).to(device)

    return PackedTokens(
        input_ids=tensor(np.concatenate(ids))[None],
        position_ids=tensor(np.concatenate(positions))[None],
        predict_index=tensor(np.concatenate(predict)),
        target_ids=tensor(np.concatenate(targets)),
        sequence_index=tensor(owners),
        num_sequences=len(sequences),
        layout=layout,
    )


def _prompt_groups(sequences: Sequence[TokenSequence], share: bool) -> list[tuple[np.ndarray, list[np.ndarray]]]:
    """Prompts with the completions that are packed behind them."""
    groups: list[tuple[np.ndarray, list[np.ndarray]]] = []
    for sequence in sequences:
        prompt, completion = _ids(sequence.prompt_ids), _ids(sequence.completion_ids)
        assert prompt.size and completion.size, "a packed sequence needs prompt and completion tokens"
        if not groups or not share or not np.array_equal(prompt, groups[-1][0]):
            groups.append((prompt, []))
        groups[-1][1].append(completion)
    return groups


def _ids(values: Sequence[int]) -> np.ndarray:
    return np.asarray(values, dtype=np.int64)


def packed_logits(model: nn.Module, tokens: PackedTokens) -> Tensor:
    """Logits [N, V] that predict each completion token of a packed stream.

    The call goes through `model` itself (DDP, FSDP and ZeRO wrappers included), and the head is applied to the
    N predicting positions only.
    """
    assert is_packed(model), "the model's own attention would read a packed stream as one sequence"
    output = model(
        input_ids=tokens.input_ids,
        position_ids=tokens.position_ids,
        attention_layout=tokens.layout,
        logits_to_keep=tokens.predict_index,
        use_cache=False,
    )
    return output.logits[0]


def padded_logits(
    model: nn.Module, sequences: Sequence[TokenSequence], *, device: torch.device | str = "cpu"
) -> Tensor:
    """The same logits [N, V] from right-padded rows: the path of models that cannot be packed, and the oracle.

    `model` must use one of transformers' own attention functions (not `enable_packed_attention`).
    """
    input_ids, mask, predict_index = padded_rows(sequences, device=device)
    logits = model(input_ids=input_ids, attention_mask=mask, use_cache=False).logits
    return logits.flatten(0, 1)[predict_index]


def padded_rows(
    sequences: Sequence[TokenSequence], *, device: torch.device | str = "cpu"
) -> tuple[Tensor, Tensor, Tensor]:
    """Right-padded rows [S, L], their attention mask, and which of the S x L positions predict targets [N]."""
    rows = [list(s.prompt_ids) + list(s.completion_ids)[:-1] for s in sequences]
    width = max(len(row) for row in rows)
    input_ids = torch.tensor([row + [0] * (width - len(row)) for row in rows], device=device)
    mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows], device=device)
    predicting = [i * width + t for i, s in enumerate(sequences) for t in range(len(s.prompt_ids) - 1, len(rows[i]))]
    return input_ids, mask, torch.tensor(predicting, device=device)
