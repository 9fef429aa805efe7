"""What does the record of rollouts cost? CPU time of a step in the trainer's thread and in the writer's.

    python benchmarks/recording.py [--completions 64] [--tokens 512] [--prompt_tokens 128] [--step_seconds S]

Completions have all that a run with a reference and old log-probs records. The trainer's share is that of handing them
over. `--step_seconds`, those of such a step in a run, gives the shares of it.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import threading
import time
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from harness import record

from swift.observability.rollout_record import FOLDER, RolloutRecord


def row(index: int, tokens: int, prompt_tokens: int) -> dict[str, Any]:
    """A completion as the trainer hands it over."""
    random = np.random.default_rng(index)
    names = ("sampler_logprobs", "policy_logprobs", "old_logprobs", "ref_logprobs", "entropy")
    return {
        "group": index // 8, "group_id": f"{index // 8:016x}-0", "prompt_id": f"{index // 8:016x}", "index": index,
        "finish_reason": "stop", "turns": None, "excluded": None, "advantage": 0.5, "rewards": [1.0, 0.0],
        "reward_kl": None, "completion": None,
        "prompt_ids": random.integers(0, 150_000, prompt_tokens, dtype=np.int32),
        "token_ids": random.integers(0, 150_000, tokens, dtype=np.int32), "trained": np.ones(tokens, bool),
        "versions": np.array([1, 0, tokens]), **{name: random.standard_normal(tokens).astype("f4") for name in names},
    }  # fmt: skip


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, value in (("completions", 64), ("tokens", 512), ("prompt_tokens", 128), ("steps", 50)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--step_seconds", type=float)
    args = parser.parse_args()
    rows = [row(index, args.tokens, args.prompt_tokens) for index in range(args.completions)]
    ours: list[float] = []
    writers: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        file = RolloutRecord(Path(folder), "all", ["accuracy", "format"])
        write, main_thread = file._write, threading.get_ident()

        def timed(*given: Any) -> None:
            assert threading.get_ident() != main_thread
            began = time.thread_time()
            write(*given)
            writers.append(time.thread_time() - began)

        file._write = timed  # type: ignore[assignment, method-assign]
        for step in range(args.steps):
            began = time.thread_time()
            file.write(step, rows, {"loss": 0.0})
            ours.append(time.thread_time() - began)
            time.sleep(0.02)  # as a step that computes
        file.close()
        size = median(path.stat().st_size for path in Path(folder, FOLDER).iterdir())
    found = {
        "trainer_ms": 1000 * median(ours),
        "writer_ms": 1000 * median(writers),
        "bytes_per_token": size / (args.completions * args.tokens),
    }
    if args.step_seconds:
        found |= {f"share_{name}": found[f"{name}_ms"] / 1000 / args.step_seconds for name in ("trainer", "writer")}
    print(json.dumps({**vars(args), **found, "cpu": record.family(record.cpu_fields())}, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
