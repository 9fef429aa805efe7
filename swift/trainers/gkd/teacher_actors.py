"""A teacher in Ray actors on devices of its own (`--teacher_device`), as an engine that scores prompts.

An actor that is lost is replaced, and asked again, as those of rollout engines are (`--engine_restarts`).
"""

from __future__ import annotations

import itertools
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from swift.errors import EngineError
from swift.models.source import find_other
from swift.models.template import Template
from swift.rollout.engines.base import InferenceEngine
from swift.rollout.engines.spec import spec_from
from swift.trainers.engines import timeouts_of
from swift.types import Completion, Request, SamplingParams, TokenScores

FLAG = "--teacher_device"


class TeacherActors:
    """Scores tokens with one actor for each device. `check` starts them, on the rank that samples."""

    everywhere = False

    def __init__(self, args: Any, *, top_k: int) -> None:
        self.args, self.top_k = args, top_k
        self._engine: InferenceEngine | None = None
        self._logs: Path | None = None
        self._numbers = itertools.count()

    def check(self, template: Template, prompts: Sequence[Sequence[int]]) -> str:
        """Start the actors, and score a prompt; a line for the plan. Raises as engines do."""
        from swift.rollout.engines import cluster
        from swift.rollout.engines.actor_client import ActorClient
        from swift.rollout.engines.pool import EnginePool

        args = self.args
        source = find_other(args.teacher_model, flag="--teacher_model", use_hf=args.use_hf)
        spec = spec_from(
            args,
            model=str(source.base),
            adapters=tuple(map(str, source.adapters)),
            eos_token_ids=tuple(template.stop_token_ids),
            max_model_len=args.vllm_max_model_len,
        )
        spec, logs = replace(spec, lora=False, returns_routes=False), Path(tempfile.mkdtemp(prefix="swift-teacher-"))
        self._logs = logs
        token = Path(args.ray_token_file).expanduser() if args.ray_token_file else None
        devices: list[tuple[str, ...]] = [(device,) for device in args.teacher_device]
        users = [cluster.use(args.ray_address, token, store_bytes=cluster.store_bytes(spec)) for _ in devices]
        places = cluster.places(users[0], [1] * len(devices), devices)
        self._engine = EnginePool(
            [
                ActorClient(
                    replace(spec, devices=own),
                    name=f"teacher {index} ({own[0]})",
                    log_file=logs / f"teacher-{index}.log",
                    uses=users[index],
                    timeouts=timeouts_of(args, spec),
                    restarts=args.engine_restarts,
                    options=places[index],
                )
                for index, own in enumerate(devices)
            ]
        )
        ids = list(prompts[0]) if prompts else template.encode_text("How much is 2 + 3?")
        self.score_all([(ids[:1], ids[1:])])
        return f"teacher: {args.teacher_model} on {', '.join(args.teacher_device)}, its {self.top_k} likeliest tokens"

    async def score(self, prompt_ids: Sequence[int], token_ids: Sequence[int]) -> TokenScores:
        """The scores of a completion."""
        return _scores_of(await self._started.generate(self._request(prompt_ids, token_ids)))

    def score_all(self, pairs: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[TokenScores]:
        """Those of several, while no round is sampled."""
        requests = [self._request(*pair) for pair in pairs]
        done = {completion.request_id: completion for completion in self._started.sample(requests)}
        return [_scores_of(done[request.request_id]) for request in requests]

    async def generate(self, request: Request) -> Completion:
        """A sample of the teacher."""
        return await self._started.generate(request)

    def drain_metrics(self) -> dict[str, float]:
        """None of its own."""
        return {}

    def close(self) -> None:
        """End the actors; repeatable."""
        if self._engine is not None:
            self._engine.close()
        if self._logs is not None:
            shutil.rmtree(self._logs, ignore_errors=True)
        self._engine = self._logs = None

    @property
    def _started(self) -> InferenceEngine:
        assert self._engine is not None, "`check` starts the actors"
        return self._engine

    def _request(self, prompt_ids: Sequence[int], token_ids: Sequence[int]) -> Request:
        asked = SamplingParams(1, prompt_logprobs=self.top_k, scored_from=len(prompt_ids))
        ids = [int(token) for token in (*prompt_ids, *token_ids)]
        return Request(f"teacher/{next(self._numbers)}", ids, asked)


def _scores_of(completion: Completion) -> TokenScores:
    if completion.prompt_scores is None:
        raise EngineError(f"{FLAG}: request {completion.request_id}: no scores came ({completion.finish_reason})")
    return completion.prompt_scores
