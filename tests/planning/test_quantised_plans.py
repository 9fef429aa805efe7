"""What packed weights and passes through them take without numbers is what they take with them.

bitsandbytes lies in a folder of its own, so a process that finds it does the work.
"""

import json
import os
import sys
from pathlib import Path

import pytest
from preloaded import Program

from swift.cli.main import main
from swift.models.tiny import build_tiny

ROOT = Path(__file__).parents[2]
OPTIONAL = Path(sys.prefix) / "optional"
SINGLE = "--bnb_4bit_use_double_quant false --torch_dtype bfloat16"
FP4 = "--bnb_4bit_quant_type fp4 --torch_dtype float32 --gradient_checkpointing true"


@pytest.mark.parametrize(
    "flags", ["--torch_dtype bfloat16", *(pytest.param(one, marks=pytest.mark.long) for one in (SINGLE, FP4))]
)
def test_packed_weights_and_their_scales_are_counted(tmp_path, flags):
    if not list(OPTIONAL.glob("bitsandbytes-*")):
        pytest.skip(f"no bitsandbytes in {OPTIONAL}; make install puts it there")
    given = f"--quant_method bnb --quant_bits 4 {flags}".split()
    model = build_tiny(tmp_path / "model", size="tiny")
    program = Program(
        [Path(__file__).with_name("quantised_plan_worker.py"), model, tmp_path / "rows.jsonl", *given],
        output=tmp_path / "log",
        env={**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{OPTIONAL}"},
    )
    assert program.wait(120) == 0, program.communicate()[0][-3000:]
    foreseen, measured = json.loads((tmp_path / "log").read_text().splitlines()[-1])
    for name in ("parameters", "weights"):
        assert foreseen.pop(name) == measured.pop(name)
    for name, value in measured.items():
        assert foreseen[name] == pytest.approx(value, rel=0.05), name


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        ("--quant_bits 8", "--quant_bits: 8: only 4 is planned so far; plan with 4, which needs less, or without"),
        ("--quant_bits 4 --fsdp full_shard", "--quant_method: bnb: is not planned yet with --fsdp; drop one"),
        ("--quant_bits 4 --use_dora true", "--use_dora: true: is not planned yet on quantised weights"),
    ],
)
def test_what_of_them_is_not_planned_is_refused_in_a_line(nano_folders, capsys, flags, problem):
    run = f"--rlhf_type grpo --reward_funcs accuracy --dataset rows.jsonl --tuner_type lora --quant_method bnb {flags}"
    code = main(["plan", *run.split(), "--model", str(nano_folders["qwen2"]), "--device", "l4"])
    assert code == 2
    assert problem in capsys.readouterr().err
