"""Shapes of requests. What a field means is OpenAI's, vLLM's or TRL's documentation; what we add is said here.

A field that this server does not have is refused when it asks for something (`refuse_extras`): a sampling distribution
other than the one asked for would be trained on as if it were right.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from swift.rollout.server.limits import Refused
from swift.types import SamplingParams

HARMLESS = frozenset({
    "user", "metadata", "store", "request_id", "priority", "stream_options", "tool_choice", "output_kind", "detokenize",
    "echo", "service_tier", "truncation", "images", "parallel_tool_calls", "spaces_between_special_tokens", "kind",
    "length_penalty", "add_generation_prompt", "cache_salt", "n_best",
})  # fmt: skip
"""Fields that change nothing here; some only at the values that `NEUTRAL` names."""

NEUTRAL: dict[str, Sequence[Any]] = {
    "echo": (False,), "tool_choice": ("none", "auto"), "images": ([],), "truncation": (False,),
    "add_generation_prompt": (True,), "length_penalty": (1.0,), "output_kind": (2,),
    "best_of": (1,), "suffix": ("",),
    "use_beam_search": (False,), "response_format": ({"type": "text"},), "truncate_prompt_tokens": (-1,),
    "continue_final_message": (False,),
}  # fmt: skip
"""Values of fields that this server does not have at which they ask for nothing."""

Shape = TypeVar("Shape", bound=BaseModel)

SEEDS = 2**63
TOP_LOGPROBS = 1
"""Alternatives per token that can be asked for: the sampled one, which is all that engines report."""


class Open(BaseModel):
    """A request whose other fields are kept and looked at."""

    model_config = ConfigDict(extra="allow", protected_namespaces=())


class Sampling(Open):
    """What the families of routes have in common; None is the server's default.

    guided_regex, structured_outputs_regex: a regular expression, as older vLLM and TRL spell it.
    structured_outputs: vLLM's own, of which every engine that guides takes {"regex": ...}.
    """

    model: str | None = None
    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    min_tokens: int | None = None
    structured_outputs: dict[str, Any] | None = None
    structured_outputs_regex: str | None = None
    guided_regex: str | None = None
    max_tokens: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    seed: int | None = None
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False


class CompletionRequest(Sampling):
    """POST /v1/completions."""

    prompt: str | list[int] | list[str] | list[list[int]]
    logprobs: int | None = None
    stream: bool = False
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    add_special_tokens: bool = True


class ChatRequest(Sampling):
    """POST /v1/chat/completions."""

    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    stream: bool = False
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    tools: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class TokensRequest(Open):
    """POST /inference/v1/generate."""

    token_ids: list[int]
    sampling_params: Sampling
    request_id: str | None = None
    model: str | None = None
    stream: bool = False
    features: Any = None


class TokenizeRequest(Open):
    """POST /tokenize: a prompt or messages."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool = True
    return_token_strs: bool | None = None
    tools: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class DetokenizeRequest(Open):
    """POST /detokenize."""

    model: str | None = None
    tokens: list[int]


class LegacyGenerate(Sampling):
    """POST /generate/ of `trl vllm-serve`. truncate_prompt_tokens: keeps that many of a prompt's last tokens."""

    prompts: list[str] | list[list[int]]
    truncate_prompt_tokens: int | None = None
    logprobs: int | None = 0
    generation_kwargs: dict[str, Any] | None = None


class LegacyChat(Sampling):
    """POST /chat/ of `trl vllm-serve`. truncate_prompt_tokens: as in `LegacyGenerate`."""

    messages: list[list[dict[str, Any]]]
    truncate_prompt_tokens: int | None = None
    logprobs: int | None = 0
    generation_kwargs: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class PlainGenerate(Sampling):
    """POST /generate, without a slash: vLLM's plain API server, which Atropos talks to."""

    prompt: str | dict[str, Any] | list[str]
    logprobs: int | None = None
    stream: bool = False


class InferEntry(BaseModel):
    """One sample. prompt: index into the prompts of the request."""

    model_config = ConfigDict(extra="forbid")

    id: str = Field(min_length=1, max_length=1024)
    prompt: int = Field(ge=0)
    sampling: SamplingParams


class InferRequest(BaseModel):
    """POST /infer/. version: the weights that the caller counts on; None takes any."""

    model_config = ConfigDict(extra="forbid")

    version: int | None = None
    prompts: list[list[int]]
    requests: list[InferEntry]


class BeginRequest(BaseModel):
    """POST /weights/begin. manifest: [name, torch type, shape] per tensor, in the order in which they will come."""

    model_config = ConfigDict(extra="forbid")

    version: int
    manifest: list[tuple[str, str, list[int]]]


