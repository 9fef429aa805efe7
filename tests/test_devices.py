"""Accelerators are counted without torch where the build can see none."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TORCH = """
class accelerator:
    is_available = staticmethod(lambda: True)
    current_accelerator = staticmethod(lambda: type("device", (), {"type": "cuda"}))
    device_count = staticmethod(lambda: 3)
"""


def counted(folder, version, *, loaded=False, entry_points=None):
    """What a process counts with a torch of this version file, and whether it has loaded it."""
    (folder / "torch").mkdir()
    (folder / "torch" / "__init__.py").write_text(TORCH)
    if version is not None:
        (folder / "torch" / "version.py").write_text(version)
    if entry_points is not None:
        (folder / "other-1.0.dist-info").mkdir()
        (folder / "other-1.0.dist-info" / "METADATA").write_text("Name: other\nVersion: 1.0\n")
        (folder / "other-1.0.dist-info" / "entry_points.txt").write_text(entry_points)
    code = "from swift.devices import count_accelerators as count\nprint(count(), 'torch' in sys.modules)"
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
