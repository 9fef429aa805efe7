"""Routes that control the server: lease, pause, hold, restart, abort, sleep and caches."""

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
    """POST /reset. name: the run's process, for messages. rebuild: restore base weights also for the present holder."""

    run_id: Annotated[str, Meta(min_length=1, max_length=256)]
    name: Annotated[str, Meta(max_length=256)] = ""
    rebuild: bool = False


class Release(Struct):
    """POST /release."""

    run_id: str


class Abort(Struct):
    """POST /abort_requests. request_ids: None aborts all of the caller's run; without a run, those of all clients."""

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
            raise Unsupported("server: --force_restart: cannot restart several engines; leave it out")
        service.restart = RestartWanted(f"server: run {run} has requested a restart")
        return json_response({"boot_id": service.boot_id})

    @routes.post("/abort_requests", dependencies=owner)
    async def abort_requests(
        body: Annotated[Abort | None, json_body(Abort, needed=False)] = None, run: RunId = None
    ) -> Response:
        ids = body.request_ids if body is not None else None
        of_all_clients = run is None and ids is None
        count = queue.abort(lambda stream: of_all_clients or stream.owner == run, ids)
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
        woken: Any = list(ALL_TAGS) if tags is None else tags
        fully = await service.do(lambda engine: engine.wake(woken))
        return json_response({"fully_awake": fully, **await service.state()})

    return routes
