"""Who owns the server, and what the engines do besides sampling: lease, pause, hold, sleep, caches."""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from typing import Annotated, Any

from fastapi import APIRouter, Query
from fastapi.responses import Response
from msgspec import Meta, Struct

from swift.errors import Unsupported
from swift.rollout.engines.base import ALL_TAGS
from swift.rollout.server.access import json_body, json_response
from swift.rollout.server.infer import RunId, needs_lease
from swift.rollout.server.service import RestartWanted, Service


class Reset(Struct):
    """POST /reset. name: of the run's process, for people. rebuild: base weights even if this run is known already."""

    run_id: Annotated[str, Meta(min_length=1, max_length=256)]
    name: Annotated[str, Meta(max_length=256)] = ""
    rebuild: bool = False


class Release(Struct):
    """POST /release."""

    run_id: str


class Abort(Struct):
    """POST /abort_requests; without ids, everything of the caller's run, or everything."""

    request_ids: list[str] | None = None


class Hold(Struct):
    """POST /hold. held: whether generation requests of clients without a run wait."""

    held: bool


def router(service: Service) -> APIRouter:
    """The routes."""
    routes, queue, owner = APIRouter(), service.queue, [needs_lease(service)]

    @routes.post("/reset")
    async def reset(body: Annotated[Reset, json_body(Reset)]) -> Response:
        return json_response(await service.reset(body.run_id, body.name, rebuild=body.rebuild))

    @routes.post("/release")
    async def release(body: Annotated[Release, json_body(Release)]) -> Response:
        return json_response({"released": await service.release(body.run_id)})

    @routes.post("/pause", dependencies=owner)
    async def pause() -> Response:
        await asyncio.to_thread(queue.pause_in_flight)
        return json_response({"status": "paused"})

    @routes.post("/resume", dependencies=owner)
    async def resume() -> Response:
        await service.job(queue.resume())
        return json_response({"status": "resumed"})

    @routes.post("/hold", dependencies=owner)
    async def hold(body: Annotated[Hold, json_body(Hold)]) -> Response:
        service.held = body.held
        return json_response({"held": service.held})

    @routes.post("/restart", dependencies=owner)
    async def restart(run: RunId = None) -> Response:
        if len(service.settings.specs) > 1:
            raise Unsupported("server: several engines are replaced one by one; leave --force_restart out")
        service.restart = RestartWanted(f"server: run {run} asks for a new process")
        return json_response({"boot_id": service.boot_id})

    @routes.post("/abort_requests", dependencies=owner)
    async def abort_requests(
        body: Annotated[Abort | None, json_body(Abort, needed=False)] = None, run: RunId = None
    ) -> Response:
        ids = body.request_ids if body is not None else None
        everything = run is None and ids is None
        count = queue.abort(lambda stream: everything or stream.owner == run, ids)
        return json_response({"status": "aborted", "aborted": count})

    @routes.post("/reset_prefix_cache", dependencies=owner)
    async def reset_prefix_cache() -> Response:
        await service.job(await asyncio.to_thread(queue.reset_caches))
        return json_response({"success": True})

    @routes.post("/sleep", dependencies=owner)
    async def sleep(level: Annotated[int, Query(ge=0, le=2)] = 1) -> Response:
        report = await service.do(lambda engine: engine.sleep(level))  # type: ignore[arg-type]
        return json_response({**asdict(report), **await service.state()})

    @routes.post("/wake_up", dependencies=owner)
    async def wake_up(tags: Annotated[list[str] | None, Query()] = None) -> Response:
        wanted: Any = list(ALL_TAGS) if tags is None else tags
        fully = await service.do(lambda engine: engine.wake(wanted))
        return json_response({"fully_awake": fully, **await service.state()})

    return routes
