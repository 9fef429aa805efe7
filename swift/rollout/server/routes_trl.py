"""Routes of older servers: `trl vllm-serve` (/generate/, /chat/) and vLLM's plain one (/generate, for Atropos)."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, TypeVar

from fastapi import APIRouter
from fastapi import Request as HttpRequest

from swift.rollout.server.limits import Refused
from swift.rollout.server.protocol import (
    LegacyChat,
    LegacyGenerate,
    PlainGenerate,
    Sampling,
    check_logprobs,
    refuse_extras,
)
from swift.rollout.server.routes_openai import DEFAULT_MAX_TOKENS, chat_ids, check_model
from swift.rollout.server.service import Service

Legacy = TypeVar("Legacy", LegacyGenerate, LegacyChat)


def router(service: Service) -> APIRouter:
    """The routes."""
    routes = APIRouter()

    @routes.post("/generate/")
    async def generate(body: LegacyGenerate, http: HttpRequest) -> dict[str, Any]:
        body = _with_kwargs(body)
        prompts = [service.tokenize(one) if isinstance(one, str) else list(one) for one in body.prompts]
        return await _answer(service, prompts, body, http)

    @routes.post("/chat/")
    async def chat(body: LegacyChat, http: HttpRequest) -> dict[str, Any]:
        body = _with_kwargs(body)
        prompts = [chat_ids(service, one, body.tools, body.chat_template_kwargs) for one in body.messages]
        return await _answer(service, prompts, body, http)

    @routes.post("/generate")
    async def plain_generate(body: PlainGenerate, http: HttpRequest) -> dict[str, Any]:
        refuse_extras(body)
        check_logprobs(body.logprobs)
        if body.stream:
            raise Refused(422, "field", "stream: True: this route answers at once; use /v1/completions")
        prompt, text = _plain_prompt(service, body.prompt)
        done = await service.all_of(
            requests := service.requests([prompt], body, max_tokens=DEFAULT_MAX_TOKENS), http.is_disconnected
        )
        assert len(requests) == len(done)
        texts = [service.template.decode(one.token_ids, skip_special_tokens=body.skip_special_tokens) for one in done]
        answer: dict[str, Any] = {
            "text": texts,
            "prompt": text,
            "finish_reasons": [one.finish_reason for one in done],
            "prompt_token_ids": prompt,
            "token_ids": [one.token_ids for one in done],
            "weight_versions": [max((v for v, _, _ in one.versions), default=service.engine.version) for one in done],
        }
        if body.logprobs is not None:
            answer["logprobs"] = [
                [[{str(token): value}] for token, value in zip(one.token_ids, one.logprobs, strict=True)]
                for one in done
            ]
        return answer

    return routes


def _with_kwargs(body: Legacy) -> Legacy:
    """`generation_kwargs` win over the fields beside them, as there."""
    if not body.generation_kwargs:
        return body
    fields = body.model_dump(exclude_unset=True)
    return type(body).model_validate({**fields, **body.generation_kwargs, "generation_kwargs": None})


async def _answer(
    service: Service, prompts: Sequence[Sequence[int]], body: LegacyGenerate | LegacyChat, http: HttpRequest
) -> dict[str, Any]:
    refuse_extras(body)
    check_logprobs(body.logprobs)
    check_model(service, body.model)
    wanted: Sampling = body
    await asyncio.to_thread(service.transfer.settle)  # these clients do not wait for what they broadcast
    done = await service.all_of(service.requests(prompts, wanted, max_tokens=DEFAULT_MAX_TOKENS), http.is_disconnected)
    shown = body.logprobs is not None
    return {
        "prompt_ids": [list(prompt) for prompt in prompts],
        "completion_ids": [one.token_ids for one in done],
        "logprobs": [[[value] for value in one.logprobs] for one in done] if shown else None,
        "logprob_token_ids": [[[token] for token in one.token_ids] for one in done] if shown else None,
    }


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
