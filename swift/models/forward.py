"""One forward pass over a packed stream of prompts and completions: the trainer's view of a rollout.

Layout of a stream (no padding anywhere): for each group its prompt segment once, then the completion segments
that share it. A completion of n tokens contributes its first n - 1 tokens as inputs, because the last token
predicts nothing. With P = 3 prompt tokens and completions (a b c) and (d e)::

    stream      p0 p1 p2 | a  b  | d
    position    0  1  2  | 3  4  | 3
    predicts    .  .  a,d| b  c  | e

Each completion segment attends to [its prompt ; itself] (`swift.models.attention`). A group of one is plain packing.

Models that cannot be packed take right-padded rows instead (`pad`), which tests compare with.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn

from swift.models.attention.forked import takes_streams
from swift.models.attention.layout import SegmentLayout
from swift.models.attention.sequence_parallel import SequenceGroup, SpreadLayout
from swift.models.attention.spans import GroupSpans, Span
from swift.models.transfer import to_device
from swift.models.vision import Vision, forbid_placeholders, vision_of


@dataclass(slots=True)
class TokenSequence:
    """Token ids of one completion with its prompt, as sampled; those of images in the prompt are named (`vision`)."""

    prompt_ids: Sequence[int]
    completion_ids: Sequence[int]


@dataclass(slots=True)
class TokenBatch:
    """Completions as a model takes them, `model(**inputs)`, and where it predicts each of their tokens.

    inputs: ids, positions and layout of a packed stream [1, T]; or ids and mask of padded rows [S, L]. spans: where
    each sequence has its prompt and the inputs of its completion, rows joined. predict_index: [N] the place, likewise,
    whose hidden state predicts target n. target_ids: [N] the completion tokens, sequence after sequence. packed:
    whether they are one stream. group: the ranks that share the stream; None if this one has it alone.
    """

    inputs: dict[str, Any]
    spans: list[tuple[Span, Span]]
    predict_index: Tensor
    target_ids: Tensor
    packed: bool
    group: SequenceGroup | None = None

    def spread(self, group: SequenceGroup) -> TokenBatch:
        """The same packed stream, shared by the ranks of a group."""
        layout = SpreadLayout(self.inputs["attention_layout"], self.inputs["input_ids"].shape[1], group)
        return replace(self, inputs={**self.inputs, "attention_layout": layout}, group=group)

    def dealt(self) -> TokenBatch:
        """The same with this rank's share of the targets."""
        assert self.group is not None
        index, ids = self.group.dealt(self.predict_index), self.group.dealt(self.target_ids)
        return replace(self, predict_index=index, target_ids=ids, group=None)


def arrange(model: nn.Module, sequences: Sequence[TokenSequence], *, device: torch.device | str = "cpu") -> TokenBatch:
    """The sequences, packed if `model` takes packed streams, else padded."""
    return (pack if takes_streams(model) else pad)(sequences, device=device, vision=vision_of(model))


def pack(
    sequences: Sequence[TokenSequence],
    *,
    share_prompts: bool = True,
    device: torch.device | str = "cpu",
    vision: Vision | None = None,
) -> TokenBatch:
    """Pack completions into one stream; neighbours with equal prompt ids share one prompt segment.

    Args:
        sequences: S completions with at least one token each and at least one prompt token.
        share_prompts: compute a prompt once for neighbouring completions of it.
        device: where the tensors go.
        vision: that of the model; needed for prompts with images. Their pixels are there once per prompt segment.

    Returns:
        the stream, with T = sum of prompt lengths (shared ones once) + sum of (completion length - 1).
    """
    ids: list[int] = []
    spans: list[tuple[Span, Span]] = []
    groups: list[GroupSpans] = []
    prompts: list[Sequence[int]] = []
    for _, group in groupby(sequences, lambda sequence: tuple(sequence.prompt_ids) if share_prompts else id(sequence)):
        completions = list(group)
        prompt_ids = completions[0].prompt_ids
        prompt = Span(len(ids), len(prompt_ids))
        ids += prompt_ids
        prompts.append(prompt_ids)
        for sequence in completions:
            own = Span(len(ids), len(sequence.completion_ids) - 1)
            ids += sequence.completion_ids[:-1]
            spans.append((prompt, own))
        images = vision.spans(prompt_ids, prompt.start) if vision is not None else ()
        groups.append(GroupSpans(prompt, tuple(own for _, own in spans[-len(completions) :]), images=images))
    inputs = {**stream_inputs(ids, prompts, groups, device, vision), "attention_layout": SegmentLayout(groups, device)}
    return _batch(inputs, spans, sequences, device, packed=True)


