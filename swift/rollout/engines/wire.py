"""Wire format between a `swift rollout` server and its client: requests, lines of a streamed reply, errors.

    POST /infer/    `InferRequest`; equal prompts are sent once
    reply           one JSON object per line: completion | failed | alive; the last one is end

A stream without "end" is incomplete. The server sends "alive" at least every `ALIVE_S` seconds, so a longer silence is
an error. Weights and adapters are sent as safetensors.
"""

from __future__ import annotations

import hashlib
import json
import math
from array import array
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

import swift.errors
from swift.data.images import encoded
from swift.errors import EngineError, SwiftError, first_line, shortened
from swift.rollout.engines.base import Ack, Capabilities, EngineCounters
from swift.rollout.weights.base import TensorInfo
from swift.types import Completion, Request, SamplingParams

PROTOCOL = 7
"""Version of the wire format; server and client must have the same one."""
RUN_HEADER = "X-Swift-Run"
"""Header with the id of the run that sends the request."""
ALIVE_S = 2.0
"""Maximum interval between two lines of a stream, in seconds."""
SAFETENSORS = "application/x-safetensors"
LINE_CHARACTERS = 2000
"""Maximum length of an error message of a server."""
PROBE_BYTES = 256
"""Maximum size of the file that shows whether a disk is shared."""

ARCHITECTURE = (
    "model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "tie_word_embeddings",
)  # fmt: skip
"""Entries of config.json that identify a model, whose folder may have another name on another machine."""

encode = msgspec.json.encode

Spans = list[tuple[int, int, int]]
"""Versions of the tokens of a completion, as in `Completion.versions`."""
ReturnedCompletion = tuple[Sequence[int], Sequence[int], Sequence[float]]
"""A completion from an environment: prompt ids, token ids, and the log-probs of these or ()."""
Versions = Callable[[Sequence[ReturnedCompletion]], Sequence[Spans | None]]
"""Returns the policy versions of completions; None if they are unknown."""


class Sample(Struct, forbid_unknown_fields=True):
    """One sample. prompt: index into the prompts of the request. limit_s: see `Request`; None is the server's limit."""

    id: Annotated[str, Meta(min_length=1, max_length=1024)]
    prompt: Annotated[int, Meta(ge=0)]
    sampling: SamplingParams
    limit_s: Annotated[float, Meta(gt=0)] | None = None


class SentImage(Struct, forbid_unknown_fields=True):
    """An image of prompts; see `swift.types.ShownImage`. content: its encoded bytes."""

    content: bytes
    mark: int
    token_ids: list[int]


class InferRequest(Struct, forbid_unknown_fields=True):
    """POST /infer/. version: expected policy version of the weights; None accepts any.

    images: those of all prompts. shown: by the index of a prompt, which of them its ids name, in their order.
    """

    prompts: list[list[int]]
    requests: list[Sample]
    version: int | None = None
    images: list[SentImage] = []
    shown: dict[int, list[int]] = {}

    @classmethod
    def of(cls, requests: Sequence[Request], version: int | None) -> InferRequest:
        """The body of one POST; equal prompts are sent once."""
        prompts: dict[tuple[int, ...], int] = {}
        images: dict[str, int] = {}
        sent: list[SentImage] = []
        shown: dict[int, list[int]] = {}
        samples = [
            Sample(
                request.request_id,
                prompts.setdefault(tuple(request.prompt_ids), len(prompts)),
                request.sampling,
                request.limit_s if math.isfinite(request.limit_s) else None,
            )
            for request in requests
        ]
        for request in requests:
            for one in request.images:
                if one.image.digest not in images:
                    images[one.image.digest] = len(sent)
                    sent.append(SentImage(encoded(one.image), one.mark, list(one.token_ids)))
            if request.images:
                prompt = prompts[tuple(request.prompt_ids)]
                shown[prompt] = [images[one.image.digest] for one in request.images]
        return cls([list(prompt) for prompt in prompts], samples, version, sent, shown)


class Load(Struct):
    """Part of GET /info. running_of: number of running requests by owner."""

    running_of: dict[str, int]


class Info(Struct):
    """The fields of GET /info that a client reads. receivers: number of processes that take part in a broadcast.

    max_pixels: of images; see `swift.models.vision.Vision`.
    """

    protocol: int
    boot_id: Annotated[str, Meta(min_length=1, max_length=128)]
    model: str
    architecture: dict[str, Any]
    dtype: str
    max_model_len: Annotated[int, Meta(ge=1)]
    run_id: str | None
    version: int
    capabilities: Capabilities
    weights_folder: str | None
    weights_probe: str | None
    counters: EngineCounters
    receivers: Annotated[int, Meta(ge=1)] = 1
    max_pixels: int | None = None


class State(Struct):
    """The fields of GET /health that a client reads. void: the weights are invalid."""

    alive: bool = False
    void: bool = False
    detail: str = ""


class BeginReply(Struct):
    """Reply to POST /weights/begin."""

    update: int


class AckReply(Struct):
    """Reply of the routes that receive weights."""

    ack: Ack
    asleep: str


class RestartReply(Struct):
    """Reply to POST /restart. boot_id: of the process that will end."""

    boot_id: str


