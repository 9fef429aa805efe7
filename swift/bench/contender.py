"""A child process: `python -m swift.bench.contender SIDE KIND WORK FD`. See `swift.bench.contest`."""

from __future__ import annotations

import importlib
import os
import socket
import sys

from swift.bench.contest import Gate
from swift.bench.work import Work


def main() -> None:
    """See the module."""
    side, kind, work, descriptor = sys.argv[1:]
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    module = importlib.import_module(f"swift.bench.{side}_side")
    gate = Gate(socket.socket(fileno=int(descriptor)))
    getattr(module, kind)(Work.from_json(work), gate)


if __name__ == "__main__":
    main()
