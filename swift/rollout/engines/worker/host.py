"""The worker's side: hosts one engine, which a single thread drives.

    main        carries out calls in the order they came, and samples in between
    reader      reads the socket; answers heartbeats, passes aborts on, and says at once whether a request fits
    aside       answers `health` and `info`, and interrupts the engine ("keep") when calls wait while it samples

Sampling begins when the parent streams, not with the first request: what was submitted together is batched together.
A call waits for one decode step at most where the engine can be paused in flight, and for a completion elsewhere.

A request that fits and that the engine does not take all the same is reported as "refused", and the others go on. An
engine that fails while it samples is reported once, as "failed" with the ids that are lost; it says whether the
engine can go on. The process ends with `close`, with its socket, and never leaves that to other threads.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import queue
import signal
import socket
import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from swift.errors import EngineDead, EngineError, SwiftError, SyncFailed
from swift.rollout.engines.worker import protocol
from swift.rollout.engines.worker.protocol import Message
from swift.startup import collector_resting
from swift.types import Completion

if TYPE_CHECKING:
    import torch

    from swift.rollout.engines.base import InferenceEngine
    from swift.rollout.weight_sync.base import WeightUpdate
    from swift.rollout.weight_sync.broadcast import BroadcastReceiver

logger = logging.getLogger(__name__)


def serve(descriptor: int) -> None:
    """Serve the parent until it says close or is gone; does not return."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the trainer
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)  # the parent asks for stacks; no cooperation is needed
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s: %(message)s", stream=sys.stderr)
    connection = socket.socket(fileno=descriptor)
    os.set_inheritable(descriptor, False)
    code = 0
    try:
        Host(connection).run()
    except BaseException:
        traceback.print_exc()
        code = 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # threads of libraries must not keep the process


