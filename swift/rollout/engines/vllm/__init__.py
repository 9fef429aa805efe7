"""vLLM in this process, behind the engine contract; importing this package does not import vLLM."""

from __future__ import annotations

from typing import TYPE_CHECKING

from swift.rollout.engines.vllm.versions import require_version as require

if TYPE_CHECKING:
    from swift.rollout.engines.spec import EngineSpec
    from swift.rollout.engines.vllm.engine import VLLMEngine

__all__ = ["build", "require"]


def build(spec: EngineSpec) -> VLLMEngine:
    """Build the engine in this process; with torch.distributed initialised, all ranks call this together.

    Raises:
        ResourceError: vLLM is missing or not supported, or there is too little memory.
        ConfigError: arguments or a model that vLLM refuses.
        EngineError: vLLM failed to start.
    """
    from swift.rollout.engines.vllm.engine import VLLMEngine

    return VLLMEngine(spec)
