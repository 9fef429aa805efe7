"""Chat templates that write a text around an instruction, as Alpaca's: a base model continues it with the answer.

A turn of the user has an `input` beside its content if `--dataset_transform alpaca` read the row. The text begins with
a bos token where the tokenizer begins texts with one, which `in_place` decides, and not by the template's will.
"""

from __future__ import annotations

import json
from string import Formatter

START = "{{- text_start -}}"
"""Where the bos token may stand."""


def instruct(with_input: str, alone: str, system: str = "{system}", preambles: tuple[str, str] = ("", "")) -> str:
    """A template in Jinja, made of formats.

    Args:
        with_input: of an `{instruction}` with an `{input}`.
        alone: of an instruction without one.
        system: of a `{system}` prompt.
        preambles: texts in place of a system prompt, in front of an instruction with and without input.
    """
    turns = [
        f"{{%- if loop.first -%}}{_written(preamble)}{{%- endif -%}}" * bool(preamble) + _written(text)
        for preamble, text in zip(preambles, (with_input, alone), strict=True)
    ]
    return (
        START + "{%- for message in messages -%}{%- if message.role == 'assistant' -%}"
        "{%- generation -%}{{- message.content + eos_token -}}{%- endgeneration -%}"
        f"{{%- elif message.role == 'system' -%}}{_written(system)}"
        f"{{%- elif message.input -%}}{turns[0]}{{%- else -%}}{turns[1]}{{%- endif -%}}{{%- endfor -%}}"
    )


def in_place(jinja: str, *, begins: bool) -> str:
    """The template for a tokenizer that begins texts with a bos token, or does not."""
    return jinja.replace(START, "{{- bos_token -}}" if begins else "")


def shows_input(jinja: str) -> bool:
    """Whether a template writes the input of a turn."""
    return "message.input" in jinja


def _written(text: str) -> str:
    """A format as an expression of Jinja."""
    fields = {"instruction": "message.content", "system": "message.content", "input": "message.input"}
    parts = [
        part
        for literal, field, _, _ in Formatter().parse(text)
        for part in ([json.dumps(literal)] if literal else []) + ([fields[field]] if field else [])
    ]
    return f"{{{{- {' + '.join(parts)} -}}}}" if parts else ""


_TASK = "Below is an instruction that describes a task"
ALPACA = (
    f"{_TASK}, paired with an input that provides further context. "
    "Write a response that appropriately completes the request.",
    f"{_TASK}. Write a response that appropriately completes the request.",
)
"""What Alpaca says before an instruction with and without input."""

STYLES = {
    "alpaca": (
        "### Instruction:\n{instruction}\n\n### Input:\n{input}\n\n### Response:\n",
        "### Instruction:\n{instruction}\n\n### Response:\n",
        "{system}\n\n",
    ),
    "alpaca_chat": (
        "USER: {instruction}\n{input}\nASSISTANT:",
        "USER: {instruction}\nASSISTANT:",
        "SYSTEM: {system}\n",
    ),
    "alpaca_chatml": (
        "<|im_start|>user\n{instruction}\n{input}<|im_end|>\n<|im_start|>assistant\n",
        "<|im_start|>user\n{instruction}<|im_end|>\n<|im_start|>assistant\n",
        "<|im_start|>system\n{system}<|im_end|>\n",
    ),
    "alpaca_phi": (
        "<|user|>\n{instruction}<|end|>{input}<|assistant|>",
        "<|user|>\n{instruction}<|end|>\n<|assistant|>\n",
        "<|system|>\n{system}<|end|>\n",
    ),
}
"""Name -> formats of an instruction with and without input, and of the text before it."""


def alpaca_like(style: str, texts: tuple[str, str] = ALPACA) -> str:
    """Alpaca's prompt in a style, with other texts before the instruction."""
    with_input, alone, system = STYLES[style]
    return instruct(with_input, alone, system, (system.format(system=texts[0]), system.format(system=texts[1])))


INSTRUCT = {style: alpaca_like(style) for style in STYLES}
"""The templates by their names."""
