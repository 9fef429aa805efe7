"""The settings of each mode: the groups of its components, composed by inheritance."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from swift.data.arguments import DataArguments, PromptArguments
from swift.flags import flag
from swift.models.arguments import CheckpointArguments, ModelArguments, TunerArguments
from swift.rewards.arguments import RewardArguments
from swift.rl.arguments import ObjectiveArguments
from swift.rollout.arguments import EngineArguments, GenerationArguments, SamplingArguments
from swift.rollout.placement import has_own_engine
from swift.trainers.arguments import OptimizationArguments, RunArguments

GROUPS = (
    "Model",
    "Data",
    "Optimization",
    "Sampling",
    "Objective",
    "Asynchronous and data",
    "Reward",
    "Engine",
    "Run",
)
"""Headings of the help, in its order."""


@dataclass(kw_only=True)
class CommonArguments:
    """What every mode understands."""

    GROUP: ClassVar[str] = "Run"

    debug: bool = flag(False, everyday=False)
    """Show tracebacks of anticipated errors too. The environment variable SWIFT_DEBUG=1 does the same."""

    json: bool = flag(False, everyday=False)
    """Print machine-readable output."""


def _model_missing(args: Any) -> Iterator[str]:
    if not args.model and not args.adapters:
        yield "--model: missing: the mode needs a model; give --model <folder or hub id>, or --adapters"


def _backend_problems(args: Any) -> Iterator[str]:
    if args.use_vllm and args.use_lmdeploy:
        yield "--use_lmdeploy: true: excludes --use_vllm true; set one of them to false"
    expected = "vllm" if args.use_vllm else "lmdeploy" if args.use_lmdeploy else None
    if expected and args.infer_backend not in (None, expected):
        yield f"--infer_backend: {args.infer_backend}: contradicts --use_{expected} true; drop one of the two"


def _training_data_missing(args: Any) -> Iterator[str]:
    if not args.dataset:
        yield "--dataset: missing: there is nothing to train on; give --dataset <file, hub id or reasoning_gym:task>"
    if args.streaming and args.max_steps <= 0:
        yield f"--max_steps: {args.max_steps}: a stream has no known end; give --max_steps, or --streaming false"
    for kind in ("save", "eval"):
        if args.streaming and getattr(args, f"{kind}_strategy") == "epoch":
            yield f"--{kind}_strategy: epoch: a stream has no epochs; use --{kind}_strategy steps --{kind}_steps N"


@dataclass(kw_only=True)
class MethodArguments:
    """Which kind of training `swift rlhf` does."""

    GROUP: ClassVar[str] = "Model"

    rlhf_type: Literal["grpo"] | None = flag(unset="required")
    """Algorithm family."""


@dataclass(kw_only=True)
class RLHFArguments(
    CommonArguments,
    RunArguments,
    EngineArguments,
    RewardArguments,
    ObjectiveArguments,
    SamplingArguments,
    OptimizationArguments,
    PromptArguments,
    ModelArguments,
    MethodArguments,
):
    """`swift rlhf`: online reinforcement learning."""

    log_completions: bool = flag(False, group="Run")
    """Show sample completions in the trackers of `--report_to` too. completions.jsonl is always written."""

    log_unique_prompts: bool = flag(False, group="Run", needs="log_completions", everyday=False)
    """Show one completion of each prompt in the trackers, not several of the same. completions.jsonl has all."""

    def problems(self) -> Iterator[str]:
        """What is wrong with these settings, one line each."""
        if self.rlhf_type is None:
            yield "--rlhf_type: missing: required; valid: grpo"
        yield from _model_missing(self)
        yield from _training_data_missing(self)
        yield from self._engine_problems()

    def _engine_problems(self) -> Iterator[str]:
        yield from _backend_problems(self)
        if not self.ds3_gather_for_generation and (self.use_vllm or self.use_lmdeploy):
            yield (
                "--ds3_gather_for_generation: false: an inference engine needs the gathered weights; "
                "use --ds3_gather_for_generation true"
            )
        yield from self._adapter_problems()
        yield from self._correction_problems()
        yield from self._reference_problems()
        yield from self._advantage_problems()
        yield from self._dynamic_problems()
        yield from self._streaming_problems()
        yield from self._width_problems()
        yield from self._precision_problems()
        yield from self._rollout_func_problems()
        start, colon, steps = self.parity_check.partition(":")
        if not (start == "every" and steps.isdigit() and int(steps) > 0) and (
            colon or start not in ("start", "warn", "off")
        ):
            yield f"--parity_check: {self.parity_check}: not a choice; valid: start, every:N, warn, off"
        if self.max_length and self.vllm_max_model_len and self.use_vllm:
            total = self.max_length + self.max_completion_length
            if total > self.vllm_max_model_len:
                yield (
                    f"--vllm_max_model_len: {self.vllm_max_model_len}: below --max_length {self.max_length} + "
                    f"--max_completion_length {self.max_completion_length} = {total}; raise it, or lower these"
                )

    def _adapter_problems(self) -> Iterator[str]:
        """An adapter that is to be sent alone must exist and fit."""
        if not self.vllm_enable_lora or not has_own_engine(self):
            return
        if self.tuner_type == "full":
            yield (
                "--vllm_enable_lora: true: --tuner_type full trains no adapter that could be sent alone; "
                "--tuner_type lora, or --vllm_enable_lora false"
            )
        elif self.vllm_max_lora_rank is not None and self.lora_rank > self.vllm_max_lora_rank:
            yield (
                f"--vllm_max_lora_rank: {self.vllm_max_lora_rank}: below --lora_rank {self.lora_rank}; "
                "leave it out, or make them equal"
            )

    def _rollout_func_problems(self) -> Iterator[str]:
        """Ranks that hold parts of one policy sample in step, and a function does as it likes."""
        if self.rollout_func is None:
            return
        spread = f"--fsdp {self.fsdp}" if self.fsdp else f"--deepspeed {self.deepspeed}"
        if not has_own_engine(self) and (self.fsdp or (self.deepspeed or "").startswith("zero3")):
            yield (
                f"--rollout_func: {self.rollout_func}: each rank calls it with its own prompts, and {spread} samples "
                "on all ranks in step; --use_vllm true, --vllm_mode dedicated, or --deepspeed zero2"
            )
        if self.in_flight_updates:
            yield (
                f"--rollout_func: {self.rollout_func}: weights cannot change in the middle of a call; "
                "--in_flight_updates false"
            )

    def _width_problems(self) -> Iterator[str]:
        if self.vllm_tensor_parallel_size > 1 and self.infer_backend == "transformers" and has_own_engine(self):
            yield (
                f"--vllm_tensor_parallel_size: {self.vllm_tensor_parallel_size}: the transformers engine computes on "
                "one device; --use_vllm true, or 1"
            )

    def _precision_problems(self) -> Iterator[str]:
        """A token has 1/N of the loss: 6 % of a gradient is lost at N = 65,000 tokens of a step, 59 % at a million."""
        if self.torch_dtype == "float16":
            yield (
                "--torch_dtype: float16: gradients of a step of many tokens are below its smallest numbers, and "
                "reinforcement learning does not scale losses; use --torch_dtype bfloat16, or float32"
            )

    def _correction_problems(self) -> Iterator[str]:
        """A sequence's ratio multiplies the bias of each of its tokens."""
        mode = self.rollout_importance_sampling_mode or ""
        changes = self.changed_logprobs()
        compared = {
            f"--off_policy_sequence_mask_delta: {self.off_policy_sequence_mask_delta}": (
                self.off_policy_sequence_mask_delta is not None,
                "leave it out",
            ),
            "--old_logprobs: sampler": (self.old_logprobs == "sampler", "--old_logprobs trainer"),
            "--replay_recompute_logps: false": (
                self.replay_buffer_size and not self.replay_recompute_logps,
                "--replay_recompute_logps true",
            ),
        }
        for flag_value, (given, fix) in compared.items() if changes else ():
            if given:
                yield (
                    f"{flag_value}: with --{changes[0]} {getattr(self, changes[0])} the sampler's log-probs are not "
                    f"those of the whole vocabulary, so a policy that has not moved looks as if it had; {fix}, or "
                    f"leave --{changes[0]} out"
                )
        if self.kl_in_reward and self.beta > 0 and changes:
            yield (
                f"--kl_in_reward: true: the sampler's log-probs are not those of the whole vocabulary with "
                f"--{changes[0]} {getattr(self, changes[0])}, so their sum is no KL; --kl_in_reward false, or leave "
                f"--{changes[0]} out"
            )
        if mode != "none" and mode and self.loss_type == "vespo" and changes:
            yield (
                f"--rollout_importance_sampling_mode: {mode}: vespo sums the sampler's bias with --{changes[0]} "
                f"{getattr(self, changes[0])} over the sequence; --rollout_importance_sampling_mode none, or leave "
                f"--{changes[0]} out"
            )
        if mode.startswith("sequence_") and changes:
            yield (
                f"--rollout_importance_sampling_mode: {mode}: the sampler's log-probs are not those of the whole "
                f"vocabulary with --{changes[0]} {getattr(self, changes[0])}; a token mode, or leave --{changes[0]} out"
            )

    def _reference_problems(self) -> Iterator[str]:
        if self.sync_ref_model and self.tuner_type == "lora" and self.ref_model not in (None, self.model):
            yield (
                "--sync_ref_model: true: an adapter cannot be mixed into another model; leave --ref_model out, "
                "or use --tuner_type full"
            )

    def _advantage_problems(self) -> Iterator[str]:
        if self.scale_rewards != "gdpo":
            return
        if self.advantage_estimator != "grpo":
            yield (
                f"--scale_rewards: gdpo: normalises each reward function on its own, so there is no sum for "
                f"--advantage_estimator {self.advantage_estimator}; --advantage_estimator grpo, or another scale"
            )
        elif self.kl_in_reward and self.beta > 0:
            yield (
                "--scale_rewards: gdpo: normalises each reward function on its own, so there is no sum to subtract the "
                "KL from; --kl_in_reward false, or another scale"
            )

    def _dynamic_problems(self) -> Iterator[str]:
        """Groups are judged while others decode, which not everything can."""
        if not self.dynamic_sample:
            return
        if self.reward_model and self.async_generate:
            yield (
                f"--dynamic_sample: true: with --async_generate groups are judged while the trainer computes, and "
                f"--reward_model {' '.join(self.reward_model)} needs the trainer's process; --async_generate false, "
                "or a reward function"
            )
        if not self.ds3_gather_for_generation:
            yield (
                "--dynamic_sample: true: ranks that sample with weights spread over them decode in step, and could not "
                "replace a group on their own; --ds3_gather_for_generation true"
            )

    def _streaming_problems(self) -> Iterator[str]:
        """What cannot be known before the last group of a window is there, or is not made for parts of one."""
        if not self.streaming_partial_batch:
            return
        batch_scaled = self.advantage_estimator == "reinforce_plus_plus" or self.scale_rewards in ("batch", "gdpo")
        windows = (self.steps_per_generation or 0) > self.gradient_accumulation_steps
        obstacles = {
            f"--advantage_estimator {self.advantage_estimator} --scale_rewards {self.scale_rewards} needs the rewards "
            "of the whole batch; use --scale_rewards group or none": batch_scaled,
            "--loss_type bnpo normalises each nominal micro-batch; use dapo": self.loss_type == "bnpo",
            "--kl_in_reward true needs the reference's log-probs before advantages; use --kl_in_reward false": (
                self.kl_in_reward and self.beta > 0
            ),
            "--top_entropy_quantile ranks the tokens of the whole window; use 1.0": self.top_entropy_quantile < 1,
            "an entropy bonus is a mean over the whole window; use --entropy_coef 0 --use_adaptive_entropy false": (
                self.entropy_coef > 0 or self.use_adaptive_entropy
            ),
            "--lora_dropout needs a pass over the window before the first update; use 0": bool(self.lora_dropout),
            "several optimizer steps per generation batch wait for its end anyway; use --steps_per_generation "
            f"{self.gradient_accumulation_steps}": windows,
            "--reward_model needs the trainer's process, which trains; use a reward function": bool(self.reward_model),
            "--deepspeed and --fsdp cut gradients over ranks as they come, before the normaliser is known; use DDP": (
                bool(self.deepspeed or self.fsdp)
            ),
        }
        for obstacle in (text for text, given in obstacles.items() if given):
            yield f"--streaming_partial_batch: true: {obstacle}, or --streaming_partial_batch false"

    def changed_logprobs(self) -> list[str]:
        """Settings in use that make the sampler's log-probs differ from those over the whole vocabulary.

        The transformers engine returns the mass that truncation keeps (`Completion.log_mass`); other engines do not,
        and rollout functions do not pass it on.
        """
        knows_mass = self.infer_backend == "transformers" and self.rollout_func is None
        return [*(() if knows_mass else self._truncations()), *self._penalties()]

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
        """Remarks about settings that work but should be known about."""
        if not has_own_engine(self):
            idle = {"vllm_sync_interval": self.vllm_sync_interval > 1, "vllm_enable_lora": self.vllm_enable_lora}
            for name in (name for name, given in idle.items() if given):
                yield (
                    f"--{name}: {str(getattr(self, name)).lower()}: no effect where the trainer's own model "
                    "samples; --use_vllm true, or --vllm_mode dedicated"
                )
        if self.dynamic_sample and self.async_generate and self.prefetch_depth > 1:
            yield (
                f"--prefetch_depth: {self.prefetch_depth}: with --dynamic_sample one batch is made ahead, because "
                "where the next one begins in the stream of prompts is known at its end only"
            )
        for name in self._truncations():
            yield (
                f"--{name}: {getattr(self, name)}: truncated sampling biases the gradient, because the trainer uses "
                "the whole vocabulary"
            )
        for name in self._penalties():
            yield f"--{name}: {getattr(self, name)}: changes the sampled distribution, which biases the gradient"


