"""The interface for users' code: register a part here, and `swift` finds it by name.

A plugin file is plain Python. It imports what it extends and assigns to a registry:

    from swift.plugin import ORM, orms

    class Short(ORM):
        def __call__(self, completions, **kwargs):
            return [1.0 if len(text) < 100 else 0.0 for text in completions]

    orms["short"] = Short

`--external_plugins my_plugin.py --reward_funcs short` then uses it. `rm_plugins`, `losses`, `advantages`, `optimizers`,
`backends`, `rollout_functions`, `multi_turns`, `envs`, `tools`, `tool_parsers`, `methods` and `presets` work alike.
Nothing in this package imports torch or another part of `swift`.
"""

from swift.plugin.loader import load_external_plugins
from swift.plugin.multi_turn import Env, MultiTurnScheduler, RolloutChoice, RolloutInferRequest
from swift.plugin.registry import (
    ORM,
    REGISTRIES,
    AsyncORM,
    Registry,
    advantages,
    backends,
    envs,
    inference_backends,
    losses,
    methods,
    multi_turns,
    optimizers,
    orms,
    presets,
    rm_plugins,
    rollout_funcs,
    rollout_functions,
    tool_parsers,
    tools,
)

__all__ = [
    "ORM",
    "REGISTRIES",
    "AsyncORM",
    "Env",
    "MultiTurnScheduler",
    "Registry",
    "RolloutChoice",
    "RolloutInferRequest",
    "advantages",
    "backends",
    "envs",
    "inference_backends",
    "load_external_plugins",
    "losses",
    "methods",
    "multi_turns",
    "optimizers",
    "orms",
    "presets",
    "rm_plugins",
    "rollout_funcs",
    "rollout_functions",
    "tool_parsers",
    "tools",
]
