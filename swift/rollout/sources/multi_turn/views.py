"""A trajectory as schedulers see it."""

from __future__ import annotations

from swift.models.template import Message
from swift.plugin.multi_turn import ChatMessage, RolloutChoice, RolloutInferRequest
from swift.rollout.sources.multi_turn.trajectory import Trajectory


def messages_of(trajectory: Trajectory) -> list[Message]:
    """A copy of the chat so far."""
    return [dict(message) for message in trajectory.messages]


def request_of(trajectory: Trajectory) -> RolloutInferRequest:
    """The sample: its chat so far, and the columns of its row."""
    prompt = trajectory.request.prompt
    columns = dict(prompt.columns) if prompt is not None else {}
    return RolloutInferRequest(messages_of(trajectory), columns, trajectory.request.request_id)


def choice_of(trajectory: Trajectory) -> RolloutChoice:
    """The last turn of the policy."""
    ids, logprobs = trajectory.last_turn
    shown = {"content": [{"logprob": logprob} for logprob in logprobs]}
    return RolloutChoice(ChatMessage(trajectory.text_of_turn), trajectory.finish_reason, ids, logprobs=shown)
