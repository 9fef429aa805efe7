"""`--activation_offloading` of GRPO and EBFT: activations wait on the host for the backward pass."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import nn


def offloading(model: nn.Module) -> Callable[[], contextlib.AbstractContextManager[Any]]:
    """Gives what stands around a forward pass of `model` with its backward pass; on a CPU, nothing.

    A pass that failed, as one does without memory, leaves nothing to the next.
    """
    if not torch.accelerator.is_available():
        return contextlib.nullcontext
    from trl.models.activation_offloading import OffloadActivations

    activations = OffloadActivations()

    def around_pass() -> contextlib.AbstractContextManager[Any]:
        activations.update_model_params(model)  # which may have been on the host, and back, since the last one
        return activations

    return around_pass
