"""Properties of the machine: accelerators, and the CPU cores and the memory this process may use."""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

CGROUP = Path("/sys/fs/cgroup")


def is_worker(environ: Mapping[str, str]) -> bool:
    """Whether a launcher (ours, torchrun or another) has started this process as a rank.

    A platform that starts one process per node sets RANK and WORLD_SIZE too, but no LOCAL_RANK; NPROC_PER_NODE or
    NNODES mean that its processes are still to be started.
    """
    ranked = bool(environ.get("RANK")) and bool(environ.get("WORLD_SIZE"))
    return ranked and (bool(environ.get("LOCAL_RANK")) or not {"NPROC_PER_NODE", "NNODES"} & environ.keys())


def launch_variables(environ: Mapping[str, str]) -> Mapping[str, str]:
    """The variables of a launch; where a platform starts one process per node, its WORLD_SIZE nodes and their RANK."""
    if not environ.get("RANK") or not environ.get("WORLD_SIZE") or is_worker(environ):
        return environ
    return {"NNODES": environ["WORLD_SIZE"], "NODE_RANK": environ["RANK"], **environ}


def count_accelerators() -> tuple[int, str]:
    """Visible accelerators of the kind `cuda`, which ROCm has too, and the kind; else (0, "cpu")."""
    if "torch" not in sys.modules and torch_is_for_cpu_only():
        return 0, "cpu"
    import torch

    kind = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return (torch.accelerator.device_count(), "cuda") if kind is not None and kind.type == "cuda" else (0, "cpu")


def visible_names(count: int) -> list[str]:
    """The names of the visible accelerators, of which there are `count`, as CUDA_VISIBLE_DEVICES has them."""
    given = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    return given[:count] or [str(number) for number in range(count)]


def own_device() -> torch.device:
    """The device of this process: that of its LOCAL_RANK, or the only one that a scheduler shows it."""
    import torch

    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) if torch.cuda.device_count() > 1 else 0)


def cache_room(device: torch.device) -> int:
    """Bytes for keys and values of a model that samples in this process: a quarter of the device's memory at most.

    On a device of its own it is also at most half of what is free now, in whole GiB, so that it is the same in every
    run; called with the model on the device, it leaves the other half to training.
    """
    import psutil
    import torch

    if device.type != "cuda":
        return int(psutil.virtual_memory().total // 8)
    free, total = torch.cuda.mem_get_info(device)
    return min(total // 4, max(free // 2, 1 << 30) >> 30 << 30)


def torch_is_for_cpu_only() -> bool:
    """Whether the installed torch supports no accelerator at all, determined without importing it.

    For launchers, which do not use torch otherwise. `torch/version.py` names the build; on macOS, or with a backend of
    another package, torch has to be imported.
    """
    spec = importlib.util.find_spec("torch")
    if not sys.platform.startswith("linux") or spec is None or spec.origin is None:
        return False
    about = importlib.util.spec_from_file_location("torch_version", Path(spec.origin).with_name("version.py"))
    if about is None or about.loader is None or not Path(about.origin or "").is_file():
        return False
    version = importlib.util.module_from_spec(about)
    about.loader.exec_module(version)
    built_for = [getattr(version, name, None) for name in ("cuda", "hip", "rocm", "xpu")]
    return not any(built_for) and not importlib.metadata.entry_points(group="torch.backends")


def allowed_cores() -> list[int]:
    """Ids of the CPU cores this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def available_bytes() -> int:
    """Main memory that can be had without swapping, within the limits of the control group."""
    import psutil

    free = int(psutil.virtual_memory().available)
    with contextlib.suppress(OSError, ValueError):  # no control group, or "max"
        limit = int((CGROUP / "memory.max").read_text(encoding="ascii"))
        free = min(free, limit - int((CGROUP / "memory.current").read_text(encoding="ascii")))
    return max(0, free)