class FileBucket(BaseModel):
    """POST /weights/bucket with a JSON body: a file on the shared disk, or a broadcast that follows."""

    model_config = ConfigDict(extra="forbid")

    update: int
    bucket: int
    path: str | None = None
    digest: str | None = None
    broadcast: dict[str, Any] | None = None


class UpdateRef(BaseModel):
    """Which update is meant."""

    update: int | None = None


class ConnectRequest(BaseModel):
    """POST /weights/connect: where the trainer's broadcast group meets."""

    invitation: dict[str, Any]


class ResetRequest(BaseModel):
    """POST /reset. name: of the run's process, for people. rebuild: base weights even if this run is known already."""

    run_id: str = Field(min_length=1, max_length=256)
    name: str = Field(default="", max_length=256)
    rebuild: bool = False


class ReleaseRequest(BaseModel):
    """POST /release."""

    run_id: str


class AbortRequest(BaseModel):
    """POST /abort_requests; without ids, everything of the caller's run, or everything."""

    request_ids: list[str] | None = None


class LoadAdapterRequest(Open):
    """POST /v1/load_lora_adapter with a JSON body: a folder below the weights folder."""

    lora_name: str = Field(min_length=1, max_length=256)
    lora_path: str


class UnloadAdapterRequest(Open):
    """POST /v1/unload_lora_adapter."""

    lora_name: str


class InitTransfer(BaseModel):
    """POST /init_weight_transfer_engine."""

    init_info: dict[str, Any]


class UpdateInfo(Open):
    """What vLLM's trainers announce before they broadcast. packed, ...: how; vLLM before 0.28 says it here."""

    names: list[str]
    dtype_names: list[str]
    shapes: list[list[int]]
    packed: bool | None = None
    packed_buffer_size_bytes: int | None = Field(default=None, ge=1)
    packed_num_buffers: int | None = Field(default=None, ge=1)


class UpdateWeights(BaseModel):
    """POST /update_weights."""

    update_info: UpdateInfo


class FinishUpdate(BaseModel):
    """POST /finish_weight_update. weight_version: a number is the version; another label is what /weight_info says."""

    weight_version: str | int | None = None


class LegacyCommunicator(Open):
    """POST /init_communicator/. world_size: with the trainer, which is the last rank there."""

    host: str
    port: int
    world_size: int
    backend: str | None = None


class LegacyParameter(Open):
    """POST /update_named_param/."""

    name: str
    dtype: str
    shape: list[int]


def parsed(shape: type[Shape], data: bytes) -> Shape:
    """A JSON body.

    Raises:
        Refused: it does not have this shape.
    """
    try:
        return shape.model_validate_json(data)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "body"
        raise Refused(422, "field", f"{where}: {first['msg']}") from error


def refuse_extras(request: Open, *more: str) -> None:
    """Refuse a request that asks for something this server does not have.

    Args:
        request: as it came.
        more: further fields that change nothing on this route.

    Raises:
        Refused: 422, naming the field and its value.
    """
    for name, value in (request.model_extra or {}).items():
        neutral = NEUTRAL.get(name)
        if value is None or value in ("", [], {}) or (neutral is not None and value in neutral):
            continue
        if neutral is None and (name in HARMLESS or name in more):
            continue
        raise Refused(422, "field", f"{name}: {str(value)[:80]}: this server does not have it; leave it out")


def check_logprobs(value: int | None, name: str = "logprobs") -> None:
    """Raises Refused for more alternatives per token than engines report."""
    if value is not None and not 0 <= value <= TOP_LOGPROBS:
        raise Refused(
            422,
            "field",
            f"{name}: {value}: engines report the log-prob of the sampled token only; use 0 or {TOP_LOGPROBS}",
        )


RANGES: dict[str, tuple[Literal["above", "from"], float, float]] = {
    "temperature": ("from", 0, 1e6),
    "top_p": ("above", 0, 1),
    "top_k": ("from", -1, 2**31 - 1),
    "min_p": ("from", 0, 1),
    "repetition_penalty": ("above", 0, 1e6),
    "frequency_penalty": ("from", -2, 2),
    "presence_penalty": ("from", -2, 2),
    "min_tokens": ("from", 0, 2**31 - 1),
    "max_new_tokens": ("from", 1, 2**31 - 1),
    "seed": ("from", 0, SEEDS - 1),
}
"""Bounds of numbers: above is exclusive, the upper one is inclusive."""


def check_sampling(sampling: SamplingParams) -> None:
    """Refuse numbers that no distribution has.

    Raises:
        Refused: 422, naming the field and its value.
    """
    for name, (kind, low, high) in RANGES.items():
        value = getattr(sampling, name)
        if not ((value > low if kind == "above" else value >= low) and value <= high):
            word = "above" if kind == "above" else "at least"
            raise Refused(422, "field", f"{name}: {value}: out of range; {word} {low:g}, at most {high:g}")
