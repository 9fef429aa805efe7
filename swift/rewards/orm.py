"""The names under which 4.x plugins import the built-in reward functions."""

from swift.plugin.registry import ORM, AsyncORM, orms
from swift.rewards.functions import (
    CosineReward,
    Format,
    FormatStrict,
    MathAccuracy,
    ReActFormat,
    ReasoningGym,
    RepetitionPenalty,
    SoftOverlong,
)

__all__ = [
    "ORM",
    "AsyncORM",
    "CosineReward",
    "Format",
    "FormatStrict",
    "MathAccuracy",
    "ReActFormat",
    "ReasoningGym",
    "RepetitionPenalty",
    "SoftOverlong",
    "orms",
]
