"""One life of a worker as its parent sees it: processes, socket, heartbeat. It is never restarted; see `client`.

A thread owns the socket. It writes what is posted, resolves the calls that are answered and keeps the events in order.
Everything else only waits on a condition, with a bound. A link is lost when its process ends, breaks the protocol or
misses its heartbeats; whoever waits then gets `WorkerLost`, and what had arrived before stays readable.

Misses are counted in ticks of this process, not by the clock: a trainer that was stopped itself accuses nobody.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from swift.errors import EngineDead, ResourceError, SwiftError
from swift.rollout.engines.spec import EngineSpec
from swift.rollout.engines.worker import protocol
from swift.rollout.engines.worker.protocol import Message

LAUNCH_VARIABLES = (
    "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_NAME", "ROLE_RANK",
    "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT",
)  # fmt: skip
"""torchrun's: they describe the trainer's ranks, of which a worker is none."""
LAST_LINES = 6
"""Lines of a worker's log that an error shows."""
STACK_FRAMES = 4
"""Frames of the main thread that an error shows."""
STACKS_S = 3.0
"""How long stacks are waited for."""
REASON_S = 1.0
"""How long a closed socket waits for the guard to say how the host ended."""
LAST_RESORT_S = 5.0
"""How long a group that was killed may take to disappear."""


@dataclass(frozen=True, slots=True)
class WorkerTimeouts:
    """Bounds on every wait for a worker, in seconds; the defaults are those of the settings.

    start_s: from the start to the first request. request_s: one request, from its submission to its completion; then it
    is aborted and tried once more. stall_s: without any progress while sampling. sync_s: one update. sleep_s: sleep or
    wake. pause_s: pause. reply_s: any other call. heartbeat_s, misses: so many beats without an answer are
    death. close_s: to close in good order, and between TERM and KILL.
    """

    start_s: float = 600.0
    request_s: float = 600.0
    stall_s: float = 300.0
    sync_s: float = 300.0
    sleep_s: float = 60.0
    pause_s: float = 60.0
    reply_s: float = 60.0
    heartbeat_s: float = 5.0
    misses: int = 3
    close_s: float = 10.0


class WorkerLost(Exception):
    """This life of the worker is over; the text says how, as in "was killed by SIGKILL"."""


class CallTimeout(Exception):
    """A call was not answered in time."""


@dataclass(slots=True)
class Call:
    """A question that was sent. reply and error: one of them, once `done`."""

    name: str
    number: int
    done: bool = False
    reply: Any = None
    error: SwiftError | None = None


@dataclass(slots=True)
class _Frame:
    data: memoryview
    descriptors: list[int] = field(default_factory=list)

    def close(self) -> None:
        while self.descriptors:
            os.close(self.descriptors.pop())


