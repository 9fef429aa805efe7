"""A reward worker: a fresh interpreter that imports the plugins and calls reward functions.

`initialize` runs once per process; `run` is one task of the pool: some calls of synchronous functions, one after the
other on the main thread with no event loop running (so signal timers and `asyncio.run` inside them work), or several
awaited calls together on one event loop, which lives as long as the worker. Before every call the random generators
are seeded from the call's seed, so a function that draws random numbers gives the same values in every worker.
"""

from __future__ import annotations

import asyncio
import faulthandler
import hashlib
import inspect
import math
import multiprocessing
import os
import random
import resource
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from swift.errors import ConfigError, RewardError, SwiftError
from swift.rewards import contract

START_LIMIT_S = 120.0
CANCEL_GRACE_S = 0.5
_ORPHAN_GRACE_S = 10.0
_ACCELERATORS = (
    "CUDA_VISIBLE_DEVICES",
    "HIP_VISIBLE_DEVICES",
    "ROCR_VISIBLE_DEVICES",
    "ASCEND_RT_VISIBLE_DEVICES",
    "ZE_AFFINITY_MASK",
)

OutcomeKind = Literal["ok", "exception", "contract", "timeout", "crash", "not_finite"]


@dataclass
class Outcome:
    """The result of one call of one function.

    `values` has one entry per sample when `kind` is "ok"; otherwise `detail` is one line about the failure.
    `seconds` is the duration; `counters` what the function counted (ground truths without a parse).
    """

    kind: OutcomeKind
    values: list[float | None] = field(default_factory=list)
    detail: str = ""
    seconds: float = 0.0
    counters: dict[str, int] = field(default_factory=dict)

    @property
    def value(self) -> float | None:
        """The value of a call on one sample; None too where the call failed."""
        return self.values[0] if self.kind == "ok" else None

    def checked(self) -> Outcome:
        """Itself, or a failure when a value is NaN or infinite."""
        wrong = next((value for value in self.values if value is not None and not math.isfinite(value)), None)
        return self if wrong is None else replace(self, kind="not_finite", values=[], detail=f"returned {wrong}")


@dataclass(frozen=True)
class LoadSpec:
    """What a worker builds before its first call.

    Attributes:
        functions: names in the registry; calls refer to them by position.
        plugins: plugin files, absolute.
        flags: all flags of the run by canonical name.
        aliases: alias -> canonical name, readable on `args` too.
        tokenizer: folder of the policy's tokenizer, for classes that ask for it.
        timeout_s: limit of a call.
        memory_bytes: limit of the worker's own memory; None means no limit.
    """

    functions: list[str]
    plugins: list[str]
    flags: dict[str, Any]
    aliases: dict[str, str]
    tokenizer: str | None
    timeout_s: float
    memory_bytes: int | None


Payload = Mapping[str, Any]
"""{"completions": texts, "keywords": lists of the same length and `trainer_state`} of one or more whole groups."""


@dataclass(frozen=True)
class Job:
    """One call: a function, by position, on some samples (None: all) of a payload."""

    function: int
    payload: Payload
    samples: list[int] | None
    seed: int


class RunArguments(Mapping[str, Any]):
    """The resolved arguments as plug-ins see them: `args.beta`, `args["beta"]`, any alias, read only."""

    def __init__(self, flags: dict[str, Any], aliases: dict[str, str]) -> None:
        self._flags, self._aliases = flags, aliases

    def __getitem__(self, name: str) -> Any:
        return self._flags[name if name in self._flags else self._aliases.get(name, name)]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"this run has no argument {name!r}") from None

    def __iter__(self) -> Iterator[str]:
        return iter({**self._flags, **dict.fromkeys(self._aliases)})

    def __len__(self) -> int:
        return len({*self._flags, *self._aliases})


@dataclass
class Function:
    """One reward function, built and ready."""

    signature: contract.Signature
    call: Callable[..., Any]

    def take_counters(self) -> dict[str, int]:
        """What the function counted since the last call; resets it."""
        counters = getattr(self.call, "counters", None)
        if not isinstance(counters, dict):
            return {}
        taken = {name: count for name, count in counters.items() if count}
        counters.update(dict.fromkeys(counters, 0))
        return taken


def build(spec: LoadSpec) -> list[Function]:
    """Imports the plugins and builds every function of `spec`.

    Raises:
        ConfigError: as `swift.plugin.load_external_plugins` and `swift.rewards.contract` do.
        Exception: whatever a class raises when it is built.
    """
    from swift.plugin import load_external_plugins, orms

    load_external_plugins(spec.plugins)
    return [_build_one(name, orms[name], spec) for name in spec.functions]


def _build_one(name: str, entry: Any, spec: LoadSpec) -> Function:
    signature = contract.signature_of(name, entry)
    if signature.without_self:
        owner = entry if inspect.isclass(entry) else type(entry)
        return Function(signature, inspect.getattr_static(owner, "__call__"))
    if not inspect.isclass(entry):
        return Function(signature, entry)
    args = RunArguments(spec.flags, spec.aliases)
    chosen = contract.constructor_arguments(name, entry, args)
    return Function(signature, contract.construct(entry, chosen, args, lambda: _load_tokenizer(spec.tokenizer)))


def _load_tokenizer(folder: str | None) -> Any:
    if folder is None:
        raise ConfigError("reward function: tokenizer: this run has none; give --tokenizer, or a default of None")
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


# ---- the process --------------------------------------------------------------------------------------------


class _State:
    """What `initialize` prepares for `run`; one per process."""

    pid: int
    functions: list[Function]
    problem: SwiftError | None = None
    timeout_s: float
    loop: asyncio.AbstractEventLoop
    log: str | None = None


