"""Memory and speed of accelerators, from their vendors' data sheets: dense rates, without sparsity."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from swift.errors import ConfigError, suggest

GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Device:
    """An accelerator.

    memory: bytes that the driver reports in all. half, single: FLOP/s of 16-bit and of float32 matrix products, with
    float32 sums. bandwidth: bytes/s of its memory.
    """

    name: str
    memory: int
    half: float
    single: float
    bandwidth: float

    def seconds(self, flops: float, moved: float, *, half: bool) -> float:
        """Time of one kernel by the roofline model, at the shares of the peaks that large kernels reach."""
        peak = self.half * REACHED if half else self.single * REACHED
        return max(flops / peak, moved / (self.bandwidth * STREAMED), LAUNCH_S)


REACHED, STREAMED, LAUNCH_S = 0.7, 0.85, 2.5e-6
"""Share of the peak rate that large matrix products reach, share of the bandwidth that copies reach, and the least time
of a kernel in seconds. An H100 gave 789 of its 989 TFLOP/s in a product of two matrices of 8192 x 8192."""

DEVICES = {
    device.name: device
    for device in (
        Device("h100-80gb", 81559 << 20, 989e12, 67e12, 3.35e12),
        Device("h100-pcie", 81559 << 20, 756e12, 51e12, 2.0e12),
        Device("h200", 143771 << 20, 989e12, 67e12, 4.8e12),
        Device("a100-40gb", 40960 << 20, 312e12, 19.5e12, 1.555e12),
        Device("a100-80gb", 81920 << 20, 312e12, 19.5e12, 2.039e12),
        Device("l4", 23034 << 20, 121e12, 30.3e12, 300e9),
        Device("l40s", 46068 << 20, 362e12, 91.6e12, 864e9),
        Device("a10", 23028 << 20, 125e12, 31.2e12, 600e9),
        Device("rtx3090", 24576 << 20, 71e12, 35.6e12, 936e9),
        Device("rtx4090", 24564 << 20, 165e12, 82.6e12, 1.008e12),
        Device("mi300x", 196592 << 20, 1307e12, 163e12, 5.3e12),
    )
}


NAMES = (
    ("h100 pcie", "h100-pcie"), ("h100", "h100-80gb"), ("h200", "h200"), ("a100", "a100-80gb"), ("l40s", "l40s"),
    ("l4", "l4"), ("a10", "a10"), ("rtx 3090", "rtx3090"), ("rtx 4090", "rtx4090"), ("mi300x", "mi300x"),
)  # fmt: skip
"""What a driver calls a GPU -> its name here, the first that is found as whole words."""

LINK, HOST = 25e9, 50e9
"""Bytes/s between host and device, and of arithmetic on main memory; rules of thumb."""


def host_update_seconds(gradients: int, trained: int) -> float:
    """Time of `adamw_cpu`: gradients and weights travel, and a float32 master with two moments is read and written."""
    return 2 * gradients / LINK + 28 * trained / HOST


def find_device(name: str) -> Device:
    """The device of that name, or the visible GPU for "here"; ConfigError: unknown, or none is visible."""
    if name in DEVICES:
        return DEVICES[name]
    if name != "here":
        raise ConfigError(f"--device: {name}: unknown; {suggest(name, ['here', *DEVICES])}")
    import torch

    if not torch.cuda.is_available():
        raise ConfigError(f"--device: none given, and no GPU is visible here; valid: {', '.join(DEVICES)}")
    about = torch.cuda.get_device_properties(0)
    speed = DEVICES.get(known_as(about.name) or "")
    if speed is None:
        raise ConfigError(f"--device: here: no figures of {about.name}; name one like it: {', '.join(DEVICES)}")
    return replace(speed, name=about.name, memory=about.total_memory)


def known_as(name: str) -> str | None:
    """The name here of a GPU as its driver calls it, such as "NVIDIA A100-SXM4-80GB"."""
    words = f" {re.sub(r'[-_ ]+', ' ', name.lower())} "
    return next((known for wanted, known in NAMES if f" {wanted} " in words), None)
