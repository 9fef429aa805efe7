"""What a `swift rollout` server and its client agree on: headers, lines of a stream, errors, what a model is.

    POST /infer/    {"version", "prompts": [[id, ...], ...], "requests": [{"id", "prompt": index, "sampling"}, ...]}
    reply           one JSON object per line: completion | failed | alive, and end as the last one

A stream that stops before its "end" was cut off. "alive" comes at least every `ALIVE_S` seconds, so silence is a fault.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import swift.errors
from swift.errors import EngineError, SwiftError
from swift.rollout.engines.base import EngineCounters
from swift.types import Request

PROTOCOL = 1
"""Changes when either side would misunderstand the other."""

RUN_HEADER = "X-Swift-Run"
"""Id of the run that sends the request."""

ALIVE_S = 2.0
"""How often a stream says that it is there when it has nothing else to say."""

PIECE_BYTES = 32 << 20
"""Longest piece of an upload; larger bodies are cut."""

SAFETENSORS = "application/x-safetensors"

ARCHITECTURE = (
    "model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "tie_word_embeddings",
)  # fmt: skip
"""Entries of config.json that tell models apart whose folders have other names on other machines."""

Line = dict[str, Any]


def architecture(folder: str | Path) -> dict[str, Any]:
    """What config.json says of the model; {} without that file."""
    file = Path(folder) / "config.json"
    if not file.is_file():
        return {}
    config = json.loads(file.read_text(encoding="utf-8"))
    text = config.get("text_config") or {}
    found = {name: text.get(name, config.get(name)) for name in ARCHITECTURE}
    return {name: value for name, value in found.items() if value is not None}


def infer_body(requests: Sequence[Request], version: int | None) -> dict[str, Any]:
    """Requests for POST /infer/; equal prompts travel once."""
    prompts: dict[tuple[int, ...], int] = {}
    entries = []
    for request in requests:
        index = prompts.setdefault(tuple(request.prompt_ids), len(prompts))
        entries.append({"id": request.request_id, "prompt": index, "sampling": asdict(request.sampling)})
    return {"version": version, "prompts": [list(prompt) for prompt in prompts], "requests": entries}


def line(event: str, **fields: Any) -> bytes:
    """One line of a stream."""
    return json.dumps({"event": event, **fields}, separators=(",", ":")).encode() + b"\n"


def pieces(data: bytes | memoryview) -> Iterator[tuple[int, memoryview]]:
    """(offset, piece) of an upload, none longer than `PIECE_BYTES`."""
    view = memoryview(data)
    for offset in range(0, len(view), PIECE_BYTES):
        yield offset, view[offset : offset + PIECE_BYTES]


def counters_to_json(counters: EngineCounters) -> dict[str, float]:
    """Counters as JSON."""
    return asdict(counters)


def error_body(error: BaseException, status: int) -> dict[str, Any]:
    """The JSON of a failure: OpenAI's `message`, `type` and `code`, and what is needed to raise it again."""
    if isinstance(error, SwiftError):
        state = {name: value for name, value in vars(error).items() if isinstance(value, str | int | float)}
        kind, problems = type(error).__name__, error.problems
    else:
        first = (str(error).strip().splitlines() or [""])[0]
        state, kind, problems = {}, "", [f"{type(error).__name__}: {first}"]
    return {
        "error": {"message": "; ".join(problems), "type": kind, "code": status, "problems": problems, "state": state}
    }


def error_from_body(body: Any, name: str) -> SwiftError | None:
    """The error of a failed reply, in the server's name; None when it is no typed error of ours."""
    error = body.get("error") if isinstance(body, dict) else None
    if not isinstance(error, dict) or not error.get("type") or not error.get("problems"):
        return None
    kind = getattr(swift.errors, str(error["type"]), None)
    if not (isinstance(kind, type) and issubclass(kind, SwiftError)):
        kind = EngineError
    made: SwiftError = kind.__new__(kind)
    first, *rest = [str(problem) for problem in error["problems"]]
    SwiftError.__init__(made, f"{name}: {first}", *rest)
    made.__dict__.update(error.get("state") or {})
    return made
