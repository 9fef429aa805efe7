"""Conversations in structured EBFT: the column `remaining_turns` holds the messages after the reference's first answer.

A sample replaces each assistant turn, and the row's other messages follow in between; the reference is the row's own
conversation in the same layout. Messages of other roles have no loss.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from swift.errors import ConfigError
from swift.rollout.sources.multi_turn.chat import HistoryRewritten, continuation

if TYPE_CHECKING:
    from swift.models.template import Message, Template
    from swift.rollout.sources.multi_turn.trajectory import Trajectory

COLUMN = "remaining_turns"


def remaining_turns(columns: Any) -> list[Message]:
    """The messages after the first answer, as the row has them.

    Raises:
        ConfigError: they are no messages that end with the assistant.
    """
    turns = columns.get(COLUMN) or []
    roles = (
        [turn.get("role") if isinstance(turn, dict) else None for turn in turns] if isinstance(turns, list) else [None]
    )
    if turns and (None in roles or roles[0] == "assistant" or roles[-1] != "assistant"):
        raise ConfigError(
            f"--dataset: {COLUMN}: {str(turns)[:60]}: not the messages after an answer; begin with a user's and end "
            "with the assistant's"
        )
    return list(turns)


async def play(trajectory: Trajectory) -> None:
    """Drive one sample: an answer for the reference's, and one for each assistant's message that remains."""
    prompt = trajectory.request.prompt
    assert prompt is not None, "the collector sends requests with their rows"
    await trajectory.answer()
    for message in remaining_turns(prompt.columns):
        if message["role"] == "assistant":
            await trajectory.answer()
        else:
            trajectory.add_messages(dict(message))


def conversation(
    template: Template, messages: Sequence[Message], answer: str, turns: Sequence[Message]
) -> tuple[list[int], list[bool]]:
    """Token ids of a reference of several turns, and which of them the assistant wrote.

    Raises:
        ConfigError: the chat template shows earlier turns differently once later ones follow.
    """
    ids = template.encode_text(answer)
    own = [True] * len(ids)
    chat: list[Message] = [*messages, {"role": "assistant", "content": answer}]
    heard: list[Message] = []
    for message in turns:
        if message["role"] != "assistant":
            heard.append(message)
            continue
        try:
            between = continuation(template, chat, heard, ended=False)
        except HistoryRewritten as error:
            raise ConfigError(
                f"--dataset: {COLUMN}: the chat template rewrites earlier turns, so no sample can be compared; "
                "use another --template"
            ) from error
        own_ids = template.encode_text(message["content"])
        ids, own = [*ids, *between, *own_ids], [*own, *[False] * len(between), *[True] * len(own_ids)]
        chat, heard = [*chat, *heard, message], []
    return ids, own