class Host:
    """See the module's docstring.

    Args:
        connection: to the parent.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._writing = threading.Lock()
        self._changed = threading.Condition()
        self._calls: deque[tuple[Message, list[int]]] = deque()
        self._aside: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        self._engine: InferenceEngine | None = None
        self._update: WeightUpdate | None = None
        self._broadcast: BroadcastReceiver | None = None
        self._stream: Iterator[Completion] | None = None
        self._outstanding: set[str] = set()
        self._taking = ""  # the request that is being submitted
        self._aborting: set[str] = set()  # aborted on their way to the engine
        self._wanted = False  # the parent streams
        self._paused = False
        self._streaming = False
        self._interrupting = False
        self._interrupts = 0
        self._closing = False
        self._phase = "starting"
        self._delivered = 0
        self._table: dict[str, Callable[[Message, list[int]], Any]] = {
            "start": self._start,
            "submit": self._submit,
            "stream": lambda message, _: self._want(True),
            "rest": lambda message, _: self._want(False),
            "pause": self._pause,
            "resume": self._resume,
            "begin_update": self._begin_update,
            "connect": self._connect,
            "bucket": self._bucket,
            "commit": self._commit,
            "abort_update": self._abort_update,
            "rebuild": lambda message, _: self._live.rebuild(),
            "load_adapter": self._load_adapter,
            "drop_adapter": self._drop_adapter,
            "reset_caches": lambda message, _: self._live.reset_caches(),
            "sleep": lambda message, _: asdict(self._live.sleep(message["level"])),
            "wake": lambda message, _: self._live.wake(message["tags"]),
            "close": self._close,
        }

    @property
    def _live(self) -> InferenceEngine:
        if self._engine is None:
            raise EngineError("worker: its engine is not started; this is a defect")
        return self._engine

    def run(self) -> None:
        """Until closed."""
        for work, name in ((self._read, "reader"), (self._answer_aside, "aside")):
            threading.Thread(target=work, name=name, daemon=True).start()
        while not self._closing:
            call = self._next_call()
            if call is not None:
                self._carry_out(*call)
            else:
                self._sample()

    # --- calls ------------------------------------------------------------------------------------------------

    def _next_call(self) -> tuple[Message, list[int]] | None:
        """The next call; None when there is none and sampling goes on."""
        with self._changed:
            self._changed.wait_for(lambda: self._calls or self._may_sample)
            if not self._calls:
                return None
            message, descriptors = self._calls.popleft()
            self._taking = message["request"]["id"] if message["call"] == "submit" else ""
            return message, descriptors

    @property
    def _may_sample(self) -> bool:
        return self._wanted and not self._paused and bool(self._outstanding)

    def _carry_out(self, message: Message, descriptors: list[int]) -> None:
        self._phase = message["call"]
        try:
            work = self._table.get(message["call"])
            if work is None:
                raise EngineError(f"worker: call {message['call']}: there is no such call")
            reply = {"reply": work(message, descriptors)}
        except Exception as error:
            if not isinstance(error, SwiftError):
                traceback.print_exc()
            reply = {"error": protocol.error_to_json(error)}
        finally:
            for descriptor in descriptors:  # those that nobody took
                os.close(descriptor)
        self._phase = "idle"
        if message.get("id") is not None:
            self._send({"id": message["id"], **reply, **self._facts()})
        elif "error" in reply:
            self._send({"event": "refused", "request": message["request"]["id"], **reply})

    def _facts(self) -> Message:
        """What the parent keeps a copy of."""
        if self._engine is None:
            return {}
        counters = self._engine.counters
        return {
            "counters": [
                counters.prefill_tokens, counters.decode_rows, counters.decode_steps, round(counters.generate_s, 6),
            ],
            "version": self._engine.version,
        }  # fmt: skip

    def _start(self, message: Message, _: list[int]) -> Message:
        from swift.plugin import load_external_plugins
        from swift.rollout.engines.spec import EngineSpec, build_engine, factory

        spec = EngineSpec.from_json(message["spec"])
        load_external_plugins(spec.plugins)
        with collector_resting():
            factory(spec.backend)  # loads its libraries
        self._engine = build_engine(spec)
        return asdict(self._engine.capabilities)

    def _close(self, *_: Any) -> None:
        self._closing = True
        if self._broadcast is not None:
            self._broadcast.close()
        if self._engine is not None:
            self._engine.close()

    # --- sampling ---------------------------------------------------------------------------------------------

    def _submit(self, message: Message, _: list[int]) -> None:
        request = protocol.request_from_json(message["request"])
        taken = False
        try:
            self._live.submit(request)
            taken = True
        finally:
            with self._changed:
                if taken:
                    self._outstanding.add(request.request_id)
                self._taking = ""
                aborted = request.request_id in self._aborting
                self._aborting.discard(request.request_id)
        if aborted:
            self._live.abort([request.request_id])

    def _want(self, streaming: bool) -> None:
        self._wanted = streaming

    def _pause(self, *_: Any) -> None:
        if self._live.capabilities.in_flight_updates:
            self._live.pause("keep")
        self._paused = True

    def _resume(self, *_: Any) -> None:
        if self._live.capabilities.in_flight_updates:
            self._live.resume()
        self._paused = False

    def _sample(self) -> None:
        """Completions, until something else is to be done; the stream is taken up again where it was left."""
        engine = self._live
        with self._changed:
            if self._calls:
                return
            self._streaming = True
            interrupts = self._interrupts
        self._phase = "decoding"
        ended = False
        try:
            if engine.capabilities.in_flight_updates:
                engine.resume()
            self._stream = self._stream or engine.stream()
            while not self._calls and not ended:
                completion = next(self._stream, None)
                ended = completion is None
                if completion is not None:
                    self._deliver(completion)
        except Exception as error:
            self._failed(error)
        with self._changed:
            self._streaming = False
            self._changed.wait_for(lambda: not self._interrupting)
            undisturbed = interrupts == self._interrupts and not self._calls
            lost = sorted(self._outstanding) if ended and undisturbed else []
        if ended:
            self._stream = None
        self._phase = "idle"
        if lost:
            self._failed(
                EngineError(f"request: {lost[0]}: the engine's stream ended without it; a defect of the engine")
            )

    def _deliver(self, completion: Completion) -> None:
        self._delivered += 1
        with self._changed:
            self._outstanding.discard(completion.request_id)
        state = protocol.completion_to_json(completion)
        self._send({"event": "completion", "completion": state, **self._facts()})

    def _failed(self, error: Exception) -> None:
        """Tell the parent, with everything that is lost by it."""
        if not isinstance(error, SwiftError):
            traceback.print_exc()
        fatal = isinstance(error, EngineDead) or not isinstance(error, SwiftError)
        with self._changed:
            lost = sorted(self._outstanding)
        if not fatal:
            fatal = not self._emptied()
        with self._changed:
            self._outstanding.clear()
        self._send({"event": "failed", "fatal": fatal, "lost": lost, "error": protocol.error_to_json(error)})

    def _emptied(self) -> bool:
        """Nobody waits for what the engine still holds; whether it let go of it."""
        self._stream = None
        try:
            self._live.abort()
            for _ in self._live.stream():
                pass
        except Exception:
            traceback.print_exc()
            return False
        return True

    # --- weights ----------------------------------------------------------------------------------------------

    def _begin_update(self, message: Message, _: list[int]) -> None:
        from swift.rollout.weight_sync.base import TensorInfo

        manifest = [TensorInfo(name, dtype, tuple(shape)) for name, dtype, shape in message["manifest"]]
        self._come_to_rest()
        self._update = self._live.begin_update(manifest, message["version"])

    def _come_to_rest(self) -> None:
        """What the parent no longer waits for may still be in the engine: it is kept until sampling goes on."""
        if self._outstanding and self._live.capabilities.in_flight_updates:
            self._live.pause("keep")

    def _open_update(self) -> WeightUpdate:
        if self._update is None:
            raise SyncFailed("weights: no update has begun")
        return self._update

    def _connect(self, message: Message, _: list[int]) -> None:
        from swift.rollout.weight_sync.broadcast import BroadcastReceiver

        if self._broadcast is not None:
            self._broadcast.close()
            self._broadcast = None
        self._broadcast = BroadcastReceiver(message["invitation"], self._device())

    def _device(self) -> torch.device:
        import torch

        first = self._live.capabilities.devices[0]
        return torch.device("cpu" if first.startswith("cpu") else first)

    def _bucket(self, message: Message, descriptors: list[int]) -> None:
        from swift.rollout.weight_sync import cuda_ipc, shared_memory
        from swift.rollout.weight_sync.base import Bucket

        update, transport, header = self._open_update(), message["transport"], message["header"]
        if transport == "shared_memory":
            tensors = shared_memory.receive(header, descriptors.pop(0))
        elif transport == "broadcast" and self._broadcast is not None:
            tensors = self._broadcast.receive(header)
        elif transport == "cuda_ipc":
            tensors = cuda_ipc.receive(header)
        else:
            raise SyncFailed(f"weights: transport {transport}: is not connected")
        update.send(Bucket(tensors))
        del tensors
        if transport == "cuda_ipc":
            cuda_ipc.release()

    def _commit(self, *_: Any) -> Message:
        update = self._open_update()
        ack = update.commit()
        self._update = None
        return asdict(ack)

    def _abort_update(self, *_: Any) -> None:
        if self._update is not None:
            self._update.abort()
        self._update = None

    def _load_adapter(self, message: Message, descriptors: list[int]) -> Message:
        from swift.rollout.weight_sync import shared_memory
        from swift.rollout.weight_sync.base import AdapterWeights

        self._come_to_rest()
        tensors = shared_memory.receive(message["header"], descriptors.pop(0))
        return asdict(self._live.load_adapter(AdapterWeights(message["config"], dict(tensors)), message["version"]))

    def _drop_adapter(self, *_: Any) -> None:
        self._come_to_rest()
        self._live.drop_adapter()

    # --- the other threads ------------------------------------------------------------------------------------

    def _read(self) -> None:
        """The reader: until the parent is gone, and with it the reason to live."""
        decoder = protocol.Decoder()
        try:
            while True:
                data, descriptors = protocol.read(self._connection)
                if not data:
                    break
                for message, given in decoder.feed(data, descriptors):
                    self._take(message, given)
        except Exception:
            traceback.print_exc()
        sys.stderr.flush()
        os._exit(0 if self._closing else 1)

    def _take(self, message: Message, descriptors: list[int]) -> None:
        name = message["call"]
        if name == "ping":
            self._send({"event": "pong", "phase": self._phase, "delivered": self._delivered, **self._facts()})
        elif name == "abort":
            self._abort(message["ids"])
        elif name in ("health", "info"):
            self._aside.put(message)
        else:
            if name == "submit" and self._streaming:
                message = self._vouch_for(message)
            with self._changed:
                self._calls.append((message, descriptors))
                self._changed.notify_all()
                streaming = self._streaming
            if streaming:
                self._aside.put(None)

    def _vouch_for(self, message: Message) -> Message:
        """While the engine samples, the parent learns at once whether a request fits, not when it is taken."""
        request = protocol.request_from_json(message["request"])
        try:
            self._live.check_length(request)
        except SwiftError as error:
            self._send({"id": message["id"], "error": protocol.error_to_json(error)})
            return {"call": "stream", "id": None}  # which it does already
        self._send({"id": message["id"], "reply": None})
        return {**message, "id": None}

    def _abort(self, ids: list[str]) -> None:
        with self._changed:
            on_their_way = {message["request"]["id"] for message, _ in self._calls if message["call"] == "submit"}
            self._aborting |= set(ids) & (on_their_way | {self._taking})
        if self._engine is not None:
            self._engine.abort(ids)

    def _answer_aside(self) -> None:
        while True:
            message = self._aside.get()
            if message is None:
                self._interrupt()
                continue
            try:
                value = self._live.info() if message["call"] == "info" else asdict(self._live.health())
                reply: Message = {"reply": value}
            except Exception as error:
                reply = {"error": protocol.error_to_json(error)}
            self._send({"id": message["id"], **reply})

    def _interrupt(self) -> None:
        """End the stream that the main thread is in, so that it sees to its calls."""
        with self._changed:
            if not self._streaming or not self._calls or not self._live.capabilities.in_flight_updates:
                return
            self._interrupting = True
            self._interrupts += 1
        try:
            self._live.pause("keep")
        except SwiftError:
            traceback.print_exc()  # then its calls wait for the next completion
        finally:
            with self._changed:
                self._interrupting = False
                self._changed.notify_all()

    def _send(self, message: Message) -> None:
        data = memoryview(protocol.encode(message))
        try:
            with self._writing:
                self._connection.sendall(data)
        except OSError:  # nobody is there any more
            os._exit(1)
