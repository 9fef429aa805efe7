"""Requests, the oracle and the gap to it, for the conformance cases.

The oracle is a plain transformers forward pass over one sequence.
"""

from __future__ import annotations

import copy
import weakref

import pytest
import torch
from conformance_parts import with_noise

from swift.models.checkpoint_tensors import read_adapter
from swift.rollout.weights.base import AdapterWeights
from swift.types import Request, SamplingParams

TOLERANCE = 1e-5
"""Of a log-prob at temperature 1; logits that are divided by a temperature have their rounding divided too."""
PROMPT = list(b"The quick brown fox jumps over the lazy dog.")
EXACT = weakref.WeakKeyDictionary()
"""Models that were asked for -> the same in float64; no case changes a model that it has asked."""
LONG = 450
"""Tokens of a completion that lasts until something stops it; with its prompt it fits the context."""


def ask(request_id, prompt=PROMPT, **sampling):
    return Request(str(request_id), list(prompt), SamplingParams(**{"max_new_tokens": 16, **sampling}))


def run(engine, requests):
    done = {}
    for completion in engine.generate(requests):
        assert completion.request_id not in done, "came twice"
        done[completion.request_id] = completion
    assert set(done) == {request.request_id for request in requests}
    return [done[request.request_id] for request in requests]


@torch.no_grad()
def all_logprobs(model, prompt, ids, temperature=1.0):
    """[T, V]: the distribution of each token of a completion."""
    logits = model(input_ids=torch.tensor([[*prompt, *ids]])).logits[0, len(prompt) - 1 : -1]
    return (logits / temperature).log_softmax(-1)


def oracle(model, request, ids):
    full = all_logprobs(model, request.prompt_ids, ids, request.sampling.temperature or 1.0)
    return full.gather(1, torch.tensor(ids)[:, None])[:, 0]


def gap(model, request, completion):
    """Largest difference between the engine's log-probs and those of the oracle, whose own rounding is none of it."""
    if model not in EXACT:
        EXACT[model] = copy.deepcopy(model).double()
    exact = oracle(EXACT[model], request, completion.token_ids)
    return float((torch.tensor(completion.logprobs, dtype=torch.float64) - exact).abs().max())


def noisy(subject, *, seed=11, scale=0.05, only=""):
    return with_noise(copy.deepcopy(subject.model), seed=seed, scale=scale, only=only)


@torch.no_grad()
def likeliest(model, prompt, length, *, until=None):
    """The greedy completion, up to `until`."""
    ids, state = [], None
    while len(ids) < length and (not ids or ids[-1] != until):
        output = model(input_ids=torch.tensor([ids[-1:] or prompt]), past_key_values=state, use_cache=True)
        state = output.past_key_values
        ids.append(int(output.logits[0, -1].argmax()))
    return ids


def need(subject, has, what):
    if not has:
        pytest.skip(f"{subject.backend.name}: no {what}")


def with_adapter(subject, *, seed, rank=4, alpha=16.0, **options):
    """The oracle with a LoRA adapter that changes something, and the adapter alone."""
    from peft import LoraConfig, get_peft_model

    options = {"target_modules": ["q_proj", "k_proj", "v_proj", "o_proj", "up_proj", "down_proj"], **options}
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        policy = get_peft_model(
            copy.deepcopy(subject.model), LoraConfig(task_type="CAUSAL_LM", r=rank, lora_alpha=alpha, **options)
        ).eval()
    with_noise(policy, seed=seed, scale=0.05, only="lora_")
    return policy, AdapterWeights(*read_adapter(policy))
