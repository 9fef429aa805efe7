"""OpenAI's API with vLLM's fields for token ids, which agents and environments use, and the plain /generate.

Log-probs are those of the distribution that was sampled from, of the sampled token alone. A stream carries one chunk
per completion, when it ends.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Annotated, Any, TypeVar

from fastapi import APIRouter
from fastapi import Request as HttpRequest
from fastapi.responses import Response

from swift.errors import PromptTooLong, RefusedChat
from swift.rollout.engines import wire
from swift.rollout.server.access import LIMITS, Refused, check_count, field_error, json_response
from swift.rollout.server.chats import call_reader, read_chat
from swift.rollout.server.service import Answers, AnswersResponse, Service
from swift.rollout.server.shapes import (
    ChatRequest,
    CompletionRequest,
    PlainGenerate,
    Sampling,
    TokenizeRequest,
    check_logprobs,
    open_body,
    requests_of,
    token_ids,
)
from swift.types import Completion, Request

DEFAULT_MAX_TOKENS = 16
"""OpenAI's for plain completions; chats may use the rest of the context."""

TURN = 1 << 18
"""Characters that are tokenised at once; others have their turn in between."""

T = TypeVar("T")
Choice = Callable[[int, Request, Completion], dict[str, Any]]


def router(service: Service) -> APIRouter:
    """The routes."""
    routes, texts = APIRouter(), Texts(service)
    _facts(routes, texts)
    _completions(routes, texts)
    _chats(routes, texts)
    _plain(routes, texts)
    return routes


