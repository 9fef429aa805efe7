"""Completions of a distillation: the student's samples, or answers that are given, row by row.

With probability `lmbda` the student samples; else the answer is that of the row, or with `seq_kd` a sample of the
teacher. The choice depends on the seed of the request alone.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from swift.rollout.engines.base import InferenceEngine
from swift.rollout.sources.base import Source
from swift.trainers.gkd.answers import Answers, given_completion
from swift.types import Completion, Request


@dataclass(eq=False)
class MixedSource(Source):
    """See the module's docstring.

    student: samples. lmbda: share of its samples. answers: of the rows. teacher: returns the engine that samples in
    their place; None without `seq_kd`.
    """

    student: Source
    lmbda: float
    answers: Answers
    teacher: Callable[[], InferenceEngine] | None = None
    engine: InferenceEngine = field(init=False)

    def __post_init__(self) -> None:
        self.engine = self.student.engine

    async def generate(self, request: Request) -> Completion:
        """See `Source`."""
        if random.Random(request.sampling.seed).random() < self.lmbda:
            return await self.student.generate(request)
        prompt = request.prompt
        assert prompt is not None, "a request without its row"
        if self.teacher is None:
            return self.answers.completion(request.request_id, prompt)
        sampled = await self.teacher().generate(request)
        if sampled.finish_reason in ("error", "abort"):
            return sampled  # excluded, with the reason
        ids = list(request.prompt_ids), sampled.token_ids
        completion = given_completion(request.request_id, prompt, *ids, self.answers.template)
        completion.finish_reason = sampled.finish_reason
        return completion

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
        if self.teacher is not None:
            await self.teacher().free()

    def hold(self) -> None:
        """See `Source`."""
        self.student.hold()

    def release(self) -> None:
        """See `Source`."""
        self.student.release()

    def close(self) -> None:
        """See `Source`."""
        self.student.close()
