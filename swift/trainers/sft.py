"""`swift sft`: supervised tuning with TRL's SFTTrainer, composed and not subclassed.

What is ours is around it: rows are encoded here (`sft_data`: loss on assistant turns, rows over `max_length`
left out and counted), the model comes from `swift.models`, the run directory, logs and metrics are those of
every mode, and a signal ends the run with a checkpoint and exit code 75.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from swift.errors import Interrupted
from swift.startup import collector_resting
from swift.trainers.session import (
    Outcome,
    SignalTrap,
    checkpoint_settings,
    find_start,
    join_processes,
    on_one_device,
    require_packages,
    resume_command,
    tensorboard_callback,
    training_options,
)

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import SFTTrainer

    from swift.arguments import Resolved
    from swift.models.template import Template
    from swift.trainers.distributed import Collectives
    from swift.trainers.session import Start
    from swift.trainers.sft_callbacks import LogLines, SealCheckpoints


def run(resolved: Resolved) -> int:
    """The mode sft; returns the exit code.

    Raises:
        ConfigError, ResourceError: settings, data, model or checkpoint cannot be used.
        NumericError: the loss stays non-finite.
        Interrupted: a signal came; the checkpoint is saved.
    """
    args: Any = resolved.args
    require_packages(args)
    with collector_resting():
        from swift.models import load_chat

        collectives = join_processes(args.ddp_timeout, always=bool(args.deepspeed or args.fsdp))
        start = find_start(args, checkpoint_settings(resolved.to_json(), collectives))
        template = load_chat(args)
        template.training_template = training_template(template)
        import datasets  # noqa: F401  # what encoding needs
    train, val, lines = encode(args, template)
    lines += [*start.notes, plan_line(args, len(train), collectives.world_size)]
    if collectives.is_main:
        for line in lines:
            print(line, flush=True)
    _train(resolved, collectives, start, template, train, val)
    return 0


def training_template(template: Template) -> str | None:
    """TRL's variant of the model's template, which keeps all turns and marks the assistant's; None without one."""
    if template.marked:
        return None
    from trl.chat_template_utils import get_training_chat_template

    try:
        return get_training_chat_template(template.tokenizer)
    except ValueError:  # one that TRL does not know
        return None


