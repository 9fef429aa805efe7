"""OpenAI's API with vLLM's fields for token ids, which is what agents, environments and TRL's client speak.

Log-probs are those of the distribution that was sampled from, of the sampled token alone. A stream carries one chunk
per completion, when it ends.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter
from fastapi import Request as HttpRequest
from fastapi.responses import JSONResponse, StreamingResponse

from swift.errors import SwiftError
from swift.models.template import RefusedChat
from swift.rollout.server import wire
from swift.rollout.server.bodies import json_body
from swift.rollout.server.limits import Refused
from swift.rollout.server.protocol import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
    TokensRequest,
    check_logprobs,
    refuse_extras,
)
from swift.rollout.server.service import Service
from swift.types import Completion, Request

DEFAULT_MAX_TOKENS = 16
"""OpenAI's for plain completions; chats may use the rest of the context."""

Choice = Callable[[int, Request, Completion], dict[str, Any]]


def router(service: Service) -> APIRouter:
    """The routes."""
    routes = APIRouter()
    _completions(routes, service)
    _tokens(routes, service)
    return routes


def _completions(routes: APIRouter, service: Service) -> None:
    """Texts from texts."""

    @routes.get("/v1/models")
    async def models() -> dict[str, Any]:
        names = [service.settings.model, *([service.adapter] if service.adapter else [])]
        created = int(service.started_at)
        common = {"object": "model", "created": created, "owned_by": "swift", "permission": []}
        return {
            "object": "list",
            "data": [
                {
                    **common,
                    "id": name,
                    "root": service.settings.model,
                    "parent": service.settings.model if name != service.settings.model else None,
                    "max_model_len": service.engine.capabilities.max_model_len,
                    "weight_version": service.engine.version,
                }
                for name in names
            ],
        }

    @routes.post("/v1/completions")
    async def completions(body: Annotated[CompletionRequest, json_body(CompletionRequest)], http: HttpRequest) -> Any:
        refuse_extras(body)
        check_logprobs(body.logprobs)
        check_model(service, body.model)
        prompts, requests = await service.texts(lambda: _requests(service, _prompts(service, body), body))

        def choice(index: int, request: Request, completion: Completion) -> dict[str, Any]:
            text, stop = service.said(request, completion, body)
            made = _choice(service, index, completion, stop, text=text)
            made["logprobs"] = None if body.logprobs is None else flat_logprobs(
                service, completion, as_ids=bool(body.return_tokens_as_token_ids))  # fmt: skip
            if body.return_token_ids:
                made |= {"prompt_token_ids": list(request.prompt_ids), "token_ids": completion.token_ids}
            return made

        if body.stream:
            return _stream(service, requests, choice, "text_completion", "cmpl")
        done = await service.all_of(requests, http.is_disconnected)
        return await service.texts(
            lambda: _response(service, "text_completion", "cmpl", _all(choice, requests, done), prompts, done)
        )

    @routes.post("/v1/chat/completions")
    async def chat_completions(body: Annotated[ChatRequest, json_body(ChatRequest)], http: HttpRequest) -> Any:
        refuse_extras(body)
        check_logprobs(body.top_logprobs, "top_logprobs")
        check_model(service, body.model)
        if body.max_completion_tokens is not None:
            body.max_tokens = body.max_completion_tokens
        prompt = await service.texts(lambda: chat_ids(service, body.messages, body.tools, body.chat_template_kwargs))
        requests = service.requests([prompt], body, max_tokens=service.engine.capabilities.max_model_len)
        said = "delta" if body.stream else "message"

        def choice(index: int, request: Request, completion: Completion) -> dict[str, Any]:
            text, stop = service.said(request, completion, body)
            made = _choice(service, index, completion, stop, **{said: {"role": "assistant", "content": text}})
            as_ids = bool(body.return_tokens_as_token_ids)
            made["logprobs"] = content_logprobs(service, completion, as_ids=as_ids) if body.logprobs else None
            if body.return_token_ids:
                made["token_ids"] = completion.token_ids
            return made

        more = {"prompt_token_ids": prompt} if body.return_token_ids else {}
        if body.stream:
            return _stream(service, requests, choice, "chat.completion.chunk", "chatcmpl", more)
        done = await service.all_of(requests, http.is_disconnected)
        return await service.texts(
            lambda: _response(
                service, "chat.completion", "chatcmpl", _all(choice, requests, done), [prompt], done, more
            )
        )


