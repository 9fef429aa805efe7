"""Generalized knowledge distillation with TRL's GKDTrainer: the student learns a teacher's distribution of tokens.

Answers are those of the data, the student's own (`--lmbda`) or the teacher's (`--seq_kd`); arXiv:2306.13649.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from swift.devices import own_device
from swift.errors import ConfigError
from swift.flags import REQUIRED, flag
from swift.plugin.registry import methods
from swift.trainers.trl.method import Method


@dataclass(kw_only=True)
class DistillationParameters:
    """Settings of distillation."""

    teacher_model: str | None = flag(group="Model", unset=REQUIRED, resume="fixed")
    """Folder or hub id of the teacher, which has the model's vocabulary."""

    lmbda: float = flag(0.5, at_least=0, at_most=1, group="Objective")
    """Share of batches with answers that the model samples itself; the others have those of the data."""

    beta: float = flag(0.5, at_least=0, at_most=1, group="Objective")
    """Generalized Jensen-Shannon divergence between the forward (0) and the reverse (1) KL."""

    seq_kd: bool = flag(False, group="Objective", everyday=False)
    """Whether the teacher samples the other answers, instead of those of the data."""

    temperature: float = flag(0.9, at_least=0.01, group="Sampling")
    """Sampling temperature."""

    max_completion_length: int = flag(512, at_least=1, aliases=("max_new_tokens", "response_length"), group="Sampling")
    """Maximum number of sampled tokens."""


def load_teacher(args: Any, model: Any) -> dict[str, Any]:
    """The teacher, frozen, on the device of this process; without weights if the model has none.

    Raises:
        ConfigError: it cannot be loaded, or has another vocabulary; rows are shared whose answers are sampled.
    """
    from swift.models.reference import load_other
    from swift.models.vision import placeholder_ids

    if args.sequence_parallel_size > 1 and (args.lmbda or args.seq_kd):
        raise ConfigError(
            f"--sequence_parallel_size: {args.sequence_parallel_size}: processes share rows of the data, not answers "
            "that are sampled; give --lmbda 0 and leave out --seq_kd, or use --deepspeed or --fsdp if memory is short"
        )
    device = "meta" if model.device.type == "meta" else own_device()
    teacher: Any = load_other(args.teacher_model, args, device, "--teacher_model", beside=model)
    teacher.requires_grad_(False)
    theirs, ours = (network.config.get_text_config().vocab_size for network in (teacher, model))
    if placeholder_ids(teacher.config) != placeholder_ids(model.config):
        raise ConfigError(
            f"--teacher_model: {args.teacher_model}: other tokens than the model's stand for images; give a teacher of "
            "the same family"
        )
    if theirs != ours:
        raise ConfigError(
            f"--teacher_model: {args.teacher_model}: a vocabulary of {theirs} tokens, and the model's has {ours}; "
            "give a teacher of the same family"
        )
    return {"teacher_model": teacher}


def _options(args: Any) -> dict[str, Any]:
    return {
        "max_length": None,  # rows over it are left out already
        "disable_dropout": False,
        "lmbda": args.lmbda,
        "beta": args.beta,
        "seq_kd": args.seq_kd,
        "temperature": args.temperature,
        "max_new_tokens": args.max_completion_length,
    }


methods["gkd"] = Method(
    parameters=DistillationParameters,
    summary="generalized knowledge distillation (arXiv:2306.13649)",
    trainer="trl.experimental.gkd:GKDTrainer",
    config="trl.experimental.gkd:GKDConfig",
    rows="turn",
    fuses_head=True,
    options=_options,
    parts=load_teacher,
    overrides=("swift.trainers.preferences.distillation:Distilled",),
    in_trl={
        "learning_rate": 2e-5,
        "max_length": 1024,
        "lmbda": 0.5,
        "beta": 0.5,
        "temperature": 0.9,
        "seq_kd": False,
        "max_completion_length": 128,
    },
    commands_of_trl=("gkd",),
)
