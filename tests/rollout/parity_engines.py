"""A small engine with its own copy of the weights, written apart from the product's, in which faults can be planted.

It decodes padded batches with transformers' own attention and keeps keys and values of prompts until weights change.
Each fault is what an engine of the field has had; without one it is right, which the tests check first.
"""

from __future__ import annotations

import copy

import torch
from transformers import DynamicCache

from swift.models.attention.choice import choose_attention
from swift.models.forward import TokenSequence, completion_logits, pack
from swift.rl.logprobs import selected_logprobs
from swift.rollout.engines.base import Ack, Capabilities, EngineCounters
from swift.rollout.engines.stepped import SteppedEngine
from swift.rollout.parity import ParityCheck
from swift.rollout.weights.digest import StreamDigest
from swift.rollout.weights.policy import PolicyWeights, adapter_weights
from swift.rollout.weights.sync import WeightSync
from swift.trainers.distributed import Collectives
from swift.types import Completion, Prompt, SamplingParams

FAULTS = (
    "rope_base", "stale_weights", "head_not_sent", "temperature_ignored", "shifted", "padding_leak", "lora_scale",
    "undeclared_dtype", "end_missing", "end_doubled", "cache_kept",
)  # fmt: skip
END = 7
"""The end token of these engines: common enough in random text."""


class SmallEngine(SteppedEngine):
    def __init__(self, model, *, fault=None, declared="float32", logprob_support="full", lora=None):
        assert fault is None or fault in FAULTS
        super().__init__()
        self.model = copy.deepcopy(model).eval()
        self.model.config._attn_implementation = "eager"
        self.fault, self.lora = fault, lora
        self.counters = EngineCounters()
        self.capabilities = Capabilities(
            name="small", logprob_support=logprob_support, shares_weights=False, max_model_len=256,
            dtype=declared,
        )  # fmt: skip
        self._queue = []
        self._prompts = {}
        if fault == "undeclared_dtype":
            self.model.to(torch.bfloat16)
        if fault == "rope_base":
            rotary = self.model.model.rotary_emb
            rotary.inv_freq = rotary.inv_freq.pow(0.5)
        if fault == "head_not_sent":
            self.model.lm_head.weight = torch.nn.Parameter(self.model.lm_head.weight.detach().clone())

    def update(self, stream):
        arrived, digest = {}, StreamDigest()
        for bucket in stream:
            bucket.add_to(digest)
            arrived |= {name: tensor.clone() for name, tensor in bucket.tensors}
        if self.fault == "head_not_sent":
            arrived.pop("lm_head.weight")
        if self.fault != "stale_weights":
            self.model.load_state_dict(arrived, strict=False)
        self._forget(stream.version)
        return Ack(stream.version, stream.count, stream.nbytes, digest.hexdigest())

    def load_adapter(self, adapter, version):
        scale = adapter.config["lora_alpha"] / adapter.config["r"]
        if self.fault == "lora_scale":
            scale = 1.0
        base = {name: tensor.clone() for name, tensor in self.lora.items()}
        for name, first in adapter.tensors.items():
            if name.endswith("lora_A.weight"):
                second = adapter.tensors[name.replace("lora_A", "lora_B")]
                target = name.removeprefix("base_model.model.").replace("lora_A.weight", "weight")
                base[target] += scale * second @ first
        if self.fault != "stale_weights":
            self.model.load_state_dict(base, strict=False)
        self._forget(version)
        nbytes = sum(one.numel() * one.element_size() for one in adapter.tensors.values())
        return Ack(version, len(adapter.tensors), nbytes, adapter.digest())

    def _forget(self, version):
        self.version = version
        if self.fault != "cache_kept":
            self._prompts.clear()

    def submit(self, request):
        self._queue.append(request)

    def advance(self):
        batch, self._queue = self._queue[:8], self._queue[8:]
        return list(self._decode(batch)) if batch else None

    @torch.no_grad()
    def _decode(self, batch):
        width = max(len(one.prompt_ids) for one in batch)
        caches = [self._prompt(tuple(one.prompt_ids), width) for one in batch]
        cache = DynamicCache()
        for layer in range(self.model.config.num_hidden_layers):
            cache.update(*(torch.cat([one[part][layer] for one, _ in caches]) for part in (0, 1)), layer)
        mask = torch.tensor([[0] * (width - len(one.prompt_ids)) + [1] * len(one.prompt_ids) for one in batch])
        if self.fault == "padding_leak":
            mask = torch.ones_like(mask)
        logits = torch.cat([last for _, last in caches])
        ids, logprobs, reasons = ([[] for _ in batch] for _ in range(3))
        generators = [torch.Generator().manual_seed(one.sampling.seed) for one in batch]
        for step in range(max(one.sampling.max_new_tokens for one in batch)):
            tokens = self._draw(batch, logits, generators, ids, logprobs, reasons)
            if all(reasons):
                break
            mask = torch.cat([mask, torch.ones(len(batch), 1, dtype=mask.dtype)], dim=1)
            position = torch.tensor([[len(one.prompt_ids) + step] for one in batch])
            output = self.model(
                input_ids=tokens[:, None], position_ids=position, attention_mask=mask, past_key_values=cache
            )
            logits = output.logits[:, -1]
        for i, one in enumerate(batch):
            yield self._finished(one, ids[i], logprobs[i], reasons[i][0])

    def _draw(self, batch, logits, generators, ids, logprobs, reasons):
        tokens = []
        for i, one in enumerate(batch):
            sampling = one.sampling
            scores = logits[i].float()
            tempered = (scores / sampling.temperature).log_softmax(-1)
            token = int(torch.multinomial(tempered.exp(), 1, generator=generators[i]))
            raw = self.fault == "temperature_ignored" or self.capabilities.logprob_support == "raw"
            tokens.append(token)
            if not reasons[i]:
                ids[i].append(token)
                logprobs[i].append(float((scores.log_softmax(-1) if raw else tempered)[token]))
                if token in (END, *sampling.stop_token_ids):
                    reasons[i].append("stop")
                elif len(ids[i]) == sampling.max_new_tokens:
                    reasons[i].append("length")
        return torch.tensor(tokens)

    def _prompt(self, prompt, width):
        """Keys and values per layer, padded on the left, and the logits of the first token."""
        if prompt not in self._prompts:
            output = self.model(input_ids=torch.tensor([prompt]), use_cache=True)
            layers = output.past_key_values.layers
            self._prompts[prompt] = [one.keys for one in layers], [one.values for one in layers]
            self._prompts[prompt] += (output.logits[:, -1],)
        keys, values, last = self._prompts[prompt]
        pad = width - len(prompt)
        if self.fault == "cache_kept":
            last = self.model(input_ids=torch.tensor([prompt])).logits[:, -1]
        padded = [[torch.nn.functional.pad(one, (0, 0, pad, 0)) for one in part] for part in (keys, values)]
        return padded, last

    def _finished(self, request, ids, logprobs, reason):
        if self.fault == "shifted":
            logprobs = [logprobs[-1], *logprobs[:-1]]
        if self.fault == "end_missing" and reason == "stop":
            ids, logprobs = ids[:-1], logprobs[:-1]
        if self.fault == "end_doubled" and reason == "stop":
            ids, logprobs = [*ids, ids[-1]], [*logprobs, logprobs[-1]]
        return Completion(request.request_id, ids, logprobs, reason, versions=[(self.version, 0, len(ids))])

    def abort_submitted(self, request_ids):
        self._queue.clear()

    def close(self):
        pass


