"""Counter-based sampling: the randomness of a token is a pure function of what is sampled, not of when.

A sample's seed depends on (run seed, prompt id, launch of that prompt, sample index) only, so that step, rank,
batch and worker count never change a sample. This is what makes exact resume possible.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np


def sample_seed(run_seed: int, prompt_id: str, launch: int, sample: int) -> int:
    """The 63-bit seed of one sample; `launch` is the number of earlier launches of that prompt.

    >>> sample_seed(42, "p0", 0, 0)
    3416702877527238213
    """
    return seed_of(run_seed, prompt_id, launch, sample)


def seed_of(*parts: int | str) -> int:
    """BLAKE2b with an 8-byte digest of the texts joined by U+001F, read little-endian, top bit cleared."""
    text = "\x1f".join(map(str, parts))
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") & (2**63 - 1)


def sample_uniforms(seed: int, count: int) -> np.ndarray:
    """`count` uniforms in [0, 1) as float64, the first of which belong to the first tokens whatever `count` is."""
    import numpy as np

    return np.random.Generator(np.random.Philox(key=seed)).random(count)
