"""Which column is the prompt: decided once per dataset from its column names, and printed as one line.

`messages` (or ShareGPT's `conversations`) if there is one; else `responses_create_params`, a request of NeMo Gym; else
exactly one of query, prompt, question, problem, instruction (+ input), with the exchanges of `history` before it. More
than one is an error that shows the `--columns` line for each choice. `tools` reaches the chat template. All other
columns, and `tools`, reach rewards under their own names.

A kind of rows is a subclass of `ColumnPlan` in a file of its own, such as `chats`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from swift.data.messages import (
    Message,
    chat_in,
    encodable,
    parsed,
    prompt_of,
    read_history,
    read_messages,
    read_tools,
    with_system,
)
from swift.data.records import RowError
from swift.data.responses import COLUMN as REQUEST
from swift.data.responses import prompt_from, tools_from
from swift.errors import ConfigError, join_problems, likeness, nearest, suggest

CHATS = ("messages", "conversations")
"""Columns that hold a whole chat."""

PROMPTS = ("query", "prompt", "question", "problem", "instruction")

TEXT = "text"
"""Column of documents."""

_TRUTHS = {"true": True, "false": False, "1": True, "0": False, "1.0": True, "0.0": False}

_MISSPELLED = 0.75
"""Likeness from which on a column is taken for another one that is misspelled."""

RESERVED = frozenset(
    {"self", "completions", "messages", "prompt_id", "group_id", "request_id", "finish_reason", "is_truncated"}
    | {"response_token_ids", "trainer_state", "environment_reward", "turn_rewards"}
)
"""Keywords of reward functions, and the `self` of methods; a column so called would hide one."""


class ColumnPlan:
    """How the rows of one dataset are read: those that completions are sampled for.

    A final assistant turn is dropped; `answer` and the like stay among the columns.

    Args:
        columns: names in the file that hold values.
        renames: `--columns`, old name to new; entries for columns that are not here are ignored.
        flag: how errors call the setting.
        name: how errors call the dataset.
        chats: columns whose values look like chats.

    Raises:
        ConfigError: no prompt column or several, names that clash.
    """

    others_are = "to rewards"
    optional: tuple[str, ...] = ("system", "tools", "history")
    """Columns that are read if they are there."""

    def __init__(
        self, columns: Sequence[str], renames: Mapping[str, str], *, flag: str, name: str, chats: Sequence[str] = ()
    ) -> None:
        self.renames = dict(renames)
        self.here = {old: new for old, new in renames.items() if old in columns}
        self.names = [self.here.get(column, column) for column in columns]
        self.where = f"{flag}: {name}"
        self._check_clashes(columns, name)
        self.chats = [self.here.get(column, column) for column in chats]
        self.prompt = self._choose_prompt()
        """The column of the prompt, under its new name."""
        self.used = [self.prompt] if self.prompt != REQUEST else []
        """Columns that become messages."""
        if self.prompt == "instruction" and "input" in self.names:
            self.used.append("input")
        if self.prompt not in (*CHATS, REQUEST) and "history" in self.names:
            self.used.append("history")
        self.choose()

    def choose(self) -> None:
        """For subclasses: chooses more columns and adds them to `used`."""
        reserved = [name for name in self.names if name in RESERVED and name not in self.used]
        if reserved:
            fix = json.dumps({reserved[0]: f"row_{reserved[0]}"})
            raise ConfigError(
                f"{self.where}: column {reserved[0]}: the name is reserved for reward functions; "
                f"rename it: --columns '{fix}'"
            )

    def finish(self, messages: list[Message], row: Mapping[str, Any]) -> list[Message]:
        """For subclasses: the messages of a row, from those of its prompt column."""
        return prompt_of(messages)

    @property
    def others(self) -> tuple[str, ...]:
        """Columns that do not become messages."""
        return tuple(name for name in self.names if name not in (*self.used, "system"))

    @property
    def line(self) -> str:
        """The line to print, such as `prompt <- messages; to rewards: problem, solution`."""
        history = "history + " if "history" in self.used else ""
        parts = [f"prompt <- {history}{self.prompt}{' + input' if 'input' in self.used else ''}", *self.more_parts()]
        if "system" in self.names:
            parts.append("system <- system")
        parts.append(f"{self.others_are}: {', '.join(self.others) or 'none'}")
        if renamed := [f"{old} -> {new}" for old, new in self.here.items() if old != new]:
            parts.append("renamed: " + ", ".join(renamed))
        return "; ".join(parts)

    @property
    def doubts(self) -> list[str]:
        """A note on each column whose name is nearly that of one that would be read."""
        pairs = [
            (column, right)
            for right in self.optional
            if right not in self.names
            for column in nearest(right, self.others, 1, likeness=_MISSPELLED)
        ]
        return [
            f"{self.where}: column {column}: not read as {right}; if it is that: --columns "
            f"'{json.dumps({column: right}, ensure_ascii=False)}'"
            for column, right in pairs
        ]

    def more_parts(self) -> list[str]:
        """For subclasses: what else becomes messages, for `line`."""
        return []

    def read(self, values: Mapping[str, Any], system: str | None) -> tuple[list[Message], dict[str, Any]]:
        """One row's messages and its other columns; a RowError if it does not fit the plan.

        values: the row under the names of its file. system: the text of `--system`, used where the row has none.
        """
        row = self.renamed(values)
        if self.prompt == REQUEST:
            row[REQUEST] = parsed(row.get(REQUEST), REQUEST, "{")
        messages, made = self.parts(row, system)
        return messages, {**self.rest_of(row), **made}

    def parts(self, row: dict[str, Any], system: str | None) -> tuple[list[Message], dict[str, Any]]:
        """For subclasses: the messages of a row, and columns that are made of others."""
        return self.finish(self.with_system_of(row, self._prompt_messages(row), system), row), {}

    def renamed(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """A row under the names that `--columns` gives."""
        row: dict[str, Any] = {}
        for name, value in values.items():
            name = self.renames.get(name, name)
            if value is not None or name not in row:  # a null never hides a value of the same new name
                row[name] = value
        return row

    def with_system_of(self, row: Mapping[str, Any], messages: list[Message], system: str | None) -> list[Message]:
        """The messages with the row's system turn, else that of `--system`."""
        own = row.get("system")
        return with_system(messages, text_of(own, "system") if own else None, system)

    def rest_of(self, row: dict[str, Any]) -> dict[str, Any]:
        """The columns that did not become messages, tools read."""
        if self.prompt == REQUEST:
            row["tools"] = tools_from(row[REQUEST])
        elif row.get("tools") is not None:
            row["tools"] = read_tools(row["tools"])
        return {name: value for name, value in row.items() if name not in (*self.used, "system")}

    def holds_chat(self, values: Mapping[str, Any]) -> bool:
        """Whether the prompt of a row, under the names of its file, is a chat rather than a text."""
        prompt = (value for name, value in values.items() if self.renames.get(name, name) == self.prompt)
        return self.prompt in CHATS or any(isinstance(chat_in(value), list) for value in prompt)

    def _prompt_messages(self, row: Mapping[str, Any]) -> list[Message]:
        value = chat_in(row.get(self.prompt))
        if value is None:
            raise RowError(f"no {self.prompt}")
        if self.prompt == REQUEST:
            return prompt_from(value)
        if self.prompt in CHATS or isinstance(value, list):
            return read_messages(value, self.prompt)
        text = text_of(value, self.prompt)
        if "input" in self.used and row.get("input"):
            text = f"{text}\n{text_of(row['input'], 'input')}"
        earlier = read_history(row["history"]) if "history" in self.used and row.get("history") else []
        return [*earlier, {"role": "user", "content": text}]

    def _check_clashes(self, columns: Sequence[str], dataset: str) -> None:
        twice = sorted({name for name in self.names if self.names.count(name) > 1})
        if twice:
            clashing = [old for old, name in zip(columns, self.names, strict=True) if name == twice[0]]
            raise ConfigError(
                f"--columns: {json.dumps(self.here)}: {' and '.join(clashing)} of {dataset} "
                f"would both be called {twice[0]!r}; give one of them another name"
            )

    def _choose_prompt(self) -> str:
        if chats := [name for name in CHATS if name in self.names]:
            return chats[0]
        if REQUEST in self.names:
            return REQUEST
        if prompt := self.only_one(PROMPTS, "each could be the prompt", "query"):
            return prompt
        if not self.names:
            raise ConfigError(f"{self.where}: no columns: the rows are empty; check the file")
        likely, name = (self.chats[0], "messages") if self.chats else (self.names[0], "query")
        accepted = (*CHATS, *PROMPTS)
        raise self.lacking(f"none is a prompt ({', '.join(accepted)})", accepted, name, likely=likely)

    def lacking(
        self, what: str, accepted: Sequence[str], name: str, *, likely: str | None = None, beside: Collection[str] = ()
    ) -> ConfigError:
        """An error about a column that is not here, and the `--columns` line that names one so.

        A column whose name is misspelled gets the nearest of the `accepted` names, else `likely` gets `name`.

        Args:
            what: what is not here.
            accepted: names of the column.
            name: the usual one of them.
            likely: the column that may be meant; None takes the first that is not `beside`.
            beside: columns of another use.
        """
        others = [column for column in self.names if column not in beside]
        alike = [(column, right) for right in accepted for column in nearest(right, others, 1, likeness=_MISSPELLED)]
        first = likely or next(iter(others), "...")
        pair = max(alike, key=lambda two: likeness(*two), default=(first, name))
        fix = json.dumps(dict([pair]))
        return ConfigError(f"{self.where}: columns {', '.join(self.names)}: {what}; name it: --columns '{fix}'")

    def only_one(self, accepted: Sequence[str], doubt: str, target: str) -> str | None:
        """The only one of the `accepted` columns that is here, or that `--columns` chose; None without any.

        If there are several, the error has a `--columns` line that chooses each by calling it `target`.
        """
        candidates = [name for name in accepted if name in self.names]
        chosen = [new for new in self.here.values() if new in candidates]
        if len(chosen) == 1 or len(candidates) == 1:
            return (chosen if len(chosen) == 1 else candidates)[0]
        if not candidates:
            return None
        # A fix is an identity when the target's name is already taken.
        fixes = [json.dumps({name: name if target in self.names else target}) for name in candidates]
        shown = " or ".join(f"--columns '{fix}' for {name}" for fix, name in zip(fixes, candidates, strict=True))
        raise ConfigError(f"{self.where}: {' and '.join(candidates)}: {doubt}; choose one: {shown}")


def check_renames(renames: Mapping[str, str], seen: Sequence[str]) -> None:
    """Raises ConfigError when `--columns` names a column that no dataset has, with the nearest."""
    join_problems(
        [
            f"--columns: {json.dumps({old: new})}: no dataset has a column {old!r}; {suggest(old, list(seen))}"
            for old, new in renames.items()
            if old not in seen
        ]
    )


def text_of(value: Any, column: str) -> str:
    """A cell that must hold text."""
    if not isinstance(value, str):
        raise RowError(f"{column} must be text, not {type(value).__name__}")
    if not value.strip():
        raise RowError(f"{column} is empty")
    if not encodable(value):
        raise RowError(f"{column} is not valid Unicode text")
    return value


def truth_of(value: Any, column: str) -> bool:
    """A cell that must hold a truth value; in a csv file it is text."""
    found = _TRUTHS.get(value.strip().lower(), value) if isinstance(value, str) else value
    if found not in (0, 1):
        raise RowError(f"no {column}" if value is None else f"{column} must be true or false, not {value!r}")
    return bool(found)


def as_number(value: Any) -> float | None:
    """A finite number, also as text (the cells of csv files are); None for everything else."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None
