"""What a `swift rollout` server and its client exchange: shapes of requests, lines of a reply, errors.

    POST /infer/    `InferRequest`; equal prompts travel once
    reply           one JSON object per line: completion | failed | alive, and end as the last one

A stream that stops before its "end" was cut off. "alive" comes at least every `ALIVE_S` seconds, so silence is a fault.
Weights and adapters travel as safetensors.
"""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

import swift.errors
from swift.errors import EngineError, SwiftError, first_line
from swift.rollout.engines.base import EngineCounters, TensorInfo
from swift.types import Completion, Request, SamplingParams

PROTOCOL = 4
"""Changes when either side would misunderstand the other."""
RUN_HEADER = "X-Swift-Run"
"""Id of the run that sends the request."""
ALIVE_S = 2.0
"""How often a stream says that it is there when it has nothing else to say."""
SAFETENSORS = "application/x-safetensors"

ARCHITECTURE = (
    "model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "tie_word_embeddings",
)  # fmt: skip
"""Entries of config.json that tell models apart whose folders have other names on other machines."""

encode = msgspec.json.encode

Spans = list[tuple[int, int, int]]
"""Versions of the tokens of a completion, as in `Completion.versions`."""
Said = tuple[Sequence[int], Sequence[int], Sequence[float]]
"""A completion as an environment tells it: prompt ids, token ids, and the log-probs of these, if it tells them."""
Versions = Callable[[Sequence[Said]], Sequence[Spans | None]]
"""The weight versions of completions; None where nobody knows."""


class Sample(Struct, forbid_unknown_fields=True):
    """One sample. prompt: index into the prompts of the request."""

    id: Annotated[str, Meta(min_length=1, max_length=1024)]
    prompt: Annotated[int, Meta(ge=0)]
    sampling: SamplingParams


class InferRequest(Struct, forbid_unknown_fields=True):
    """POST /infer/. version: the weights that the caller counts on; None takes any."""

    prompts: list[list[int]]
    requests: list[Sample]
    version: int | None = None

    @classmethod
    def of(cls, requests: Sequence[Request], version: int | None) -> InferRequest:
        """Requests for one POST; equal prompts travel once."""
        prompts: dict[tuple[int, ...], int] = {}
        samples = [
            Sample(one.request_id, prompts.setdefault(tuple(one.prompt_ids), len(prompts)), one.sampling)
            for one in requests
        ]
        return cls([list(prompt) for prompt in prompts], samples, version)


class CompletionLine(Struct, tag_field="event", tag="completion"):
    """A completion."""

    completion: Completion


class FailedLine(Struct, tag_field="event", tag="failed"):
    """Requests that will not come."""

    ids: list[str]
    error: dict[str, Any]


class AliveLine(Struct, tag_field="event", tag="alive"):
    """What the engines did so far; comes before the completions that they made of it."""

    counters: EngineCounters


class EndLine(Struct, tag_field="event", tag="end"):
    """Every request has come back."""


Line = CompletionLine | FailedLine | AliveLine | EndLine


class BeginUpdate(Struct, forbid_unknown_fields=True):
    """POST /weights/begin. manifest: name, torch dtype and shape of each tensor, in the order of arrival."""

    version: int
    manifest: list[tuple[str, str, list[Annotated[int, Meta(ge=0)]]]]

    @classmethod
    def of(cls, manifest: Sequence[TensorInfo], version: int) -> BeginUpdate:
        """For a manifest."""
        return cls(version, [(info.name, info.dtype, list(info.shape)) for info in manifest])


class VersionsRequest(Struct, forbid_unknown_fields=True):
    """POST /versions. digests: of completions, see `digest_of`."""

    digests: list[str]


class VersionsReply(Struct):
    """In the order of the request; None for a completion that is unknown."""

    versions: list[Spans | None]


def digest_of(prompt_ids: Sequence[int], token_ids: Sequence[int], logprobs: Sequence[float] = ()) -> str:
    """What the version ledger knows a completion by; where the prompt ends does not matter.

    logprobs: tell it from the same tokens of other weights; as float32, which is what engines compute.
    """
    content = encode([*prompt_ids, *token_ids]) + array("f", logprobs).tobytes()
    return hashlib.blake2b(content, digest_size=16).hexdigest()


def architecture(folder: str | Path) -> dict[str, Any]:
    """What config.json says of the model; {} without that file."""
    file = Path(folder) / "config.json"
    if not file.is_file():
        return {}
    config = json.loads(file.read_text(encoding="utf-8"))
    text = config.get("text_config") or {}
    found = {name: text.get(name, config.get(name)) for name in ARCHITECTURE}
    return {name: value for name, value in found.items() if value is not None}


def error_body(error: BaseException, status: int) -> dict[str, Any]:
    """The JSON of a failure: OpenAI's `message`, `type` and `code`, and what is needed to raise it again."""
    if isinstance(error, SwiftError):
        state = {name: value for name, value in vars(error).items() if isinstance(value, str | int | float)}
        kind, problems = type(error).__name__, error.problems
    else:
        state, kind, problems = {}, "", [f"{type(error).__name__}: {first_line(error)}"]
    return {
        "error": {"message": "; ".join(problems), "type": kind, "code": status, "problems": problems, "state": state}
    }


def error_from(error: dict[str, Any], name: str) -> SwiftError | None:
    """The error that a failed reply holds, in the server's name; None when it is no typed error of ours."""
    if not error.get("type") or not error.get("problems"):
        return None
    kind = getattr(swift.errors, str(error["type"]), None)
    if not (isinstance(kind, type) and issubclass(kind, SwiftError)):
        kind = EngineError
    return error_in_name(name, kind, list(map(str, error["problems"])), error.get("state") or {})


def error_in_name(name: str, kind: type[SwiftError], problems: Sequence[str], state: dict[str, Any]) -> SwiftError:
    """An error of this kind that an engine or server has raised, with its name in front. state: further attributes."""
    made = kind.__new__(kind)
    first, *rest = problems
    SwiftError.__init__(made, first if first.startswith(f"{name}: ") else f"{name}: {first}", *rest)
    made.__dict__.update({key: value for key, value in state.items() if key != "problems"})
    return made
