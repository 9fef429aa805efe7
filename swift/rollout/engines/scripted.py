"""Functions of tensors in TorchScript, where this version of PyTorch has it: the same operations without Python."""

from __future__ import annotations

import functools
import logging
import warnings
from collections.abc import Callable
from typing import Any

import torch

logger = logging.getLogger(__name__)


@functools.cache
def scripted(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` in TorchScript; as it is where TorchScript is missing or refuses it."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            script: Any = torch.jit.script(function)
    except Exception as error:  # whatever a later version says; the functions are the same
        logger.debug("%s runs without TorchScript: %s", function.__name__, error)
        return function
    return script  # type: ignore[no-any-return]
