"""`--rollout_tools`: Python functions that the policy may call.

    answer -> its tool calls -> the functions, all at once -> one message each -> the next answer ...

The chat template renders JSON schemas of the functions, from their signatures and docstrings, and describes the format
of a call. A trajectory ends with an answer without calls. An error of a call, from its text to an exception of the
function, is its result: "error: ...".
"""

from __future__ import annotations

import asyncio
import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from swift.errors import ConfigError, RefusedChat, first_line, suggest
from swift.models.template import Message, Template
from swift.rollout.sources.multi_turn.chat import HistoryRewritten, continuation
from swift.rollout.sources.multi_turn.environments import require_registered
from swift.rollout.sources.multi_turn.trajectory import Trajectory

FLAG = "--rollout_tools"
CALLS, FAILED = "tools/calls", "tools/failed"
_QUESTION = "\ue001"
"""Placeholder of a question in a rendering."""
Schema = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Toolbox:
    """The functions of a run; see `open_toolbox`.

    schemas: JSON schemas by name. format: response template that parses calls. limit_s: time limit of a call.
    """

    template: Template
    functions: Mapping[str, Callable[..., Any]]
    schemas: Mapping[str, Schema]
    format: Mapping[str, Any]
    limit_s: float

    def encode(self, messages: Sequence[Message], tools: Sequence[Schema] | None = None) -> list[int]:
        """Token ids of a prompt. tools: those of its row; None means all."""
        return self.template.encode_prompt(messages, self.schemas_of(tools))

    def schemas_of(self, tools: Sequence[Schema] | None) -> list[Schema]:
        """The schemas of a prompt: those of its row, or all.

        Raises ConfigError: the row has a tool that the run does not have.
        """
        for schema in tools or ():
            name = _function(schema).get("name")
            if name not in self.functions:
                raise ConfigError(f"tools: {name}: not among {FLAG}; {suggest(str(name), sorted(self.functions))}")
        return list(tools or self.schemas.values())

    async def play(self, trajectory: Trajectory) -> None:
        """Alternate answers and results, until an answer has no calls, is truncated, or is the last one allowed."""
        prompt = trajectory.request.prompt
        schemas = trajectory.tools = self.schemas_of(prompt.columns.get("tools") if prompt is not None else None)
        metrics = trajectory.metrics
        metrics |= {CALLS: 0, FAILED: 0}
        names = {_function(schema)["name"] for schema in schemas}
        while True:
            await trajectory.answer()
            if trajectory.finish_reason == "length":
                return
            calls = self._parse(self.template.decode(trajectory.last_ids, skip_special_tokens=False), schemas)
            if not calls or trajectory.out_of_turns():
                return
            max_length = trajectory.limits.max_model_len
            results = await asyncio.gather(*(self._result(call, names, max_length) for call in calls))
            metrics[CALLS] += len(results)
            metrics[FAILED] += sum(failed for _, failed in results)
            trajectory.add_messages(*(message for message, _ in results))

    def _parse(self, text: str, schemas: Sequence[Schema]) -> Sequence[Mapping[str, Any] | ValueError]:
        """The calls in an answer, or an error if they cannot be parsed."""
        try:
            return read_calls(text, self.format, schemas)
        except ValueError as error:
            return [error]

    async def _result(
        self, call: Mapping[str, Any] | ValueError, names: set[str], max_length: int
    ) -> tuple[Message, bool]:
        """The message with the result of a call, of at most `max_length` characters, and whether it failed."""
        if isinstance(call, ValueError):
            return {"role": "tool", "content": f"error: the tool call cannot be read: {first_line(call)}"}, True
        name = call.get("name")
        try:
            if name not in names:
                raise LookupError(f"there is no tool {name}; {suggest(str(name), sorted(names))}")
            text, failed = _text(await self._call(self.functions[str(name)], call.get("arguments"))), False
        except asyncio.CancelledError:
            raise
        except TimeoutError:
            text, failed = f"error: it took over {self.limit_s:g} s", True
        except BaseException as error:  # any error of the function is the result of the call
            text, failed = f"error: {type(error).__name__}: {first_line(error)}", True
        if len(text) > max_length:
            text = f"{text[:max_length]}\n[cut: {max_length} of {len(text)} characters]"
        return {"role": "tool", "name": str(name), "content": text.encode("utf-8", "replace").decode()}, failed

    async def _call(self, function: Callable[..., Any], arguments: Any) -> Any:
        """Call a function, on a thread unless it is async; returns its result.

        A thread of the trainer's process cannot be stopped: a function that holds the GIL blocks the trainer and the
        timeout, and an endless one continues after its timeout.
        """
        if not isinstance(arguments, Mapping):
            raise TypeError(f"arguments are {type(arguments).__name__}, not an object")
        inspect.signature(function).bind(**arguments)
        is_async = inspect.iscoroutinefunction(function)
        async with asyncio.timeout(self.limit_s):
            return await (function(**arguments) if is_async else asyncio.to_thread(function, **arguments))


