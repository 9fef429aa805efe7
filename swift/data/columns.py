"""Which column is the prompt: decided once per dataset from its column names, and printed as one line.

`messages` (or ShareGPT's `conversations`) if there is one; else exactly one of query, prompt, question, problem,
instruction (+ input), with the exchanges of `history` before it. More than one is an error that shows the `--columns`
line for each choice. `tools` reaches the chat template. All other columns, and `tools`, reach rewards under their own
names. For supervised rows the answer is a column too, by preference the partner of the prompt's.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from swift.data.messages import (
    Message,
    chat_of,
    encodable,
    prompt_of,
    read_history,
    read_messages,
    read_tools,
    with_system,
)
from swift.data.records import RowError
from swift.errors import ConfigError, nearest, suggest

Purpose = Literal["prompt", "chat"]
"""`prompt`: what a completion is sampled for. `chat`: prompt and answer, to be learnt from."""

PARTNERS = {
    "query": "response",
    "prompt": "completion",
    "question": "answer",
    "problem": "solution",
    "instruction": "output",
}
"""Prompt columns, and the answer column that usually stands beside each."""

CHATS = ("messages", "conversations")
"""Columns that hold a whole chat."""

PROMPTS = tuple(PARTNERS)
ANSWERS = ("response", "output", "completion", "answer", "solution")
RESERVED = frozenset(
    {
        "completions",
        "prompt_id",
        "group_id",
        "request_id",
        "finish_reason",
        "is_truncated",
        "response_token_ids",
        "trainer_state",
    }
)
"""Keywords of reward functions; a column so called would hide one."""


@dataclass(slots=True, frozen=True)
class ColumnPlan:
    """How the rows of one dataset are read; column names are those after renaming."""

    purpose: Purpose
    prompt: str
    answer: str | None = None
    has_input: bool = False
    has_history: bool = False
    has_system: bool = False
    others: tuple[str, ...] = ()
    renames: Mapping[str, str] = field(default_factory=dict)
    renamed: tuple[str, ...] = ()

    @property
    def line(self) -> str:
        """The line to print, such as `prompt <- messages; to rewards: problem, solution`."""
        history = "history + " if self.has_history else ""
        parts = [f"prompt <- {history}{self.prompt}{' + input' if self.has_input else ''}"]
        if self.answer:
            parts.append(f"response <- {self.answer}")
        if self.has_system:
            parts.append("system <- system")
        where = "to rewards" if self.purpose == "prompt" else "other columns"
        parts.append(f"{where}: {', '.join(self.others) or 'none'}")
        if self.renamed:
            parts.append("renamed: " + ", ".join(f"{old} -> {self.renames[old]}" for old in self.renamed))
        return "; ".join(parts)

    def read(self, values: Mapping[str, Any], system: str | None) -> tuple[list[Message], dict[str, Any]]:
        """One row's messages and its other columns.

        Args:
            values: the row under the names of its file.
            system: the text of `--system`, used where the row has none.

        Raises:
            RowError: the row does not fit the plan.
        """
        row: dict[str, Any] = {}
        for name, value in values.items():
            name = self.renames.get(name, name)
            if value is not None or name not in row:  # a null never hides a value of the same new name
                row[name] = value
        messages = self._messages(row)
        messages = with_system(messages, self._system(row), system)
        messages = prompt_of(messages) if self.purpose == "prompt" else chat_of(messages)
        if row.get("tools") is not None:
            row["tools"] = read_tools(row["tools"])
        return messages, {name: value for name, value in row.items() if name not in self._consumed}

    @property
    def _consumed(self) -> tuple[str | None, ...]:
        more = ("input" if self.has_input else None, "history" if self.has_history else None)
        return (self.prompt, self.answer, *more, "system")

    def _messages(self, row: dict[str, Any]) -> list[Message]:
        value = row.get(self.prompt)
        if value is None:
            raise RowError(f"no {self.prompt}")
        if self.prompt in CHATS or isinstance(value, list):
            messages = read_messages(value, self.prompt)
        else:
            text = _text(value, self.prompt)
            extra = row.get("input") if self.has_input else None
            messages = [{"role": "user", "content": f"{text}\n{_text(extra, 'input')}" if extra else text}]
            if self.has_history and row.get("history"):
                messages = read_history(row["history"]) + messages
        return messages + self._answer(row) if self.answer else messages

    def _answer(self, row: dict[str, Any]) -> list[Message]:
        name = str(self.answer)
        value = row.get(name)
        if value is None:
            raise RowError(f"no {name}")
        if isinstance(value, list):
            return read_messages(value, name)
        return [{"role": "assistant", "content": _text(value, name)}]

    def _system(self, row: dict[str, Any]) -> str | None:
        value = row.get("system")
        if value is None or value == "":
            return None
        return _text(value, "system")


def plan_columns(
    columns: Sequence[str], renames: Mapping[str, str], *, purpose: Purpose, flag: str, name: str
) -> ColumnPlan:
    """Decides how a dataset with these columns is read.

    Args:
        columns: names in the file that hold values.
        renames: `--columns`, old name to new; entries for columns that are not here are ignored.
        purpose: whether an answer is wanted.
        flag: how errors call the setting.
        name: how errors call the dataset.

    Raises:
        ConfigError: no prompt column or several, no answer column or several, names that clash.
    """
    here = {old: new for old, new in renames.items() if old in columns}
    names = [here.get(column, column) for column in columns]
    where = f"{flag}: {name}"
    _check_clashes(names, columns, here, where, purpose)
    prompt = _choose_prompt(names, here, columns, where)
    answer = _choose_answer(names, here, prompt, where) if purpose == "chat" and prompt not in CHATS else None
    has_input = prompt == "instruction" and "input" in names
    has_history = prompt not in CHATS and "history" in names
    used = {prompt, answer, "system", "input" if has_input else None, "history" if has_history else None}
    others = tuple(column for column in names if column not in used)
    renamed = tuple(old for old, new in here.items() if old != new)
    return ColumnPlan(
        purpose, prompt, answer, has_input, has_history, "system" in names, others, dict(renames), renamed
    )


def check_renames(renames: Mapping[str, str], seen: Sequence[str]) -> None:
    """Raises ConfigError when `--columns` names a column that no dataset has, with the nearest."""
    problems = [
        f"--columns: {json.dumps({old: new})}: no dataset has a column {old!r}; {suggest(old, list(seen))}"
        for old, new in renames.items()
        if old not in seen
    ]
    if problems:
        raise ConfigError(*problems)


def _check_clashes(
    names: Sequence[str], columns: Sequence[str], renames: Mapping[str, str], where: str, purpose: Purpose
) -> None:
    twice = sorted({name for name in names if list(names).count(name) > 1})
    if twice:
        clashing = [old for old, name in zip(columns, names, strict=True) if name == twice[0]]
        raise ConfigError(
            f"--columns: {json.dumps(dict(renames))}: {' and '.join(clashing)} of {where.partition(': ')[2]} "
            f"would both be called {twice[0]!r}; give one of them another name"
        )
    reserved = [name for name in names if name in RESERVED]
    if reserved and purpose == "prompt":
        fix = json.dumps({reserved[0]: f"row_{reserved[0]}"})
        raise ConfigError(
            f"{where}: column {reserved[0]}: the name is reserved for reward functions; rename it: --columns '{fix}'"
        )


def _choose_prompt(names: Sequence[str], renames: Mapping[str, str], columns: Sequence[str], where: str) -> str:
    if chats := [name for name in CHATS if name in names]:
        return chats[0]
    candidates = [name for name in PROMPTS if name in names]
    chosen = [new for new in renames.values() if new in candidates]
    if len(candidates) == 1 or len(chosen) == 1:
        return (chosen if len(chosen) == 1 else candidates)[0]
    if candidates:
        fixes = " or ".join(f"--columns '{_fix(name, 'query', names)}' for {name}" for name in candidates)
        raise ConfigError(f"{where}: {' and '.join(candidates)}: each could be the prompt; choose one: {fixes}")
    if not columns:
        raise ConfigError(f"{where}: no columns: the rows are empty; check the file")
    likely = [column for word in PROMPTS for column in nearest(word, names, 1)] or list(names)
    raise ConfigError(
        f"{where}: columns {', '.join(names)}: none is a prompt ({', '.join(CHATS)}, {', '.join(PROMPTS)}); "
        f"name it: --columns '{json.dumps({likely[0]: 'query'})}'"
    )


def _choose_answer(names: Sequence[str], renames: Mapping[str, str], prompt: str, where: str) -> str:
    candidates = [name for name in ANSWERS if name in names]
    chosen = [new for new in renames.values() if new in candidates]
    partner = PARTNERS[prompt]
    if len(chosen) == 1:
        return chosen[0]
    if partner in candidates:
        return partner
    if len(candidates) == 1:
        return candidates[0]
    if candidates:
        fixes = " or ".join(f"--columns '{_fix(name, 'response', names)}' for {name}" for name in candidates)
        raise ConfigError(f"{where}: {' and '.join(candidates)}: each could be the response; choose one: {fixes}")
    raise ConfigError(
        f"{where}: columns {', '.join(names)}: none is a response ({', '.join(ANSWERS)}), and there are no messages; "
        f"name it: --columns '{json.dumps({next((n for n in names if n != prompt), 'text'): 'response'})}'"
    )


def _fix(name: str, target: str, names: Sequence[str]) -> str:
    """The `--columns` value that chooses `name`; an identity when the target's name is already taken."""
    return json.dumps({name: name if target in names else target})


def _text(value: Any, column: str) -> str:
    if not isinstance(value, str):
        raise RowError(f"{column} must be text, not {type(value).__name__}")
    if not value.strip():
        raise RowError(f"{column} is empty")
    if not encodable(value):
        raise RowError(f"{column} is not valid Unicode text")
    return value