def initialize(spec: LoadSpec, log: str | None) -> None:
    """Makes this process a worker: a session of its own, no accelerator, limits, output, plugins.

    A plugin that cannot be loaded is reported by every `run`; one that hangs at import ends the process.
    """
    os.setsid()  # one signal reaches this process and its children
    threading.Thread(target=_die_with_the_trainer, daemon=True).start()
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


def _die_with_the_trainer() -> None:
    """Ends this process and its children when the trainer has gone without a word (SIGKILL, out of memory)."""
    trainer = multiprocessing.parent_process()
    while trainer is not None and os.getppid() == trainer.pid:
        time.sleep(1.0)
    os.killpg(0, signal.SIGKILL)


def print_to(path: str | None) -> None:
    """From now on everything this process and its libraries print is appended to `path`; None discards it."""
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
    """Bounds this process's memory and makes it the first victim when the machine runs out of it."""
    if limit_bytes is not None:
        hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
        soft = limit_bytes if hard == resource.RLIM_INFINITY else min(limit_bytes, hard)
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))
    score = Path("/proc/self/oom_score_adj")
    if score.exists():
        score.write_text("1000")


# ---- calls --------------------------------------------------------------------------------------------------


def run(jobs: list[Job], log: str | None) -> list[Outcome]:
    """One task: the outcomes of `jobs`, whose functions are all synchronous or all awaited.

    Raises:
        SwiftError: the plugins could not be loaded in this process.
    """
    if _State.problem is not None:
        raise _State.problem
    if log != _State.log:
        print_to(log)
    # The pool ends a call that is late. Should the trainer be gone meanwhile, code that never lets other threads run
    # ends here.
    faulthandler.dump_traceback_later(_State.timeout_s + _ORPHAN_GRACE_S, exit=True, file=2)
    try:
        if _State.functions[jobs[0].function].signature.is_async:
            return _State.loop.run_until_complete(_gather(jobs))
        return [_call(job) for job in jobs]
    finally:
        faulthandler.cancel_dump_traceback_later()


def _arguments(job: Job, function: Function) -> tuple[list[str], dict[str, Any]]:
    completions, available = select(job.payload, job.samples)
    return completions, contract.keywords_for(function.signature, available)


def select(payload: Payload, samples: list[int] | None) -> tuple[list[str], dict[str, Any]]:
    """Completions and keywords of the chosen samples; None means all of them."""
    completions: list[str] = payload["completions"]
    keywords: dict[str, Any] = payload["keywords"]
    if samples is None:
        return completions, dict(keywords)
    chosen = {
        name: value if name == "trainer_state" else [value[index] for index in samples]
        for name, value in keywords.items()
    }
    return [completions[index] for index in samples], chosen


def seed_everything(seed: int) -> None:
    """Seeds Python's generator, and numpy's and torch's where a plugin has imported them."""
    random.seed(seed)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(seed % 2**32)
    if (torch := sys.modules.get("torch")) is not None:
        torch.manual_seed(seed)


def call_seed(run_seed: int, prompt_id: str, group_id: str) -> int:
    """The seed of every call on this group: a pure function of run, prompt and group (63 bits)."""
    digest = hashlib.sha256(f"{run_seed}\0{prompt_id}\0{group_id}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def _call(job: Job) -> Outcome:
    function = _State.functions[job.function]
    completions, keywords = _arguments(job, function)
    seed_everything(job.seed)
    began = time.monotonic()
    try:
        result = function.call(list(completions), **keywords)
        if inspect.isawaitable(result):
            result = asyncio.run(within(result, _State.timeout_s))
        outcome = Outcome("ok", contract.read_values(result, len(completions)))
    except (Exception, SystemExit, KeyboardInterrupt) as error:
        outcome = failure(function, error)
    return _measured(outcome, function, began)


async def _gather(jobs: list[Job]) -> list[Outcome]:
    return await asyncio.gather(*(_await(job) for job in jobs))


async def _await(job: Job) -> Outcome:
    function = _State.functions[job.function]
    completions, keywords = _arguments(job, function)
    seed_everything(job.seed)
    began = time.monotonic()
    try:
        result = await within(function.call(list(completions), **keywords), _State.timeout_s)
        outcome = Outcome("ok", contract.read_values(result, len(completions)))
    except (Exception, asyncio.CancelledError) as error:
        outcome = failure(function, error)
    return _measured(outcome, function, began)


def _measured(outcome: Outcome, function: Function, began: float) -> Outcome:
    if os.getpid() != _State.pid:
        os._exit(0)  # a child that the function forked must not speak for the worker
    outcome.seconds = time.monotonic() - began
    outcome.counters = function.take_counters()
    return outcome


class CallTimeout(Exception):
    """An awaited call was cancelled because it exceeded its limit."""


async def within(awaitable: Any, timeout_s: float) -> Any:
    """Awaits with a limit; a `TimeoutError` of the function itself stays what it is.

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


def failure(function: Function, error: BaseException) -> Outcome:
    """The outcome of a call that raised."""
    if isinstance(error, contract.ContractBroken):
        return Outcome("contract", detail=f"{function.signature.where}: {error}")
    if isinstance(error, CallTimeout):
        return Outcome("timeout", detail=str(error))
    traceback.print_exception(error)
    return Outcome("exception", detail=describe(error))


def describe(error: BaseException) -> str:
    """The last line of an exception, and where in the user's file it was raised."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    last = " ".join(traceback.format_exception_only(error)[-1].split())
    return f"{last[:500]}{where}"
