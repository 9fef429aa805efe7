"""The memory of trainer and engine, as one line of the log.

    mem step=3 phase=generate dev=cuda:0 alloc=9120 reserved=9984 free=61200 rss=5011 trainer=0 optim=0
        engine_w=988 engine_kv=40960 freed=7901                                                  (one line, in MiB)

| field | meaning |
|---|---|
| alloc, reserved | memory of this process's tensors on the device; memory that torch reserves. `-` on a CPU |
| free | free memory of the device; on a CPU of main memory, within the control group's limit |
| rss | main memory of this process |
| trainer, optim | model and optimizer state of the trainer on the device now |
| engine_w, engine_kv | weights and KV cache of the engine on the device now, as it reports; `-` if it does not |
| freed | memory of the device that the change to this phase has freed |
"""

from __future__ import annotations

import gc
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from swift.devices import available_bytes

if TYPE_CHECKING:
    import torch

MIB = 1 << 20
ENOUGH = 0.5
"""Share of the expected bytes that must have been freed."""
TOO_SMALL = 64 * MIB
"""Expectations below this are not judged: allocators round by about as much."""


@dataclass(frozen=True, slots=True)
class MemoryFigures:
    """What was measured at one moment, in bytes; None is unknown."""

    device: str
    alloc: int | None
    reserved: int | None
    free: int
    rss: int


def measure(device: torch.device) -> MemoryFigures:
    """The figures of now; cheap, and without waiting for the device."""
    import psutil

    rss = psutil.Process().memory_info().rss
    if device.type == "cuda":
        import torch

        free = torch.cuda.mem_get_info(device)[0]
        return MemoryFigures(
            str(device), torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device), free, rss
        )
    if device.type != "cpu":
        import torch

        alloc, reserved = torch.accelerator.memory_allocated(device), torch.accelerator.memory_reserved(device)
        return MemoryFigures(str(device), alloc, reserved, torch.accelerator.get_memory_info(device)[0], rss)
    return MemoryFigures(str(device), None, None, available_bytes(), rss)


def collect_garbage(device: torch.device) -> None:
    """Free what nobody refers to, and give torch's cache back to the device."""
    gc.collect()
    if device.type != "cpu":
        import torch

        torch.accelerator.empty_cache()


def memory_line(step: int, phase: str, figures: MemoryFigures, held: Mapping[str, int | None], freed: int) -> str:
    """The line of the module's docstring; held: bytes from `trainer` to `engine_kv`, None where unknown."""
    now = {name: getattr(figures, name) for name in ("alloc", "reserved", "free", "rss")}
    values = {**now, **held, "freed": freed}
    shown = {name: "-" if value is None else round(value / MIB) for name, value in values.items()}
    numbers = " ".join(f"{name}={value}" for name, value in shown.items())
    return f"mem step={step} phase={phase} dev={figures.device} {numbers}"


def freed_between(before: MemoryFigures, after: MemoryFigures) -> int:
    """Bytes by which the device became emptier; on a CPU by which this process became smaller."""
    if before.alloc is None:
        return max(0, before.rss - after.rss)
    return max(0, after.free - before.free)


def too_little(freed: int, expected: int) -> bool:
    """Whether so little was freed that something must be wrong; small expectations are never judged."""
    return expected >= TOO_SMALL and freed < ENOUGH * expected
