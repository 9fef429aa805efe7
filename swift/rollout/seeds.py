"""Seeds of samples, and the random numbers of the transformers engine: a pure function of a sample and a position.

The seed of a sample depends on (run seed, prompt id, launch of that prompt, sample index) only. Step, rank, batch and
number of workers do not change a sample, which makes exact resume possible.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np


def sample_seed(run_seed: int, prompt_id: str, launch: int, sample: int) -> int:
    """The 63-bit seed of a sample. launch: number of earlier launches of the prompt.

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
    """`count` uniforms in [0, 1) as float64, one per token; a larger count does not change the first ones."""
    import numpy as np

    return np.random.Generator(np.random.Philox(key=seed)).random(count)
