"""The mapping of columns to prompts: chosen once per dataset from its column names, and printed as one line.

`messages` (or ShareGPT's `conversations`) if there is one; else `responses_create_params`, a request of NeMo Gym; else
exactly one of query, prompt, question, problem, instruction (+ input), with the exchanges of `history` before it. More
than one is an error that shows the `--columns` line for each choice. `tools` is passed to the chat template. All other
columns, and `tools`, are passed to rewards under their own names.

Each further kind of rows is a subclass of `ColumnPlan` in a file of its own, such as `chats`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from swift.data.images import ImageSource
from swift.data.messages import (
    Message,
    chat_in,
    parsed,
    prompt_of,
    read_history,
    read_messages,
    read_tools,
    text_of,
    with_system,
)
from swift.data.records import IMAGE_COLUMNS, RowError
from swift.data.responses import COLUMN as REQUEST
from swift.data.responses import prompt_from, tools_from
from swift.errors import ConfigError, likeness, nearest

CHATS = ("messages", "conversations")
"""Columns that hold a whole chat."""

PROMPTS = ("query", "prompt", "question", "problem", "instruction")

TEXT = "text"
"""Column of documents."""

_TRUTHS = {"true": True, "false": False, "1": True, "0": False, "1.0": True, "0.0": False}

_MISSPELLED = 0.75
"""Likeness from which a column counts as a misspelling of another one."""

RESERVED = frozenset(
    {"self", "completions", "messages", "prompt_id", "group_id", "request_id", "finish_reason", "is_truncated"}
    | {"response_token_ids", "trainer_state", "environment_reward", "turn_rewards", "rollout_infos"}
    | {"trajectory_inputs"}
)
"""Keywords of reward functions, and the `self` of methods; a column of that name would hide one."""


class ColumnPlan:
    """How the rows of one dataset are read; this class: rows whose prompts completions are sampled for.

    A final assistant turn is dropped; `answer` and the like stay among the columns.

    Args:
        columns: names in the file that hold values.
        renames: `--columns`, old name to new; entries for columns that are not here are ignored.
        flag: name of the setting in error messages.
        name: name of the dataset in error messages.
        chats: columns whose values look like chats.
        images: where images of rows may come from; None: rows have none.

    Raises:
        ConfigError: no prompt column or several, names that clash.
    """

    others_are = "to rewards"
    optional: tuple[str, ...] = ("system", "tools", "history")
    """Columns that are read if they are there."""
    documents = False
    """Whether rows are documents, in which images may stand anywhere."""

    def __init__(
        self,
        columns: Sequence[str],
        renames: Mapping[str, str],
        *,
        flag: str,
        name: str,
        chats: Sequence[str] = (),
        images: ImageSource | None = None,
    ) -> None:
        self.images = images
        self.renames = dict(renames)
        self.here = {old: new for old, new in renames.items() if old in columns}
        self.names = [self.here.get(column, column) for column in columns]
        self.where = f"{flag}: {name}"
        repeated = sorted({new for new in self.names if self.names.count(new) > 1})
        if repeated:
            clashing = [old for old, new in zip(columns, self.names, strict=True) if new == repeated[0]]
            raise ConfigError(
                f"--columns: {json.dumps(self.here)}: {' and '.join(clashing)} of {name} "
                f"would both be called {repeated[0]!r}; give one of them another name"
            )
        self.chats = [self.here.get(column, column) for column in chats]
        self.prompt = self._choose_prompt()
        """The column of the prompt, under its new name."""
        self.used = [self.prompt] if self.prompt != REQUEST else []
        """Columns that become messages."""
        self.more_mappings: list[str] = []
        """For `line`: the other columns that `choose` takes, such as `response <- answer`."""
        if self.prompt == "instruction" and "input" in self.names:
            self.used.append("input")
        if self.prompt not in (*CHATS, REQUEST) and "history" in self.names:
            self.used.append("history")
        if images is not None and (seen := [column for column in IMAGE_COLUMNS if column in self.names]):
            self.used += seen
            self.more_mappings.append(f"images <- {' or '.join(seen)}")
        self.choose()
        self.others = tuple(column for column in self.names if column not in (*self.used, "system"))
        """Columns that do not become messages."""

    def choose(self) -> None:
        """For subclasses: chooses more columns and adds them to `used` and `more_mappings`."""
        reserved = [name for name in self.names if name in RESERVED and name not in self.used]
        if reserved:
            fix = json.dumps({reserved[0]: f"row_{reserved[0]}"})
            raise ConfigError(
                f"{self.where}: column {reserved[0]}: the name is reserved for reward functions; "
                f"rename it: --columns '{fix}'"
            )

    @property
    def line(self) -> str:
        """The line to print, such as `prompt <- messages; to rewards: problem, solution`."""
        history = "history + " if "history" in self.used else ""
        parts = [f"prompt <- {history}{self.prompt}{' + input' if 'input' in self.used else ''}", *self.more_mappings]
        if "system" in self.names:
            parts.append("system <- system")
        parts.append(f"{self.others_are}: {', '.join(self.others) or 'none'}")
        if renamed := [f"{old} -> {new}" for old, new in self.here.items() if old != new]:
            parts.append("renamed: " + ", ".join(renamed))
        return "; ".join(parts)

    @property
    def doubts(self) -> list[str]:
        """A note on each column whose name looks like a misspelling of an optional column."""
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

    def read(self, values: Mapping[str, Any], system: str | None) -> tuple[list[Message], dict[str, Any]]:
        """One row's messages and its other columns, tools parsed.

        values: the row under the names of its file. system: the text of `--system`, used if the row has none.

        Raises:
            RowError: the row does not fit the plan.
        """
        row = self.renamed(values)
        if self.prompt == REQUEST:
            row[REQUEST] = parsed(row.get(REQUEST), REQUEST, "{")
        messages, made = self.parts(row, system)
        if self.prompt == REQUEST:
            row["tools"] = tools_from(row[REQUEST])
        elif row.get("tools") is not None:
            row["tools"] = read_tools(row["tools"])
        others = {name: value for name, value in row.items() if name not in (*self.used, "system")}
        return messages, {**others, **made}

    def parts(self, row: dict[str, Any], system: str | None) -> tuple[list[Message], dict[str, Any]]:
        """For subclasses: the messages of a row, and columns that are made of others."""
        return prompt_of(with_system(self._prompt_messages(row), row.get("system"), system)), {}

    def renamed(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """A row under the names that `--columns` gives."""
        row: dict[str, Any] = {}
        for name, value in values.items():
            name = self.renames.get(name, name)
            if value is not None or name not in row:  # a null never hides a value of the same new name
                row[name] = value
        return row

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
            return read_messages(value, self.prompt, images=self.images is not None)
        text = text_of(value, self.prompt)
        if "input" in self.used and row.get("input"):
            text = f"{text}\n{text_of(row['input'], 'input')}"
        earlier = read_history(row["history"]) if "history" in self.used and row.get("history") else []
        return [*earlier, {"role": "user", "content": text}]

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
        """An error about a missing column, with a `--columns` line that gives a column its name.

        A column whose name is misspelled gets the nearest of the `accepted` names, else `likely` gets `name`.

        Args:
            what: what is missing.
            accepted: names of the column.
            name: the usual name.
            likely: the column that may be meant; None takes the first that is not in `beside`.
            beside: columns of another use.
        """
        others = [column for column in self.names if column not in beside]
        alike = [(column, right) for right in accepted for column in nearest(right, others, 1, likeness=_MISSPELLED)]
        first = likely or next(iter(others), "...")
        pair = max(alike, key=lambda names: likeness(*names), default=(first, name))
        fix = json.dumps(dict([pair]))
        return ConfigError(f"{self.where}: columns {', '.join(self.names)}: {what}; name it: --columns '{fix}'")

    def only_one(self, accepted: Sequence[str], doubt: str, target: str) -> str | None:
        """The only one of the `accepted` columns in the dataset, or the one that `--columns` chose; None without any.

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


def truth_of(value: Any, column: str) -> bool:
    """The truth value in a cell; a csv file holds it as text."""
    found = _TRUTHS.get(value.strip().lower(), value) if isinstance(value, str) else value
    if found not in (0, 1):
        raise RowError(f"no {column}" if value is None else f"{column} must be true or false, not {value!r}")
    return bool(found)


def as_number(value: Any) -> float | None:
    """A finite number, or a text that holds one (as in csv files); None for everything else."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None
