"""Transforms of datasets: rows of common formats become prompts with a reference or documents, for EBFT, or chats.

A transform takes a row and returns rows; nothing else of the row is kept. Rows that it refuses are skipped and counted
like any bad row.

    prompts     messages, ground_truth (text of the reference), remaining_turns (later turns of the chat)
    documents   text, or prompt and completion, or messages
    chats       messages

`TRANSFORMS` holds those of `--dataset_transform`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from swift.data.columns import CHATS
from swift.data.messages import Message, check_media, read_messages, text_of
from swift.data.records import BadRow, RawRow, Record, RowError

Row = dict[str, Any]
Transform = Callable[[Mapping[str, Any]], list[Row]]

QUESTIONS, ANSWERS = ("input", "prompt", "question"), ("output", "completion", "answer")
"""Columns of a pair; the first that has a value is used."""

THOUGHTS = (("<think>", "</think>"), ("<reasoning>", "</reasoning>"), ("<|begin_of_thought|>", "<|end_of_thought|>"))
"""Tags around the thoughts of an assistant turn."""


# --- prompts with a reference ----------------------------------------------------------------------------------------


def opencode(row: Mapping[str, Any]) -> list[Row]:
    """A task in `input` and its program in `output`, as nvidia/OpenCodeInstruct has them."""
    question, answer = (text_of(row.get(name), name) for name in ("input", "output"))
    return [{"messages": [{"role": "user", "content": question}], "ground_truth": answer}]


def chat_multiturn(row: Mapping[str, Any]) -> list[Row]:
    """The first assistant turn is the reference; the turns after it, up to the last one, are `remaining_turns`."""
    messages = _chat(row)
    turns = _turns(messages)
    first, last = turns[0], turns[-1]
    rest = messages[first + 1 : last + 1]
    if rest and rest[0]["role"] == "assistant":
        raise RowError("two assistant turns in a row")
    return [_prompt(messages, first) | {"remaining_turns": rest}]


def chat_multiturn_last(row: Mapping[str, Any]) -> list[Row]:
    """The last assistant turn is the reference."""
    messages = _chat(row)
    return [_prompt(messages, _turns(messages)[-1])]


def chat_multiturn_all(row: Mapping[str, Any]) -> list[Row]:
    """One row per assistant turn."""
    messages = _chat(row)
    return [_prompt(messages, turn) for turn in _turns(messages)]


def reasoning_split_thinking(row: Mapping[str, Any]) -> list[Row]:
    """Thoughts of assistant turns move to `reasoning_content`; the reference has its own between <think> tags."""
    messages = [_split(turn) for turn in _chat(row)]
    (found,) = chat_multiturn_last({"messages": messages})
    if thought := messages[_turns(messages)[-1]].get("reasoning_content"):
        found["ground_truth"] = f"<think>\n{thought}\n</think>\n\n{found['ground_truth']}"
    return [found]


def reasoning_answer_only(row: Mapping[str, Any]) -> list[Row]:
    """The last assistant turn without its thoughts is the reference."""
    (found,) = chat_multiturn_last(row)
    found["ground_truth"] = text_of(_without_thoughts(found["ground_truth"]), "the answer behind the thoughts")
    return [found]


# --- documents -------------------------------------------------------------------------------------------------------


def strided_text(row: Mapping[str, Any]) -> list[Row]:
    """A document in `text`."""
    return [{"text": text_of(row.get("text"), "text")}]


def strided_structured(row: Mapping[str, Any]) -> list[Row]:
    """A prompt in input, prompt or question and a completion in output, completion or answer."""
    return [{"prompt": _first(row, QUESTIONS), "completion": _first(row, ANSWERS)}]


def strided_chat(row: Mapping[str, Any]) -> list[Row]:
    """A chat; blocks begin in assistant turns."""
    messages = _chat(row)
    _turns(messages)
    return [{"messages": messages}]


def strided_reasoning(row: Mapping[str, Any]) -> list[Row]:
    """A chat of which only the last assistant turn, with its thoughts, is trained on."""
    messages = _chat(row)
    last = _turns(messages)[-1]
    before = [turn | {"loss": False} if turn["role"] == "assistant" else turn for turn in messages[:last]]
    return [{"messages": [*before, messages[last]]}]


def strided(row: Mapping[str, Any]) -> list[Row]:
    """`strided_text`, `strided_chat` or `strided_structured`, by the columns of the row."""
    if row.get("text") is not None:
        return strided_text(row)
    return strided_chat(row) if any(row.get(name) is not None for name in CHATS) else strided_structured(row)


# --- chats -----------------------------------------------------------------------------------------------------------


def alpaca(row: Mapping[str, Any]) -> list[Row]:
    """An instruction, perhaps with an input, which stays apart for templates such as Alpaca's, and its output."""
    texts = {name: text_of(row.get(name), name) for name in ("instruction", "output")}
    more = {name: text_of(row[name], name) for name in ("input", "system") if row.get(name)}
    given = {"input": more["input"]} if "input" in more else {}
    system = [{"role": "system", "content": more["system"]}] if "system" in more else []
    turns = [
        {"role": "user", "content": texts["instruction"], **given},
        {"role": "assistant", "content": texts["output"]},
    ]
    return [{"messages": [*system, *turns]}]