class ErrorContent(Struct):
    """An error in a reply; see `error_body`."""

    type: str = ""
    message: str = ""
    kind: str = ""
    problems: list[str] = []
    state: dict[str, str | int | float] = {}
    expires_in_s: float = 0.0


class ErrorReply(Struct):
    """A reply with another status than 200."""

    error: ErrorContent


class CompletionLine(Struct, tag_field="event", tag="completion"):
    """A completion."""

    completion: Completion


class FailedLine(Struct, tag_field="event", tag="failed"):
    """Requests that have failed."""

    ids: list[str]
    error: ErrorContent


class AliveLine(Struct, tag_field="event", tag="alive"):
    """Counters of the engines; sent before the completions that they include."""

    counters: EngineCounters


class EndLine(Struct, tag_field="event", tag="end"):
    """All requests have ended."""


Line = CompletionLine | FailedLine | AliveLine | EndLine


class BeginUpdate(Struct, forbid_unknown_fields=True):
    """POST /weights/begin. manifest: name, torch dtype and shape of each tensor, in the order of arrival."""

    version: int
    manifest: list[tuple[str, str, list[Annotated[int, Meta(ge=0)]]]]

    @classmethod
    def of(cls, manifest: Sequence[TensorInfo], version: int) -> BeginUpdate:
        """The body for a manifest."""
        return cls(version, [(info.name, info.dtype, list(info.shape)) for info in manifest])


class VersionsRequest(Struct, forbid_unknown_fields=True):
    """POST /versions. digests: of completions, see `digest_of`."""

    digests: list[str]


class VersionsReply(Struct):
    """Versions in the order of the request; None for an unknown completion."""

    versions: list[Spans | None]


def digest_of(prompt_ids: Sequence[int], token_ids: Sequence[int], logprobs: Sequence[float] = ()) -> str:
    """Key of a completion in `SampledVersions`; independent of where the prompt ends.

    logprobs: distinguish equal tokens of different weights; as float32, the dtype of engines.
    """
    content = encode([*prompt_ids, *token_ids]) + array("f", logprobs).tobytes()
    return hashlib.blake2b(content, digest_size=16).hexdigest()


def probe_name(boot_id: str) -> str:
    """Name of the file in a weights folder that shows a client whether it shares a disk with the server."""
    return f".swift-rollout-{boot_id}"


def line_bytes(max_model_len: int) -> int:
    """Maximum length of a line of a reply: that of a completion, or of the ids of a whole batch."""
    return (4 << 20) + 256 * max_model_len


def mismatch(completion: Completion, request: Request, vocab_size: int | None) -> str:
    """Returns why a completion cannot belong to a request; "" if it can."""
    ids, most = completion.token_ids, request.sampling.max_new_tokens
    if len(ids) > most:
        return f"{len(ids)} tokens came, and the request allows {most}"
    size = vocab_size or 1 << 31
    if invalid := next((token for token in ids if not 0 <= token < size), None):
        return f"token id {invalid}: outside of 0..{size - 1}"
    if completion.log_mass and len(completion.log_mass) != len(ids):
        return f"{len(completion.log_mass)} log-masses for {len(ids)} tokens"
    ends = [0, *(end for _, _, end in completion.versions)]
    if ids and [*(start for _, start, _ in completion.versions), len(ids)] != ends:
        return f"versions {completion.versions[:4]} for {len(ids)} tokens"
    return ""


def architecture(folder: str | Path) -> dict[str, Any]:
    """Entries of config.json that identify the model; {} without that file."""
    file = Path(folder) / "config.json"
    if not file.is_file():
        return {}
    config = json.loads(file.read_text(encoding="utf-8"))
    text = config.get("thinker_config", config).get("text_config") or {}
    found = {name: text.get(name, config.get(name)) for name in ARCHITECTURE}
    return {name: value for name, value in found.items() if value is not None}


def error_body(error: BaseException, status: int) -> dict[str, Any]:
    """The JSON of an error: `message`, `type` and `code` as in OpenAI's API, and the fields that `error_from` reads."""
    if isinstance(error, SwiftError):
        state = {name: value for name, value in vars(error).items() if isinstance(value, str | int | float)}
        kind, problems = type(error).__name__, error.problems
    else:
        state, kind, problems = {}, "", [f"{type(error).__name__}: {first_line(error)}"]
    return {
        "error": {"message": "; ".join(problems), "type": kind, "code": status, "problems": problems, "state": state}
    }


def error_from(error: ErrorContent, name: str) -> SwiftError | None:
    """Restore the error of a reply, prefixed with the name of the server; None if it is not an error of swift."""
    if not error.type or not error.problems:
        return None
    kind = getattr(swift.errors, error.type, None)
    if not (isinstance(kind, type) and issubclass(kind, SwiftError)):
        kind = EngineError
    return error_in_name(name, kind, [shortened(problem, LINE_CHARACTERS) for problem in error.problems], error.state)


def error_in_name(name: str, kind: type[SwiftError], problems: Sequence[str], state: Mapping[str, Any]) -> SwiftError:
    """An error of this kind from an engine or server, prefixed with its name. state: further attributes."""
    error = kind.__new__(kind)
    first, *rest = problems
    SwiftError.__init__(error, first if first.startswith(f"{name}: ") else f"{name}: {first}", *rest)
    error.__dict__.update({key: value for key, value in state.items() if key not in ("problems", "exit_code")})
    return error
