"""How fast a student learns the demo's task: by rewards, or from a teacher in process, in an actor or behind a server.

    sh examples/demo.sh; python benchmarks/distillation_curve.py STUDENT TEACHER TRAIN.jsonl --out curve.json

STUDENT is the demo's model before reinforcement learning (in `.cache/demo`), TEACHER its last checkpoint, TRAIN.jsonl
its problems. Every run samples 128 completions a step. The accuracy of a step is that of its samples at temperature 1,
a mean over five steps.
"""

from __future__ import annotations

import argparse
import json
import platform
import socket
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path
from urllib.request import urlopen

COMMON = """--train_type full --gradient_checkpointing false --temperature 1.0
--max_completion_length 48 --per_device_train_batch_size 128 --learning_rate 1e-4 --warmup_ratio 0.05
--logging_steps 1 --report_to none --add_version false --save_strategy no --gradient_accumulation_steps 1"""
GRPO = "--rlhf_type grpo --loss_type dapo --beta 0 --reward_funcs accuracy format"
ALONE = f"{GRPO} --num_generations 1 --reward_weights 0 0"
SHOWN = (5, 10, 20, 30, 40)


def main() -> None:
    """Run each and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("student", "teacher", "train"):
        parser.add_argument(name)
    parser.add_argument("--steps", type=int, default=max(SHOWN))
    parser.add_argument("--work", default="output/distillation_curve")
    parser.add_argument("--only", default="", help="word of the names of the runs to make")
    parser.add_argument("--out")
    args = parser.parse_args()
    ways = {
        "rewards": lambda: run(args, "rewards", f"{GRPO} --num_generations 8"),
        "teacher in process": lambda: run(args, "process", f"{ALONE} --teacher_model {args.teacher}"),
        "gkd, teacher in process": lambda: run(
            args, "gkd", f"--rlhf_type gkd --lmbda 1 --teacher_model {args.teacher}"
        ),
        "teacher in an actor": lambda: run(
            args, "actor", f"{ALONE} --teacher_model {args.teacher} --teacher_device cpu:0 --vllm_server_timeout 300"
        ),
        "teacher behind a server": lambda: served(args),
    }
    curves = {name: way() for name, way in ways.items() if args.only in name}
    print(f"accuracy after a number of steps, on {processor()}")
    print("| |" + "".join(f" {step} |" for step in SHOWN if step <= args.steps))
    for name, curve in curves.items():
        shown = (statistics.fmean(curve[max(0, step - 5) : step]) for step in SHOWN if step <= args.steps)
        print(f"| {name} |" + "".join(f" {value:.2f} |" for value in shown))
    if args.out:
        Path(args.out).write_text(json.dumps({"processor": processor(), **curves}, indent=1))


def run(args: argparse.Namespace, name: str, flags: str) -> list[float]:
    """The accuracy of each step of a run."""
    folder = Path(args.work, name)
    words = (
        f"{COMMON} --model {args.student} --dataset {args.train} --max_steps {args.steps} --output_dir {folder} {flags}"
    )
    subprocess.run([sys.executable, "-m", "swift", "rlhf", *words.split()], check=True, stdout=subprocess.DEVNULL)
    right: dict[int, list[bool]] = defaultdict(list)
    for line in map(json.loads, (folder / "completions.jsonl").read_text().splitlines()):
        answer = line["completion"].rpartition("<answer>")[2].removesuffix("</answer>")
        right[line["step"]].append(answer == line["columns"]["solution"])
    return [statistics.fmean(right[step]) for step in sorted(right)]


def served(args: argparse.Namespace) -> list[float]:
    """The run with `swift rollout` as the teacher."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    words = f"rollout --model {args.teacher} --use_vllm false --port {port}"
    server = subprocess.Popen([sys.executable, "-m", "swift", *words.split()], stdout=subprocess.DEVNULL)
    try:
        url = f"http://127.0.0.1:{port}"
        for _ in range(600):
            try:
                urlopen(f"{url}/health", timeout=1).close()
                break
            except OSError:
                time.sleep(0.5)
        return run(args, "server", f"{ALONE} --teacher_model_server {url}")
    finally:
        server.terminate()
        server.wait()


def processor() -> str:
    """Its name, as the system tells it."""
    info = Path("/proc/cpuinfo")
    names = [line.partition(":")[2].strip() for line in info.read_text().splitlines() if line.startswith("model name")]
    return names[0] if names else platform.processor()


if __name__ == "__main__":
    main()
