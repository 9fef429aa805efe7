"""Weights from trainers of other makes: vLLM's RL routes, and TRL's older ones; see `transfer`."""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from typing import Any

from fastapi import APIRouter

from swift.rollout.engines.base import Ack
from swift.rollout.server.protocol import (
    FinishUpdate,
    InitTransfer,
    LegacyCommunicator,
    LegacyParameter,
    UpdateWeights,
)
from swift.rollout.server.routes_infer import RunId
from swift.rollout.server.service import Service
from swift.rollout.server.transfer import infos_of, legacy_init

HOW = {"packed", "packed_buffer_size_bytes", "packed_num_buffers"}
"""Fields of an announcement that say how its tensors travel."""


def router(service: Service) -> APIRouter:
    """The routes."""
    routes = APIRouter()
    _current(routes, service)
    _legacy(routes, service)
    return routes


def _current(routes: APIRouter, service: Service) -> None:
    """Shapes of vLLM."""
    transfer = service.transfer

    @routes.post("/init_weight_transfer_engine")
    async def init_weight_transfer_engine(body: InitTransfer, run: RunId = None) -> dict[str, Any]:
        service.authorize(run)
        await asyncio.to_thread(transfer.connect, body.init_info)
        return {"message": "Weight transfer initialized"}

    @routes.post("/shutdown_weight_transfer_engine")
    async def shutdown_weight_transfer_engine(run: RunId = None) -> dict[str, Any]:
        service.authorize(run)
        await asyncio.to_thread(transfer.disconnect)
        return {"message": "Weight transfer shut down"}

    @routes.post("/start_weight_update")
    async def start_weight_update(run: RunId = None) -> dict[str, Any]:
        service.authorize(run)
        transfer.start()
        return {"message": "Weight update started"}

    @routes.post("/update_weights")
    async def update_weights(body: UpdateWeights, run: RunId = None) -> dict[str, Any]:
        service.authorize(run)
        info = body.update_info
        infos = infos_of(info.names, info.dtype_names, info.shapes)
        await asyncio.to_thread(transfer.update, infos, info.model_dump(include=HOW, exclude_none=True))
        return {"message": "Weights updated"}

    @routes.post("/finish_weight_update")
    async def finish_weight_update(body: FinishUpdate | None = None, run: RunId = None) -> dict[str, Any]:
        service.authorize(run)
        given = body.weight_version if body is not None else None
        ack = await asyncio.to_thread(transfer.finish, _number(given))
        assert isinstance(ack, Ack)
        if given is not None:
            service.call_version(ack.version, str(given))
        return {"message": "Weight update finished", "ack": asdict(ack)}


def _legacy(routes: APIRouter, service: Service) -> None:
    """Shapes of TRL's older client."""
    transfer = service.transfer

    @routes.post("/init_communicator")
    @routes.post("/init_communicator/")
    async def init_communicator(body: LegacyCommunicator, run: RunId = None) -> dict[str, Any]:
        service.authorize(run)
        init = legacy_init(body.host, body.port, body.world_size, body.backend)
        transfer.connect_later(init)
        return {"message": "Request received, initializing communicator"}

    @routes.post("/update_named_param")
    @routes.post("/update_named_param/")
    async def update_named_param(body: LegacyParameter, run: RunId = None) -> dict[str, Any]:
        service.authorize(run)
        (info,) = infos_of([body.name], [body.dtype], [body.shape])
        transfer.expect(info)
        return {"message": "Request received, updating named parameter"}

    @routes.post("/close_communicator")
    @routes.post("/close_communicator/")
    async def close_communicator(run: RunId = None) -> dict[str, Any]:
        service.authorize(run)
        await asyncio.to_thread(transfer.disconnect)
        return {"message": "Request received, closing communicator"}


def _number(given: str | int | None) -> int | None:
    """The version that a trainer's label is; None counts on, as for a label that is no number."""
    if isinstance(given, str):
        return int(given) if given.isascii() and given.isdigit() else None
    return given
