"""Datasets and chat templates of Axolotl: paths with their parts, types of rows, and names of columns."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from swift.arguments.imports import trl
from swift.arguments.imports.axolotl_prompts import has_own_prompts, prompt_of
from swift.arguments.imports.draft import Draft, Rule, shown
from swift.data.messages import ALIASES

COLUMNS = {
    "field_messages": "messages", "field_instruction": "instruction", "field_input": "input", "field_output": "output",
    "field_prompt": "prompt", "field_chosen": "chosen", "field_rejected": "rejected", "field_completion": "completion",
    "field_label": "label", "field_tools": "tools", "field_system": "system", "field": "text", "text_column": "text",
}  # fmt: skip
_CONVERSATIONS = ("conversations", "messages")

_OWN_PROMPT = "a prompt of its own, of columns that --dataset_transform alpaca does not read"
_CHAT = "rows are recognised by their columns"

TYPES = {
    **dict.fromkeys(("chat_template", "sharegpt", "pretrain", "bradley_terry", "stepwise_supervised"), _CHAT),
    **dict.fromkeys(
        ("alpaca", "alpaca_w_system", "alpaca_chat", "alpaca_instruct", "gpteacher", "reflection", "context_qa",
         "explainchoice", "jeopardy", "orcamini", "metharme", "pygmalion", "creative_acr", "llama2_chat",
         "concisechoice"),
        _OWN_PROMPT,
    ),
    "completion": "texts beside chats are left out over sequence_len; Axolotl cuts them to several rows",
    "input_output": "segments that are masked one by one; write messages whose masked turns have loss: false",
    "passthrough": "texts as they are; here they get the chat template",
    "zephyr": "ranked answers; save the best and the worst as chosen and rejected",
    "user_defined": "a prompt format of its own; give it as --template FILE",
}  # fmt: skip
"""First word of a type -> what becomes of its rows."""

_PAIRS = ("chatml", "llama3")
"""Types of preferences that write the turns of the template of this name."""

TRANSFORMS = {
    "ebft_pretrain.transform": "strided_text",
    "ebft_opencode.transform": "opencode",
    "ebft_strided_structured.transform": "strided_structured",
    "ebft_strided_chat.transform": "strided_chat",
    "ebft_chat_multiturn.transform": "chat_multiturn",
    "ebft_chat_multiturn.transform_last_turn": "chat_multiturn_last",
    "ebft_chat_multiturn.transform_all_turns": "chat_multiturn_all",
    "ebft_reasoning.transform": "reasoning",
    "ebft_reasoning.transform_split_thinking": "reasoning_split_thinking",
    "ebft_reasoning.transform_answer_only": "reasoning_answer_only",
    "ebft_reasoning.transform_strided": "strided_reasoning",
}
"""Functions of Axolotl -> our `--dataset_transform`."""

TEMPLATES = {
    "chatml": "chatml", "llama3": "llama3", "gemma": "gemma_training", "gemma3": "gemma3_training",
    "gemma3n": "gemma3_training", "gemma4": "gemma4", "gemma4_unified": "gemma4", "qwen_25": "qwen2_5",
    "qwen3": "qwen3", "qwen3_5": "qwen3_5_think", "deepseek_v3": "deepseekv3", "cohere": "cohere", "aya": "cohere",
    "qwen2_vl": "qwen2_5_vl",
    **{name: name for name in ("llama4", "phi_3", "phi_35", "falcon_h1", "deepseek_v2", "mistral_v1")},
}  # fmt: skip
"""Names of Axolotl -> ours that write the same chats."""

_FILE_TYPES = ("json", "csv", "parquet", "text", "arrow")


def datasets(name: str) -> Rule:
    """A list of datasets: paths with their subsets and parts, the type of their rows, and the names of columns."""

    def rule(draft: Draft, key: str, raw: Any) -> None:
        entries = raw if isinstance(raw, list) else [raw]
        if not all(isinstance(entry, dict) and entry.get("path") for entry in entries):
            draft.lose(key, "not a list of maps with `path`")
            return
        columns: dict[str, str] = {}
        paths = [path for index, entry in enumerate(entries) for path in _paths(draft, f"{key}[{index}]", entry, name)]
        for index, entry in enumerate(entries):
            for part, value in entry.items():
                _take_part(draft, f"{key}[{index}].{part}", part, value, columns, entry)
        draft.take(key, name, paths)
        if columns:
            draft.take(f"{key}: field_*", "columns", columns)

    return rule


def _paths(draft: Draft, place: str, entry: dict[str, Any], name: str) -> list[str]:
    """The entries of `--dataset` for one of theirs."""
    files = entry.get("data_files") or []
    paths = [f"{entry['path']}{':' + entry['name'] if entry.get('name') else ''}"]
    if files and entry["path"] in _FILE_TYPES:
        paths = [files] if isinstance(files, str) else list(files)
        draft.same(f"{place}.data_files", "the files are the dataset")
    elif files:
        paths = [f"{entry['path']}:{file}" for file in ([files] if isinstance(files, str) else files)]
        draft.same(f"{place}.data_files", "the files stand behind the dataset's name")
    part = trl.take_split(draft, f"{place}.split", entry["split"], name) if entry.get("split") else ""
    return [f"{path}{part}" for path in paths]


def _take_part(draft: Draft, place: str, part: str, value: Any, columns: dict[str, str], entry: dict[str, Any]) -> None:
    if part in ("path", "name", "split", "data_files") and value:
        return  # see `_paths`
    if value in (None, "", {}, []):
        draft.same(place, "has no value")
    elif part in COLUMNS:
        if value != COLUMNS[part] and value not in _CONVERSATIONS:
            columns[value] = COLUMNS[part]
        draft.same(place, f"read as {COLUMNS[part]}")
    elif part == "type":
        _take_type(draft, place, value, columns)
    elif part == "chat_template":
        chat_template(draft, place, value)
    elif part in ("step_separator", "train_on_last_step_only", "max_completion_length"):
        draft.take(place, part, value)
    elif part in PARTS:
        is_ours, ours = PARTS[part]
        _state(draft, place, value, is_ours(value, entry), ours)
    else:
        false = str(value).lower() == "false"
        _state(draft, place, value, false, "false changes nothing" if false else "datasets have no such setting here")


def _are_turns(value: Any, _: Any) -> bool:
    return {*(value.values() if isinstance(value, dict) else [value])} <= {"role", "from", "content", "value"}


def _are_roles(value: Any, _: Any) -> bool:
    return all(ALIASES.get(word, word) == role for role, words in value.items() for word in words)


def _are_answers(value: Any, _: Any) -> bool:
    return {ALIASES.get(role, role) for role in ([value] if isinstance(value, str) else value)} == {"assistant"}


def _stays(_: Any, entry: Mapping[str, Any]) -> bool:
    usual = "reasoning_content"
    return bool(entry.get("field_thinking", usual) == entry.get("template_thinking_key", usual))


PARTS: dict[str, tuple[Callable[[Any, Mapping[str, Any]], bool], str]] = {
    **dict.fromkeys(("ds_type", "trust_remote_code"), (lambda value, entry: True, "told by the file")),
    **dict.fromkeys(
        ("message_property_mappings", "message_field_role", "message_field_content"),
        (_are_turns, "turns have role and content, or from and value"),
    ),
    "roles": (_are_roles, f"the usual names of roles are recognised: {', '.join(ALIASES)}"),
    "roles_to_train": (_are_answers, "the loss counts assistant turns"),
    **dict.fromkeys(
        ("train_on_eos", "train_on_eot"),
        (lambda value, entry: value == "turn", "the end token of each trained turn is trained on"),
    ),
    **dict.fromkeys(
        ("field_thinking", "template_thinking_key"),
        (_stays, "a key of a turn reaches the chat template under its name"),
    ),
}
"""Keys of a dataset -> whether a value is what swift does, and what that is."""


def _state(draft: Draft, place: str, value: Any, is_ours: bool, ours: str) -> None:
    if is_ours:
        draft.same(place, ours)
    else:
        draft.lose(place, f"{shown(place, value)}: {ours}")


def _take_type(draft: Draft, place: str, value: Any, columns: dict[str, str]) -> None:
    found = prompt_of(value) if draft.mode == "sft" else None
    if found is not None:
        template, renamed = found
        columns.update(renamed)
        draft.take(place, "dataset_transform", "alpaca")
        draft.take(place, "template", template)
        if isinstance(value, dict) and value.get("system_prompt"):
            draft.take(f"{place}.system_prompt", "system", value["system_prompt"])
        return
    if isinstance(value, dict):
        columns.update({old: COLUMNS[key] for key, old in value.items() if key in COLUMNS and old != COLUMNS[key]})
        draft.lose(place, f"{', '.join(value)}: columns are taken; a prompt format is --template FILE")
        return
    kind, _, way = re.sub(":.*", "", str(value)).partition(".")
    described = TYPES.get(kind, "rows made by a function or a format; save the rows that it makes to a file")
    if value in TRANSFORMS:
        draft.take(place, "dataset_transform", TRANSFORMS[value])
    elif kind in _PAIRS and draft.mode in ("dpo", "ipo", "kto", "orpo", "simpo", "cpo"):
        draft.take(place, "template", kind)
        if way == "icr":
            columns["input"] = "prompt"
    elif described == _CHAT:
        draft.same(place, described)
    elif kind == "completion" and draft.mode == "pt":
        draft.take(place, "truncation_strategy", "split")
    else:
        draft.lose(place, f"{value}: {described}")


def chat_template(draft: Draft, key: str, raw: Any) -> None:
    """`chat_template`: the tokenizer's, or one of theirs by name."""
    if draft.mode == "pt" or (draft.mode == "sft" and has_own_prompts(draft.config)):
        draft.same(key, "rows have the prompt of their type")
    elif str(raw).startswith("tokenizer_default"):
        draft.same(key, "the tokenizer's own template is used")
    elif raw in TEMPLATES:
        draft.take(key, "template", TEMPLATES[raw])
    elif raw == "jinja":
        draft.same(key, "see chat_template_jinja")
    else:
        draft.lose(key, f"{raw}: the tokenizer's own is used; --template: one of TRL's names, or a Jinja file")


def end_of_turn(draft: Draft, key: str, raw: Any) -> None:
    """`eot_tokens`: what ends an assistant's turn and is learnt with it, as our templates mark it."""
    from swift.models.templates import read_template

    given = str(draft.config.get("chat_template", "tokenizer_default"))
    name = TEMPLATES.get(given)
    tokens = [raw] if isinstance(raw, str) else list(raw)
    if draft.mode == "sft" and has_own_prompts(draft.config):
        draft.same(key, "rows have the prompt of their type, and end with the end-of-text token")
    elif given.startswith(("tokenizer_default", "jinja")) and draft.mode == "sft":
        draft.take(key, "eot_tokens", tokens)
    elif name and all(token in read_template(name) for token in tokens):
        draft.same(key, f"template {name} ends turns with it, and it is trained on")
    else:
        draft.lose(key, f"{' '.join(tokens)}: the end of a turn is what the chat template writes behind an answer")
