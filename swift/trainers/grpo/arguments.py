"""Settings of the loss, of the training step and of transformers, from the arguments of a GRPO run."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from swift.errors import ConfigError, join_problems

if TYPE_CHECKING:
    from swift.rl.losses import LossConfig
    from swift.trainers.grpo.prepare import Parts
    from swift.trainers.grpo.settings import DistillationSettings, GRPOSettings


def loss_settings(args: Any) -> LossConfig:
    """Settings of the policy loss; with `--kl_in_reward` its KL coefficient is 0."""
    from swift.rl.losses import LossConfig

    try:
        return LossConfig.read(args, beta=0.0 if args.kl_in_reward else reference_weight(args))
    except ValueError as error:
        raise ConfigError(f"--{error}") from error


def reference_weight(args: Any) -> float:
    """Weight of the KL to the reference; `--beta` of distillation is that of its divergence."""
    return 0.0 if hasattr(args, "lmbda") else float(args.beta)


def distillation_settings(args: Any) -> DistillationSettings | None:
    """Settings of the loss of distillation; None outside of it."""
    from swift.trainers.grpo.settings import DistillationSettings

    if not hasattr(args, "lmbda"):
        return None
    return DistillationSettings(beta=args.beta, sft_alpha=args.sft_alpha, top_k=args.gkd_logits_topk)


def trainer_settings(
    args: Any, *, logprob_support: str = "full", given: Collection[str] = (), router_aux_loss_coef: float = 0.0
) -> GRPOSettings:
    """Settings of the training step.

    Args:
        args: of the run.
        logprob_support: of the engines (`swift.rollout.engines.base`).
        given: names of the settings that the user wrote; a derived correction is off if the engine cannot support it.
        router_aux_loss_coef: see `router_coefficient`.

    Raises:
        ConfigError: a setting needs log-probs at the training temperature, which the engine does not return.
    """
    from swift.rl.entropy import AdaptiveEntropy
    from swift.trainers.grpo.entropy import EntropySettings
    from swift.trainers.grpo.settings import CorrectionSettings, GRPOSettings

    controller = None
    if args.use_adaptive_entropy:
        bounds = args.entropy_coef_min, args.entropy_coef_max
        controller = AdaptiveEntropy(args.entropy_coef, args.entropy_target, args.entropy_coef_delta, *bounds)
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
        entropy=EntropySettings(
            coefficient=args.entropy_coef,
            adaptive=controller,
            quantile=args.top_entropy_quantile,
            log=args.log_entropy,
        ),
        ce_coef=getattr(args, "ebft_ce_coef", None),
        rl_coef=getattr(args, "ebft_rl_coef", 1.0),
        teacher_kl_coef=args.teacher_kl_coef if args.has_teacher and not hasattr(args, "lmbda") else 0.0,
        distillation=distillation_settings(args),
        router_aux_loss_coef=router_aux_loss_coef,
        router_replay=args.moe_router_replay,
    )


def _uncorrectable(args: Any, given: Collection[str]) -> list[str]:
    """Settings that are impossible with log-probs at temperature 1 of samples drawn at another temperature."""
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
    """A line of the plan if a derived correction is off with this engine."""
    mode = settings.correction.mode
    if settings.correctable_sampling or mode == "none":
        return []
    return [
        f"--rollout_importance_sampling_mode: {mode} (derived): off, because this engine returns log-probs at "
        f"temperature 1, not at --temperature {settings.temperature:g}: tokens of older weights are trained on as if "
        "they were new; --temperature 1, or another engine"
    ]


def max_prompt_length(args: Any) -> int | None:
    """Maximum number of tokens of a prompt: `--max_length`, by default the model's context less the completion.

    With vLLM, a prompt also leaves at least one token of `--vllm_max_model_len`, at which the completion ends.
    """
    from swift.models.policy import context_length

    context, completion, longest = context_length(args), args.max_completion_length, args.max_length
    if context is not None:
        room = context - completion
        if room < 1:
            raise ConfigError(
                f"--max_completion_length: {completion}: leaves no room for a prompt in the model's context of "
                f"{context} tokens; use at most {context - 1}"
            )
        if longest is not None and longest > room:
            raise ConfigError(
                f"--max_length: {longest}: with --max_completion_length {completion} it exceeds the model's context of "
                f"{context} tokens; use at most {room}"
            )
        longest = longest or room
    if args.use_vllm and args.vllm_max_model_len is not None:
        longest = min(longest or args.vllm_max_model_len, args.vllm_max_model_len - 1)
    return None if longest is None else int(longest)


def training_arguments(args: Any, folder: Path, parts: Parts) -> Any:
    """TrainingArguments of transformers; one of its batches is a global batch, so it accumulates no gradients."""
    from transformers import TrainingArguments

    from swift.trainers.session import on_one_device, training_options

    options = training_options(
        args, folder, evaluates=parts.eval_prompts is not None, sees=parts.template.vision is not None
    )
    for kind in ("save", "eval"):  # transformers gets a stream of batches, which has no epochs
        if options[f"{kind}_strategy"] == "epoch":
            assert parts.plan.steps_per_epoch, "the arguments refuse epochs of streaming data"
            options |= {f"{kind}_strategy": "steps", f"{kind}_steps": parts.plan.steps_per_epoch}
    return on_one_device(
        TrainingArguments(
            **options,
            max_steps=parts.plan.max_steps,
            eval_on_start=getattr(args, "eval_on_start", False),
            gradient_accumulation_steps=1,
            ignore_data_skip=True,
            remove_unused_columns=False,
        )
    )
