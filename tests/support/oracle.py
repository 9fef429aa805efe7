"""Requests to an engine of any kind, and the plain transformers forward pass that its log-probs are compared with."""

from __future__ import annotations

import copy

import torch

from swift.types import Request, SamplingParams

PROMPT = list(b"The quick brown fox jumps over the lazy dog.")


def ask(name="r", prompt=PROMPT, **sampling):
    return Request(str(name), list(prompt), SamplingParams(**{"max_new_tokens": 12, **sampling}))


def run(engine, requests):
    """The completions in the order of the requests; each comes once."""
    done = {}
    for completion in engine.sample(requests):
        assert completion.request_id not in done, "came twice"
        done[completion.request_id] = completion
    assert set(done) == {request.request_id for request in requests}
    return [done[request.request_id] for request in requests]


def first_step(trainer):
    """Loss and gradient of the first batch."""
    batch = next(iter(trainer.get_train_dataloader()))
    loss = trainer.compute_loss(trainer.model.train(), trainer._prepare_inputs(batch))
    loss.backward()
    return loss.item(), {name: p.grad for name, p in trainer.model.named_parameters() if p.grad is not None}


@torch.no_grad()
def all_logprobs(model, prompt, ids, temperature=1.0):
    """[T, V]: the distribution of each token of a completion."""
    logits = model(input_ids=torch.tensor([[*prompt, *ids]])).logits[0, len(prompt) - 1 : -1]
    return (logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature).log_softmax(-1)


def logprobs_of(model, prompt, ids, temperature=1.0):
    return all_logprobs(model, prompt, ids, temperature).gather(1, torch.tensor(ids)[:, None])[:, 0]


def difference(model, prompt, ids, logprobs, temperature=1.0):
    """Largest difference between reported log-probs and those of the model."""
    expected = logprobs_of(model, prompt, ids, temperature)
    return float((torch.tensor(logprobs, dtype=expected.dtype) - expected).abs().max())


def gap(model, request, completion):
    """The same of a completion; greedy ones report the distribution at temperature 1."""
    temperature = request.sampling.temperature or 1.0
    return difference(model, request.prompt_ids, completion.token_ids, completion.logprobs, temperature)


def load(folder, dtype=torch.float32):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()


@torch.no_grad()
def with_noise(model, *, seed, scale=0.02, only=""):
    """Seeded noise on the parameters whose name contains `only`, in place; returns the model."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if only in name:
            parameter.add_((scale * torch.randn(parameter.shape, generator=generator)).to(parameter.dtype))
    return model


def noisy(model, *, seed=1, scale=0.05, only=""):
    """A copy with noise."""
    return with_noise(copy.deepcopy(model).eval(), seed=seed, scale=scale, only=only)


def with_adapter(model, *, seed, dtype=None, **options):
    """A copy with a LoRA adapter that changes something, in numbers of this type, and the adapter alone."""
    from peft import LoraConfig, get_peft_model

    from swift.models.checkpoint_tensors import read_adapter
    from swift.rollout.weights.base import AdapterWeights

    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "up_proj", "down_proj"]
    config = LoraConfig(task_type="CAUSAL_LM", **{"r": 4, "lora_alpha": 16, "target_modules": targets, **options})
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        policy = get_peft_model(copy.deepcopy(model), config).eval()
    with_noise(policy, seed=seed, scale=0.05, only="lora_")
    for name, parameter in policy.named_parameters():
        if dtype is not None and "lora_" in name:
            parameter.data.copy_(parameter.to(dtype))
    settings, tensors = read_adapter(policy)
    return policy, AdapterWeights(settings, {name: one.to(dtype or one.dtype) for name, one in tensors.items()})
