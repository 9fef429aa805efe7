"""Messages to token ids and back. Every chat is tokenised here.

A prompt is rendered by the tokenizer's own chat template and tokenised once. For supervised data the chat
is tokenised piece by piece, cut where an assistant turn begins and ends, so that

* the tokens before an assistant turn are exactly the prompt the model is given when it is sampled, and
* `assistant_mask` marks exactly the tokens the model is to produce: its words and its end token.

The cuts come from `{% generation %}` marks when the template has them; otherwise from rendering the chat
turn by turn, which is only accepted when each rendering is a prefix of the whole.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from swift.data.image_store import images_in
from swift.errors import ConfigError, RefusedChat, first_line, join_problems, nearest
from swift.models.source import read_json
from swift.models.templates import TEMPLATES

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from swift.models.vision import Vision

logger = logging.getLogger("swift.models")

Message = dict[str, Any]

OWN_VARIABLES = frozenset(
    {
        "messages", "conversations", "tools", "add_generation_prompt", "continue_final_message", "chat_template",
        "tokenize", "return_assistant_tokens_mask",
    }
)  # fmt: skip
"""Variables that a rendering sets itself."""

_GENERATION_TAGS = re.compile(r"\{%-?\s*(end)?generation\s*-?%\}")
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
_EMPTY_THOUGHT = re.compile(r"\s*<think>\s*</think>\s*")
_END_TOKENS = 2  # an end token and what a template may write behind it, such as a newline
_PROBE_ANSWER = "a probe answer"
_PROBE: list[Message] = [
    {"role": "user", "content": "a probe question"},
    {"role": "assistant", "content": _PROBE_ANSWER},
]


class Template:
    """A tokenizer seen as a chat.

    Args:
        tokenizer: with a chat template.
        stop_token_ids: further end tokens, such as those of the model's generation_config.json.
        kwargs: variables that the template reads in every rendering, such as `enable_thinking`.
        name: how errors call the template; None: "the chat template of <folder>".

    Raises:
        ConfigError: the tokenizer has no chat template, or a variable is one that swift sets itself.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        stop_token_ids: Iterable[int] = (),
        kwargs: Mapping[str, Any] | None = None,
        name: str | None = None,
    ) -> None:
        if not tokenizer.chat_template:
            raise ConfigError(
                f"--template: none: the tokenizer of {tokenizer.name_or_path or 'the model'} has no chat "
                f"template; valid: {', '.join(TEMPLATES)}, a name of TRL's, or a Jinja file"
            )
        self.tokenizer = tokenizer
        self.name = name or f"the chat template of {tokenizer.name_or_path or 'the model'}"
        self.kwargs = dict(kwargs or {})
        if self.kwargs:
            _check_kwargs(self.kwargs, tokenizer)
        self.vision: Vision | None = None
        """Of a model that sees; its prompts may have images."""
        self.training_template: str | None = None
        """Stands in where the template rewrites earlier turns: the same chat with all turns kept, and marked."""
        self.marked = bool(_GENERATION.search(tokenizer.get_chat_template()))
        stops = {int(token) for token in stop_token_ids}
        if tokenizer.eos_token_id is not None:
            stops.add(int(tokenizer.eos_token_id))
        _, _, after = self.render(_PROBE).rpartition(_PROBE_ANSWER)
        markers = {token for token, added in tokenizer.added_tokens_decoder.items() if added.special}
        stops.update(token for token in self.encode_text(after)[:1] if token in markers)
        self.stop_token_ids: tuple[int, ...] = tuple(sorted(stops))
        """Tokens that end a completion, ascending: the tokenizer's end token, those given, and the special token that
        the template writes after an answer."""

    @property
    def pad_token_id(self) -> int:
        """The id that fills rows to equal length; never trained on."""
        return int(self.tokenizer.pad_token_id)

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = False,
        tools: Sequence[dict[str, Any]] | None = None,
        kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """The text of a chat, without tokenising it.

        Args:
            messages: the chat.
            add_generation_prompt: end with the beginning of an assistant turn.
            tools: functions that the template shows to the model, as JSON schemas.
            kwargs: variables of this rendering; they beat those of the template. Names that swift sets are ignored.

        Raises:
            RefusedChat: the template refuses the messages (unknown role, wrong order, missing content).
        """
        more = {name: value for name, value in (kwargs or {}).items() if name not in OWN_VARIABLES}
        return self._render(messages, add_generation_prompt, marks=False, tools=tools, kwargs=more)[0]

    def encode_prompt(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]] | None = None) -> list[int]:
        """Token ids of `messages`, ready for the assistant to continue; those of images are named (`vision`).

        Raises:
            RefusedChat: the template refuses the messages, or does not show their tools or images.
        """
        self.check_tools(messages, tools)
        return self.encode_pieces([self.render(messages, add_generation_prompt=True, tools=tools)], messages)[0]

    def encode_pieces(self, texts: Sequence[str], messages: Sequence[Message]) -> list[list[int]]:
        """Token ids of the pieces of a rendering of `messages`, each tokenised apart; those of images are named.

        Raises:
            RefusedChat: the template does not show the images, or a text stands for one.
        """
        images = images_in(messages)
        if images and self.vision is not None:
            return self.vision.encode(texts, images)
        pieces = [self.encode_text(text) for text in texts]
        if self.vision is not None:
            self.vision.check_text(chain.from_iterable(pieces))
        return pieces

    def encode_finished(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]] | None = None) -> list[int]:
        """Token ids of a finished chat as reward models read it: as rendered, with an end token where there is none.

        Raises:
            RefusedChat: see `encode_prompt`.
        """
        self.check_tools(messages, tools)
        ids = self.encode_pieces([self.render(messages, tools=tools)], messages)[0]
        if not set(ids[-_END_TOKENS:]) & set(self.stop_token_ids):
            ids.append(int(self.tokenizer.eos_token_id))
        return ids

    def encode_judged(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]] | None = None) -> list[int]:
        """Token ids of what a classifier reads: a prompt ready to be continued, or a chat that ends with an answer.

        Raises:
            RefusedChat: see `encode_prompt`.
        """
        if messages[-1]["role"] == "assistant":
            return self.encode_finished(messages, tools)
        return self.encode_prompt(messages, tools)

    def encode_chat(
        self,
        messages: Sequence[Message],
        tools: Sequence[dict[str, Any]] | None = None,
        *,
        everything: bool = False,
        empty_thoughts: bool = True,
        weigh: Callable[[str], list[tuple[str, int]]] | None = None,
    ) -> tuple[list[int], list[int]]:
        """Token ids of a whole chat, and a mask of equal length: 1 on tokens of the assistant, or their weight.

        The end token of each assistant turn is masked 1, template text after it (such as a newline) 0; all of a turn
        whose `loss` is false is 0.

        Args:
            messages: the chat.
            tools: as for `render`.
            everything: mask with 1 all but turns whose `loss` is false.
            empty_thoughts: if false, `<think></think>` with nothing but white space in it, at the beginning of a turn,
                is masked 0.
            weigh: parts an answer, and gives each part a weight; not of a turn that says whether it is trained on.

        Raises:
            RefusedChat: the template refuses the messages, or does not show their tools or images.
            ConfigError: the template rewrites earlier turns, so that assistant turns cannot be located.
        """
        self.check_tools(messages, tools)
        turns = _assistant_turns(messages)
        if everything and all(messages[index].get("loss", True) for index in turns):
            (ids,) = self.encode_pieces([self.render(messages, tools=tools)], messages)
            return ids, [1] * len(ids)
        if self.marked:
            text, spans = self._render(messages, False, marks=True, tools=tools)
        else:
            text = self.render(messages, tools=tools)
            try:
                spans = [self._span(messages, index, text, tools) for index in turns]
            except ConfigError:
                if self.training_template is None:
                    raise
                jinja = self.training_template
                text, spans = self._render(messages, False, marks=True, tools=tools, jinja=jinja)
        learnt = [messages[index].get("loss", True) for index in turns]
        if len(spans) != len(turns):
            if not all(learnt):
                raise RefusedChat(f"messages: loss: the chat template marks {len(spans)} parts in {len(turns)} turns")
            learnt = [True] * len(spans)
        cuts = [0, *chain.from_iterable(spans), len(text)]
        texts = [text[start:end] for start, end in pairwise(cuts)]
        if weigh is None:
            pieces = self.encode_pieces(texts, messages)
            return self._joined(pieces, texts[1::2], learnt, empty_thoughts, int(everything))
        weighed = [messages[index].get("loss") is None for index in turns]
        weighed = weighed if len(weighed) == len(spans) else [True] * len(spans)
        parts = [weigh(text) if place % 2 and weighed[place // 2] else [(text, 1)] for place, text in enumerate(texts)]
        encoded = iter(self.encode_pieces([part for each in parts for part, _ in each], messages))
        stops = self.stop_token_ids  # an end token is no part of a call
        found = [
            [(token, 1 if token in stops else weight) for _, weight in each for token in next(encoded)]
            for each in parts
        ]
        pieces = [[token for token, _ in each] for each in found]
        ids, mask = self._joined(pieces, texts[1::2], learnt, empty_thoughts, int(everything))
        weights = [weight for each in found for _, weight in each]
        return ids, [trained * weight for trained, weight in zip(mask, weights, strict=True)]

    def encode_document(self, content: str | Sequence[Mapping[str, Any]]) -> list[int]:
        """Token ids of a text without a chat template, or of its parts, texts and images, and the end of a text.

        Raises:
            RefusedChat: a text stands for an image, or the processor cannot take the images.
        """
        if isinstance(content, str):
            ids = list(self.tokenizer(content)["input_ids"])
            if self.vision is not None:
                self.vision.check_text(ids)
        else:
            assert self.vision is not None, "rows have images if the model sees"
            text = "".join(self.vision.mark if part["type"] == "image" else part["text"] for part in content)
            ids = self._opening() + self.vision.encode([text], images_in([{"content": content}]))[0]
        end = self.tokenizer.eos_token_id
        return ids if ids[-1:] == [end] else [*ids, end]

    def _opening(self) -> list[int]:
        """The tokens that the tokenizer puts before a text."""
        whole, bare = list(self.tokenizer("a")["input_ids"]), self.encode_text("a")
        return whole[: next(start for start in range(len(whole)) if whole[start : start + len(bare)] == bare)]

    def check_tools(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]] | None) -> None:
        """Refuse tools, or calls of them, that the template would silently omit (RefusedChat)."""
        jinja = str(self.tokenizer.get_chat_template())
        for wanted, name in ((bool(tools), "tools"), (any(turn.get("tool_calls") for turn in messages), "tool_calls")):
            if wanted and name not in jinja:
                raise RefusedChat(f"messages: the chat template shows no {name}; use --template with one that does")

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of token ids, for rewards and people."""
        return str(
            self.tokenizer.decode(
                list(ids), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
            )
        )

    def encode_text(self, text: str) -> list[int]:
        """Token ids of a text as it is, such as a part of a rendering."""
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"]) if text else []

    def _render(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool,
        *,
        marks: bool,
        tools: Sequence[dict[str, Any]] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        jinja: str | None = None,
    ) -> tuple[str, list[tuple[int, int]]]:
        from swift.models.rendering import render

        jinja = jinja or str(self.tokenizer.get_chat_template())
        unsupported = "developer" not in jinja and any(message.get("role") == "developer" for message in messages)
        variables = {
            "messages": _without_developer(messages) if unsupported else list(messages),
            "tools": list(tools) if tools else None,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
            **self.tokenizer.special_tokens_map,
            **self.kwargs,
            **(kwargs or {}),
        }
        try:
            return render(jinja, variables, marks=marks)
        except Exception as error:  # a template is a program of the user's
            raise RefusedChat(f"messages: {self.name} refuses them: {first_line(error)}") from error

    def _span(
        self, messages: Sequence[Message], index: int, text: str, tools: Sequence[dict[str, Any]] | None
    ) -> tuple[int, int]:
        """Where the assistant turn `index` stands in `text`, [start, end) in characters."""
        before = self.render(messages[:index], add_generation_prompt=True, tools=tools)
        through = self.render(messages[: index + 1], tools=tools)
        if not (text.startswith(through) and through.startswith(before)):
            raise ConfigError(
                f"--template: the chat template of {self.tokenizer.name_or_path}: rewrites earlier turns, so "
                f"the tokens of assistant turn {index} are not certain; use --template chatml, or a template "
                "with {% generation %} marks"
            )
        return len(before), len(through)

    def _joined(
        self,
        pieces: Sequence[list[int]],
        answers: Sequence[str],
        learnt: Sequence[bool],
        empty_thoughts: bool,
        between: int,
    ) -> tuple[list[int], list[int]]:
        """Ids and mask of a chat.

        Args:
            pieces: ids of what stands before the first answer, of that answer, and so on to what stands after the last.
            answers: their texts.
            learnt: whether an answer is trained on.
            empty_thoughts: see `encode_chat`.
            between: the mask of what is no answer.
        """
        ids: list[int] = []
        mask: list[int] = []
        for prompt, answer, text, learns in zip(pieces[::2], pieces[1::2], answers, learnt, strict=False):
            num_trained = _through_last_stop(answer, self.stop_token_ids) if learns else 0
            skipped = 0
            if not empty_thoughts and (thought := _EMPTY_THOUGHT.match(text)):
                skipped = min(num_trained, _common_prefix(answer, self.encode_text(thought.group())))
            ids += prompt + answer
            mask += [between] * len(prompt) + [0] * skipped + [1] * (num_trained - skipped)
            mask += [between if learns else 0] * (len(answer) - num_trained)
        return ids + pieces[-1], mask + [between] * len(pieces[-1])


class PlainText(Template):
    """A tokenizer for texts, without a chat template. ends: whether an end-of-text token must be there."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, ends: bool = True) -> None:
        if ends and tokenizer.eos_token_id is None:
            raise ConfigError(
                f"--model: {tokenizer.name_or_path}: its tokenizer has no end-of-text token to put between documents"
            )
        self.tokenizer, self.kwargs = tokenizer, {}
        self.training_template, self.marked, self.vision = None, False, None
        self.stop_token_ids = () if tokenizer.eos_token_id is None else (int(tokenizer.eos_token_id),)

    def encode_judged(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]] | None = None) -> list[int]:
        """The contents of the messages, one after the other, with the tokens that the tokenizer puts around a text."""
        if tools or any(turn.get("tool_calls") for turn in messages):
            raise RefusedChat("messages: a text without a chat template shows no tools")
        return list(self.tokenizer("".join(turn["content"] for turn in messages))["input_ids"])