PROMPTS: dict[str, Transform] = {
    "opencode": opencode,
    "chat_multiturn": chat_multiturn,
    "chat_multiturn_last": chat_multiturn_last,
    "chat_multiturn_all": chat_multiturn_all,
    "reasoning": chat_multiturn_last,
    "reasoning_split_thinking": reasoning_split_thinking,
    "reasoning_answer_only": reasoning_answer_only,
}
DOCUMENTS: dict[str, Transform] = {
    "strided": strided,
    "strided_text": strided_text,
    "strided_structured": strided_structured,
    "strided_chat": strided_chat,
    "strided_reasoning": strided_reasoning,
}
TRANSFORMS = PROMPTS | DOCUMENTS | {"alpaca": alpaca}
"""By their names."""


def transformed(records: Iterable[Record], name: str, renames: Mapping[str, str]) -> Iterator[Record]:
    """The rows that a transform makes of others, whose columns `--columns` renames first."""
    for record in records:
        if isinstance(record, BadRow):
            yield record
            continue
        values: Row = {}
        for column, value in record.values.items():
            if value is not None or renames.get(column, column) not in values:
                values[renames.get(column, column)] = value
        try:
            check_media(values, [])
            made = TRANSFORMS[name](values)
        except RowError as error:
            yield BadRow(record.origin, str(error))
            continue
        yield from (RawRow(row, record.origin) for row in made)


def _chat(row: Mapping[str, Any]) -> list[Message]:
    name = next((name for name in CHATS if row.get(name) is not None), CHATS[0])
    if row.get(name) is None:
        raise RowError("no messages")
    return read_messages(row[name], name)


def _turns(messages: list[Message]) -> list[int]:
    """Indexes of the assistant turns."""
    found = [index for index, turn in enumerate(messages) if turn["role"] == "assistant"]
    if not found:
        raise RowError("no assistant turn")
    return found


def _prompt(messages: list[Message], turn: int) -> Row:
    """The chat before an assistant turn, and its text."""
    return {"messages": messages[:turn], "ground_truth": text_of(messages[turn]["content"], "the assistant turn")}


def _first(row: Mapping[str, Any], names: tuple[str, ...]) -> str:
    name = next((name for name in names if row.get(name) is not None), None)
    if name is None:
        raise RowError(f"none of {', '.join(names)}")
    return text_of(row[name], name)


def _split(turn: Message) -> Message:
    if turn["role"] != "assistant" or "reasoning_content" in turn:
        return turn
    for opening, closing in THOUGHTS:
        text = turn["content"] if opening in turn["content"] else opening + turn["content"]  # the prompt may open it
        before, _, rest = text.partition(opening)
        thought, end, answer = rest.partition(closing)
        if end:
            return turn | {"reasoning_content": thought.strip(), "content": (before + answer).strip()}
    return turn


def _without_thoughts(text: str) -> str:
    for opening, closing in THOUGHTS:
        text = re.sub(f"{re.escape(opening)}.*?{re.escape(closing)}\\s*", "", text, flags=re.DOTALL)
        text = text.rpartition(closing)[2]  # the prompt may have opened it
    return text.strip()
