"""Position of the scores of a process reward model: the last token of the separator after each step.

The layout is that of TRL's former PRMTrainer: prompt, then for each step its tokens and those of the separator, each
text tokenised on its own. Training (`swift.trainers.preferences.steps`) and rewards (`swift.rewards.models`) share it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from swift.models.template import Template

SEPARATOR = "step_separator"
"""The key of a model's config that holds the text between steps."""
DEFAULT_SEPARATOR = "\n"


def encode_steps(
    template: Template, prompt: Sequence[dict[str, Any]], steps: Sequence[str], separator: str, tools: Any = None
) -> tuple[list[int], list[int]]:
    """Token ids of a prompt with the steps of its answer, and the index of the token that scores each step.

    Raises:
        RefusedChat: the template refuses the prompt.
        ValueError: the tokenizer has no tokens for the separator.
    """
    ids = template.encode_prompt(prompt, tools)
    between = template.encode_text(separator)
    if not between:
        raise ValueError(f"no token stands for {separator!r}")
    ends = []
    for step in steps:
        ids += template.encode_text(step) + between
        ends.append(len(ids) - 1)
    return ids, ends


def steps_of(text: str, separator: str) -> list[str]:
    r"""The steps of an answer; one without a separator is a single step.

    >>> steps_of("a = 1\n\nb = 2\n", "\n")
    ['a = 1', 'b = 2']
    """
    return [step for step in text.split(separator) if step.strip()] or [text]
