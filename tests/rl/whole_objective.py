"""The product's loss of a padded window with every option at once, put together from `swift.rl`."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from padded_windows import MAX_COMPLETION_LENGTH, Outcome, Window
from torch import Tensor

from swift.rl.correction import off_policy_sequence_mask, sampler_correction, sampler_mismatch
from swift.rl.entropy import entropy_bonus, top_entropy_threshold
from swift.rl.global_batch import BatchCounts, count_batch, nominal_batch_tokens
from swift.rl.losses import LossConfig, get_loss, sequence_weights
from swift.rl.objective import LossOutput, policy_loss
from swift.rl.segments import Segments


@dataclass(frozen=True)
class Options:
    """Settings beside those of the loss; the defaults are off.

    correction: keyword arguments of `sampler_correction`.
    with_sampler: there are log-probs of the sampler for the sequence mask.
    """

    loss: LossConfig
    with_old: bool = True
    with_sampler: bool = False
    correction: dict | None = None
    sequence_mask_delta: float | None = None
    quantile: float = 1.0
    entropy_coefficient: float = 0.0


def run_ours(
    window: Window,
    options: Options,
    *,
    batch: int = 3,
    cut: list[list[int]] | None = None,
    nominal: int | None = None,
    counts: BatchCounts | None = None,
    max_completion_length: int = MAX_COMPLETION_LENGTH,
) -> Outcome:
    """The window in micro-batches of `batch` sequences, laid out as TRL's `run_loss` lays out its own; or in a `cut`.

    `nominal` sequences are a nominal micro-batch (None: `batch`). `counts` replaces those of `window` when this is one
    rank's part.
    """
    trained = window.trained
    nominal = nominal or batch
    weights = sequence_weights(
        get_loss(options.loss.loss_type),
        count_batch(trained, nominal) if counts is None else counts,
        trained,
        nominal_tokens=nominal_batch_tokens(trained, nominal),
        max_completion_length=max_completion_length,
    )
    kept = window.mask.bool()
    if options.quantile < 1:
        kept &= window.entropies >= top_entropy_threshold(window.entropies[kept], options.quantile)
    policy, entropies = window.policy.clone().requires_grad_(), window.entropies.clone().requires_grad_()
    total, metrics, outputs = 0.0, {}, []
    for rows in cut or torch.arange(len(window)).split(batch):
        real = window.completion_mask[rows].bool()
        mask_T, index_T = window.mask[rows][real], real.nonzero()[:, 0]
        segments = Segments(mask_T.bool(), index_T, len(real))
        policy_T, keep_T = policy[rows][real], kept[rows][real].to(policy.dtype)
        old_T, sampler_T = (values[rows][real] for values in (window.old, window.sampler))
        old_T = old_T if options.with_old else policy_T.detach()
        advantages_T = segments.at_tokens(window.advantages[rows])
        output = policy_loss(
            policy_T,
            config=options.loss,
            advantages_T=advantages_T,
            segments=segments,
            token_weights_T=policy.new_tensor(weights)[rows][index_T] * mask_T,
            old_logprobs_T=old_T if options.with_old else None,
            ref_logprobs_T=window.ref[rows][real],
            correction=_correction(options, old_T, sampler_T, segments),
            keep_T=keep_T * _sequence_mask(options, policy_T, old_T, sampler_T, advantages_T, segments),
        )
        loss = output.loss
        if options.entropy_coefficient:
            loss = loss + entropy_bonus(
                entropies[rows][real],
                mask_T,
                keep_T=keep_T,
                coefficient=options.entropy_coefficient,
                num_tokens=float(kept.sum()),
            )
        loss.backward()
        total += loss.item()
        outputs.append(output)
        for name, (sum_of, count) in output.means.items():
            metrics.setdefault(name, []).append((sum_of / count.clamp(min=1)).item())
    entropy_gradient = torch.zeros_like(entropies) if entropies.grad is None else entropies.grad
    return Outcome(total, policy.grad, entropy_gradient, metrics, outputs)


def run_window(
    window: Window,
    config: LossConfig,
    *,
    cut: list[list[int]] | None = None,
    nominal: int | None = None,
    counts: BatchCounts | None = None,
    **options,
) -> Outcome:
    """The window as one micro-batch, or in those of `cut`; it is one nominal micro-batch unless `nominal` says less."""
    return run_ours(window, Options(config, **options), batch=len(window), cut=cut, nominal=nominal, counts=counts)


def means(outputs: list[LossOutput]) -> dict[str, float]:
    """The metrics of several micro-batches, reduced."""
    totals = {name: sum(output.means[name] for output in outputs) for name in outputs[0].means}
    return {name: (total[0] / total[1]).item() for name, total in totals.items()}


def _sequence_mask(
    options: Options, policy_T: Tensor, old_T: Tensor, sampler_T: Tensor, advantages_T: Tensor, segments: Segments
) -> Tensor | float:
    if options.sequence_mask_delta is None:
        return 1.0
    compared_T = sampler_T if options.with_sampler else old_T
    return off_policy_sequence_mask(advantages_T, policy_T, compared_T, segments, delta=options.sequence_mask_delta)


def _correction(options: Options, old_T: Tensor, sampler_T: Tensor, segments: Segments):
    if options.correction is None:
        return None
    eta_T = sampler_mismatch(old_T, sampler_T, segments.mask_T)
    return sampler_correction(eta_T, segments, **options.correction)
