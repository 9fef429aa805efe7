"""The ASGI application: routes, the check of the bearer token, and errors as HTTP statuses."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from swift.errors import (
    ConfigError,
    EngineAsleep,
    EngineDead,
    PromptTooLong,
    RequestRefused,
    SwiftError,
    SyncFailed,
    Unsupported,
)
from swift.rollout.engines.completion_stream import QueueFull
from swift.rollout.engines.wire import error_body
from swift.rollout.server import control, infer, openai, weights
from swift.rollout.server.access import Gate, LargeBodies, Refused, field_error, json_response
from swift.rollout.server.service import Service

logger = logging.getLogger(__name__)

STATUS: tuple[tuple[type[SwiftError], int], ...] = (
    (PromptTooLong, 422),
    (RequestRefused, 422),
    (ConfigError, 422),
    (EngineAsleep, 409),
    (SyncFailed, 409),
    (Unsupported, 501),
    (EngineDead, 503),
    (SwiftError, 500),
)
"""HTTP status of an error; the first match applies. `SyncFailed` is a conflict (409): clients repeat a request after a
500, and a repeated bucket of a broadcast would wait for tensors that no process sends.
"""


def make_app(service: Service, give_up: Callable[[EngineDead], None] = lambda error: None) -> Any:
    """Build the ASGI application. give_up: called when no engine is left, with the reason; see `Service.watch`."""

    async def watch() -> None:
        give_up(await service.watch())

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        watching = asyncio.create_task(watch())
        yield
        watching.cancel()

    app = FastAPI(lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False)
    app.state.large, app.state.bodies = service.large, LargeBodies()
    for module in (infer, control, weights, openai):
        app.include_router(module.router(service))
    for kind in (Refused, SwiftError, RequestValidationError, HTTPException, ClientDisconnect, Exception):
        app.add_exception_handler(kind, _failed)
    return Gate(app, service.settings.api_key)


async def _failed(request: Request, error: Exception) -> Response:
    match error:
        case Refused():
            return error.response()
        case QueueFull():
            return Refused(429, "queue", error.problems[0]).response()
        case SwiftError():
            status = next(status for kind, status in STATUS if isinstance(error, kind))
            return json_response(error_body(error, status), status)
        case RequestValidationError():
            problems = [f"{problem['loc'][-1]}: {problem['msg']}" for problem in error.errors()[:3]]
            return field_error("; ".join(problems)).response()
        case HTTPException():
            problem = f"{request.method} {request.url.path}: {error.detail}"
            return Refused(error.status_code, "route", problem).response()
        case ClientDisconnect():
            return Refused(499, "gone", "client: disconnected").response()
    logger.error("a request failed", exc_info=error)
    return json_response(error_body(error, 500), 500)
