"""The built-in reward functions under the names that plugins of version 4.x import."""

from swift.plugin.registry import ORM, AsyncORM, orms
from swift.rewards.functions.accuracy import MathAccuracy
from swift.rewards.functions.cosine import CosineReward
from swift.rewards.functions.format import Format, FormatStrict, ReActFormat
from swift.rewards.functions.gym import ReasoningGym
from swift.rewards.functions.repetition import RepetitionPenalty
from swift.rewards.functions.soft_overlong import SoftOverlong

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
