"""`--attn_impl flash_attn`: packed streams reach flash-attn's variable-length kernel and equal padded rows."""

from __future__ import annotations

import pytest
import torch
from policies import SEQUENCES, assert_equal_gradients, gradients_of

from swift.models.attention.choice import choose_attention
from swift.models.attention.interface import is_packed
from swift.models.forward import completion_logits, pack, pad
from swift.rl.logprobs import selected_logprobs


def logprobs_of(logits):
    targets = torch.tensor([token for one in SEQUENCES for token in one.completion_ids])
    return selected_logprobs(logits, targets)[0]


@pytest.mark.parametrize(
    ("arch", "settings", "window", "softcap"),
    [
        ("qwen3", {"sliding_window": None}, None, None),
        ("mistral", {"sliding_window": 4}, (3, 3), None),
        ("gemma2", {"sliding_window": 4, "attn_logit_softcapping": 2.0, "num_key_value_heads": 2}, (3, 3), 2.0),
        ("deepseek_v3", {}, None, None),  # values are narrower than keys
    ],
)
@pytest.mark.parametrize("share_prompts", [True, False])
def test_packed_rows_are_segments_of_one_call_per_layer(
    small_model, fake_flash, arch, settings, window, softcap, share_prompts
):
    model = small_model(arch, **settings)
    model.set_attn_implementation("eager")
    expected = logprobs_of(completion_logits(model, pad(SEQUENCES)))
    gradients = gradients_of(model, expected)
    model.set_attn_implementation("flash_attention_2")
    assert choose_attention(model) is None and is_packed(model)
    fake_flash.clear()
    found = logprobs_of(completion_logits(model, pack(SEQUENCES, share_prompts=share_prompts)))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert_equal_gradients(gradients_of(model, found), gradients, least=1e-6)
    assert len(fake_flash) == model.config.num_hidden_layers
    queries, keys = ([4, 2, 5, 2, 2], [4, 6, 9, 2, 2]) if share_prompts else ([6, 4, 9, 2, 2],) * 2
    assert [call[:2] for call in fake_flash] == [(queries, keys)] * len(fake_flash)
    assert any(call[2] == (window or (-1, -1)) for call in fake_flash)
    assert {call[3] for call in fake_flash} == {softcap or 0.0}


def test_layers_with_sinks_use_masked_sdpa(small_model, fake_flash):
    model = small_model("gpt_oss").eval()
    oracle = torch.cat([completion_logits(model, pad([one])) for one in SEQUENCES])
    assert choose_attention(model) is None
    model.set_attn_implementation("swift_varlen")
    torch.testing.assert_close(completion_logits(model, pack(SEQUENCES)), oracle, rtol=1e-5, atol=1e-5)
    assert not fake_flash


def test_what_a_broken_kernel_computes_is_not_used(small_model, fake_flash, monkeypatch):
    from swift.models.attention.flash import FlashSegments

    model = small_model("qwen3", sliding_window=None)
    model.set_attn_implementation("flash_attention_2")
    monkeypatch.setattr(FlashSegments, "attend", lambda self, query, *_: query.transpose(1, 2))
    assert choose_attention(model) == "packed logits differ from its own"
    assert model.config._attn_implementation == "flash_attention_2"


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention_is_asked_where_it_is_wanted(small_model, monkeypatch):
    from swift.models.attention.flex import FlexSegments

    calls, attend = [], FlexSegments.attend
    monkeypatch.setattr(FlexSegments, "attend", lambda *given: calls.append(given) or attend(*given))
    model = small_model("qwen3", sliding_window=None)
    oracle = completion_logits(model, pad(SEQUENCES))
    model.set_attn_implementation("flex_attention")
    with torch.no_grad():
        assert choose_attention(model) is None
        calls.clear()
        torch.testing.assert_close(completion_logits(model, pack(SEQUENCES)), oracle, rtol=1e-5, atol=1e-5)
    assert len(calls) == model.config.num_hidden_layers
