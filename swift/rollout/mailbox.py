"""Messages between ranks while a round of dynamic sampling is sampled: through the rendezvous store, in order.

A collective needs every rank at the same point, but ranks sample for different times. So their messages (a group is
finished, sample these groups next) are sent through the store. Any rank may write to a channel; each reader has its own
position in it:

    post   ticket = add(channel)      key channel/ticket = message
    read   the key after the last key that this rank has read, if it exists

Every process that reaches the store can read and write it. So on one node it listens on loopback only
(`swift.rendezvous`), and messages are data of known types: decoding them runs no code.
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
    """A completion of an engine's part of a launch, sent once the part is complete; messages are limited to 8 MiB.

    last: whether it is the last completion of the part.
    """

    index: int
    engine: int
    sample: int
    completion: Completion
    last: bool


class Failed(msgspec.Struct, tag=True):
    """A rank has failed in this round."""

    rank: int


class Sample(msgspec.Struct, tag=True):
    """Launches that an engine is to sample."""

    indexes: list[int]


class End(msgspec.Struct, tag=True):
    """The end of the launches of this round."""


Message = Sampled | Failed | Sample | End


class Mailbox:
    """The mailbox of one rank; every call raises EngineError if the store, a part of rank 0, is gone."""

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
        """The next message that this rank has not read, or None; does not wait."""
        key = f"{PREFIX}/{channel}/{self._read[channel] + 1}"
        with reachable():
            if not self._store.check([key]):
                return None
            content = self._store.get(key)
        self._read[channel] += 1
        return decode(content)

    def sweep(self) -> None:
        """Delete the messages of this rank, after a collective: all ranks have read them by then."""
        with reachable():
            for key in self._posted:
                self._store.delete_key(key)
        self._posted.clear()


def decode(content: bytes) -> Message:
    """Decode a message. Raises EngineError: it is not a message of swift."""
    try:
        return saved_state.decode(content, Message)  # type: ignore[arg-type]
    except (ValueError, TypeError) as error:  # msgspec's errors are of these types
        raise EngineError(
            f"rendezvous store: a message that no rank of this run wrote ({error}); restrict access to MASTER_PORT"
        ) from error
