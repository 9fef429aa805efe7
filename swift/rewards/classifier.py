"""Labels of texts by a classifier of `swift sft --task_type seq_cls`, or another model with such a head."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from swift.errors import RefusedChat, counted
from swift.models.labels import Labels
from swift.models.source import ModelSource, labels_of, read_json
from swift.models.trained import RECORD
from swift.rewards.model_files import RewardModelSource
from swift.rewards.models import RewardModel

if TYPE_CHECKING:
    from torch import Tensor

    from swift.models.template import Template


class Classifier(RewardModel):
    """Reads texts as its training did: by the chat template, or as they are.

    Args:
        source: the files.
        trust_remote_code: whether code from its repository may run.
    """

    head = "label"

    def __init__(self, source: ModelSource, trust_remote_code: bool) -> None:
        adapter = source.adapters[0] if source.adapters else None
        labels = labels_of(source.base, *source.adapters)
        assert labels is not None, "head_of has found a classifier"
        self.labels = labels
        super().__init__(RewardModelSource(source.base.name, source.base, adapter), trust_remote_code)

    def predictions(self, chats: Sequence[Sequence[dict[str, Any]]]) -> list[dict[str, Any]]:
        """`label` of each text: a class, classes, a number or several; and `probabilities` of all classes.

        The label is None for a text that the chat template refuses, or longer than the model's context.
        """
        return [found or {"label": None} for found in self._judged(chats)]

    def encode(self, chat: Sequence[dict[str, Any]]) -> list[int]:
        """Token ids of a text, which is never cut: an encoder reads its label off the first one."""
        ids = self._token_ids(chat)
        if len(ids) > self._max_tokens:
            raise RefusedChat(f"{len(ids)} tokens, above the model's context of {self._max_tokens}")
        return ids

    def _template_of(self, tokenizer: Any) -> Template:
        from swift.models.template import PlainText, Template

        folder = self.source.adapter or self.source.folder
        recorded = read_json(folder / RECORD) if (folder / RECORD).is_file() else {}
        plain = recorded.get("use_chat_template") is False or not tokenizer.chat_template
        return PlainText(tokenizer, ends=False) if plain else Template(tokenizer)

    def _token_ids(self, chat: Sequence[dict[str, Any]]) -> list[int]:
        return self._template.encode_judged(chat)

    @property
    def _num_labels(self) -> int:
        return self.labels.num

    def _values(self, rows: Sequence[list[int]], chats: Sequence[Sequence[dict[str, Any]]]) -> list[dict[str, Any]]:
        return [self._prediction(logits) for logits in self._logits(rows).float().cpu()]

    def _prediction(self, logits: Tensor) -> dict[str, Any]:
        if self.labels.problem == "regression":
            return {"label": logits.tolist() if self.labels.num > 1 else float(logits)}
        if self.labels.problem == "single_label_classification":
            return {"label": int(logits.argmax()), "probabilities": logits.softmax(-1).tolist()}
        chosen = (logits >= 0).nonzero()[:, 0]  # a probability of at least 0.5
        return {"label": chosen.tolist(), "probabilities": logits.sigmoid().tolist()}


def agreement(pairs: Sequence[tuple[Any, list[float]]], labels: Labels) -> str:
    """A line about predicted labels of rows, and their true ones.

    >>> agreement([(1, [1.0]), (0, [1.0]), (None, [0.0])], Labels(2, "single_label_classification"))
    'accuracy: 0.5000 of 2 rows'
    """
    pairs = [(found, truth) for found, truth in pairs if found is not None]
    if labels.problem == "regression":
        squares = [
            (number - value) ** 2
            for found, truth in pairs
            for number, value in zip(found if isinstance(found, list) else [found], truth, strict=True)
        ]
        return f"mean squared error: {sum(squares) / max(1, len(squares)):.4g} of {counted(len(pairs), 'row')}"
    right = sum(sorted(truth) == (found if isinstance(found, list) else [found]) for found, truth in pairs)
    return f"accuracy: {right / max(1, len(pairs)):.4f} of {counted(len(pairs), 'row')}"
