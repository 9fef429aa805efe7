"""The measurement for GPUs, on the CPU: the same steps, with tensors that move within main memory."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "gpu" / "colocate_memory.py"


@pytest.mark.slow
def test_the_measurement_runs_and_finds_no_difference(tmp_path):
    words = ["--backend", "transformers", "--size", "nano", "--levels", "2", "--steps", "2"]
    words += ["--completions", "8", "--completion_tokens", "8", "--results", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *words], capture_output=True, text=True, timeout=300, check=False
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (path,) = tmp_path.glob("colocate_memory-*.json")
    rows = json.loads(path.read_text())["rows"]
    assert [(row["level"], row["offload"]) for row in rows] == [(2, False), (2, True)]
    assert len({row["weights"] for row in rows}) == 1
    assert all(len(set(row["samples"])) == 2 for row in rows), "weights that were published change what is sampled"
    assert all(sum(line.startswith("mem ") for line in row["lines"]) == 6 for row in rows)


def test_a_difference_and_memory_that_stays_fail(monkeypatch):
    monkeypatch.syspath_prepend(SCRIPT.parent)
    import colocate_memory

    inside = {"trainer": "0", "optim": "0"}
    good = {"level": 0, "offload": True, "weights": "a", "samples": ["b"], "metrics": {}, "last": {"generate": inside}}
    assert colocate_memory.verdict([good, good]) == []
    bad = [
        {**good, "weights": "c"},
        {**good, "samples": ["c"]},
        {**good, "last": {"generate": {**inside, "optim": "7"}}},
        {**good, "metrics": {"health/memory_not_freed": 1.0}},
    ]
    found = colocate_memory.verdict([good, *bad])
    assert [line.partition(": ")[2] for line in found] == [
        "the parameters differ from those of the first variant",
        "the greedy samples differ from those of the first variant",
        "0 + 7 MiB of the trainer were not out",
        "less than half of the expected memory was freed",
    ]
