"""The names under which 3.x plugins import the built-in reward functions: those of `swift.rewards.orm`."""

from swift.rewards.orm import *  # noqa: F403
from swift.rewards.orm import __all__ as __all__
