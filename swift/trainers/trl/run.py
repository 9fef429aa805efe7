"""Every mode that trains with a trainer of TRL or transformers: `swift sft`, `swift rlhf --rlhf_type dpo`, and others.

Code around the trainer: rows are encoded by the method (`swift.trainers.trl.method`), the model is loaded by
`swift.models`, run directory, logs and checkpoints are those of every mode, and a signal ends the run with a checkpoint
and exit code 75.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sized
from pathlib import Path
from typing import TYPE_CHECKING, Any

from swift.errors import ConfigError, counted
from swift.startup import collector_resting
from swift.trainers.hub import check_hub, push
from swift.trainers.parallel.sequence import data_ranks, require_shareable
from swift.trainers.parallel.sharding import loading_device
from swift.trainers.session import (
    SignalTrap,
    accumulation_of,
    continue_elastic,
    find_start,
    join_processes,
    leave_processes,
    open_run,
    require_packages,
)
from swift.trainers.trl.method import Method, found, method_of, rows_of

if TYPE_CHECKING:
    from datasets import Dataset, IterableDataset

    from swift.arguments import Resolved
    from swift.models.vision import Vision
    from swift.trainers.atomic_trainer import AtomicTrainer
    from swift.trainers.trl.callbacks import LogLines


def run(resolved: Resolved) -> int:
    """Runs a mode of `METHODS`; returns the exit code.

    Raises:
        ConfigError, ResourceError: settings, data, model or checkpoint cannot be used.
        NumericError: the loss stays non-finite.
        Interrupted: a signal was received; the checkpoint is saved.
    """
    from swift.models.policy import quiet_loading
    from swift.trainers.supervision.heartbeat import Heartbeat

    args: Any = resolved.args
    require_packages(args)
    with collector_resting():
        method = method_of(resolved.mode)
        collectives = join_processes(args)
        continue_elastic(args, collectives)
        start = find_start(args, resolved.to_json(), collectives.world_size, divides=method.divides(args))
        accumulation = accumulation_of(args, start, collectives.world_size)
        template = method.template(args)
    with collectives.together():
        if collectives.is_main:
            check_hub(args)
    train, val, lines = rows_of(args, method, template)
    lines += [*start.notes, plan_line(args, train, collectives.world_size, accumulation)]
    with SignalTrap() as trap:
        with collector_resting():
            from swift.models.rates import Rates
            from swift.models.tuners import expert_lines
            from swift.observability.curves import Curves
            from swift.observability.pulse import Pulse
            from swift.trainers.trl.callbacks import LogLines, StopOnSignal
            from swift.trainers.trl.frame import build_trainer

            model, parts = load_model(
                args, method, template.vision
            )  # before the folder, in which a failure leaves no files
            lines += [*expert_lines(model, args), *Rates.of(args).lines(model, args)]
        trap.check(resolved.command, collectives, start)
        with open_run(resolved, collectives, start) as opened, contextlib.ExitStack() as stack:
            folder, curves = opened.folder, None
            if collectives.is_main:
                curves = stack.enter_context(Curves(folder))
                for line in (f"run folder: {folder}", *lines):
                    opened.say(line)
            log = LogLines(
                folder / "logging.jsonl", opened.attempt, opened.say, curves, logged=method.logged, shown=method.shown
            )
            if collectives.is_main:
                stack.enter_context(Pulse(log, log.doing))
            started = time.monotonic()
            with quiet_loading(), Heartbeat(collectives):
                collectives.watched = False  # no watchdog detects a hang of rank 0 here: collectives keep their timeout
                stop = StopOnSignal(trap, collectives)
                trainer = build_trainer(
                    method,
                    args,
                    folder,
                    model,
                    template,
                    train,
                    val,
                    [stop, log],
                    collectives=collectives,
                    settings=start.settings,
                    accumulation=accumulation,
                    parts=parts,
                )
                opened.steps, trainer.say = (lambda: trainer.state.global_step), opened.say
                trap.check(resolved.command, collectives, start)  # log-probs of a reference may take long
                trainer.train(resume_from_checkpoint=str(start.checkpoint) if start.checkpoint else None)
                if stop.interrupted:
                    raise trap.interruption(resolved.command, folder, trainer.state.global_step)
            leave_processes(collectives)  # other ranks do not wait for an upload
            if collectives.is_main:
                for line in [*_summary(folder, log, trainer, time.monotonic() - started), *push(args, folder, trainer)]:
                    opened.say(line)
    return 0


def plan_line(args: Any, train: Dataset | IterableDataset, world_size: int, accumulation: int | None = None) -> str:
    """The batch arithmetic in one line: rows per step, steps per epoch and in all.

    accumulation: micro-batches of a step on each process, by default `--gradient_accumulation_steps`.

    Raises:
        ConfigError: processes that share rows do not make whole groups.
    """
    accumulation = accumulation or args.gradient_accumulation_steps
    ranks, size = data_ranks(args, world_size), args.sequence_parallel_size
    batch = args.per_device_train_batch_size * ranks * accumulation
    devices = counted(ranks, "process") if size == 1 else f"{counted(ranks, 'group')} of {size} processes"
    step = (
        f"{args.per_device_train_batch_size} per device x {devices} x "
        f"{counted(accumulation, 'accumulation step')} = {counted(batch, 'row')} per step"
    )
    if not isinstance(train, Sized):
        passes = f" or {counted(args.max_epochs, 'pass')}" if args.max_epochs else ""
        return f"plan: a stream; {step}; {counted(args.max_steps, 'step')}{passes}"
    per_round = ranks * args.per_device_train_batch_size
    per_rank = len(train) // per_round if args.dataloader_drop_last else -(-len(train) // per_round)
    per_epoch = -(-per_rank // accumulation)
    steps = args.max_steps if args.max_steps > 0 else int(-(-per_epoch * args.num_train_epochs // 1))
    return (
        f"plan: {counted(len(train), 'row')}; {step}; {counted(per_epoch, 'step')} per epoch, {counted(steps, 'step')}"
    )


def load_model(args: Any, method: Method, vision: Vision | None = None) -> tuple[Any, dict[str, Any]]:
    """The model to train, on `loading_device`, and `Method.parts`; fresh weights depend on `--seed` only."""
    from transformers import set_seed

    from swift.models import load_policy

    set_seed(args.seed)
    model: Any = load_policy(
        args, device=loading_device(args), model_dropout=method.model_dropout, reward_head=method.reward_head
    )
    model.config.use_cache = False
    return model, parts_beside(args, method, model, vision)


def parts_beside(args: Any, method: Method, model: Any, vision: Vision | None = None) -> dict[str, Any]:
    """`Method.parts`, after a check that the method can train the model, which may be without weights.

    vision: of the model, which it gets here.
    """
    from swift.models.router_loss import router_coefficient
    from swift.models.tuners import check_head
    from swift.trainers.images import show_images

    if args.sequence_parallel_size > 1 and not method.shares_rows:
        raise ConfigError(
            f"--sequence_parallel_size: {args.sequence_parallel_size}: not with this method; use 1, with --deepspeed "
            "or --fsdp if memory is short"
        )
    coefficient = getattr(args, "router_aux_loss_coef", None)
    if coefficient:
        router_coefficient(coefficient, model)
    balanced = coefficient != 0 and hasattr(model.config.get_text_config(), "output_router_logits")
    if args.sequence_parallel_size > 1 and balanced:
        raise ConfigError(
            f"--sequence_parallel_size: {args.sequence_parallel_size}: this model's router has a loss of whole rows; "
            "use 1, or --router_aux_loss_coef 0 if the method has it"
        )
    if vision is not None:
        vision.attach(model)
    require_shareable(model, args)
    if method.fuses_head and args.tuner_type != "full":
        check_head(model, args)
    parts: dict[str, Any] = found(method.parts)(args, model)
    if vision is not None:
        for one in (model, *(parts[name] for name in ("ref_model", "teacher_model") if name in parts)):
            show_images(vision, one, args)
    return parts


def _summary(folder: Path, log: LogLines, trainer: AtomicTrainer, seconds: float) -> list[str]:
    """The final lines of a run: losses, time, and the path of the model."""
    from swift.trainers.checkpoint import last_checkpoint
    from swift.trainers.trl.callbacks import dataset_suffix

    best = trainer.state.best_model_checkpoint
    lines = [f"done: {counted(trainer.state.global_step, 'step')} in {seconds:.0f} s"]
    if log.first_loss is not None:
        lines.append(f"loss: {log.first_loss:.4f} at the start, {log.last_loss:.4f} at the end")
    lines += [f"evaluation loss{dataset_suffix(name)}: {loss:.4f}" for name, loss in log.last_eval_losses.items()]
    lines.append(f"run: {folder}")
    lines.append(f"model: {last_checkpoint(folder)}" + (f" (best: {best})" if best else ""))
    return lines
