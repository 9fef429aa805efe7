"""OpenAI's API for agents and environments, with vLLM's fields for token ids, and the plain route /generate.

Log-probs are those of the sampling distribution; `top_logprobs` contains no tokens that it excludes.
"""

from __future__ import annotations

import secrets
import time
from typing import Annotated, Any

from fastapi import APIRouter
from fastapi import Request as HttpRequest
from fastapi.responses import Response

from swift.errors import PromptTooLong
from swift.rollout.scores import arrays_of
from swift.rollout.server.access import LIMITS, Refused, check_count, field_error, json_response
from swift.rollout.server.events import Choice, Events, usage
from swift.rollout.server.service import AnswersResponse, Service
from swift.rollout.server.shapes import (
    ChatRequest,
    CompletionRequest,
    PlainGenerate,
    Sampling,
    TokenizeRequest,
    open_body,
    requests_of,
    token_ids,
)
from swift.rollout.server.texts import AnswerPart, Texts, alternatives
from swift.types import Request, TokenScores

DEFAULT_MAX_TOKENS = 16
"""OpenAI's default for plain completions; the default of chats is the rest of the context."""


def router(service: Service) -> APIRouter:
    """The routes."""
    routes, texts = APIRouter(), Texts(service)
    _facts(routes, texts)
    _completions(routes, texts)
    _chats(routes, texts)
    _plain(routes, texts)
    return routes


def _facts(routes: APIRouter, texts: Texts) -> None:
    service = texts.service

    @routes.get("/v1/models")
    async def models() -> Response:
        base, limit = service.settings.model, service.engine.capabilities.max_model_len
        entries: list[dict[str, Any]] = [
            {
                "id": name, "object": "model", "created": int(service.started_at), "owned_by": "swift",
                "permission": [], "root": base, "parent": base if name == service.adapter else None,
                "max_model_len": limit,
                "weight_version": service.engine.version,
            }
            for name in service.served
        ]  # fmt: skip
        return json_response({"object": "list", "data": entries})

    @routes.get("/metrics")
    async def metrics() -> Response:
        text = service.meter.text(service.queue.load, service.engine.version)
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    @routes.post("/tokenize")
    async def tokenize(body: Annotated[TokenizeRequest, open_body(TokenizeRequest)]) -> Response:
        if (body.prompt is None) == (body.messages is None):
            raise field_error("tokenize: needs either prompt or messages")

        if body.messages is not None:
            ids = texts.visible((await texts.chat_ids(body, prompt=body.add_generation_prompt))[0])
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
        check_model(texts.service, body.model)
        prompts = await _prompts(texts, body)
        requests = requests_of(texts.service, prompts, body, max_tokens=DEFAULT_MAX_TOKENS)

        def choice(index: int, request: Request, part: AnswerPart) -> dict[str, Any]:
            entry = part.choice(index, text=part.text, logprobs=None)
            if body.logprobs is not None:
                entry["logprobs"] = texts.completion_logprobs(part, body)
            if part.completion is not None and (scores := part.completion.prompt_scores) is not None:
                entry |= _prompt_scores(request, scores, compact=body.compact_scores)
            if body.return_token_ids:
                entry |= {"prompt_token_ids": list(request.prompt_ids), "token_ids": part.token_ids}
            return entry

        return await _reply(texts, requests, choice, _head("text_completion", "cmpl"), body, http)


def _prompt_scores(request: Request, scores: TokenScores, *, compact: bool) -> dict[str, Any]:
    """Scores of a prompt, compact or in vLLM's form, which has None for tokens without any."""
    if compact:
        return {"prompt_scores": scores}
    ids_TK, logprobs_TK, own_T = arrays_of(scores)
    tokens = list(request.prompt_ids)
    entries: list[Any] = [None] * (len(tokens) - len(own_T))
    places = zip(ids_TK.tolist(), logprobs_TK.tolist(), own_T.tolist(), tokens[len(entries) :], strict=True)
    for ids, logprobs, own, token in places:
        found = {
            str(name): {"logprob": lp, "rank": rank}
            for rank, (name, lp) in enumerate(zip(ids, logprobs, strict=True), 1)
        }
        found.setdefault(str(token), {"logprob": own, "rank": len(ids) + 1})
        entries.append(found)
    return {"prompt_logprobs": entries}