def load_template(
    tokenizer: PreTrainedTokenizerBase,
    folder: str | Path | None = None,
    kwargs: Mapping[str, Any] | None = None,
    name: str | None = None,
    more_stops: Iterable[int] = (),
) -> Template:
    """The template of a tokenizer; a model folder adds its end tokens, and more_stops are further ones. See `Template`.

    They are the `eos_token_id` (a token id, several, or none) of generation_config.json or, without that file, of
    config.json, as in transformers.
    """
    files = [Path(folder) / name for name in ("generation_config.json", "config.json")] if folder is not None else []
    stops: list[int] = []
    file = next((path for path in files if path.is_file()), None)
    if file is not None:
        value = read_json(file).get("eos_token_id")
        stops = [] if value is None else value if isinstance(value, list) else [value]
        if wrong := [token for token in stops if type(token) is not int or token < 0]:
            raise ConfigError(f"--model: {file}: eos_token_id {wrong[0]!r}: no token id; write whole numbers from 0")
    return Template(tokenizer, [*stops, *more_stops], kwargs, name)


def _check_kwargs(kwargs: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase) -> None:
    """Refuses variables that swift sets; logs those that the template never reads."""
    flag = "--chat_template_kwargs"
    own = [name for name in kwargs if name in OWN_VARIABLES]
    join_problems([f"{flag}: {name}: is set by swift itself; leave it out" for name in own])
    read = variables_of(str(tokenizer.get_chat_template())) if kwargs else None
    for name in kwargs:
        if read is not None and name not in read:  # not an error: one command serves models with and without it
            near = nearest(name, sorted(read - OWN_VARIABLES))
            end = f"; nearest: {', '.join(near)}" if near else ""
            logger.warning("note: %s: %s: the chat template does not read it, so it changes nothing%s", flag, name, end)


