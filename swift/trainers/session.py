"""Setup and end of every training run: process group, checkpoint to start from, run folder, signals.

Shared by `trl` and `grpo`.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import os
import shlex
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import resource_tracker
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from swift.elastic import (
    BATCH_PROCESSES,
    PROGRESS_FILE,
    RUN_ID,
    UNNAMED,
    batch_processes,
    note_end,
    note_start,
    read_progress,
)
from swift.errors import (
    ConfigError,
    Interrupted,
    ResourceError,
    SwiftError,
    Unfinished,
    counted,
    first_line,
    join_problems,
    note_unfinished,
    smaller,
)
from swift.observability.secrets import MASK, mask_argv, mask_text
from swift.signals import answered, kept_from_children

if TYPE_CHECKING:
    from transformers import Trainer, TrainingArguments

    from swift.arguments import Resolved
    from swift.observability.rank_log import RankLog
    from swift.trainers.distributed import Collectives


LAUNCH_VARIABLES = ("NNODES", "NODE_RANK", "NPROC_PER_NODE")
"""Environment variables of the launcher that set the number of processes."""


@dataclass(frozen=True, slots=True)
class Start:
    """Where a run begins: anew, or in `run_dir` from `checkpoint`.

    settings: written into args.json of checkpoints. changed: those that differ from the checkpoint's, (then, now).
    """

    settings: Mapping[str, Any]
    run_dir: Path | None = None
    checkpoint: Path | None = None
    changed: dict[str, tuple[Any, Any]] | None = None
    notes: tuple[str, ...] = ()

    @property
    def batch_processes(self) -> int:
        """The processes that batch sizes count: those of the run, or of an elastic run all that it began with."""
        return int(self.settings.get("batch_processes") or self.settings.get("world_size") or 1)

    @property
    def step(self) -> int:
        """Optimizer steps already done."""
        from swift.trainers.checkpoint import step_of

        return (step_of(self.checkpoint) or 0) if self.checkpoint else 0


TRACKERS = ("tensorboard", "wandb", "swanlab", "trackio", "mlflow")
"""Of `--report_to`; each needs the package of its name."""

SHARED_LIMIT_S = 90
"""Time after which a folder that one node has made is seen by the others; NFS remembers 60 s at most."""

SAME_IN_TRANSFORMERS = (
    "learning_rate", "lr_scheduler_type", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon", "max_grad_norm",
    "optim_args", "num_train_epochs", "per_device_train_batch_size", "per_device_eval_batch_size",
    "gradient_checkpointing", "seed", "data_seed", "full_determinism", "logging_steps", "logging_first_step",
    "save_strategy", "save_steps", "save_only_model", "metric_for_best_model", "greater_is_better", "ddp_timeout",
    "ddp_find_unused_parameters",
)  # fmt: skip
"""Settings that TrainingArguments has under the same name and meaning."""


def require_packages(args: Any) -> None:
    """Checks, before a model is loaded, that the optional packages behind settings can be used."""
    from swift.trainers.arguments import OPTIMIZER_PACKAGES
    from swift.trainers.optimizers.choice import check_optimizer
    from swift.trainers.parallel.sharding import require_sharding

    if args.deepspeed or args.fsdp:
        require_sharding(args)
    needs = [(f"--report_to: {name}", name, "leave the name out") for name in args.report_to if name in TRACKERS]
    if package := OPTIMIZER_PACKAGES.get(args.optim):
        needs.append((f"--optim: {args.optim}", package, "use --optim adamw"))
    if args.quant_method:
        needs.append(("--quant_method: bnb", "bitsandbytes", "leave it out"))
    if getattr(args, "use_liger_kernel", False):
        needs.append(("--use_liger_kernel: true", "liger_kernel", "leave it out"))
    if getattr(args, "predict_with_generate", False):
        needs += [("--predict_with_generate: true", name, "leave it out") for name in ("jieba", "nltk", "rouge_score")]
    join_problems(
        [
            f"{subject}: needs the package {package}, which is not installed; install it, or {instead}"
            for subject, package, instead in needs
            if importlib.util.find_spec(package) is None
        ],
        ResourceError,
    )
    check_optimizer(args)


def find_start(args: Any, settings: Mapping[str, Any], world_size: int, *, divides: bool = False) -> Start:
    """The checkpoint that `--resume_from_checkpoint` names, verified, or a fresh start.

    Args:
        args: with `resume_from_checkpoint` and `output_dir`.
        settings: of the run, by name.
        world_size: processes that share the batches.
        divides: whether a micro-batch may have other rows; see `compare_settings`.

    Raises:
        ConfigError: no valid checkpoint there, a setting differs that may not change, or an `--output_dir` that is
            read-only or, without `--add_version`, another run's.
    """
    from swift.models.source import read_json
    from swift.observability.files import check_writable
    from swift.observability.run_dir import refuse_checkpoints
    from swift.trainers.checkpoint import resolve_resume
    from swift.trainers.resume_settings import compare_settings, processes_of_batch

    settings = {**settings, "world_size": world_size}
    if args.elastic:
        settings["batch_processes"] = batch_processes(os.environ, world_size)
    if not args.resume_from_checkpoint:
        check_writable(Path(args.output_dir))
        if not args.add_version:
            refuse_checkpoints(Path(args.output_dir).expanduser().absolute())
        return Start(settings)
    run_dir, checkpoint = resolve_resume(args.resume_from_checkpoint, args.output_dir)
    check_writable(run_dir)
    saved = read_json(checkpoint / "args.json")
    if args.elastic:
        settings["batch_processes"] = processes_of_batch(saved, settings)
    change = compare_settings(saved, settings, type(args), divides=divides)
    join_problems(change.problems)
    notes = (f"resuming {run_dir} from {checkpoint.name}", *change.notes)
    return Start(settings, run_dir, checkpoint, change.changed, notes)


def accumulation_of(args: Any, start: Start, world_size: int) -> int:
    """The micro-batches of a step on each process, where a data loader deals rows in micro-batches of equal size.

    Raises ConfigError: the processes of an elastic run do not share its batch evenly.
    """
    updates, rest = divmod(args.gradient_accumulation_steps * start.batch_processes, world_size)
    if rest or not updates:
        total = args.gradient_accumulation_steps * start.batch_processes
        valid = ", ".join(str(number) for number in range(1, total + 1) if total % number == 0)
        raise ConfigError(
            f"NPROC_PER_NODE: {counted(world_size, 'training process')}: cannot share the {total} micro-batches of a "
            f"step of this run evenly; valid: {valid}"
        )
    return updates


def resume_command(mode: str, checkpoint: Path | None) -> str:
    """The command that continues this run: its words and launch variables, with the checkpoint if there is one."""
    given = list(sys.argv[1:]) if sys.argv[1:2] == [mode] else [mode, "..."]
    words: list[str] = []
    while given:
        word = given.pop(0)
        flag, equals, _ = word.partition("=")
        if checkpoint is None or flag.replace("-", "_") != "__resume_from_checkpoint":
            words.append(word)
        elif not equals:
            given = given[1:]
    if checkpoint is not None:
        words += ["--resume_from_checkpoint", str(checkpoint)]
    words += smaller()
    launch = [f"{name}={os.environ[name]}" for name in LAUNCH_VARIABLES if os.environ.get(name)]
    masked = mask_argv(words)
    hidden = any(MASK in word for word in masked)
    hint = [f"# set SWIFT_API_KEY to the key, or write each secret where {MASK} stands"] if hidden else []
    return " ".join([*launch, shlex.join(["swift", *masked]), *hint])


def continuation(mode: str, checkpoint: Path | None) -> str:
    """The command that resumes a run from its last checkpoint, or starts it again if there is none to resume."""
    from swift.trainers.checkpoint import has_training_state

    if checkpoint is None or has_training_state(checkpoint):
        return f"{'start again' if checkpoint is None else 'resume'}: {resume_command(mode, checkpoint)}"
    return f"it holds the weights only (--save_only_model true), start again: {resume_command(mode, None)}"


def join_processes(args: Any) -> Collectives:
    """Joins the launcher's process group, when there is one (WORLD_SIZE > 1).

    DeepSpeed and FSDP make a group of one process without a launcher.
    """
    import torch
    import torch.distributed as dist

    from swift.devices import own_device
    from swift.rendezvous import keep_gloo_here, process_group_place
    from swift.trainers.distributed import Collectives

    timeout_s, alone = args.ddp_timeout, int(os.environ.get("WORLD_SIZE", "1")) == 1
    if (args.deepspeed or args.fsdp or not alone) and not dist.is_initialized():
        on_gpu = torch.cuda.is_available()
        if on_gpu:
            torch.cuda.set_device(own_device())
        place: dict[str, Any] = {}
        if alone:
            keep_gloo_here()
            os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
            place = {"store": dist.HashStore(), "rank": 0, "world_size": 1}
        else:
            place = process_group_place(timeout_s)
        backend = "nccl" if on_gpu else "gloo"
        if on_gpu and args.fsdp_offload_params:
            backend = "cpu:gloo,cuda:nccl"  # norms of gradients are added up on the host
        dist.init_process_group(backend, timeout=timedelta(seconds=timeout_s), **place)
    return Collectives(timeout_s)


def continue_elastic(args: Any, collectives: Collectives) -> None:
    """Resume an elastic run that torchrun starts again, perhaps with other nodes, from its newest checkpoint.

    Raises ConfigError: the run has no name by which its earlier starts could be found.
    """
    if not args.elastic or RUN_ID not in os.environ:
        return
    name = os.environ[RUN_ID]
    if name == UNNAMED:
        raise ConfigError(
            "--elastic: true: torchrun starts a run again without a name to find its checkpoint by; give torchrun "
            "--rdzv_id, another one for each run, or use --elastic false"
        )
    file = Path(args.output_dir).expanduser().absolute() / f".elastic-{name}"
    with collectives.together():
        file.parent.mkdir(parents=True, exist_ok=True)
    os.environ[PROGRESS_FILE] = str(file)
    progress = collectives.broadcast(read_progress(file))
    if progress.checkpoint is not None:
        os.environ[BATCH_PROCESSES] = str(progress.processes)
    if progress.checkpoint:
        args.resume_from_checkpoint = progress.checkpoint


def leave_processes(collectives: Collectives) -> None:
    """End the process group after a successful run, on all ranks; NCCL warns of groups left at process exit."""
    import torch.distributed as dist

    if dist.is_initialized():
        collectives.barrier()
        dist.destroy_process_group()


@dataclass(slots=True)
class OpenRun:
    """The run's folder, the number of this start of it, and the log of this process.

    steps: gives the optimizer steps done.
    """

    folder: Path
    attempt: int
    log: RankLog
    steps: Callable[[], int]

    def say(self, line: str) -> None:
        """A line for the console and the log."""
        print(mask_text(line), flush=True)
        self.log.line(line)

    def last_checkpoint(self) -> Path | None:
        """The newest one that is not ahead of the run, which may have been resumed from an older one."""
        from swift.trainers.checkpoint import list_checkpoints, step_of

        done = self.steps()
        return next((one for one in reversed(list_checkpoints(self.folder)) if (step_of(one) or 0) <= done), None)

    def going_on(self) -> list[str] | None:
        """See `Unfinished`."""
        from swift.trainers.checkpoint import has_training_state

        last = self.last_checkpoint()
        if last is None:
            return []
        return ["--resume_from_checkpoint", str(last)] if has_training_state(last) else None

    def advice(self, mode: str) -> str:
        """One line: the run's folder and log, its last checkpoint, and the command that continues it."""
        from swift.trainers.checkpoint import step_of

        last, step = self.last_checkpoint(), self.steps()
        saved = "there is no checkpoint yet"
        if last is not None:
            before = f" ({step} steps were done)" if step_of(last) != step else ""
            saved = f"{last.name} is its last checkpoint{before}"
        return f"run {self.folder}, log {self.log.path}; {saved}; {continuation(mode, last)}"


