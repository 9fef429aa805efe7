"""ms-swift's names for schedulers, and the schedulers that it ships.

`math_tip_trick` asks once more after a wrong answer, `gym_scheduler` plays environments of `envs`, and
`openenv_scheduler` those of an OpenEnv server.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any

from swift.plugin.multi_turn import MultiTurnScheduler, RolloutChoice, RolloutInferRequest
from swift.plugin.registry import envs, multi_turns, orms

__all__ = ["GYMScheduler", "MathTipsScheduler", "Messages", "MultiTurnScheduler", "OpenEnvScheduler", "multi_turns"]

Messages = list[dict[str, Any]]


@multi_turns.register("math_tip_trick")
class MathTipsScheduler(MultiTurnScheduler):
    """Cuts a wrong answer before `<answer>` or `</think>` and lets it go on after a doubt, once.

    Right is what `acc_function([text], [solution])` gives a 1: by default the reward `accuracy`.
    """

    tips_prompt = "But wait... It seems I made a mistake,"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.acc_func = kwargs.get("acc_function") or orms["accuracy"]()

    def check_finished(self, request: RolloutInferRequest, choice: RolloutChoice, turn: int) -> Any:
        text = request.messages[-1]["content"]
        if self.tips_prompt in text or self.acc_func([text], [request.data_dict["solution"]])[0] == 1:
            return True
        return super().check_finished(request, choice, turn)

    def step(self, request: RolloutInferRequest, choice: RolloutChoice, turn: int) -> Any:
        text = request.messages[-1]["content"]
        end = min((text.index(tag) for tag in ("<answer>", "</think>") if tag in text), default=len(text))
        request.messages[-1]["content"] = text[:end] + self.tips_prompt
        return {"infer_request": request}


@multi_turns.register("gym_scheduler")
class GYMScheduler(MultiTurnScheduler):
    """Plays an environment per sample: that of the row's `env_config`, or of `--gym_env`.

    Subclasses change the methods of `MultiTurnScheduler`, `_create_env` and `_close_and_remove`, and what is kept of a
    sample by its uuid.
    """

    plays_envs = True

    def __init__(self, infer_engine: Any = None, max_turns: int | None = None, *args: Any, **kwargs: Any) -> None:
        super().__init__(infer_engine, max_turns, *args, **kwargs)
        self.gym_env_name: str | None = kwargs.get("gym_env")
        self._envs: dict[str, Any] = {}
        self._total_rewards: dict[str, float] = {}
        self._step_rewards: dict[str, list[float]] = {}
        self._pending_obs: dict[str, Any] = {}

    async def on_trajectory_start(self, requests: list[RolloutInferRequest]) -> None:
        for request in requests:
            env = self._create_env(request.data_dict.get("env_config") or {})
            self._envs[request.uuid] = env
            observation, _, system = await env.reset(request)
            self._open(request, observation, system)

    async def on_turn_end(self, request: RolloutInferRequest, choice: RolloutChoice, turn: int) -> dict[str, Any]:
        observation, reward, done, infos = await self._envs[request.uuid].step(list(request.messages))
        return {"done": done, "rollout_infos": self._stepped(request.uuid, observation, reward, done) | (infos or {})}

    def step(self, request: RolloutInferRequest, choice: RolloutChoice, turn: int) -> dict[str, Any]:
        observation = self._pending_obs.pop(request.uuid, None)
        if observation is not None:
            request.messages.append({"role": "user", "content": observation})
        return {"infer_request": request}

    async def on_trajectory_end(self, request: RolloutInferRequest) -> None:
        await self._close_and_remove(request.uuid)

    def _create_env(self, config: Mapping[str, Any]) -> Any:
        name = str(config.get("name") or self.gym_env_name)
        if name not in envs:
            raise ValueError(f"--gym_env: {name}: not registered; registered are {', '.join(sorted(envs)) or 'none'}")
        return envs[name](config)

    async def _close_and_remove(self, uuid: str) -> None:
        """Closes the environment of a sample, if it is open, and forgets the sample."""
        env = self._envs.pop(uuid, None)
        for kept in (self._total_rewards, self._step_rewards, self._pending_obs):
            kept.pop(uuid, None)
        if env is not None:
            await env.close()

    def _open(self, request: RolloutInferRequest, observation: Any, system: str | None) -> None:
        """Starts the chat of a sample; without an observation the row's prompt is kept."""
        self._total_rewards[request.uuid], self._step_rewards[request.uuid] = 0.0, []
        if observation is not None:
            opening = [{"role": "system", "content": system}] if system else []
            request.messages = [*opening, {"role": "user", "content": observation}]

    def _stepped(self, uuid: str, observation: Any, reward: float | None, done: bool) -> dict[str, Any]:
        """Keeps the outcome of a step; returns the columns for reward functions."""
        self._step_rewards[uuid].append(float(reward or 0.0))
        self._total_rewards[uuid] += float(reward or 0.0)
        self._pending_obs[uuid] = None if done else observation
        return {
            "total_reward": self._total_rewards[uuid],
            "step_rewards": list(self._step_rewards[uuid]),
            "gym_done": done,
        }


