"""Messages between ranks while a round of dynamic sampling is sampled: through the rendezvous store, in order.

A collective needs every rank at the same point. While groups are sampled ranks are busy for different times, so what
they tell each other then (a group is finished, sample this one next) goes into the store instead. A channel is written
by any rank and read by those that need it, each at its own pace:

    post   ticket = add(channel)      key channel/ticket = message
    read   the key after the last one that this rank has read, if it is there

Whoever reaches the store can read and write it. On one node it therefore listens on loopback only (`swift.rendezvous`),
and messages are data of known types: decoding one runs no code.
"""

from __future__ import annotations

from collections import Counter

import msgspec

from swift.errors import EngineError
from swift.rendezvous import connect, reachable
from swift.rollout import saved_state
from swift.types import Completion

STORE_LIMIT_S = 60.0
PREFIX = "swift/mailbox"


class Sampled(msgspec.Struct, tag=True):
    """A completion of a launch that one engine has finished; the store takes at most 8 MiB at once.

    last: the engine has no other of this launch.
    """

    index: int
    engine: int
    sample: int
    completion: Completion
    last: bool


class Failed(msgspec.Struct, tag=True):
    """A rank cannot go on with the round."""

    rank: int


class Sample(msgspec.Struct, tag=True):
    """Launches that an engine is to sample."""

    indexes: list[int]


class End(msgspec.Struct, tag=True):
    """Nothing more will be launched in this round."""


Message = Sampled | Failed | Sample | End


class Mailbox:
    """The mailbox of one rank; every call raises EngineError when the store is gone, and with it rank 0."""

    def __init__(self) -> None:
        self._store = connect(STORE_LIMIT_S)
        self._read: Counter[str] = Counter()
        self._posted: list[str] = []

    def post(self, channel: str, message: Message) -> None:
        with reachable():
            ticket = self._store.add(f"{PREFIX}/{channel}", 1)
            key = f"{PREFIX}/{channel}/{ticket}"
            self._store.set(key, saved_state.encode(message))
        self._posted.append(key)

    def read(self, channel: str) -> Message | None:
        """The next message that this rank has not read, or None; never waits for one."""
        key = f"{PREFIX}/{channel}/{self._read[channel] + 1}"
        with reachable():
            if not self._store.check([key]):
                return None
            content = self._store.get(key)
        self._read[channel] += 1
        return decode(content)

    def sweep(self) -> None:
        """Delete the messages that this rank posted; the ranks have met since, so all have been read."""
        with reachable():
            for key in self._posted:
                self._store.delete_key(key)
        self._posted.clear()


def decode(content: bytes) -> Message:
    """A message from its bytes. Raises EngineError: it is no message of swift."""
    try:
        return saved_state.decode(content, Message)  # type: ignore[arg-type]
    except (ValueError, TypeError) as error:  # msgspec's errors are of these types
        raise EngineError(
            f"rendezvous store: a message that no rank of this run wrote ({error}); keep MASTER_PORT away from others"
        ) from error