@contextlib.contextmanager
def open_run(resolved: Resolved, collectives: Collectives, start: Start) -> Iterator[OpenRun]:
    """Open the run's folder on rank 0 for all, and record in attempts.jsonl how the block ended."""
    from swift.observability.rank_log import RankLog
    from swift.observability.run_dir import RunDirectory, rank_log_file
    from swift.observability.trackers import short_failures
    from swift.trainers.checkpoint import clean_staging

    args: Any = resolved.args
    sys.argv = mask_argv(sys.argv)  # trackers of --report_to upload it
    run_dir = RunDirectory(args.output_dir, add_version=args.add_version, resume_run=start.run_dir)
    opened: tuple[str, int] | None = None
    if collectives.is_main:
        run_dir.open(
            argv=sys.argv,
            settings=resolved.to_json(),
            command=resolved.command,
            config_file=Path(resolved.config).expanduser() if resolved.config else None,
            changed=start.changed,
            start_step=start.step,
        )
        clean_staging(run_dir.path)
        note_start(start.checkpoint, start.batch_processes)
        opened = str(run_dir.path), run_dir.attempt
    folder, attempt = collectives.broadcast(opened)
    require_shared(args, Path(folder), collectives)
    log = RankLog(rank_log_file(Path(folder), attempt, collectives.rank))
    run = OpenRun(Path(folder), attempt, log, lambda: start.step)
    note_unfinished(Unfinished(log.path, lambda: run.advice(resolved.command), run.going_on))
    for note in resolved.notes:
        log.line(f"swift: {note}")
    code, reason = 0, "done"
    try:
        with short_failures():
            yield run
        note_unfinished(None)
        if collectives.is_main:
            note_end()
    except BaseException as error:
        code = error.exit_code if isinstance(error, SwiftError) else 130 if isinstance(error, KeyboardInterrupt) else 1
        reason = mask_text(first_line(error))
        raise
    finally:
        log.close()
        if collectives.is_main:
            run_dir.finish(end_step=max(start.step, run.steps()), exit_code=code, reason=reason)


