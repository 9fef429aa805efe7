"""Weight sync over HTTP: /weights/* for whole models, /v1/load_lora_adapter for adapters.

A bucket or an adapter is a safetensors body. A JSON bucket is the path of a file below the weights folder, or announces
a broadcast.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable
from dataclasses import asdict
from typing import Annotated, Any

import msgspec
import torch
from fastapi import APIRouter, Query
from fastapi import Request as HttpRequest
from fastapi.responses import Response
from msgspec import Meta, Struct

from swift.errors import ConfigError
from swift.rollout.engines import wire
from swift.rollout.server.access import (
    LIMITS,
    Refused,
    decoded,
    field_error,
    json_body,
    json_of,
    json_response,
    kind_of,
    read_body,
)
from swift.rollout.server.infer import RunId, needs_lease
from swift.rollout.server.service import Service
from swift.rollout.weights import disk
from swift.rollout.weights.base import AdapterWeights, Bucket, TensorInfo
from swift.rollout.weights.broadcast import Announcement, Entry, Invitation

HEADER_ROOM = 16 << 20
"""Maximum size of a safetensors header, in bytes."""


class Broadcast(Struct, forbid_unknown_fields=True, omit_defaults=True):
    """See `BroadcastSender.announce`."""

    entries: list[Entry]
    size: Annotated[int, Meta(ge=0)]
    invitation: Invitation | msgspec.UnsetType = msgspec.UNSET


class NamedBucket(Struct, forbid_unknown_fields=True):
    """POST /weights/bucket with a JSON body: a file on the shared disk, or a broadcast that follows."""

    update: int
    path: str | None = None
    digest: str | None = None
    broadcast: Broadcast | None = None


class UpdateRef(Struct):
    """The number of an update, from /weights/begin."""

    update: int


def router(service: Service) -> APIRouter:
    """The routes."""
    routes = APIRouter(dependencies=[needs_lease(service)])
    _updates(routes, service)
    _adapters(routes, service)
    return routes


def _updates(routes: APIRouter, service: Service) -> None:
    updates = service.queue.updates

    @routes.post("/weights/begin")
    async def begin(body: Annotated[wire.BeginUpdate, json_body(wire.BeginUpdate)]) -> Response:
        manifest = [_tensor_info(*entry) for entry in body.manifest]
        update = updates.begin(manifest, body.version)
        await service.job(update.feed.ready, update.job.cancel)
        return json_response({"update": update.number})

    @routes.post("/weights/bucket")
    async def bucket(
        http: HttpRequest, run: RunId = None, update: Annotated[int | None, Query(ge=0)] = None
    ) -> Response:
        if kind_of(http) == "json":
            async with json_of(http, functools.partial(decoded, NamedBucket)) as named:
                await _deliver(service, named.update, functools.partial(_named, service, named))
        elif update is None:
            raise field_error("update: missing: a safetensors body needs it in its query")
        else:
            left = sum(info.nbytes for info in updates.renew(update))
            data = await read_body(http, left + HEADER_ROOM, lambda size: updates.renew(update))
            service.authorize(run)  # another run may have taken the lease during the upload
            await _deliver(service, update, functools.partial(_uploaded, data))
        return json_response({"delivered": True})

    @routes.post("/weights/commit")
    async def commit(body: Annotated[UpdateRef, json_body(UpdateRef)]) -> Response:
        ack = await service.job(updates.commit(body.update))
        service.weights_arrived(ack)
        return json_response({"ack": asdict(ack), **await service.state()})

    @routes.post("/weights/abort")
    async def abort(body: Annotated[UpdateRef | None, json_body(UpdateRef, needed=False)] = None) -> Response:
        await service.job(updates.abort(body.update if body is not None else None))
        return json_response(await service.state())


async def _deliver(service: Service, update: int, read: Callable[[tuple[TensorInfo, ...]], Bucket]) -> None:
    """Read the next bucket with `read`, from the missing tensors, and send it; an error aborts the update."""
    updates = service.queue.updates
    missing = updates.renew(update)
    try:
        bucket = await asyncio.to_thread(read, missing)
        await service.job(updates.send(update, bucket))
    except BaseException:
        updates.abort(update)
        raise


def _uploaded(data: bytearray, missing: tuple[TensorInfo, ...]) -> Bucket:
    return disk.in_order(disk.from_bytes(data, "bucket"), "bucket", missing)


def _named(service: Service, named: NamedBucket, missing: tuple[TensorInfo, ...]) -> Bucket:
    """The bucket of a JSON body: a file or a broadcast."""
    if named.path is not None and named.broadcast is None:
        return disk.read_bucket(disk.inside(service.settings.weights_folder, named.path), missing, named.digest)
    if named.broadcast is not None and named.path is None:
        return Announcement([], header=msgspec.to_builtins(named.broadcast))
    raise field_error("bucket: needs either path or broadcast")


def _adapters(routes: APIRouter, service: Service) -> None:
    @routes.post("/v1/load_lora_adapter")
    async def load_lora_adapter(http: HttpRequest, version: Annotated[int, Query(ge=0)], run: RunId = None) -> Response:
        if run is None:  # other clients would sample with it under the name of the model
            raise Refused(409, "no_lease", "adapter: only the run that holds this server sends one; POST /reset first")
        data = await read_body(http, LIMITS.adapter_bytes)
        adapter = await asyncio.to_thread(_from_safetensors, data)
        service.authorize(run)  # another run may have taken the lease during the upload
        ack = await service.load_adapter(adapter, version)
        return json_response({"ack": asdict(ack), **await service.state()})

    @routes.post("/v1/unload_lora_adapter")
    async def unload_lora_adapter() -> Response:
        await service.drop_adapter()
        return json_response(await service.state())


def _tensor_info(name: str, dtype: str, shape: list[int]) -> TensorInfo:
    if not isinstance(getattr(torch, dtype, None), torch.dtype):
        raise field_error(f"manifest: {name}: {dtype} is not a torch dtype")
    return TensorInfo(name, dtype, tuple(shape))


def _from_safetensors(data: bytearray) -> AdapterWeights:
    """Read an adapter; its config is `adapter_config` in the metadata of the file."""
    tensors = disk.from_bytes(data, "adapter")
    text = disk.metadata_of(data).get("adapter_config")
    if text is None:
        raise ConfigError("adapter: the file's metadata has no adapter_config; put adapter_config.json there")
    try:
        return AdapterWeights(msgspec.json.decode(text, type=dict[str, Any]), tensors)
    except (msgspec.DecodeError, UnicodeError) as error:
        raise ConfigError(f"adapter_config: is not a JSON object ({error})") from error