@dataclass(kw_only=True)
class SFTArguments(CommonArguments, RunArguments, OptimizationArguments, DataArguments, TunerArguments):
    """`swift sft`: supervised tuning; the loss counts the assistant's turns."""

    max_length: int | None = flag(at_least=1, group="Data", unset="the model's context")
    """Longest row in tokens, prompt and answer together. Longer rows are left out and counted."""

    def problems(self) -> Iterator[str]:
        """What is wrong with these settings, one line each."""
        yield from _model_missing(self)
        yield from _training_data_missing(self)
        if self.optim == "adamw_cpu" and self.torch_dtype == "float16":
            yield (
                "--optim: adamw_cpu: cannot undo the loss scaling of --torch_dtype float16; "
                "use --torch_dtype bfloat16, or --optim adamw"
            )


@dataclass(kw_only=True)
class InferArguments(CommonArguments, GenerationArguments, DataArguments, CheckpointArguments):
    """`swift infer`: answers of a model, at the terminal or for every row of a dataset."""

    temperature: float = flag(0.9, at_least=0, group="Sampling")
    """Sampling temperature; 0 takes the likeliest token each time."""

    result_path: str | None = flag(group="Run", unset="output/infer/<model>-<time>.jsonl")
    """File for the answers to a dataset, one JSON object per row; must not exist."""

    def problems(self) -> Iterator[str]:
        """What is wrong with these settings, one line each."""
        yield from _model_missing(self)