def require_shared(args: Any, folder: Path, collectives: Collectives) -> None:
    """Raises ResourceError: checkpoints have shards of all processes, one of which does not see the run's folder."""
    with collectives.together():
        if not (args.fsdp or args.deepspeed) or args.save_only_model:
            return
        began = time.monotonic()
        while not folder.is_dir():  # another node may remember for a while that it was not there
            if time.monotonic() - began < SHARED_LIMIT_S:
                time.sleep(1)
                continue
            raise ResourceError(
                f"--output_dir: {folder}: not there for process {collectives.rank}, whose node has another disk; "
                "checkpoints have a part of each process: choose a folder that all nodes share"
            )


class SignalTrap(contextlib.ExitStack):
    """Handles signals that ask to stop by recording them; a SIGINT after another one is a KeyboardInterrupt.

    Use as a context manager on the main thread; the former handlers are restored at its end.
    """

    caught: str | None = None
    """Name of the signal that asked to stop."""

    def __enter__(self) -> SignalTrap:
        with kept_from_children():
            resource_tracker.ensure_running()  # multiprocessing needs it until the end
        self.enter_context(answered(self._record))
        return super().__enter__()

    def check(self, mode: str, collectives: Collectives, start: Start) -> None:
        """Between the phases before the first step; every process calls it at the same places.

        If any of them was asked to stop, all raise.
        """
        if collectives.any(self.caught is not None):
            raise self.stopped(mode, start)

    def stopped(self, mode: str, start: Start) -> Interrupted:
        """The end of a start that was asked to stop."""
        cause = f"signal: {self.caught or 'another process'}: stopped before the first step"
        if start.checkpoint is None:
            return Interrupted(f"{cause}, there is no checkpoint yet; start again: {resume_command(mode, None)}")
        return Interrupted(
            f"{cause} of this start, {start.checkpoint} is the last checkpoint; "
            f"resume: {resume_command(mode, start.checkpoint)}"
        )

    def interruption(self, mode: str, folder: Path, step: int) -> Interrupted:
        """The end of a run that was asked to stop and has saved its last checkpoint at `step`."""
        from swift.trainers.checkpoint import last_checkpoint

        last = last_checkpoint(folder)
        return Interrupted(
            f"signal: {self.caught or 'another process'}: stopped at step {step}, {last} is saved; "
            f"{continuation(mode, last)}"
        )

    def _record(self, number: int, frame: FrameType | None) -> None:
        if self.caught is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.caught = signal.Signals(number).name


