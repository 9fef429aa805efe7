"""Rows of preferences: a prompt with a chosen and a rejected answer (`PairPlan`), or with one answer and a label.

A pair is read as its prompt (`messages`), and the columns `chosen`: turns, and `rejected`: a list of turns for each
rejected answer. A row with a label is read as its prompt, and the columns `completion`: turns, and `label`: a truth
value.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Any

from swift.data.chats import ANSWERS, ChatPlan
from swift.data.columns import CHATS, PROMPTS, REQUEST, ColumnPlan, as_number, truth_of
from swift.data.messages import Message, chat_in, is_chat, prompt_of, read_messages, text_of, with_system
from swift.data.records import RowError
from swift.errors import nearest

CHOSEN = ("chosen", "chosen_response", *ANSWERS)
REJECTED = ("rejected", "rejected_response", "rejected_messages")
LABEL, MARGIN = "label", "margin"

Turns = list[Message]


class PairPlan(ColumnPlan):
    """A prompt, the chosen answer, and one or several rejected ones.

    The chosen answer is a column, else the final turn of `messages`. An answer is a text, turns, or a whole chat; the
    prompt of whole chats, and of texts without a prompt column, is their common beginning.
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
        chosen = self.chosen or f"final turn of {self.prompt}"
        self.more_mappings = [f"chosen <- {chosen}", f"rejected <- {self.rejected}"]

    def parts(self, row: dict[str, Any], system: str | None) -> tuple[list[Message], dict[str, Any]]:
        """The prompt, and the columns `chosen` and `rejected`."""
        prompt, chosen, rejected = self._turns(row)
        prompt = _checked(with_system(prompt, row.get("system"), system) if prompt else [])
        margin = {} if row.get(MARGIN) is None else {MARGIN: _number(row[MARGIN])}
        return prompt, {"chosen": chosen, "rejected": rejected, **margin}

    def _turns(self, row: Mapping[str, Any]) -> tuple[Turns, Turns, list[Turns]]:
        """The prompt, the chosen answer and the rejected ones."""
        sees = self.images is not None
        chosen_answer = _answer(row.get(self.chosen), self.chosen, sees) if self.chosen else None
        rejected_answers = [_answer(answer, self.rejected, sees) for answer in _answers_in(row.get(self.rejected))]
        if not rejected_answers:
            raise RowError(f"no {self.rejected}")
        if self.prompt == self.chosen and isinstance(chosen_answer, str):
            return _split_texts(chosen_answer, rejected_answers, self.rejected)
        prompt = [] if self.prompt == self.chosen else self._prompt_messages(row)
        if chosen_answer is None:
            prompt, chosen_answer = prompt[:-1], prompt[-1:]
        chats = [_whole_chat(prompt, answer) for answer in (chosen_answer, *rejected_answers)]
        if any(map(_is_whole_chat, (chosen_answer, *rejected_answers))):
            prompt = _common_turns(chats)
        chosen, *rejected = (chat[len(prompt) :] for chat in chats)
        _check_answer(chosen, self.chosen or self.prompt)
        for number, turns in enumerate(rejected, start=1):
            _check_answer(turns, f"{self.rejected} {number}")
            if turns == chosen:
                raise RowError(f"{self.rejected} {number} is the chosen answer")
        return prompt, chosen, rejected


class LabelPlan(ChatPlan):
    """A prompt, an answer, and a label: whether the answer is desirable."""

    def choose(self) -> None:
        """Chooses the answer column."""
        if LABEL not in self.names:
            raise self.lacking(f"no {LABEL}", [LABEL], LABEL, beside=[self.prompt])
        self.used.append(LABEL)
        super().choose()
        answer = self.answer or f"final turn of {self.prompt}"
        self.more_mappings = [f"completion <- {answer}", f"{LABEL} <- {LABEL}"]

    def parts(self, row: dict[str, Any], system: str | None) -> tuple[list[Message], dict[str, Any]]:
        """The prompt, and the columns `completion` and `label`."""
        label = truth_of(row.get(LABEL), LABEL)
        messages = with_system(self._prompt_messages(row), row.get("system"), system)
        chat = self.with_answer(messages, row)
        prompt = messages if self.answer else chat[:-1]
        return _checked(prompt), {"completion": chat[len(prompt) :], LABEL: label}


def pairs_or_labels(columns: Sequence[str], renames: Mapping[str, str], **named: Any) -> ColumnPlan:
    """The plan of a dataset for KTO: a label per row, or pairs, whose answers imply their labels."""
    names = {renames.get(name, name) for name in columns}
    labelled = LABEL in names or (not names & {*REJECTED} and bool(nearest(LABEL, names, likeness=0.75)))
    return (LabelPlan if labelled else PairPlan)(columns, renames, **named)


def _answers_in(value: Any) -> list[Any]:
    """Each answer of a cell that holds one, or a list of them."""
    value = chat_in(value)
    if value is None:
        return []
    return value if isinstance(value, list) and not is_chat(value) else [value]


def _answer(value: Any, column: str, sees: bool) -> str | Turns:
    """A text, or turns: those of the answer, or a whole chat. sees: whether its prompt may have images."""
    value = chat_in(value)
    if value is None:
        raise RowError(f"no {column}")
    return read_messages(value, column, images=sees) if isinstance(value, list) else text_of(value, column)


def _checked(prompt: Turns) -> Turns:
    """The prompt, which must end before an assistant turn."""
    if not prompt:
        raise RowError("no prompt before the answers")
    if prompt[-1]["role"] == "assistant":
        raise RowError("the prompt ends with an assistant turn; the answers begin there")
    return prompt_of(prompt)


def _check_answer(turns: Turns, column: str) -> None:
    if not turns or turns[-1]["role"] != "assistant":
        raise RowError(f"{column} has no final assistant turn of its own")
    if any(isinstance(turn["content"], list) for turn in turns):
        raise RowError(f"{column}: an answer is text; images belong to the prompt, the same in all answers")


def _in_common(sequences: Sequence[Sequence[Any]]) -> list[Any]:
    """The items that sequences begin with in common."""
    same = takewhile(lambda items: all(item == items[0] for item in items), zip(*sequences, strict=False))
    return [items[0] for items in same]


def _common_turns(chats: Sequence[Turns]) -> Turns:
    """The turns that chats begin with in common, without assistant turns at their end."""
    common = _in_common(chats)
    while common and common[-1]["role"] == "assistant":
        common.pop()
    return common


def _is_whole_chat(answer: str | Turns | None) -> bool:
    return isinstance(answer, list) and answer[0]["role"] != "assistant"


def _whole_chat(prompt: Turns, answer: str | Turns) -> Turns:
    if isinstance(answer, str):
        return [*prompt, {"role": "assistant", "content": answer}]
    return answer if _is_whole_chat(answer) else [*prompt, *answer]


def _split_texts(
    chosen_text: str, rejected_texts: Sequence[str | Turns], column: str
) -> tuple[Turns, Turns, list[Turns]]:
    """The prompt and the answers of texts whose prompt is their common beginning, up to a space as in TRL."""
    if not all(isinstance(text, str) for text in rejected_texts):
        raise RowError(f"chosen is text and {column} is a chat; make them the same")
    texts = [chosen_text, *map(str, rejected_texts)]
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
