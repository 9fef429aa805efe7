"""`--autocast`: float32 weights, whose products are computed in bfloat16.

torch's autocast casts weights and inputs of matrix products, and leaves the rest as it is: the residual stream, norms
and the sum of gradients are float32. The backward pass needs no context. A model knows what it autocasts to, so that
every pass of it does: of the policy, the old policy, the reference, features, and sampling with the trainer's model.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from swift.models.attention.interface import transformers_model


def autocast_dtype(model: nn.Module) -> torch.dtype | None:
    """The type that products of a model, which may be wrapped, are cast to; None if they are not."""
    dtype: torch.dtype | None = getattr(transformers_model(model), "_autocast_dtype", None)
    return dtype


def set_autocast(model: Any, name: str | None) -> None:
    """Let the passes of a transformers model cast to the type of this name; copies of it do, too."""
    if name is not None:
        model._autocast_dtype = getattr(torch, name)


def autocasting(model: nn.Module) -> AbstractContextManager[Any]:
    """Around a forward pass of `model`."""
    dtype = autocast_dtype(model)
    return nullcontext() if dtype is None else torch.autocast(transformers_model(model).device.type, dtype=dtype)
