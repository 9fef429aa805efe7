"""The door for users' code: register here, `swift` calls it by name.

A plugin file is plain Python. It imports what it extends and assigns to a registry:

    from swift.plugin import ORM, orms

    class Short(ORM):
        def __call__(self, completions, **kwargs):
            return [1.0 if len(text) < 100 else 0.0 for text in completions]

    orms["short"] = Short

`--external_plugins my_plugin.py --reward_funcs short` then uses it. Nothing in this package imports torch.
"""

from swift.plugin.registry import (
    ORM,
    AsyncORM,
    Registry,
    advantage_estimators,
    inference_backends,
    losses,
    orms,
    rollout_funcs,
)

from swift.plugin.loader import load_external_plugins  # isort: skip
import swift.rewards.functions  # noqa: F401  registers the built-in functions

__all__ = [
    "ORM",
    "AsyncORM",
    "Registry",
    "advantage_estimators",
    "inference_backends",
    "load_external_plugins",
    "losses",
    "orms",
    "rollout_funcs",
]
