"""Routes for sampling by trainers and for the state of the server: /infer/, /versions, /health, /info."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Header
from fastapi import Request as HttpRequest
from fastapi.responses import Response

from swift.data.image_store import names
from swift.data.images import ImageSource, read_image
from swift.data.records import RowError
from swift.rollout.engines import wire
from swift.rollout.engines.completion_stream import Arrival
from swift.rollout.server.access import (
    AUTHENTICATED,
    LIMITS,
    Refused,
    check_count,
    field_error,
    json_body,
    json_response,
)
from swift.rollout.server.service import Answers, AnswersResponse, Service
from swift.rollout.server.shapes import check_sampling
from swift.types import Completion, Request, ShownImage

RunId = Annotated[str | None, Header(alias=wire.RUN_HEADER)]


def needs_lease(service: Service) -> Any:
    """Dependency of routes that change the state; see `Lease.renew`."""

    async def check(run: RunId = None) -> None:
        service.authorize(run)

    return Depends(check)


def router(service: Service) -> APIRouter:
    """The routes."""
    routes = APIRouter()

    @routes.get("/health")
    @routes.get("/health/")
    async def health(http: HttpRequest, run: RunId = None) -> Response:
        authenticated, holder = http.scope[AUTHENTICATED], service.lease.holder
        if authenticated and run is not None and holder is not None and holder.run_id == run:
            service.authorize(run)
        good, body = await service.recent_health()
        shown = body if authenticated else {"status": body["status"], "alive": body["alive"]}
        return json_response(shown, 200 if good else 503)

    @routes.get("/info")
    async def info() -> Response:
        return json_response(await asyncio.to_thread(service.info))

    @routes.post("/infer/")
    async def infer(body: Annotated[wire.InferRequest, json_body(wire.InferRequest)], run: RunId = None) -> Response:
        async with service.large:
            requests = await asyncio.to_thread(_requests, body)
        if run is not None:
            service.authorize(run)
        _check_version(service, body.version)
        answers = service.open(requests, run)
        return AnswersResponse(answers, _lines(service, answers, len(requests)), "application/x-ndjson")

    @routes.post("/versions", dependencies=[needs_lease(service)])
    async def versions(body: Annotated[wire.VersionsRequest, json_body(wire.VersionsRequest)]) -> Response:
        return json_response(wire.VersionsReply([service.sampled_versions.find(digest) for digest in body.digests]))

    return routes


def _requests(body: wire.InferRequest) -> list[Request]:
    check_count("prompts", len(body.prompts), LIMITS.prompts)
    images = _images(body)
    counts = [0] * len(body.prompts)
    requests = []
    for sample in body.requests:
        if sample.prompt >= len(body.prompts):
            raise field_error(f"requests: {sample.id}: prompt {sample.prompt} of {len(body.prompts)} prompts")
        counts[sample.prompt] += 1
        check_sampling(sample.sampling)
        limit_s = math.inf if sample.limit_s is None else sample.limit_s
        prompt, shown = body.prompts[sample.prompt], images.get(sample.prompt, ())
        if not names(prompt, [one.image for one in shown]):
            raise field_error(f"shown: {sample.prompt}: the ids of the prompt name other images")
        requests.append(Request(sample.id, prompt, sample.sampling, limit_s=limit_s, images=shown))
    check_count("samples of a prompt", max(counts), LIMITS.samples_per_prompt)
    return requests


def _images(body: wire.InferRequest) -> dict[int, list[ShownImage]]:
    """The images of prompts by their index, with headers that are checked."""
    images = []
    for number, sent in enumerate(body.images):
        try:
            images.append(ShownImage(read_image(sent.content, ImageSource()), sent.mark, tuple(sent.token_ids)))
        except RowError as error:
            raise field_error(f"images: {number}: {error}") from error
    found = {}
    for prompt, indexes in body.shown.items():
        if prompt not in range(len(body.prompts)) or not all(index in range(len(images)) for index in indexes):
            raise field_error(f"shown: {prompt}: of {len(body.prompts)} prompts and {len(images)} images")
        found[prompt] = [images[index] for index in indexes]
    return found


def _check_version(service: Service, expected: int | None) -> None:
    if expected is not None and expected != service.engine.version:
        raise Refused(
            412,
            "version",
            f"weights: version {service.engine.version} is loaded, the request expects version {expected}; sync first",
            version=service.engine.version,
        )


async def _lines(service: Service, answers: Answers, count: int) -> AsyncIterator[bytes]:
    """Lines of the reply, one per completion as it ends. A stream does not renew the lease of the client."""
    while count:
        arrivals = await answers.next(wire.ALIVE_S)
        count -= sum(1 if isinstance(arrival, Completion) else len(arrival.request_ids) for arrival in arrivals)
        lines = [wire.AliveLine(service.engine.counters), *map(_line, arrivals)]
        yield b"".join(wire.encode(line) + b"\n" for line in lines)
    yield wire.encode(wire.EndLine()) + b"\n"


def _line(arrival: Arrival) -> wire.Line:
    if isinstance(arrival, Completion):
        return wire.CompletionLine(arrival)
    error = wire.error_body(arrival.error, 500)["error"]
    return wire.FailedLine(arrival.request_ids, error)
