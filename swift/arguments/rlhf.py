"""The settings of `swift rlhf`, and the checks that combine settings of several components."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from swift.arguments.bridges import bridge_problems
from swift.arguments.common import (
    CommonArguments,
    backend_problems,
    context_problems,
    model_missing,
    training_data_missing,
)
from swift.data.arguments import PromptArguments
from swift.flags import REQUIRED, flag
from swift.models.arguments import ModelArguments
from swift.rewards.arguments import RewardArguments
from swift.rl.arguments import ObjectiveArguments
from swift.rollout.arguments import (
    COMPLETION_SETTINGS,
    ENVIRONMENT_REWARDS,
    REWARD_SETTINGS,
    EngineArguments,
    EnvironmentArguments,
    SamplingArguments,
    in_use,
)
from swift.rollout.placement import has_own_engine
from swift.rollout.sources.atropos.arguments import AtroposArguments
from swift.rollout.sources.nemo_gym.arguments import NemoGymArguments
from swift.trainers.arguments import ActivationArguments, OptimizationArguments, RouterArguments, RunArguments

UNRECORDED = (
    "use_vllm", "use_lmdeploy", "async_generate", "dynamic_sample", "replay_buffer_size", "streaming_partial_batch",
    "val_dataset", "split_dataset_ratio",
)  # fmt: skip
"""Settings that sample, or that train on other rollouts than whole ones."""

OF_PRESETS = ("gdpo", "rloo")
"""Methods that are grpo with a preset."""


@dataclass(kw_only=True)
class MethodArguments:
    """Which kind of training `swift rlhf` does."""

    GROUP: ClassVar[str] = "Model"

    rlhf_type: Literal["grpo", "gdpo", "rloo", "gkd", "ebft"] | None = flag(
        unset=REQUIRED, registry="methods", resume="fixed"
    )
    """Algorithm family. gdpo and rloo are grpo with the preset of that name."""


@dataclass(kw_only=True)
class RLHFArguments(
    CommonArguments,
    RunArguments,
    EngineArguments,
    RewardArguments,
    RouterArguments,
    ObjectiveArguments,
    NemoGymArguments,
    SamplingArguments,
    AtroposArguments,
    EnvironmentArguments,
    ActivationArguments,
    OptimizationArguments,
    PromptArguments,
    ModelArguments,
    MethodArguments,
):
    """`swift rlhf`: online reinforcement learning."""

    SEES: ClassVar[bool] = True

    log_completions: bool = flag(False, resume="free")
    """Whether trackers of `--report_to` show sample completions. completions.jsonl has all."""

    packing: bool | None = flag(group="Data", everyday=False, unset="always", resume="free")
    """Whether prompts and completions are packed into streams, which they always are where the attention allows it."""

    log_unique_prompts: bool = flag(False, needs="log_completions", everyday=False, resume="free")
    """Whether trackers show one completion per prompt."""

    record_rollouts: str = flag("last:50", everyday=False, resume="free")
    """Steps whose rollouts are kept in `rollouts/`: last:N, every:N, all or off. About 12 bytes a token, compressed."""

    replay_from: str | None = flag(everyday=False, unset="completions are sampled")
    """Run whose completions are trained on instead of sampling, recorded by `--record_rollouts all`. Data, seeds and
    batches are the same."""

    rollout_only: bool = flag(False, everyday=False, resume="fixed")
    """Whether to sample, score and record without training."""

    metric_names: Literal["trl", "verl"] | None = flag(everyday=False, unset="swift's own names only", resume="free")
    """Other names under which metrics are logged, too."""

    health_action: Literal["warn", "stop"] = flag("warn", everyday=False, resume="free")
    """What an alert does: warn, or save a checkpoint and end the run with code 6."""

    health_rules: str | None = flag(everyday=False, unset="the built-in limits", resume="free")
    """YAML or JSON file with other limits of health rules, such as `kl: 5.0`. false leaves a rule out."""

    @property
    def needs_reward(self) -> bool:
        """Without a teacher."""
        return not self.has_teacher

    def problems(self) -> Iterator[str]:
        yield from model_missing(self)
        yield from self._record_problems()
        if self.rollout_source != "atropos":
            yield from training_data_missing(self)
        if self.use_vllm or self.use_lmdeploy:
            yield from backend_problems(self)
        if self.weight_bridge is not None or self.force_restart:
            yield from bridge_problems(self)
        yield from self.tuner_problems()
        yield from context_problems(self)
        yield from self._engine_problems()
        yield from self._objective_problems()
        yield from self._teacher_problems()
        if self.quant_method and (self.teacher_deepspeed or "").startswith("zero3"):
            yield (
                f"--teacher_deepspeed: {self.teacher_deepspeed}: cannot shard weights that --quant_method "
                f"{self.quant_method} quantises; leave it out"
            )
        if self.teacher_device and self.use_lmdeploy:
            yield f"--teacher_device: {' '.join(self.teacher_device)}: LMDeploy scores no prompts; use --use_vllm true"
        yield from self._rollout_problems()
        if changes := self.changed_logprobs():
            yield from self._correction_problems(changes)
        if self.streaming_partial_batch:
            yield from self._streaming_problems()

    def _record_problems(self) -> Iterator[str]:
        kind, _, number = self.record_rollouts.partition(":")
        if self.record_rollouts not in ("all", "off") and not (
            kind in ("last", "every") and number.isdigit() and int(number) > 0
        ):
            yield f"--record_rollouts: {self.record_rollouts}: not understood; valid: last:N, every:N, all, off"
        if self.rollout_only and (self.record_rollouts == "off" or self.streaming_partial_batch):
            other = "--record_rollouts off" if self.record_rollouts == "off" else "--streaming_partial_batch true"
            yield f"--rollout_only: true: records whole rollouts and nothing else; drop {other}"
        if not self.replay_from:
            return
        given: dict[str, Any] = {name: getattr(self, name) for name in UNRECORDED}
        given |= {
            "rollout_source": self.rollout_source != "engine",
            "moe_router_replay": self.moe_router_replay != "off",
        }
        for name, value in given.items():
            if value:
                yield f"--{name}: with --replay_from nothing is sampled, and whole rollouts are on record; leave it out"

    def _engine_problems(self) -> Iterator[str]:
        own_engine = has_own_engine(self)
        max_rank = self.vllm_max_lora_rank
        if not self.ds3_gather_for_generation and (self.use_vllm or self.use_lmdeploy):
            yield (
                "--ds3_gather_for_generation: false: an inference engine needs the gathered weights; "
                "use --ds3_gather_for_generation true"
            )
        if self.vllm_enable_lora and own_engine and self.tuner_type != "lora":
            yield (
                f"--vllm_enable_lora: true: --tuner_type {self.tuner_type} trains no adapter that could be sent alone; "
                "--tuner_type lora, or --vllm_enable_lora false"
            )
        elif self.vllm_enable_lora and own_engine and self.use_dora:
            yield (
                "--vllm_enable_lora: true: engines do not compute with --use_dora; --vllm_enable_lora false sends "
                "merged weights"
            )
        elif self.vllm_enable_lora and self.use_vllm and self.modules_to_save:
            yield (
                f"--modules_to_save: {' '.join(self.modules_to_save)}: vLLM takes low-rank matrices alone; "
                "--vllm_enable_lora false sends merged weights"
            )
        elif self.vllm_enable_lora and own_engine and max_rank is not None and self.sent_rank > max_rank:
            yield (
                f"--vllm_max_lora_rank: {max_rank}: below the rank {self.sent_rank} of the adapter that is sent; "
                f"leave it out, or use {self.sent_rank}"
            )
        if self.vllm_tensor_parallel_size > 1 and self.infer_backend == "transformers" and own_engine:
            yield (
                f"--vllm_tensor_parallel_size: {self.vllm_tensor_parallel_size}: the transformers engine computes on "
                "one device; --use_vllm true, or 1"
            )
        check, colon, steps = self.parity_check.partition(":")
        every = check == "every" and steps.isdigit() and int(steps) > 0
        if not every and (colon or check not in ("start", "warn", "off")):
            yield f"--parity_check: {self.parity_check}: not a choice; valid: start, every:N, warn, off"

    def _objective_problems(self) -> Iterator[str]:
        if self.rlhf_type in OF_PRESETS and self.preset != self.rlhf_type:
            yield (
                f"--preset: {self.preset}: contradicts --rlhf_type {self.rlhf_type}, which is a preset too; "
                "--rlhf_type grpo, or leave --preset out"
            )
        each_alone = "--scale_rewards: gdpo: normalises each reward function on its own, so there is no sum"
        if self.scale_rewards == "gdpo" and self.advantage_estimator != "grpo":
            yield (
                f"{each_alone} for --advantage_estimator {self.advantage_estimator}; --advantage_estimator grpo, "
                "or another scale"
            )
        elif self.scale_rewards == "gdpo" and self.kl_in_reward and self.beta > 0:
            yield f"{each_alone} to subtract the KL from; --kl_in_reward false, or another scale"
        if self.sync_ref_model and self.tuner_type != "full" and self.ref_model not in (None, self.model):
            yield (
                "--sync_ref_model: true: an adapter cannot be mixed into another model; leave --ref_model out, "
                "or use --tuner_type full"
            )
        if self.moe_router_replay != "off":
            yield from self._replay_problems()
        if self.router_aux_loss_coef != 0:
            yield from self._router_problems()
        if self.torch_dtype == "float16" and (self.deepspeed or self.fsdp):
            way = f"--deepspeed {self.deepspeed}" if self.deepspeed else f"--fsdp {self.fsdp}"
            yield f"--torch_dtype: float16: its loss scaling does not go with {way} here; use --torch_dtype bfloat16"
        if self.dynamic_sample and self.reward_model and self.async_generate:
            yield (
                "--dynamic_sample: true: with --async_generate groups are scored while the trainer computes, and "
                f"--reward_model {' '.join(self.reward_model)} needs the trainer's process; --async_generate false, "
                "or a reward function"
            )
        if self.dynamic_sample and not self.ds3_gather_for_generation:
            yield (
                "--dynamic_sample: true: ranks that sample with sharded weights decode in step, and could not "
                "replace a group on their own; --ds3_gather_for_generation true"
            )

    def _teacher_problems(self) -> Iterator[str]:
        """Settings that need rewards, or that do not go with advantages of single tokens."""
        rewards = [*self.reward_funcs, *self.reward_model]
        compares = bool(rewards) and (not self.reward_weights or any(self.reward_weights))
        if self.num_generations == 1 and (compares or not self.has_teacher):
            measured = f", or --reward_weights {' '.join('0' * len(rewards))} to measure rewards only"
            yield (
                "--num_generations: 1: the rewards of a prompt's completions are compared with each other; use at "
                f"least 2{measured if self.has_teacher else ''}"
            )
        if not self.has_teacher:
            return
        if self.teacher_model and self.teacher_model_server:
            yield (
                f"--teacher_model_server: {self.teacher_model_server}: there is --teacher_model {self.teacher_model}; "
                "give one of the two"
            )
        given = f"--teacher_model{'' if self.teacher_model else '_server'}"
        subject = f"{given}: {self.teacher_model or self.teacher_model_server}"
        if (self.teacher_model_server or self.teacher_device) and self.temperature != 1:
            yield (
                f"--temperature: {self.temperature:g}: a teacher elsewhere gives log-probs at temperature 1, to "
                "compare with the policy's; use 1"
            )
        if self.importance_sampling_level == "sequence":
            yield (
                f"{subject}: teaches token by token, and --loss_type {self.loss_type} has "
                "one ratio per sequence, in which tokens share their advantages; --importance_sampling_level "
                "sequence_token, or another --loss_type"
            )
        by_rewards = {
            "--dynamic_sample true replaces groups of equal rewards": self.dynamic_sample,
            "--replay_buffer_size replaces groups of equal rewards; use 0": self.replay_buffer_size > 0,
            "--reroll_start_fraction samples prompts of low rewards again; use 1": self.reroll_start_fraction < 1,
            "--streaming_partial_batch true begins with groups whose rewards differ": self.streaming_partial_batch,
            "--scale_rewards gdpo normalises each reward function": self.scale_rewards == "gdpo",
            "--kl_in_reward true lowers rewards; use false": bool(self.kl_in_reward) and self.beta > 0,
        }
        for obstacle in (text for text, given in by_rewards.items() if given and not compares):
            yield f"{subject}: without --reward_funcs it teaches alone, and {obstacle}"
        if not rewards and self.eval_strategy != "no":
            yield (
                f"--eval_strategy: {self.eval_strategy}: evaluation measures rewards; give --reward_funcs, with "
                "--reward_weights 0 to learn from the teacher alone, or --eval_strategy no"
            )

    def _router_problems(self) -> Iterator[str]:
        """Settings that do not go with the load-balancing loss."""
        given = "none" if self.router_aux_loss_coef is None else f"{self.router_aux_loss_coef:g}"
        obstacles = {
            "use_reentrant of --gradient_checkpointing_kwargs hides router logits from the loss; drop it": (
                self.gradient_checkpointing and self.gradient_checkpointing_kwargs.get("use_reentrant")
            ),
            f"ranks of --sequence_parallel_size {self.sequence_parallel_size} have parts of a forward pass, and the "
            "loss is of a whole one; use 1": self.sequence_parallel_size > 1,
        }
        for obstacle in (text for text, is_given in obstacles.items() if is_given):
            yield f"--router_aux_loss_coef: {given}: {obstacle}, or --router_aux_loss_coef 0"

    def _replay_problems(self) -> Iterator[str]:
        """Settings that do not go with routing replay."""
        makers, mode = in_use(self, COMPLETION_SETTINGS), self.moe_router_replay
        of_rollout = {
            "LMDeploy returns no experts; use trainer": self.use_lmdeploy,
            "servers of `swift rollout` return no experts; --vllm_mode colocate or dedicated, or trainer": (
                has_own_engine(self) and self.vllm_mode == "server"
            ),
            f"{', '.join(makers)} puts completions together from several requests; use trainer": bool(makers),
            "the experts of tokens before a weight sync are lost; --in_flight_updates false": self.in_flight_updates,
            "vLLM needs its prefix cache for it; --vllm_enable_prefix_caching true": (
                self.use_vllm and not self.vllm_enable_prefix_caching
            ),
        }
        of_trainer = {
            "--old_logprobs sampler leaves out the pass whose experts it replays; --old_logprobs trainer, or rollout": (
                self.old_logprobs == "sampler"
            ),
        }
        obstacles = {
            f"ranks of --sequence_parallel_size {self.sequence_parallel_size} have parts of a forward pass; use 1": (
                self.sequence_parallel_size > 1
            ),
            **(of_rollout if mode == "rollout" else of_trainer),
        }
        for obstacle in (text for text, is_given in obstacles.items() if is_given):
            yield f"--moe_router_replay: {mode}: {obstacle}"

    def _rollout_problems(self) -> Iterator[str]:
        """Settings that contradict the user's code that makes completions."""
        plays_env = self.multi_turn_scheduler and self.gym_env  # one that plays environments; checked later
        makers = in_use(self, [name for name in COMPLETION_SETTINGS if name != "gym_env" or not plays_env])
        if len(makers) > 1:
            yield f"{makers[0]}: together with {' and '.join(makers[1:])}: each of them makes the completions; give one"
        if makers and not has_own_engine(self) and (self.fsdp or (self.deepspeed or "").startswith("zero3")):
            sharding = f"--fsdp {self.fsdp}" if self.fsdp else f"--deepspeed {self.deepspeed}"
            yield (
                f"{makers[0]}: each rank calls it with its own prompts, and {sharding} samples on all ranks in step; "
                "--use_vllm true, --vllm_mode dedicated, or --deepspeed zero2"
            )
        if self.rollout_func is not None and self.in_flight_updates:
            yield (
                f"--rollout_func: {self.rollout_func}: weights cannot change in the middle of a call; "
                "--in_flight_updates false"
            )
        if self.max_turns is not None and not (self.multi_turn_scheduler or self.gym_env or self.rollout_tools):
            yield f"--max_turns: {self.max_turns}: no effect with one answer per completion; leave it out"
        if self.use_gym_env and not (self.gym_env or self.multi_turn_scheduler):
            yield "--use_gym_env: true: no environment is named; give --gym_env NAME, or --multi_turn_scheduler"
        if self.use_gym_env is False and self.gym_env:
            yield f"--use_gym_env: false: contradicts --gym_env {self.gym_env}; leave one of them out"
        idle = [name for name in ENVIRONMENT_REWARDS if name in self.reward_funcs and not in_use(self, REWARD_SETTINGS)]
        for name in idle:
            yield (
                f"--reward_funcs: {name}: nothing rewards completions while they are made; give "
                f"{', '.join(f'--{rewarder}' for rewarder in REWARD_SETTINGS)}, or another reward function"
            )

    def _correction_problems(self, changes: list[str]) -> Iterator[str]:
        """Settings that need unbiased `sampler_logprobs`, which truncation and penalties (`changes`) bias.

        Engines report log-probs before both, and the ratio of a sequence multiplies that bias.
        """
        change = f"--{changes[0]} {getattr(self, changes[0])}"
        bias = f"the sampler's log-probs are not those of the whole vocabulary with {change}"
        mode = self.rollout_importance_sampling_mode or "none"
        recorded = self.replay_buffer_size > 0 and not self.replay_recompute_logps
        delta = self.off_policy_sequence_mask_delta
        refused = {
            f"--off_policy_sequence_mask_delta: {delta}": (delta is not None, "leave it out"),
            "--old_logprobs: sampler": (self.old_logprobs == "sampler", "--old_logprobs trainer"),
            f"--rollout_kl_coef: {self.rollout_kl_coef}": (self.rollout_kl_coef > 0, "--rollout_kl_coef 0"),
            "--replay_recompute_logps: false": (recorded, "--replay_recompute_logps true"),
            "--kl_in_reward: true": (bool(self.kl_in_reward) and self.beta > 0, "--kl_in_reward false"),
            f"--rollout_importance_sampling_mode: {mode}": (
                mode.startswith("sequence_") or (mode != "none" and self.loss_type == "vespo"),
                "--rollout_importance_sampling_mode none" if self.loss_type == "vespo" else "a token mode",
            ),
        }
        for setting, (is_given, fix) in refused.items():
            if is_given:
                yield f"{setting}: {bias}; {fix}, or leave --{changes[0]} out"

    def _streaming_problems(self) -> Iterator[str]:
        """Settings that need the whole global batch, or that do not support parts of one."""
        batch_scaled = self.advantage_estimator == "reinforce_plus_plus" or self.scale_rewards in ("batch", "gdpo")
        several = (self.steps_per_generation or 0) > (self.gradient_accumulation_steps or 1)
        obstacles = {
            f"--advantage_estimator {self.advantage_estimator} --scale_rewards {self.scale_rewards} needs the rewards "
            "of the whole batch; use --scale_rewards group or none": batch_scaled,
            "--loss_type bnpo normalises each nominal micro-batch; use dapo": self.loss_type == "bnpo",
            "--kl_in_reward true needs the reference's log-probs before advantages; use --kl_in_reward false": (
                bool(self.kl_in_reward) and self.beta > 0
            ),
            "--top_entropy_quantile ranks the tokens of the global batch; use 1.0": self.top_entropy_quantile < 1,
            "an entropy bonus is a mean over the global batch; use --entropy_coef 0 --use_adaptive_entropy false": (
                self.entropy_coef > 0 or self.use_adaptive_entropy
            ),
            "--lora_dropout needs a pass over the global batch before the first update; use 0": self.tuner_dropout > 0,
            "gradients are small until all have arrived, and --torch_dtype float16 loses small ones; use bfloat16": (
                self.torch_dtype == "float16"
            ),
            "the load-balancing loss is a mean over the global batch; use --router_aux_loss_coef 0": (
                self.router_aux_loss_coef != 0
            ),
            "several optimizer steps per generation batch wait for its end anyway; use --steps_per_generation "
            f"{self.gradient_accumulation_steps}": several,
            "--reward_model needs the trainer's process, which trains; use a reward function": bool(self.reward_model),
            "--deepspeed and --fsdp cut gradients over ranks as they come, before the normaliser is known; use DDP": (
                bool(self.deepspeed or self.fsdp)
            ),
        }
        for obstacle in (text for text, given in obstacles.items() if given):
            yield f"--streaming_partial_batch: true: {obstacle}, or --streaming_partial_batch false"

    def changed_logprobs(self) -> list[str]:
        """Settings in use that make the engine's log-probs differ from those over the whole vocabulary.

        Where the trainer's model samples, the mass that truncation keeps is known (`Completion.log_mass`).
        """
        is_mass_unknown = has_own_engine(self) or self.rollout_func is not None
        return [*(self._truncations() if is_mass_unknown else ()), *self._penalties()]

    def _truncations(self) -> list[str]:
        given = {"top_p": self.top_p < 1, "top_k": self.top_k > 0, "min_p": self.min_p > 0}
        return [name for name, is_given in given.items() if is_given]

    def _penalties(self) -> list[str]:
        given = {
            "repetition_penalty": self.repetition_penalty != 1.0,
            "vllm_guided_decoding_regex": self.vllm_guided_decoding_regex is not None,
            "generation_kwargs": self.biased_kwargs(),
        }
        return [name for name, is_given in given.items() if is_given]

    def notes(self) -> Iterator[str]:
        if self.teacher_deepspeed and self.shards_weights:
            way = f"--{self.sharded_by} {getattr(self, self.sharded_by)}"
            yield f"--teacher_deepspeed: {self.teacher_deepspeed}: no effect with {way}, which shards the teacher, too"
        if self.packing is not None:
            yield f"--packing: {str(self.packing).lower()}: changes nothing: completions are packed always"
        if self.dataloader_drop_last is False:
            yield "--dataloader_drop_last: false: changes nothing: an incomplete last batch is left out always"
        if not has_own_engine(self):
            idle = {"vllm_sync_interval": self.vllm_sync_interval > 1, "vllm_enable_lora": self.vllm_enable_lora}
            for name in (name for name, given in idle.items() if given):
                yield (
                    f"--{name}: {str(getattr(self, name)).lower()}: no effect where the trainer's own model "
                    "samples; --use_vllm true, or --vllm_mode dedicated"
                )
        room = (self.vllm_max_model_len or math.inf) - self.max_completion_length
        if self.use_vllm and room < (self.max_length or 0):
            yield (
                f"--vllm_max_model_len: {self.vllm_max_model_len}: below --max_length {self.max_length} + "
                f"--max_completion_length {self.max_completion_length}: completions of prompts over "
                f"{max(0, room)} tokens end there"
            )
        if self.dynamic_sample and self.async_generate and self.prefetch_depth > 1:
            yield (
                f"--prefetch_depth: {self.prefetch_depth}: with --dynamic_sample one batch is made ahead, because "
                "where the next one begins in the stream of prompts is known at its end only"
            )
        is_mass_unknown = has_own_engine(self) or self.rollout_func is not None
        compared = "cannot compare" if is_mass_unknown else "compares"
        for name in self._truncations():
            yield (
                f"--{name}: {getattr(self, name)}: truncated sampling biases the gradient, because the trainer uses "
                f"the whole vocabulary; it {compared} the sampler's log-probs with its own"
            )
        for name in self._penalties():
            yield f"--{name}: {getattr(self, name)}: changes the sampled distribution, which biases the gradient"
