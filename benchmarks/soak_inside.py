"""Runs a program in a network namespace: `python soak_inside.py FILE_OF_NAMESPACE -m MODULE|SCRIPT WORDS...`."""

import ctypes
import os
import runpy
import sys

CLONE_NEWNET = 0x40000000


def enter(path: str) -> None:
    """Put this thread, and what it starts, into the namespace."""
    with open(path, "rb") as file:  # noqa: PTH123 - as little as possible is imported
        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), path)


if __name__ == "__main__":
    enter(sys.argv[1])
    is_module = sys.argv[2] == "-m"
    sys.argv = sys.argv[3 if is_module else 2 :]
    if is_module:
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(sys.argv[0], run_name="__main__")