def scorer(model):
    """What the trainer's `score` computes."""

    def score(sequences: list[TokenSequence], temperature: float):
        choose_attention(model)
        tokens = pack(sequences)
        return selected_logprobs(completion_logits(model, tokens), tokens.target_ids, temperature=temperature)[0]

    return score


def make_check(engine, model, *, adapter=False, sampling=None, prompts=None, ranks=None, inner=None):
    """inner: what is asked for log-probs, where `model` is a wrapper."""
    ranks = ranks or Collectives()
    alone = (lambda: adapter_weights(model)) if adapter else None
    return ParityCheck(
        engine,
        score=scorer(inner or model),
        model=model,
        weight_sync=WeightSync(engine, source=lambda: PolicyWeights(model), adapter=alone, ranks=ranks),
        prompts=some_prompts() if prompts is None else prompts,
        sampling=sampling or SAMPLING,
        ranks=ranks,
        end_token_ids=[END],
        adapter_only=adapter,
    )


def some_prompts(count=8, length=None):
    """Prompts of different lengths, or of one."""
    generator = torch.Generator().manual_seed(3)
    lengths = [length or 5 + 3 * i for i in range(count)]
    ids = [torch.randint(10, 250, (n,), generator=generator).tolist() for n in lengths]
    return [Prompt(str(i), [], one) for i, one in enumerate(ids)]


SAMPLING = SamplingParams(max_new_tokens=24, temperature=0.7, top_p=0.9, stop=("x",))
