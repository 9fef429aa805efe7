"""A trajectory: one sample of several turns, as token ids from the first prompt to the last answer.

    prompt | answer | messages of the environment | answer | ...
             mask 1   mask 0                        mask 1

The prompt of a turn is all ids so far, so that a prefix cache applies. Ids and log-probs of answers are those of the
engine; all other tokens are from the chat template, and masked.
"""

from __future__ import annotations

import asyncio
import bisect
import contextlib
import copy
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import takewhile
from typing import Any, Literal, NoReturn

from swift.errors import ConfigError, RefusedChat
from swift.models.template import Message, Template
from swift.models.vision import has_images
from swift.rollout.seeds import seed_of
from swift.rollout.sources.multi_turn.chat import HistoryRewritten, continuation
from swift.types import Completion, Episode, FinishReason, Request

LengthScope = Literal["per_round", "total"]
OnPrefixBreak = Literal["exclude", "truncate"]

REWRITTEN = "rollout/history_rewritten"
"""Metric: whether earlier turns of a sample were rewritten."""
OUT_OF_TURNS = "rollout/out_of_turns"
"""Metric: whether a sample ended because of the maximum number of answers."""

MAX_CHARACTER_TOKENS = 4
"""Maximum number of tokens per character; within a character more tokens can decode to a shorter text."""

Sample = Callable[[Request], Awaitable[Completion]]
"""Samples one turn with the engine that all trajectories share."""


class Excluded(Exception):
    """The sample is excluded from training; the text is a short reason."""


class OutOfRoom(Exception):
    """No further answer is possible; the trajectory ends with its tokens so far."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of a trajectory.

    max_turns: maximum number of answers. scope: whether `max_completion_length` applies to each answer, or to all
    tokens after the prompt. max_model_len: maximum number of all tokens. on_prefix_break: whether a sample whose chat
    template rewrites earlier turns is excluded, or ends before the rewriting turn. last_round: whether the last answer
    alone is trained on.
    """

    max_turns: int
    scope: LengthScope
    max_model_len: int
    on_prefix_break: OnPrefixBreak = "exclude"
    last_round: bool = False


