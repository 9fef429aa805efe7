"""Schemas of OpenAI-like requests, and their conversion to sampling parameters. OpenAI and vLLM document the fields.

An unsupported field is refused if its value has an effect: a trainer would take completions of another distribution
for those of the requested one.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, Literal, TypeVar

import msgspec
from msgspec import Struct

from swift.rollout.arguments import LEAST_TEMPERATURE
from swift.rollout.seeds import sample_seed
from swift.rollout.server.access import LIMITS, body_by, check_count, decoded, field_error
from swift.rollout.server.chats import call_schema
from swift.rollout.server.service import Service
from swift.types import Request, SamplingParams, ShownImage

HARMLESS = frozenset({
    "user", "metadata", "store", "request_id", "priority", "service_tier", "cache_salt",
})  # fmt: skip
"""Fields that are ignored, at any value."""

NEUTRAL: dict[str, Sequence[Any]] = {
    "echo": (False,), "spaces_between_special_tokens": (True,),
    "truncation": (False,), "add_generation_prompt": (True,),
    "length_penalty": (1.0,), "best_of": (1,), "suffix": ("",), "use_beam_search": (False,),
    "truncate_prompt_tokens": (-1,), "continue_final_message": (False,),
}  # fmt: skip
"""Values of unsupported fields that have no effect; these are accepted."""

TOP_LOGPROBS = 20
"""Maximum number of alternatives per token, as in OpenAI's API."""

RANGES: dict[str, tuple[float, float]] = {
    "temperature": (0, 1e6),
    "top_p": (1e-6, 1),
    "top_k": (-1, 2**31 - 1),
    "min_p": (0, 1),
    "repetition_penalty": (1e-3, 1e3),
    "frequency_penalty": (-2, 2),
    "presence_penalty": (-2, 2),
    "min_tokens": (0, 2**31 - 1),
    "top_logprobs": (0, TOP_LOGPROBS),
    "prompt_logprobs": (0, 1024),
    "scored_from": (0, 2**31 - 1),
    "max_new_tokens": (1, 2**31 - 1),
    "seed": (0, 2**63 - 1),
}
"""Inclusive bounds of sampling parameters."""

STOPS = {"stop": 256, "stop_token_ids": 1024}
"""Maximum number of entries of list fields."""
CHARACTERS = 1 << 16
"""Maximum total length of the stop texts, and maximum length of a regular expression or schema, in characters."""

NUMBERS = RANGES.keys() - {"max_new_tokens", "top_logprobs", "seed", "prompt_logprobs", "scored_from"}
"""Fields that have the same name in `SamplingParams`."""

Shape = TypeVar("Shape", bound=Struct)


class StreamOptions(Struct, kw_only=True, forbid_unknown_fields=True):
    """include_usage: whether a last event has the numbers of tokens."""

    include_usage: bool = False


class JSONSchema(Struct, kw_only=True):
    """schema: JSON schema of the answer. Other fields are ignored."""

    schema: dict[str, Any]


class ResponseFormat(Struct, kw_only=True):
    """Format of an answer."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JSONSchema | None = None


class NamedFunction(Struct, kw_only=True):
    """The function of a tool."""

    name: str


class NamedTool(Struct, kw_only=True):
    """The tool that the answer must call."""

    type: Literal["function"]
    function: NamedFunction


class Sampling(Struct, kw_only=True):
    """Fields that all routes share; None is the default of the server.

    structured_outputs: as in vLLM; every engine with guided decoding supports {"regex": ...}.
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
    response_format: ResponseFormat | None = None
    max_tokens: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    seed: int | None = None
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    stream: bool = False
    stream_options: StreamOptions | None = None

    @property
    def alternatives(self) -> int:
        """Number of most likely tokens to return beside each sampled token."""
        return 0


class CompletionRequest(Sampling, kw_only=True):
    """POST /v1/completions. prompt: a text, token ids, or a list of either.

    prompt_logprobs: as in vLLM, and then nothing is sampled. scored_from: first token of the prompt that they are given
    for. compact_scores: whether they come as `swift.types.TokenScores`, in a hundredth of the bytes.
    """

    prompt: str | list[str | int | list[int]]
    logprobs: int | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    add_special_tokens: bool = True
    prompt_logprobs: int | None = None
    scored_from: int | None = None
    compact_scores: bool = False

    @property
    def alternatives(self) -> int:
        return self.logprobs or 0


