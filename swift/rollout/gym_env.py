"""ms-swift's names for environments in gym's manner, and the environment that it ships: `math_env`."""

from __future__ import annotations

import asyncio
from typing import Any

from swift.plugin.multi_turn import Env, RolloutInferRequest
from swift.plugin.registry import envs, orms

__all__ = ["Env", "SimpleMathEnv", "envs"]

SYSTEM = (
    "Think about the question first, then answer it. Write your thoughts in <think> </think> and the answer in "
    "<answer> </answer>: <think> thoughts </think><answer> answer </answer>"
)
WRONG = "This answer is wrong. Look for the mistake, and correct it."


@envs.register("math_env")
class SimpleMathEnv(Env):
    """The row's `problem` is asked until the answer equals its `solution`, which is worth 1; see `accuracy`.

    A row without a `problem` keeps its prompt.
    """

    async def reset(self, request: RolloutInferRequest) -> tuple[str | None, dict[str, Any], str | None]:
        self.solution = request.data_dict["solution"]
        problem = request.data_dict.get("problem")
        return problem, {}, None if problem is None else SYSTEM

    async def step(self, messages: list[dict[str, Any]]) -> tuple[str, float | None, bool, dict[str, Any]]:
        (reward,) = await asyncio.to_thread(orms["accuracy"](), [messages[-1]["content"]], [self.solution])
        return WRONG, reward, reward == 1, {"math_reward": reward}
