"""Weights that trainers of other makes broadcast: vLLM's RL routes (current TRL), and TRL's older ones.

The server is the one receiver of the group and hands the tensors on to its engines, so `/get_world_size` is 1. Tensors
are collected in main memory until all are there; then the engines get them like any other update, counted and digested.

    vLLM     init -> start -> update (names, types, shapes; the trainer broadcasts meanwhile) * -> finish
    legacy   init -> update one tensor: replies once the receiver is armed, the trainer broadcasts after that

The legacy protocol has no end: weights are complete when every tensor of the model's checkpoint has come. What goes
wrong after the reply turns the next call and /health to an error, until a new group or a whole update.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from swift.errors import SwiftError, SyncFailed
from swift.rollout.weight_sync.base import TensorInfo, torch_dtype
from swift.rollout.weight_sync.broadcast import BroadcastGroup

TIMEOUT_S = 120.0
"""Bound on meeting, and on each broadcast."""


class Receiver(Protocol):
    """One member of a trainer's group."""

    def receive(self, infos: Sequence[TensorInfo], how: Mapping[str, Any]) -> list[tuple[str, Tensor]]:
        """The tensors of one announcement, in main memory. how: what it says of the way, over what `init_info` said."""
        ...

    def close(self) -> None:
        """Leave the group."""
        ...


class GlooReceiver:
    """Takes part over gloo: one broadcast of bytes per tensor.

    Args:
        host: of the trainer's store.
        port: of it.
        rank: of this member.
        size: of the group.

    Raises:
        SyncFailed: the trainer does not come.
    """

    def __init__(self, host: str, port: int, rank: int, size: int) -> None:
        try:
            store = dist.TCPStore(host, port, size, False, timeout=timedelta(seconds=TIMEOUT_S))
        except RuntimeError as error:
            line = str(error).strip().splitlines()[0]
            raise SyncFailed(f"weights: store at {host}:{port}: {line}") from error
        self._group = BroadcastGroup(
            store, rank, size, backend="gloo", device=torch.device("cpu"), timeout_s=TIMEOUT_S, host=host
        )

    def receive(self, infos: Sequence[TensorInfo], how: Mapping[str, Any]) -> list[tuple[str, Tensor]]:
        """See `Receiver.receive`."""
        if how.get("packed"):
            raise SyncFailed("update_info: packed: True: over gloo tensors come one by one; leave it out, or use nccl")
        return [(info.name, self._one(info)) for info in infos]

    def _one(self, info: TensorInfo) -> Tensor:
        flat = torch.empty(info.nbytes, dtype=torch.uint8)
        self._group.broadcast(flat)
        return flat.view(torch_dtype(info.dtype)).view(info.shape)

    def close(self) -> None:
        """Leave the group."""
        self._group.close()


def join(init: dict[str, Any]) -> Receiver:
    """Join the group that an announcement describes.

    Args:
        init: vLLM's `init_info`: master_address, master_port, rank_offset, world_size, packed, ...; `backend` may be
            "gloo" or "nccl", which is the default where there is a GPU.

    Raises:
        SyncFailed: it cannot be joined.
    """
    backend = str(init.get("backend") or ("nccl" if torch.cuda.is_available() else "gloo"))
    try:
        host, port = str(init["master_address"]), int(init["master_port"])
        rank, size = int(init["rank_offset"]), int(init["world_size"])
    except (KeyError, TypeError, ValueError) as error:
        raise SyncFailed(
            f"init_info: {error}: master_address, master_port, rank_offset and world_size are needed"
        ) from error
    if size != 2:
        raise SyncFailed(
            f"init_info: world_size {size}: this server is one receiver, whatever engines it has; use world_size 2 "
            "(/get_world_size is 1)"
        )
    if backend == "gloo":
        return GlooReceiver(host, port, rank, size)
    if backend == "nccl":
        raise SyncFailed("weights: NCCL: not taken over this route; use backend gloo, or POST /weights/begin")
    raise SyncFailed(f"init_info: backend {backend}: no such backend; valid: nccl, gloo")


def legacy_init(host: str, port: int, world_size: int, backend: str | None) -> dict[str, Any]:
    """The announcement of TRL's older client as `join` reads it.

    Over NCCL the trainer is the last rank there and the server's side listens, with a barrier after each tensor. Over
    gloo, which that client never had, the ranks are those of vLLM's shapes.
    """
    init = {"master_address": host, "master_port": port, "rank_offset": 1, "world_size": world_size, "backend": backend}
    if backend == "gloo" or (backend is None and not torch.cuda.is_available()):
        return init
    return {**init, "rank_offset": 0, "source": world_size - 1, "barrier": True}


def infos_of(names: Sequence[str], dtypes: Sequence[str], shapes: Sequence[Sequence[int]]) -> list[TensorInfo]:
    """An announcement as a manifest.

    Raises:
        SyncFailed: the lists differ in length, or name a type that does not exist.
    """
    if not len(names) == len(dtypes) == len(shapes):
        raise SyncFailed(
            f"update_info: {len(names)} names, {len(dtypes)} types, {len(shapes)} shapes: must be equally many"
        )
    infos = []
    for name, dtype, shape in zip(names, dtypes, shapes, strict=True):
        plain = dtype.removeprefix("torch.")
        if not isinstance(getattr(torch, plain, None), torch.dtype):
            raise SyncFailed(f"update_info: {name}: {dtype} is no torch type")
        infos.append(TensorInfo(name, plain, tuple(shape)))
    return infos


