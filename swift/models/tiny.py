"""Tiny decoder models, built from a seed in a second: for tests, the demo and first steps without a network.

A built folder looks exactly like a downloaded model: `config.json`, `generation_config.json`,
`model.safetensors` and a tokenizer with a ChatML template. The weights are random, so the
completions are noise before training.

The tokenizer has one token per byte of UTF-8 (every ASCII character, each digit included, is one token),
plus whole-token tags `<think> </think> <answer> </answer>` and the ChatML specials. Any text survives an
encode/decode round trip (composed Unicode; transformers applies NFC to Qwen2 models).
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from swift.models.policy import quiet_loading
from swift.models.templates import TEMPLATES

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_WIDTHS = (
    "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "intermediate_size",
    "max_position_embeddings",
)  # fmt: skip

SIZES: dict[str, tuple[int, ...]] = {
    "nano": (32, 2, 4, 2, 128, 1024),
    "tiny": (128, 4, 4, 2, 256, 2048),
    "small": (512, 8, 8, 2, 1536, 4096),
    "half": (896, 24, 14, 2, 4864, 32768),
}
"""Parameters with tied embeddings: nano 0.04M (tests), tiny 0.6M (the demo), small 24M (benchmarks), half 0.36B, and
0.5B with a vocabulary of 152k, which is the shape of Qwen2.5-0.5B (benchmarks on a GPU)."""

ARCHS = ("qwen2", "llama", "qwen3")
HYBRIDS = {"qwen3_5_text": "linear_attention", "lfm2": "conv"}
"""Architectures in which three of four layers read a sequence from left to right -> what `layer_types` calls these."""

MIXTURES = ("qwen3_moe",)
"""Architectures with four experts of half the intermediate width, of which a token uses two."""

VISION = ("qwen3_vl", "qwen3_vl_moe", "qwen2_5_omni")
"""Architectures that see images. The tower has half of the width and depth; an embedding stands for 16 x 16 pixels.

