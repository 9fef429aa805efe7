"""Tokens between an answer of the model and its next turn.

Tokens in, tokens out: the ids of a trajectory so far are kept, and only the template's text after an answer is
tokenised. Earlier turns are never encoded again.
"""

from __future__ import annotations

import functools
import secrets
from collections.abc import Sequence

from swift.models.template import Message, Template

_ANSWER = f"\ue000the answer of the policy {secrets.token_hex(8)}\ue000"
"""Placeholder of the last answer in a rendering, with private characters that templates do not change."""


class HistoryRewritten(ValueError):
    """The template renders earlier turns differently if later ones follow, so that the sampled tokens are no prefix."""


def continuation(
    template: Template,
    messages: Sequence[Message],
    new: Sequence[Message],
    ended: bool,
    tools: Sequence[dict[str, object]] | None = None,
) -> list[int]:
    """Ids between the last sampled token of an answer and the first of the next one.

    Args:
        template: the policy's chat template.
        messages: the chat up to the answer, which is its last message.
        new: messages that follow: tool results, an observation, a user's turn.
        ended: whether the answer ends with its end token; if not, the template's is added.
        tools: tools of the prompt.

    Raises:
        HistoryRewritten: the rendering of `messages` changes if `new` follows.
        RefusedChat: the template refuses the messages.
    """
    render = functools.partial(template.render, tools=tools)
    answer = {**messages[-1], "content": _ANSWER}
    _, found, after = render([*messages[:-1], answer, *new], add_generation_prompt=True).rpartition(_ANSWER)
    # some templates write text before the last answer only, such as empty thoughts
    sampled = render(messages[:-1], add_generation_prompt=True) + messages[-1]["content"]
    if not found or not render([*messages, *new]).startswith((sampled, render(messages))):
        raise HistoryRewritten
    ids = template.encode_text(after)
    if ended and ids and ids[0] in template.stop_token_ids:
        ids = ids[1:]
    return ids
