"""ms-swift's names of engines and their requests, for plugins written for it."""

from swift.infer_engine.engine import TransformersEngine
from swift.infer_engine.protocol import (
    ChatCompletionResponse,
    ChatCompletionResponseChoice,
    InferRequest,
    RequestConfig,
    RolloutInferRequest,
)

__all__ = [
    "ChatCompletionResponse",
    "ChatCompletionResponseChoice",
    "InferRequest",
    "RequestConfig",
    "RolloutInferRequest",
    "TransformersEngine",
]
