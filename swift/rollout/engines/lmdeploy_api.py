"""LMDeploy's names: which version is there, and everything of it that is used, looked up at the start.

Only 0.18 is supported: its Python API changes with every minor version.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from swift.errors import ResourceError

SUPPORTED = "0.18"

INSTEAD = "use --use_vllm true, or the transformers engine (neither flag)"

_SYMBOLS = {
    "Pipeline": "lmdeploy:Pipeline",
    "PytorchEngineConfig": "lmdeploy:PytorchEngineConfig",
    "TurbomindEngineConfig": "lmdeploy:TurbomindEngineConfig",
    "GenerationConfig": "lmdeploy:GenerationConfig",
    "ResponseType": "lmdeploy.messages:ResponseType",
    "UpdateParamsRequest": "lmdeploy.serve.openai.protocol:UpdateParamsRequest",
    "serialize_state_dict": "lmdeploy.utils:serialize_state_dict",
}


@dataclass(frozen=True, slots=True)
class LMDeploy:
    """The symbols in use, each under its own name."""

    version: str
    Pipeline: Callable[..., Any]
    PytorchEngineConfig: Callable[..., Any]
    TurbomindEngineConfig: Callable[..., Any]
    GenerationConfig: Callable[..., Any]
    ResponseType: Any
    UpdateParamsRequest: Callable[..., Any]
    serialize_state_dict: Callable[[dict[str, Any]], str]


def require() -> None:
    """Checks that LMDeploy can run here, before any weights are loaded.

    Raises:
        ResourceError: the package or a GPU is missing, or it is another version.
    """
    _require_package()
    _require_gpu()


def load_api() -> LMDeploy:
    """Import LMDeploy and look up every symbol in use.

    Raises:
        ResourceError: it cannot run here, another version, or a symbol that this version lacks.
    """
    require()
    found: dict[str, Any] = {}
    for name, place in _SYMBOLS.items():
        module, _, attribute = place.partition(":")
        try:
            found[name] = getattr(importlib.import_module(module), attribute)
        except (ImportError, AttributeError, OSError) as error:
            raise ResourceError(
                f"lmdeploy: {_version()}: {place} cannot be used ({type(error).__name__}: {error}); "
                f"install a working lmdeploy {SUPPORTED}, or {INSTEAD}"
            ) from error
    return LMDeploy(version=_version(), **found)


def _require_package() -> None:
    if importlib.util.find_spec("lmdeploy") is None:
        raise ResourceError(
            f"--use_lmdeploy: true: the package lmdeploy is not installed; pip install 'lmdeploy=={SUPPORTED}.*' on a "
            f"machine with an NVIDIA GPU, or {INSTEAD}"
        )
    if _version().split(".")[:2] != SUPPORTED.split("."):
        raise ResourceError(
            f"lmdeploy: {_version()}: only {SUPPORTED} is supported; pip install 'lmdeploy=={SUPPORTED}.*', or "
            f"{INSTEAD}"
        )


def _require_gpu() -> None:
    import torch

    if not torch.cuda.is_available():
        raise ResourceError(
            f"--use_lmdeploy: true: LMDeploy runs on NVIDIA GPUs only, and none is visible here; {INSTEAD}"
        )


def _version() -> str:
    return str(importlib.import_module("lmdeploy.version").__version__)
