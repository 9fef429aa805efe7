"""A trajectory: one sample of several turns, as token ids from the first prompt to the last answer.

    prompt | answer | what the environment says | answer | ...
             mask 1   mask 0                      mask 1

The prompt of a turn is all ids so far, so a prefix cache holds them. Ids and log-probs of answers are what the engine
sampled; everything else is written by the chat template and masked.
"""

from __future__ import annotations

import asyncio
import bisect
import contextlib
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import Any, Literal, NoReturn

from swift.models.template import Message, Template
from swift.rollout.multi_turn.chat import HistoryRewritten, continuation
from swift.rollout.seeds import seed_of
from swift.types import Completion, Episode, FinishReason, Request

LengthScope = Literal["per_round", "total"]
OnPrefixBreak = Literal["exclude", "truncate"]

REWRITTEN = "rollout/history_rewritten"
"""Metric: whether earlier turns of a sample were rewritten."""
OUT_OF_TURNS = "rollout/out_of_turns"
"""Metric: whether a sample ended only because it had as many answers as it may."""

CUT_CHARACTER = 4
"""Tokens of one character at most: within it the text of more tokens can be the shorter one."""

Sample = Callable[[Request], Awaitable[Completion]]
"""Samples one turn with an engine that many trajectories share."""


class Excluded(Exception):
    """The sample takes no part in training; the text says why, in a word or two."""


class OutOfRoom(Exception):
    """No further answer is possible; the trajectory ends with what it has."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What bounds a trajectory.

    max_turns: answers of the policy. scope: whether `max_completion_length` bounds each answer, or all tokens after the
    prompt. max_model_len: bounds prompt and everything after it. on_prefix_break: what becomes of a sample whose chat
    template rewrites earlier turns: left out, or ended before.
    """

    max_turns: int
    scope: LengthScope
    max_model_len: int
    on_prefix_break: OnPrefixBreak = "exclude"


