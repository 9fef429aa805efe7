"""Who owns the server, and what the engines do besides sampling: lease, pause, sleep, caches."""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from typing import Annotated, Any

from fastapi import APIRouter, Query

from swift.rollout.engines.base import ALL_TAGS, PauseMode
from swift.rollout.server.protocol import AbortRequest, ReleaseRequest, ResetRequest
from swift.rollout.server.routes_infer import RunId
from swift.rollout.server.service import Service


def router(service: Service) -> APIRouter:
    """The routes."""
    routes = APIRouter()
    _ownership(routes, service)
    _sampling(routes, service)
    _memory(routes, service)
    return routes


def _ownership(routes: APIRouter, service: Service) -> None:
    """Who the server belongs to."""
    front = service.front

    @routes.post("/reset")
    async def reset(body: ResetRequest) -> dict[str, Any]:
        return await service.reset(body.run_id, body.name, rebuild=body.rebuild)

    @routes.post("/release")
    async def release(body: ReleaseRequest) -> dict[str, Any]:
        released = service.lease.release(body.run_id)
        if released:
            front.abort_owned(body.run_id)
            if front.paused:
                await asyncio.to_thread(front.resume)
        return {"released": released}


def _sampling(routes: APIRouter, service: Service) -> None:
    """Whether it samples."""
    front = service.front

    @routes.post("/pause")
    async def pause(
        run: RunId = None, mode: Annotated[PauseMode, Query()] = "abort", clear_cache: Annotated[bool, Query()] = True
    ) -> dict[str, Any]:
        service.authorize(run)
        if mode == "keep":
            await asyncio.to_thread(front.pause_in_flight)
            return {"status": "paused"}
        if mode == "abort":
            front.abort_all()
        await service.job(front.pause_empty)
        return {"status": "paused"}

    @routes.post("/resume")
    async def resume(run: RunId = None) -> dict[str, Any]:
        service.authorize(run)
        await asyncio.to_thread(front.resume)
        return {"status": "resumed"}

    @routes.get("/is_paused")
    async def is_paused() -> dict[str, Any]:
        return {"is_paused": front.paused}

    @routes.post("/abort_requests")
    async def abort_requests(body: AbortRequest | None = None, run: RunId = None) -> dict[str, Any]:
        service.authorize(run)
        ids = body.request_ids if body is not None else None
        owned = run is not None or ids is not None
        count = front.abort_owned(run, ids) if owned else front.abort_all()
        return {"status": "aborted", "aborted": count}


def _memory(routes: APIRouter, service: Service) -> None:
    """What the engines hold."""
    front, engine = service.front, service.engine

    @routes.post("/reset_prefix_cache")
    @routes.post("/reset_prefix_cache/")
    async def reset_prefix_cache(run: RunId = None) -> dict[str, Any]:
        service.authorize(run)
        await asyncio.to_thread(service.transfer.settle)
        if front.load[0] and not front.paused:  # a pause between two tokens is enough
            await asyncio.to_thread(front.pause_in_flight)
            try:
                await service.job(engine.reset_caches)
            finally:
                await asyncio.to_thread(front.resume)
        else:
            await service.job(engine.reset_caches)
        return {"success": True}

    @routes.post("/sleep")
    async def sleep(
        run: RunId = None, level: Annotated[int, Query(ge=0, le=2)] = 1, mode: Annotated[PauseMode, Query()] = "abort"
    ) -> dict[str, Any]:
        service.authorize(run)
        if mode == "abort":
            front.abort_all()
        report = await service.job(lambda: engine.sleep(level))  # type: ignore[arg-type]
        return {**asdict(report), **await asyncio.to_thread(service.state)}

    @routes.post("/wake_up")
    async def wake_up(run: RunId = None, tags: Annotated[list[str] | None, Query()] = None) -> dict[str, Any]:
        service.authorize(run)
        wanted: Any = list(ALL_TAGS) if tags is None else tags
        fully = await service.job(lambda: engine.wake(wanted))
        return {"fully_awake": fully, **await asyncio.to_thread(service.state)}

    @routes.get("/is_sleeping")
    async def is_sleeping() -> dict[str, Any]:
        state = await asyncio.to_thread(service.state)
        return {"is_sleeping": bool(state["asleep"]), "detail": state["asleep"]}
