"""Evaluation by answers: sampled from the model as it is, greedily, and compared with those of the rows.

ROUGE (Lin, 2004) and BLEU (Papineni et al., 2002) of words, in percent. Unlike ms-swift's, ROUGE counts a repeated word
as often as it occurs, and an answer without words counts as 0.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar

from torch import nn

from swift.devices import cache_room, own_device
from swift.errors import RefusedChat
from swift.models.attention.interface import set_attention, transformers_model
from swift.trainers.arguments import MEASURED
from swift.trainers.sft_data import ChatEncoder
from swift.types import Completion, Request, SamplingParams

if TYPE_CHECKING:
    from datasets import Dataset

    from swift.models.template import Template
    from swift.trainers.distributed import Collectives


@dataclass(frozen=True)
class AnswerEncoder(ChatEncoder):
    """A `ChatEncoder` of evaluation rows, which adds the prompt of the last answer, and its text."""

    columns: ClassVar = {**ChatEncoder.columns, "prompt_ids": "ids", "answer": "string"}

    def encode(
        self, messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]] | None = None
    ) -> dict[str, Any]:
        """See `Encoder`."""
        if len(messages) < 2:
            raise RefusedChat("no prompt to answer")
        if messages[-1]["role"] != "assistant":
            raise RefusedChat("no assistant turn at its end")
        row = super().encode(messages, tools)
        ids = self.template.encode_prompt(messages[:-1], *([tools] if tools else []))
        self.check_length(len(ids) + 1)
        same = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(ids, row["input_ids"], strict=False))
        answer = self.template.decode(row["input_ids"][len(list(same)) :])
        return {**row, "prompt_ids": ids, "answer": answer}


def similarity(answer: str, reference: str) -> dict[str, float]:
    """Percentages of `MEASURED`: F1 of unigrams, of bigrams and of the longest common subsequence; smoothed BLEU.

    Chinese is cut into words by jieba.
    """
    import jieba
    from nltk.translate.bleu_score import SmoothingFunction, sentence_bleu
    from rouge_score.rouge_scorer import RougeScorer

    words, expected = ([word for word in jieba.cut(text) if word.strip()] for text in (answer, reference))
    if not words or not expected:
        return dict.fromkeys(MEASURED, 0.0)
    rouge = RougeScorer(["rouge1", "rouge2", "rougeL"], tokenizer=SimpleNamespace(tokenize=list))
    bleu = sentence_bleu([expected], words, smoothing_function=SmoothingFunction().method3)
    found = [*(score.fmeasure for score in rouge.score(expected, words).values()), bleu]
    return {name: 100 * float(share) for name, share in zip(MEASURED, found, strict=True)}


@contextlib.contextmanager
def attention_kept(model: nn.Module) -> Iterator[None]:
    """Undo at the end the choice of an engine, whose attention needs the layout of a packed stream."""
    own = transformers_model(model).config.get_text_config()._attn_implementation
    try:
        yield
    finally:
        set_attention(model, own)


class AnswersRows:
    """Mixin before SFTTrainer: its evaluation has the means of `similarity`, too, if `sampling` is given.

    Each rank answers every N-th row. template: that of the rows of `AnswerEncoder`.
    """

    template: Template
    collectives: Collectives
    eval_dataset: Dataset | Mapping[str, Dataset]

    def __init__(self, *, sampling: SamplingParams | None = None, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.sampling = sampling

    def evaluation_loop(self, *arguments: Any, metric_key_prefix: str = "eval", **named: Any) -> Any:
        """As Trainer's."""
        output = super().evaluation_loop(*arguments, metric_key_prefix=metric_key_prefix, **named)  # type: ignore[misc]
        if self.sampling is not None:
            name = metric_key_prefix.removeprefix("eval").lstrip("_")
            means = self._compared(self.eval_dataset[name] if name else self.eval_dataset)
            output.metrics.update({f"{metric_key_prefix}_{metric}": mean for metric, mean in means.items()})
        return output

    def _compared(self, table: Any) -> dict[str, float]:
        rows = table.select(range(self.collectives.rank, len(table), self.collectives.world_size))
        scores = [
            similarity(self.template.decode(completion.token_ids), rows[int(completion.request_id)]["answer"])
            for completion in self._sampled(rows["prompt_ids"])
        ]
        sums = self.collectives.sum([sum(score[name] for score in scores) for name in MEASURED])
        return {name: total / len(table) for name, total in zip(MEASURED, sums, strict=True)}

    def _sampled(self, prompts: Sequence[list[int]]) -> list[Completion]:
        from swift.rollout.engines.transformers import TransformersEngine

        assert self.sampling is not None
        model, ends = self.model, self.template.stop_token_ids  # type: ignore[attr-defined]
        requests = [Request(str(number), ids, self.sampling) for number, ids in enumerate(prompts)]
        with attention_kept(model):
            engine = TransformersEngine(model, eos_token_ids=ends, cache_bytes=cache_room(own_device()))
            with contextlib.closing(engine):
                return list(engine.sample(requests))
