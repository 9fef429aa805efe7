"""The compiled kernels compute what the functions of `decode_step` compute, with every instruction set."""

from __future__ import annotations

import ctypes
import random
import shutil

import pytest
import torch
from peft import LoraConfig, get_peft_model
from test_decode_step import CASES, decode, decoder, without_kernels

from swift.errors import ConfigError
from swift.models import cpu_linear
from swift.models.cpu_panels import Panels
from swift.models.forward import Span
from swift.native import Kernels, Layer, Step, library_path
from swift.rollout.engines import decode_step, plain_decoder
from swift.rollout.engines.plain_decoder import PlainDecoder, obstacle
from swift.rollout.engines.prompt_cache import Prefill, PromptCache

pytestmark = pytest.mark.skipif(library_path() is None, reason="swift was installed without a compiler")
needs_onednn = pytest.mark.skipif(not cpu_linear.available(), reason="no oneDNN for this processor")

SETS = ("avx512", "avx2", "plain")


@pytest.fixture(scope="module", params=SETS)
def kernels(request, tmp_path_factory):
    copy = shutil.copy(library_path(), tmp_path_factory.mktemp("native") / f"{request.param}.so")  # its own choice
    try:
        return Kernels(ctypes.CDLL(str(copy)), request.param)
    except ConfigError:
        pytest.skip(f"this processor has no {request.param}")


