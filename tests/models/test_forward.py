"""The packed forward equals the padded one, in value and gradient, shared prompts or not."""

from __future__ import annotations

import pytest
import torch
from policies import SEQUENCES, assert_equal_gradients, gradients_of

from swift.models.attention.choice import choose_attention, packing_obstacle
from swift.models.attention.interface import enable_packed_attention, is_packed
from swift.models.attention.spans import Variant
from swift.models.forward import TokenSequence, completion_logits, pack, pad


def load(folder, packed, **options):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, **options)
    if packed:
        enable_packed_attention(model)
    return model


def test_a_stream_holds_each_prompt_once_and_no_last_token():
    tokens = pack(SEQUENCES)
    assert tokens.inputs["input_ids"].tolist() == [[5, 6, 7, 8, 10, 11, 10, 14, 15, 16, 17, 9, 20, 30, 31]]
    assert tokens.inputs["position_ids"].tolist() == [[0, 1, 2, 3, 4, 5, 4, 5, 6, 7, 8, 0, 1, 0, 1]]
    assert tokens.predict_index.tolist() == [3, 4, 5, 3, 3, 6, 7, 8, 9, 10, 11, 12, 14]
    assert tokens.target_ids.tolist() == [10, 11, 12, 13, 10, 14, 15, 16, 17, 18, 20, 21, 32]
    assert [own.index.tolist() for _, own in tokens.spans] == [[4, 5], [], [6, 7, 8, 9, 10], [12], []]


@pytest.mark.parametrize("share_prompts", [True, False])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_packed_logits_and_gradients_equal_padded_ones(nano_folder, share_prompts, checkpointing):
    packed, padded = load(nano_folder, True), load(nano_folder, False)
    packed.train()
    if checkpointing:
        packed.gradient_checkpointing_enable({"use_reentrant": False})
    mine = completion_logits(packed, pack(SEQUENCES, share_prompts=share_prompts))
    oracle = completion_logits(padded.train(), pad(SEQUENCES))
    assert (mine - oracle).abs().max() < 1e-5
    assert_equal_gradients(gradients_of(packed, mine.log_softmax(-1)), gradients_of(padded, oracle.log_softmax(-1)))


def test_lora_policies_are_packed_too(nano_folder):
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    lora = get_peft_model(load(nano_folder, False), LoraConfig(target_modules="all-linear", init_lora_weights=False))
    oracle = completion_logits(lora, pad(SEQUENCES))
    enable_packed_attention(lora)
    assert (completion_logits(lora, pack(SEQUENCES)) - oracle).abs().max() < 1e-5


def test_layers_of_other_types_are_named(nano_folders):
    model = load(nano_folders["qwen3"], False)
    assert packing_obstacle(model) is None
    model.config.layer_types = ["full_attention", "chunked_attention"]
    assert "chunked_attention" in str(packing_obstacle(model))


def test_a_window_that_layers_keep_to_themselves_is_found_out(nano_folders):
    """A trial on short sequences would not show it."""
    model = load(nano_folders["llama"], False)
    model.config.sliding_window = 4096
    assert "sliding window" in str(choose_attention(model))
    assert not is_packed(model)


WINDOWED = [
    ("mistral", {}),
    ("qwen2", {"use_sliding_window": True, "max_window_layers": 1}),
    ("gemma2", {"attn_logit_softcapping": 2.0, "num_key_value_heads": 2}),
    ("gemma3_text", {"num_key_value_heads": 2}),
    ("gpt_oss", {"layer_types": ["full_attention", "sliding_attention"]}),
    ("phi3", {}),
    ("starcoder2", {}),
    ("cohere2", {}),
    ("olmo3", {}),
    ("exaone4", {}),
    ("afmoe", {}),
    ("gemma4_text", {}),
]
LONG = [
    TokenSequence(list(range(2, 14)), list(range(20, 29))),
    TokenSequence(list(range(2, 14)), list(range(30, 33))),
    TokenSequence([5, 6, 7], list(range(40, 52))),
    *SEQUENCES,
]


@pytest.mark.parametrize(("arch", "settings"), WINDOWED)
@pytest.mark.parametrize("window", [4, 8, 4096])
@pytest.mark.parametrize("share_prompts", [True, False])
def test_windows_soft_caps_and_sinks_are_packed_too(small_model, arch, settings, window, share_prompts):
    model = small_model(arch, **{**settings, "sliding_window": window})
    model.eval()
    model.set_attn_implementation("eager")  # sdpa has no soft caps
    oracle = torch.cat([completion_logits(model, pad([sequence])) for sequence in LONG])
    expected = gradients_of(model, oracle.log_softmax(-1))
    assert choose_attention(model) is None
    mine = completion_logits(model, pack(LONG, share_prompts=share_prompts))
    assert (mine - oracle).abs().max() < 1e-5
    assert_equal_gradients(gradients_of(model, mine.log_softmax(-1)), expected, least=1e-6)


