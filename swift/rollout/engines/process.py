"""What an engine must not change in its process, because the trainer may live there too: random numbers, cores."""

from __future__ import annotations

import contextlib
import os
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch


@contextlib.contextmanager
def same_randomness() -> Iterator[None]:
    """All random generators of the process continue afterwards where they stood before."""
    python, numpy, cpu = random.getstate(), np.random.get_state(), torch.get_rng_state()
    device = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        torch.set_rng_state(cpu)
        if device is not None:
            torch.cuda.set_rng_state(device)


def bind_to_cores(cores: Sequence[int]) -> None:
    """Keep all threads of this process on some CPU cores, one thread of torch for each; () changes nothing."""
    if not cores or not hasattr(os, "sched_setaffinity"):
        return
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(ProcessLookupError):  # a thread that has just ended
            os.sched_setaffinity(int(task.name), cores)
    torch.set_num_threads(len(cores))
