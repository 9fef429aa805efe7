"""Construction of a trainer of TRL or transformers: atomic checkpoints, settings, callbacks."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset, IterableDataset
from transformers import TrainerCallback

from swift.models.attention.sequence_parallel import SequenceGroup
from swift.models.rates import Rates
from swift.models.template import Template
from swift.observability.metrics import MetricStore
from swift.trainers.atomic_trainer import AtomicTrainer
from swift.trainers.distributed import Collectives
from swift.trainers.images import ImageCollator
from swift.trainers.parallel.sequence import SharedRows, data_ranks
from swift.trainers.session import equip, on_one_device, training_options
from swift.trainers.splits import is_of_one
from swift.trainers.trl.callbacks import EarlyStop, EpochEnds
from swift.trainers.trl.method import Method, found
from swift.trainers.trl.own_metrics import OwnMetrics
from swift.trainers.trl.parts import InParts

SAME_IN_TRAINERS = (
    "neftune_noise_alpha", "use_liger_kernel", "torch_compile", "torch_compile_backend",
    "torch_compile_mode", "eval_on_start",
)  # fmt: skip
"""Settings of `TrainerArguments` that TrainingArguments has under the same name and meaning."""


@functools.cache
def trainer_class(method: Method, *, shares_rows: bool = False) -> type[Any]:
    """The method's trainer with atomic checkpoints, which are complete or do not exist, and steps in parts."""
    trainer, shared = found(method.trainer), (SharedRows,) if shares_rows else ()
    overrides = [*map(found, method.overrides), OwnMetrics, AtomicTrainer, InParts]
    return type(f"Atomic{trainer.__name__}", (*shared, *overrides, trainer), {})


def build_trainer(
    method: Method,
    args: Any,
    folder: Path,
    model: Any,
    template: Template,
    train: Dataset | IterableDataset,
    val: Dataset | dict[str, Dataset] | None,
    callbacks: list[TrainerCallback],
    *,
    collectives: Collectives,
    settings: Mapping[str, Any],
    accumulation: int | None = None,
    parts: Mapping[str, Any] | None = None,
) -> AtomicTrainer:
    """The trainer, ready to run; checkpoints go to `folder`, `parts` are those of the method.

    accumulation: micro-batches of a step on each process, by default `--gradient_accumulation_steps`.
    """
    vision, parts = template.vision, dict(parts or {})
    options = {**_options(args, folder, evaluates=val is not None, sees=vision is not None), **method.options(args)}
    options["gradient_accumulation_steps"] = accumulation or args.gradient_accumulation_steps
    if isinstance(val, dict) and not is_of_one(args.metric_for_best_model, val):
        options["metric_for_best_model"] = None  # the metric of no set: there is no best checkpoint
    if getattr(args, "early_stopping_patience", None):
        callbacks = [*callbacks, EarlyStop(args.early_stopping_patience, args.early_stopping_threshold)]
    arguments = on_one_device(found(method.config)(**options))
    if getattr(args, "streaming", False):
        arguments.accelerator_config.dispatch_batches = False  # each process reads the stream and takes its share
        micro_batches = data_ranks(args, collectives.world_size) * options["gradient_accumulation_steps"]
        kinds = [args.eval_strategy == "epoch" and val is not None, args.save_strategy == "epoch"]
        epochs = train.epochs  # type: ignore[union-attr]
        epochs.whole = args.per_device_train_batch_size * micro_batches
        callbacks = [*callbacks, EpochEnds(epochs.ends, epochs.whole, *kinds)]
    if vision is not None and method.collator is not None:
        parts["data_collator"] = ImageCollator(found(method.collator)(template.pad_token_id), vision)
    group = SequenceGroup.of_this_rank(args.sequence_parallel_size, args.ddp_timeout)
    tensors = {parameter: parameter.data for parameter in model.parameters() if parameter.requires_grad}
    chosen = trainer_class(method) if group is None else trainer_class(method, shares_rows=True)
    trainer = chosen(
        model=model,
        args=arguments,
        train_dataset=train,
        eval_dataset=val,
        processing_class=template.tokenizer,
        callbacks=callbacks,
        collectives=collectives,
        metrics=MetricStore(),
        run_settings=settings,
        save_total_limit=args.save_total_limit,
        async_save=args.async_save,
        stochastic_rounding=args.master_weights == "bf16_stochastic",
        rates=Rates.of(args),
        **({"sequence_group": group} if group is not None else {}),
        **parts,
    )
    trainer.parting = method.parting(args) if vision is None else ""  # pixels are not in rows
    trainer.divides, trainer.template = method.divides(args), template
    trainer.given_accumulation = args.gradient_accumulation_steps
    for parameter, data in tensors.items():  # TRL rounds adapters on quantised weights to 16 bits; PEFT loads 32
        if parameter.dtype != data.dtype:
            parameter.data = data
    equip(trainer, args, folder)
    return trainer


def _options(args: Any, folder: Path, *, evaluates: bool, sees: bool) -> dict[str, Any]:
    """The settings as keyword arguments of TrainingArguments."""
    on_gpu = torch.cuda.is_available()
    offloads = getattr(args, "activation_offloading", False)
    precision = {
        "bf16": bool(args.autocast) or (on_gpu and args.torch_dtype == "bfloat16"),
        "fp16": on_gpu and args.torch_dtype == "float16",
    }
    return {
        **training_options(args, folder, evaluates=evaluates, sees=sees),
        "max_steps": args.max_steps,
        "dataloader_drop_last": args.dataloader_drop_last,
        # Rows are tokenised already: padding them here is faster than sending them from one worker, the default.
        "dataloader_num_workers": args.dataloader_num_workers if args.dataloader_num_workers > 1 else 0,
        **{name: getattr(args, name) for name in SAME_IN_TRAINERS if hasattr(args, name)},
        "liger_kernel_config": args.liger_kernels,
        "train_sampling_strategy": _sampling(args),
        **({} if args.deepspeed or args.fsdp else precision),
        # TRL asks for the accelerator, which a CPU has not: its activations are on the host
        **({"activation_offloading": True} if offloads and torch.accelerator.is_available() else {}),
    }


def _sampling(args: Any) -> str:
    """The order of training rows."""
    if getattr(args, "group_by_length", False):
        return "group_by_length"
    return "random" if args.dataset_shuffle else "sequential"
