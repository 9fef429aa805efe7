"""Messages to token ids and back: the one place where a chat becomes tokens.

A prompt is rendered by the tokenizer's own chat template and tokenised once. For supervised data the chat
is tokenised piece by piece, cut where an assistant turn begins and ends, so that

* the tokens before an assistant turn are exactly the prompt the model is given when it is sampled, and
* `assistant_mask` marks exactly the tokens the model is to produce: its words and its end token.

The cuts come from `{% generation %}` marks when the template has them; otherwise from rendering the chat
turn by turn, which is only accepted when each rendering is a prefix of the whole.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from swift.errors import ConfigError
from swift.models.source import read_json
from swift.models.templates import TEMPLATES

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Message = dict[str, Any]

_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
_PROBE_ANSWER = "a probe answer"
_PROBE: list[Message] = [
    {"role": "user", "content": "a probe question"},
    {"role": "assistant", "content": _PROBE_ANSWER},
]


class RefusedChat(ConfigError):
    """The chat template raised an error on these messages: a fault of the row, not of the template."""


class Template:
    """A tokenizer seen as a chat.

    Args:
        tokenizer: with a chat template.
        stop_token_ids: further end tokens, such as those of the model's generation_config.json.

    Raises:
        ConfigError: the tokenizer has no chat template.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stop_token_ids: Iterable[int] = ()) -> None:
        if not tokenizer.chat_template:
            raise ConfigError(
                f"--template: none: the tokenizer of {tokenizer.name_or_path or 'the model'} has no chat "
                f"template; valid: {', '.join(TEMPLATES)}, or a Jinja file"
            )
        self.tokenizer = tokenizer
        self._marked = bool(_GENERATION.search(tokenizer.get_chat_template()))
        self.stop_token_ids: tuple[int, ...] = _stop_ids(self, stop_token_ids)
        """Tokens that end a completion, ascending: end of text, end of turn, and those given."""

    @property
    def pad_token_id(self) -> int:
        """The id that fills rows to equal length; never trained on."""
        return int(self.tokenizer.pad_token_id)

    def render(self, messages: Sequence[Message], *, add_generation_prompt: bool = False) -> str:
        """The text of a chat, without tokenising it.

        Raises:
            RefusedChat: the template refuses the messages (unknown role, wrong order, missing content).
        """
        return self._render(messages, add_generation_prompt, marks=False)[0]

    def encode_prompt(self, messages: Sequence[Message]) -> list[int]:
        """Token ids of `messages`, ready for the assistant to continue."""
        return self._tokenize(self.render(messages, add_generation_prompt=True))

    def encode_chat(self, messages: Sequence[Message]) -> tuple[list[int], list[int]]:
        """Token ids of a whole chat, and a mask of equal length: 1 where the assistant speaks.

        The end token of each assistant turn is masked 1, template text after it (such as a newline) 0.

        Raises:
            RefusedChat: the template refuses the messages.
            ConfigError: the template rewrites earlier turns, so that assistant turns cannot be told apart.
        """
        text, spans = self._render(messages, False, marks=self._marked)
        if not self._marked:
            spans = [self._span(messages, index, text) for index in _assistant_turns(messages)]
        return self._encode_pieces(text, [span for span in spans if span[1] > span[0]])

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of token ids, for rewards and people."""
        return str(
            self.tokenizer.decode(
                list(ids), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
            )
        )

    def _tokenize(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"]) if text else []

    def _render(
        self, messages: Sequence[Message], add_generation_prompt: bool, *, marks: bool
    ) -> tuple[str, list[tuple[int, int]]]:
        from jinja2 import TemplateError
        from transformers.utils.chat_template_utils import render_jinja_template

        try:
            rendered, spans = render_jinja_template(
                conversations=[list(messages)],
                chat_template=self.tokenizer.get_chat_template(),
                add_generation_prompt=add_generation_prompt,
                return_assistant_tokens_mask=marks,
                **self.tokenizer.special_tokens_map,
            )
        except (TemplateError, TypeError) as error:
            raise RefusedChat(f"messages: the chat template refuses them: {error}") from error
        return rendered[0], [tuple(span) for span in spans[0]] if marks else []

    def _span(self, messages: Sequence[Message], index: int, text: str) -> tuple[int, int]:
        """Where the assistant turn `index` stands in `text`, [start, end) in characters."""
        before = self.render(messages[:index], add_generation_prompt=True)
        through = self.render(messages[: index + 1])
        if not (text.startswith(through) and through.startswith(before)):
            raise ConfigError(
                f"--template: the chat template of {self.tokenizer.name_or_path}: rewrites earlier turns, so "
                f"the tokens of assistant turn {index} are not certain; use --template chatml, or a template "
                "with {% generation %} marks"
            )
        return len(before), len(through)

    def _encode_pieces(self, text: str, spans: list[tuple[int, int]]) -> tuple[list[int], list[int]]:
        ids: list[int] = []
        mask: list[int] = []
        cursor = 0
        for start, end in spans:
            prompt, answer = self._tokenize(text[cursor:start]), self._tokenize(text[start:end])
            said = _through_last_stop(answer, self.stop_token_ids)
            ids += prompt + answer
            mask += [0] * len(prompt) + [1] * said + [0] * (len(answer) - said)
            cursor = end
        rest = self._tokenize(text[cursor:])
        return ids + rest, mask + [0] * len(rest)


def load_template(tokenizer: PreTrainedTokenizerBase, folder: str | Path | None = None) -> Template:
    """The template of a tokenizer; a model folder's generation_config.json adds its end tokens."""
    stops: list[int] = []
    file = Path(folder) / "generation_config.json" if folder is not None else None
    if file is not None and file.is_file():
        stops = _as_list(read_json(file).get("eos_token_id"))
    return Template(tokenizer, stops)


def _assistant_turns(messages: Sequence[Message]) -> list[int]:
    return [index for index, message in enumerate(messages) if message.get("role") == "assistant"]


def _through_last_stop(ids: list[int], stops: Sequence[int]) -> int:
    """How many leading tokens end with the last stop token; all of them when there is none."""
    ends = [index + 1 for index, token in enumerate(ids) if token in stops]
    return ends[-1] if ends else len(ids)


def _stop_ids(template: Template, given: Iterable[int]) -> tuple[int, ...]:
    """End tokens: the tokenizer's own, those given, and the one the template writes after an answer."""
    stops = {int(token) for token in given}
    if template.tokenizer.eos_token_id is not None:
        stops.add(int(template.tokenizer.eos_token_id))
    _, _, after = template.render(_PROBE).rpartition(_PROBE_ANSWER)
    first = template._tokenize(after)[:1]
    markers = {token for token, added in template.tokenizer.added_tokens_decoder.items() if added.special}
    stops.update(token for token in first if token in markers)
    return tuple(sorted(stops))


def _as_list(value: int | list[int] | None) -> list[int]:
    if value is None:
        return []
    return [value] if isinstance(value, int) else list(value)
