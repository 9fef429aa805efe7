"""The web application: routes, what guards them, and how failures look to clients."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

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
from swift.rollout.server import (
    routes_control,
    routes_infer,
    routes_openai,
    routes_transfer,
    routes_trl,
    routes_weights,
)
from swift.rollout.server.limits import Gate, Refused
from swift.rollout.server.service import Service
from swift.rollout.server.wire import error_body

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
"""First match wins. Weights that did not arrive are a conflict: clients repeat what answers 500, and a broadcast that
nobody sends a second time would be waited for.
"""


def make_app(service: Service, give_up: Callable[[EngineDead], None] = lambda error: None) -> Any:
    """The application of a server, as ASGI.

    Args:
        service: what it serves.
        give_up: called once no engine is left that could be replaced.
    """

    async def watch() -> None:
        give_up(await service.watch())

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        watching = asyncio.create_task(watch())
        yield
        watching.cancel()

    app = FastAPI(lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False)
    for module in (routes_infer, routes_control, routes_weights, routes_transfer, routes_openai, routes_trl):
        app.include_router(module.router(service))
    app.add_exception_handler(Refused, _refused)
    app.add_exception_handler(SwiftError, _failed)
    app.add_exception_handler(RequestValidationError, _misshapen)
    app.add_exception_handler(HTTPException, _unknown)
    app.add_exception_handler(Exception, _defect)
    return Gate(app, service.settings.api_key, service.settings.limits.body_bytes)


def status_of(error: SwiftError) -> int:
    """The HTTP status of a failure of ours."""
    return next(status for kind, status in STATUS if isinstance(error, kind))


async def _refused(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, Refused)
    headers = {"Retry-After": "1"} if error.status == 429 else None
    return JSONResponse(error.body(), error.status, headers)


async def _failed(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, SwiftError)
    status = status_of(error)
    return JSONResponse(error_body(error, status), status)


async def _misshapen(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    lines = [
        f"{'.'.join(str(part) for part in one['loc'] if part != 'body') or 'body'}: {one['msg']}"
        for one in error.errors()[:3]
    ]
    return JSONResponse(Refused(422, "field", "; ".join(lines)).body(), 422)


async def _unknown(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    if error.status_code == 400:  # raised by the reading of bodies alone
        return JSONResponse(Refused(422, "body", f"body: not what its content type says ({error.detail})").body(), 422)
    problem = f"{request.method} {request.url.path}: {error.detail}"
    return JSONResponse(Refused(error.status_code, "route", problem).body(), error.status_code)


async def _defect(_: Request, error: Exception) -> JSONResponse:
    logger.error("a request failed", exc_info=error)
    return JSONResponse(error_body(error, 500), 500)
