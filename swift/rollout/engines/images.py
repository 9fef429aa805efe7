"""Whether an inference library takes the images of a model, which is asked before weights are loaded."""

from __future__ import annotations

from importlib.util import find_spec

from swift.errors import ConfigError, ResourceError

LMDEPLOY = (
    "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe", "gemma3", "internvl", "glm4v"
)  # fmt: skip
"""Model types of which LMDeploy 0.18 makes the tensors of images from token ids, as transformers does."""


def require_images(library: str, model_type: str) -> None:
    """Return if the library takes images of such a model, as far as it is known before its start.

    Raises:
        ResourceError: vLLM lacks a package.
        ConfigError: LMDeploy does not take them.
    """
    if library == "vllm" and find_spec("torchvision") is None:
        raise ResourceError(
            "vllm: No module named 'torchvision', which it needs for a model that sees images; pip install torchvision"
        )
    if library == "lmdeploy" and model_type not in LMDEPLOY:
        raise ConfigError(
            f"--use_lmdeploy: true: LMDeploy takes no images for a model of type {model_type}; use --use_vllm true, or "
            "--infer_backend transformers"
        )