class Link:
    """Starts a worker; see the module's docstring.

    Args:
        spec: the engine, as this process sees the devices.
        name: for messages.
        log_file: the worker's output is appended to it.
        timeouts: see `WorkerTimeouts`.

    Raises:
        ResourceError: no process can be started.
    """

    def __init__(self, spec: EngineSpec, *, name: str, log_file: Path, timeouts: WorkerTimeouts) -> None:
        self.name = name
        self.log_file = log_file
        self.timeouts = timeouts
        self.changed = threading.Condition()
        self.events: deque[Message] = deque()
        self.lost = ""
        self.wakes = 0
        self.phase = "starting"
        self.host_pid: int | None = None
        self.counters: list[float] = [0, 0, 0, 0.0]
        self.version = 0
        self.progress_at = time.monotonic()
        self.ready = False
        self._progress: Any = None
        self._numbers = itertools.count(1)
        self._calls: dict[int, Call] = {}
        self._outbox: deque[_Frame] = deque()
        self._decoder = protocol.Decoder()
        self._heard = True
        self._missed = 0
        self._finished = False  # the guard has said how the host ended
        self._ended = False
        self._ending = threading.Lock()
        self._guard_text = b""
        self._socket, theirs = socket.socketpair()
        self._pipe, guards = socket.socketpair()
        self._woken, self._wake = socket.socketpair()
        with theirs, guards:
            self._process = self._spawn(spec, theirs.fileno(), guards.fileno())
        for one in (self._socket, self._pipe, self._woken, self._wake):
            one.setblocking(False)
        self.started = self.post("start", spec=_as_child_sees(spec).to_json())
        self._thread = threading.Thread(target=self._serve, name=f"link of {name}", daemon=True)
        self._thread.start()

    # --- calls ------------------------------------------------------------------------------------------------

    def post(self, name: str, *, descriptors: Sequence[int] = (), **fields: Any) -> Call:
        """Ask, without waiting. Descriptors are duplicated at once.

        Raises:
            WorkerLost.
        """
        call = Call(name, next(self._numbers))
        self._write({"id": call.number, "call": name, "fds": len(descriptors), **fields}, descriptors, call)
        return call

    def tell(self, name: str, **fields: Any) -> None:
        """Say something that needs no answer; a link that is lost hears nothing."""
        with contextlib.suppress(WorkerLost):
            self._write({"id": None, "call": name, **fields}, (), None)

    def wait(self, call: Call, timeout_s: float) -> Any:
        """The answer.

        Raises:
            SwiftError: what the call raised there, in the worker's name; `EngineDead` is the end of this life.
            WorkerLost, CallTimeout.
        """
        with self.changed:
            self.changed.wait_for(lambda: call.done or self.lost, timeout_s)
            if isinstance(call.error, EngineDead):  # it says so itself
                self.lose(f"gave up ({call.error.problems[0].removeprefix(f'{self.name}: ')})")
            elif call.error is not None:
                raise call.error
            elif call.done:
                return call.reply
            self._calls.pop(call.number, None)
            if self.lost:
                raise WorkerLost(self.lost)
        raise CallTimeout(f"did not answer {call.name} within {timeout_s:g} s (it was {self.phase})")

    def ask(self, name: str, timeout_s: float, **fields: Any) -> Any:
        """`post` and `wait`."""
        return self.wait(self.post(name, **fields), timeout_s)

    def next_event(self, timeout_s: float, *, wakes: int | None = None) -> Message | None:
        """What the worker said unasked, in order; None when nothing comes in time.

        Args:
            timeout_s: longest wait.
            wakes: `self.wakes` when the caller last looked around, by default now; `wake_waiters` ends the wait.

        Raises:
            WorkerLost: once everything that had arrived is read.
        """
        with self.changed:
            seen = self.wakes if wakes is None else wakes
            self.changed.wait_for(lambda: self.events or self.lost or self.wakes != seen, timeout_s)
            if self.events:
                return self.events.popleft()
            if self.lost:
                raise WorkerLost(self.lost)
        return None

    def wake_waiters(self) -> None:
        """Whoever waits for an event looks again."""
        with self.changed:
            self.wakes += 1
            self.changed.notify_all()

    def touch(self) -> None:
        """Something was asked for: progress counts from now."""
        self.progress_at = time.monotonic()

    def _write(self, message: Message, descriptors: Sequence[int], call: Call | None) -> None:
        data = memoryview(protocol.encode(message))
        with self.changed:
            if self.lost:
                raise WorkerLost(self.lost)
            if call is not None:
                self._calls[call.number] = call
            self._outbox.append(_Frame(data, [os.dup(one) for one in descriptors]))
            self._nudge()

    def _nudge(self) -> None:
        with contextlib.suppress(BlockingIOError, OSError):  # full: it is awake; closed: it is gone
            self._wake.send(b"\0")

    # --- the end ----------------------------------------------------------------------------------------------

    def lose(self, how: str) -> None:
        """Nothing more is expected of this life."""
        with self.changed:
            if not self.lost:
                self.lost = how
                self.phase = "gone"
            self.changed.notify_all()
        self._nudge()

    def end(self, *, kindly_s: float = 0.0) -> None:
        """No process of this worker is left afterwards; repeatable, from any thread.

        Args:
            kindly_s: let the engine close in good order for so long first.
        """
        with self._ending:
            if self._ended:
                return
            if kindly_s > 0 and self.ready and not self.lost:
                deadline = time.monotonic() + kindly_s
                with contextlib.suppress(WorkerLost, CallTimeout, SwiftError):  # then less kindly
                    self.ask("close", kindly_s)
                    self._wait_for_guard(deadline - time.monotonic())
            self.lose("was closed")
            self._tell_guard(b"end\n")
            if not self._wait_for_guard(self.timeouts.close_s + LAST_RESORT_S):
                self._tell_guard(b"kill\n")
                self._wait_for_guard(LAST_RESORT_S)
            # the guard's zombie still holds the number of the group, so nobody else can have it
            if not self._gone_in_order():
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(self._process.pid, signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):  # stuck in the kernel: it dies when it wakes
                self._process.wait(LAST_RESORT_S)
            self._thread.join(LAST_RESORT_S)
            for one in (self._pipe, self._woken, self._wake):
                one.close()
            self._ended = True

    def _tell_guard(self, word: bytes) -> None:
        with contextlib.suppress(OSError):  # it is gone
            self._pipe.send(word)

    def _wait_for_guard(self, limit_s: float) -> bool:
        """Whether the guard has ended; does not collect its status, which keeps its number taken."""
        deadline = time.monotonic() + limit_s
        while time.monotonic() < deadline:
            if os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
                return True
            time.sleep(0.01)
        return False

    def _gone_in_order(self) -> bool:
        with contextlib.suppress(ChildProcessError):
            status = os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            return status is not None and status.si_status == 0
        return False

    # --- what people see --------------------------------------------------------------------------------------

    def last_lines(self, count: int = LAST_LINES) -> str:
        """The end of the log in one line, and where it is."""
        lines = [line.strip() for line in self._log_from(self._log_start).splitlines() if line.strip()]
        shown = " | ".join(lines[-count:])
        return f"log {self.log_file}" + (f" ends: {shown}" if shown else " is empty")

    def stacks(self) -> str:
        """Where its main thread is, in one line; the stacks of all threads are in the log afterwards."""
        if self.host_pid is None:
            return "its stacks are not to be had"
        before = self._log_size()
        try:
            os.kill(self.host_pid, signal.SIGUSR1)
        except OSError as error:
            return f"its stacks are not to be had ({error.strerror})"
        deadline, size = time.monotonic() + STACKS_S, before
        while time.monotonic() < deadline:
            time.sleep(0.1)
            now = self._log_size()
            if now > before and now == size:
                break
            size = now
        return (
            main_thread(self._log_from(before)) or "it does not even show its stacks: it is stopped, or in the kernel"
        )

    def _log_size(self) -> int:
        return self.log_file.stat().st_size if self.log_file.exists() else 0

    def _log_from(self, offset: int) -> str:
        if not self.log_file.exists():
            return ""
        with self.log_file.open("rb") as log:
            log.seek(max(offset, self._log_size() - (64 << 10)))
            return log.read().decode(errors="replace")

    # --- the process ------------------------------------------------------------------------------------------

    def _spawn(self, spec: EngineSpec, connection: int, pipe: int) -> subprocess.Popen[bytes]:
        command = [
            sys.executable, "-P", "-m", "swift.rollout.engines.worker", str(pipe), str(connection), str(os.getpid()),
            str(self.timeouts.close_s), ",".join(map(str, spec.cores)),
        ]  # fmt: skip
        try:
            self.log_file.parent.mkdir(parents=True, exist_ok=True)
            with self.log_file.open("ab") as log:
                self._log_start = log.tell()
                return subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    pass_fds=[connection, pipe],
                    start_new_session=True,
                    env=_environment(spec),
                )
        except OSError as error:
            for one in (self._socket, self._pipe, self._woken, self._wake):
                one.close()
            raise ResourceError(
                f"{self.name}: {' '.join(command[:4])}: cannot be started ({error.strerror})"
            ) from error

    # --- the thread -------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        selector = selectors.DefaultSelector()
        selector.register(self._socket, selectors.EVENT_READ, self._read)
        selector.register(self._pipe, selectors.EVENT_READ, self._hear_guard)
        selector.register(self._woken, selectors.EVENT_READ, lambda: self._woken.recv(4096))
        tick = time.monotonic() + self.timeouts.heartbeat_s
        try:
            while not self.lost:
                wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if self._outbox else 0)
                selector.modify(self._socket, wanted, self._read)
                for key, events in selector.select(max(0.0, tick - time.monotonic())):
                    if events & selectors.EVENT_WRITE:
                        self._flush()
                    if events & selectors.EVENT_READ:
                        self._quietly(key.data)
                if time.monotonic() >= tick:
                    self._beat()
                    tick = time.monotonic() + self.timeouts.heartbeat_s
        except Exception as error:
            self.lose(f"broke the protocol ({type(error).__name__}: {error})")
        finally:
            selector.close()
            self._clean_up()

    def _quietly(self, work: Callable[[], object]) -> None:
        with contextlib.suppress(BlockingIOError):
            work()

    def _beat(self) -> None:
        if not self.ready:
            return
        self._missed = 0 if self._heard else self._missed + 1
        self._heard = False
        if self._missed >= self.timeouts.misses:
            self.lose(f"gave no sign of life for {self.timeouts.misses * self.timeouts.heartbeat_s:g} s")
            return
        self.tell("ping")

    def _flush(self) -> None:
        while self._outbox:
            frame = self._outbox[0]
            try:
                sent = protocol.write(self._socket, frame.data, frame.descriptors)
            except BlockingIOError:
                return
            except OSError:  # it is gone; reading says how
                return
            frame.close()
            frame.data = frame.data[sent:]
            if not frame.data:
                self._outbox.popleft()

    def _read(self) -> None:
        try:
            data, descriptors = protocol.read(self._socket)
        except ConnectionResetError:
            data, descriptors = b"", []
        if not data:
            self._ask_how_it_ended()
            return
        for message, given in self._decoder.feed(data, descriptors):
            for one in given:  # workers send none
                os.close(one)
            self._take(message)

    def _take(self, message: Message) -> None:
        with self.changed:
            self._heard = True
            self._note(message)
            if "id" in message:
                self._answer(message)
            elif message["event"] == "pong":
                self.phase = message["phase"]
            else:
                self.events.append(message)
                self.progress_at = time.monotonic()
            self.changed.notify_all()

    def _note(self, message: Message) -> None:
        """Facts that come with any message."""
        if "counters" in message:
            self.counters, self.version = message["counters"], message["version"]
            progress = (message["counters"][:3], message.get("delivered"))
            if progress != self._progress:
                self._progress, self.progress_at = progress, time.monotonic()

    def _answer(self, message: Message) -> None:
        call = self._calls.pop(message["id"], None)
        if call is None:  # nobody waits for it any longer
            return
        if "error" in message:
            call.error = protocol.error_from_json(message["error"], self.name)
        else:
            call.reply = message["reply"]
            if call.name == "start":
                self.ready = True
        call.done = True

    def _ask_how_it_ended(self) -> None:
        deadline = time.monotonic() + REASON_S
        while not self.lost and time.monotonic() < deadline:
            self._quietly(self._hear_guard)
            time.sleep(0.005)
        self.lose("closed its connection")

    def _hear_guard(self) -> None:
        try:
            data = self._pipe.recv(4096)
        except ConnectionResetError:
            data = b""
        self._guard_text += data
        *lines, self._guard_text = self._guard_text.split(b"\n")
        for line in lines:
            word, number = line.split()
            if word == b"host":
                self.host_pid = int(number)
            else:
                self._finished = True
                self._read_rest()
                self.lose(_how(int(number)))
        if not data and not lines:
            self._read_rest()
            self.lose("was killed together with its guard")

    def _read_rest(self) -> None:
        """What it said before it ended."""
        with contextlib.suppress(BlockingIOError, OSError):
            while True:
                data, descriptors = protocol.read(self._socket)
                if not data:
                    return
                for message, _ in self._decoder.feed(data, descriptors):
                    self._take(message)

    def _clean_up(self) -> None:
        self._tell_guard(b"end\n")  # a host that hangs is ended although nobody may ever use this worker again
        self._decoder.close()
        with self.changed:
            while self._outbox:
                self._outbox.popleft().close()
        self._socket.close()