def _tokens(routes: APIRouter, service: Service) -> None:
    """Tokens from tokens, and from texts."""

    @routes.post("/inference/v1/generate")
    async def generate(body: Annotated[TokensRequest, json_body(TokensRequest)], http: HttpRequest) -> JSONResponse:
        refuse_extras(body)
        refuse_extras(body.sampling_params, "logprobs")
        if body.features or body.stream:
            asked = "features" if body.features else "stream"
            raise Refused(422, "field", f"{asked}: this route takes token ids and answers at once; leave it out")
        wanted = body.sampling_params
        logprobs = (wanted.model_extra or {}).get("logprobs")
        check_logprobs(logprobs)
        check_model(service, body.model)
        requests = service.requests([body.token_ids], wanted, max_tokens=DEFAULT_MAX_TOKENS)
        done = await service.all_of(requests, http.is_disconnected)
        choices = [
            {
                "index": index,
                "token_ids": one.token_ids,
                "logprobs": None if logprobs is None else content_logprobs(service, one, as_ids=True),
                "finish_reason": one.finish_reason,
            }
            for index, one in enumerate(done)
        ]
        answer = {
            "request_id": body.request_id or f"generate-tokens-{secrets.token_hex(12)}",
            "model": service.settings.model,
            "created": int(time.time()),
            "choices": choices,
            "prompt_logprobs": None,
            "prompt_token_ids": body.token_ids,
            "weight_version": service.engine.version,
        }
        return await service.texts(lambda: JSONResponse(answer))

    @routes.post("/tokenize")
    async def tokenize(body: Annotated[TokenizeRequest, json_body(TokenizeRequest)]) -> dict[str, Any]:
        refuse_extras(body)
        if (body.prompt is None) == (body.messages is None):
            raise Refused(422, "field", "tokenize: one of prompt and messages is needed")
        ids, strings = await service.texts(lambda: _tokenized(service, body))
        limit = service.engine.capabilities.max_model_len
        return {"count": len(ids), "max_model_len": limit, "tokens": ids, "token_strs": strings}

    @routes.post("/detokenize")
    async def detokenize(body: Annotated[DetokenizeRequest, json_body(DetokenizeRequest)]) -> dict[str, Any]:
        size = len(service.template.tokenizer)
        wrong = [token for token in body.tokens if not 0 <= token < size]
        if wrong:
            raise Refused(422, "field", f"tokens: {wrong[0]}: no token of this model; 0 to {size - 1}")
        text = await service.texts(lambda: service.template.decode(body.tokens, skip_special_tokens=False))
        return {"prompt": text}


def check_model(service: Service, name: str | None) -> None:
    """Raises Refused for a model that is not served (404); without a name, the one that is.

    Everything is sampled with the adapter that is loaded. One that the owning run has sent is the model that is served,
    as whole weights are; beside one that another client has loaded, the base model is not to be had (409).
    """
    base = service.settings.model
    if name == base and service.adapter not in ("", base) and not service.adapter_is_policy:
        raise Refused(
            409,
            "adapter",
            f"model: {name}: everything is sampled with the adapter {service.adapter} now; ask for that name, or POST "
            "/v1/unload_lora_adapter first",
        )
    served = [base, service.adapter]
    if name and name not in served:
        raise Refused(404, "model", f"model: {name}: not served here; served: {', '.join(filter(None, served))}")


def chat_ids(
    service: Service,
    messages: Sequence[dict[str, Any]],
    tools: Sequence[dict[str, Any]] | None = None,
    kwargs: dict[str, Any] | None = None,
    *,
    prompt: bool = True,
) -> list[int]:
    """Messages to token ids, with the template of the server.

    Raises:
        Refused: the template refuses them (422).
    """
    template = service.template
    try:
        text = template.render(messages, add_generation_prompt=prompt, tools=tools, kwargs=kwargs)
        return service.tokenize(text, special=False)
    except RefusedChat as error:
        raise Refused(422, "messages", error.problems[0]) from error
    except Exception as error:  # the template is a program; what it raises is about these messages
        raise Refused(422, "messages", f"messages: the chat template refuses them: {error}") from error


def flat_logprobs(service: Service, completion: Completion, *, as_ids: bool) -> dict[str, Any]:
    """Log-probs in the shape of plain completions."""
    tokens = [token_text(service, token, as_ids=as_ids) for token in completion.token_ids]
    return {
        "tokens": tokens,
        "token_logprobs": completion.logprobs,
        "top_logprobs": [{token: value} for token, value in zip(tokens, completion.logprobs, strict=True)],
        "text_offset": [],
    }


