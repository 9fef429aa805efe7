"""ms-swift's requests and answers, as plugins see them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from swift.plugin.multi_turn import ChatMessage, RolloutInferRequest
from swift.plugin.multi_turn import RolloutChoice as ChatCompletionResponseChoice

__all__ = [
    "ChatCompletionResponse",
    "ChatCompletionResponseChoice",
    "ChatMessage",
    "InferRequest",
    "RequestConfig",
    "RolloutInferRequest",
    "RolloutOutput",
]

InferRequest = RolloutInferRequest


@dataclass(kw_only=True)
class RequestConfig:
    """How a request is sampled. max_tokens: None for as many as the context holds. temperature 0 is greedy.

    None is the value in the model's generation_config.json.
    """

    max_tokens: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    stop: list[str] = field(default_factory=list)
    seed: int | None = None
    n: int = 1


@dataclass
class ChatCompletionResponse:
    """The answers to a request."""

    choices: list[ChatCompletionResponseChoice]
    model: str = ""
    id: str = ""


@dataclass(kw_only=True)
class RolloutOutput:
    """A sample of a scheduler's `run`.

    response: the last answer; in a group its `id` is that of the request. messages: the chat, up to that answer.
    response_loss_mask: per turn, 1 for the sampled tokens that are trained on; all without one. response_token_ids,
    rollout_logprobs: not read, they are those of the engine. rollout_infos: columns for reward functions.
    """

    response: ChatCompletionResponse
    messages: list[dict[str, Any]]
    response_token_ids: list[Any] = field(default_factory=list)
    response_loss_mask: list[Any] = field(default_factory=list)
    rollout_infos: dict[str, Any] = field(default_factory=dict)
    rollout_logprobs: list[Any] = field(default_factory=list)