@dataclass(kw_only=True)
class ExportArguments(CommonArguments, CheckpointArguments):
    """`swift export`: fold a LoRA adapter into its model."""

    merge_lora: bool = flag(False, group="Model")
    """Fold the adapters into the weights and save an ordinary model folder."""

    output_dir: str | None = flag(group="Run", unset="<adapter folder>-merged")
    """Folder for the result; must be new or empty."""

    def problems(self) -> Iterator[str]:
        """What is wrong with these settings, one line each."""
        if not self.adapters:
            yield "--adapters: missing: there is nothing to merge; give the checkpoint folder of a LoRA run"
        if not self.merge_lora:
            yield "--merge_lora: false: merging is the only conversion in this version; use --merge_lora true"


@dataclass(kw_only=True)
class MergeLoraArguments(ExportArguments):
    """`swift merge-lora`: `swift export --merge_lora true`."""

    merge_lora: bool = flag(True, group="Model", everyday=False)
    """Fold the adapters into the weights and save an ordinary model folder. Always true here."""


@dataclass(kw_only=True)
class RewardTestArguments(CommonArguments, RewardArguments, DataArguments):
    """`swift reward-test`: reward functions on gold, adversarial or given completions; no model."""

    rows: int = flag(20, at_least=1, group="Reward")
    """Rows of the dataset that are tried."""

    gold_column: str | None = flag(group="Reward", unset="solution, else answer")
    """Column with the gold answers."""

    completions: str | None = flag(group="Reward")
    """A completions.jsonl whose completions are scored again."""

    tokenizer: str | None = flag(group="Reward", unset="lengths are counted in words")
    """Folder of a tokenizer, to count lengths in tokens."""

    min_gold: float = flag(0.0, at_least=0, at_most=1, group="Reward")
    """Least share of rows whose gold answer must reach the function's best score."""

    max_completion_length: int = flag(
        512, at_least=1, aliases=("max_new_tokens", "response_length"), group="Reward", everyday=False
    )
    """Length in tokens that the length rewards take for the longest completion."""

    def problems(self) -> Iterator[str]:
        """What is wrong with these settings, one line each."""
        if not self.dataset and not self.completions:
            yield "--dataset: missing: nothing to score; give --dataset or --completions"


