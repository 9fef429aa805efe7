"""Answers as server-sent events: parts of the text during sampling, as far as it is final."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from functools import partial
from typing import Any

from swift.rollout.engines import wire
from swift.rollout.engines.completion_stream import Grown
from swift.rollout.server.service import Answers
from swift.rollout.server.shapes import Sampling
from swift.rollout.server.texts import AnswerPart, Texts
from swift.types import Completion, Request

UNFINISHED_TOKENS = 16
"""Maximum number of tokens of an incomplete character; text after more tokens is sent as it is."""

Choice = Callable[[int, Request, AnswerPart], dict[str, Any]]


class GrowingText:
    """Incremental decoding of tokens; an incomplete character is held back.

    Args:
        decode: converts tokens to text.
        held_back: number of characters at the end that are held back, because a stop text may begin there.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], held_back: int) -> None:
        self.decode, self.held_back = decode, held_back
        self.text, self.num_sent = "", 0
        self._before = self._read = 0  # tokens: in `text`, and of them those before the last step

    def add(self, token_ids: Sequence[int]) -> str:
        """Add all tokens so far; returns the next part of the text that is final.

        Fewer tokens than before belong to a second try (see `Request.limit_s`), which samples the same ones again.
        """
        if len(token_ids) <= self._read:
            return ""
        before = self.decode(token_ids[self._before : self._read])
        text = self.decode(token_ids[self._before :])
        if not text.endswith("\ufffd") or len(token_ids) - self._read > UNFINISHED_TOKENS:
            self.text += text[len(before) :]
            self._before, self._read = self._read, len(token_ids)
        final = max(self.num_sent, len(self.text) - self.held_back)
        part, self.num_sent = self.text[self.num_sent : final], final
        return part

    def rest(self, text: str) -> str:
        """The part of the whole text that is not sent yet."""
        return text[self.num_sent :]


class Events:
    """The answers to the requests of one client; see the module's docstring.

    Args:
        answers: the completions of the requests.
        texts: tokenizer and template of the server.
        requests: the requests, in the order of their entries.
        choice: returns an entry.
        head: common fields of all events.
        body: the body of the client's request.
    """

    def __init__(
        self,
        answers: Answers,
        texts: Texts,
        requests: Sequence[Request],
        choice: Choice,
        head: dict[str, Any],
        body: Sampling,
    ) -> None:
        self.answers, self.texts, self.requests, self.choice, self.body = answers, texts, requests, choice, body
        self.wants_usage = bool(body.stream_options and body.stream_options.include_usage)
        self.head = {**head, "usage": None} if self.wants_usage else head
        self.places = {request.request_id: index for index, request in enumerate(requests)}
        self.growing = [GrowingText(self._decode, _held_back(request)) for request in requests]
        self.sent = [0] * len(requests)  # tokens
        self.offsets = [0] * len(requests)  # characters

    def _decode(self, token_ids: Sequence[int]) -> str:
        return self.texts.service.template.decode(token_ids, skip_special_tokens=self.body.skip_special_tokens)

    async def all(self) -> AsyncIterator[bytes]:
        """The events, up to the last."""
        done: list[Completion] = []
        while len(done) < len(self.requests):
            arrivals = await self.answers.next(wire.ALIVE_S)
            grown = self.answers.stream.take_grown()
            if not arrivals and not grown:
                yield b": waiting\n\n"
            ended = [arrival for arrival in arrivals if isinstance(arrival, Completion)]
            for completion in ended:
                index = self.places[completion.request_id]
                self.texts.service.sampled_versions.add(self.requests[index].prompt_ids, completion)
                grown.pop(completion.request_id, None)
            done += ended
            for choice in await self.texts.run(partial(self._parts, grown, ended)):
                yield _event({**self.head, "choices": [choice]})
            failure = next((arrival for arrival in arrivals if not isinstance(arrival, Completion)), None)
            if failure is not None:
                yield _event(wire.error_body(failure.error, 500))
                break
        else:
            if self.wants_usage:
                yield _event({**self.head, "choices": [], "usage": usage(self.requests, done, self.body)})
        yield b"data: [DONE]\n\n"

    def _parts(self, grown: Mapping[str, Grown], ended: Sequence[Completion]) -> list[dict[str, Any]]:
        """Entries for the new tokens of unfinished answers, and for the answers that have ended."""
        parts = []
        for name, so_far in grown.items():
            index = self.places[name]
            text = self.growing[index].add(so_far[0])
            if text:
                version = self.texts.service.engine.version
                parts.append(self._part(index, text, so_far, version))
        for completion in ended:
            index = self.places[completion.request_id]
            text, stop = self.texts.text_of(self.requests[index], completion, self.body)
            rest, version = self.growing[index].rest(text), self.texts.version(completion)
            so_far = (completion.token_ids, completion.logprobs, completion.top_logprobs)
            parts.append(self._part(index, rest, so_far, version, stop=stop, completion=completion))
        return parts

    def _part(self, index: int, text: str, so_far: Grown, version: int, **end: Any) -> dict[str, Any]:
        sent, self.sent[index] = self.sent[index], len(so_far[0])
        offset, self.offsets[index] = self.offsets[index], len(self.growing[index].text)
        token_ids, logprobs, tops = so_far
        new = (token_ids[sent:], logprobs[sent:], tops[sent:])
        part = AnswerPart(text, *new, version, first=sent == 0, offset=offset, **end)
        return self.choice(index, self.requests[index], part)


def usage(requests: Sequence[Request], done: Sequence[Completion], body: Sampling) -> dict[str, int]:
    """Numbers of prompt and completion tokens; a prompt of several samples counts once."""
    num_prompt = sum(len(request.prompt_ids) for request in requests[:: body.n or 1])
    num_sampled = sum(len(completion.token_ids) for completion in done)
    return {
        "prompt_tokens": num_prompt, "completion_tokens": num_sampled, "total_tokens": num_prompt + num_sampled,
    }  # fmt: skip


def _held_back(request: Request) -> int:
    return max((len(stop) - 1 for stop in request.sampling.stop), default=0)


def _event(content: dict[str, Any]) -> bytes:
    return b"data: " + wire.encode(content) + b"\n\n"