def use(kernels, found):
    """Let a decoder take its weights again, for these kernels."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plain_decoder, "kernels", lambda: kernels)
        found.refresh()
    assert found._native is not None
    return found


FAMILIES = [
    ("qwen2", {}),
    ("qwen3", {}),
    ("llama", {"mlp_bias": True, "attention_bias": True}),
    ("mistral", {"num_attention_heads": 6, "num_key_value_heads": 1, "hidden_size": 96}),
    ("qwen2", {"num_attention_heads": 3, "num_key_value_heads": 3, "head_dim": 80, "hidden_size": 240}),
]


@needs_onednn
@torch.inference_mode()
@pytest.mark.parametrize("case", list(CASES))
@pytest.mark.parametrize(("family", "more"), FAMILIES)
def test_logits_are_those_of_pytorchs_operations(family, more, case, kernels):
    found = decoder(family, **more)
    prompts, which, leaving, joining = CASES[case]
    expected = decode(found, prompts, which, leaving=leaving, joining=joining, compute=found.logits)
    use(kernels, found)
    own = decode(found, prompts, which, leaving=leaving, joining=joining, compute=found.step)
    for one, other in zip(own, expected, strict=True):
        assert one.shape == other.shape
        assert (one - other).abs().max() < 1e-5 * other.std()


@needs_onednn
@torch.inference_mode()
def test_a_row_has_the_same_bits_beside_any_others_and_with_any_number_of_threads(kernels):
    found = use(kernels, decoder("qwen3"))
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        many = decode(found, [5, 140, 30], [1, 0, 0, 2, 2, 1, 0, 0, 1], compute=found.step)
        torch.set_num_threads(1)
        alone = decode(found, [5, 140, 30], [1], compute=found.step)
        again = decode(found, [5, 140, 30], [1, 0, 0, 2, 2, 1, 0, 0, 1], compute=found.step)
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(one, other) for one, other in zip(many, again, strict=True))
    assert all(torch.equal(one[:1], other) for one, other in zip(many, alone, strict=True))


def attend(kernels, cache, states, heads, scale=1.0):
    """Attention of one layer without rotary positions."""
    prompt_keys, _, own_keys, _ = cache.layers[0]
    _, groups, depth, width = prompt_keys.shape
    shared, room = heads // groups, own_keys.shape[4]
    share = (2 * shared + 1) * depth + shared * (width + room)
    slots, own, prompts = cache.rows()
    rows, threads = len(slots), 2
    keep = torch.zeros(rows, dtype=torch.int64), torch.ones(1, depth), torch.zeros(1, depth)
    workspace, output = torch.empty(threads * share), torch.full((rows, heads * depth), torch.nan)
    layer = Layer(
        *(part.data_ptr() for part in cache.layers[0]),
        *(None, None, heads, groups, depth, width, own_keys.shape[2], room, 0.0, scale),
    )
    pointers = [part.data_ptr() for part in (slots, own, prompts, *keep, states, output, workspace)]
    kernels.attend(ctypes.byref(layer), ctypes.byref(Step(*pointers, share, rows, threads)))
    return output


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("heads", "groups", "depth"), [(4, 2, 16), (3, 3, 32), (7, 1, 48), (4, 1, 128)])
def test_attention_of_rows_that_come_and_go_against_float64(seed, heads, groups, depth, kernels):
    chance = random.Random(seed)
    torch.manual_seed(seed)
    cache, rows = PromptCache(), []
    for _ in range(60):
        if not rows or chance.random() < 0.1:
            lengths = [chance.choice([1, 7, 16, 140]) for _ in range(chance.randint(1, 3))]
            spans = [Span(sum(lengths[:i]), length) for i, length in enumerate(lengths)]
            keys, values = torch.randn(2, sum(lengths), groups, depth)
            which = [chance.randrange(len(spans)) for _ in range(chance.randint(1, 6))]
            cache.add([(keys, values)], spans, which, [60] * len(which))
            rows += [(keys[spans[i].start : spans[i].stop], values[spans[i].start : spans[i].stop]) for i in which]
        states = torch.randn(len(rows), heads + 2 * groups, depth)
        query, key, value = states.split([heads, groups, groups], 1)
        cache.begin_step()
        found = attend(kernels, cache, states, heads, scale=depth**-0.5)
        rows = [
            (torch.cat([k, a[None]]), torch.cat([v, b[None]])) for (k, v), a, b in zip(rows, key, value, strict=True)
        ]
        for i, (k, v) in enumerate(rows):
            k, v = (part.double().repeat_interleave(heads // groups, 1) for part in (k, v))
            weights = torch.einsum("hd,thd->ht", query[i].double() * depth**-0.5, k).softmax(-1)
            expected = torch.einsum("ht,thd->hd", weights, v).flatten()
            assert (found[i] - expected).abs().max() < 3e-6
        kept = [i for i in range(len(rows)) if chance.random() > 0.05]
        rows = [rows[i] for i in kept]
        cache.keep(kept)


def test_a_row_that_is_not_numbers_spoils_no_other_and_stays_visible(kernels):
    cache = PromptCache()
    keys, values = torch.randn(2, 30, 2, 16)
    cache.add([(keys, values)], [Span(0, 10), Span(10, 20)], [0, 0, 1], [16] * 3)
    for broken in (torch.nan, torch.inf):
        cache.begin_step()
        states = torch.randn(3, 8, 16)
        states[1] = broken
        assert attend(kernels, cache, states, 4).isfinite().all(1).tolist() == [True, False, True]


def test_scores_far_apart_are_the_limit_of_softmax(kernels):
    cache = PromptCache()
    keys, values = torch.zeros(2, 3, 1, 16)
    keys[1, 0, 0] = 1000.0
    values[:, 0, 0] = torch.tensor([1.0, 2.0, 3.0])
    cache.add([(keys, values)], [Span(0, 3)], [0], [16])
    cache.begin_step()
    states = torch.zeros(1, 3, 16)
    states[0, 0, 0] = 100.0
    found = attend(kernels, cache, states, 1)
    assert found[0, 0] == 2.0 and not found[0, 1:].any()


@pytest.mark.parametrize("width", [16, 48, 128, 1024])
@pytest.mark.parametrize("threads", [1, 2])
def test_norms_and_gates_against_float64(width, threads, kernels):
    torch.manual_seed(0)
    hidden, added, weight = torch.randn(13, width), torch.randn(13, width), torch.rand(width)
    expected_sum = hidden.double() + added.double()
    output = torch.empty_like(hidden)
    kernels.add_norm(
        hidden.data_ptr(), added.data_ptr(), weight.data_ptr(), 1e-6, output.data_ptr(), 13, width, threads
    )
    expected = decode_step.rms_norm(expected_sum, weight.double(), torch.tensor([1e-6], dtype=torch.float64))
    assert (hidden - expected_sum).abs().max() < 1e-6
    assert (output - expected).abs().max() < 1e-6
    before = hidden.clone()
    kernels.add_norm(hidden.data_ptr(), None, weight.data_ptr(), 1e-6, output.data_ptr(), 13, width, threads)
    assert torch.equal(hidden, before)
    both = torch.randn(13, 2 * width) * 10
    both[0, :4] = torch.tensor([-1000.0, 1000.0, torch.nan, 0.0])
    both[0, width + 1] = 1.0
    ups = both.data_ptr() + 4 * width
    kernels.gate(both.data_ptr(), ups, output.data_ptr(), 13, width, 2 * width, threads)
    gate, up = both.double().chunk(2, -1)
    expected = torch.nn.functional.silu(gate) * up
    assert output[0, 2].isnan()
    error = (output - expected) / (1 + expected.abs())
    assert error.nan_to_num().abs().max() < 1e-6


@needs_onednn
@torch.inference_mode()
@pytest.mark.parametrize(
    "more", [{"hidden_size": 72}, {"head_dim": 24}, {"intermediate_size": 100}, {"hidden_act": "gelu"}]
)
def test_other_widths_and_activations_are_left_to_pytorch(more):
    found = decoder("llama", **more)
    found.refresh()
    assert found._native is None
    prompts, which, *_ = CASES["a batch of groups"]
    assert decode(found, prompts, which, compute=found.step)[-1].isfinite().all()


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("width", "depth"), [(32, 16), (256, 128), (263, 40), (7, 3), (1, 1), (96, 1000)])
def test_products_with_panels_are_those_of_float64_and_a_row_has_the_same_bits_anywhere(width, depth, bias, kernels):
    torch.manual_seed(0)
    weight, offsets = torch.randn(width, depth), torch.randn(width) if bias else None
    panels = Panels(kernels, weight, offsets)
    rows = torch.randn(300, depth)
    expected = rows.double() @ weight.double().T + (0 if offsets is None else offsets.double())
    whole = panels(rows)
    assert whole.shape == (300, width)
    assert (whole - expected).abs().max() < 3e-6 * depth**0.5
    threads = torch.get_num_threads()
    try:
        for count in (1, 2, 3, 7, 8, 13, 64, 200):
            torch.set_num_threads(1 + count % 2)
            assert torch.equal(panels(rows[:count].contiguous()), whole[:count])
            assert torch.equal(panels(rows[-count:].contiguous()), whole[-count:])
    finally:
        torch.set_num_threads(threads)


def test_panels_take_no_rows_of_another_kind(kernels):
    panels = Panels(kernels, torch.randn(32, 16))
    for rows in (torch.randn(4, 15), torch.randn(4, 16).double(), torch.randn(16, 4).t(), torch.randn(16)):
        with pytest.raises(ValueError, match=r"float32 \[N, 16\] without gaps is taken"):
            panels(rows)
    assert panels(torch.empty(0, 16)).shape == (0, 32)


@needs_onednn
@torch.inference_mode()
def test_angles_that_depend_on_the_longest_sequence_are_left_to_pytorch(kernels):
    more = {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}}
    found = decoder("llama", **more)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plain_decoder, "kernels", lambda: kernels)
        found.refresh()
    assert found._native is None


@needs_onednn
@torch.inference_mode()
def test_layers_of_several_widths_are_left_to_pytorch(kernels):
    found = decoder()
    found._layers[1].inner //= 2
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plain_decoder, "kernels", lambda: kernels)
        found.refresh()
    assert found._native is None


@torch.inference_mode()
def test_a_step_of_other_rows_than_the_cache_has_is_refused(kernels):
    found = use(kernels, decoder())
    cache, prefill = PromptCache(), Prefill([Span(0, 3)])
    found.logits(torch.tensor([1, 2, 3]), torch.arange(3), prefill)
    cache.add(prefill.captured, [Span(0, 3)], [0, 0], [16, 16])
    with pytest.raises(ValueError, match="for 2 rows whose step has begun"):
        found.step(torch.tensor([1, 2]), torch.tensor([3, 3]), cache)
    cache.begin_step()
    with pytest.raises(ValueError, match="3 tokens for a cache of 2 rows"):
        found.step(torch.tensor([1, 2, 3]), torch.tensor([3, 3]), cache)
    with pytest.raises(ValueError, match="for 2 rows whose step has begun"):
        found.step(torch.tensor([1, 2]), torch.tensor([3, 3], dtype=torch.int32), cache)
    assert found.step(torch.tensor([1, 2]), torch.tensor([3, 3]), cache).shape == (2, 50)


def test_a_row_takes_no_more_tokens_than_it_was_added_for():
    cache = PromptCache()
    keys, values = torch.randn(2, 3, 2, 16)
    cache.add([(keys, values)], [Span(0, 3)], [0], [16])
    for _ in range(16):
        cache.begin_step()
    with pytest.raises(ValueError, match="added for 16 tokens at most has 16 and takes another"):
        cache.begin_step()


@needs_onednn
@torch.inference_mode()
def test_adapters_are_added_into_the_panels(kernels):
    found = decoder("qwen3")
    model = get_peft_model(found.model, LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False))
    assert obstacle(model) is None
    adapted = PlainDecoder(model)
    with without_kernels():
        adapted.refresh()
    prompts, which, *_ = CASES["a batch of groups"]
    expected = decode(adapted, prompts, which, compute=adapted.logits)
    own = decode(use(kernels, adapted), prompts, which, compute=adapted.step)
    other = decode(use(kernels, decoder("qwen3")), prompts, which, compute=found.logits)
    assert all((one - two).abs().max() < 1e-5 * two.std() for one, two in zip(own, expected, strict=True))
    assert (other[-1] - expected[-1]).abs().max() > 0.01 * expected[-1].std()


def test_a_batch_gives_its_panels_back(kernels):
    with torch.inference_mode():
        found = use(kernels, decoder())
    found.drop()
    assert found._native is None and found._head is None
