"""Quantised bases; bitsandbytes lies in a folder of its own, so a process that finds it does the work."""

import os
import sys
from pathlib import Path

import pytest
from preloaded import Program

ROOT = Path(__file__).parents[2]
OPTIONAL = Path(sys.prefix) / "optional"
"""Where `make install` puts packages that not every process is to import."""


def test_an_adapter_on_a_quantised_base_trains_and_is_sent_saved_and_merged(qwen2, tmp_path):
    if not list(OPTIONAL.glob("bitsandbytes-*")):
        pytest.skip(f"no bitsandbytes in {OPTIONAL}; make install puts it there")
    program = Program(
        [str(Path(__file__).with_name("quantised_worker.py")), qwen2, str(tmp_path)],
        output=tmp_path / "log",
        env={**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{OPTIONAL}"},
    )
    program.wait(120)
    text = program.communicate()[0]
    assert program.returncode == 0, text[-3000:]
    assert [line for line in text.splitlines() if line.startswith("checked")] == [
        "checked experts", "checked nf4", "checked fp4", "checked dora", "checked int8", "checked dora int8",
        "checked files, products",
    ]  # fmt: skip
