"""Runs `swift rlhf` of ms-swift one optimizer step per turn: `python ms_swift_turns.py FD NUM_COMPLETIONS FLAGS...`.

A script for an interpreter of its own, in which `swift` is ms-swift: it imports nothing of this package and speaks the
protocol of `swift.bench.contest` by itself.
"""

from __future__ import annotations

import json
import os
import runpy
import socket
import sys
import time
from pathlib import Path
from typing import Any

sys.path.pop(0)  # this folder, whose modules are not meant for that interpreter


def main() -> None:
    """See the module."""
    descriptor, num_completions, *flags = sys.argv[1:]
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from transformers import TrainerCallback
    from transformers.trainer_callback import CallbackHandler

    channel = socket.socket(fileno=int(descriptor)).makefile("rw", encoding="utf-8")

    class Turns(TrainerCallback):
        """One step per turn, from log row to log row."""

        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            _send(channel, ready=True)
            self._wait(control)

        def on_log(self, args: Any, state: Any, control: Any, logs: dict | None = None, **kwargs: Any) -> None:
            if not logs or "learning_rate" not in logs:
                return
            now = time.perf_counter(), _computed()
            tokens = logs.get("completions/mean_length", 0.0) * int(num_completions)
            took = {"seconds": now[0] - self.began[0], "processor_s": now[1] - self.began[1]}
            _send(channel, tokens=tokens, workers_mib=0.0, peak_mib=_peak_mib(), **took)
            self._wait(control)

        def _wait(self, control: Any) -> None:
            line = channel.readline()
            control.should_training_stop = not (line and json.loads(line)["go"])
            self.began = time.perf_counter(), _computed()

    make = CallbackHandler.__init__

    def with_turns(self: Any, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        self.add_callback(Turns())

    CallbackHandler.__init__ = with_turns  # ms-swift replaces transformers' list of default callbacks
    sys.argv = ["rlhf", *flags]
    runpy.run_module("swift.cli.rlhf", run_name="__main__")


def _send(channel: Any, **message: Any) -> None:
    channel.write(json.dumps(message) + "\n")
    channel.flush()


def _computed() -> float:
    times = os.times()
    return times.user + times.system


def _peak_mib() -> float:
    for line in Path("/proc/self/status").read_text(encoding="ascii", errors="replace").splitlines():
        if line.startswith("VmHWM:"):
            return float(line.split()[1]) / 1024
    return 0.0


if __name__ == "__main__":
    main()
