"""The ASGI application: the page and what it asks for, all of it below the token, all of it GET."""

import base64
import hashlib
import re
import secrets
from collections.abc import Awaitable, Callable, Iterator, Sequence
from importlib import resources
from typing import Annotated, Any

import msgspec
import numpy as np
from fastapi import Depends, FastAPI, HTTPException, Query, Request
from fastapi.responses import Response, StreamingResponse

from swift.errors import SwiftError
from swift.observability.jsonl import encode_row
from swift.viewing.difference import differences
from swift.viewing.filters import Filter, Order, groups
from swift.viewing.images import image_of
from swift.viewing.index import Table
from swift.viewing.run import Run

PAGE_SIZE = 50
"""Groups on a page."""
SHOWN_CHARACTERS = 300
"""Of a prompt, in a list of groups."""
NOT_FOUND = "not in completions.jsonl, or not read yet"


def make_app(runs: Sequence[Run], token: str) -> FastAPI:
    """The application. token: the first part of every path; other paths do not exist."""
    page = resources.files("swift.viewing").joinpath("page.html").read_text(encoding="utf-8")
    headers = security_headers(page)
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False)

    @app.middleware("http")
    async def guard(request: Request, proceed: Callable[[Request], Awaitable[Response]]) -> Response:
        given = request.scope["path"].split("/")[1].encode()
        if secrets.compare_digest(given, token.encode()):
            response = await proceed(request)
        else:
            response = Response("not found: open the URL that swift view printed\n", 404)
        response.headers.update(headers)
        return response

    @app.exception_handler(SwiftError)
    async def refused(_: Request, error: SwiftError) -> Response:
        return reply({"detail": str(error)}, 422)

    @app.get("/{token}/")
    async def root() -> Response:
        return Response(page, media_type="text/html")

    def chosen(run: int = 0) -> Run:
        if not 0 <= run < len(runs):
            raise HTTPException(404, f"run: {run}: there are {len(runs)}")
        return runs[run]

    @app.get("/{token}/runs")
    def all_runs() -> Response:
        return reply([run.about() for run in runs])

    add_curves(app, chosen)
    add_completions(app, chosen)
    return app