def main_thread(dump: str) -> str:
    """The innermost frames of the thread that faulthandler shows last, which is the main one; "" without any."""
    block = dump.rpartition("(most recent call first):")[2]
    frames = []
    for line in block.splitlines():
        if line.strip().startswith("File "):
            path, _, rest = line.strip().removeprefix("File ").partition(", line ")
            number, _, function = rest.partition(" in ")
            frames.append(f"{function} ({Path(path.strip(chr(34))).name}:{number})")
    return "its main thread is in " + " < ".join(frames[:STACK_FRAMES]) if frames else ""


def _how(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"


def _environment(spec: EngineSpec) -> dict[str, str]:
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in LAUNCH_VARIABLES and not name.startswith("TORCHELASTIC_")
    }
    kept |= {
        "PYTHONPATH": os.pathsep.join(entry or str(Path.cwd()) for entry in sys.path),
        "PYTHONUNBUFFERED": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    if spec.cores:
        kept["OMP_NUM_THREADS"] = str(len(spec.cores))
    if all(device.startswith("cuda") for device in spec.devices):
        visible = [one for one in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if one]
        numbers = [int(device.partition(":")[2] or 0) for device in spec.devices]
        kept["CUDA_VISIBLE_DEVICES"] = ",".join(visible[one] if one < len(visible) else str(one) for one in numbers)
    elif all(device.startswith("cpu") for device in spec.devices):
        kept["CUDA_VISIBLE_DEVICES"] = ""
    return kept


def _as_child_sees(spec: EngineSpec) -> EngineSpec:
    """Only its own devices are visible to the worker, so they are numbered anew."""
    if all(device.startswith("cuda") for device in spec.devices):
        return replace(spec, devices=tuple(f"cuda:{index}" for index in range(len(spec.devices))))
    return spec