class ChatRequest(Sampling, kw_only=True):
    """POST /v1/chat/completions."""

    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @property
    def alternatives(self) -> int:
        return self.top_logprobs or 0

    @property
    def must_call(self) -> bool:
        """Whether the answer must be the call of a tool."""
        return self.tool_choice not in (None, "none", "auto")


class PlainGenerate(Sampling, kw_only=True):
    """POST /generate, without a slash: the schema of vLLM's plain API server, which Atropos uses."""

    prompt: str | dict[str, Any] | list[str]
    logprobs: int | None = None

    @property
    def alternatives(self) -> int:
        return self.logprobs or 0


class TokenizeRequest(Struct, kw_only=True):
    """POST /tokenize: a prompt or messages."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool = True
    return_token_strs: bool | None = None
    tools: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None


def open_body(shape: type[Shape]) -> Any:
    """Returns the dependency of a route on its JSON body; unsupported fields with an effect are refused."""

    def decode(data: bytearray) -> Shape:
        body = decoded(shape, data)
        _refuse_extras(shape, decoded(dict[str, msgspec.Raw], data))
        return body

    return body_by(decode)


def _refuse_extras(shape: type[Struct], fields: dict[str, msgspec.Raw]) -> None:
    """Raises Refused (422): an unsupported field whose value has an effect."""
    for name in fields.keys() - set(shape.__struct_fields__):
        value, neutral = decoded(object, bytes(fields[name])), NEUTRAL.get(name)
        if value is None or value in ("", [], {}) or (neutral is not None and value in neutral):
            continue
        if name in HARMLESS:
            continue
        raise field_error(f"{name}: {str(value)[:80]}: unsupported; leave it out")


def _top_logprobs(service: Service, body: Sampling) -> int:
    """Number of alternatives per token. Raises Refused (422): out of range, or the engine does not report them."""
    count, name = body.alternatives, "top_logprobs" if isinstance(body, ChatRequest) else "logprobs"
    if not 0 <= count <= TOP_LOGPROBS:
        raise field_error(f"{name}: {count}: out of range; at least 0, at most {TOP_LOGPROBS}")
    if isinstance(body, ChatRequest) and count and not body.logprobs:
        raise field_error(f"{name}: {count}: only with logprobs true; leave it out")
    can = service.engine.capabilities
    if count and "top_logprobs" not in can.sampling_fields:
        raise field_error(f"{name}: {count}: the engine {can.name} reports the sampled token only; use 0")
    return count


def check_sampling(sampling: SamplingParams) -> None:
    """Raises Refused (422): a sampling parameter is out of range."""
    for name, (low, high) in RANGES.items():
        value = getattr(sampling, name)
        if not low <= value <= high:
            raise field_error(f"{name}: {value}: out of range; at least {low:g}, at most {high:g}")
    if len(msgspec.json.encode(sampling.extra)) > CHARACTERS:
        raise field_error(f"structured_outputs: over the limit of {CHARACTERS} characters")
    if 0 < sampling.temperature < LEAST_TEMPERATURE:
        raise field_error(
            f"temperature: {sampling.temperature}: out of range; 0 for the likeliest tokens, or at least "
            f"{LEAST_TEMPERATURE:g}"
        )
    for name, most in STOPS.items():
        if (count := len(getattr(sampling, name))) > most:
            raise field_error(f"{name}: {count}: over the limit of {most}")
    for name, length in (("stop", sum(map(len, sampling.stop))), ("regex", len(sampling.regex or ""))):
        if length > CHARACTERS:
            raise field_error(f"{name}: {length} characters: over the limit of {CHARACTERS}")
    for text in (*sampling.stop, sampling.regex or ""):
        if "\0" in text:
            raise field_error(f"{'regex' if text == sampling.regex else 'stop'}: has a NUL character; leave it out")


def requests_of(
    service: Service,
    prompts: Sequence[Sequence[int]],
    body: Sampling,
    *,
    max_tokens: int,
    images: Sequence[ShownImage] = (),
) -> list[Request]:
    """Build one request per sample, prompt by prompt.

    Args:
        service: provides the template with the end tokens, and the default sampling settings.
        prompts: token ids of the prompts.
        body: the body of the client's request.
        max_tokens: default of the maximum number of new tokens.
        images: those that each prompt names.

    Raises:
        Refused: too many samples, or a sampling parameter out of range.
    """
    if body.stream_options is not None and not body.stream:
        raise field_error("stream_options: only with stream true; leave it out")
    count = 1 if body.n is None else body.n
    check_count("prompts", len(prompts), LIMITS.prompts)
    check_count("n", count, LIMITS.samples_per_prompt)
    sampling = _sampling(service, body, max_tokens)
    check_sampling(sampling)
    seed = secrets.randbits(62) if body.seed is None else body.seed
    group = secrets.token_hex(6)
    return [
        Request(
            f"{group}.{number}/{index}",
            prompt,
            replace(sampling, seed=_seed(seed, number * count + index)),
            images=images,
        )
        for number, prompt in enumerate(prompts)
        for index in range(count)
    ]


def _sampling(service: Service, body: Sampling, max_tokens: int) -> SamplingParams:
    given = {name: getattr(body, name) for name in NUMBERS if getattr(body, name) is not None}
    given |= {**_guidance(service, body), "top_logprobs": _top_logprobs(service, body)}
    if isinstance(body, CompletionRequest) and body.prompt_logprobs:
        given |= {"prompt_logprobs": body.prompt_logprobs, "scored_from": body.scored_from or 0}
    stops = [body.stop] if isinstance(body.stop, str) else body.stop
    defaults = dict(service.settings.defaults)
    limit = defaults.pop("max_new_tokens", max_tokens)
    default_stop = tuple(defaults.pop("stop", ()))
    ends = (*(() if body.ignore_eos else service.template.stop_token_ids), *defaults.pop("stop_token_ids", ()))
    return SamplingParams(
        **{
            "max_new_tokens": limit if body.max_tokens is None else body.max_tokens,
            "stop": default_stop if stops is None else tuple(stop for stop in stops if stop),
            "stop_token_ids": tuple(sorted({*ends, *(body.stop_token_ids or ())})),
            **defaults,
            **given,
            "seed": 0 if body.seed is None else body.seed,
        }
    )


def _seed(first: int, index: int) -> int:
    return first if index == 0 else sample_seed(first, "request", 0, index)


def _guidance(service: Service, body: Sampling) -> dict[str, Any]:
    outputs = {name: value for name, value in (body.structured_outputs or {}).items() if value is not None}
    outputs |= _json_guidance(service, body, bool(outputs))
    if "regex" not in outputs:
        return {"extra": {"structured_outputs": outputs}} if outputs else {}
    if not isinstance(outputs["regex"], str):
        raise field_error("structured_outputs: regex: is not a text")
    return {"regex": outputs["regex"]}


def _json_guidance(service: Service, body: Sampling, is_guided: bool) -> dict[str, Any]:
    """Guided decoding to JSON. Raises Refused (422): the engine has none, or two fields ask for different forms."""
    forms = list(_json_forms(body))
    if not forms:
        return {}
    name, schema = forms[-1]
    if is_guided or len(forms) > 1:
        other = "structured_outputs" if is_guided else "response_format"
        raise field_error(f"{name}: {other} asks for another form; give one of them")
    can = service.engine.capabilities
    if not (can.guided and "structured_outputs" in can.sampling_fields):
        raise field_error(f"{name}: the engine {can.name} has no guided decoding of JSON here; leave it out")
    return {"json": schema}


def _json_forms(body: Sampling) -> Iterator[tuple[str, dict[str, Any]]]:
    """Pairs of a field and the JSON schema that it requires of the answer."""
    form = body.response_format
    if form is not None and form.type == "json_object":
        yield "response_format: json_object", {"type": "object"}
    elif form is not None and form.type == "json_schema":
        if form.json_schema is None:
            raise field_error("response_format: json_schema: missing: give the schema")
        yield "response_format: json_schema", form.json_schema.schema
    if isinstance(body, ChatRequest) and body.must_call:
        name = body.tool_choice.function.name if isinstance(body.tool_choice, NamedTool) else None
        yield f"tool_choice: {(name or 'required')[:80]}", call_schema(body.tools or (), name)


def token_ids(given: object) -> list[int]:
    """Returns the token ids of a prompt. Raises Refused: it is not a list of integers."""
    if not isinstance(given, list) or not all(type(token) is int and token >= 0 for token in given):
        raise field_error("prompt: neither a text nor a list of token ids")
    return given