@dataclass(slots=True, eq=False)
class Trajectory:
    """One sample in progress; the environment calls `answer` and `add_messages`.

    messages: the chat so far, with the prompt. turns: number of answers so far. finish_reason: that of the last answer.
    rewards: rewards of the environment, by turn. columns: further columns for reward functions. tools: schemas of the
    tools in the prompt. clock: time limit of the sample. metrics: metrics for the log.
    """

    request: Request
    template: Template
    sample: Sample
    limits: Limits
    messages: list[Message]
    columns: dict[str, Any] = field(default_factory=dict)
    tools: Sequence[dict[str, Any]] | None = None
    clock: asyncio.Timeout | None = None
    turns: int = 0
    finish_reason: FinishReason = "stop"
    rewards: list[float | None] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=lambda: {REWRITTEN: 0.0, OUT_OF_TURNS: 0.0})
    prompt_ids: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    log_mass: list[float] = field(default_factory=list)
    mask: list[int] = field(default_factory=list)
    versions: list[tuple[int, int, int]] = field(default_factory=list)
    _start: int = 0
    _answer_at: int = 0  # first token of the last answer
    _turn_at: int = 0  # first token that was sampled last; an answer may go on in several turns
    _num_unencoded: int = 0  # messages after the last answer that are not in token_ids yet
    _open: bool = False  # the next answer continues the last one
    _path: tuple[int, ...] = ()  # numbers of the branches from the prompt to this one

    def __post_init__(self) -> None:
        self._start = len(self.messages)
        self.prompt_ids = list(self.request.prompt_ids)

    # --- calls of the environment ---------------------------------------------------------------------------------

    def begin(self, messages: Sequence[Message]) -> None:
        """Replace the row's prompt, before the first answer.

        Raises:
            Excluded: it leaves no room for an answer.
            ConfigError: it has no images, and the row has.
        """
        self.messages = list(messages)
        self._start = len(self.messages)
        self.prompt_ids = self.template.encode_prompt(self.messages, self.tools)
        if has_images(self.request.prompt_ids) and not has_images(self.prompt_ids):
            raise ConfigError("environment: its first observation replaces a prompt with images; keep the prompt")
        if len(self.prompt_ids) >= self.limits.max_model_len:
            raise Excluded("prompt too long")

    async def answer(self) -> Message:
        """Sample the next answer of the policy; returns its message.

        Raises:
            OutOfRoom: no further token fits.
            Excluded: the engine has aborted the request, or the template rewrites history.
        """
        if self._num_unencoded:
            self._encode_messages()
        room = min(self._room(), self.request.sampling.max_new_tokens)
        if room < 1:
            self.finish_reason = "length"
            raise OutOfRoom
        sampling = self.request.sampling
        path = self._path if any(self._path) else ()
        if self.turns or path:
            sampling = replace(sampling, seed=seed_of(sampling.seed, "turn", self.turns, *path))
        name = ".".join(map(str, (f"{self.request.request_id}#{self.turns}", *path)))
        ids = [*self.prompt_ids, *self.token_ids]
        turn = Request(name, ids, replace(sampling, max_new_tokens=room), limit_s=self.request.limit_s)
        done = await self.sample(turn)
        if done.finish_reason in ("error", "abort"):
            raise Excluded(f"engine {done.finish_reason}")
        if not self._open:
            self._answer_at = len(self.token_ids)
            self.messages.append({"role": "assistant", "content": ""})
        self._turn_at = len(self.token_ids)
        self._add(done)
        self.messages[-1]["content"] = self._text_of_answer(len(self.token_ids))
        self._open = False
        self.finish_reason = done.finish_reason
        self.turns += 1
        return self.messages[-1]

    def add_turn(self, prompt_ids: Sequence[int], done: Completion) -> None:
        """Append a turn sampled elsewhere; the tokens that its prompt adds to those so far are masked.

        Raises Excluded or OutOfRoom, by `Limits.on_prefix_break`, if the prompt does not begin with the tokens so far.
        """
        if not self.turns:
            self.prompt_ids = list(prompt_ids)
        seen = [*self.prompt_ids, *self.token_ids]
        if list(prompt_ids[: len(seen)]) != seen:
            self._break_prefix()
        self._add_masked(prompt_ids[len(seen) :])
        self._answer_at = self._turn_at = len(self.token_ids)
        self._add(done)
        self.finish_reason = done.finish_reason
        self.turns += 1

    def add_messages(self, *messages: Message) -> None:
        """Append messages before the next answer; their tokens are masked.

        Raises ConfigError: a message has an image.
        """
        parts = [
            part for message in messages if isinstance(message.get("content"), list) for part in message["content"]
        ]
        if any(str(part.get("type")).startswith("image") for part in parts):
            raise ConfigError("environment: a message after an answer has an image; images belong into the prompt")
        self.messages += messages
        self._num_unencoded += len(messages)

    def replace_chat(self, messages: Sequence[Message]) -> None:
        """Replace the chat by one with more messages, or with another end of the last answer.

        Without more messages the next answer continues the last one. Raises Excluded or OutOfRoom, by
        `Limits.on_prefix_break`, if earlier messages differ.
        """
        count, text = len(self.messages), self._next_text(messages)
        if text != self.messages[-1]["content"] or len(messages) == count:
            self.edit(text)
        self.add_messages(*messages[count:])

    def replace_turn(self, ids: Sequence[int], mask: Sequence[int], messages: Sequence[Message]) -> None:
        """Replace the tokens of the last turn, and the chat by one with more messages or another end of the answer.

        Tokens of the common prefix keep their log-probs, all others are masked. mask: 1 for tokens that are trained
        on. Without more messages the next answer continues the last one.

        Raises:
            ValueError: the mask has another length, or a token that was not sampled is trained on.
            Excluded, OutOfRoom: as in `replace_chat`.
        """
        sampled, count, text = self.last_turn[0], len(self.messages), self._next_text(messages)
        kept = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(sampled, ids, strict=False)))
        if len(mask) != len(ids):
            raise ValueError(f"response_loss_mask of {len(mask)} values for {len(ids)} response_token_ids")
        if any(mask[kept:]):
            raise ValueError("a response_loss_mask that trains on tokens which were not sampled; set them to 0")
        end = kept
        if list(ids) != sampled or len(messages) == count:
            while end and sampled[end - 1] in self.template.stop_token_ids:
                end -= 1
            self._cut(self._turn_at + end)
            self._add_masked(ids[kept:])
            self._open = True
        self.leave_out(self._turn_at + index for index in range(end) if not mask[index])
        self.messages[-1]["content"] = text
        self.add_messages(*messages[count:])

    def edit(self, text: str) -> None:
        """Replace the text of the last answer, which the next one continues; tokens of the common prefix are kept."""
        end = len(self.token_ids)
        while end > self._answer_at and self.token_ids[end - 1] in self.template.stop_token_ids:
            end -= 1
        pairs = zip(self._text_of_answer(end), text, strict=False)
        common = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        places = range(self._answer_at, end + 1)
        first = bisect.bisect_right(places, common, key=lambda place: len(self._text_of_answer(place)))
        end = min(end, self._answer_at + first + MAX_CHARACTER_TOKENS)
        while end > self._answer_at and not text.startswith(self._text_of_answer(end)):
            end -= 1
        kept = self._text_of_answer(end)
        self._cut(end)
        self._add_masked(self.template.encode_text(text[len(kept) :]))
        self.messages[-1]["content"] = text
        self._open = True

    def leave_out(self, places: Iterable[int]) -> None:
        """Leave tokens out of the loss."""
        for place in places:
            self.mask[place], self.logprobs[place] = 0, 0.0
            if self.log_mass:
                self.log_mass[place] = 0.0

    def branch(self, number: int) -> Trajectory:
        """A copy that goes on by itself. number: of this branch among those at its place, which gives it its seeds."""
        other = copy.copy(self)
        other.messages = [dict(message) for message in self.messages]
        other.columns, other.metrics = dict(self.columns), dict(self.metrics)
        for name in ("rewards", "prompt_ids", "token_ids", "logprobs", "log_mass", "mask", "versions"):
            setattr(other, name, list(getattr(self, name)))
        other._path = (*self._path, number)
        return other

    def take(self, other: Trajectory) -> None:
        """Become a branch, under the own request and time limit."""
        for one in fields(self):
            if one.name not in ("request", "sample", "clock"):
                setattr(self, one.name, getattr(other, one.name))

    def reward(self, value: float | None) -> None:
        """Append the environment's reward of the last turn; None without one."""
        self.rewards.append(value)

    @contextlib.contextmanager
    def untimed(self) -> Iterator[None]:
        """Context whose time does not count towards the time limit."""
        if self.clock is None or (end := self.clock.when()) is None:
            yield
            return
        loop = asyncio.get_running_loop()
        left = end - loop.time()
        self.clock.reschedule(None)
        try:
            yield
        finally:
            self.clock.reschedule(loop.time() + left)

    def out_of_turns(self) -> bool:
        """Whether the number of answers is the maximum. Sets the metric, so check this condition last."""
        over = self.turns >= self.limits.max_turns
        self.metrics[OUT_OF_TURNS] = float(over)
        return over

    @property
    def last_ids(self) -> list[int]:
        return self.token_ids[self._answer_at :]

    @property
    def last_turn(self) -> tuple[list[int], list[float]]:
        """Ids and log-probs of the last turn, which may continue an answer."""
        return self.token_ids[self._turn_at :], self.logprobs[self._turn_at :]

    @property
    def text_of_turn(self) -> str:
        return self.template.decode(self.token_ids[self._turn_at :])

    # --- tokens ---------------------------------------------------------------------------------------------------

    def _text_of_answer(self, end: int) -> str:
        return self.template.decode(self.token_ids[self._answer_at : end])

    def _next_text(self, messages: Sequence[Message]) -> str:
        """The last answer in the next chat. Raises Excluded or OutOfRoom: earlier messages differ."""
        count = len(self.messages)
        if list(messages[: count - 1]) != self.messages[:-1] or len(messages) < count:
            self._break_prefix()
        return messages[count - 1].get("content") or ""

    def _encode_messages(self) -> None:
        """Append the tokens between the last answer and the next one."""
        at = len(self.messages) - self._num_unencoded
        ended = not self._open and bool(self.token_ids) and self.token_ids[-1] in self.template.stop_token_ids
        try:
            ids = continuation(self.template, self.messages[:at], self.messages[at:], ended=ended, tools=self.tools)
        except HistoryRewritten:
            del self.messages[at:]
            self._break_prefix()
        if self._room() <= len(ids):
            del self.messages[at:]
            self.finish_reason = "length"
            raise OutOfRoom
        self._num_unencoded, self._open = 0, False
        self._add_masked(ids)

    def _break_prefix(self) -> NoReturn:
        """Exclude or end a sample whose earlier turns are rewritten."""
        self.metrics[REWRITTEN] = 1.0
        if self.limits.on_prefix_break == "exclude":
            raise Excluded("history_rewritten")
        raise OutOfRoom

    def _add(self, done: Completion) -> None:
        start, count = len(self.token_ids), len(done.token_ids)
        if done.log_mass and not self.log_mass:
            self.log_mass = [0.0] * start
        self.token_ids += done.token_ids
        self.logprobs += done.logprobs
        if self.log_mass:
            self.log_mass += done.log_mass or [0.0] * count
        self.mask += [1] * count
        self.versions += [(version, start + first, start + end) for version, first, end in done.versions]

    def _add_masked(self, ids: Sequence[int]) -> None:
        if self.template.vision is not None:
            try:
                self.template.vision.check_text(ids)
            except RefusedChat as error:  # the policy may have written what an environment repeats
                raise Excluded("image token in a text") from error
        self.token_ids += ids
        self.logprobs += [0.0] * len(ids)
        self.mask += [0] * len(ids)
        if self.log_mass:
            self.log_mass += [0.0] * len(ids)

    def _cut(self, end: int) -> None:
        for values in (self.token_ids, self.logprobs, self.log_mass, self.mask):
            del values[end:]
        self.versions = [(version, first, min(last, end)) for version, first, last in self.versions if first < end]

    def _room(self) -> int:
        """Number of further tokens that fit."""
        room = self.limits.max_model_len - len(self.prompt_ids) - len(self.token_ids)
        if self.limits.scope == "total":
            room = min(room, self.request.sampling.max_new_tokens - len(self.token_ids))
        return room

    # --- the end --------------------------------------------------------------------------------------------------

    def completion(self, problem: str = "") -> Completion:
        """The sample as a completion. problem: reason of an exclusion, or ""."""
        if self.limits.last_round:
            self.leave_out(range(self._answer_at))
        new = self.messages[self._start :]
        answers = [message.get("content") for message in new if message.get("role") == "assistant"]
        other_prompt = [] if self.prompt_ids == list(self.request.prompt_ids) else self.prompt_ids
        return Completion(
            request_id=self.request.request_id,
            token_ids=self.token_ids,
            logprobs=self.logprobs,
            finish_reason=self.finish_reason,
            text=str(answers[-1] or "") if answers else "",
            versions=self.versions,
            columns=self.columns,
            log_mass=self.log_mass,
            mask=self.mask if 0 in self.mask else [],
            episode=Episode(self.messages, self._start, self.turns, other_prompt, self.rewards, problem, self.metrics),
        )
