"""What users write for rollouts of several turns: schedulers, and environments in gym's manner.

class Hints(MultiTurnScheduler):                     # --multi_turn_scheduler hints
    def step(self, request, choice, turn):
        request.messages.append({"role": "user", "content": "Look again."})
        return {"infer_request": request}

multi_turns["hints"] = Hints

class Game(Env):                                     # --gym_env game
    async def reset(self, request): return "Guess a number from 1 to 9.", {}, None
    async def step(self, messages): return "lower", 0.0, False, {}

envs["game"] = Game
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class RolloutInferRequest:
    """A sample as schedulers see it. messages: the chat so far. data_dict: the row's columns. uuid: of the sample."""

    messages: list[dict[str, Any]]
    data_dict: dict[str, Any] = field(default_factory=dict)
    uuid: str = ""
    images: list[Any] = field(default_factory=list)
    """Empty: with images, completions have one turn."""


@dataclass(slots=True)
class ChatMessage:
    """The text of an answer of the policy."""

    content: str
    role: str = "assistant"


@dataclass(slots=True)
class RolloutChoice:
    """A turn of the policy. finish_reason: "stop" or "length". logprobs: {"content": [{"logprob": ...}, ...]}."""

    message: ChatMessage
    finish_reason: str
    token_ids: list[int] = field(default_factory=list)
    index: int = 0
    logprobs: dict[str, list[dict[str, float]]] | None = None


class MultiTurnScheduler:
    """Base of a scheduler: what follows an answer, and when a trajectory is over. One instance serves all samples.

    Methods may be coroutines. What `step` returns is a dict: "infer_request" with the messages of the next turn (the
    last answer may end differently there; what is added or put in its place is masked), "rollout_infos" with columns
    for reward functions, and optionally "response_token_ids" in place of the tokens of this turn, with
    "response_loss_mask". `tokenizer` is that of the policy.
    """

    tokenizer: Any = None

    def __init__(self, infer_engine: Any = None, max_turns: int | None = None, *args: Any, **kwargs: Any) -> None:
        if isinstance(infer_engine, int):  # ms-swift 3 has no engine in front of it
            infer_engine, max_turns = None, infer_engine
        self.infer_engine, self.max_turns = infer_engine, max_turns
        self.tokenizer = kwargs.get("tokenizer")

    def on_trajectory_start(self, requests: list[RolloutInferRequest]) -> Any:
        """Before the first answer of a sample; `requests` has that one, whose messages it may replace."""

    def on_turn_end(self, request: RolloutInferRequest, choice: RolloutChoice, turn: int) -> Any:
        """After an answer; may return {"done": bool, "rollout_infos": {...}}. turn: from 1.

        With `done`, `check_finished` is not called. `total_reward` among the infos is the reward of `--use_gym_env`.
        """

    def check_finished(self, request: RolloutInferRequest, choice: RolloutChoice, turn: int) -> Any:
        """Whether the trajectory is over after this answer."""
        return choice.finish_reason == "length" or bool(self.max_turns and turn >= self.max_turns)

    def step(self, request: RolloutInferRequest, choice: RolloutChoice, turn: int) -> Any:
        """The messages of the next turn."""
        raise NotImplementedError(f"{type(self).__name__} does not define step")

    def on_trajectory_end(self, request: RolloutInferRequest) -> Any:
        """Called once for each sample that has begun, however it ended."""

    async def async_infer(self, infer_requests: list[RolloutInferRequest], request_config: Any, **kwargs: Any) -> Any:
        """The samples of a group, for schedulers with a `run(request, request_config)`: those that it returns.

        `run` asks `infer_engine` for answers instead of the methods above. One that overrides this method as well makes
        the samples of a group together.
        """
        runs = [self.run(one, request_config, **kwargs) for one in infer_requests]  # type: ignore[attr-defined]
        returned = await asyncio.gather(*runs)
        return [one for found in returned for one in (found if isinstance(found, list) else [found])]


class Env:
    """Base of an environment in gym's manner; an instance per sample. `config` is the row's `env_config`, or {}."""

    def __init__(self, config: Mapping[str, Any] | None = None) -> None:
        self.config = self.env_config = dict(config or {})

    async def reset(self, request: RolloutInferRequest) -> tuple[str | None, dict[str, Any], str | None]:
        """(first observation, columns for reward functions, system message); None for both keeps the row's prompt."""
        raise NotImplementedError(f"{type(self).__name__} does not define reset")

    async def step(self, messages: list[dict[str, Any]]) -> tuple[str, float | None, bool, dict[str, Any]]:
        """(next observation, reward, whether it is over, columns) after the last answer in `messages`."""
        raise NotImplementedError(f"{type(self).__name__} does not define step")

    async def close(self) -> None:
        """Called once for each instance, however its sample ended."""