def security_headers(page: str) -> dict[str, str]:
    """Headers of every response: only the page's own script runs, and nothing is fetched from elsewhere."""

    def digest(tag: str) -> str:
        text = re.search(f"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
        assert text is not None
        return f"'sha256-{base64.b64encode(hashlib.sha256(text[1].encode()).digest()).decode()}'"

    policy = (
        f"default-src 'none'; script-src {digest('script')}; style-src {digest('style')}; connect-src 'self'; "
        "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return {
        "Content-Security-Policy": policy,
        "Referrer-Policy": "no-referrer",
        "X-Content-Type-Options": "nosniff",
        "Cache-Control": "no-store",
    }


def reply(value: Any, status: int = 200) -> Response:
    """A value as JSON; NaN and infinities become null."""
    try:
        body = msgspec.json.encode(value, enc_hook=lambda one: one.item())
    except UnicodeEncodeError:  # a lone surrogate
        body = encode_row(value)
    return Response(body, status, media_type="application/json")


Chosen = Callable[..., Run]


def add_curves(app: FastAPI, chosen: Chosen) -> None:
    """The route of curves and marks."""

    @app.get("/{token}/curves")
    def curves(
        run: Annotated[Run, Depends(chosen)],
        key: Annotated[list[str], Query()] = [],  # noqa: B006  FastAPI copies it
        first: float = -np.inf,
        last: float = np.inf,
    ) -> Response:
        return reply({"series": {name: run.log.series(name, first, last) for name in key}, "marks": run.log.marks()})


def add_completions(app: FastAPI, chosen: Chosen) -> None:
    """The routes of groups and completions."""

    @app.get("/{token}/groups")
    def list_groups(
        run: Annotated[Run, Depends(chosen)],
        wanted: Annotated[Filter, Depends()],
        order: Order = "spread",
        descending: bool = True,
        page: Annotated[int, Query(ge=0)] = 0,
    ) -> Response:
        table = run.index.table
        rows = wanted.rows(table)
        found = groups(table, rows, wanted.function, order, descending)
        start = page * PAGE_SIZE
        shown = [group_entry(table, found, number) for number in range(len(found["first"]))[start : start + PAGE_SIZE]]
        return reply({"completions": int(rows.sum()), "count": len(found["first"]), "page": page, "groups": shown})

    @app.get("/{token}/prompt")
    def prompt(run: Annotated[Run, Depends(chosen)], prompt_id: str) -> Response:
        table = run.index.table
        rows = Filter(prompt_id=prompt_id).rows(table)
        found = groups(table, rows, "", "step", False)
        names = ("step", "mean", "least", "greatest", "length")
        return reply({name: found[name].tolist() for name in names})

    @app.get("/{token}/group")
    def group(run: Annotated[Run, Depends(chosen)], step: int, split: str, group_id: str) -> Response:
        table = run.index.table
        rows = table.rows_of(step, split, group_id)
        if not rows:
            raise HTTPException(404, f"group {group_id} of step {step}: {NOT_FOUND}")
        return reply({"completions": [table.read(row) for row in rows]})

    @app.get("/{token}/completion")
    def completion(run: Annotated[Run, Depends(chosen)], step: int, split: str, group_id: str, index: int) -> Response:
        row = place(run.index.table, step, split, group_id, index)
        tokens = run.tokens(step, group_id, index) if split == "train" else None
        return reply({"row": run.index.table.read(row), "tokens": tokens})

    @app.get("/{token}/image")
    def image(
        run: Annotated[Run, Depends(chosen)], step: int, split: str, group_id: str, index: int, digest: str
    ) -> Response:
        table = run.index.table
        content, kind = image_of(table.read(place(table, step, split, group_id, index)), digest)
        return Response(content, media_type=kind)

    @app.get("/{token}/difference")
    def difference(
        run: Annotated[Run, Depends(chosen)], step: int, split: str, group_id: str, first: int, second: int
    ) -> Response:
        table = run.index.table
        one, other = (table.read(place(table, step, split, group_id, index)) for index in (first, second))
        return reply(differences(whole_text(one), whole_text(other)))

    @app.get("/{token}/export")
    def export(run: Annotated[Run, Depends(chosen)], wanted: Annotated[Filter, Depends()]) -> Response:
        table = run.index.table
        rows = np.flatnonzero(wanted.rows(table))
        name = re.sub(r"[^\w.-]", "_", f"{run.name}-completions.jsonl", flags=re.ASCII)
        disposition = {"Content-Disposition": f'attachment; filename="{name}"'}
        return StreamingResponse(lines(table, rows), media_type="application/jsonl", headers=disposition)


def lines(table: Table, rows: np.ndarray) -> Iterator[bytes]:
    """The lines of the rows as they are in the file."""
    for row in rows.tolist():
        yield table.line(row) + b"\n"


def place(table: Table, step: int, split: str, group_id: str, index: int) -> int:
    """The row of a completion; a 404 if there is none."""
    for row in table.rows_of(step, split, group_id):
        if table.columns["index"][row] == index:
            return row
    raise HTTPException(404, f"completion {index} of group {group_id}, step {step}: {NOT_FOUND}")


def whole_text(row: dict[str, Any]) -> str:
    """A completion with its later turns."""
    turns = row["turns"] or [{"role": "", "content": row["completion"]}]
    return (
        "\n".join(f"[{turn['role']}]\n{turn.get('content') or ''}" for turn in turns)
        if row["turns"]
        else row["completion"]
    )


def group_entry(table: Table, found: dict[str, np.ndarray], number: int) -> dict[str, Any]:
    """A group in a list: its place, the beginning of its prompt, and its statistics."""
    row = table.read(int(found["first"][number]))
    text = row["prompt"]
    return {
        **{name: row[name] for name in ("step", "split", "group_id", "prompt_id")},
        "prompt": text if len(text) <= SHOWN_CHARACTERS else text[:SHOWN_CHARACTERS] + "...",
        **{name: values[number].item() for name, values in found.items() if name not in ("first", "step")},
    }
