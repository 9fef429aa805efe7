"""`swift sft`: supervised tuning with TRL's SFTTrainer, composed and not subclassed.

What is ours is around it: rows are encoded here (`sft_data`: loss on assistant turns, rows over `max_length`
left out and counted), the model comes from `swift.models`, the run directory, logs and metrics are those of
every mode, and a signal ends the run with a checkpoint and exit code 75.
"""

from __future__ import annotations

import os
import shlex
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from swift.errors import Interrupted, SwiftError, join_problems

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import SFTTrainer

    from swift.arguments.parse import Resolved
    from swift.models.template import Template
    from swift.trainers.distributed import Collectives
    from swift.trainers.sft_callbacks import LogLines, SealCheckpoints, SignalTrap


def run(resolved: Resolved) -> int:
    """The mode sft; returns the exit code.

    Raises:
        ConfigError, ResourceError: settings, data, model or checkpoint cannot be used.
        NumericError: the loss stays non-finite.
        Interrupted: a signal came; the checkpoint is saved.
    """
    from swift.models import load_chat

    args: Any = resolved.args
    collectives = join_processes(args.ddp_timeout)
    start = find_start(args, resolved.to_json())
    template = load_chat(args)
    train, val, lines = encode(args, template)
    lines += [*start.notes, plan_line(args, len(train), collectives.world_size)]
    if collectives.is_main:
        for line in lines:
            print(line, flush=True)
    if args.dry_run:
        return 0
    _train(resolved, collectives, start, template, train, val)
    return 0


@dataclass(frozen=True)
class Start:
    """Where a run begins: anew, or in `run_dir` from `checkpoint`; `changed` are settings, (then, now)."""

    run_dir: Path | None = None
    checkpoint: Path | None = None
    changed: dict[str, tuple[Any, Any]] | None = None
    notes: tuple[str, ...] = ()

    @property
    def step(self) -> int:
        """Optimizer steps already done."""
        from swift.trainers.checkpoint import step_of

        return (step_of(self.checkpoint) or 0) if self.checkpoint else 0


def find_start(args: Any, settings: dict[str, Any]) -> Start:
    """The checkpoint that `--resume_from_checkpoint` names, verified, or a fresh start.

    Raises:
        ConfigError: no whole checkpoint there, or a setting differs that may not change.
    """
    if not args.resume_from_checkpoint:
        return Start()
    from swift.models.source import read_json
    from swift.trainers.checkpoint import compare_settings, resolve_resume

    run_dir, checkpoint = resolve_resume(args.resume_from_checkpoint, args.output_dir)
    change = compare_settings(read_json(checkpoint / "args.json"), settings)
    join_problems(change.problems)
    notes = (f"resuming {run_dir} from {checkpoint.name}", *change.notes)
    return Start(run_dir, checkpoint, change.changed, notes)


def join_processes(timeout_s: float) -> Collectives:
    """Joins the launcher's process group, when there is one (RANK and WORLD_SIZE are set)."""
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    from swift.trainers.distributed import Collectives

    if int(os.environ.get("WORLD_SIZE", "1")) > 1 and not dist.is_initialized():
        on_gpu = torch.cuda.is_available()
        if on_gpu:
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        dist.init_process_group("nccl" if on_gpu else "gloo", timeout=timedelta(seconds=timeout_s))
    return Collectives(timeout_s)


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
    from swift.data import load_rows
    from swift.models.policy import context_length
    from swift.trainers.sft_data import ChatEncoder, encode_rows

    encoder = ChatEncoder(template, args.max_length or context_length(args))
    tables: dict[str, Dataset | None] = {"train": None, "val": None}
    lines: list[str] = []
    for split in ("train", "val"):
        rows = load_rows(args, split)
        lines += rows.report.lines()
        if len(rows):
            chats = [row["messages"] for row in rows]
            tables[split], report = encode_rows(chats, encoder, num_proc=args.dataset_num_proc, split=split)
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
    from swift.observability.rank_log import RankLog
    from swift.observability.run_dir import RunDirectory, rank_log_file
    from swift.trainers.checkpoint import clean_staging
    from swift.trainers.sft_callbacks import LogLines, SealCheckpoints, SignalTrap, StopOnSignal

    args: Any = resolved.args
    settings = resolved.to_json()
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
    seal = SealCheckpoints(collectives, settings, args.save_total_limit)
    outcome, end_step = _Outcome(), start.step
    started = time.monotonic()
    try:
        with SignalTrap() as trap, quiet_loading():
            stop = StopOnSignal(trap, collectives)
            trainer = build_trainer(args, folder, model, template, train, val, [stop, seal, log])
            try:
                trainer.train(resume_from_checkpoint=str(start.checkpoint) if start.checkpoint else None)
            finally:
                end_step = trainer.state.global_step
            if stop.interrupted:
                raise _interrupted(trap, seal, args)
        if collectives.is_main:
            for line in summary(folder, log, seal, trainer, time.monotonic() - started):
                say(line)
    except BaseException as error:
        outcome = _Outcome.of(error)
        raise
    finally:
        if collectives.is_main:
            home.finish(end_step=end_step, exit_code=outcome.exit_code, reason=outcome.reason)
        rank_log.close()