@dataclass(slots=True, eq=False)
class Trajectory:
    """One sample while it is made; the environment's code drives it by `answer` and `say`.

    messages: the chat so far, the prompt's included. turns: answers so far. finish_reason: of the last answer.
    rewards: of the environment. columns: what reward functions get beside those of the row. tools: what the template
    shows. clock: of its time limit. metrics: for the log.
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
    _said: int = 0  # messages after the last answer that are not in token_ids yet
    _open: bool = False  # the last answer goes on

    def __post_init__(self) -> None:
        self._start = len(self.messages)
        self.prompt_ids = list(self.request.prompt_ids)

    # --- what the environment calls -------------------------------------------------------------------------------

    def begin(self, messages: Sequence[Message]) -> None:
        """Another prompt than the row's; before the first answer. Raises Excluded: it leaves no room for an answer."""
        self.messages = list(messages)
        self._start = len(self.messages)
        self.prompt_ids = self.template.encode_prompt(self.messages, self.tools)
        if len(self.prompt_ids) >= self.limits.max_model_len:
            raise Excluded("prompt too long")

    async def answer(self) -> Message:
        """Let the policy speak; returns its message.

        Raises:
            OutOfRoom: no token fits any more.
            Excluded: the engine gave the request up, or the template rewrites history.
        """
        if self._said:
            self._take_said()
        room = min(self._left(), self.request.sampling.max_new_tokens)
        if room < 1:
            self.finish_reason = "length"
            raise OutOfRoom
        sampling = self.request.sampling
        if self.turns:
            sampling = replace(sampling, seed=seed_of(sampling.seed, "turn", self.turns))
        name = f"{self.request.request_id}#{self.turns}"
        ids = [*self.prompt_ids, *self.token_ids]
        done = await self.sample(Request(name, ids, replace(sampling, max_new_tokens=room)))
        if done.finish_reason in ("error", "abort"):
            raise Excluded(f"engine {done.finish_reason}")
        if not self._open:
            self._answer_at = len(self.token_ids)
            self.messages.append({"role": "assistant", "content": ""})
        self._add(done)
        self.messages[-1]["content"] = self._text_of_answer(len(self.token_ids))
        self._open = False
        self.finish_reason = done.finish_reason
        self.turns += 1
        return self.messages[-1]

    def add_turn(self, prompt_ids: Sequence[int], done: Completion) -> None:
        """A turn that somebody else had the policy sample; what its prompt adds to the tokens so far is masked.

        A prompt that does not begin with those tokens raises what `Limits.on_prefix_break` says.
        """
        if not self.turns:
            self.prompt_ids = list(prompt_ids)
        seen = [*self.prompt_ids, *self.token_ids]
        if list(prompt_ids[: len(seen)]) != seen:
            self._broken()
        self._add_masked(prompt_ids[len(seen) :])
        self._answer_at = len(self.token_ids)
        self._add(done)
        self.finish_reason = done.finish_reason
        self.turns += 1

    def say(self, *messages: Message) -> None:
        """What the policy is told before its next answer; masked."""
        self.messages += messages
        self._said += len(messages)

    def become(self, messages: Sequence[Message]) -> None:
        """The chat as an environment wants it: more messages, and maybe another end of the last answer.

        Without more messages the last answer goes on. Changed earlier messages raise what `Limits.on_prefix_break`
        says.
        """
        count = len(self.messages)
        if list(messages[: count - 1]) != self.messages[:-1] or len(messages) < count:
            self._broken()
        text = messages[count - 1].get("content") or ""
        if text != self.messages[-1]["content"] or len(messages) == count:
            self.edit(text)
        self.say(*messages[count:])

    def edit(self, text: str) -> None:
        """Another text of the last answer, which then goes on: its tokens stay as far as they say the same."""
        end = len(self.token_ids)
        while end > self._answer_at and self.token_ids[end - 1] in self.template.stop_token_ids:
            end -= 1
        pairs = zip(self._text_of_answer(end), text, strict=False)
        same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        places = range(self._answer_at, end + 1)
        first = bisect.bisect_right(places, same, key=lambda place: len(self._text_of_answer(place)))
        end = min(end, self._answer_at + first + CUT_CHARACTER)
        while end > self._answer_at and not text.startswith(self._text_of_answer(end)):
            end -= 1
        kept = self._text_of_answer(end)
        self._cut(end)
        self._add_masked(self.template.encode_text(text[len(kept) :]))
        self.messages[-1]["content"] = text
        self._open = True

    def reward(self, value: float | None) -> None:
        """The environment's reward of the last turn; None where it has none."""
        self.rewards.append(value)

    @contextlib.contextmanager
    def untimed(self) -> Iterator[None]:
        """What is waited for inside takes nothing from its time limit."""
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
        """Whether it has as many answers as it may; to be asked last, as it is counted."""
        over = self.turns >= self.limits.max_turns
        self.metrics[OUT_OF_TURNS] = float(over)
        return over

    @property
    def last_ids(self) -> list[int]:
        return self.token_ids[self._answer_at :]

    # --- tokens ---------------------------------------------------------------------------------------------------

    def _text_of_answer(self, end: int) -> str:
        return self.template.decode(self.token_ids[self._answer_at : end])

    def _take_said(self) -> None:
        """Add the tokens between the last answer and the next."""
        at = len(self.messages) - self._said
        ended = not self._open and bool(self.token_ids) and self.token_ids[-1] in self.template.stop_token_ids
        try:
            ids = continuation(self.template, self.messages[:at], self.messages[at:], ended=ended, tools=self.tools)
        except HistoryRewritten:
            del self.messages[at:]
            self._broken()
        if self._left() <= len(ids):
            del self.messages[at:]
            self.finish_reason = "length"
            raise OutOfRoom
        self._said, self._open = 0, False
        self._add_masked(ids)

    def _broken(self) -> NoReturn:
        """Earlier turns were rewritten: leave the sample out, or end it before."""
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
        self.token_ids += ids
        self.logprobs += [0.0] * len(ids)
        self.mask += [0] * len(ids)
        if self.log_mass:
            self.log_mass += [0.0] * len(ids)

    def _cut(self, end: int) -> None:
        for values in (self.token_ids, self.logprobs, self.log_mass, self.mask):
            del values[end:]
        self.versions = [(version, first, min(last, end)) for version, first, last in self.versions if first < end]

    def _left(self) -> int:
        """Tokens that fit after those there are."""
        left = self.limits.max_model_len - len(self.prompt_ids) - len(self.token_ids)
        if self.limits.scope == "total":
            left = min(left, self.request.sampling.max_new_tokens - len(self.token_ids))
        return left

    # --- the end --------------------------------------------------------------------------------------------------

    def completion(self, problem: str = "") -> Completion:
        """The sample as the pipeline takes it. problem: why it is excluded."""
        answers = [one.get("content") for one in self.messages[self._start :] if one.get("role") == "assistant"]
        own = [] if self.prompt_ids == list(self.request.prompt_ids) else self.prompt_ids
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
            episode=Episode(self.messages, self._start, self.turns, own, self.rewards, problem, self.metrics),
        )