UNUSED_BY_SERVERS = (
    "vllm_mode", "num_infer_workers", "vllm_server_host", "vllm_server_base_url", "vllm_server_api_key",
    "async_generate", "offload_model", "offload_optimizer", "gc_collect_after_offload", "move_model_batches",
)  # fmt: skip
"""Settings of the trainer's side of an engine."""


@dataclass(kw_only=True)
class RolloutServerArguments(CommonArguments, EngineArguments, GenerationArguments, CheckpointArguments):
    """`swift rollout`: a generation server for trainers on other machines."""

    use_vllm: bool | None = flag(  # type: ignore[assignment]
        group="Engine", unset="true unless another backend is named"
    )
    """Serve vLLM; false serves transformers, which needs no further package."""

    vllm_max_model_len: int | None = flag(at_least=1, group="Engine", everyday=False, unset="the model's context")
    """Longest prompt and completion together, in tokens, whatever the backend."""

    vllm_max_num_seqs: int = flag(256, at_least=1, group="Engine", everyday=False)
    """Sequences that an engine decodes at the same time, whatever the backend."""

    host: str = flag("127.0.0.1", group="Run")
    """Address to listen on. Another one than loopback needs `--api_key`."""

    port: int = flag(8000, at_least=0, at_most=65535, group="Run")
    """Port to listen on; 0 takes a free one, which the ready line names."""

    api_key: str | None = flag(group="Run", unset="no authentication")
    """Bearer token that clients must send. The environment variable SWIFT_API_KEY does the same, and other users of the
    machine cannot read it."""

    allow_unauthenticated: bool = flag(False, group="Run", everyday=False)
    """Listen on a public address without a key."""

    weights_folder: str | None = flag(group="Run", everyday=False, unset="files are not read")
    """Folder, shared with the trainer, below which weights and adapters may be named by path. Trainers that see
    the same folder send weights through it."""

    seed: int = flag(42, at_least=0, group="Sampling", everyday=False)
    """Seed of the engines. Requests bring their own; those without one are sampled at random."""

    external_plugins: list[str] = flag([], group="Engine", everyday=False, aliases=("custom_register_path",))
    """Python files that register further backends in `inference_backends`."""

    dry_run: bool = flag(False, group="Run")
    """Check everything, print the plan, and end without loading weights."""

    def problems(self) -> Iterator[str]:
        """What is wrong with these settings, one line each."""
        yield from _model_missing(self)
        yield from _backend_problems(self)
        if not self._is_local() and not self.api_key and not self.allow_unauthenticated:
            yield (
                f"--host: {self.host}: reachable by others without a key; set SWIFT_API_KEY, or give --api_key, "
                "or --allow_unauthenticated true"
            )

    def notes(self) -> Iterator[str]:
        """Remarks about settings that work but should be known about."""
        if not self._is_local() and not self.api_key and self.allow_unauthenticated:
            yield (
                f"warning: --allow_unauthenticated: true: everybody who reaches {self.host} can use this server and "
                "replace its weights"
            )
        for name in UNUSED_BY_SERVERS:
            if getattr(self, name):
                yield f"--{name}: given: not used by swift rollout"

    def _is_local(self) -> bool:
        return self.host in ("localhost", "::1") or self.host.startswith("127.")


@dataclass(kw_only=True)
class ConfigSchemaArguments(CommonArguments):
    """`swift config-schema`: the JSON schema of a mode's settings."""

    mode: Literal["rlhf", "sft", "infer", "export", "reward-test", "rollout"] = flag("rlhf", group="Run")
    """The mode whose settings are described."""


MODES: dict[str, type] = {
    "rlhf": RLHFArguments,
    "sft": SFTArguments,
    "infer": InferArguments,
    "export": ExportArguments,
    "merge-lora": MergeLoraArguments,
    "reward-test": RewardTestArguments,
    "rollout": RolloutServerArguments,
    "config-schema": ConfigSchemaArguments,
}
"""Mode -> its settings."""
