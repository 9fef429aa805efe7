"""A model that answers chats beside a run, for generative judges: `generate` of transformers over padded batches.

The tokens of a batch depend on its chats and the seed alone, and the random generators of the run stay as they are.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from swift.infer_engine.protocol import ChatCompletionResponse, ChatCompletionResponseChoice, ChatMessage, RequestConfig
from swift.template import padded

if TYPE_CHECKING:
    from swift.template import Template


class TransformersEngine:
    """Answers chats with a causal model.

    Args:
        model: loaded, in evaluation mode.
        template: its chat template.
        max_batch_size: maximum number of chats at a time; 0 for no limit.
    """

    def __init__(self, model: Any, *, template: Template, max_batch_size: int = 1, **kwargs: Any) -> None:
        self.model, self.template, self.max_batch_size = model, template, max_batch_size

    def infer(
        self, infer_requests: Sequence[Any], request_config: RequestConfig | None = None, **kwargs: Any
    ) -> list[ChatCompletionResponse]:
        """A response per request: an object with `messages`, or a mapping that has them.

        A chat that fills the context has an empty answer, which ends with "length".
        """
        chats = [one["messages"] if isinstance(one, Mapping) else one.messages for one in infer_requests]
        rows = [self.template.chat.encode_prompt(chat) for chat in chats]
        config = request_config or RequestConfig()
        room = self.model.config.get_text_config().max_position_embeddings
        fitting = [index for index, row in enumerate(rows) if len(row) < room]
        answers = dict.fromkeys(range(len(rows)), ChatCompletionResponse([self._choice([], 0)] * config.n))
        size = self.max_batch_size or len(rows)
        for start in range(0, len(fitting), size):
            batch = fitting[start : start + size]
            answers.update(zip(batch, self._answer([rows[index] for index in batch], config, room), strict=True))
        return list(answers.values())

    def _answer(self, rows: list[list[int]], config: RequestConfig, room: int) -> Iterator[ChatCompletionResponse]:
        """A response per row of token ids, each shorter than the context (`room`)."""
        import torch

        device = self.model.device
        inputs = padded(rows, self.template.chat.pad_token_id, left=True)
        width = inputs["input_ids"].shape[1]
        digest = hashlib.blake2b(repr((rows, config.seed)).encode(), digest_size=7).digest()
        with torch.random.fork_rng([device] if device.type == "cuda" else []), torch.inference_mode():
            torch.manual_seed(int.from_bytes(digest))
            ids = self.model.generate(
                **{name: values.to(device) for name, values in inputs.items()},
                **self._options(config, room - width),
                num_return_sequences=config.n,
                use_cache=True,
            )
        answers = ids[:, width:].tolist()
        for start in range(0, len(answers), config.n):
            choices = [self._choice(answer, index) for index, answer in enumerate(answers[start : start + config.n])]
            yield ChatCompletionResponse(choices)

    def _options(self, config: RequestConfig, room: int) -> dict[str, Any]:
        """Keywords of `generate`. room: maximum number of new tokens."""
        names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
        options = {name: value for name in names if (value := getattr(config, name)) is not None}
        if config.temperature == 0:
            options = {"do_sample": False}
        elif options:
            options["do_sample"] = True
        if config.stop:
            options |= {"stop_strings": config.stop, "tokenizer": self.template.tokenizer}
        return options | {
            "max_new_tokens": min(config.max_tokens or room, room),
            "eos_token_id": list(self.template.chat.stop_token_ids),
            "pad_token_id": self.template.chat.pad_token_id,
        }

    def _choice(self, ids: list[int], index: int) -> ChatCompletionResponseChoice:
        """An answer up to its end token."""
        stops = self.template.chat.stop_token_ids
        end = next((place for place, token in enumerate(ids) if token in stops), None)
        text = self.template.chat.decode(ids[:end])
        return ChatCompletionResponseChoice(ChatMessage(text), "length" if end is None else "stop", ids[:end], index)
