"""Routes of completions: the experts that a rollout engine chose, as they travel with a completion and a sample."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from swift.errors import EngineError
from swift.types import Completion, Routes


def packed(parts: Sequence[np.ndarray], num_tokens: int) -> Routes:
    """The routes of the first `num_tokens` tokens of all parts, each [tokens, layers, top-k], uint8 or uint16."""
    routes = np.concatenate(parts)[:num_tokens]
    return Routes(routes.shape[1], routes.shape[2], routes.dtype.itemsize, routes.tobytes())


def routes_of(completion: Completion, num_prompt_tokens: int) -> np.ndarray | None:
    """The routes [tokens, layers, top-k] of the prompt and of the completion without its last token; None without.

    Raises EngineError: they are those of another number of tokens.
    """
    routes = completion.routes
    if routes is None:
        return None
    found = np.frombuffer(routes.experts, dtype=f"<u{routes.width}").reshape(-1, routes.num_layers, routes.top_k)
    computed = num_prompt_tokens + len(completion.token_ids) - 1
    if len(found) != computed:
        raise EngineError(
            f"request: {completion.request_id}: the engine has returned the experts of {len(found)} tokens, and it "
            f"computed {computed}; --moe_router_replay trainer, or off"
        )
    return found
