"""Answers as server-sent events: parts of texts while their tokens come, as far as they are certain."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from functools import partial
from typing import Any

from swift.rollout.engines import wire
from swift.rollout.engines.completion_stream import Grown
from swift.rollout.server.service import Answers
from swift.rollout.server.shapes import Sampling
from swift.rollout.server.texts import Said, Texts
from swift.types import Completion, Request

UNFINISHED_TOKENS = 16
"""Tokens of a character that is not complete; with more of them it never will be."""

Choice = Callable[[int, Request, Said], dict[str, Any]]


class GrowingText:
    """The text of tokens that come one after the other; a character whose bytes are not complete waits.

    Args:
        decode: tokens to text.
        held_back: characters at the end that are not certain, because a stop text may begin there.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], held_back: int) -> None:
        self.decode, self.held_back = decode, held_back
        self.text, self.told = "", 0
        self._before = self._read = 0  # tokens: in `text`, and of them those before the last step

    def add(self, token_ids: Sequence[int]) -> str:
        """All tokens so far; what may be told of them beyond what was."""
        known = self.decode(token_ids[self._before : self._read])
        text = self.decode(token_ids[self._before :])
        if not text.endswith("\ufffd") or len(token_ids) - self._read > UNFINISHED_TOKENS:
            self.text += text[len(known) :]
            self._before, self._read = self._read, len(token_ids)
        certain = max(self.told, len(self.text) - self.held_back)
        told, self.told = self.text[self.told : certain], certain
        return told

    def rest(self, text: str) -> str:
        """What was not told yet of the whole text."""
        return text[self.told :]


class Events:
    """The answers to the requests of one client; see the module's docstring.

    Args:
        answers: what comes of the requests.
        texts: of the server.
        requests: in the order of their entries.
        choice: makes an entry.
        head: what all events have in common.
        body: what was asked for.
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
            ended = [one for one in arrivals if isinstance(one, Completion)]
            for one in ended:
                self.texts.service.ledger.add(self.requests[self.places[one.request_id]].prompt_ids, one)
                grown.pop(one.request_id, None)
            done += ended
            for choice in await self.texts.run(partial(self._parts, grown, ended)):
                yield _event({**self.head, "choices": [choice]})
            failure = next((one for one in arrivals if not isinstance(one, Completion)), None)
            if failure is not None:
                yield _event(wire.error_body(failure.error, 500))
                break
        else:
            if self.wants_usage:
                yield _event({**self.head, "choices": [], "usage": usage(self.requests, done, self.body)})
        yield b"data: [DONE]\n\n"

    def _parts(self, grown: Mapping[str, Grown], ended: Sequence[Completion]) -> list[dict[str, Any]]:
        """Entries for what has come, of those that grow and of those that have ended."""
        parts = []
        for name, so_far in grown.items():
            index = self.places[name]
            text = self.growing[index].add(so_far[0])
            if text:
                version = self.texts.service.engine.version
                parts.append(self._part(index, text, so_far, version))
        for one in ended:
            index = self.places[one.request_id]
            text, stop = self.texts.said(self.requests[index], one, self.body)
            rest, version = self.growing[index].rest(text), self.texts.version(one)
            so_far = (one.token_ids, one.logprobs, one.top_logprobs)
            parts.append(self._part(index, rest, so_far, version, stop=stop, completion=one))
        return parts

    def _part(self, index: int, text: str, so_far: Grown, version: int, **end: Any) -> dict[str, Any]:
        sent, self.sent[index] = self.sent[index], len(so_far[0])
        offset, self.offsets[index] = self.offsets[index], len(self.growing[index].text)
        token_ids, logprobs, tops = so_far
        new = (token_ids[sent:], logprobs[sent:], tops[sent:])
        said = Said(text, *new, version, first=sent == 0, offset=offset, **end)
        return self.choice(index, self.requests[index], said)


def usage(requests: Sequence[Request], done: Sequence[Completion], body: Sampling) -> dict[str, int]:
    """Tokens that were read and written; a prompt of several samples counts once."""
    read = sum(len(one.prompt_ids) for one in requests[:: body.n or 1])
    written = sum(len(one.token_ids) for one in done)
    return {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}


def _held_back(request: Request) -> int:
    return max((len(stop) - 1 for stop in request.sampling.stop), default=0)


def _event(content: dict[str, Any]) -> bytes:
    return b"data: " + wire.encode(content) + b"\n\n"
