"""What ranks tell each other while a round of dynamic sampling is sampled: messages, and how they are encoded.

Messages are msgpack of known structs: decoding one runs no code, whoever wrote it. `swift.trainers.mailbox` carries
them through the rendezvous store.
"""

from __future__ import annotations

from typing import Any, Protocol

import msgspec
import numpy as np

from swift.errors import EngineError
from swift.rollout.saved_state import SavedCompletion


class Sampled(msgspec.Struct, tag=True):
    """Completions of a launch that one engine has finished: sample -> completion."""

    index: int
    engine: int
    completions: dict[int, SavedCompletion]


class Failed(msgspec.Struct, tag=True):
    """A rank cannot go on with the round."""

    rank: int


class Sample(msgspec.Struct, tag=True):
    """Launches that an engine is to sample."""

    indexes: list[int]


class End(msgspec.Struct, tag=True):
    """Nothing more will be launched in this round."""


Message = Sampled | Failed | Sample | End


class Mailbox(Protocol):
    """Messages between ranks outside of collectives, each channel in order."""

    def post(self, channel: str, message: Message) -> None:
        """Add a message."""

    def read(self, channel: str) -> Message | None:
        """The next message that this rank has not read, or None; never waits for one."""

    def sweep(self) -> None:
        """Forget the messages that this rank posted; all have been read."""

    def beat(self) -> None:
        """A heartbeat: this rank gets on."""

    def beats(self) -> int:
        """Heartbeats of the other ranks so far."""


def encode(message: Message) -> bytes:
    """A message as bytes."""
    return msgspec.msgpack.encode(message, enc_hook=_from_array)


def decode(content: bytes) -> Message:
    """The inverse of `encode`.

    Raises:
        EngineError: it is no message of swift.
    """
    try:
        return msgspec.msgpack.decode(content, type=Message, dec_hook=_to_array)
    except (ValueError, TypeError) as error:  # msgspec's errors are of these types
        raise EngineError(
            f"rendezvous store: a message that no rank of this run wrote ({error}); keep MASTER_PORT away from others"
        ) from error


def _from_array(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return [value.dtype.str, value.tobytes()]
    raise NotImplementedError(type(value).__name__)


def _to_array(_: Any, value: Any) -> np.ndarray:
    kind, content = value
    return np.frombuffer(content, dtype=np.dtype(kind)).copy()
