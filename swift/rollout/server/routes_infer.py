"""What trainers sample through, and what everybody may look at: /infer/, /health, /info, /version."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Annotated, Any

from fastapi import APIRouter, Header
from fastapi import Request as HttpRequest
from fastapi.responses import JSONResponse, StreamingResponse

import swift
from swift.errors import SwiftError
from swift.rollout.engines.worker.protocol import completion_to_json
from swift.rollout.server import wire
from swift.rollout.server.bodies import json_body
from swift.rollout.server.limits import KNOWN, Refused
from swift.rollout.server.protocol import InferRequest, check_sampling
from swift.rollout.server.service import Answers, Service, check_count
from swift.types import Completion, Request

RunId = Annotated[str | None, Header(alias=wire.RUN_HEADER)]


def router(service: Service) -> APIRouter:
    """The routes."""
    routes = APIRouter()
    _facts(routes, service)
    _infer(routes, service)
    return routes


def _facts(routes: APIRouter, service: Service) -> None:
    """What everybody may look at."""

    @routes.get("/health")
    @routes.get("/health/")
    async def health(http: HttpRequest, run: RunId = None) -> JSONResponse:
        known, holder = http.scope[KNOWN], service.lease.holder
        if known and run is not None and holder is not None and holder.run_id == run:
            service.authorize(run)
        good, body = await service.recent_health()
        shown = body if known else {"status": body["status"], "alive": body["alive"]}
        return JSONResponse(shown, 200 if good else 503)

    @routes.get("/info")
    async def info() -> dict[str, Any]:
        return await asyncio.to_thread(service.info)

    @routes.get("/version")
    async def version() -> dict[str, Any]:
        return {"version": swift.__version__, "protocol": wire.PROTOCOL}

    @routes.get("/weight_info")
    async def weight_info() -> dict[str, Any]:
        return {"weight_version": service.weight_version}

    @routes.get("/get_world_size")
    @routes.get("/get_world_size/")
    async def world_size() -> dict[str, int]:
        return {"world_size": 1}

    @routes.get("/server_info")
    async def server_info() -> dict[str, Any]:
        can, settings = service.engine.capabilities, service.settings
        model = {
            "model": settings.model,
            "dtype": f"torch.{can.dtype}",
            "max_model_len": can.max_model_len,
            "logprobs_mode": "raw_logprobs" if can.logprob_support == "raw" else "processed_logprobs",
        }
        parallel = {
            "tensor_parallel_size": settings.tensor_parallel_size,
            "data_parallel_size": settings.data_parallel_size,
        }
        return {
            "vllm_config": {
                "model_config": model,
                "parallel_config": parallel,
                "weight_transfer_config": {"backend": "nccl"},
                "lora_config": None,  # these trainers would name several adapters at once; they send merged weights
            }
        }


def _infer(routes: APIRouter, service: Service) -> None:
    """What trainers sample through."""

    @routes.post("/infer")
    @routes.post("/infer/")
    async def infer(body: Annotated[InferRequest, json_body(InferRequest)], run: RunId = None) -> StreamingResponse:
        requests = await asyncio.to_thread(_requests, service, body)
        if run is not None:
            service.authorize(run)
        _check_version(service, body.version)
        answers = service.open(requests, run)
        return StreamingResponse(_lines(service, answers, len(requests)), media_type="application/x-ndjson")


def _requests(service: Service, body: InferRequest) -> list[Request]:
    limits = service.settings.limits
    check_count("prompts", len(body.prompts), limits.prompts)
    counts = [0] * len(body.prompts)
    requests = []
    for entry in body.requests:
        if entry.prompt >= len(body.prompts):
            raise Refused(422, "field", f"requests: {entry.id}: prompt {entry.prompt} of {len(body.prompts)} prompts")
        counts[entry.prompt] += 1
        check_sampling(entry.sampling)
        requests.append(Request(entry.id, body.prompts[entry.prompt], entry.sampling))
    check_count("samples of a prompt", max(counts), limits.samples_per_prompt)
    return requests


def _check_version(service: Service, expected: int | None) -> None:
    if expected is not None and expected != service.engine.version:
        raise Refused(
            412,
            "version",
            f"weights: version {service.engine.version} is loaded; version {expected} was counted on: publish it first",
            version=service.engine.version,
        )


async def _lines(service: Service, answers: Answers, count: int) -> AsyncIterator[bytes]:
    """Completions as they finish; whoever hangs up aborts the rest. Only the client itself renews its lease."""
    async with answers:
        while count:
            arrival = await answers.next(wire.ALIVE_S)
            if arrival is None:
                yield wire.line("alive", counters=wire.counters_to_json(service.engine.counters))
            elif isinstance(arrival, Completion):
                count -= 1
                yield wire.line("completion", completion=completion_to_json(arrival))
            else:
                ids, error = arrival
                count -= len(ids)
                yield wire.line(
                    "failed", ids=ids, fatal=not isinstance(error, SwiftError), **wire.error_body(error, 500)
                )
    yield wire.line("end", counters=wire.counters_to_json(service.engine.counters))
