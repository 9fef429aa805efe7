"""How long does `swift view` take over many completions: the index, the first page, every filter?

    python benchmarks/viewing.py [--completions 100000] [--characters 800] [--repeats 9] [--record]

The command serves a made run: groups of eight, texts of random words. Seconds are those of HTTP requests.
"""

from __future__ import annotations

import argparse
import functools
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import httpx
from harness import record

GROUP, GROUPS_PER_STEP = 8, 16
WORDS = ("the", "answer", "is", "because", "therefore", "x", "=", "42", "\n", "sum", "we", "have", "“naïve”", "let")
FILTERS: dict[str, dict[str, Any]] = {
    "no filter": {},
    "steps": {"first_step": 100, "last_step": 200},
    "reward of a function": {"function": "accuracy", "least": 0.5},
    "excluded": {"excluded": "yes"},
    "finish reason": {"finish_reason": "length"},
    "text, rare": {"text": "zebra 77"},
    "text, in every row": {"text": "answer"},
    "text, n, as in each \\n": {"text": "n"},
    "text, nowhere": {"text": "nowhere to be found"},
    "sorted by step": {"order": "step"},
}


def rows(count: int, characters: int) -> Iterator[dict[str, Any]]:
    """Rows of completions.jsonl."""
    rng = random.Random(0)
    texts = [" ".join(rng.choices(WORDS, k=characters // 5)) for _ in range(500)]
    for number in range(count):
        group, index = divmod(number, GROUP)
        prompt = f"{group % 1000:016x}"
        step, accuracy = group // GROUPS_PER_STEP + 1, float(rng.random() < 0.4)
        excluded = "no_reward" if rng.random() < 0.01 else None
        yield {
            "attempt": 1, "step": step, "split": "train", "weight_version": step - 1, "prompt_id": prompt,
            "group_id": f"{prompt}-{group // 1000}", "index": index, "prompt": f"[user]\n{texts[group % 500][:200]}",
            "completion": f"{texts[rng.randrange(500)]} zebra {rng.randrange(10_000)}", "turns": None,
            "prompt_tokens": 50, "completion_tokens": rng.randrange(20, 400),
            "finish_reason": rng.choice(["stop", "stop", "length"]),
            "rewards": {"accuracy": accuracy, "format": 1.0}, "reward": None if excluded else accuracy + 1,
            "advantage": None if excluded else rng.gauss(0, 1), "used": not excluded, "excluded": excluded,
            "columns": {"solution": str(number)},
        }  # fmt: skip


def seconds(work: Callable[[], Any], repeats: int, before: Callable[[], Any] = lambda: None) -> list[float]:
    """Wall times of a call. before: what is called before each; the last filter's rows are kept by swift view."""
    found = []
    for _ in range(repeats):
        before()
        began = time.perf_counter()
        work()
        found.append(time.perf_counter() - began)
    return found


def measured(run: Path, repeats: int) -> list[dict[str, Any]]:
    """Serve a run and ask for everything."""
    began = time.perf_counter()
    command = [sys.executable, "-m", "swift", "view", str(run)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        with httpx.Client(base_url=process.stdout.readline().split()[1], timeout=600) as client:
            found = {"start, until the ready line": [time.perf_counter() - began]}

            def ask(path: str, **parameters: Any) -> Any:
                reply = client.get(path, params=parameters)
                reply.raise_for_status()
                return reply

            while (about := ask("runs").json()[0])["read_bytes"] < about["bytes"] or not about["completions"]:
                time.sleep(0.02)
            found["index, start included"] = [time.perf_counter() - began]
            found["first page: page, runs, groups"] = seconds(lambda: [ask(path) for path in ("", "runs", "groups")], 1)
            for name, parameters in FILTERS.items():
                ask_it = functools.partial(ask, "groups", **parameters)
                found[name] = seconds(ask_it, repeats, lambda: ask("groups", first_step=1, last_step=1))
            first = ask("groups").json()["groups"][0]
            place = {name: first[name] for name in ("step", "split", "group_id")}
            found["a group"] = seconds(lambda: ask("group", **place), repeats)
        process.terminate()
    return [{"row": name, "median_ms": 1e3 * median(v), "slowest_ms": 1e3 * max(v)} for name, v in found.items()]


def main() -> None:
    """Measure, print, and record if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--completions", type=int, default=100_000)
    parser.add_argument("--characters", type=int, default=800, help="length of a completion")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--record", action="store_true", help="write the rows to benchmarks/results")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "completions.jsonl"
        with path.open("w", encoding="utf-8") as file:
            file.writelines(
                json.dumps(row, ensure_ascii=False) + "\n" for row in rows(given.completions, given.characters)
            )
        size = path.stat().st_size
        found = measured(Path(folder), given.repeats)
    machine = record.facts()["machine"]
    print(f"{given.completions} completions, {size / 1e6:.0f} MB; {machine['processor']}, {machine['cores']} cores")
    print(f"load average {machine['load_average']}")
    for row in found:
        print(f"{row['row']:<32} median {row['median_ms']:8.1f} ms   slowest {row['slowest_ms']:8.1f} ms")
    if given.record:
        print(record.write(record.results_file("viewing"), found, completions=given.completions, bytes=size))


if __name__ == "__main__":
    main()
