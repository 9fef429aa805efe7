"""What the arguments of a GRPO run say to its loss, to the trainer's step, and to transformers."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from swift.errors import ConfigError, join_problems

if TYPE_CHECKING:
    from swift.rl.losses import LossConfig
    from swift.trainers.grpo.entropy import EntropySettings
    from swift.trainers.grpo.prepare import Parts
    from swift.trainers.grpo.settings import GRPOSettings


def loss_settings(args: Any) -> LossConfig:
    """The policy loss; a KL that lowers the rewards is no term of it."""
    from swift.rl.losses import LossConfig

    try:
        return LossConfig.read(args, beta=0.0 if args.kl_in_reward else args.beta)
    except ValueError as error:
        raise ConfigError(f"--{error}") from error


def entropy_settings(args: Any) -> EntropySettings:
    """What the step does with the policy's entropy."""
    from swift.rl.entropy import AdaptiveEntropy
    from swift.trainers.grpo.entropy import EntropySettings

    controller = None
    if args.use_adaptive_entropy:
        bounds = args.entropy_coef_min, args.entropy_coef_max
        controller = AdaptiveEntropy(args.entropy_coef, args.entropy_target, args.entropy_coef_delta, *bounds)
    return EntropySettings(
        coefficient=args.entropy_coef,
        adaptive=controller,
        quantile=args.top_entropy_quantile,
        log=args.log_entropy,
    )


def trainer_settings(args: Any, *, logprob_support: str = "full", given: Collection[str] = ()) -> GRPOSettings:
    """The step's settings.

    Args:
        args: of the run.
        logprob_support: of the engines (`swift.rollout.engines.base`).
        given: settings that the user wrote; what merely follows from others yields where the engine cannot do it.

    Raises:
        ConfigError: sampler and trainer are to be compared by log-probs that the engine does not have.
    """
    from swift.trainers.grpo.settings import CorrectionSettings, GRPOSettings

    correctable = logprob_support != "raw" or args.temperature == 1.0
    if not correctable:
        join_problems(_uncorrectable(args, given))
    return GRPOSettings(
        loss=loss_settings(args),
        temperature=args.temperature,
        max_completion_length=args.max_completion_length,
        per_device=args.per_device_train_batch_size,
        max_samples=args.mini_batch_size or None,
        max_tokens=args.max_tokens_per_micro_batch,
        keep_dropout=args.tuner_dropout > 0,
        skip_zero_advantage=args.skip_zero_advantage_batches,
        comparable_sampling=correctable and not args.changed_logprobs(),
        correctable_sampling=correctable,
        correction=CorrectionSettings(
            mode=args.rollout_importance_sampling_mode,
            threshold=args.rollout_importance_sampling_threshold,
            lower=args.rollout_importance_sampling_lower,
            sequence_ratio=args.rollout_importance_sampling_ratio,
        ),
        log_offpolicy=args.log_rollout_offpolicy_metrics,
        off_policy_delta=args.off_policy_sequence_mask_delta,
        old_logprobs=args.old_logprobs,
        entropy=entropy_settings(args),
        ce_coef=getattr(args, "ebft_ce_coef", None),
        rl_coef=getattr(args, "ebft_rl_coef", 1.0),
    )


def _uncorrectable(args: Any, given: Collection[str]) -> list[str]:
    """What cannot be done with log-probs at temperature 1 of samples that were drawn at another one."""
    engine = f"this engine returns log-probs at temperature 1, not at --temperature {args.temperature:g}"
    mode, asked = args.rollout_importance_sampling_mode, "rollout_importance_sampling_mode" in given
    problems = {
        f"--old_logprobs: sampler: {engine}; use --old_logprobs trainer, or": args.old_logprobs == "sampler",
        f"--kl_in_reward: true: {engine}, so they cannot be compared with the reference's; use --kl_in_reward false, "
        "or": args.kl_in_reward and args.beta > 0,
        f"--replay_recompute_logps: false: {engine}; use --replay_recompute_logps true, or": (
            args.replay_buffer_size and not args.replay_recompute_logps
        ),
        f"--rollout_importance_sampling_mode: {mode}: {engine}, so their ratio to the trainer's says nothing; use "
        "--rollout_importance_sampling_mode none, or": asked and mode != "none",
    }
    return [f"{text} --temperature 1" for text, wanted in problems.items() if wanted]


def uncorrected_lines(settings: GRPOSettings) -> list[str]:
    """A remark when a correction that follows from other settings cannot be made with this engine."""
    mode = settings.correction.mode
    if settings.correctable_sampling or mode == "none":
        return []
    return [
        f"--rollout_importance_sampling_mode: {mode} (derived): off, because this engine returns log-probs at "
        f"temperature 1, not at --temperature {settings.temperature:g}: tokens of older weights are trained on as if "
        "they were new; --temperature 1, or another engine"
    ]


def max_prompt_length(args: Any) -> int | None:
    """The longest prompt in tokens: `--max_length`, by default what the context leaves beside the completion.

    A prompt leaves at least one token of `--vllm_max_model_len`; the completion ends there.
    """
    longest = _longest_in_context(args)
    most = args.vllm_max_model_len if args.use_vllm else None
    return longest if most is None else min(longest or most, most - 1)


def _longest_in_context(args: Any) -> int | None:
    from swift.models.policy import context_length

    context, completion, longest = context_length(args), args.max_completion_length, args.max_length
    if context is None:
        return None if longest is None else int(longest)
    room = context - completion
    if room < 1:
        raise ConfigError(
            f"--max_completion_length: {completion}: leaves no room for a prompt in the model's context of {context} "
            f"tokens; use at most {context - 1}"
        )
    if longest is not None and longest > room:
        raise ConfigError(
            f"--max_length: {longest}: with --max_completion_length {completion} it exceeds the model's context of "
            f"{context} tokens; use at most {room}"
        )
    return int(longest or room)


def training_arguments(args: Any, folder: Path, parts: Parts) -> Any:
    """TrainingArguments of transformers; a global batch is one of its batches, so it accumulates nothing."""
    from transformers import TrainingArguments

    from swift.trainers.session import on_one_device, training_options

    options = training_options(args, folder, evaluates=parts.eval_prompts is not None)
    return on_one_device(
        TrainingArguments(
            **{**options, **epochs_as_steps(options, parts.plan.steps_per_epoch)},
            max_steps=parts.plan.max_steps,
            gradient_accumulation_steps=1,
            ignore_data_skip=True,
            remove_unused_columns=False,
        )
    )


def epochs_as_steps(options: Mapping[str, Any], steps_per_epoch: int | None) -> dict[str, Any]:
    """Saving and evaluating once per epoch, in steps: transformers sees a stream of batches without epochs."""
    changed: dict[str, Any] = {}
    for kind in ("save", "eval"):
        if options[f"{kind}_strategy"] == "epoch":
            assert steps_per_epoch, "the arguments refuse epochs of streaming data"
            changed |= {f"{kind}_strategy": "steps", f"{kind}_steps": steps_per_epoch}
    return changed
