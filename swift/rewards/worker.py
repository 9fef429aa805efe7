"""A reward worker: a fresh interpreter that imports the plugins and calls reward functions.

`initialize` runs once per process, `run` once per task of the pool: synchronous calls in sequence on the main thread
with no event loop running (so signal timers and `asyncio.run` inside them work), or awaited calls together on one event
loop, which exists as long as the worker. Before every call the random generators are seeded from the job, so a function
that draws random numbers returns the same values in every worker.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import faulthandler
import functools
import inspect
import multiprocessing
import os
import random
import resource
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NoReturn

import psutil

from swift.errors import ConfigError, RewardError, SwiftError, shortened
from swift.plugin.registry import Registration
from swift.rewards import contract
from swift.rewards.catalogue import find
from swift.rewards.payload import Job, LoadSpec, Outcome
from swift.rewards.trl_convention import Logged
from swift.types import EXTRACTED

if TYPE_CHECKING:
    import PIL.Image

    from swift.types import Image

START_LIMIT_S = 120.0
KEPT_IMAGES = 32
EXTRACTED_CHARS = 200
CANCEL_GRACE_S = 0.5
_ORPHAN_GRACE_S = 10.0
_ZOMBIE_S = 60.0
PR_SET_CHILD_SUBREAPER = 36
_MARKER = "SWIFT_REWARD_WORKER"
_ACCELERATORS = (
    "CUDA_VISIBLE_DEVICES",
    "HIP_VISIBLE_DEVICES",
    "ROCR_VISIBLE_DEVICES",
    "ASCEND_RT_VISIBLE_DEVICES",
    "ZE_AFFINITY_MASK",
)


@dataclass
class Function:
    """A reward function, built and ready to be called."""

    signature: contract.Signature
    call: Callable[..., Any]


class _State:
    """State that `initialize` prepares for `run`; one per process."""

    pid: int
    functions: list[Function]
    problem: SwiftError | None = None
    timeout_s: float
    loop: asyncio.AbstractEventLoop
    log: str | None = None


class CallTimeout(Exception):
    """An awaited call was cancelled because it exceeded its limit."""


def initialize(spec: LoadSpec, log: str | None) -> None:
    """Makes this process a worker: a session of its own, no accelerator, limits, output, plugins.

    If a plugin cannot be loaded, every `run` raises its error. If it hangs at import, the process ends.
    """
    os.setsid()  # one signal reaches this process and its children
    _adopt_orphans()
    threading.Thread(target=_exit_with_trainer, daemon=True).start()
    os.environ.update(dict.fromkeys(_ACCELERATORS, ""))
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    print_to(log)
    faulthandler.dump_traceback_later(START_LIMIT_S, exit=True, file=2)
    limit_memory(spec.memory_bytes)
    _State.pid, _State.timeout_s, _State.loop = os.getpid(), spec.timeout_s, asyncio.new_event_loop()
    try:
        _State.functions = build(spec)
    except SwiftError as error:
        _State.problem = error
    except Exception as error:
        traceback.print_exc()
        _State.problem = RewardError(f"--reward_funcs: a class could not be built: {describe(error)}")
    finally:
        faulthandler.cancel_dump_traceback_later()


def build(spec: LoadSpec) -> list[Function]:
    """Imports the plugins and builds every function of `spec`; exceptions of constructors propagate."""
    from swift.plugin import load_external_plugins

    load_external_plugins(spec.plugins)
    return [_build_function(name, find(name), spec) for name in spec.functions]


def _build_function(name: str, found: Registration, spec: LoadSpec) -> Function:
    entry = found.entry
    signature = contract.signature_of(name, entry, origin=found.origin)
    if signature.without_self:
        unbound: Any = inspect.getattr_static(entry if inspect.isclass(entry) else type(entry), "__call__")
        return Function(signature, unbound)
    if not inspect.isclass(entry):
        return Function(signature, entry)
    values = {**spec.flags, "args": SimpleNamespace(**spec.flags)}
    wanted = inspect.signature(entry).parameters.get("tokenizer")
    if wanted is not None and (spec.tokenizer is not None or wanted.default is inspect.Parameter.empty):
        values["tokenizer"] = _load_tokenizer(spec.tokenizer)
    built: Any = entry(**contract.constructor_arguments(name, entry, values))
    return Function(signature, built)


def _load_tokenizer(folder: str | None) -> Any:
    if folder is None:
        raise ConfigError("reward function: tokenizer: this run has none; give --tokenizer, or a default of None")
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


def _adopt_orphans() -> None:
    """Makes this process the parent of orphaned grandchildren (Linux), and marks the environment of all of them."""
    os.environ[_MARKER] = f"{os.getppid()}.{os.getpid()}"  # as in `family`
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    leave, own = os._exit, os.getpid()

    def end(status: int) -> NoReturn:
        if os.getpid() == own:
            _end_others()
        leave(status)

    os._exit = end  # pebble calls it when the trainer has exited, past every `finally`


def family(trainer: int, pid: int) -> list[int]:
    """Process ids of the descendants of a worker, and of processes that inherited its environment."""
    found, mark = [], f"{trainer}.{pid}"
    with contextlib.suppress(psutil.NoSuchProcess):
        found += [child.pid for child in psutil.Process(pid).children(recursive=True)]
    for process in psutil.process_iter(["environ"]):
        if (process.info["environ"] or {}).get(_MARKER) == mark:
            found.append(process.pid)
    return found


def _exit_with_trainer() -> None:
    """Ends this process and its family when the trainer was killed (SIGKILL, out of memory)."""
    trainer: Any = multiprocessing.parent_process()
    ended, looked_at = set[int](), time.monotonic()
    while os.getppid() == trainer.pid:
        trainer.join(1.0)
        if time.monotonic() - looked_at > _ZOMBIE_S:
            ended, looked_at = _reap(ended), time.monotonic()
    end_family()


def end_family() -> None:
    """Kills all processes that this process started, and then itself."""
    _end_others()
    os.kill(os.getpid(), signal.SIGKILL)


def _end_others() -> None:
    trainer: Any = multiprocessing.parent_process()
    for pid in family(trainer.pid, os.getpid()):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)


def _reap(before: set[int]) -> set[int]:
    """Reaps adopted children that have ended: zombies now and in `before`, for which no code here has waited."""
    ended = {child.pid for child in psutil.Process().children() if child.status() == psutil.STATUS_ZOMBIE}
    for pid in ended & before:
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)
    return ended


def print_to(path: str | None) -> None:
    """Appends all further output of this process and its libraries to `path`; None discards it."""
    sys.stdout.flush()
    sys.stderr.flush()
    if path is not None:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path or os.devnull, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    _State.log = path


def limit_memory(limit_bytes: int | None) -> None:
    """Limits this process's memory and each file it writes; the kernel's out-of-memory killer ends it first."""
    if limit_bytes is not None:
        for kind in (resource.RLIMIT_DATA, resource.RLIMIT_FSIZE):
            hard = resource.getrlimit(kind)[1]
            soft = limit_bytes if hard == resource.RLIM_INFINITY else min(limit_bytes, hard)
            resource.setrlimit(kind, (soft, hard))
    score = Path("/proc/self/oom_score_adj")
    if score.exists():
        score.write_text("1000")


def run(jobs: list[Job], log: str | None) -> list[Outcome]:
    """Runs one task: the outcomes of `jobs`, whose functions are all synchronous or all awaited."""
    if _State.problem is not None:
        raise _State.problem
    if log != _State.log:
        print_to(log)
    # The pool ends a call that exceeds its limit. If the trainer has exited meanwhile, this timer ends code that never
    # lets other threads run.
    faulthandler.dump_traceback_later(_State.timeout_s + _ORPHAN_GRACE_S, exit=True, file=2)
    try:
        if _State.functions[jobs[0].function].signature.is_async:
            return _run_together(jobs)
        return [_call(job) for job in jobs]
    finally:
        faulthandler.cancel_dump_traceback_later()


def _run_together(jobs: list[Job]) -> list[Outcome]:
    try:
        return _State.loop.run_until_complete(_together(jobs))
    except RuntimeError as error:  # a call has stopped the loop
        _State.loop = asyncio.new_event_loop()
        if len(jobs) == 1:
            return [Outcome("exception", detail=describe(error))]
        return [_run_together([job])[0] for job in jobs]


async def _together(jobs: list[Job]) -> list[Outcome]:
    return await asyncio.gather(*(_await(job) for job in jobs))


def _call(job: Job) -> Outcome:
    function, call, read = _begin(job)
    began = time.monotonic()
    try:
        result = call()
        if inspect.isawaitable(result):
            result = asyncio.run(within(result, _State.timeout_s))
        outcome = read(result)
        outcome.columns |= _extracted(function, len(outcome.values))
    except BaseException as error:  # a function may raise anything
        outcome = _failure(function, error)
    return _measured(outcome, function, began)


def _extracted(function: Function, count: int) -> dict[str, list[Any]]:
    """The column of completions.jsonl with the answers that a function has read, if it keeps them in `extracted`."""
    answers = getattr(function.call, "extracted", None)
    if not isinstance(answers, list) or len(answers) != count:
        return {}
    texts = [None if answer is None else shortened(str(answer), EXTRACTED_CHARS) for answer in answers]
    return {f"{function.signature.name}{EXTRACTED}": texts}


async def _await(job: Job) -> Outcome:
    function, call, read = _begin(job)
    began = time.monotonic()
    try:
        outcome = read(await within(call(), _State.timeout_s))
    except BaseException as error:  # a function may raise anything
        outcome = _failure(function, error)
    return _measured(outcome, function, began)


def _begin(job: Job) -> tuple[Function, Callable[[], Any], Callable[[Any], Outcome]]:
    """The function, a callable that calls it, and a callable that reads its result."""
    function = _State.functions[job.function]
    completions, keywords = job.arguments()
    logged = Logged()
    if function.signature.is_trl:
        keywords |= {"log_extra": logged.log_extra, "log_metric": logged.log_metric}
    elif not function.signature.is_built_in:
        keywords |= {"trajectory_inputs": contract.trajectories(keywords, completions)}
    keywords = contract.keywords_for(function.signature, keywords)
    if "images" in keywords:
        keywords["images"] = [[_opened(image).copy() for image in images] for images in keywords["images"]]
    completions_first = [] if function.signature.is_trl else [list(completions)]
    seed_everything(job.seed)
    return (
        function,
        lambda: function.call(*completions_first, **keywords),
        lambda result: contract.read_outcome(result, len(completions), logged),
    )


@functools.lru_cache(maxsize=KEPT_IMAGES)
def _opened(image: Image) -> PIL.Image.Image:
    from swift.data.images import open_image

    return open_image(image)


def seed_everything(seed: int) -> None:
    """Seeds Python's generator, and numpy's and torch's if a plugin has imported them."""
    random.seed(seed)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(seed % 2**32)
    if (torch := sys.modules.get("torch")) is not None:
        torch.manual_seed(seed)


