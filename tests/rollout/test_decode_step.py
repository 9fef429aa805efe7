"""A decode step in TorchScript has the bits of the same functions called from Python, whatever the rows are like."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from swift.models import cpu_linear
from swift.models.forward import Span, choose_attention
from swift.rollout.engines import decode_step, plain_decoder
from swift.rollout.engines.plain_decoder import PlainDecoder, obstacle
from swift.rollout.engines.prompt_cache import Prefill, PromptCache
from swift.rollout.engines.scripted import scripted

needs_onednn = pytest.mark.skipif(not cpu_linear.available(), reason="no oneDNN for this processor")

STEPS = 40  # beyond the first room of 32


def decoder(family="qwen2", **more):
    torch.manual_seed(0)
    shape = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = AutoConfig.for_model(
        family,
        **{**shape, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 50, "sliding_window": None, **more},
    )
    model = AutoModelForCausalLM.from_config(config).eval()
    for parameter in model.parameters():
        parameter.data.add_(torch.randn_like(parameter), alpha=0.05)
    choose_attention(model)
    assert obstacle(model) is None
    found = PlainDecoder(model)
    with without_kernels():
        found.refresh()
    return found


@contextmanager
def without_kernels():
    """What machines without a compiler do; test_native_step.py compares the kernels with this."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plain_decoder, "kernels", lambda: None)
        yield


def decode(decoder, prompts, which, *, leaving=(), joining=(), compute):
    """Logits of every step, while rows leave and others come at the steps that are given."""
    spans, stream = [], []
    for length in prompts:
        spans.append(Span(len(stream), length))
        stream += [(7 * i + length) % 50 for i in range(length)]
    cache, prefill = PromptCache(), Prefill(spans)
    positions = torch.cat([torch.arange(length) for length in prompts])
    decoder.logits(torch.tensor(stream), positions, prefill)
    cache.add(prefill.captured, spans, which, [64] * len(which))
    rows = [(prompts[prompt], 0) for prompt in which]  # prompt tokens, own tokens
    outputs = []
    for step in range(STEPS):
        for at, keep in leaving:
            if step == at:
                cache.keep(keep)
                rows = [rows[i] for i in keep]
        for at, prompt in joining:
            if step == at:
                cache.add(prefill.captured, spans, [prompt], [64])
                rows.append((prompts[prompt], 0))
        cache.begin_step()
        tokens = torch.tensor([(11 * (start + own)) % 50 for start, own in rows])
        outputs.append(compute(tokens, torch.tensor([start + own for start, own in rows]), cache))
        rows = [(start, own + 1) for start, own in rows]
    return outputs


CASES = {
    "a batch of groups": ([5, 9, 9], [0] * 8 + [1] * 8 + [2] * 8, (), ()),
    "one row": ([5], [0], (), ()),
    "a long prompt": ([300], [0] * 5, (), ()),
    "rows that leave": ([5, 9], [0] * 8 + [1] * 8, ((3, [*range(14)]), (9, [0, 5, 13])), ()),
    "rows that come": ([5, 9], [0] * 8 + [1] * 3, (), ((4, 1), (20, 0))),
}


@needs_onednn
@torch.inference_mode()
@pytest.mark.parametrize("case", list(CASES))
@pytest.mark.parametrize(
    ("family", "more"),
    [("qwen2", {}), ("qwen3", {}), ("llama", {"mlp_bias": True, "attention_bias": True}), ("mistral", {})],
)
def test_all_layers_in_one_call_have_the_bits_of_one_after_the_other(family, more, case):
    found = decoder(family, **more)
    assert found._weights
    prompts, which, leaving, joining = CASES[case]
    at_once = decode(found, prompts, which, leaving=leaving, joining=joining, compute=found.step)
    singly = decode(found, prompts, which, leaving=leaving, joining=joining, compute=found.logits)
    assert all(torch.equal(one, other) for one, other in zip(at_once, singly, strict=True))


@needs_onednn
def test_torchscript_takes_the_functions_and_python_is_there_without_it(monkeypatch):
    assert isinstance(scripted(decode_step.decode), torch.jit.ScriptFunction)
    scripted.cache_clear()

    def refuse(*_):
        raise RuntimeError("gone")

    monkeypatch.setattr(torch.jit, "script", refuse)
    assert scripted(decode_step.decode) is decode_step.decode
    with torch.inference_mode():
        found = decoder()
        prompts, which, *_ = CASES["a batch of groups"]
        own = decode(found, prompts, which, compute=found.step)
    scripted.cache_clear()
    monkeypatch.undo()
    with torch.inference_mode():
        script = decode(found, prompts, which, compute=found.step)
    assert all(torch.equal(one, other) for one, other in zip(own, script, strict=True))


@needs_onednn
def test_other_activations_and_dropped_weights_take_one_layer_after_the_other():
    with torch.inference_mode():
        found = decoder("llama", hidden_act="gelu")
        assert not found._weights
        prompts, which, *_ = CASES["a batch of groups"]
        assert len(decode(found, prompts, which, compute=found.step)) == STEPS
    found = decoder()
    found.drop()
    assert not found._weights
