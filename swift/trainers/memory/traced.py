"""What a token of a micro-batch takes in memory: counted by a process of its own, while the run samples.

It makes the policy without numbers and takes steps with it (`swift.planning.step`): the trainer's own steps, with this
tuner, its precisions and these recomputed layers.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence

from swift.observability.secrets import MASK
from swift.signals import kept_from_children

LIMIT_S = 120
"""Longest wait for the count."""
APART = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
"""Variables without which a process has no accelerator."""
JOINED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class TracedActivations:
    """The count for the run of these words, which begins at once."""

    def __init__(self, words: Sequence[str]) -> None:
        variables = {name: value for name, value in os.environ.items() if name not in JOINED}
        known = [word.replace(MASK, "masked") for word in words]  # a policy needs no secrets
        command = [sys.executable, "-m", "swift.planning.budget", *known]
        with kept_from_children():
            self._process = subprocess.Popen(
                command,
                env={**variables, **dict.fromkeys(APART, "")},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )

    def result(self) -> tuple[int | None, str]:
        """Bytes per token; or None, and the reason."""
        try:
            out, errors = self._process.communicate(timeout=LIMIT_S)
            found = json.loads(out.splitlines()[-1])
        except subprocess.TimeoutExpired:
            self._process.kill()
            return None, f"no result after {LIMIT_S} s"
        except (IndexError, ValueError):
            return None, (errors.strip().splitlines() or [f"exit code {self._process.returncode}"])[-1]
        return found.get("bytes"), found.get("obstacle", "")
