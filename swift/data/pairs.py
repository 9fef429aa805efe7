"""Rows of preferences: a prompt with a better and a worse answer (`PairPlan`), or with one answer and a verdict.

A pair is read as its prompt (`messages`), and the columns `chosen`: turns, and `rejected`: a list of turns for each
worse answer. What has a verdict is read as its prompt, and the columns `completion`: turns, and `label`: a truth value.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Any

from swift.data.chats import ANSWERS, ChatPlan
from swift.data.columns import CHATS, PROMPTS, REQUEST, ColumnPlan, as_number, text_of, truth_of
from swift.data.messages import Message, chat_in, is_chat, prompt_of, read_messages
from swift.data.records import RowError
from swift.errors import nearest

CHOSEN = ("chosen", "chosen_response", *ANSWERS)
REJECTED = ("rejected", "rejected_response", "rejected_messages")
LABEL, MARGIN = "label", "margin"

Turns = list[Message]


class PairPlan(ColumnPlan):
    """A prompt, the better answer, and one or several worse ones.

    The better answer is a column, else the final turn of `messages`. An answer is a text, turns, or a whole chat; the
    prompt of whole chats, and of texts without a column for it, is what they begin with in common.
    """

    others_are = "other columns"

    def _choose_prompt(self) -> str:
        rejected = self.only_one(REJECTED, "each could be the rejected answer", "rejected")
        if rejected is None:
            beside = (*CHATS, REQUEST, *PROMPTS, *CHOSEN)
            what = f"none is a rejected answer ({', '.join(REJECTED)})"
            raise self.lacking(what, REJECTED, "rejected", beside=beside)
        self.rejected = rejected
        if "chosen" in self.names and not {*CHATS, REQUEST, *PROMPTS} & {*self.names}:
            return "chosen"
        return super()._choose_prompt()

    def choose(self) -> None:
        """Chooses the columns of the answers."""
        named = [name for name in CHOSEN[:2] if name in self.names]
        if named or self.prompt not in CHATS:
            self.chosen = named[0] if named else self.only_one(ANSWERS, "each could be the chosen answer", "chosen")
        else:
            self.chosen = None  # the final turn of the chat
        if self.chosen is None and self.prompt not in CHATS:
            what = f"none is the chosen answer ({', '.join(CHOSEN)})"
            raise self.lacking(what, CHOSEN, "chosen", beside=(self.prompt, self.rejected))
        self.used += [name for name in (self.chosen, self.rejected) if name and name not in self.used]

    def more_parts(self) -> list[str]:
        """Where the answers come from."""
        return [f"chosen <- {self.chosen or f'final turn of {self.prompt}'}", f"rejected <- {self.rejected}"]

    def parts(self, row: dict[str, Any], system: str | None) -> tuple[list[Message], dict[str, Any]]:
        """The prompt, and the columns `chosen` and `rejected`."""
        prompt, chosen, rejected = self._turns(row)
        prompt = _checked(self.with_system_of(row, prompt, system) if prompt else [])
        margin = {} if row.get(MARGIN) is None else {MARGIN: _number(row[MARGIN])}
        return prompt, {"chosen": chosen, "rejected": rejected, **margin}

    def _turns(self, row: Mapping[str, Any]) -> tuple[Turns, Turns, list[Turns]]:
        """The prompt, the better answer and the worse ones."""
        better = _answer(row.get(self.chosen), self.chosen) if self.chosen else None
        worse = [_answer(one, self.rejected) for one in _several(row.get(self.rejected))]
        if not worse:
            raise RowError(f"no {self.rejected}")
        if self.prompt == self.chosen and isinstance(better, str):
            return _common_text(better, worse, self.rejected)
        prompt = [] if self.prompt == self.chosen else self._prompt_messages(row)
        if better is None:
            prompt, better = prompt[:-1], prompt[-1:]
        chats = [_whole(prompt, one) for one in (better, *worse)]
        if any(map(_is_whole, (better, *worse))):
            prompt = _shared(chats)
        chosen, *rejected = (chat[len(prompt) :] for chat in chats)
        _check_answer(chosen, self.chosen or self.prompt)
        for number, turns in enumerate(rejected, start=1):
            _check_answer(turns, f"{self.rejected} {number}")
            if turns == chosen:
                raise RowError(f"{self.rejected} {number} is the chosen answer")
        return prompt, chosen, rejected


class LabelPlan(ChatPlan):
    """A prompt, an answer, and whether it is a good one."""

    def choose(self) -> None:
        """Chooses the answer column."""
        if LABEL not in self.names:
            raise self.lacking(f"no {LABEL}", [LABEL], LABEL, beside=[self.prompt])
        self.used.append(LABEL)
        super().choose()

    def more_parts(self) -> list[str]:
        """Where answer and verdict come from."""
        answer = f"completion <- {self.answer or f'final turn of {self.prompt}'}"
        return [answer, f"{LABEL} <- {LABEL}"]

    def parts(self, row: dict[str, Any], system: str | None) -> tuple[list[Message], dict[str, Any]]:
        """The prompt, and the columns `completion` and `label`."""
        label = truth_of(row.get(LABEL), LABEL)
        messages = self.with_system_of(row, self._prompt_messages(row), system)
        whole = self.finish(messages, row)
        prompt = messages if self.answer else whole[:-1]
        return _checked(prompt), {"completion": whole[len(prompt) :], LABEL: label}


def pairs_or_labels(columns: Sequence[str], renames: Mapping[str, str], **named: Any) -> ColumnPlan:
    """The plan of a dataset for KTO: a verdict per row, or pairs, of which each answer has one."""
    names = {renames.get(name, name) for name in columns}
    labelled = LABEL in names or (not names & {*REJECTED} and bool(nearest(LABEL, names, likeness=0.75)))
    return (LabelPlan if labelled else PairPlan)(columns, renames, **named)


def _several(value: Any) -> list[Any]:
    """Each answer of a cell that holds one, or a list of them."""
    value = chat_in(value)
    if value is None:
        return []
    return value if isinstance(value, list) and not is_chat(value) else [value]


def _answer(value: Any, column: str) -> str | Turns:
    """A text, or turns: those of the answer, or a whole chat."""
    value = chat_in(value)
    if value is None:
        raise RowError(f"no {column}")
    return read_messages(value, column) if isinstance(value, list) else text_of(value, column)


def _checked(prompt: Turns) -> Turns:
    """The prompt, which ends where the assistant is to speak."""
    if not prompt:
        raise RowError("no prompt before the answers")
    if prompt[-1]["role"] == "assistant":
        raise RowError("the prompt ends with an assistant turn; the answers begin there")
    return prompt_of(prompt)


def _check_answer(turns: Turns, column: str) -> None:
    if not turns or turns[-1]["role"] != "assistant":
        raise RowError(f"{column} has no final assistant turn of its own")


def _in_common(sequences: Sequence[Sequence[Any]]) -> list[Any]:
    """The items that sequences begin with in common."""
    same = takewhile(lambda items: all(item == items[0] for item in items), zip(*sequences, strict=False))
    return [items[0] for items in same]


def _shared(chats: Sequence[Turns]) -> Turns:
    """The turns that chats begin with in common, up to where the assistant speaks."""
    shared = _in_common(chats)
    while shared and shared[-1]["role"] == "assistant":
        shared.pop()
    return shared


def _is_whole(answer: str | Turns | None) -> bool:
    return isinstance(answer, list) and answer[0]["role"] != "assistant"


def _whole(prompt: Turns, answer: str | Turns) -> Turns:
    if isinstance(answer, str):
        return [*prompt, {"role": "assistant", "content": answer}]
    return answer if _is_whole(answer) else [*prompt, *answer]


def _common_text(better: str, worse: Sequence[str | Turns], column: str) -> tuple[Turns, Turns, list[Turns]]:
    """A pair of texts whose prompt is what they begin with in common, up to a space as TRL has it."""
    if not all(isinstance(one, str) for one in worse):
        raise RowError(f"chosen is text and {column} is a chat; make them the same")
    texts = [better, *map(str, worse)]
    prompt = "".join(_in_common(texts))
    prompt = prompt[: prompt.rfind(" ") + 1]
    if not prompt.strip():
        raise RowError(f"no prompt: chosen and {column} begin with nothing in common; add a column prompt")
    answers = [text_of(text[len(prompt) :], "answer") for text in texts]
    chosen, *rejected = ([{"role": "assistant", "content": text}] for text in answers)
    return [{"role": "user", "content": prompt}], chosen, rejected


def _number(value: Any) -> float:
    number = as_number(value)
    if number is None:
        raise RowError(f"{MARGIN} must be a number, not {value!r}")
    return number
