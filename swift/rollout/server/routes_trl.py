"""Routes of older servers: `trl vllm-serve` (/generate/, /chat/) and vLLM's plain one (/generate, for Atropos)."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Annotated, Any, TypeVar

from fastapi import APIRouter
from fastapi import Request as HttpRequest
from fastapi.responses import JSONResponse

from swift.rollout.server.bodies import json_body
from swift.rollout.server.limits import Refused
from swift.rollout.server.protocol import (
    LegacyChat,
    LegacyGenerate,
    PlainGenerate,
    check_logprobs,
    refuse_extras,
)
from swift.rollout.server.routes_openai import DEFAULT_MAX_TOKENS, chat_ids, check_model
from swift.rollout.server.service import Service
from swift.types import Completion, Request

Legacy = TypeVar("Legacy", LegacyGenerate, LegacyChat)


def router(service: Service) -> APIRouter:
    """The routes."""
    routes = APIRouter()

    @routes.post("/generate/")
    async def generate(body: Annotated[LegacyGenerate, json_body(LegacyGenerate)], http: HttpRequest) -> JSONResponse:
        wanted = _with_kwargs(body)
        prompts = await service.texts(lambda: [_ids(service, one) for one in wanted.prompts])
        return await _answer(service, prompts, wanted, http)

    @routes.post("/chat/")
    async def chat(body: Annotated[LegacyChat, json_body(LegacyChat)], http: HttpRequest) -> JSONResponse:
        wanted = _with_kwargs(body)
        prompts = await service.texts(
            lambda: [chat_ids(service, one, wanted.tools, wanted.chat_template_kwargs) for one in wanted.messages]
        )
        return await _answer(service, prompts, wanted, http)

    @routes.post("/generate")
    async def plain_generate(
        body: Annotated[PlainGenerate, json_body(PlainGenerate)], http: HttpRequest
    ) -> JSONResponse:
        refuse_extras(body)
        check_logprobs(body.logprobs)
        if body.stream:
            raise Refused(422, "field", "stream: True: this route answers at once; use /v1/completions")
        prompt, text = await service.texts(lambda: _plain_prompt(service, body.prompt))
        requests = service.requests([prompt], body, max_tokens=DEFAULT_MAX_TOKENS)
        done = await service.all_of(requests, http.is_disconnected)
        return await service.texts(lambda: _plain_answer(service, body, (prompt, text), requests, done))

    return routes


def _plain_answer(
    service: Service,
    body: PlainGenerate,
    prompt: tuple[list[int], str],
    requests: Sequence[Request],
    done: Sequence[Completion],
) -> JSONResponse:
    answer: dict[str, Any] = {
        "text": [service.said(request, one, body)[0] for request, one in zip(requests, done, strict=True)],
        "prompt": prompt[1],
        "finish_reasons": [one.finish_reason for one in done],
        "prompt_token_ids": prompt[0],
        "token_ids": [one.token_ids for one in done],
        "weight_versions": [max((v for v, _, _ in one.versions), default=service.engine.version) for one in done],
    }
    if body.logprobs is not None:
        answer["logprobs"] = [
            [[{str(token): value}] for token, value in zip(one.token_ids, one.logprobs, strict=True)] for one in done
        ]
    return JSONResponse(answer)


def _with_kwargs(body: Legacy) -> Legacy:
    """`generation_kwargs` win over the fields beside them, as there."""
    if not body.generation_kwargs:
        return body
    fields = body.model_dump(exclude_unset=True)
    return type(body).model_validate({**fields, **body.generation_kwargs, "generation_kwargs": None})


async def _answer(
    service: Service, prompts: Sequence[list[int]], body: LegacyGenerate | LegacyChat, http: HttpRequest
) -> JSONResponse:
    refuse_extras(body)
    check_logprobs(body.logprobs)
    check_model(service, body.model)
    prompts = _truncated(prompts, body.truncate_prompt_tokens)
    await asyncio.to_thread(service.transfer.settle)  # these clients do not wait for what they broadcast
    requests = await service.texts(lambda: service.requests(prompts, body, max_tokens=DEFAULT_MAX_TOKENS))
    done = await service.all_of(requests, http.is_disconnected)
    return await service.texts(lambda: _ids_answer(prompts, done, shown=body.logprobs is not None))


def _ids_answer(prompts: Sequence[list[int]], done: Sequence[Completion], *, shown: bool) -> JSONResponse:
    return JSONResponse(
        {
            "prompt_ids": list(prompts),
            "completion_ids": [one.token_ids for one in done],
            "logprobs": [[[value] for value in one.logprobs] for one in done] if shown else None,
            "logprob_token_ids": [[[token] for token in one.token_ids] for one in done] if shown else None,
        }
    )


def _truncated(prompts: Sequence[list[int]], count: int | None) -> Sequence[list[int]]:
    """The last `count` ids of each; all of them with None and -1, of which too many are an error."""
    if count is None or count == -1:
        return prompts
    if count < 1:
        raise Refused(422, "field", f"truncate_prompt_tokens: {count}: at least 1, or -1")
    return [prompt[-count:] for prompt in prompts]


def _ids(service: Service, prompt: str | list[int]) -> list[int]:
    return service.tokenize(prompt) if isinstance(prompt, str) else prompt


def _plain_prompt(service: Service, given: str | dict[str, Any] | list[str]) -> tuple[list[int], str]:
    """The ids of a prompt, and its text."""
    if isinstance(given, list):
        if len(given) != 1:
            raise Refused(422, "field", f"prompt: {len(given)} texts: this route takes one; use /v1/completions")
        given = given[0]
    if isinstance(given, str):
        return service.tokenize(given), given
    ids = given.get("prompt_token_ids")
    if not isinstance(ids, list) or not all(isinstance(one, int) and not isinstance(one, bool) for one in ids):
        raise Refused(422, "field", "prompt: neither a text nor {prompt_token_ids: [...]}")
    return ids, service.template.decode(ids, skip_special_tokens=False)
