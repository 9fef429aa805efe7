"""What a process on a CPU frees is still its own."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

from swift.models.cpu_memory import keep_freed_memory

FREE_AND_LOOK = """
from swift.models.cpu_memory import keep_freed_memory
def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096
if {keep}:
    assert keep_freed_memory()
before = resident()
blocks = [bytearray(100_000) for _ in range(1000)]
del blocks
print(resident() - before)
"""


def kept_bytes(keep):
    command = [sys.executable, "-c", FREE_AND_LOOK.format(keep=keep)]
    return int(subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="not glibc")
def test_freed_blocks_stay_with_the_process():
    assert kept_bytes(True) > 90e6
    assert kept_bytes(False) < 30e6


def test_elsewhere_nothing_is_changed(monkeypatch):
    monkeypatch.setattr(platform, "libc_ver", lambda: ("", ""))
    keep_freed_memory.cache_clear()
    assert keep_freed_memory() is False
    keep_freed_memory.cache_clear()