def test_rows_may_be_computed_in_parts(small_model, monkeypatch):
    from swift.models.attention import rows

    model = small_model("gemma2", sliding_window=4)
    assert choose_attention(model) is None
    whole = completion_logits(model, pack(LONG))
    expected = gradients_of(model, whole.log_softmax(-1))
    monkeypatch.setattr(rows, "SCORES", 1)
    parts = completion_logits(model, pack(LONG))
    assert (parts - whole).abs().max() < 1e-6
    assert_equal_gradients(gradients_of(model, parts.log_softmax(-1)), expected, least=1e-6)


def test_a_soft_cap_is_never_left_out(small_model, monkeypatch):
    """Whichever way the model takes: transformers' sdpa would leave it out."""
    from swift.models.attention import choice

    model = small_model("gemma2", attn_logit_softcapping=2.0).eval()
    assert model.config._attn_implementation == "sdpa"
    monkeypatch.setattr(choice, "packing_obstacle", lambda model: "not today")
    assert choose_attention(model) == "not today"
    assert model.config._attn_implementation == "eager"


def test_a_model_that_packing_breaks_keeps_its_own_attention(nano_folder, monkeypatch):
    from swift.models.attention.layout import SegmentLayout

    def breaks(*states):
        raise RuntimeError("view size is not compatible")

    model = load(nano_folder, False)
    monkeypatch.setattr(SegmentLayout, "attend", breaks)
    assert choose_attention(model) == "packing fails (RuntimeError: view size is not compatible)"
    assert not is_packed(model)


def test_windows_that_the_own_attention_leaves_out_are_refused(small_model):
    assert "does not know" in str(choose_attention(small_model("olmoe", num_experts=2, num_experts_per_tok=1)))


def test_attention_is_contiguous_as_models_expect(small_model):
    model = small_model("mistral", sliding_window=4)
    assert choose_attention(model) is None
    tokens = pack(LONG)
    states = torch.randn(1, 4, tokens.inputs["input_ids"].shape[1], 8)
    for variant in (Variant(), Variant(window=4), Variant(softcap=3.0)):
        assert tokens.inputs["attention_layout"].attend(states, states, states, None, variant).is_contiguous()


def test_a_window_wider_than_every_sequence_is_none(small_model, monkeypatch):
    from swift.models.attention import layout

    model = small_model("mistral", sliding_window=21)
    assert choose_attention(model) is None
    tokens, asked = pack(LONG), []
    assert tokens.inputs["attention_layout"].longest == 12 + 8
    monkeypatch.setattr(layout, "kernel_for", lambda *_: asked.append("plain") or "rows")
    completion_logits(model, tokens)
    assert asked == ["plain"] * model.config.num_hidden_layers


@pytest.mark.parametrize("arch", ["deepseek_v3", "gpt_neox", "mixtral"])
def test_other_architectures_are_packed_where_that_equals_their_own_attention(small_model, arch):
    model = small_model(arch)
    oracle = torch.cat([completion_logits(model, pad([sequence])) for sequence in SEQUENCES])
    assert choose_attention(model) is None
    assert (completion_logits(model, pack(SEQUENCES)) - oracle).abs().max() < 1e-5


def test_a_trial_leaves_the_outputs_of_every_layer(small_model):
    """Transformers collects them by hooks, which it puts on the layers of the first pass that asks for them."""
    model = small_model("mixtral", output_router_logits=True)
    assert choose_attention(model) is None
    tokens = pack(SEQUENCES)
    found = model(**tokens.inputs, use_cache=False).router_logits
    assert len(found) == len(model.model.layers) == 2


def test_a_model_that_keeps_attention_to_itself_is_found_out(nano_folder, monkeypatch):
    """However little its logits depend on it."""
    model = load(nano_folder, False)
    monkeypatch.setattr(type(model.model.layers[0]), "forward", lambda self, hidden_states, **options: hidden_states)
    assert "not all of its layers ask" in str(choose_attention(model))
    assert not is_packed(model)


@pytest.mark.parametrize(
    ("arch", "reason"),
    [
        ("nemotron", "do not pass the packed layout"),
        ("gpt2", "no rotary positions"),
        ("mamba", "linear_attention"),
        ("rwkv", "attention interface"),
        ("qwen3_next", "linear_attention"),
    ],
)
def test_models_that_packing_would_change_keep_their_own_attention(small_model, arch, reason):
    model = small_model(arch)
    own = model.config._attn_implementation
    assert reason in str(choose_attention(model))
    assert not is_packed(model)
    assert model.config._attn_implementation == own
    assert model.training
