"""One forward pass over a packed stream of prompts and completions: the trainer's view of a rollout.

Layout of a stream (no padding anywhere): for each group its prompt segment once, then the completion segments
that share it. A completion of n tokens contributes its first n - 1 tokens as inputs, because the last token
predicts nothing. With P = 3 prompt tokens and completions (a b c) and (d e)::

    stream      p0 p1 p2 | a  b  | d
    position    0  1  2  | 3  4  | 3
    predicts    .  .  a,d| b  c  | e

Each completion segment attends to [its prompt ; itself] (`swift.models.attention`). A group of one is plain packing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from swift.models.attention.interface import is_packed
from swift.models.attention.layout import SegmentLayout
from swift.models.attention.spans import GroupSpans, Span


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
