"""The top-level error handler: which lines are printed, and which exit code the process returns.

    SwiftError              one line per problem, the type's own code; traceback only with --debug true
    out of memory           3, with the phase, the peak and three settings to lower
    disk full               3, with the file and the free bytes
    KeyboardInterrupt       130, one line
    SystemExit              1, one line with the place: a plugin's or library's, for nothing of ours raises it
    stdout closed by reader 141, silently (`swift config-schema | head`)
    anything else           1, with its traceback: a defect of swift, or an unexpected error of user code

If a run is unfinished, a further line has its folder and the command to resume it; all lines are also in its log.

Of several processes one prints. Under swift's launcher a worker writes its lines to the folder named by
SWIFT_EXIT_DIR and the launcher prints those of the worker that failed first. Under another launcher rank 0 prints,
and other ranks print only errors that cannot have happened on rank 0 as well.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import select
import signal
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from swift.cli.console import discard
from swift.errors import (
    ConfigError,
    Interrupted,
    ResourceError,
    SwiftError,
    is_out_of_memory,
    note_unfinished,
    printable,
    set_error_reporter,
    smaller,
    unfinished,
)
from swift.observability.files import free_bytes
from swift.observability.secrets import mask_text

EXIT_DIR = "SWIFT_EXIT_DIR"
INTERRUPTED_BY_KEYBOARD = 128 + signal.SIGINT
READER_GONE = 128 + signal.SIGPIPE
PHASES = {
    "swift.rollout": "generate",
    "swift.rewards": "reward",
    "swift.rl": "train",
    "swift.trainers": "train",
    "swift.models.policy": "model",
    "swift.models.reference": "model",
    "swift.data": "data",
}
"""Package or module -> the phase of a run in which memory ran out. A forward pass counts to its caller."""

LOWER = {
    "generate": "--max_completion_length, --num_generations, --vllm_gpu_memory_utilization",
    "train": (
        "--mini_batch_size (rlhf_type grpo) or --per_device_train_batch_size, and --max_completion_length or "
        "--max_length; or shard full tuning: --deepspeed zero3"
    ),
    "model": "the size of --model, --torch_dtype bfloat16, --tuner_type lora",
}
"""Settings to lower (or choose) when memory ran out, by phase."""

LIMITS = {
    errno.EFBIG: ("disk", "raise the limit of a file's size (ulimit -f)"),
    errno.EROFS: ("disk", "choose a folder that can be written"),
    errno.EIO: ("disk", "check the disk, or choose another"),
    errno.EMFILE: ("files", "raise the limit of open files (ulimit -n)"),
    errno.ENFILE: ("files", "raise the system's limit of open files (sysctl fs.file-max)"),
}
"""Errors of the system that no setting of swift causes -> their subject, and the fix."""


@dataclass(frozen=True, slots=True)
class Ending:
    """The end of a command: its exit code, the text for stderr ("" for none), and the line about an unfinished run.

    again: flags with which the launcher may start the run again; without any it does not.
    """

    exit_code: int
    text: str = ""
    advice: str = ""
    again: Sequence[str] = ()


def run_command(
    action: Callable[[], int | None], *, debug: Callable[[], bool], as_json: Callable[[], bool] = lambda: False
) -> int:
    """Runs `action`; returns its exit code (None counts as 0) or that of its failure, which is printed.

    Args:
        action: the command.
        debug: whether anticipated errors keep their traceback; called only after a failure.
        as_json: whether a failure is printed as JSON on stdout, too.
    """

    def report(error: BaseException) -> int:
        ending = ending_of(error, debug=debug())
        _append_to_log(ending)
        _print_ending(ending, error, os.environ)
        if as_json() and EXIT_DIR not in os.environ and os.environ.get("RANK", "0") == "0":
            lines = [line.removeprefix("swift: ") for line in ending.text.splitlines() if line.startswith("swift: ")]
            errors = [line.removeprefix("error: ") for line in lines]
            print(json.dumps({"exit_code": ending.exit_code, "errors": errors}), flush=True)
        return ending.exit_code

    note_unfinished(None)
    set_error_reporter(report)
    try:
        code = action() or 0
        sys.stdout.flush()  # a closed pipe shows here, not after the last handler is gone
        return code
    except BaseException as error:
        if isinstance(error, BrokenPipeError) and _reader_is_gone():
            discard(sys.stdout.fileno())  # so that the interpreter's own flush at exit succeeds
            return READER_GONE
        return report(error)


class _Console(logging.Handler):
    """Shows swift's warnings on the console; those of libraries are in the run's log files."""

    def emit(self, record: logging.LogRecord) -> None:
        text = mask_text(record.getMessage())
        kind = "" if text.startswith(("warning: ", "note: ")) else "warning: "
        print(printable(f"swift: {kind}{text}"), file=sys.stderr, flush=True)


def show_warnings() -> None:
    """From now on rank 0 shows swift's warnings on the console."""
    logger = logging.getLogger("swift")
    if os.environ.get("RANK", "0") == "0" and not any(isinstance(handler, _Console) for handler in logger.handlers):
        logger.addHandler(_Console(logging.WARNING))


