"""A child process: `contender.py SIDE KIND WORK FD`. See `harness.contest`."""

from __future__ import annotations

import importlib
import os
import socket
import sys
from pathlib import Path


def main() -> None:
    side, kind, work, descriptor = sys.argv[1:]
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from harness.contest import Gate
    from harness.work import Work

    module = importlib.import_module(f"harness.{side}_side")
    gate = Gate(socket.socket(fileno=int(descriptor)))
    getattr(module, kind)(Work.from_json(work), gate)


if __name__ == "__main__":
    main()
