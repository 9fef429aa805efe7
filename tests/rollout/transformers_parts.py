"""An in-process engine over weights of its own, and the plain forward pass that its log-probs are compared with."""

from __future__ import annotations

import copy

import torch

from swift.models.forward import TokenSequence, padded_logits
from swift.rollout.engines.transformers import TransformersEngine
from swift.types import Request, SamplingParams

PROMPT = [40, 41, 42, 43, 44]


def ask(name="r", prompt=PROMPT, **sampling):
    return Request(name, prompt, SamplingParams(**{"max_new_tokens": 12, "seed": 7, **sampling}))


def copy_engine(model, **options):
    """An engine whose own copy starts with the weights of `model`."""
    start = copy.deepcopy(model)
    return TransformersEngine(copy.deepcopy(start), eos_token_ids=[], reload=lambda: copy.deepcopy(start), **options)


def noisy(model, seed=1, scale=0.2):
    changed = copy.deepcopy(model).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in changed.parameters():
            parameter.add_(scale * torch.randn(parameter.shape, generator=generator).to(parameter.dtype))
    return changed


def gap(model, request, completion):
    """Largest difference of log-probs to a plain forward of `model`."""
    with torch.no_grad():
        logits = padded_logits(model.eval(), [TokenSequence(request.prompt_ids, completion.token_ids)]).float()
    expected = logits.log_softmax(-1).gather(1, torch.tensor(completion.token_ids)[:, None])[:, 0]
    return float((torch.tensor(completion.logprobs) - expected).abs().max())


def sampled(engine, request=None):
    (completion,) = engine.generate([request or ask()])
    return completion


def load(folder):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder).eval()
