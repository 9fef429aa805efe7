"""The optimizer that `--optim` names where transformers does not have it: an entry of the registry `optimizers`.

An entry is called as `entry(parameter_groups, lr=..., **parameters)` and returns a `torch.optim.Optimizer`.
`parameters` are the settings that it declared when it was registered; each group has its `weight_decay`. A class
method `options(arguments)` of an entry gives other keyword arguments; `attach(trainer)` is called with its trainer.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from swift.errors import ConfigError, first_line
from swift.plugin.registry import optimizers

if TYPE_CHECKING:
    from transformers import Trainer


def is_registered(name: str) -> bool:
    """Whether an `--optim` is an entry of the registry, built in or of a plugin."""
    import swift.trainers.optimizers.adamw_cpu
    import swift.trainers.optimizers.muon  # noqa: F401  # register themselves

    return name in optimizers


def set_own_optimizer(trainer: Trainer, args: Any) -> None:
    """Give a trainer the entry of the registry that `--optim` names; not every trainer takes it as an argument."""
    entry, arguments = optimizers[args.optim], trainer.args
    if hasattr(entry, "attach"):
        entry.attach(trainer)
    if hasattr(entry, "options"):
        trainer.optimizer_cls_and_kwargs = entry, entry.options(arguments)
        return
    if arguments.optim_args:
        raise ConfigError(
            f"--optim_args: {arguments.optim_args}: has no effect with --optim {args.optim}, which has flags of its own"
        )
    parameters = optimizers.parameters_of(args.optim)
    names = [field.name for field in dataclasses.fields(parameters)] if parameters else []
    own = {name: getattr(args, name) for name in names}
    trainer.optimizer_cls_and_kwargs = entry, {"lr": arguments.learning_rate, **own}


def check_optimizer(args: Any) -> None:
    """Build optimizer and schedule of one weight, to validate settings that nothing else validates."""
    import torch
    from transformers.optimization import get_scheduler

    weight = [torch.nn.Parameter(torch.zeros(1))]
    if args.optim_args and not is_registered(args.optim):
        _check_options(args, weight)
    kwargs, schedule = args.lr_scheduler_kwargs, args.lr_scheduler_type
    try:
        get_scheduler(schedule, torch.optim.SGD(weight), 0, 2, kwargs or None)
    except (ValueError, TypeError) as error:
        if kwargs:
            raise ConfigError(
                f"--lr_scheduler_kwargs: {kwargs}: --lr_scheduler_type {schedule} does not take them "
                f"({first_line(error)}); correct or drop them"
            ) from error
        raise ConfigError(
            f"--lr_scheduler_type: {schedule}: needs settings ({first_line(error)}); give them in --lr_scheduler_kwargs"
        ) from error


def _check_options(args: Any, weight: list[Any]) -> None:
    from transformers import Trainer, TrainingArguments

    def settings(given: str | None) -> tuple[Any, dict[str, Any]]:
        arguments = TrainingArguments(optim=args.optim, optim_args=given, use_cpu=True, report_to="none")
        return Trainer.get_optimizer_cls_and_kwargs(arguments)

    try:
        kind, kwargs = settings(args.optim_args)
        if kwargs == settings(None)[1]:
            raise ValueError("it changes nothing")
        kind(weight, **kwargs)
    except (ValueError, TypeError, KeyError) as error:
        raise ConfigError(
            f"--optim_args: {args.optim_args}: --optim {args.optim} does not take it ({first_line(error)}); "
            "drop it, or write name=value,name=value"
        ) from error
