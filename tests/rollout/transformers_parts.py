"""An in-process engine over weights of its own."""

from __future__ import annotations

import copy

import oracle

from swift.rollout.engines.transformers import TransformersEngine

PROMPT = [40, 41, 42, 43, 44]


def ask(name="r", prompt=PROMPT, **sampling):
    return oracle.ask(name, prompt, **{"seed": 7, **sampling})


def copy_engine(model, **options):
    """An engine whose own copy starts with the weights of `model`."""
    start = copy.deepcopy(model)
    return TransformersEngine(copy.deepcopy(start), eos_token_ids=[], reload=lambda: copy.deepcopy(start), **options)


def sampled(engine, request=None):
    (completion,) = engine.sample([request or ask()])
    return completion