def content_logprobs(service: Service, completion: Completion, *, as_ids: bool) -> dict[str, Any]:
    """Log-probs in the shape of chats."""
    content = []
    for token, value in zip(completion.token_ids, completion.logprobs, strict=True):
        entry = {"token": token_text(service, token, as_ids=as_ids), "logprob": value, "bytes": None}
        content.append({**entry, "top_logprobs": [entry]})
    return {"content": content}


def token_text(service: Service, token: int, *, as_ids: bool) -> str:
    """A token as text, which several tokens may share, or as `token_id:<id>`."""
    return f"token_id:{token}" if as_ids else service.token_text(token)


def _requests(
    service: Service, prompts: list[list[int]], body: CompletionRequest
) -> tuple[list[list[int]], list[Request]]:
    return prompts, service.requests(prompts, body, max_tokens=DEFAULT_MAX_TOKENS)


def _tokenized(service: Service, body: TokenizeRequest) -> tuple[list[int], list[str] | None]:
    """Ids of a prompt or of messages, and their entries of the vocabulary when they are wanted."""
    if body.messages is not None:
        ids = chat_ids(service, body.messages, body.tools, body.chat_template_kwargs, prompt=body.add_generation_prompt)
    else:
        ids = service.tokenize(body.prompt or "", special=body.add_special_tokens is not False)
    return ids, service.template.tokenizer.convert_ids_to_tokens(ids) if body.return_token_strs else None


def _prompts(service: Service, body: CompletionRequest) -> list[list[int]]:
    given = body.prompt
    if isinstance(given, str):
        given = [given]
    if given and isinstance(given[0], int):
        given = [given]  # type: ignore[list-item]
    return [
        service.tokenize(one, special=body.add_special_tokens) if isinstance(one, str) else list(one)  # type: ignore[arg-type]
        for one in given
    ]


def _all(choice: Choice, requests: Sequence[Request], done: Sequence[Completion]) -> list[dict[str, Any]]:
    return [choice(index, request, one) for index, (request, one) in enumerate(zip(requests, done, strict=True))]


def _choice(service: Service, index: int, completion: Completion, stop: str | None, **said: Any) -> dict[str, Any]:
    versions = {version for version, _, _ in completion.versions} or {service.engine.version}
    return {
        "index": index,
        **said,
        "finish_reason": completion.finish_reason,
        "stop_reason": stop,
        "weight_version": max(versions),
    }


def _head(service: Service, kind: str, prefix: str) -> dict[str, Any]:
    made = {"id": f"{prefix}-{secrets.token_hex(12)}", "object": kind, "created": int(time.time())}
    return {**made, "model": service.adapter or service.settings.model}


def _response(
    service: Service,
    kind: str,
    prefix: str,
    choices: list[dict[str, Any]],
    prompts: Sequence[Sequence[int]],
    done: Sequence[Completion],
    more: dict[str, Any] | None = None,
) -> JSONResponse:
    """The whole reply, as bytes already."""
    read, written = sum(map(len, prompts)), sum(len(one.token_ids) for one in done)
    usage = {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}
    return JSONResponse({**_head(service, kind, prefix), "choices": choices, "usage": usage, **(more or {})})


def _stream(
    service: Service,
    requests: Sequence[Request],
    choice: Choice,
    kind: str,
    prefix: str,
    more: dict[str, Any] | None = None,
) -> StreamingResponse:
    answers = service.open(requests)
    head = {**_head(service, kind, prefix), **(more or {})}
    places = {request.request_id: (index, request) for index, request in enumerate(requests)}

    async def events() -> AsyncIterator[bytes]:
        left = len(requests)
        async with answers:
            while left:
                arrival = await answers.next(wire.ALIVE_S)
                if arrival is None:
                    yield b": waiting\n\n"
                elif isinstance(arrival, Completion):
                    left -= 1
                    index, request = places[arrival.request_id]
                    yield await service.texts(partial(_chunk, head, partial(choice, index, request, arrival)))
                else:
                    left -= len(arrival[0])
                    yield _event(wire.error_body(arrival[1], 500))
                    if isinstance(arrival[1], SwiftError):
                        break
        yield b"data: [DONE]\n\n"

    return StreamingResponse(events(), media_type="text/event-stream")


def _chunk(head: dict[str, Any], choice: Callable[[], dict[str, Any]]) -> bytes:
    return _event({**head, "choices": [choice()]})


def _event(content: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(content, separators=(",", ":")).encode() + b"\n\n"
