"""Shapes of OpenAI-like requests, and what they mean for a sampler. OpenAI and vLLM document the fields.

A field that this server does not have is refused when it asks for something: a sampling distribution other than the one
asked for would be trained on as if it were right.
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
from swift.types import Request, SamplingParams

HARMLESS = frozenset({
    "user", "metadata", "store", "request_id", "priority", "service_tier", "cache_salt",
})  # fmt: skip
"""Fields that change nothing here, at any value."""

NEUTRAL: dict[str, Sequence[Any]] = {
    "echo": (False,), "spaces_between_special_tokens": (True,),
    "truncation": (False,), "add_generation_prompt": (True,),
    "length_penalty": (1.0,), "best_of": (1,), "suffix": ("",), "use_beam_search": (False,),
    "truncate_prompt_tokens": (-1,), "continue_final_message": (False,),
}  # fmt: skip
"""Values of fields that this server does not have at which they ask for nothing."""

TOP_LOGPROBS = 20
"""Most alternatives per token that can be asked for, as in OpenAI's API."""

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
    "max_new_tokens": (1, 2**31 - 1),
    "seed": (0, 2**63 - 1),
}
"""Bounds of numbers, inclusive."""

STOPS = {"stop": 256, "stop_token_ids": 1024}
"""Most entries of a request."""
CHARACTERS = 1 << 16
"""Longest stop texts together, and longest expression."""

NUMBERS = RANGES.keys() - {"max_new_tokens", "top_logprobs", "seed"}
"""Fields of `SamplingParams` that clients give under the same name."""

Shape = TypeVar("Shape", bound=Struct)


class StreamOptions(Struct, kw_only=True, forbid_unknown_fields=True):
    """include_usage: whether a last event tells the numbers of tokens."""

    include_usage: bool = False


class JSONSchema(Struct, kw_only=True):
    """schema: what an answer must fit. The rest is for people."""

    schema: dict[str, Any]


class ResponseFormat(Struct, kw_only=True):
    """Form of the text of an answer."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JSONSchema | None = None


class NamedFunction(Struct, kw_only=True):
    """Of a tool."""

    name: str


class NamedTool(Struct, kw_only=True):
    """The tool that is to be called."""

    type: Literal["function"]
    function: NamedFunction


class Sampling(Struct, kw_only=True):
    """What the routes have in common; None is the server's default.

    structured_outputs: of vLLM; every engine that guides takes {"regex": ...}.
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
        """How many of the likeliest tokens it wants to know beside each sampled one."""
        return 0


class CompletionRequest(Sampling, kw_only=True):
    """POST /v1/completions. prompt: a text, token ids, or a list of either."""

    prompt: str | list[str | int | list[int]]
    logprobs: int | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    add_special_tokens: bool = True

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
        """Whether the answer is to be the call of a tool."""
        return self.tool_choice not in (None, "none", "auto")


class PlainGenerate(Sampling, kw_only=True):
    """POST /generate, without a slash: the shape of vLLM's plain API server, which Atropos uses."""

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
    """What annotates the parameter of a route that is its JSON body, whose further fields are looked at."""

    def decode(data: bytearray) -> Shape:
        wanted = decoded(shape, data)
        _refuse_extras(shape, decoded(dict[str, msgspec.Raw], data))
        return wanted

    return body_by(decode)


def _refuse_extras(shape: type[Struct], fields: dict[str, msgspec.Raw]) -> None:
    """Refuse a request that asks for something this server does not have, naming the field and its value (422)."""
    for name in fields.keys() - set(shape.__struct_fields__):
        value, neutral = decoded(object, bytes(fields[name])), NEUTRAL.get(name)
        if value is None or value in ("", [], {}) or (neutral is not None and value in neutral):
            continue
        if name in HARMLESS:
            continue
        raise field_error(f"{name}: {str(value)[:80]}: this server does not have it; leave it out")


def _top_logprobs(service: Service, wanted: Sampling) -> int:
    """Alternatives per token. Raises Refused for more than there can be, or than the engine reports (422)."""
    asked, name = wanted.alternatives, "top_logprobs" if isinstance(wanted, ChatRequest) else "logprobs"
    if not 0 <= asked <= TOP_LOGPROBS:
        raise field_error(f"{name}: {asked}: out of range; at least 0, at most {TOP_LOGPROBS}")
    if isinstance(wanted, ChatRequest) and asked and not wanted.logprobs:
        raise field_error(f"{name}: {asked}: only with logprobs true; leave it out")
    can = service.engine.capabilities
    if asked and "top_logprobs" not in can.sampling_fields:
        raise field_error(f"{name}: {asked}: the engine {can.name} reports that of the sampled token only; use 0")
    return asked