def plan_line(args: Any, num_rows: int, world_size: int) -> str:
    """The batch arithmetic in one line: rows per step, steps per epoch and in all."""
    per_rank = -(-num_rows // (world_size * args.per_device_train_batch_size))
    per_epoch = -(-per_rank // args.gradient_accumulation_steps)
    steps = args.max_steps if args.max_steps > 0 else int(-(-per_epoch * args.num_train_epochs // 1))
    rows = args.per_device_train_batch_size * world_size * args.gradient_accumulation_steps
    return (
        f"plan: {num_rows} rows; {args.per_device_train_batch_size} per device x {world_size} processes x "
        f"{args.gradient_accumulation_steps} accumulation steps = {rows} rows per step; {per_epoch} steps per "
        f"epoch, {steps} steps"
    )


def encode(args: Any, template: Template) -> tuple[Dataset, Dataset | None, list[str]]:
    """Training rows, evaluation rows (None without any), and lines to print about both.

    Raises:
        ConfigError: wrong data, or no usable row.
    """
    from swift.data.loading import load_rows
    from swift.models.policy import context_length
    from swift.trainers.sft_data import ChatEncoder, encode_rows

    encoder = ChatEncoder(template, args.max_length or context_length(args))
    tables: dict[str, Dataset | None] = {"train": None, "val": None}
    lines: list[str] = []
    for split in ("train", "val"):
        rows = load_rows(args, split)
        lines += rows.report.lines()
        if len(rows):
            tables[split], report = encode_rows(rows, encoder, num_proc=args.dataset_num_proc, split=split)
            lines += report.lines(split)
    assert tables["train"] is not None, "load_rows returns at least one training row"
    return tables["train"], tables["val"], lines


def _train(
    resolved: Resolved,
    collectives: Collectives,
    start: Start,
    template: Template,
    train: Dataset,
    val: Dataset | None,
) -> None:
    """Loads the model, opens the run folder, trains, and records how it ended."""
    from swift.models.policy import quiet_loading
    from swift.observability.jsonl import read_log
    from swift.observability.plots import write_plots
    from swift.observability.rank_log import RankLog
    from swift.observability.run_dir import RunDirectory, rank_log_file
    from swift.trainers.checkpoint import clean_staging
    from swift.trainers.sft_callbacks import LogLines, SealCheckpoints, StopOnSignal
    from swift.trainers.supervision.heartbeat import RankWatch

    args: Any = resolved.args
    settings = resolved.to_json()
    with collector_resting():
        from trl import SFTTrainer  # noqa: F401  # the most of what there is to load

        model = load_model(args)  # before the folder: a start that fails leaves nothing behind
    home = RunDirectory(args.output_dir, add_version=args.add_version, resume_run=start.run_dir)
    opened: tuple[str, int] | None = None
    if collectives.is_main:
        home.open(argv=sys.argv, settings=settings, changed=start.changed, start_step=start.step)
        clean_staging(home.path)
        opened = str(home.path), home.attempt
    path, attempt = collectives.broadcast(opened)
    folder = Path(path)
    rank_log = RankLog(rank_log_file(folder, attempt, collectives.rank))

    def say(line: str) -> None:
        print(line, flush=True)
        rank_log.line(line)

    log = LogLines(folder / "logging.jsonl", attempt, say)
    seal = SealCheckpoints(collectives, checkpoint_settings(settings, collectives), args.save_total_limit)
    outcome, end_step = Outcome(), start.step
    started = time.monotonic()
    try:
        with SignalTrap() as trap, quiet_loading(), RankWatch(collectives):
            stop = StopOnSignal(trap, collectives)
            trainer = build_trainer(args, folder, model, template, train, val, [stop, seal, log])
            try:
                trainer.train(resume_from_checkpoint=str(start.checkpoint) if start.checkpoint else None)
            finally:
                end_step = trainer.state.global_step
            if stop.interrupted:
                raise _interrupted(trap, seal)
        if collectives.is_main:
            write_plots(read_log(folder / "logging.jsonl"), folder / "images")
            for line in summary(folder, log, seal, trainer, time.monotonic() - started):
                say(line)
    except BaseException as error:
        outcome = Outcome.of(error)
        raise
    finally:
        if collectives.is_main:
            home.finish(end_step=end_step, exit_code=outcome.exit_code, reason=outcome.reason)
        rank_log.close()


def load_model(args: Any) -> Any:
    """The model to train, on this process's device; fresh adapter weights depend on `--seed` only.

    Raises:
        ConfigError, ResourceError: it cannot be loaded.
    """
    import torch
    from transformers import set_seed

    from swift.models import load_policy

    set_seed(args.seed)
    local = os.environ.get("LOCAL_RANK", "0")
    model: Any = load_policy(args, device=f"cuda:{local}" if torch.cuda.is_available() else "cpu", model_dropout=True)
    model.config.use_cache = False
    return model


def build_trainer(
    args: Any,
    folder: Path,
    model: Any,
    template: Template,
    train: Dataset,
    val: Dataset | None,
    callbacks: list[TrainerCallback],
) -> SFTTrainer:
    """TRL's trainer, ready to run; checkpoints go to `folder`."""
    from transformers import PrinterCallback
    from trl import SFTConfig, SFTTrainer

    from swift.trainers.optimizers.choice import attach_own_optimizer, own_optimizer
    from swift.trainers.optimizers.master_weights import keep_master_weights

    arguments = on_one_device(SFTConfig(**sft_options(args, folder, evaluates=val is not None)))
    trainer = SFTTrainer(
        model=model,
        args=arguments,
        optimizer_cls_and_kwargs=own_optimizer(args, arguments),
        train_dataset=train,
        eval_dataset=val,
        processing_class=template.tokenizer,
        callbacks=callbacks,
    )
    attach_own_optimizer(args, trainer)
    trainer.remove_callback(PrinterCallback)  # `LogLines` speaks instead
    # fp16's loss scaling needs gradients at the very weights that the optimizer holds; ZeRO and FSDP have own masters
    if not trainer.args.fp16 and not args.deepspeed and not args.fsdp:
        trainer.create_optimizer()
        keep_master_weights(trainer.optimizer)
    if (board := tensorboard_callback(args, folder)) is not None:
        trainer.add_callback(board)
    return trainer


def summary(folder: Path, log: LogLines, seal: SealCheckpoints, trainer: Any, seconds: float) -> list[str]:
    """The last words of a run: losses, time, and where the model lies."""
    best = trainer.state.best_model_checkpoint
    lines = [f"done: {trainer.state.global_step} steps in {seconds:.0f} s"]
    if log.first_loss is not None:
        lines.append(f"loss: {log.first_loss:.4f} at the start, {log.last_loss:.4f} at the end")
    if log.last_eval_loss is not None:
        lines.append(f"evaluation loss: {log.last_eval_loss:.4f}")
    lines.append(f"run: {folder}")
    lines.append(f"model: {seal.last}" + (f" (best: {best})" if best else ""))
    return lines


def _interrupted(trap: SignalTrap, seal: SealCheckpoints) -> Interrupted:
    return Interrupted(
        f"signal: {trap.caught or 'another process'}: stopped, {seal.last} is saved; "
        f"resume: {resume_command('sft', seal.last)}"
    )


def sft_options(args: Any, folder: Path, *, evaluates: bool) -> dict[str, Any]:
    """The settings as keyword arguments of TRL's SFTConfig."""
    import torch

    on_gpu = torch.cuda.is_available()
    precision = {"bf16": on_gpu and args.torch_dtype == "bfloat16", "fp16": on_gpu and args.torch_dtype == "float16"}
    return {
        **training_options(args, folder, evaluates=evaluates),
        "max_steps": args.max_steps,
        "gradient_accumulation_steps": args.gradient_accumulation_steps,
        # Rows are tokenised already: with one worker, the default, padding them here is quicker than sending them.
        "dataloader_num_workers": args.dataloader_num_workers if args.dataloader_num_workers > 1 else 0,
        **({} if args.deepspeed or args.fsdp else precision),
        "max_length": None,  # rows over it are left out already, never cut
        "dataset_kwargs": {"skip_prepare_dataset": True},
    }
