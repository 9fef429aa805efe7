"""Types of Axolotl's rows that have a prompt of their own, which a chat template of ours writes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from string import Formatter
from typing import Any

from swift.models.instruct_templates import ALPACA, STYLES, alpaca_like, instruct

_STYLES = {"": "alpaca", "instruct": "alpaca", "chat": "alpaca_chat", "chatml": "alpaca_chatml", "phi": "alpaca_phi"}
"""Behind the colon of a type -> our template."""

_OF_ALPACA: dict[str, dict[str, str]] = {
    "alpaca": {},
    "gpteacher": {"response": "output"},
    "oasst": {"INSTRUCTION": "instruction", "RESPONSE": "output"},
}
"""Types with Alpaca's prompt -> the names of their columns."""

_CONCISE = (
    f"{ALPACA[1].partition(' that')[0]} from a USER that describes a task, paired with an input that provides further "
    "context. The ASSISTANT writes a response that concisely and appropriately completes the request.\n\n",
    f"{ALPACA[1].partition(' that')[0]} from a USER that describes a task. The ASSISTANT writes a response that "
    "appropriately and concisely completes the request.\n\n",
)
_HUMAN = (
    "### Human:\n{instruction}\n### Additional Context:\n{input}\n### Assistant:\n",
    "### Human:\n{instruction}\n### Assistant:\n",
    "### System:\n{system}\n",
)
_ORCA = {"question": "instruction", "response": "output", "system_prompt": "system"}
_SUMMARY = "USER: Summarize the following article as a TL;DR.\n{instruction}\nASSISTANT:"
_QUESTIONS = {"question": "instruction", "answer": "output"}

_OTHERS: dict[str, tuple[str, dict[str, str]]] = {
    "alpaca_chat": ("alpaca_chat", {}),
    "alpaca_chat.load_concise": (alpaca_like("alpaca_chat", _CONCISE), {}),
    "alpaca_chat.load_qa": (alpaca_like("alpaca_chat", _CONCISE), _QUESTIONS),
    "alpaca_chat.load_camel_ai": (
        alpaca_like("alpaca_chat", _CONCISE), {"message_1": "instruction", "message_2": "output"},
    ),
    "alpaca_chat.load_no_prompt": (instruct(*STYLES["alpaca_chat"]), {}),
    "alpaca_instruct": ("alpaca", {}),
    "alpaca_instruct.load_no_prompt": (instruct(*STYLES["alpaca"]), {}),
    "alpaca_w_system": (instruct(*STYLES["alpaca_chat"]), {}),
    "alpaca_w_system.load_chat": (instruct(*STYLES["alpaca_chat"]), {}),
    "alpaca_w_system.load_instruct": (instruct(*STYLES["alpaca"]), {}),
    "alpaca_w_system.load_open_orca": (instruct(*_HUMAN), _ORCA),
    "alpaca_w_system.load_open_orca_chatml": (instruct(*STYLES["alpaca_chatml"]), _ORCA),
    "summarizetldr": (instruct(_SUMMARY, _SUMMARY), {"article": "instruction", "summary": "output"}),
}  # fmt: skip
"""Other types -> their template, and the names of their columns."""


def prompt_of(kind: Any) -> tuple[str, dict[str, str]] | None:
    """The template of a type, and what its columns are called here; None if rows have a chat or no prompt."""
    if isinstance(kind, dict):
        return _of_a_format(kind)
    name, _, style = str(kind).partition(":")
    if name in _OF_ALPACA and style in _STYLES:
        return _STYLES[style], _OF_ALPACA[name]
    return _OTHERS.get(str(kind))


def _of_a_format(kind: Mapping[str, Any]) -> tuple[str, dict[str, str]] | None:
    """A type with formats of its own; None if they have other fields than a row has."""
    formats = [
        str(kind.get(name) or usual)
        for name, usual in (
            ("format", "{instruction} {input} "), ("no_input_format", "{instruction} "), ("system_format", "{system}"),
        )
    ]  # fmt: skip
    try:
        fields = [{field for _, field, _, _ in Formatter().parse(text) if field is not None} for text in formats]
    except ValueError:  # an open brace
        return None
    if fields[0] - {"instruction", "input"} or fields[1] - {"instruction"} or fields[2] - {"system"}:
        return None
    columns = {name: str(kind.get(f"field_{name}") or name) for name in ("system", "instruction", "input", "output")}
    return instruct(formats[0], formats[1], formats[2]), {old: new for new, old in columns.items() if old != new}


def kinds_of(config: Mapping[str, Any]) -> Iterator[Any]:
    """The types of a configuration's datasets."""
    for name in ("datasets", "pretraining_dataset", "test_datasets"):
        entries = config.get(name) or []
        yield from (entry.get("type") for entry in (entries if isinstance(entries, list) else [entries])
                    if isinstance(entry, dict))  # fmt: skip


def has_own_prompts(config: Mapping[str, Any]) -> bool:
    """Whether all rows have a prompt of their type, so that no chat template is used."""
    kinds = list(kinds_of(config))
    return bool(kinds) and all(prompt_of(kind) for kind in kinds)


def has_texts(config: Mapping[str, Any]) -> bool:
    """Whether all rows are documents that are cut to several rows where they are too long."""
    kinds = list(kinds_of(config))
    return bool(kinds) and all(kind == "completion" for kind in kinds)
