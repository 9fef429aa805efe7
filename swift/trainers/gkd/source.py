"""Completions of a distillation: whose answers they are, and what a teacher that is elsewhere says of their tokens.

`MixedSource`: with probability `lmbda` the student samples; else the answer is that of the row, or with `seq_kd` a
sample of the teacher. The choice depends on the seed of the request alone.

`TaughtSource`: asks the teacher for its likeliest tokens as soon as a completion ends, while others are sampled.
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from swift.data.messages import Message, chat_in
from swift.errors import ConfigError
from swift.models.template import Template
from swift.rollout.engines.base import InferenceEngine
from swift.rollout.sources.base import Source
from swift.trainers.gkd.answers import Answers, given_completion
from swift.trainers.gkd.teacher_actors import TeacherActors
from swift.trainers.gkd.teacher_server import TeacherServer
from swift.types import Completion, Prompt, Request

TEACHER_PROMPT = "teacher_prompt"
"""Column of what the teacher gets in place of the last user message, or of the chat."""

Sampler = Callable[[Request], Awaitable[Completion]]
"""Samples with the teacher."""


@dataclass(eq=False)
class _Around(Source):
    """A source around another one."""

    student: Source
    engine: InferenceEngine = field(init=False)

    def __post_init__(self) -> None:
        self.engine = self.student.engine

    def drain_metrics(self) -> dict[str, float]:
        """See `Source`."""
        return self.student.drain_metrics()

    @property
    def late(self) -> int:
        """See `Source`."""
        return self.student.late

    async def free(self) -> None:
        """See `Source`."""
        await self.student.free()

    def hold(self) -> None:
        """See `Source`."""
        self.student.hold()

    def release(self) -> None:
        """See `Source`."""
        self.student.release()

    def close(self) -> None:
        """See `Source`."""
        self.student.close()


@dataclass(eq=False)
class MixedSource(_Around):
    """See the module's docstring.

    student: samples. lmbda: share of its samples. answers: of the rows. teacher: samples in their place; None without
    `seq_kd`. released: waits until the teacher has no request of a cancelled caller.
    """

    lmbda: float
    answers: Answers
    teacher: Sampler | None = None
    released: Callable[[], Awaitable[None]] | None = None

    async def generate(self, request: Request) -> Completion:
        """See `Source`."""
        if random.Random(request.sampling.seed).random() < self.lmbda:
            return await self.student.generate(request)
        prompt = request.prompt
        assert prompt is not None, "a request without its row"
        if self.teacher is None:
            return self.answers.completion(request.request_id, prompt)
        sampled = await self.teacher(request)
        if sampled.finish_reason in ("error", "abort"):
            return sampled  # excluded, with the reason
        ids = list(request.prompt_ids), sampled.token_ids
        completion = given_completion(request.request_id, prompt, *ids, self.answers.template)
        completion.finish_reason = sampled.finish_reason
        return completion

    async def free(self) -> None:
        """See `Source`."""
        await super().free()
        if self.released is not None:
            await self.released()


@dataclass(eq=False)
class TeacherPrompts:
    """The prompts that the teacher gets of rows with the column `TEACHER_PROMPT`."""

    template: Template

    def of(self, prompt: Prompt) -> list[int] | None:
        """Token ids; None: the teacher gets the policy's prompt. Raises ConfigError: neither a text nor a chat."""
        given = prompt.columns.get(TEACHER_PROMPT)
        if given is None:
            return None
        return self.template.encode_prompt(_as_taught(prompt.messages, chat_in(given)), prompt.columns.get("tools"))


def _as_taught(messages: list[Message], given: object) -> list[Message]:
    """The chat of the teacher: `given` itself, or with it as the last user message."""
    if isinstance(given, list):
        return given
    users = [number for number, message in enumerate(messages) if message["role"] == "user"]
    if not isinstance(given, str) or not users:
        raise ConfigError(
            f"--dataset: {TEACHER_PROMPT}: {str(given)[:60]!r}: neither a text in place of the last user message nor a "
            "chat; correct it, or rename the column with --columns"
        )
    return [*messages[: users[-1]], {**messages[users[-1]], "content": given}, *messages[users[-1] + 1 :]]


@dataclass(eq=False)
class TaughtSource(_Around):
    """See the module's docstring. server: None for a teacher in the trainer's processes."""

    prompts: TeacherPrompts
    server: TeacherServer | TeacherActors | None = None

    async def generate(self, request: Request) -> Completion:
        """See `Source`."""
        completion = await self.student.generate(request)
        assert request.prompt is not None, "a request without its row"
        own = completion.episode.prompt_ids if completion.episode is not None else []
        taught = self.prompts.of(request.prompt)
        if taught is not None:
            completion.teacher_prompt_ids = taught
        if self.server is not None and completion.token_ids:
            ids = taught or own or request.prompt_ids
            completion.teacher_scores = await self.server.score(ids, completion.token_ids)
        return completion

    def drain_metrics(self) -> dict[str, float]:
        """See `Source`."""
        return super().drain_metrics() | (self.server.drain_metrics() if self.server is not None else {})

    def close(self) -> None:
        """See `Source`."""
        super().close()
        if self.server is not None:
            self.server.close()