class Texts:
    """Tokenizer and template of the server, off the event loop and one call at a time.

    The loop has other clients to serve, and tokenizers are not made for several threads.
    """

    def __init__(self, service: Service) -> None:
        self.service = service
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="texts")
        self._tokens: dict[int, str] = {}
        self.context = service.engine.capabilities.max_model_len
        self.longest = max(map(len, service.template.tokenizer.get_vocab()), default=1)  # characters of a token

    async def run(self, work: Callable[[], T]) -> T:
        """Work with tokenizer, template and long answers."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    async def tokenize(self, text: str, *, special: bool = True) -> list[int]:
        """Token ids of a text, in turns of `TURN` characters. Raises Refused: it cannot fit the context (422)."""
        self.check_length(text)
        count = 0
        for place, start in enumerate(range(0, len(text), TURN) if len(text) > TURN else ()):
            count += len(await self.run(partial(self._ids, text[start : start + TURN], special=False)))
            if count - place * self.longest > self.context:  # a cut may add the characters of one token
                raise self._too_long(f"over {count} tokens")
        return await self.run(partial(self._ids, text, special=special))

    def _ids(self, text: str, *, special: bool) -> list[int]:
        return list(self.service.template.tokenizer(text, add_special_tokens=special)["input_ids"])

    def check_length(self, *parts: Any) -> None:
        """Refuse texts that cannot fit the context, before anything is made of them (422)."""
        most = self.context * self.longest
        if count_characters(parts, most) > most:
            raise self._too_long(f"over {most} characters")

    def _too_long(self, seen: str) -> Refused:
        return field_error(f"prompt: {seen}: too long for the context of {self.context} tokens; shorten it")

    async def chat_ids(self, body: ChatRequest | TokenizeRequest, *, prompt: bool = True) -> list[int]:
        """Messages to ids, with the template of the server. Raises Refused: it does not take them (422)."""

        def rendered() -> str:
            self.check_length(body.messages, body.tools, body.chat_template_kwargs)
            messages = read_chat(body.messages or [])
            system = self.service.settings.system
            if system and not any(one.get("role") in ("system", "developer") for one in messages):
                messages.insert(0, {"role": "system", "content": system})
            try:
                return self.service.template.render(
                    messages, add_generation_prompt=prompt, tools=body.tools, kwargs=body.chat_template_kwargs
                )
            except RefusedChat as error:
                raise Refused(422, "messages", error.problems[0]) from error

        return await self.tokenize(await self.run(rendered), special=False)

    def said(self, request: Request, completion: Completion, wanted: Sampling) -> tuple[str, str | None]:
        """The text of a completion, and the stop text that ended it.

        Token ids and log-probs keep what ended them, as trainers need it; the text does so when it was asked for.
        """
        ids, template = completion.token_ids, self.service.template
        ended = completion.finish_reason == "stop" and not wanted.include_stop_str_in_output
        if ended and ids and ids[-1] in request.sampling.stop_token_ids:
            ids = ids[:-1]
        text = template.decode(ids, skip_special_tokens=wanted.skip_special_tokens)
        found = [(text.find(stop), stop) for stop in request.sampling.stop if ended and stop in text]
        if not found or len(ids) < len(completion.token_ids):
            return text, None
        place, stop = min(found)
        return text[:place], stop

    def message(self, completion: Completion, text: str, body: ChatRequest) -> dict[str, Any]:
        """An answer in a chat, with the calls of the tools that the client offers."""
        if not body.tools or body.tool_choice == "none":
            return {"role": "assistant", "content": text}
        raw = self.service.template.decode(completion.token_ids, skip_special_tokens=False)
        return call_reader(self.service.template).message(text, raw, body.tools)

    def tokens(self, completion: Completion, body: CompletionRequest | ChatRequest) -> list[str]:
        """Tokens as texts, which several tokens may share, or as `token_id:<id>`."""
        if body.return_tokens_as_token_ids:
            return [f"token_id:{token}" for token in completion.token_ids]
        for token in set(completion.token_ids) - self._tokens.keys():
            self._tokens[token] = self.service.template.decode([token], skip_special_tokens=False)
        return [self._tokens[token] for token in completion.token_ids]

    def choice(self, index: int, completion: Completion, stop: str | None, **said: Any) -> dict[str, Any]:
        """What the entries for a completion have in common."""
        ended = {"finish_reason": completion.finish_reason, "stop_reason": stop}
        return {"index": index, **said, **ended, "weight_version": self.version(completion)}

    def version(self, completion: Completion) -> int:
        return max((version for version, _, _ in completion.versions), default=self.service.engine.version)


def _facts(routes: APIRouter, texts: Texts) -> None:
    service = texts.service

    @routes.get("/v1/models")
    async def models() -> Response:
        base, limit = service.settings.model, service.engine.capabilities.max_model_len
        entries: list[dict[str, Any]] = [
            {
                "id": name, "object": "model", "created": int(service.started_at), "owned_by": "swift",
                "permission": [], "root": base, "parent": base if name != base else None, "max_model_len": limit,
                "weight_version": service.engine.version,
            }
            for name in filter(None, (base, service.adapter))
        ]  # fmt: skip
        return json_response({"object": "list", "data": entries})

    @routes.post("/tokenize")
    async def tokenize(body: Annotated[TokenizeRequest, open_body(TokenizeRequest)]) -> Response:
        if (body.prompt is None) == (body.messages is None):
            raise field_error("tokenize: one of prompt and messages is needed")

        if body.messages is not None:
            ids = await texts.chat_ids(body, prompt=body.add_generation_prompt)
        else:
            ids = await texts.tokenize(body.prompt or "", special=body.add_special_tokens is not False)

        def answer() -> Response:
            strings = service.template.tokenizer.convert_ids_to_tokens(ids) if body.return_token_strs else None
            content = {"count": len(ids), "max_model_len": texts.context, "tokens": ids, "token_strs": strings}
            return json_response(content)

        return await texts.run(answer)


def _completions(routes: APIRouter, texts: Texts) -> None:
    @routes.post("/v1/completions")
    async def completions(
        body: Annotated[CompletionRequest, open_body(CompletionRequest)], http: HttpRequest
    ) -> Response:
        check_logprobs(body.logprobs)
        check_model(texts.service, body.model)
        prompts = await _prompts(texts, body)
        requests = requests_of(texts.service, prompts, body, max_tokens=DEFAULT_MAX_TOKENS)

        def choice(index: int, request: Request, completion: Completion) -> dict[str, Any]:
            text, stop = texts.said(request, completion, body)
            made = texts.choice(index, completion, stop, text=text, logprobs=None)
            if body.logprobs is not None:
                tokens = texts.tokens(completion, body)
                tops = [{token: value} for token, value in zip(tokens, completion.logprobs, strict=True)]
                made["logprobs"] = {
                    "tokens": tokens, "token_logprobs": completion.logprobs, "top_logprobs": tops, "text_offset": []
                }  # fmt: skip
            if body.return_token_ids:
                made |= {"prompt_token_ids": list(request.prompt_ids), "token_ids": completion.token_ids}
            return made

        return await _reply(texts, requests, choice, _head("text_completion", "cmpl"), body, http)


def _chats(routes: APIRouter, texts: Texts) -> None:
    @routes.post("/v1/chat/completions")
    async def chat_completions(body: Annotated[ChatRequest, open_body(ChatRequest)], http: HttpRequest) -> Response:
        check_logprobs(body.top_logprobs, "top_logprobs")
        check_model(texts.service, body.model)
        if body.max_completion_tokens is not None:
            body.max_tokens = body.max_completion_tokens
        prompt = await texts.chat_ids(body)
        requests = requests_of(texts.service, [prompt], body, max_tokens=texts.context)
        said = "delta" if body.stream else "message"

        def choice(index: int, request: Request, completion: Completion) -> dict[str, Any]:
            text, stop = texts.said(request, completion, body)
            message = texts.message(completion, text, body)
            made = texts.choice(index, completion, stop, **{said: message}, logprobs=None)
            if "tool_calls" in message:
                made["finish_reason"] = "tool_calls"
            if body.logprobs:
                entries = [
                    {"token": token, "logprob": value, "bytes": None}
                    for token, value in zip(texts.tokens(completion, body), completion.logprobs, strict=True)
                ]
                made["logprobs"] = {"content": [{**entry, "top_logprobs": [entry]} for entry in entries]}
            if body.return_token_ids:
                made["token_ids"] = completion.token_ids
            return made

        head = _head("chat.completion.chunk" if body.stream else "chat.completion", "chatcmpl")
        head |= {"prompt_token_ids": prompt} if body.return_token_ids else {}
        return await _reply(texts, requests, choice, head, body, http)


def _plain(routes: APIRouter, texts: Texts) -> None:
    @routes.post("/generate")
    async def generate(body: Annotated[PlainGenerate, open_body(PlainGenerate)], http: HttpRequest) -> Response:
        check_logprobs(body.logprobs)
        if body.stream:
            raise field_error("stream: True: this route answers at once; use /v1/completions")
        given = body.prompt[0] if isinstance(body.prompt, list) and len(body.prompt) == 1 else body.prompt
        if isinstance(given, list):
            raise field_error(f"prompt: {len(given)} texts: this route takes one; use /v1/completions")
        prompt, text = await _plain_prompt(texts, given)
        requests = requests_of(texts.service, [prompt], body, max_tokens=DEFAULT_MAX_TOKENS)
        done = await texts.service.all_of(requests, http.is_disconnected)

        def answer() -> Response:
            content: dict[str, Any] = {
                "text": [texts.said(request, one, body)[0] for request, one in zip(requests, done, strict=True)],
                "prompt": text,
                "finish_reasons": [one.finish_reason for one in done],
                "prompt_token_ids": prompt,
                "token_ids": [one.token_ids for one in done],
                "weight_versions": [texts.version(one) for one in done],
            }
            if body.logprobs is not None:
                content["logprobs"] = [
                    [[{str(token): value}] for token, value in zip(one.token_ids, one.logprobs, strict=True)]
                    for one in done
                ]
            return json_response(content)

        return await texts.run(answer)


def check_model(service: Service, name: str | None) -> None:
    """Raises Refused for a model that is not served (404); without a name, the one that is.

    The adapter of the run that owns the server is the model that is served, as whole weights are.
    """
    served = [service.settings.model, service.adapter]
    if name and name not in served:
        raise Refused(404, "model", f"model: {name[:80]}: not served here; served: {', '.join(filter(None, served))}")


async def _prompts(texts: Texts, body: CompletionRequest) -> list[list[int]]:
    given: list[Any] = [body.prompt] if isinstance(body.prompt, str) else body.prompt
    if given and isinstance(given[0], int):
        return [token_ids(given)]
    check_count("prompts", len(given), LIMITS.prompts)
    special = body.add_special_tokens
    return [await texts.tokenize(one, special=special) if isinstance(one, str) else token_ids(one) for one in given]


async def _plain_prompt(texts: Texts, given: str | dict[str, Any]) -> tuple[list[int], str]:
    if isinstance(given, str):
        return await texts.tokenize(given), given
    ids = token_ids(given.get("prompt_token_ids"))
    if len(ids) > texts.context:
        raise PromptTooLong(len(ids), texts.context)
    return ids, await texts.run(lambda: texts.service.template.decode(ids, skip_special_tokens=False))


def count_characters(value: Any, most: int) -> int:
    """Characters of all texts in a JSON value, and one for each other entry; counting ends beyond `most`."""
    left, count = [value], 0
    while left and count <= most:
        one = left.pop()
        if isinstance(one, str):
            count += len(one)
        elif isinstance(one, Mapping):
            left += one.values()
            count += sum(map(len, one))
        elif isinstance(one, Sequence):
            left += one
        else:
            count += 1
    return count


def _head(kind: str, prefix: str) -> dict[str, Any]:
    return {"id": f"{prefix}-{secrets.token_hex(12)}", "object": kind, "created": int(time.time())}


async def _reply(
    texts: Texts, requests: list[Request], choice: Choice, head: dict[str, Any], body: Sampling, http: HttpRequest
) -> Response:
    head["model"] = texts.service.adapter or texts.service.settings.model
    if body.stream:
        await texts.service.admitted(http.is_disconnected)
        answers = texts.service.open(requests)
        return AnswersResponse(answers, _events(answers, texts, requests, choice, head), "text/event-stream")
    done = await texts.service.all_of(requests, http.is_disconnected)

    def whole() -> Response:
        choices = [choice(index, *both) for index, both in enumerate(zip(requests, done, strict=True))]
        read = sum(len(one.prompt_ids) for one in requests[:: body.n or 1])
        written = sum(len(one.token_ids) for one in done)
        usage = {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}
        return json_response({**head, "choices": choices, "usage": usage})

    return await texts.run(whole)


async def _events(
    answers: Answers, texts: Texts, requests: Sequence[Request], choice: Choice, head: dict[str, Any]
) -> AsyncIterator[bytes]:
    places = {request.request_id: (index, request) for index, request in enumerate(requests)}
    left = len(requests)
    while left:
        arrivals = await answers.next(wire.ALIVE_S)
        if not arrivals:
            yield b": waiting\n\n"
        for arrival in arrivals:
            if not isinstance(arrival, Completion):
                yield _event(wire.error_body(arrival.error, 500))
                left = 0
                break
            left -= 1
            texts.service.ledger.add(places[arrival.request_id][1].prompt_ids, arrival)
            made = await texts.run(partial(choice, *places[arrival.request_id], arrival))
            yield _event({**head, "choices": [made]})
    yield b"data: [DONE]\n\n"


def _event(content: dict[str, Any]) -> bytes:
    return b"data: " + wire.encode(content) + b"\n\n"
