"""`python -m swift.planning.budget <words of a run>`: what a token of its micro-batches takes in memory, as JSON.

A run on an accelerator starts this beside itself (`swift.trainers.memory.traced`), while it checks and samples.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from typing import Any

from swift.errors import SwiftError, first_line


def bytes_of_run(words: Sequence[str]) -> int:
    """Bytes per token of the passes of `swift <words>`.

    Raises:
        SwiftError, NotImplementedError, RuntimeError: the policy cannot be traced.
    """
    from swift.arguments import parse
    from swift.arguments.derived import Machine
    from swift.models.policy import check_policy
    from swift.planning.kernels import kernel_of
    from swift.planning.step import bytes_per_token
    from swift.trainers.grpo.arguments import trainer_settings

    args: Any = parse(words[0], words[1:], os.environ, machine=Machine(True, 1)).args
    policy = check_policy(args, weights=False)
    if policy is None:
        raise NotImplementedError("code of its repository makes the model")
    settings, recomputes = trainer_settings(args), args.gradient_checkpointing
    return bytes_per_token(policy.train(), settings, recomputes=recomputes, kernel=kernel_of(args))


def main(words: Sequence[str]) -> None:
    """Print {"bytes": number}, or {"obstacle": text}."""
    try:
        found: dict[str, Any] = {"bytes": bytes_of_run(words)}
    except (SwiftError, NotImplementedError, RuntimeError) as error:
        found = {"obstacle": first_line(error)}
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1:])
