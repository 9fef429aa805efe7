"""The environment's own reward of a rollout of several turns."""

from __future__ import annotations

from typing import Any

from swift.plugin.registry import orms


@orms.register("environment")
def environment(completions: list[str], environment_reward: list[float | None], **kwargs: Any) -> list[float | None]:
    """The sum of the rewards of `--gym_env` or NeMo Gym for the turns of a completion; None without any."""
    return list(environment_reward)


orms["reward_env"] = orms["reward_nemo_gym_verify"] = environment  # Axolotl's names
