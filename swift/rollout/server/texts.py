"""Tokenization of texts and decoding of completions: on a background thread, bounded by the context length.

Long texts are tokenized on another thread, so that they delay each other only.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import accumulate
from typing import Any, TypeVar

from swift.data.image_store import brought, images_sent
from swift.errors import RefusedChat
from swift.rollout.engines.running import first_stop
from swift.rollout.server.access import Refused, field_error
from swift.rollout.server.chats import call_reader, forced_call, read_chat
from swift.rollout.server.service import Service
from swift.rollout.server.shapes import ChatRequest, CompletionRequest, Sampling, TokenizeRequest
from swift.types import Alternatives, Completion, Request, ShownImage

TURN = 1 << 18
"""Number of characters that are tokenized at a time; other texts are processed in between."""
INCOMPLETE = "\ufffd"
"""Text of an incomplete character."""

T = TypeVar("T")


@dataclass(slots=True)
class AnswerPart:
    """An answer, or the next part of a streamed one.

    top_logprobs: those of the completion. first: whether the answer begins with it. offset: its position in the text.
    stop: stop text that ended the answer. completion: the whole completion, in the last part.
    """

    text: str
    token_ids: Sequence[int]
    logprobs: Sequence[float]
    top_logprobs: Sequence[Alternatives]
    version: int
    first: bool
    offset: int = 0
    stop: str | None = None
    completion: Completion | None = None

    def choice(self, index: int, **fields: Any) -> dict[str, Any]:
        """The common fields of the entries of all routes, and `fields`."""
        finish_reason = self.completion.finish_reason if self.completion is not None else None
        ended = {"finish_reason": finish_reason, "stop_reason": self.stop}
        return {"index": index, **fields, **ended, "weight_version": self.version}


class Texts:
    """Tokenizer and template of the server, on a background thread, one call at a time.

    They would block the event loop, and tokenizers are not thread-safe.
    """

    def __init__(self, service: Service) -> None:
        self.service = service
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="texts")
        self._long = ThreadPoolExecutor(1, thread_name_prefix="long-texts")
        self._tokens: dict[int, str] = {}
        self.context = service.engine.capabilities.max_model_len
        self.longest = max(map(len, service.template.tokenizer.get_vocab()), default=1)  # characters of a token

    async def run(self, work: Callable[[], T]) -> T:
        """Run work with tokenizer, template or long answers on the background thread."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    async def tokenize(self, text: str, *, special: bool = True) -> list[int]:
        """Token ids of a text, in turns of `TURN` characters. Raises Refused (422): it cannot fit the context."""
        self.check_length(text)
        if len(text) <= TURN:
            return await self.run(partial(_ids, self.service.template.tokenizer, text, special=special))
        loop, count = asyncio.get_running_loop(), 0
        for turn, start in enumerate(range(0, len(text), TURN)):
            part = text[start : start + TURN]
            count += len(await loop.run_in_executor(self._long, partial(self._long_ids, part, special=False)))
            if count - turn * self.longest > self.context:  # a cut may add the characters of one token
                raise self._too_long(f"over {count} tokens")
        return await loop.run_in_executor(self._long, partial(self._long_ids, text, special=special))

    def _long_ids(self, text: str, *, special: bool) -> list[int]:
        return _ids(self._long_tokenizer, text, special=special)

    @cached_property
    def _long_tokenizer(self) -> Any:
        """A copy for the thread of long texts, as tokenizers are not thread-safe."""
        return copy.deepcopy(self.service.template.tokenizer)

    def check_length(self, *parts: Any) -> None:
        """Raises Refused (422) for texts that cannot fit the context, before they are processed."""
        most = self.context * self.longest
        if count_characters(parts, most) > most:
            raise self._too_long(f"over {most} characters")

    def _too_long(self, size: str) -> Refused:
        return field_error(f"prompt: {size}: too long for the context of {self.context} tokens; shorten it")

    async def chat_ids(
        self, body: ChatRequest | TokenizeRequest, *, prompt: bool = True
    ) -> tuple[list[int], Sequence[ShownImage]]:
        """Token ids of messages, by the chat template, and the images that they name.

        Raises Refused (422): the template does not accept them, or an image cannot be used.
        """
        vision = self.service.template.vision
        sees = vision is not None and self.service.engine.capabilities.images
        read = await self.run(lambda: read_chat(body.messages or [], sees=sees))

        def rendered() -> str:
            messages = list(read.messages)
            self.check_length(messages, body.tools, body.chat_template_kwargs)
            system = self.service.settings.system
            if system and not any(message.get("role") in ("system", "developer") for message in messages):
                messages.insert(0, {"role": "system", "content": system})
            try:
                self.service.template.check_tools(messages, body.tools)
                return self.service.template.render(
                    messages, add_generation_prompt=prompt, tools=body.tools, kwargs=body.chat_template_kwargs
                )
            except RefusedChat as error:
                raise Refused(422, "messages", error.problems[0]) from error

        def encoded(text: str) -> tuple[list[int], Sequence[ShownImage]]:
            with brought([read.images]):
                ids = self.service.template.encode_pieces([text], read.messages)[0]
                return ids, images_sent(ids)

        text = await self.run(rendered)
        try:
            if read.images:
                self.check_length(text)
                return await self.run(partial(encoded, text))
            ids = await self.tokenize(text, special=False)
            if vision is not None:
                vision.check_text(ids)
        except RefusedChat as error:
            raise Refused(422, "messages", error.problems[0]) from error
        return ids, ()

    def visible(self, ids: Sequence[int]) -> list[int]:
        """Token ids for clients: placeholders of images as the model has them."""
        vision = self.service.template.vision
        return list(ids) if vision is None else vision.visible(ids)

    def text_of(self, request: Request, completion: Completion, body: Sampling) -> tuple[str, str | None]:
        """The text of a completion, and the stop text that ended it.

        Token ids and log-probs include the end token or stop text, which trainers need; the text only on request.
        """
        ids, template = completion.token_ids, self.service.template
        ended = completion.finish_reason == "stop" and not body.include_stop_str_in_output
        if ended and ids and ids[-1] in request.sampling.stop_token_ids:
            ids = ids[:-1]
        decode = partial(template.decode, skip_special_tokens=body.skip_special_tokens)
        text = decode(ids)
        if not ended or len(ids) < len(completion.token_ids):
            return text, None
        position, stop = first_stop(ids, request.sampling.stop, request.sampling.min_tokens, decode)
        return (text[:position], stop) if stop else (text, None)

    def message(self, completion: Completion, text: str, body: ChatRequest) -> dict[str, Any]:
        """An answer in a chat, with calls of the client's tools."""
        if not body.tools or body.tool_choice == "none":
            return {"role": "assistant", "content": text}
        if body.must_call:
            return forced_call(text)
        raw = self.service.template.decode(completion.token_ids, skip_special_tokens=False)
        most = 1 if body.parallel_tool_calls is False else None
        return call_reader(self.service.template).message(text, raw, body.tools, most)

    def _text(self, token: int) -> str:
        """The text of a single token."""
        if token not in self._tokens:
            self._tokens[token] = self.service.template.decode([token], skip_special_tokens=False)
        return self._tokens[token]

    def _name(self, token: int, body: CompletionRequest | ChatRequest) -> str:
        return f"token_id:{token}" if body.return_tokens_as_token_ids else self._text(token)

    def chat_logprobs(self, part: AnswerPart, body: ChatRequest) -> list[dict[str, Any]]:
        """Tokens and their log-probs in the format of chats."""

        def entry(token: int, logprob: float) -> dict[str, Any]:
            text = self._text(token)
            data = None if INCOMPLETE in text else list(text.encode())
            return {"token": self._name(token, body), "logprob": logprob, "bytes": data}

        tops = part.top_logprobs or [[]] * len(part.token_ids)
        return [
            {**entry(token, logprob), "top_logprobs": [entry(*alternative) for alternative in top]}
            for token, logprob, top in zip(part.token_ids, part.logprobs, tops, strict=True)
        ]

    def completion_logprobs(self, part: AnswerPart, body: CompletionRequest) -> dict[str, Any]:
        """The same in the format of completions; of several tokens with the same text the first is listed."""
        tops: list[dict[str, float]] = []
        for candidates in alternatives(part):
            tops.append({})
            for token, logprob in candidates:
                tops[-1].setdefault(self._name(token, body), logprob)
        offsets = accumulate((len(self._text(token)) for token in part.token_ids), initial=part.offset)
        return {
            "tokens": [self._name(token, body) for token in part.token_ids],
            "token_logprobs": part.logprobs,
            "top_logprobs": tops,
            "text_offset": list(offsets)[:-1],
        }

    def whole_answer(self, request: Request, completion: Completion, body: Sampling) -> AnswerPart:
        text, stop = self.text_of(request, completion, body)
        version = self.version(completion)
        tops = completion.top_logprobs
        return AnswerPart(
            text, completion.token_ids, completion.logprobs, tops, version, True, stop=stop, completion=completion
        )

    def version(self, completion: Completion) -> int:
        return max((version for version, _, _ in completion.versions), default=self.service.engine.version)


def alternatives(part: AnswerPart | Completion) -> list[Alternatives]:
    """At each position the sampled token and its log-prob, then the most likely ones."""
    tops = part.top_logprobs or [[]] * len(part.token_ids)
    return [[(token, logprob), *top] for token, logprob, top in zip(part.token_ids, part.logprobs, tops, strict=True)]


def _ids(tokenizer: Any, text: str, *, special: bool) -> list[int]:
    return list(tokenizer(text, add_special_tokens=special)["input_ids"])


def count_characters(value: Any, most: int) -> int:
    """Characters of all texts in a JSON value, and one for each other entry; counting ends beyond `most`."""
    remaining, count = [value], 0
    while remaining and count <= most:
        entry = remaining.pop()
        if isinstance(entry, str):
            count += len(entry)
        elif isinstance(entry, Mapping):
            remaining += entry.values()
            count += sum(map(len, entry))
        elif isinstance(entry, Sequence):
            remaining += entry
        else:
            count += 1
    return count