def ending_of(error: BaseException, *, debug: bool = False) -> Ending:
    """What to print for `error` and which code to return."""
    run = unfinished()
    advice = f"swift: {run.advice()}\n" if run is not None and not isinstance(error, Interrupted) else ""
    if isinstance(error, KeyboardInterrupt):
        return Ending(INTERRUPTED_BY_KEYBOARD, "swift: interrupted\n", advice)
    known = (
        error if isinstance(error, SwiftError) else _exit_error(error) or _long_name(error) or _resource_error(error)
    )
    if known is None:
        report = f"swift: error: unexpected {type(error).__name__}: please report it with the traceback above\n"
        return Ending(1, _traceback(error) + report, advice)
    shown = _traceback(error) if debug else ""
    prefix = "swift: " if isinstance(known, Interrupted) else "swift: error: "
    lines = [*known.problems, *getattr(error, "__notes__", ())]
    text = "".join(f"{prefix}{printable(mask_text(line))}\n" for line in lines)
    return Ending(known.exit_code, shown + text, advice, _again() if is_out_of_memory(error) else ())


def _again() -> list[str]:
    """The flags that continue the unfinished run in less memory; none if there are no such flags."""
    run, words = unfinished(), smaller()
    going_on = run.going_on() if run is not None and words else None
    return [] if going_on is None else [*words, *going_on]


def _append_to_log(ending: Ending) -> None:
    """Appends the ending to the log of the unfinished run."""
    if (run := unfinished()) is not None:
        with contextlib.suppress(OSError), run.log.open("a", encoding="utf-8") as log:  # its disk may be what failed
            log.write(ending.text + ending.advice)


def _traceback(error: BaseException) -> str:
    return mask_text("".join(traceback.format_exception(error)))


def _print_ending(ending: Ending, error: BaseException, environ: Mapping[str, str]) -> None:
    """Prints the ending, or records it for the launcher."""
    rank = environ.get("RANK", "0")
    if folder := environ.get(EXIT_DIR):
        record = Path(folder) / f"rank-{rank}.json"
        partial = record.with_suffix(".partial")
        try:
            partial.write_text(json.dumps(asdict(ending)), encoding="utf-8")
            partial.replace(record)
            return
        except OSError:
            pass  # the launcher or the disk is gone: print it here
    if rank == "0":
        sys.stderr.write(ending.text + ending.advice)
    elif not isinstance(error, ConfigError | Interrupted | KeyboardInterrupt):
        sys.stderr.write("".join(f"[rank {rank}] {line}\n" for line in ending.text.splitlines()))
    sys.stderr.flush()


def _exit_error(error: BaseException) -> SwiftError | None:
    """The error for code of a plugin or library that called `sys.exit`; swift itself does not."""
    if not isinstance(error, SystemExit):
        return None
    place = traceback.extract_tb(error.__traceback__)[-1]
    where = f"{place.filename}:{place.lineno}"
    return SwiftError(f"exit: {error.code}: {where}: asked for the end of the process; raise an exception instead")


def _long_name(error: BaseException) -> SwiftError | None:
    """The error for a setting that is used as a path and is longer than file systems allow."""
    if not isinstance(error, OSError) or error.errno != errno.ENAMETOOLONG:
        return None
    name = str(error.filename)
    return ConfigError(f"path: {name[:40]}...: {len(name)} characters, more than a file can have; correct the setting")


def _resource_error(error: BaseException) -> SwiftError | None:
    """The ResourceError for an exception of the system or of a library."""
    if is_out_of_memory(error):
        phase = _phase(error)
        hint = LOWER.get(phase, LOWER["train"])
        return ResourceError(f"memory: out of memory in phase {phase}: {_peak()}; lower {hint}")
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        where = Path(error.filename or Path.cwd())
        return ResourceError(f"disk: {where}: no space left, {free_bytes(where)} bytes free; free some, or move it")
    if isinstance(error, OSError) and error.errno in LIMITS:
        subject, fix = LIMITS[error.errno]
        return ResourceError(f"{subject}: {error.filename or 'this process'}: {error.strerror}; {fix}")
    if isinstance(error, RuntimeError) and "can't start new thread" in str(error):
        return ResourceError("threads: no more can be started; raise the limits of processes (ulimit -u) and memory")
    return None


def _phase(error: BaseException) -> str:
    """The phase of the innermost frame of swift whose module has a phase."""
    phase = "start"
    for frame, _ in traceback.walk_tb(error.__traceback__):
        module = frame.f_globals.get("__name__", "")
        package = ".".join(module.split(".")[:2])
        phase = PHASES.get(module) or PHASES.get(package, phase)
    return phase


def _peak() -> str:
    """The peak memory of this process, on the accelerator if there is one."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        return f"peak {torch.cuda.max_memory_allocated() / 2**20:.0f} MiB on {torch.cuda.get_device_name()}"
    import resource

    unit = 1 if sys.platform == "darwin" else 1024
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    of = "" if limit == resource.RLIM_INFINITY else f" under ulimit -v {limit >> 10}"
    return f"peak {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**20:.0f} MiB{of}"


def _reader_is_gone() -> bool:
    """Whether stdout is a pipe without a reader."""
    try:
        descriptor = sys.stdout.fileno()
    except (OSError, ValueError, AttributeError):
        return False  # stdout is no file
    poll = select.poll()
    poll.register(descriptor, 0)
    return any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))
