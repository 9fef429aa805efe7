"""New weights over HTTP: /weights/* for whole models, /v1/load_lora_adapter for adapters.

Bodies are JSON or safetensors. One that is longer than a request may be comes in pieces, each with its `offset` and the
`total` length; a piece that is sent twice is taken once.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import asdict
from typing import Annotated, Any

from fastapi import APIRouter, Header, Query
from fastapi import Request as HttpRequest
from starlette.datastructures import UploadFile

from swift.errors import ConfigError
from swift.rollout.server import wire
from swift.rollout.server.bodies import json_body
from swift.rollout.server.limits import Refused
from swift.rollout.server.protocol import (
    BeginRequest,
    ConnectRequest,
    FileBucket,
    LoadAdapterRequest,
    UnloadAdapterRequest,
    UpdateRef,
    parsed,
)
from swift.rollout.server.routes_infer import RunId
from swift.rollout.server.service import Service
from swift.rollout.server.transfer import infos_of
from swift.rollout.server.updates import Upload
from swift.rollout.weight_sync import disk
from swift.rollout.weight_sync.base import Ack, AdapterWeights

Position = Annotated[int | None, Query(ge=0)]
Kind = Annotated[str, Header(alias="content-type")]


def router(service: Service) -> APIRouter:
    """The routes."""
    routes = APIRouter()
    _updates(routes, service)
    _adapters(routes, service)
    return routes


def _updates(routes: APIRouter, service: Service) -> None:
    """All weights."""
    updates = service.updates

    @routes.post("/weights/begin")
    async def begin(body: Annotated[BeginRequest, json_body(BeginRequest)], run: RunId = None) -> dict[str, Any]:
        service.authorize(run)
        names, dtypes, shapes = zip(*body.manifest, strict=True) if body.manifest else ((), (), ())
        manifest = infos_of(names, dtypes, shapes)
        number = await service.job(lambda: updates.begin(manifest, body.version))
        return {"update": number, "piece_bytes": wire.PIECE_BYTES}

    @routes.post("/weights/connect")
    async def connect(body: ConnectRequest, run: RunId = None) -> dict[str, Any]:
        service.authorize(run)
        await asyncio.to_thread(updates.connect, body.invitation)
        return {"status": "connected"}

    @routes.post("/weights/bucket")
    async def bucket(
        request: HttpRequest,
        kind: Kind,
        run: RunId = None,
        update: Position = None,
        bucket: Position = None,
        offset: Position = None,
        total: Position = None,
    ) -> dict[str, Any]:
        service.authorize(run)
        data = await request.body()
        if kind.startswith("application/json"):
            await _deliver_named(service, parsed(FileBucket, data))
            return {"delivered": True}
        if update is None or bucket is None:
            raise Refused(422, "field", "update, bucket: missing: a safetensors body needs both in its query")
        upload = updates.upload(update, bucket, len(data) if total is None else total)
        if upload is None:
            return {"delivered": True}
        complete = upload.add(offset or 0, data)
        if complete:
            await service.job(lambda: updates.deliver_bytes(update, bucket))
        return {"delivered": complete}

    @routes.post("/weights/commit")
    async def commit(body: UpdateRef, run: RunId = None) -> dict[str, Any]:
        service.authorize(run)
        if body.update is None:
            raise Refused(422, "field", "update: missing: its number, from the reply of /weights/begin")
        number = body.update
        ack = await service.job(lambda: updates.commit(number))
        service.replaced()
        return {"ack": asdict(ack), **await asyncio.to_thread(service.state)}

    @routes.post("/weights/abort")
    async def abort(body: UpdateRef | None = None, run: RunId = None) -> dict[str, Any]:
        service.authorize(run)
        number = body.update if body is not None else None
        await service.job(lambda: updates.abort(number))
        return await asyncio.to_thread(service.state)


def _adapters(routes: APIRouter, service: Service) -> None:
    """LoRA adapters."""
    adapters: dict[str, Upload] = {}

    @routes.post("/v1/load_lora_adapter")
    async def load_lora_adapter(
        request: HttpRequest,
        kind: Kind,
        run: RunId = None,
        lora_name: str | None = None,
        version: Position = None,
        offset: Position = None,
        total: Position = None,
    ) -> dict[str, Any]:
        service.authorize(run)
        if kind.startswith("multipart/form-data"):
            name, adapter = await _from_form(request)
        else:
            data = await request.body()
            if kind.startswith("application/json"):
                named = parsed(LoadAdapterRequest, data)
                folder = disk.inside(service.settings.weights_folder, named.lora_path)
                name, adapter = named.lora_name, await asyncio.to_thread(disk.read_adapter_folder, folder)
            elif lora_name is None:
                raise Refused(422, "field", "lora_name: missing: a safetensors body needs it in its query")
            else:
                whole = _collected(service, adapters, lora_name, data, offset or 0, total)
                if whole is None:
                    return {"delivered": False}
                name, adapter = lora_name, await asyncio.to_thread(_from_safetensors, whole)
        ack: Ack = await service.job(lambda: service.load_adapter(name, adapter, version, policy=run is not None))
        return {"delivered": True, "ack": asdict(ack), **await asyncio.to_thread(service.state)}

    @routes.post("/v1/unload_lora_adapter")
    async def unload_lora_adapter(body: UnloadAdapterRequest, run: RunId = None) -> dict[str, Any]:
        service.authorize(run)
        if body.lora_name != service.adapter:
            raise Refused(
                404, "adapter", f"lora_name: {body.lora_name}: not loaded; loaded: {service.adapter or 'none'}"
            )
        await service.job(service.drop_adapter)
        return await asyncio.to_thread(service.state)

    @routes.post("/drop_adapter")
    async def drop_adapter(run: RunId = None) -> dict[str, Any]:
        service.authorize(run)
        await service.job(service.drop_adapter)
        return await asyncio.to_thread(service.state)


async def _deliver_named(service: Service, named: FileBucket) -> None:
    """A bucket that the body only names."""
    updates, path, header = service.updates, named.path, named.broadcast
    if path is not None and header is None:
        await service.job(lambda: updates.deliver_file(named.update, named.bucket, path, named.digest))
    elif header is not None and path is None:
        await service.job(lambda: updates.deliver_broadcast(named.update, named.bucket, header))
    else:
        raise Refused(422, "field", "bucket: one of path and broadcast is needed")


def _collected(
    service: Service, uploads: dict[str, Upload], name: str, data: bytes, offset: int, total: int | None
) -> bytearray | None:
    """An adapter's bytes once all pieces are there."""
    limits = service.settings.limits
    for silent in [key for key, one in uploads.items() if one.silent(limits.upload_idle_s)]:
        del uploads[silent]
    if name not in uploads or offset == 0:
        uploads.clear()  # one at a time
        uploads[name] = Upload(len(data) if total is None else total, limits.adapter_bytes)
    if not uploads[name].add(offset, data):
        return None
    return uploads.pop(name).data


