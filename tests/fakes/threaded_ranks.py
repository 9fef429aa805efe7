"""Several ranks in one process: each is a thread, and their collectives fail instead of waiting for ever."""

from __future__ import annotations

import pickle
import threading

from swift.rollout.mailbox import decode
from swift.rollout.saved_state import encode
from swift.trainers.distributed import Collectives

LIMIT_S = 20


class ThreadedRank(Collectives):
    """The collectives of one rank; values travel pickled, as between processes."""

    def __init__(self, rank, shared):
        super().__init__()
        self.active, self.rank, self.world_size, self._shared = True, rank, shared.size, shared
        self.is_main = rank == 0

    def all_gather(self, value):
        with self.waiting():
            return self._shared.exchange(self.rank, value)

    def gather(self, value):
        values = self.all_gather(value)
        return values if self.rank == 0 else None

    def broadcast(self, value):
        return self.all_gather(value)[0]

    def sum(self, values):
        return [sum(column) for column in zip(*self.all_gather(values), strict=True)]

    def barrier(self):
        self.all_gather(None)


class _Shared:
    def __init__(self, size):
        self.size, self.values = size, [b""] * size
        self.barrier = threading.Barrier(size, timeout=LIMIT_S)

    def exchange(self, rank, value):
        self.values[rank] = pickle.dumps(value)
        self.barrier.wait()
        values = [pickle.loads(one) for one in self.values]
        self.barrier.wait()
        return values


def on_ranks(size, work):
    """`work(rank's collectives)` on every rank at once; what each returned or raised, in rank order.

    Fails when a rank is left alone in a collective.
    """
    shared, ends = _Shared(size), [None] * size

    def run(rank):
        try:
            ends[rank] = work(ThreadedRank(rank, shared))
        except Exception as error:
            ends[rank] = error

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * LIMIT_S)
        assert not thread.is_alive(), "a rank hangs"
    assert not any(isinstance(end, threading.BrokenBarrierError) for end in ends), f"a rank was left alone: {ends}"
    return ends


class ThreadedMailbox:
    """The mailbox of ranks in one process; one object per rank, which share `channels`."""

    def __init__(self, channels):
        self.channels, self.read_of = channels, {}

    def post(self, channel, message):
        self.channels.setdefault(channel, []).append(encode(message))

    def read(self, channel):
        at = self.read_of.get(channel, 0)
        messages = self.channels.get(channel, [])
        if at >= len(messages):
            return None
        self.read_of[channel] = at + 1
        return decode(messages[at])

    def sweep(self):
        pass