def variables_of(template: str) -> set[str] | None:
    """Names of the variables that a Jinja text reads; None if it cannot be parsed."""
    from jinja2 import Environment, TemplateError
    from jinja2.meta import find_undeclared_variables

    plain = _GENERATION_TAGS.sub("", template)
    try:
        return find_undeclared_variables(Environment(extensions=["jinja2.ext.loopcontrols"]).parse(plain))
    except TemplateError:
        return None


def _without_developer(messages: Sequence[Message]) -> list[Message]:
    """The chat for a template without developer messages: they become system messages, adjacent ones are joined."""
    chat: list[Message] = []
    for turn in messages:
        if turn.get("role") not in ("system", "developer"):
            chat.append(turn)
        elif chat and chat[-1].get("role") == "system":
            chat[-1] = {**chat[-1], "content": f"{chat[-1].get('content') or ''}\n\n{turn.get('content') or ''}"}
        else:
            chat.append({**turn, "role": "system"})
    return chat


def _assistant_turns(messages: Sequence[Message]) -> list[int]:
    return [index for index, message in enumerate(messages) if message.get("role") == "assistant"]


def _common_prefix(ids: Sequence[int], others: Sequence[int]) -> int:
    return next((index for index, (a, b) in enumerate(zip(ids, others, strict=False)) if a != b), len(others))


def _through_last_stop(ids: list[int], stops: Sequence[int]) -> int:
    """Number of tokens up to and including the last stop token; all of them when there is none."""
    ends = [index + 1 for index, token in enumerate(ids) if token in stops]
    return ends[-1] if ends else len(ids)