def _text(result: Any) -> str:
    """A result as text: bytes as UTF-8, other types than strings as JSON."""
    if isinstance(result, bytes | bytearray):
        return result.decode("utf-8", "replace")
    return str(result) if isinstance(result, str) else json.dumps(result, ensure_ascii=False, default=str)


def open_toolbox(names: Sequence[str], parser: str | None, template: Template, limit_s: float) -> Toolbox:
    """The tools of `--rollout_tools`, in the format of the template or of `--tool_parser`.

    Raises ConfigError: no such tool or format, a function without a schema, or a template without tools.
    """
    from swift.plugin import tools

    chosen = [name for word in names for name in word.replace(",", " ").split()]
    if chosen == ["all"]:
        chosen = sorted(tools)
    if not chosen:
        raise ConfigError(f"{FLAG}: all: none is registered; give --external_plugins")
    for name in chosen:
        require_registered(tools, FLAG, name)
    schemas = {name: _schema_of(name, tools[name]) for name in chosen}
    format = format_of(template, parser)
    _check_turns(template, list(schemas.values()))
    return Toolbox(template, {name: tools[name] for name in chosen}, schemas, format, limit_s)


def read_calls(text: str, format: Mapping[str, Any], schemas: Sequence[Schema] = ()) -> list[Mapping[str, Any]]:
    """The calls in an answer, as {"name", "arguments"}; values of untyped formats are converted by the schemas.

    Raises ValueError: a call that cannot be parsed.
    """
    from transformers.utils.chat_parsing import parse_response

    calls = parse_response(text, dict(format), prefix="", tools=list(schemas)).get("tool_calls", [])
    functions = [call.get("function") for call in calls]
    if not all(isinstance(function, Mapping) for function in functions):
        raise ValueError("it is no object with name and arguments")
    return functions


def _function(schema: Schema) -> dict[str, Any]:
    return schema.get("function", schema)


def _schema_of(name: str, function: Any) -> Schema:
    from transformers.utils import get_json_schema

    try:
        schema = get_json_schema(function)
    except Exception as error:  # any error of annotations and docstring
        raise ConfigError(
            f"{FLAG}: {name}: {first_line(error)}; register a function with annotations, and a docstring with Args"
        ) from error
    return {**schema, "function": {**schema["function"], "name": name}}


def format_of(template: Template, parser: str | None) -> Mapping[str, Any]:
    """The response template that parses the tool calls of the chat template."""
    from swift.plugin import tool_parsers

    if parser is not None:
        try:
            read_calls("", tool_parsers[parser])
        except ValueError as error:
            raise ConfigError(f"--tool_parser: {parser}: {first_line(error)}; correct the plugin") from error
        return dict(tool_parsers[parser])
    call = {"name": "probe", "arguments": {"text": "a probe"}}
    calling = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": dict(call)}]}
    chat: list[Message] = [{"role": "user", "content": _QUESTION}, calling]
    try:
        _, _, written = template.render(chat).rpartition(_QUESTION)
    except RefusedChat:
        written = ""
    tokenizer_format = getattr(template.tokenizer, "response_template", None)
    for format in ([tokenizer_format] if tokenizer_format else []) + list(tool_parsers.values()):
        if _parses(format, written, call):
            return format  # type: ignore[no-any-return]
    raise ConfigError(
        f"{FLAG}: the chat template writes tool calls in none of the formats {', '.join(sorted(tool_parsers))}; "
        "use --template qwen3, or name the format of the answers with --tool_parser"
    )


def _parses(format: Mapping[str, Any], text: str, call: Mapping[str, Any]) -> bool:
    """Whether the format parses this call, and no other, from a text."""
    try:
        return read_calls(text, format) == [call]
    except ValueError:
        return False


def _check_turns(template: Template, schemas: Sequence[Schema]) -> None:
    """Raises ConfigError: a template that does not render tools, or changes an answer if a result follows."""
    chat: list[Message] = [{"role": "user", "content": "a question"}]
    answer, result = {"role": "assistant", "content": "an answer"}, {"role": "tool", "name": "probe", "content": "-"}
    try:
        template.encode_prompt(chat, schemas)
        continuation(template, [*chat, answer], [result], ended=False, tools=schemas)
    except HistoryRewritten:
        raise ConfigError(
            f"{FLAG}: the chat template changes an answer once a tool's result follows it; "
            "use --template with one that keeps answers (of Qwen3: qwen3_training)"
        ) from None
    except RefusedChat as error:
        raise ConfigError(f"{FLAG}: {error.problems[0]}") from error