def check_sampling(sampling: SamplingParams) -> None:
    """Refuse numbers that no distribution has, naming the field and its value (422)."""
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
    service: Service, prompts: Sequence[Sequence[int]], wanted: Sampling, *, max_tokens: int
) -> list[Request]:
    """One request per sample, prompt by prompt.

    Args:
        service: its template has the end tokens, its settings the defaults.
        prompts: token ids.
        wanted: what the client asked for.
        max_tokens: new tokens when it did not say.

    Raises:
        Refused: too many, or numbers out of range.
    """
    if wanted.stream_options is not None and not wanted.stream:
        raise field_error("stream_options: only with stream true; leave it out")
    count = 1 if wanted.n is None else wanted.n
    check_count("prompts", len(prompts), LIMITS.prompts)
    check_count("n", count, LIMITS.samples_per_prompt)
    sampling = _sampling(service, wanted, max_tokens)
    check_sampling(sampling)
    seed = secrets.randbits(62) if wanted.seed is None else wanted.seed
    group = secrets.token_hex(6)
    return [
        Request(f"{group}.{place}/{index}", prompt, replace(sampling, seed=_seed(seed, place * count + index)))
        for place, prompt in enumerate(prompts)
        for index in range(count)
    ]


def _sampling(service: Service, wanted: Sampling, max_tokens: int) -> SamplingParams:
    given = {name: getattr(wanted, name) for name in NUMBERS if getattr(wanted, name) is not None}
    given |= {**_guidance(service, wanted), "top_logprobs": _top_logprobs(service, wanted)}
    stops = [wanted.stop] if isinstance(wanted.stop, str) else wanted.stop
    defaults = dict(service.settings.defaults)
    limit = defaults.pop("max_new_tokens", max_tokens)
    default_stop = tuple(defaults.pop("stop", ()))
    ends = (*(() if wanted.ignore_eos else service.template.stop_token_ids), *defaults.pop("stop_token_ids", ()))
    return SamplingParams(
        **{
            "max_new_tokens": limit if wanted.max_tokens is None else wanted.max_tokens,
            "stop": default_stop if stops is None else tuple(stop for stop in stops if stop),
            "stop_token_ids": tuple(sorted({*ends, *(wanted.stop_token_ids or ())})),
            **defaults,
            **given,
            "seed": 0 if wanted.seed is None else wanted.seed,
        }
    )


def _seed(first: int, index: int) -> int:
    return first if index == 0 else sample_seed(first, "request", 0, index)


def _guidance(service: Service, wanted: Sampling) -> dict[str, Any]:
    own = {name: value for name, value in (wanted.structured_outputs or {}).items() if value is not None}
    own |= _json_guidance(service, wanted, bool(own))
    if "regex" not in own:
        return {"extra": {"structured_outputs": own}} if own else {}
    if not isinstance(own["regex"], str):
        raise field_error("structured_outputs: regex: is no text")
    return {"regex": own["regex"]}


def _json_guidance(service: Service, wanted: Sampling, is_guided: bool) -> dict[str, Any]:
    """What holds an answer to JSON. Raises Refused: the engine cannot, or it is held to something else (422)."""
    forms = list(_json_forms(wanted))
    if not forms:
        return {}
    name, schema = forms[-1]
    if is_guided or len(forms) > 1:
        other = "structured_outputs" if is_guided else "response_format"
        raise field_error(f"{name}: {other} asks for another form; give one of them")
    can = service.engine.capabilities
    if not (can.guided and "structured_outputs" in can.sampling_fields):
        raise field_error(f"{name}: the engine {can.name} cannot hold answers to JSON here; leave it out")
    return {"json": schema}


def _json_forms(wanted: Sampling) -> Iterator[tuple[str, dict[str, Any]]]:
    """Schemas that an answer is to fit, after the field that asks for each."""
    form = wanted.response_format
    if form is not None and form.type == "json_object":
        yield "response_format: json_object", {"type": "object"}
    elif form is not None and form.type == "json_schema":
        if form.json_schema is None:
            raise field_error("response_format: json_schema: missing: give the schema")
        yield "response_format: json_schema", form.json_schema.schema
    if isinstance(wanted, ChatRequest) and wanted.must_call:
        name = wanted.tool_choice.function.name if isinstance(wanted.tool_choice, NamedTool) else None
        yield f"tool_choice: {(name or 'required')[:80]}", call_schema(wanted.tools or (), name)


def token_ids(given: object) -> list[int]:
    """Ids of a prompt as they came. Raises Refused for anything else."""
    if not isinstance(given, list) or not all(type(one) is int for one in given):
        raise field_error("prompt: neither a text nor a list of token ids")
    return given