@dataclass(frozen=True)
class _Outcome:
    """How an attempt ended, for attempts.jsonl."""

    exit_code: int = 0
    reason: str = "done"

    @classmethod
    def of(cls, error: BaseException) -> _Outcome:
        code = error.exit_code if isinstance(error, SwiftError) else 130 if isinstance(error, KeyboardInterrupt) else 1
        return cls(code, (str(error).splitlines() or [""])[0] or type(error).__name__)


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
    from transformers.integrations import TensorBoardCallback
    from trl import SFTConfig, SFTTrainer

    trainer = SFTTrainer(
        model=model,
        args=SFTConfig(**training_options(args, folder, evaluates=val is not None)),
        train_dataset=train,
        eval_dataset=val,
        processing_class=template.tokenizer,
        callbacks=callbacks,
    )
    trainer.remove_callback(PrinterCallback)  # `LogLines` speaks instead
    if "tensorboard" in args.report_to:
        board = TensorBoardCallback()
        board.logging_dir = str(folder / "runs")
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


def _interrupted(trap: SignalTrap, seal: SealCheckpoints, args: Any) -> Interrupted:
    words = list(sys.argv[1:]) if sys.argv[1:2] == ["sft"] else ["sft", "--model", str(args.model)]
    if "--resume_from_checkpoint" in words:
        at = words.index("--resume_from_checkpoint")
        del words[at : at + 2]
    command = shlex.join(["swift", *words, "--resume_from_checkpoint", str(seal.last)])
    return Interrupted(f"signal: {trap.caught or 'another process'}: stopped, {seal.last} is saved; resume: {command}")


def training_options(args: Any, folder: Path, *, evaluates: bool) -> dict[str, Any]:
    """The settings as keyword arguments of TRL's SFTConfig (transformers' TrainingArguments)."""
    import torch

    on_gpu = torch.cuda.is_available()
    eval_strategy = args.eval_strategy if evaluates else "no"
    return {
        "output_dir": str(folder),
        "learning_rate": args.learning_rate,
        "lr_scheduler_type": args.lr_scheduler_type,
        "lr_scheduler_kwargs": args.lr_scheduler_kwargs or None,
        "warmup_steps": args.warmup_steps or args.warmup_ratio,  # below 1 it is a share of all steps
        "weight_decay": args.weight_decay,
        "adam_beta1": args.adam_beta1,
        "adam_beta2": args.adam_beta2,
        "adam_epsilon": args.adam_epsilon,
        "max_grad_norm": args.max_grad_norm,
        "optim": args.optim,
        "optim_args": args.optim_args,
        "optim_target_modules": args.optim_target_modules or None,
        "num_train_epochs": args.num_train_epochs,
        "max_steps": args.max_steps,
        "per_device_train_batch_size": args.per_device_train_batch_size,
        "per_device_eval_batch_size": args.per_device_eval_batch_size,
        "gradient_accumulation_steps": args.gradient_accumulation_steps,
        "gradient_checkpointing": args.gradient_checkpointing,
        "gradient_checkpointing_kwargs": {"use_reentrant": False, **args.gradient_checkpointing_kwargs}
        if args.gradient_checkpointing
        else None,
        "seed": args.seed,
        "data_seed": args.data_seed,
        "full_determinism": args.full_determinism,
        # Rows are tokenised already: with one worker, the default, padding them here is quicker than sending them.
        "dataloader_num_workers": args.dataloader_num_workers if args.dataloader_num_workers > 1 else 0,
        "dataloader_pin_memory": on_gpu,
        "logging_steps": args.logging_steps,
        "logging_first_step": args.logging_first_step,
        "logging_nan_inf_filter": False,
        "save_strategy": args.save_strategy,
        "save_steps": args.save_steps,
        "save_total_limit": None,  # `SealCheckpoints` removes old ones
        "save_only_model": args.save_only_model,
        "eval_strategy": eval_strategy,
        "eval_steps": args.eval_steps if eval_strategy == "steps" else None,
        "load_best_model_at_end": args.load_best_model_at_end and evaluates,
        "metric_for_best_model": args.metric_for_best_model,
        "greater_is_better": args.greater_is_better,
        "run_name": args.run_name or folder.name,
        "bf16": on_gpu and args.torch_dtype == "bfloat16",
        "fp16": on_gpu and args.torch_dtype == "float16",
        "use_cpu": not on_gpu,
        "ddp_backend": "gloo" if not on_gpu and os.environ.get("WORLD_SIZE", "1") != "1" else None,
        "ddp_timeout": args.ddp_timeout,
        "ddp_find_unused_parameters": args.ddp_find_unused_parameters,
        "deepspeed": args.deepspeed,
        "max_length": None,  # rows over it are left out already, never cut
        "dataset_kwargs": {"skip_prepare_dataset": True},
        "report_to": [name for name in args.report_to if name not in ("none", "tensorboard")],
        "disable_tqdm": True,
    }