async def within(awaitable: Any, timeout_s: float) -> Any:
    """Awaits with a limit; a `TimeoutError` that the function itself raises propagates unchanged.

    Raises:
        CallTimeout: after `timeout_s` seconds.
    """
    try:
        async with asyncio.timeout(timeout_s) as limit:
            return await awaitable
    except TimeoutError:
        if limit.expired():
            raise CallTimeout(f"time-out after {timeout_s:g} s") from None
        raise


def _failure(function: Function, error: BaseException) -> Outcome:
    if isinstance(error, contract.ContractBroken):
        return Outcome("contract", detail=f"{function.signature.where}: {error}")
    if isinstance(error, CallTimeout):
        return Outcome("timeout", detail=str(error))
    traceback.print_exception(error)
    return Outcome("exception", detail=describe(error))


def _measured(outcome: Outcome, function: Function, began: float) -> Outcome:
    """The outcome with its duration and the function's counters, which are then reset."""
    if os.getpid() != _State.pid:
        os._exit(0)  # a child that the function forked must not return the worker's result
    outcome.seconds = time.monotonic() - began
    counters = getattr(function.call, "counters", None)
    if isinstance(counters, dict):
        outcome.counters = {name: count for name, count in counters.items() if count}
        counters.update(dict.fromkeys(counters, 0))
    return outcome


def describe(error: BaseException) -> str:
    """The last line of an exception, and where in the user's file it was raised."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    last = " ".join(traceback.format_exception_only(error)[-1].split())
    return f"{shortened(last, 500)}{where}"
