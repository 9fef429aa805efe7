"""What surrounds a trainer: packages that must be there, and the command that resumes."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import get_args

import pytest

from swift.errors import ResourceError
from swift.trainers.arguments import Optimizer
from swift.trainers.session import (
    BUILT_IN_OPTIMIZERS,
    on_one_device,
    optimizer_package,
    require_packages,
    resume_command,
)


def test_every_optimizer_is_built_in_or_names_its_package():
    without = {name for name in get_args(Optimizer) if optimizer_package(name) is None}
    assert without == set(BUILT_IN_OPTIMIZERS)


@pytest.mark.parametrize(
    ("name", "package"),
    [("adamw_8bit", "bitsandbytes"), ("adamw_torch_8bit", "torchao"), ("galore_adamw", "galore_torch")],
)
def test_known_packages(name, package):
    assert optimizer_package(name) == package


def test_missing_packages_are_named_together_before_anything_loads():
    with pytest.raises(ResourceError) as caught:
        require_packages(SimpleNamespace(report_to=["tensorboard", "swanlab"], optim="grokadamw"))
    assert [line.split(":")[0] for line in caught.value.problems] == ["--report_to", "--optim"]
    assert "swanlab" in caught.value.problems[0]


def test_the_resume_command_repeats_the_launch(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["swift", "rlhf", "--model", "a b", "--resume_from_checkpoint", "old"])
    monkeypatch.setenv("NPROC_PER_NODE", "2")
    command = resume_command("rlhf", Path("run/checkpoint-3"))
    assert command == "NPROC_PER_NODE=2 swift rlhf --model 'a b' --resume_from_checkpoint run/checkpoint-3"


def test_a_process_that_sees_several_devices_trains_on_one(tmp_path):
    from transformers import TrainingArguments

    arguments = TrainingArguments(str(tmp_path), use_cpu=True, report_to="none")
    assert arguments.n_gpu == 0
    arguments._n_gpu = 4  # what transformers counts on a machine with four
    assert on_one_device(arguments).n_gpu == 1