@multi_turns.register("openenv_scheduler")
class OpenEnvScheduler(GYMScheduler):
    """Plays an environment behind an OpenEnv server: `env_config` has its `base_url`, `reset_kwargs`, `system_message`.

    Needs openenv. `env_config_defaults` are entries for rows that lack them. Subclasses may change `parse_action` and
    `format_observation`.
    """

    plays_envs = False
    env_config_defaults: Mapping[str, Any] = {}

    async def on_trajectory_start(self, requests: list[RolloutInferRequest]) -> None:
        for request in requests:
            config = {**self.env_config_defaults, **(request.data_dict.get("env_config") or {})}
            env = self._envs[request.uuid] = self._create_env(config)
            observation, _ = await asyncio.to_thread(env.reset)
            self._open(request, self.format_observation(observation), config.get("system_message"))

    async def on_turn_end(self, request: RolloutInferRequest, choice: RolloutChoice, turn: int) -> dict[str, Any]:
        action = self.parse_action(choice.message.content)
        observation, reward, done, _ = await asyncio.to_thread(self._envs[request.uuid].step, action)
        shown = None if done else self.format_observation(observation)
        return {"done": done, "rollout_infos": self._stepped(request.uuid, shown, reward, done)}

    async def _close_and_remove(self, uuid: str) -> None:
        env = self._envs.pop(uuid, None)
        await super()._close_and_remove(uuid)
        if env is not None:
            await asyncio.to_thread(env.close)

    def _create_env(self, config: Mapping[str, Any]) -> Any:
        return OpenEnvWrapper(config)

    def parse_action(self, text: str) -> dict[str, Any]:
        """The action of an answer: its JSON object, also in a fenced block, or `{"message": text}`."""
        text = text.strip()
        if text.startswith("```") and text.endswith("```") and "\n" in text:
            text = text.partition("\n")[2].removesuffix("```").strip()
        try:
            action = json.loads(text)
        except ValueError:
            return {"message": text}
        return action if isinstance(action, dict) else {"message": str(action)}

    def format_observation(self, observation: Any) -> Any:
        """The text that the policy sees of an observation."""
        return json.dumps(observation, ensure_ascii=False, default=str)


class OpenEnvWrapper:
    """A session with an OpenEnv server, which `reset` opens; its methods block."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.base_url = config.get("base_url", "http://localhost:8000")
        self.reset_kwargs = dict(config.get("reset_kwargs") or {})
        self._client: Any = None

    def reset(self) -> tuple[Any, Any]:
        """(observation, metadata)."""
        from openenv.core.generic_client import GenericEnvClient

        self._client = GenericEnvClient(base_url=self.base_url).sync()
        self._client.__enter__()
        result = self._client.reset(**self.reset_kwargs)
        return result.observation, getattr(result, "metadata", None)

    def step(self, action: Mapping[str, Any]) -> tuple[Any, float, bool, Any]:
        """(observation, reward, whether it is over, metadata) after an action."""
        result = self._client.step(action)
        return result.observation, float(result.reward or 0.0), bool(result.done), getattr(result, "metadata", None)

    def close(self) -> None:
        """Ends the session."""
        if self._client is not None:
            self._client.__exit__(None, None, None)
