"""The start and the end of a worker that `preloaded.run_ranks` runs once per rank."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch.distributed as dist


@contextmanager
def joined(limit_s: float = 120) -> Iterator[None]:
    """A group of the processes over gloo; the process ends with the block."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=limit_s))
    yield
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # the destructor of DDP hangs on gloo now and then; what counts is on the disk