def stream_inputs(
    ids: Sequence[int],
    prompts: Sequence[Sequence[int]],
    groups: Sequence[GroupSpans],
    device: torch.device | str,
    vision: Vision | None,
) -> dict[str, Tensor]:
    """Ids and positions of a stream, [1, T], and the pixels of its prompts, one for each group.

    Positions are [3, 1, T] where images lie in a plane: time, height, width (arXiv:2409.12191, section 2.1).
    """
    found = []
    for prompt, group in zip(prompts, groups, strict=True):
        axes, first = placed(prompt, vision)
        own = [place for span in group.completions for place in range(first, first + span.length)]
        found.append([[*axis, *own] for axis in axes])
    most = max(map(len, found))
    joined = [[place for axes in found for place in axes[axis % len(axes)]] for axis in range(most)]
    positions = to_device(joined, device)
    if vision is None:
        return {"input_ids": to_device([ids], device), "position_ids": positions}
    return {
        "input_ids": to_device([vision.visible(ids)], device),
        "position_ids": positions if most == 1 else positions[:, None],
        **vision.features(prompts, device),
    }


def placed(prompt: Sequence[int], vision: Vision | None) -> tuple[Sequence[Sequence[int]], int]:
    """Positions of a prompt's tokens, a row for each axis that differs, and the position of the token after it."""
    return ([range(len(prompt))], len(prompt)) if vision is None else vision.positions(prompt)


def pad(
    sequences: Sequence[TokenSequence], *, device: torch.device | str = "cpu", vision: Vision | None = None
) -> TokenBatch:
    """The same sequences as right-padded rows, for a model with one of transformers' own attention functions.

    The pixels of a prompt are there once per row.
    """
    rows = [[*sequence.prompt_ids, *sequence.completion_ids[:-1]] for sequence in sequences]
    width = max(map(len, rows))
    padded = [row + [0] * (width - len(row)) for row in rows]
    inputs = {"attention_mask": to_device([[1] * len(row) + [0] * (width - len(row)) for row in rows], device)}
    if vision is not None:
        inputs |= {**vision.features(rows, device), **vision.token_kinds(padded, device)}
        padded = [vision.visible(row) for row in padded]
    inputs["input_ids"] = to_device(padded, device)
    spans = []
    for i, sequence in enumerate(sequences):
        prompt = Span(i * width, len(sequence.prompt_ids))
        spans.append((prompt, Span(prompt.stop, len(sequence.completion_ids) - 1)))
    return _batch(inputs, spans, sequences, device, packed=False)


def _batch(
    inputs: dict[str, Any],
    spans: list[tuple[Span, Span]],
    sequences: Sequence[TokenSequence],
    device: torch.device | str,
    *,
    packed: bool,
) -> TokenBatch:
    assert all(prompt.length and own.length >= 0 for prompt, own in spans), "a sequence needs prompt and completion"
    predict = [place for prompt, own in spans for place in (prompt.stop - 1, *range(own.start, own.stop))]
    targets = [token for sequence in sequences for token in sequence.completion_ids]
    return TokenBatch(inputs, spans, to_device(predict, device), to_device(targets, device), packed)


def completion_logits(model: nn.Module, tokens: TokenBatch) -> Tensor:
    """Logits [N, V] that predict each completion token; see `completion_output`."""
    return completion_output(model, tokens)[0]


def completion_output(model: nn.Module, tokens: TokenBatch, **asked: Any) -> tuple[Tensor, Any]:
    """Logits [N, V] that predict each completion token, and the model's whole output; `asked`: for more outputs.

    The call goes through `model` itself (DDP, FSDP and ZeRO wrappers included). Of a packed stream the head is applied
    to the N predicting positions only.
    """
    assert takes_streams(model) or not tokens.packed, "the model's attention would read it as one row"
    if tokens.packed:
        output = model(**tokens.inputs, logits_to_keep=tokens.predict_index, use_cache=False, **asked)
        logits = output.logits[0]
    else:
        output = model(**tokens.inputs, use_cache=False, **asked)
        logits = output.logits.flatten(0, 1)[tokens.predict_index]
    return forbid_placeholders(model, logits), output
