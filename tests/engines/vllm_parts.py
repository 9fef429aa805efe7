"""What the tests of the vLLM engine share: requests, and the log-probs that a plain forward pass gives."""

from __future__ import annotations

import pytest
from oracle import gap

from swift.errors import ResourceError
from swift.rollout.engines.spec import EngineSpec
from swift.types import Request, SamplingParams

ENDS = (258, 256)
"""End tokens of the tiny models."""
LIMIT = 1e-5
"""Largest difference of a log-prob in float32."""


def require_vllm():
    """Skip the calling module where no supported vLLM is installed."""
    from swift.rollout.engines.vllm import require

    try:
        require()
    except ResourceError as error:
        pytest.skip(str(error), allow_module_level=True)


def spec_of(folder, **changes):
    settings = {"eos_token_ids": ENDS, "max_model_len": 256, "max_num_seqs": 32, **changes}
    return EngineSpec(backend="vllm", model=str(folder), **settings)


def request(name="r", prompt=range(5, 45), *, tokens=24, seed=0, **sampling):
    return Request(str(name), list(prompt), SamplingParams(max_new_tokens=tokens, seed=seed, **sampling))


def requests(count=6, **sampling):
    """Prompts of different lengths, each with a seed of its own."""
    return [request(i, range(5 + 7 * i % 40, 45 + 9 * i % 30), seed=i, **sampling) for i in range(count)]


def sample(engine, wanted):
    return {done.request_id: done for done in engine.sample(wanted)}


def ended(engine):
    """The completions of what was submitted, step by step; ends when nothing is outstanding, or it is paused."""
    while (done := engine.advance()) is not None:
        yield from done


def drift(engine, model, wanted=None):
    """Largest difference between the sampler's log-probs and those of a plain forward pass."""
    wanted = wanted if wanted is not None else requests()
    found = sample(engine, wanted)
    assert set(found) == {one.request_id for one in wanted}
    return max(gap(model, one, found[one.request_id]) for one in wanted)
