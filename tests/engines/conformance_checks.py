"""The gap to the oracle, adapters and other things that several conformance cases need."""

from __future__ import annotations

import asyncio
import copy
import weakref

import oracle
import pytest
import torch
from sources import on_a_loop

from swift.rollout.loop import idle

TOLERANCE = 1e-5
"""Of a log-prob at temperature 1; logits that are divided by a temperature have their rounding divided too."""
EXACT = weakref.WeakKeyDictionary()
"""Models that were asked for -> the same in float64; no case changes a model that it has asked."""
LONG = 450
"""Tokens of a completion that lasts until something stops it; with its prompt it fits the context."""


def gap(model, request, completion):
    """Largest difference between the engine's log-probs and those of the oracle, whose own rounding is none of it."""
    if model not in EXACT:
        EXACT[model] = copy.deepcopy(model).double()
    return oracle.gap(EXACT[model], request, completion)


@torch.no_grad()
def likeliest(model, prompt, length, *, until=None):
    """The greedy completion, up to `until`."""
    ids, state = [], None
    while len(ids) < length and (not ids or ids[-1] != until):
        output = model(input_ids=torch.tensor([ids[-1:] or prompt]), past_key_values=state, use_cache=True)
        state = output.past_key_values
        ids.append(int(output.logits[0, -1].argmax()))
    return ids


def while_it_samples(engine, request, work):
    """The completion of a request that has begun, and has not ended, when `work()` is done on its thread."""

    async def sample():
        task = asyncio.create_task(engine.generate(request))
        await idle()  # it has asked
        await idle()  # it has begun
        work()
        return await task

    return on_a_loop(sample)


def need(subject, has, what):
    if not has:
        pytest.skip(f"{subject.backend.name}: no {what}")