def training_options(args: Any, folder: Path, *, evaluates: bool, sees: bool = False) -> dict[str, Any]:
    """Keyword arguments of TrainingArguments.

    Checkpoints go to `folder`. evaluates: whether there is an evaluation set. sees: whether the model has a tower,
    which micro-batches without images leave out.
    """
    import torch
    from transformers.utils import is_torch_tf32_available

    from swift.trainers.optimizers.choice import is_registered
    from swift.trainers.parallel.sharding import sharding_options

    logging.getLogger("transformers.training_args").addFilter(_is_relevant)
    on_gpu = torch.cuda.is_available()
    sharding = sharding_options(args) if args.deepspeed or args.fsdp else {}
    eval_strategy = args.eval_strategy if evaluates else "no"
    checkpointing = {"use_reentrant": False, **args.gradient_checkpointing_kwargs}
    return {
        **{name: getattr(args, name) for name in SAME_IN_TRANSFORMERS},
        "output_dir": str(folder),
        "run_name": args.run_name or folder.name,
        "lr_scheduler_kwargs": args.lr_scheduler_kwargs or None,
        # below 1 transformers takes warmup_steps as a share of all steps, which it rounds up
        "warmup_steps": args.warmup_steps or min(args.warmup_ratio, 1 - 1e-9),
        "optim": "adamw_torch" if is_registered(args.optim) else args.optim,  # then see `set_own_optimizer`
        "gradient_checkpointing_kwargs": checkpointing if args.gradient_checkpointing else None,
        "dataloader_num_workers": args.dataloader_num_workers if on_gpu else 0,
        "dataloader_pin_memory": on_gpu,
        "logging_nan_inf_filter": False,
        "save_total_limit": None,  # removal comes after the seal, by swift.trainers.checkpoint.rotate
        "eval_strategy": eval_strategy,
        "eval_steps": args.eval_steps if eval_strategy == "steps" else None,
        "load_best_model_at_end": args.load_best_model_at_end and evaluates,
        "use_cpu": not on_gpu,
        "tf32": args.tf32 if is_torch_tf32_available() else None,
        "ddp_find_unused_parameters": args.ddp_find_unused_parameters
        or (sees and not (args.freeze_vit and args.freeze_aligner)),
        "ddp_backend": "gloo" if not on_gpu and os.environ.get("WORLD_SIZE", "1") != "1" else None,
        # for TensorBoard see `equip`
        "report_to": [name for name in args.report_to if name not in ("none", "tensorboard")] or "none",
        "disable_tqdm": True,
        **sharding,
        # batches of a data loader leave pinned memory without a wait
        "accelerator_config": {**sharding.get("accelerator_config", {}), "non_blocking": on_gpu},
    }


