"""The demo in every mode: a model that learns to calculate learns the same wherever its completions are sampled.

    python benchmarks/modes.py [--modes transformers colocate dedicated server] [--steps 200] [--results DIR]

Runs `examples/demo.sh` once per mode, the last three with vLLM, and compares the accuracy on the same 400 held-out
problems: each must come within 3 points of the transformers engine's. Then a run of 50 steps from random weights
with vLLM in the trainer's process (`examples/train/grpo/vllm/cpu.sh`): the log-probs of its sampler and of its trainer
differ by at most 1e-5. The demo's own difference is recorded too; its model is trained and so sure of most tokens that
float32 leaves more, with every engine. Takes about ten minutes on two cores.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from harness import record

ROOT = Path(__file__).resolve().parent.parent
MODES = ("transformers", "colocate", "dedicated", "server")
VLLM = ("--use_vllm", "true", "--vllm_enforce_eager", "true")
POINTS = 0.03
"""How far the accuracies may be apart."""
LARGEST_GAP = 1e-5
"""Of log-probs in float32, over the run of 50 steps."""
RUN_LIMIT_S = 1800.0
START_LIMIT_S = 300.0


def main() -> int:
    """Measure, print, record; the exit code."""
    options = parse(sys.argv[1:])
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        rows = [demo(mode, options.steps, folder) for mode in options.modes]
        rows.append(random_weights(folder))
    print(record.table(HEADER, [cells(row) for row in rows]))
    print(f"recorded in {record.write('modes', rows, options.results)}")
    failures = verdict(rows)
    for failure in failures:
        print(f"FAILED {failure}", file=sys.stderr)
    return 1 if failures and not options.no_verdict else 0


def parse(words: list[str]) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--modes", nargs="+", default=list(MODES), choices=MODES)
    parser.add_argument("--steps", type=int, default=200, help="GRPO steps of the demo")
    parser.add_argument("--no_verdict", action="store_true", help="exit with 0 whatever comes out")
    parser.add_argument("--results", type=Path, help="folder of the JSON file")
    return parser.parse_args(words)


def environment(**more: str) -> dict[str, str]:
    """That of a shell in which this Python's `swift` is on the PATH."""
    return {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}", **more}


def execute(command: list[str], log: Path, **variables: str) -> None:
    """Run a command to its end.

    Raises:
        RuntimeError: it failed; with the end of its output.
    """
    with log.open("wb") as output:
        done = subprocess.run(
            command,
            cwd=ROOT,
            env=environment(**variables),
            stdout=output,
            stderr=output,
            timeout=RUN_LIMIT_S,
            check=False,
        )
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{log.read_text(errors='replace')[-3000:]}")


def demo(mode: str, steps: int, folder: Path) -> dict[str, Any]:
    """The demo in one mode, as a row."""
    out = folder / mode
    variables = {"OUT": str(out), "STEPS": str(steps)}
    words = {
        "transformers": [],
        "colocate": [*VLLM, "--vllm_mode", "colocate"],
        "dedicated": [*VLLM, "--vllm_mode", "dedicated"],
        "server": VLLM,
    }[mode]
    script, log = ["sh", "examples/demo.sh", *words], folder / f"{mode}.log"
    with contextlib.ExitStack() as stack:
        if mode == "server":
            url, key = stack.enter_context(server(folder))
            script += ["--vllm_server_base_url", url, "--vllm_server_api_key", key]
        started = time.monotonic()
        execute(script, log, **variables)
        seconds = time.monotonic() - started
    sys.path.insert(0, str(ROOT / "examples" / "demo"))
    from report import score

    return {
        "mode": mode,
        "run": "demo",
        "accuracy_before": score(out / "before.jsonl").accuracy,
        "accuracy_after": score(out / "after.jsonl").accuracy,
        "seconds": seconds,
        **figures(out),
    }


def random_weights(folder: Path) -> dict[str, Any]:
    """Fifty steps with vLLM from random weights, as a row."""
    out = folder / "random"
    script = ["bash", "examples/train/grpo/vllm/cpu.sh", "--max_steps", "50", "--output_dir", str(out)]
    started = time.monotonic()
    execute([*script, "--add_version", "false"], folder / "random.log")
    return {"mode": "colocate", "run": "random weights", "seconds": time.monotonic() - started, **figures(out)}


@contextlib.contextmanager
def server(folder: Path) -> Iterator[tuple[str, str]]:
    """A `swift rollout` with vLLM and the demo's model on a free port; its address and key."""
    models = [path for path in (ROOT / ".cache" / "demo").iterdir() if not path.name.startswith(".")]
    if not models:
        raise RuntimeError("the demo's model is not built yet: name another mode before server")
    model = max(models, key=lambda path: path.stat().st_mtime)  # the demo in another mode has just made or used it
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    url, key, log = f"http://127.0.0.1:{port}", secrets.token_hex(16), folder / "rollout.log"
    command = [
        "swift",
        "rollout",
        "--model",
        str(model),
        *VLLM,
        "--torch_dtype",
        "float32",
        "--port",
        str(port),
        "--api_key",
        key,
    ]
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment(), stdout=output, stderr=output, start_new_session=True
        )
    try:
        deadline = time.monotonic() + START_LIMIT_S
        while "\nready " not in "\n" + log.read_text(errors="replace"):
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the server did not start:\n{log.read_text(errors='replace')[-3000:]}")
            time.sleep(0.2)
        yield url, key
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)


def figures(out: Path) -> dict[str, Any]:
    """What the log of a run says of sampler and trainer."""
    rows = [json.loads(line) for line in (out / "logging.jsonl").open(encoding="utf-8")]
    logged = [row for row in rows if "mismatch/logp_abs_diff_max" in row]
    return {
        "steps": max(row["step"] for row in logged),
        "reward_first": logged[0]["reward"],
        "reward_last": logged[-1]["reward"],
        "logp_abs_diff_max": max(row["mismatch/logp_abs_diff_max"] for row in logged),
        "logp_abs_diff_mean": sum(row["mismatch/logp_abs_diff"] for row in logged) / len(logged),
        "off_policy_max": max(row["off_policy/max"] for row in logged),
    }


HEADER = ["mode", "run", "steps", "accuracy", "reward", "max |dlogp|", "mean |dlogp|", "seconds"]


def cells(row: dict[str, Any]) -> list[str]:
    """A line of the table."""
    before, after = row.get("accuracy_before"), row.get("accuracy_after")
    return [
        row["mode"],
        row["run"],
        str(row["steps"]),
        "" if after is None else f"{before:.3f} -> {after:.3f}",
        f"{row['reward_first']:.3f} -> {row['reward_last']:.3f}",
        f"{row['logp_abs_diff_max']:.1e}",
        f"{row['logp_abs_diff_mean']:.1e}",
        f"{row['seconds']:.0f}",
    ]


def verdict(rows: list[dict[str, Any]]) -> list[str]:
    """What is not as it must be."""
    failures = []
    accuracies = {row["mode"]: row["accuracy_after"] for row in rows if "accuracy_after" in row}
    wanted = accuracies.get("transformers")
    for mode, accuracy in accuracies.items():
        if wanted is not None and abs(accuracy - wanted) > POINTS:
            failures.append(f"{mode}: accuracy {accuracy:.3f}, the transformers engine reaches {wanted:.3f}")
    for row in rows:
        if row["run"] == "random weights" and row["logp_abs_diff_max"] > LARGEST_GAP:
            failures.append(f"random weights: log-probs differ by {row['logp_abs_diff_max']:.1e}, wanted {LARGEST_GAP}")
    return failures


if __name__ == "__main__":
    sys.exit(main())
