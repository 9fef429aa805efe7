"""Parameters that leave their device while an engine sleeps, and come back."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from swift.errors import EngineAsleep
from swift.rollout.engines.base import ALL_TAGS, SleepLevel, SleepReport, Tag


class WeightMemory:
    """Parameters that can leave their device (level 1) or be given up (level 2), and come back.

    Buffers stay: they are small, and those of rotary positions come with no update.

    Args:
        model: its parameters, awake.
    """

    def __init__(self, model: nn.Module) -> None:
        self.asleep: set[Tag] = set()
        self._parameters = list(model.parameters())
        self._shapes = [parameter.shape for parameter in self._parameters]
        self._device = self._parameters[0].device
        self.lost = False
        """Level 2 has dropped the weights, and nothing has filled them since."""

    @property
    def state(self) -> str:
        """Why nothing can be sampled, in a few words; "" when something can."""
        if self.asleep:
            return f"asleep ({', '.join(sorted(self.asleep))})"
        return "awake, but sleep(2) dropped its weights" if self.lost else ""

    def sleep(self, level: SleepLevel) -> SleepReport:
        """Release memory at level 1 or 2; deeper than before or as deep."""
        resident, reserved = self._resident(), _reserved(self._device)
        self.asleep = set(ALL_TAGS)
        if level == 2:
            self.drop()
        elif self._device.type == "cpu":
            return SleepReport(0, f"weights stay resident ({resident >> 20} MiB): host and device are the same memory")
        else:
            for one in self._parameters:
                one.data = one.data.to("cpu")
        if self._device.type == "cpu":
            return SleepReport(resident - self._resident())
        torch.accelerator.empty_cache()
        return SleepReport(reserved - _reserved(self._device))

    def _resident(self) -> int:
        return sum(one.untyped_storage().nbytes() for one in self._parameters)

    def drop(self) -> None:
        """Give the parameters' memory up, whatever else holds on to them."""
        self.lost = True
        for one in self._parameters:
            one.data = torch.empty(0, dtype=one.dtype, device=self._device)

    def wake(self, tags: Sequence[Tag]) -> bool:
        """Take memory back; what was dropped comes back with any content. Returns whether all is awake.

        Raises:
            EngineAsleep: "kv_cache" while the weights sleep.
        """
        if "weights" in self.asleep and "kv_cache" in tags and "weights" not in tags:
            raise EngineAsleep("engine: transformers: wake(kv_cache): its weights are asleep; wake them first")
        if "weights" in tags and "weights" in self.asleep:
            for one, shape in zip(self._parameters, self._shapes, strict=True):
                gone = one.shape != shape
                one.data = one.new_empty(shape, device=self._device) if gone else one.data.to(self._device)
        self.asleep -= set(tags)
        return not self.asleep

    def filled(self) -> None:
        """An update has written every parameter."""
        self.lost = False


def _reserved(device: torch.device) -> int:
    return torch.accelerator.memory_reserved(device) if device.type != "cpu" else 0
