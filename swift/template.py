"""ms-swift's view of a chat template, which plugins of reward models get: rows to padded batches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from swift.models.template import Template as ChatTemplate

Messages = list[dict[str, Any]]


class Template:
    """Wraps the chat template of a model, which is `chat`, with its `tokenizer`."""

    def __init__(self, chat: ChatTemplate) -> None:
        self.chat, self.tokenizer = chat, chat.tokenizer

    def encode(self, row: Mapping[str, Any], **kwargs: Any) -> dict[str, Any]:
        """`input_ids` of the finished conversation in the column `messages` of a row.

        Raises RefusedChat: the template refuses it.
        """
        return {"input_ids": self.chat.encode_finished(row["messages"])}

    def data_collator(self, encoded: Sequence[Mapping[str, Any]], **kwargs: Any) -> dict[str, torch.Tensor]:
        """`input_ids` and `attention_mask` [rows, tokens] of what `encode` returned, padded on the right."""
        rows = [row["input_ids"] for row in encoded]
        return padded(rows, self.tokenizer.pad_token_id or 0, left=False)


def padded(rows: Sequence[Sequence[int]], pad_id: int, *, left: bool) -> dict[str, torch.Tensor]:
    """`input_ids` and `attention_mask` [rows, tokens] of token ids, padded to the longest row."""
    import torch

    width = max(map(len, rows))
    ids, mask = torch.full((len(rows), width), pad_id), torch.zeros(len(rows), width, dtype=torch.long)
    for index, row in enumerate(rows):
        place = slice(width - len(row), width) if left else slice(len(row))
        ids[index, place], mask[index, place] = torch.tensor(row), 1
    return {"input_ids": ids, "attention_mask": mask}