The last has a tower for audio, too, and no talker; its head is not tied."""
PATCH, MERGED = 8, 2
IMAGE_TOKENS = {
    "vision_start_token_id": "<|vision_start|>",
    "image_token_id": "<|image_pad|>",
    "vision_end_token_id": "<|vision_end|>",
    "video_token_id": "<|video_pad|>",
}
OMNI_TOKENS = {
    "vision_bos_token": ("vision_start_token_id", "<|vision_bos|>"),
    "image_token": ("image_token_index", "<|IMAGE|>"),
    "vision_eos_token": ("vision_end_token_id", "<|vision_eos|>"),
    "video_token": ("video_token_index", "<|VIDEO|>"),
    "audio_bos_token": ("audio_start_token_id", "<|audio_bos|>"),
    "audio_token": ("audio_token_index", "<|AUDIO|>"),
    "audio_eos_token": ("audio_end_token_id", "<|audio_eos|>"),
}
"""Those of Qwen2.5-Omni: attribute of the tokenizer -> name in the config, token."""
SEEING_CHATML = """{% for turn in messages %}<|im_start|>{{ turn['role'] }}
{% if turn['content'] is string %}{{ turn['content'] }}{% else %}{% for part in turn['content'] %}\
{% if part['type'] == 'image' %}MARK{% else %}{{ part['text'] }}{% endif %}\
{% endfor %}{% endif %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

PAD, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
TAGS = ("<think>", "</think>", "<answer>", "</answer>")


def build_tokenizer(context: int = 2048, **named: str) -> PreTrainedTokenizerBase:
    """The byte-level tokenizer described in the module's docstring (263 tokens).

    Args:
        context: the model's context length in tokens, recorded as `model_max_length`.
        named: attributes that hold further tokens, which are not added.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocab = {symbol: index for index, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    core = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken(text, special=True) for text in (PAD, TURN_START, TURN_END)])
    # Tags are text: a decode that drops special tokens must keep them for the rewards.
    core.add_tokens([AddedToken(text, special=False, normalized=False) for text in TAGS])
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token=TURN_END,
        pad_token=PAD,
        additional_special_tokens=[TURN_START],
        chat_template=TEMPLATES["chatml"],
        model_max_length=context,
        clean_up_tokenization_spaces=False,
        **named,
    )


def build_tiny(
    folder: str | Path,
    arch: str = "qwen2",
    size: str = "tiny",
    seed: int = 0,
    *,
    init_std: float | None = None,
    reward_model: bool = False,
) -> Path:
    """Writes a decoder with random float32 weights, its tokenizer and configs into `folder`.

    Args:
        folder: created if absent; files of the same names are overwritten.
        arch: of `ARCHS`, `HYBRIDS`, `MIXTURES` or `VISION`; most tie the output layer to the embedding.
        size: of `SIZES`.
        seed: of the weights; equal arguments give equal bytes.
        init_std: standard deviation of the initial weights; None means hidden ** -0.5 / 2, which
            learns faster at these widths than the usual 0.02.
        reward_model: a sequence-classification head of one label instead of the language model's.

    Returns:
        `folder` as a Path.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

    if arch in VISION:
        if reward_model or init_std is not None:
            raise ValueError(f"{arch}: has no reward_model and no init_std here")
        return _build_seeing(Path(folder), arch, size, seed)
    widths = dict(zip(_WIDTHS, SIZES[size], strict=True))
    tokenizer = build_tokenizer(widths["max_position_embeddings"])
    end, pad = tokenizer.convert_tokens_to_ids([TURN_END, PAD])
    config = AutoConfig.for_model(
        arch,
        **widths,
        vocab_size=len(tokenizer),
        head_dim=widths["hidden_size"] // widths["num_attention_heads"],
        initializer_range=widths["hidden_size"] ** -0.5 / 2 if init_std is None else init_std,
        tie_word_embeddings=arch != "llama",
        bos_token_id=None,
        eos_token_id=end,
        pad_token_id=pad,
        **({"num_labels": 1} if reward_model else {}),
        **(_hybrid(arch, widths) if arch in HYBRIDS else {}),
        **(_mixture(widths) if arch in MIXTURES else {}),
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        kind = AutoModelForSequenceClassification if reward_model else AutoModelForCausalLM
        model = kind.from_config(config, dtype=torch.float32)
    if not reward_model:
        model.generation_config.eos_token_id = [end, pad]
        model.generation_config.pad_token_id = pad
    with quiet_loading():
        model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return Path(folder)


def _build_seeing(folder: Path, arch: str, size: str, seed: int) -> Path:
    """A model with a vision tower, and the processor of its images."""
    import torch
    from transformers import AutoConfig, AutoModelForImageTextToText, AutoModelForMultimodalLM
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    widths = dict(zip(_WIDTHS, SIZES[size], strict=True))
    hidden, heads = widths["hidden_size"], widths["num_attention_heads"]
    omni = arch == "qwen2_5_omni"
    named = {attribute: token for attribute, (_, token) in OMNI_TOKENS.items()} if omni else {}
    tokens = dict(OMNI_TOKENS.values()) if omni else IMAGE_TOKENS
    tokenizer = build_tokenizer(widths["max_position_embeddings"], **named)
    tokenizer.add_tokens(list(tokens.values()), special_tokens=True)
    start, image, stop, *_ = tokens.values()
    tokenizer.chat_template = SEEING_CHATML.replace("MARK", f"{start}{image}{stop}")
    end, pad = tokenizer.convert_tokens_to_ids([TURN_END, PAD])
    quarter = hidden // heads // 4
    rope = {"rope_type": "default", "rope_theta": 10000.0, **({} if omni else {"mrope_interleaved": True})}
    own = {"window_size": 2 * PATCH * MERGED, "fullatt_block_indexes": [0]} if omni else {}
    settings: dict[str, Any] = {
        "text_config": {
            **widths,
            "vocab_size": len(tokenizer),
            "rope_parameters": {
                **rope,
                "mrope_section": [2 * quarter - 2 * (quarter // 2), quarter // 2, quarter // 2],
            },
            "bos_token_id": None,
            "eos_token_id": end,
            "pad_token_id": pad,
            **({"tie_word_embeddings": False} if omni else {"head_dim": hidden // heads}),
            **(_mixture(widths) if arch == "qwen3_vl_moe" else {}),
        },
        "vision_config": {
            "depth": widths["num_hidden_layers"] // 2,
            "hidden_size": hidden // 2,
            "out_hidden_size": hidden,
            "num_heads": heads,
            "intermediate_size": hidden,
            "patch_size": PATCH,
            "spatial_merge_size": MERGED,
            "temporal_patch_size": 1,
            **(own or {"num_position_embeddings": 64, "deepstack_visual_indexes": [0]}),
        },
        "tie_word_embeddings": not omni,
        **{name: tokenizer.convert_tokens_to_ids(token) for name, token in tokens.items()},
    }
    if omni:
        hears = {"d_model": hidden, "output_dim": hidden, "encoder_layers": 1, "encoder_attention_heads": heads}
        settings["audio_config"] = {**hears, "encoder_ffn_dim": hidden, "num_mel_bins": 8, "max_source_positions": 64}
        settings = {"thinker_config": settings, "enable_audio_output": False}
    config = AutoConfig.for_model(arch, **settings)
    with torch.random.fork_rng(devices=[]), quiet_loading():
        torch.manual_seed(seed)
        kind = AutoModelForMultimodalLM if omni else AutoModelForImageTextToText  # the one for images has no audio
        model = kind.from_config(config, dtype=torch.float32)
        for parameter in model.parameters():
            if parameter.ndim > 1:
                torch.nn.init.normal_(parameter, std=parameter[0].numel() ** -0.5 / 2)
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = [end, pad], pad
    with quiet_loading():
        model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    edge = PATCH * MERGED
    Qwen2VLImageProcessorPil(
        patch_size=PATCH,
        merge_size=MERGED,
        temporal_patch_size=1,
        size={"shortest_edge": edge**2, "longest_edge": 256 * edge**2},
        image_mean=[0.5] * 3,
        image_std=[0.5] * 3,
    ).save_pretrained(folder)
    return folder


def _mixture(widths: dict[str, int]) -> dict[str, Any]:
    """Settings of its experts."""
    return {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": widths["intermediate_size"] // 2}


def _hybrid(arch: str, widths: dict[str, int]) -> dict[str, Any]:
    """Settings of its layers; the last one of four, or of fewer, has attention."""
    layers, heads = widths["num_hidden_layers"], widths["num_attention_heads"]
    period, size = min(4, layers), widths["hidden_size"] // heads
    kinds = [HYBRIDS[arch] if (number + 1) % period else "full_attention" for number in range(layers)]
    if arch != "qwen3_5_text":
        return {"layer_types": kinds, "block_auto_adjust_ff_dim": False}
    return {
        "layer_types": kinds,
        "linear_num_key_heads": heads // 2,
        "linear_num_value_heads": heads,
        "linear_key_head_dim": size,
        "linear_value_head_dim": size,
    }
