"""Accelerators are counted without torch where the build can see none."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from swift import devices

ROOT = Path(__file__).parents[1]
TORCH = """
class accelerator:
    is_available = staticmethod(lambda: True)
    current_accelerator = staticmethod(lambda: type("device", (), {"type": "cuda"}))
    device_count = staticmethod(lambda: 3)
"""


COUNT = "from swift.devices import count_accelerators as count\nprint(count(), 'torch' in sys.modules)"
DERIVE = "from swift.arguments.derived import Machine\nprint(Machine.detect({}).has_accelerator)"


def counted(folder, version, *, loaded=False, entry_points=None, kind="cuda", code=COUNT):
    """What a process counts with a torch of this version file, and whether it has loaded it."""
    (folder / "torch").mkdir()
    (folder / "torch" / "__init__.py").write_text(TORCH.replace("cuda", kind))
    if version is not None:
        (folder / "torch" / "version.py").write_text(version)
    if entry_points is not None:
        (folder / "other-1.0.dist-info").mkdir()
        (folder / "other-1.0.dist-info" / "METADATA").write_text("Name: other\nVersion: 1.0\n")
        (folder / "other-1.0.dist-info" / "entry_points.txt").write_text(entry_points)
    done = subprocess.run(
        [sys.executable, "-c", ("import sys, torch\n" if loaded else "import sys\n") + code],
        capture_output=True, text=True, check=True, cwd=folder,
        env={**os.environ, "PYTHONPATH": f"{folder}{os.pathsep}{ROOT}"},
    )  # fmt: skip
    return done.stdout.strip()


CPU = "from typing import Optional\n__version__ = '2.9.0+cpu'\ncuda: Optional[str] = None\nhip = None\nxpu = None\n"


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="elsewhere torch itself must answer")
def test_a_build_for_cpus_is_not_loaded_to_count_nothing(tmp_path):
    assert counted(tmp_path, CPU) == "(0, 'cpu') False"


@pytest.mark.parametrize("version", [CPU.replace("cuda: Optional[str] = None", "cuda = '12.8'"), "hip = '6.4'\n", None])
def test_any_other_build_answers_itself(tmp_path, version):
    assert counted(tmp_path, version) == "(3, 'cuda') True"


def test_a_backend_of_another_package_is_asked(tmp_path):
    assert counted(tmp_path, CPU, entry_points="[torch.backends]\nother = other:load\n") == "(3, 'cuda') True"


def test_a_torch_that_is_loaded_answers_itself(tmp_path):
    assert counted(tmp_path, CPU, loaded=True) == "(3, 'cuda') True"


@pytest.mark.parametrize("kind", ["xpu", "mps"])
def test_devices_that_are_not_used_are_not_counted(kind, tmp_path):
    assert counted(tmp_path, "xpu = '1'\n", kind=kind) == "(0, 'cpu') True"


@pytest.mark.parametrize(
    ("version", "expected"), [("hip = '6.4'\n", "True"), ("cuda = '12.8'\n", "True"), (CPU, "False")]
)
def test_defaults_follow_what_torch_sees_whatever_is_in_dev(version, expected, tmp_path):
    assert counted(tmp_path, version, code=DERIVE) == expected


@pytest.mark.parametrize(
    ("free_gib", "room_gib"),
    [(79.0, 20), (39.9, 19), (14.5, 7), (14.1, 7), (1.5, 1)],
    ids=["a small model", "a middle one", "a large one", "the same a little later", "hardly any room"],
)
def test_keys_and_values_get_no_more_than_the_model_leaves(monkeypatch, free_gib, room_gib):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (int(free_gib * 2**30), 80 * 2**30))
    assert devices.cache_room(torch.device("cuda", 0)) == room_gib * 2**30


@pytest.mark.parametrize(("visible", "rank", "device"), [(8, "3", "cuda:3"), (1, "3", "cuda:0"), (1, "0", "cuda:0")])
def test_a_process_that_sees_one_gpu_uses_it_whatever_its_rank(monkeypatch, visible, rank, device):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: visible)
    monkeypatch.setenv("LOCAL_RANK", rank)
    assert devices.own_device() == torch.device(device)