def _is_relevant(record: logging.LogRecord) -> bool:
    """Filters out warnings about the process group of an engine, and about a setting of accelerate."""
    text = record.getMessage()
    return not text.startswith("torch.distributed process group is initialized") and "activation_check" not in text


def on_one_device(arguments: TrainingArguments) -> TrainingArguments:
    """The arguments of a process that trains on its own device only.

    With several visible, Trainer would wrap the model in DataParallel, which scatters a packed stream as if it were
    a batch of rows. More devices are used by more processes (NPROC_PER_NODE).
    """
    arguments._n_gpu = min(arguments.n_gpu, 1)
    return arguments


def equip(trainer: Trainer, args: Any, folder: Path) -> None:
    """Give a trainer the optimizer of `--optim` and TensorBoard files in `<run>/runs`, and turn off its printing.

    transformers takes that folder from an environment variable, which a second run in this process would inherit.
    """
    from transformers import PrinterCallback
    from transformers.integrations import TensorBoardCallback

    from swift.trainers.optimizers.choice import is_registered, set_own_optimizer

    if is_registered(args.optim):
        set_own_optimizer(trainer, args)
    trainer.remove_callback(PrinterCallback)
    if args.profile_steps:
        from swift.trainers.profile import StepProfiler

        own: Any = trainer

        def say(line: str) -> None:
            (own.say if hasattr(own, "say") else own._print_line)(line)

        trainer.add_callback(StepProfiler(args.profile_steps, folder, own.collectives.rank, own.metrics, say))
    if "tensorboard" in args.report_to:
        board = TensorBoardCallback()
        board.logging_dir = str(folder / "runs")
        trainer.add_callback(board)
