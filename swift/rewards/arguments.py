"""Settings of rewards: functions and models, their weights and time limits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from swift.flags import flag

AXOLOTL_FUNCTIONS = ("reward_env", "reward_nemo_gym_verify")
"""Built-in functions that have Axolotl's import paths too."""


@dataclass(kw_only=True)
class RewardArguments:
    """Reward functions and reward models. Functions declare settings of their own (`swift.rewards.functions`)."""

    GROUP: ClassVar[str] = "Reward"

    reward_funcs: list[str] = flag(
        [],
        values={f"axolotl.integrations.nemo_gym.rewards.{name}": name for name in AXOLOTL_FUNCTIONS},
        lists="orms",
        resume="fixed",
    )
    """Names of reward functions, built in or of `--external_plugins`; environment is what `--gym_env` or NeMo Gym gave.
    Import paths such as `package.module.function`, called as TRL calls them. Folders and hub ids are reward models."""

    reward_model: list[str] = flag([], resume="fixed")
    """Folders or hub ids of reward models: sequence classification with one label. They follow the functions in
    `--reward_weights`."""

    reward_weights: list[float] = flag([], at_least=-1e30, at_most=1e30, unset="1.0 for each")
    """Weights of the reward functions and models, in the order given."""

    external_plugins: list[str] = flag([], aliases=("custom_register_path",), joins=True, resume="free")
    """Python files that register reward functions, losses and other parts."""

    reward_model_plugin: list[str] = flag([], everyday=False, unset="default for each")
    """Plugin that scores with each reward model: default (its head), genrm (a language model that writes a score), or
    a name in `rm_plugins`, from `--external_plugins`."""

    reward_model_revision: list[str] = flag([], everyday=False)
    """Revision of each reward model."""

    reward_adapters: list[str] = flag([], everyday=False)
    """LoRA adapter of each reward model."""

    reward_timeout: float = flag(30.0, above=0)
    """Time limit of a call of a reward function, in seconds."""

    reward_workers: int | None = flag(at_least=1, aliases=("reward_num_workers",), everyday=False, resume="free")
    """Number of reward processes, all beside rank 0."""

    @property
    def needs_reward(self) -> bool:
        """Whether nothing else teaches."""
        return True

    def problems(self) -> Iterator[str]:
        if self.needs_reward and not self.reward_funcs and not self.reward_model:
            yield (
                "--reward_funcs: none: nothing to score completions with; give --reward_funcs or --reward_model, or an "
                "environment that rewards with --gym_env"
            )
        rewards = [*self.reward_funcs, *self.reward_model]
        if self.reward_weights and len(self.reward_weights) != len(rewards):
            weights = " ".join(f"{weight:g}" for weight in self.reward_weights)
            yield (
                f"--reward_weights: {weights}: {len(self.reward_weights)} weights for {len(rewards)} rewards; "
                f"need {len(rewards)}: {' '.join(rewards) or 'none'}"
            )
        for name in ("reward_model_plugin", "reward_model_revision", "reward_adapters"):
            given = getattr(self, name)
            if given and len(given) != len(self.reward_model):
                yield (
                    f"--{name}: {' '.join(given)}: {len(given)} values for {len(self.reward_model)} reward models; "
                    f"one per --reward_model"
                )
