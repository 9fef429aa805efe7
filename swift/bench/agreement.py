"""Do both trainers compute the same gradient? On the same ids, mixed lengths, from the same weights."""

from __future__ import annotations

import copy
import tempfile
from dataclasses import replace
from typing import Any

import torch

from swift.bench import swift_side, trl_side
from swift.bench.rollouts import frozen
from swift.bench.work import Work

REQUIRED_COSINE = 0.9999


def agreement(work: Work) -> dict[str, float]:
    """Cosine and relative size of the two gradients of one optimizer step, and both losses.

    In float32, whatever the work is done in: in 16 bits two orders of the same sum differ by more than is asked here.
    With beta > 0 the policy is moved a little away from the reference first, because the gradient of the KL term
    is zero where they are equal.
    """
    work = replace(work, dtype="float32", recompute=work.device == "cuda")
    rollouts = frozen(work, lengths="forced" if work.lengths == "tail" else "mixed")
    start = swift_side.load_model(work)
    policy = _moved(start) if work.beta > 0 else start
    ours, our_loss = _swift(work, copy.deepcopy(policy), start, rollouts)
    theirs, their_loss = _trl(work, copy.deepcopy(policy), start, rollouts)
    assert ours.keys() == theirs.keys(), "different parameters"
    a, b = (torch.cat([grads[name].flatten().double() for name in sorted(ours)]) for grads in (ours, theirs))
    return {
        "cosine": float(torch.nn.functional.cosine_similarity(a, b, dim=0)),
        "norm_ratio": float(a.norm() / b.norm()),
        "loss_swift": our_loss,
        "loss_trl": their_loss,
    }


def _moved(model: Any) -> Any:
    moved = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in moved.parameters():
            noise = torch.randn(parameter.shape, generator=generator).to(parameter.device)
            parameter.add_(noise * 0.02 * parameter.std())
    return moved


def _gradients(model: Any) -> dict[str, torch.Tensor]:
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}


def _swift(work: Work, policy: Any, start: Any, rollouts: list) -> tuple[dict[str, torch.Tensor], float]:
    from swift.models.reference import FrozenReference

    with tempfile.TemporaryDirectory() as folder:
        reference = FrozenReference(copy.deepcopy(start)) if work.beta > 0 else None
        trainer = swift_side.make_trainer(work, policy, folder, reference=reference)
        loss = swift_side.backward(trainer, rollouts)
    return _gradients(policy), loss


def _trl(work: Work, policy: Any, start: Any, rollouts: list) -> tuple[dict[str, torch.Tensor], float]:
    with tempfile.TemporaryDirectory() as folder:
        # beta is set afterwards: the constructor would load a reference of its own, which is made here
        trainer = trl_side.make_trainer(replace(work, beta=0.0), folder, model=policy)
        trainer.beta = work.beta
        batches = trl_side.batches_of(work, rollouts)
        if work.beta > 0:
            for batch in batches:
                batch["ref_per_token_logps"] = _reference_logprobs(start, batch)
        loss = trl_side.backward(trainer, batches)
    return _gradients(policy), loss


def _reference_logprobs(start: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """[rows, completion tokens], by nothing but the model's own forward pass."""
    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)
    mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1)
    with torch.no_grad():
        logits = start(input_ids=ids, attention_mask=mask).logits[:, -batch["completion_ids"].size(1) - 1 : -1]
    return logits.log_softmax(-1).gather(2, batch["completion_ids"][:, :, None])[:, :, 0]