def _chats(routes: APIRouter, texts: Texts) -> None:
    @routes.post("/v1/chat/completions")
    async def chat_completions(body: Annotated[ChatRequest, open_body(ChatRequest)], http: HttpRequest) -> Response:
        check_model(texts.service, body.model)
        if body.max_completion_tokens is not None:
            body.max_tokens = body.max_completion_tokens
        prompt, images = await texts.chat_ids(body)
        requests = requests_of(texts.service, [prompt], body, max_tokens=texts.context, images=images)
        may_call = bool(body.tools) and body.tool_choice != "none"

        def choice(index: int, request: Request, part: AnswerPart) -> dict[str, Any]:
            message: dict[str, Any] = {"role": "assistant", "content": part.text}
            if may_call and part.completion is not None:
                message = texts.message(part.completion, part.text, body)
            if body.stream and not part.first:
                del message["role"]
            entry = part.choice(index, **{"delta" if body.stream else "message": message}, logprobs=None)
            if "tool_calls" in message:
                entry["finish_reason"] = "tool_calls"
            if body.logprobs:
                entry["logprobs"] = {"content": texts.chat_logprobs(part, body)}
            if body.return_token_ids:
                entry["token_ids"] = part.token_ids
            return entry

        head = _head("chat.completion.chunk" if body.stream else "chat.completion", "chatcmpl")
        head |= {"prompt_token_ids": texts.visible(prompt)} if body.return_token_ids else {}
        return await _reply(texts, requests, choice, head, body, http, whole=may_call)


def _plain(routes: APIRouter, texts: Texts) -> None:
    @routes.post("/generate")
    async def generate(body: Annotated[PlainGenerate, open_body(PlainGenerate)], http: HttpRequest) -> Response:
        if body.stream:
            raise field_error("stream: True: this route does not stream; use /v1/completions")
        given = body.prompt[0] if isinstance(body.prompt, list) and len(body.prompt) == 1 else body.prompt
        if isinstance(given, list):
            raise field_error(f"prompt: {len(given)} texts: this route takes a single prompt; use /v1/completions")
        prompt, text = await _plain_prompt(texts, given)
        requests = requests_of(texts.service, [prompt], body, max_tokens=DEFAULT_MAX_TOKENS)
        done = await texts.service.all_of(requests, http.is_disconnected)

        def answer() -> Response:
            content: dict[str, Any] = {
                "text": [texts.text_of(*pair, body)[0] for pair in zip(requests, done, strict=True)],
                "prompt": text,
                "finish_reasons": [completion.finish_reason for completion in done],
                "prompt_token_ids": prompt,
                "token_ids": [completion.token_ids for completion in done],
                "weight_versions": [texts.version(completion) for completion in done],
            }
            if body.logprobs is not None:
                content["logprobs"] = [
                    [[{str(token): logprob for token, logprob in tokens}] for tokens in alternatives(completion)]
                    for completion in done
                ]
            return json_response(content)

        return await texts.run(answer)


def check_model(service: Service, name: str | None) -> None:
    """Raises Refused (404): the server does not serve this model. None is the served model.

    The adapter of the run that owns the server is served under its own name.
    """
    served = service.served
    if name and name not in served:
        raise Refused(404, "model", f"model: {name[:80]}: not served; served: {', '.join(served)}")


async def _prompts(texts: Texts, body: CompletionRequest) -> list[list[int]]:
    given: list[Any] = [body.prompt] if isinstance(body.prompt, str) else body.prompt
    if given and isinstance(given[0], int):
        return [token_ids(given)]
    check_count("prompts", len(given), LIMITS.prompts)
    special = body.add_special_tokens
    return [
        await texts.tokenize(prompt, special=special) if isinstance(prompt, str) else token_ids(prompt)
        for prompt in given
    ]


async def _plain_prompt(texts: Texts, given: str | dict[str, Any]) -> tuple[list[int], str]:
    if isinstance(given, str):
        return await texts.tokenize(given), given
    ids = token_ids(given.get("prompt_token_ids"))
    if len(ids) > texts.context:
        raise PromptTooLong(len(ids), texts.context)
    return ids, await texts.run(lambda: texts.service.template.decode(ids, skip_special_tokens=False))


def _head(kind: str, prefix: str) -> dict[str, Any]:
    return {"id": f"{prefix}-{secrets.token_hex(12)}", "object": kind, "created": int(time.time())}


async def _reply(
    texts: Texts,
    requests: list[Request],
    choice: Choice,
    head: dict[str, Any],
    body: Sampling,
    http: HttpRequest,
    *,
    whole: bool = False,
) -> Response:
    """Sample requests and reply, as a stream on request. whole: a stream sends complete answers only."""
    service = texts.service
    head["model"] = body.model or service.adapter or service.settings.model
    if body.stream:
        await service.admitted(http.is_disconnected)
        answers = service.open(requests, grows=not whole)
        events = Events(answers, texts, requests, choice, head, body).all()
        return AnswersResponse(answers, events, "text/event-stream")
    done = await service.all_of(requests, http.is_disconnected)

    def answer() -> Response:
        choices = [
            choice(index, request, texts.whole_answer(request, completion, body))
            for index, (request, completion) in enumerate(zip(requests, done, strict=True))
        ]
        return json_response({**head, "choices": choices, "usage": usage(requests, done, body)})

    return await texts.run(answer)
