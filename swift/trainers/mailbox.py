"""Messages between ranks outside of collectives: through the rendezvous store, in order, from any one thread.

A collective needs every rank at the same point. While groups are sampled ranks are busy for different times, so what
they tell each other then (a group is finished, sample this one next) goes into the store instead. A channel is written
by any rank and read by those that need it, each at its own pace:

    post   ticket = add(channel)      key channel/ticket = message
    read   the key after the last one that this rank has read, if it is there

Beside the channels there is a count of heartbeats: each rank adds to it while it gets on, so that one that waits knows
that it does not wait in vain.

Whoever reaches the store can read and write it. On one node it therefore listens on loopback only (`swift.rendezvous`),
and messages are data of known types (`swift.rollout.mailbox`): decoding one runs no code.
"""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

from swift.errors import EngineError
from swift.rollout.mailbox import Message, decode, encode
from swift.trainers.distributed import Collectives

STORE_LIMIT_S = 60.0
PREFIX = "swift/mailbox"
BEATS = f"{PREFIX}/beats"


class StoreMailbox:
    """A `swift.rollout.mailbox.Mailbox` on the store that the ranks met at.

    Args:
        collectives: the ranks; they join the store at MASTER_ADDR:MASTER_PORT.
    """

    def __init__(self, collectives: Collectives) -> None:
        import torch.distributed as dist

        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        self._store: Any = dist.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=STORE_LIMIT_S))
        self._read: Counter[str] = Counter()
        self._posted: list[str] = []
        self._own_beats = 0

    def post(self, channel: str, message: Message) -> None:
        """Add a message; like all that follow it raises EngineError when the store is gone, and with it rank 0."""
        with _reachable():
            ticket = self._store.add(f"{PREFIX}/{channel}", 1)
            key = f"{PREFIX}/{channel}/{ticket}"
            self._store.set(key, encode(message))
        self._posted.append(key)

    def read(self, channel: str) -> Message | None:
        """The next message that this rank has not read, or None; never waits for one.

        Raises:
            EngineError: it is no message of swift.
        """
        key = f"{PREFIX}/{channel}/{self._read[channel] + 1}"
        with _reachable():
            if not self._store.check([key]):
                return None
            content = self._store.get(key)
        self._read[channel] += 1
        return decode(content)

    def sweep(self) -> None:
        """Delete the messages that this rank posted; the ranks have met since, so all have been read."""
        with _reachable():
            for key in self._posted:
                self._store.delete_key(key)
        self._posted.clear()

    def beat(self) -> None:
        """A heartbeat: this rank gets on."""
        self._own_beats += 1
        with _reachable():
            self._store.add(BEATS, 1)

    def beats(self) -> int:
        """Heartbeats of the other ranks so far."""
        with _reachable():
            return int(self._store.add(BEATS, 0)) - self._own_beats


@contextlib.contextmanager
def _reachable() -> Iterator[None]:
    """Torch's errors of a store that is gone or slow are all RuntimeErrors."""
    try:
        yield
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        raise EngineError(f"rank 0: its store cannot be reached ({reason}); look at its log") from error
