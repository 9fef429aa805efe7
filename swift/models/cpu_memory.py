"""Memory of a process that trains on a CPU: what is freed stays with the process instead of going back at once.

glibc gives the top of its heap back to the system as soon as 128 KiB of it are free (the limit grows with use), and
takes large blocks from the system anew each time. A training step frees and takes hundreds of MiB in blocks of a few,
so every step pays for fresh pages, which the kernel must find and clear: a twentieth of the training of a 0.6M model.
"""

from __future__ import annotations

import ctypes
import platform
from functools import lru_cache

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
"""Numbers of `mallopt` in glibc's malloc.h."""

KEPT_BYTES = 2**30
"""Free memory at the top of the heap that is kept."""

OWN_MAPPING_BYTES = 2**25
"""Blocks from this size on are mapped one by one and go back when freed; glibc takes no higher limit."""


@lru_cache(maxsize=1)
def keep_freed_memory() -> bool:
    """Let glibc keep what is freed, for the rest of the process; whether this is glibc and it agreed.

    MALLOC_TRIM_THRESHOLD_, MALLOC_MMAP_THRESHOLD_ and GLIBC_TUNABLES of the environment are overruled.
    """
    if platform.system() != "Linux" or platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    return bool(mallopt(M_MMAP_THRESHOLD, OWN_MAPPING_BYTES)) and bool(mallopt(M_TRIM_THRESHOLD, KEPT_BYTES))
