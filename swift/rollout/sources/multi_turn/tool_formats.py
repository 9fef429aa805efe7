"""Formats of tool calls in chat templates: entries of `tool_parsers`, as response templates of transformers.

A response template defines where a tool call begins and ends in an answer, and how its content is parsed; see
https://huggingface.co/docs/transformers/chat_response_parsing. A tokenizer may have its own response template.
"""

from __future__ import annotations

from typing import Any

from swift.plugin.registry import tool_parsers

_THINKING = {"open": "<think>", "close_pattern": r"</think>\s*"}
_CALL = {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}}


def _format(anchor: str, **calls: Any) -> dict[str, Any]:
    """A response template with tool calls, outside of thinking. anchor: text before an answer."""
    fields = {"reasoning_content": _THINKING, "tool_calls": {"repeats": True, "transform": _CALL, **calls}}
    return {"start_anchor": anchor, "fields": fields}


def _tags(pattern: str) -> dict[str, Any]:
    return {"content": "xml-inline", "content_args": {"tag_pattern": pattern, "value_parser": {"name": "text"}}}


tool_parsers["hermes"] = _format(  # Hermes, Qwen2.5, Qwen3: <tool_call>{"name": ..., "arguments": {...}}</tool_call>
    "<|im_start|>assistant\n",
    open="<tool_call>",
    close_pattern=r"</tool_call>\s*",
    content="json",
    transform={"type": "function", "function": "{content}"},
)
tool_parsers["qwen3_coder"] = _format(  # Qwen3-Coder, Qwen3.5, Nemotron 3: <function=name><parameter=key>value...
    "<|im_start|>assistant\n",
    open_pattern=r"<tool_call>\s*<function=(?P<name>[^\n>]+)>",
    close_pattern=r"</tool_call>\s*",
    **_tags(r"<parameter=(?P<key>[^>\n]+)>\s*(?P<value>.*?)\s*</parameter>"),
)
tool_parsers["glm4_moe"] = _format(  # GLM-4.5 and later: <tool_call>name<arg_key>key</arg_key><arg_value>value...
    "<|assistant|>",
    open_pattern=r"<tool_call>(?P<name>[^\s<]+)\s*",
    close_pattern=r"</tool_call>\s*",
    **_tags(r"<arg_key>(?P<key>[^<]+)</arg_key>\s*<arg_value>(?P<value>.*?)</arg_value>"),
)
tool_parsers["llama3_json"] = _format(  # Llama 3.1 and 3.2: {"name": ..., "parameters": {...}}
    "<|start_header_id|>assistant<|end_header_id|>\n\n",
    open_pattern=r'\{"name":\s*"(?P<name>[^"]+)",\s*"parameters":\s*',
    close_pattern=r"\}\s*<\|eo[tm]_id\|>",
    content="json",
)
