"""JSON bodies of requests: long ones are parsed beside the event loop, which answers others meanwhile.

A thread alone would not do: the parser of a body of token ids is one call that keeps the interpreter to itself, 1.3 s
for the 64 MB that a body may have. A function of ours per number lets the other threads in. That takes 1.7 times as
long in all, and keeps the loop for 0.4 s at most, 15 ms for a body of 3 MB.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any, TypeVar

from fastapi import Depends
from fastapi import Request as HttpRequest
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ValidationError

from swift.rollout.server.limits import Refused

LARGE_BYTES = 256 << 10
"""A body of this length is parsed in 5 ms."""

Shape = TypeVar("Shape", bound=BaseModel)


def json_body(shape: type[BaseModel]) -> Any:
    """What annotates the parameter of a route that is its body: `Annotated` of the shape and this."""

    async def body(http: HttpRequest) -> BaseModel:
        return await read(http, shape)

    return Depends(body)


async def read(http: HttpRequest, shape: type[Shape]) -> Shape:
    """The body of a request.

    Raises:
        Refused, RequestValidationError: it is no JSON, or does not have this shape.
    """
    kind = http.headers.get("content-type", "none").partition(";")[0].strip().lower()
    if not (kind.startswith("application/") and kind.endswith(("/json", "+json"))):
        raise Refused(422, "body", f"body: its content type is {kind}; send application/json")
    data = await http.body()
    if len(data) < LARGE_BYTES:
        return validated(shape, data)
    return await asyncio.to_thread(validated, shape, data)


def validated(shape: type[Shape], data: bytes) -> Shape:
    """JSON as an object of this shape; see `read`."""
    try:
        content = json.loads(data, parse_int=_number) if len(data) >= LARGE_BYTES else json.loads(data)
    except (ValueError, RecursionError) as error:
        raise Refused(422, "body", f"body: not what its content type says ({error})") from error
    try:
        return shape.model_validate(content)
    except ValidationError as error:
        raise RequestValidationError(error.errors(include_url=False, include_input=False)) from error


def _number(text: str) -> int:
    """`int`, in a call of Python's own, in which threads take turns."""
    return int(text)
