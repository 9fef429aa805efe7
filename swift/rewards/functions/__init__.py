"""The built-in reward functions: one file per idea, each usable outside a run.

    >>> from swift.rewards.orm import Format
    >>> Format()(["<think>one and one</think><answer>2</answer>"])
    [1.0]

None of them imports torch; the ones that need a library (math-verify, reasoning-gym) import it when they
are built.
"""

from swift.plugin.registry import orms
from swift.rewards.functions.accuracy import MathAccuracy
from swift.rewards.functions.format import Format, FormatStrict, ReActFormat
from swift.rewards.functions.gym import ReasoningGym
from swift.rewards.functions.length import CosineReward, SoftOverlong
from swift.rewards.functions.repetition import RepetitionPenalty

__all__ = [
    "CosineReward",
    "Format",
    "FormatStrict",
    "MathAccuracy",
    "ReActFormat",
    "ReasoningGym",
    "RepetitionPenalty",
    "SoftOverlong",
]

orms["accuracy"] = MathAccuracy
orms["format"] = Format
orms["format_strict"] = FormatStrict
orms["cosine"] = CosineReward
orms["repetition"] = RepetitionPenalty
orms["soft_overlong"] = SoftOverlong
orms["reasoning_gym"] = ReasoningGym
orms["react_format"] = ReActFormat