class Transfer:
    """Collects what is broadcast.

    Args:
        expected: names of the model's checkpoint, for the legacy protocol. tied: other name -> the one it is tied to.
        load: brings a whole set to the engines and waits until they have it.
    """

    def __init__(
        self,
        expected: Sequence[str],
        tied: dict[str, str],
        load: Callable[[list[tuple[str, Tensor]], int | None], object],
    ) -> None:
        self.expected = set(expected)
        self.tied = dict(tied)
        self.load = load
        self.failure = ""
        self._receiver: Receiver | None = None
        self._came: dict[str, Tensor] = {}
        self._collecting = False
        self._todo: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._announced = self._ended = 0
        self._loading = False
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    @property
    def ready(self) -> bool:
        """Whether there is a group."""
        return self._receiver is not None

    # --- vLLM's shapes ----------------------------------------------------------------------------------------

    def connect(self, init: dict[str, Any]) -> None:
        """Join; waits for the trainer."""
        self.disconnect()
        self.failure = ""
        self._receiver = join(init)

    def start(self) -> None:
        """An update begins."""
        self._came.clear()
        self._collecting = True

    def update(self, infos: Sequence[TensorInfo], how: Mapping[str, Any] | None = None) -> None:
        """Receive the next tensors of the update; see `Receiver.receive`."""
        if not self._collecting:
            raise SyncFailed("weights: no update has begun; POST /start_weight_update first")
        self._receive(infos, how or {})

    def finish(self, version: int | None) -> object:
        """All tensors came: the engines get them."""
        if not self._collecting:
            raise SyncFailed("weights: no update has begun; POST /start_weight_update first")
        self._collecting = False
        return self._bring(version)

    # --- TRL's older shapes -----------------------------------------------------------------------------------

    def connect_later(self, init: dict[str, Any]) -> None:
        """Join in the background, because the trainer joins after the reply."""
        self.failure = ""
        self._came.clear()
        self._later(lambda: self.connect(init))

    def expect(self, info: TensorInfo) -> None:
        """Receive one tensor in the background; the last one of the model brings all to the engines.

        Raises:
            SyncFailed: something before it failed.
        """
        self.check()
        if info.name not in self.expected and info.name not in self.tied:
            raise SyncFailed(f"weights: {info.name}: is no tensor of this model's checkpoint")
        self._later(lambda: self._one_of_all(info))

    def settle(self, timeout_s: float = TIMEOUT_S) -> None:
        """Until everything that was announced has come, and is in the engines when it is complete.

        Args:
            timeout_s: bound on each broadcast.

        Raises:
            SyncFailed: it failed, or is not complete.
        """
        with self._changed:
            while self._announced > self._ended:
                ended = self._ended
                moved = self._changed.wait_for(lambda ended=ended: self._ended > ended, timeout_s)  # type: ignore[misc]
                if not moved and not self._loading:  # loading has a bound of its own
                    raise SyncFailed(f"weights: a broadcast did not come within {timeout_s:g} s")
        self.check()
        if self._came and not self._collecting:
            missing = sorted(self.expected - set(self._came) - set(self.tied))
            raise SyncFailed(
                f"weights: {len(self._came)} of {len(self.expected)} tensors came; missing {', '.join(missing[:3])}"
            )

    def check(self) -> None:
        """Raises what went wrong after a reply."""
        if self.failure:
            raise SyncFailed(f"weights: {self.failure}")

    def disconnect(self) -> None:
        """Leave the group."""
        receiver, self._receiver = self._receiver, None
        self._came.clear()
        self._collecting = False
        if receiver is not None:
            receiver.close()

    def close(self) -> None:
        """Leave, and end the thread."""
        self._todo.put(None)
        self.disconnect()

    # --- inside -----------------------------------------------------------------------------------------------

    def _receive(self, infos: Sequence[TensorInfo], how: Mapping[str, Any]) -> None:
        if self._receiver is None:
            raise SyncFailed("weights: there is no group; initialise it first")
        self._came.update(self._receiver.receive(infos, how))

    def _one_of_all(self, info: TensorInfo) -> None:
        self._receive([info], {})
        if self.expected <= set(self._came) | set(self.tied):
            self._bring(None)

    def _bring(self, version: int | None) -> object:
        came, self._came = self._came, {}
        for name, other in self.tied.items():
            if name not in came and other in came:
                came[name] = came[other]
        self._loading = True
        try:
            return self.load(list(came.items()), version)
        finally:
            self._loading = False

    def _later(self, work: Callable[[], None]) -> None:
        with self._changed:
            self._announced += 1
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="receiver of weights", daemon=True)
                self._thread.start()
        self._todo.put(work)

    def _work(self) -> None:
        while (work := self._todo.get()) is not None:
            try:
                if not self.failure:
                    work()
            except SwiftError as error:
                self.failure = error.problems[0].removeprefix("weights: ")
            except Exception as error:  # shown by the next call and by /health
                self.failure = f"{type(error).__name__}: {error}"
            finally:
                with self._changed:
                    self._ended += 1
                    self._changed.notify_all()