def _from_safetensors(data: bytearray) -> AdapterWeights:
    """Config in the file's metadata, as `adapter_config`."""
    tensors = disk.from_bytes(data, "adapter")
    text = disk.metadata_of(data).get("adapter_config")
    if text is None:
        raise ConfigError("adapter: the file's metadata has no adapter_config; put adapter_config.json there")
    return AdapterWeights(_config(text), tensors)


async def _from_form(request: HttpRequest) -> tuple[str, AdapterWeights]:
    """Fields `lora_name`, `adapter_config` (JSON) and the file `adapter_model`."""
    async with request.form(max_files=2, max_fields=8) as form:
        name, config, weights = (form.get(field) for field in ("lora_name", "adapter_config", "adapter_model"))
        texts = [await one.read() if isinstance(one, UploadFile) else one for one in (config, weights)]
    if not isinstance(name, str) or any(text is None for text in texts) or not isinstance(texts[1], bytes):
        raise Refused(422, "field", "form: lora_name, adapter_config and the file adapter_model are needed")
    text = texts[0].decode(errors="replace") if isinstance(texts[0], bytes) else str(texts[0])
    return name, AdapterWeights(_config(text), disk.from_bytes(texts[1], "adapter_model"))


def _config(text: str) -> dict[str, Any]:
    try:
        config = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"adapter_config: is not valid JSON ({error})") from error
    if not isinstance(config, dict):
        raise ConfigError(f"adapter_config: {text[:40]}: is no JSON object")
    return config
