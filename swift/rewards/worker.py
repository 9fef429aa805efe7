"""A reward worker: a fresh interpreter that imports the plugins and calls reward functions.

It owns one socket to the pool and nothing else; whatever it prints goes to the log. Synchronous functions
run on the main thread with no event loop running (so signal timers and `asyncio.run` inside them work), one
at a time. Awaited functions run on an event loop that is driven between messages, so several overlap; one
that exceeds its limit is cancelled here, and only if that does not work does the pool kill the worker.

Before every call the random generators are seeded from the call's seed, so that a function that draws
random numbers gives the same values whichever worker runs it.
"""

from __future__ import annotations

import asyncio
import hashlib
import inspect
import os
import pickle
import random
import resource
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from swift.errors import ConfigError
from swift.rewards import contract
from swift.rewards.protocol import Decoder, LoadSpec, Outcome, encode

_READ_BYTES = 1 << 20


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

    def __iter__(self) -> Any:
        return iter({**self._flags, **dict.fromkeys(self._aliases)})

    def __len__(self) -> int:
        return len({*self._flags, *self._aliases})


@dataclass
class Function:
    """One reward function, built and ready."""

    signature: contract.Signature
    call: Callable[..., Any]
    counters: dict[str, int] | None

    def take_counters(self) -> dict[str, int]:
        """What the function counted since the last call; resets it."""
        if not self.counters:
            return {}
        taken = {name: count for name, count in self.counters.items() if count}
        for name in self.counters:
            self.counters[name] = 0
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
        return Function(signature, inspect.getattr_static(owner, "__call__"), None)
    if not inspect.isclass(entry):
        return Function(signature, entry, getattr(entry, "counters", None))
    chosen = contract.constructor_arguments(name, entry, RunArguments(spec.flags, spec.aliases))
    built = contract.construct(
        entry, chosen, RunArguments(spec.flags, spec.aliases), lambda: _load_tokenizer(spec.tokenizer)
    )
    counters = getattr(built, "counters", None)
    return Function(signature, built, counters if isinstance(counters, dict) else None)


def _load_tokenizer(folder: str | None) -> Any:
    if folder is None:
        raise ConfigError("reward function: tokenizer: this run has none; give --tokenizer, or a default of None")
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


def select(payload: Mapping[str, Any], samples: list[int] | None) -> tuple[list[str], dict[str, Any]]:
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


def print_to(path: str) -> None:
    """From now on everything this process and its libraries print is appended to `path`."""
    sys.stdout.flush()
    sys.stderr.flush()
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)


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


class Worker:
    """The loop of one worker process.

    Args:
        connection: connected socket to the pool.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._decoder = Decoder()
        self._pid = os.getpid()
        self._functions: list[Function] = []
        self._loop = asyncio.new_event_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        self._timeout_s = 0.0

    def run(self) -> None:
        """Serves until the pool closes the socket."""
        while True:
            if self._tasks:
                self._drive_tasks()
            data = self._connection.recv(_READ_BYTES)
            if not data:
                return
            for message in self._decoder.feed(data):
                self._handle(message)

    def _drive_tasks(self) -> None:
        """Runs the event loop until a message waits on the socket or no awaited call is left."""
        self._loop.add_reader(self._connection, self._loop.stop)
        try:
            self._loop.run_forever()
        finally:
            self._loop.remove_reader(self._connection)

    def _stop_when_idle(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not self._tasks:
            self._loop.stop()

    def _handle(self, message: tuple[Any, ...]) -> None:
        if message[0] == "load":
            self._load(message[1])
        elif message[0] == "log":
            print_to(message[1])
        else:
            self._call(*message[1:])

    def _load(self, spec: LoadSpec) -> None:
        self._timeout_s = spec.timeout_s
        limit_memory(spec.memory_bytes)
        try:
            self._functions = build(spec)
        except ConfigError as error:
            self._send(("failed", "config", error.problems))
        except Exception as error:
            traceback.print_exc()
            self._send(("failed", "reward", [f"--reward_funcs: a class could not be built: {describe(error)}"]))
        else:
            self._send(("ready",))

    def _call(self, call_id: int, functions: list[int], payload: bytes, samples: Any, seed: int) -> None:
        completions, available = select(pickle.loads(payload), samples)
        for index in functions:
            function = self._functions[index]
            keywords = contract.keywords_for(function.signature, available)
            self._send(("started", call_id, index))
            seed_everything(seed)
            if function.signature.is_async:
                task = self._loop.create_task(self._await(call_id, index, completions, keywords))
                self._tasks.add(task)
                task.add_done_callback(self._stop_when_idle)
            else:
                self._send(("done", call_id, index, self._run(function, completions, keywords)))

    def _run(self, function: Function, completions: list[str], keywords: dict[str, Any]) -> Outcome:
        began = time.monotonic()
        try:
            result = function.call(list(completions), **keywords)
            if inspect.isawaitable(result):
                result = asyncio.run(within(result, self._timeout_s))
            outcome = Outcome("ok", contract.read_values(result, len(completions)))
        except (Exception, SystemExit, KeyboardInterrupt) as error:
            outcome = failure(function, error)
        self._leave_if_forked()
        outcome.seconds = time.monotonic() - began
        outcome.counters = function.take_counters()
        return outcome

    async def _await(self, call_id: int, index: int, completions: list[str], keywords: dict[str, Any]) -> None:
        function = self._functions[index]
        began = time.monotonic()
        try:
            result = await within(function.call(list(completions), **keywords), self._timeout_s)
            outcome = Outcome("ok", contract.read_values(result, len(completions)))
        except (Exception, asyncio.CancelledError) as error:
            outcome = failure(function, error)
        self._leave_if_forked()
        outcome.seconds = time.monotonic() - began
        outcome.counters = function.take_counters()
        self._send(("done", call_id, index, outcome))

    def _leave_if_forked(self) -> None:
        """A child that a reward function forked and that came back here must not speak on our socket."""
        if os.getpid() != self._pid:
            os._exit(0)

    def _send(self, message: tuple[Any, ...]) -> None:
        self._connection.sendall(encode(message))


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


def limit_memory(limit_bytes: int | None) -> None:
    """Bounds this process's memory and makes it the first victim when the machine runs out of it."""
    if limit_bytes is not None:
        hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
        soft = limit_bytes if hard == resource.RLIM_INFINITY else min(limit_bytes, hard)
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))
    score = Path("/proc/self/oom_score_adj")
    if score.exists():
        score.write_text("1000")


def main(descriptor: int) -> None:
    """Entry point of the process: `descriptor` is the inherited end of the socket pair."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the trainer, which closes us
    connection = socket.socket(fileno=descriptor)
    connection.setblocking(True)
    os.set_inheritable(descriptor, False)
    try:
        Worker(connection).run()
    except (BrokenPipeError, ConnectionResetError):
        pass  # the pool is gone; so are we
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)  # threads that a plugin started must not keep the process


if __name__ == "__main__":
    main(int(sys.argv[1]))
