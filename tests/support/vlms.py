"""Tiny random vision-language models with their processors, made without a network, and drawn images."""

from __future__ import annotations

import io
import sys
from importlib import import_module
from unittest.mock import MagicMock

import numpy as np
import torch
from PIL import Image
from transformers import AutoConfig, AutoModelForImageTextToText, PreTrainedTokenizerFast
from transformers.utils import is_torchvision_available

import swift.models.thinker  # noqa: F401  (so that transformers' automatic classes have its model)
from swift.models.tiny import OMNI_TOKENS, build_tokenizer

TEXT = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 1024, "bos_token_id": None,
    "initializer_range": 0.1,
}  # fmt: skip
SIGLIP = {
    "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 56,
    "patch_size": 14,
}  # fmt: skip
QWEN = ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>", "<|video_pad|>")
QWEN_MARK = "<|vision_start|><|image_pad|><|vision_end|>"
DELTA = {
    "layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 8, "linear_value_head_dim": 8,
}  # fmt: skip
QWEN_TOWER = {
    "depth": 2, "hidden_size": 16, "num_heads": 2, "intermediate_size": 32, "patch_size": 16,
    "spatial_merge_size": 2, "num_position_embeddings": 64,
}  # fmt: skip

VLLM = {"hidden_size": 128, "head_dim": 32}
"""Sizes of the language model that vLLM computes on a CPU."""

PACKED = (
    "qwen2_vl", "qwen2_5_vl", "qwen2_5_omni", "qwen3_vl", "qwen3_vl_moe", "idefics3", "internvl", "llava_onevision",
    "gemma3", "gemma4",
)  # fmt: skip
"""Families that take packed streams."""
SHARED = tuple(family for family in PACKED if family not in ("gemma3", "gemma4"))
"""Families whose streams ranks may share."""
FORKED = ("qwen3_5",)
"""Families whose completions continue from states."""
FAMILIES = (*PACKED, *FORKED)


def chat_template(mark):
    return (
        "{% for turn in messages %}<|im_start|>{{ turn.role }}\n"
        "{% if turn.content is string %}{{ turn.content }}{% else %}{% for part in turn.content %}"
        "{% if part.type == 'image' %}" + mark + "{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}"
        "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )


def _class(path):
    module, _, name = path.rpartition(".")
    return getattr(import_module(f"transformers.models.{module}"), name)


def tokenizer_with(tokens, mark, named=None):
    """The byte tokenizer with special tokens of a family; named: attributes that hold some of them."""
    bytes_only = build_tokenizer(1024)
    bytes_only.add_tokens(list(tokens), special_tokens=True)
    return PreTrainedTokenizerFast(
        tokenizer_object=bytes_only.backend_tokenizer,
        eos_token=bytes_only.eos_token,
        pad_token=bytes_only.pad_token,
        extra_special_tokens=named or {},
        chat_template=chat_template(mark),
        clean_up_tokenization_spaces=False,
    )


def image(seed=0, height=64, width=96):
    """Noise as encoded PNG."""
    pixels = np.random.default_rng(seed).integers(0, 255, (height, width, 3), dtype=np.uint8)
    content = io.BytesIO()
    Image.fromarray(pixels).save(content, "PNG")
    return content.getvalue()


def build_vlm(folder, family, seed=0, **text):
    """Write a model of a family, its tokenizer and processor into a folder."""
    tokenizer, processor, config = PARTS[family]({**TEXT, **text})
    torch.manual_seed(seed)
    if family == "qwen2_5_omni":  # all of its parts
        model = _class("qwen2_5_omni.modeling_qwen2_5_omni.Qwen2_5OmniForConditionalGeneration")(config)
        torch.save({}, folder / "spk_dict.pt")
    else:
        model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.1)
    ends = [tokenizer.eos_token_id, tokenizer.pad_token_id]
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = ends, ends[1]
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder


def _ids(tokenizer, **tokens):
    return {name: tokenizer.convert_tokens_to_ids(token) for name, token in tokens.items()}


def _common(tokenizer):
    return {
        "vocab_size": len(tokenizer),
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }


def _qwen(kind, text, tower, patch, **more):
    tokenizer = tokenizer_with(QWEN, QWEN_MARK)
    ids = _ids(
        tokenizer, vision_start_token_id=QWEN[0], image_token_id=QWEN[1], vision_end_token_id=QWEN[2],
        video_token_id=QWEN[3],
    )  # fmt: skip
    text = {**text, **_common(tokenizer), **more}
    eighth = text.get("head_dim", text["hidden_size"] // text["num_attention_heads"]) // 8
    sections = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2 * eighth, eighth, eighth]}
    text["rope_parameters"] = {**sections, **text.pop("rope", {})}
    tower = {**tower, "out_hidden_size": text["hidden_size"]}
    config = AutoConfig.for_model(kind, text_config=text, vision_config=tower, tie_word_embeddings=False, **ids)
    pixels = {"shortest_edge": 4 * (2 * patch) ** 2 // 4, "longest_edge": 24 * (2 * patch) ** 2}
    processor = _class("qwen2_vl.image_processing_pil_qwen2_vl.Qwen2VLImageProcessorPil")(
        patch_size=patch, merge_size=2, size=pixels
    )
    return tokenizer, processor, config


def _qwen2_vl(text):
    tower = {"depth": 2, "embed_dim": 16, "num_heads": 2, "mlp_ratio": 2, "hidden_size": text["hidden_size"]}
    text = {name: value for name, value in text.items() if name != "head_dim"}
    return _qwen("qwen2_vl", text, tower, 14)


def _qwen2_5_vl(text):
    tower = {**QWEN_TOWER, "patch_size": 14, "window_size": 56, "fullatt_block_indexes": [1]}
    text = {name: value for name, value in text.items() if name != "head_dim"}
    return _qwen("qwen2_5_vl", text, tower, 14)


def _qwen2_5_omni(text):
    tokens = [token for _, token in OMNI_TOKENS.values()]
    named = {attribute: token for attribute, (_, token) in OMNI_TOKENS.items()}
    tokenizer = tokenizer_with(tokens, "".join(tokens[:3]), named)
    _, images, sees = _qwen2_5_vl(text)
    tower = sees.vision_config.to_dict()
    thinker = {
        "text_config": {**sees.text_config.to_dict(), **_common(tokenizer), "tie_word_embeddings": False},
        "vision_config": {name: tower[name] for name in tower if name not in ("model_type", "tokens_per_second")},
        "audio_config": {
            "num_mel_bins": 8, "encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 16, "d_model": 16,
            "output_dim": text["hidden_size"], "max_source_positions": 64,
        },
        **_ids(tokenizer, **dict(OMNI_TOKENS.values())),
    }  # fmt: skip
    talker = {
        "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "head_dim": 8,
        "num_key_value_heads": 1, "vocab_size": 32, "embedding_size": text["hidden_size"],
    }  # fmt: skip
    waves = {
        "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "head_dim": 8, "emb_dim": 8,
        "num_embeds": 32, "mel_dim": 8, "enc_emb_dim": 8, "enc_dim": 8, "enc_channels": [8, 8, 8, 8, 24],
        "enc_attention_channels": 8, "enc_se_channels": 8,
    }  # fmt: skip
    of_waves = {"dit_config": waves, "bigvgan_config": {"mel_dim": 8, "upsample_initial_channel": 64}}
    parts = {"thinker_config": thinker, "talker_config": talker, "token2wav_config": of_waves}
    return tokenizer, images, AutoConfig.for_model("qwen2_5_omni", **parts)


def _qwen3_vl(text, kind="qwen3_vl"):
    tower = {**QWEN_TOWER, "deepstack_visual_indexes": [0, 1]}
    return _qwen(kind, text, tower, 16, rope={"mrope_interleaved": True})


def _qwen3_vl_moe(text):
    return _qwen3_vl({**text, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}, "qwen3_vl_moe")


def _qwen3_5(text):
    rope = {"mrope_interleaved": True, "partial_rotary_factor": 1.0}
    return _qwen("qwen3_5", text, QWEN_TOWER, 16, rope=rope, **DELTA)


def _gemma3(text):
    tokens = ("<image_soft_token>", "<start_of_image>", "<end_of_image>")
    named = dict(zip(("image_token", "boi_token", "eoi_token"), tokens, strict=True))
    tokenizer = tokenizer_with(tokens, "<start_of_image>", named)
    layers = {"sliding_window": 32, "layer_types": ["sliding_attention", "full_attention"], "query_pre_attn_scalar": 8}
    ids = _ids(tokenizer, image_token_index=tokens[0], boi_token_index=tokens[1], eoi_token_index=tokens[2])
    config = AutoConfig.for_model(
        "gemma3", text_config={**text, **_common(tokenizer), **layers}, vision_config=SIGLIP, mm_tokens_per_image=4,
        tie_word_embeddings=False, **ids,
    )  # fmt: skip
    processor = _class("gemma3.image_processing_pil_gemma3.Gemma3ImageProcessorPil")(size={"height": 56, "width": 56})
    return tokenizer, WithSettings(processor, image_seq_length=4), config


def _import_gemma4():
    """Its processor imports the torchvision one of images, which nothing calls, even where there is no torchvision."""
    names = [f"torchvision{part}" for part in ("", ".transforms", ".transforms.v2", ".transforms.v2.functional")]
    missing = [] if is_torchvision_available() else names
    sys.modules.update({name: MagicMock() for name in missing})
    import_module("transformers.models.gemma4.image_processing_gemma4")
    for name in missing:
        del sys.modules[name]


def _gemma4(text):
    _import_gemma4()
    tokens = ("<|image|>", "<|image>", "<image|>", "<|video|>", "<|audio|>", "<|audio>", "<audio|>")
    kinds = ("image_token", "boi_token", "eoi_token", "video_token", "audio_token", "boa_token", "eoa_token")
    tokenizer = tokenizer_with(tokens, tokens[0], dict(zip(kinds, tokens, strict=True)))
    own = {
        **text, **_common(tokenizer), "sliding_window": 32, "layer_types": ["sliding_attention", "full_attention"],
        "global_head_dim": 16, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": len(tokenizer),
    }  # fmt: skip
    tower = {
        "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_key_value_heads": 2, "head_dim": 8, "patch_size": 4, "position_embedding_size": 64,
    }  # fmt: skip
    ids = _ids(tokenizer, image_token_id=tokens[0], boi_token_id=tokens[1], eoi_token_id=tokens[2],
               video_token_id=tokens[3], audio_token_id=tokens[4], boa_token_id=tokens[5])  # fmt: skip
    config = AutoConfig.for_model(
        "gemma4", text_config=own, vision_config=tower, audio_config=None, tie_word_embeddings=False, **ids
    )
    processor = _class("gemma4.image_processing_pil_gemma4.Gemma4ImageProcessorPil")(patch_size=4, max_soft_tokens=70)
    return tokenizer, WithSettings(processor, image_seq_length=70), config


def _idefics3(text):
    tiles = [f"<row_{row}_col_{column}>" for row in range(1, 5) for column in range(1, 5)]
    tokens = ("<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>", *tiles)
    tokenizer = tokenizer_with(tokens, "<image>")
    own = {**text, **_common(tokenizer), "model_type": "llama", "tie_word_embeddings": False}
    config = AutoConfig.for_model(
        "idefics3", text_config=own, vision_config={**SIGLIP, "image_size": 64, "patch_size": 16}, scale_factor=2,
        pad_token_id=tokenizer.pad_token_id, tie_word_embeddings=False, **_ids(tokenizer, image_token_id="<image>"),
    )  # fmt: skip
    processor = _class("idefics3.image_processing_pil_idefics3.Idefics3ImageProcessorPil")(
        size={"longest_edge": 128}, max_image_size={"longest_edge": 64}
    )
    return tokenizer, WithSettings(processor, image_seq_len=4), config


def _internvl(text):
    tokens = ("<img>", "</img>", "<IMG_CONTEXT>", "<video>")
    named = dict(
        zip(("start_image_token", "end_image_token", "context_image_token", "video_token"), tokens, strict=True)
    )
    tokenizer = tokenizer_with(tokens, "<IMG_CONTEXT>", named)
    own = {name: value for name, value in text.items() if name != "head_dim"}
    own = {**own, **_common(tokenizer), "model_type": "qwen2", "tie_word_embeddings": False}
    tower = {**SIGLIP, "image_size": [56, 56], "patch_size": [14, 14]}
    config = AutoConfig.for_model(
        "internvl", text_config=own, vision_config=tower, tie_word_embeddings=False,
        **_ids(tokenizer, image_token_id="<IMG_CONTEXT>"),
    )  # fmt: skip
    processor = _class("got_ocr2.image_processing_pil_got_ocr2.GotOcr2ImageProcessorPil")(
        size={"height": 56, "width": 56}, crop_to_patches=True, max_patches=4
    )
    return tokenizer, WithSettings(processor, image_seq_length=4), config


def _llava_onevision(text):
    tokenizer = tokenizer_with(("<image>", "<video>"), "<image>")
    own = {name: value for name, value in text.items() if name != "head_dim"}
    own = {**own, **_common(tokenizer), "model_type": "qwen2", "tie_word_embeddings": False}
    grids = [[56, 56], [56, 112], [112, 56], [112, 112]]
    config = AutoConfig.for_model(
        "llava_onevision", text_config=own, image_grid_pinpoints=grids, tie_word_embeddings=False,
        vision_config={**SIGLIP, "model_type": "siglip_vision_model", "vision_use_head": False},
        **_ids(tokenizer, image_token_id="<image>", video_token_id="<video>"),
    )  # fmt: skip
    processor = _class("llava_onevision.image_processing_pil_llava_onevision.LlavaOnevisionImageProcessorPil")(
        size={"height": 56, "width": 56}, image_grid_pinpoints=grids
    )
    settings = {"num_image_tokens": 16, "vision_feature_select_strategy": "full"}
    return tokenizer, WithSettings(processor, **settings), config


class WithSettings:
    """A processor of images, with settings of the family's processor beside it."""

    def __init__(self, images, **settings):
        self.images, self.settings = images, settings

    def save_pretrained(self, folder):
        import json

        self.images.save_pretrained(folder)
        (folder / "processor_config.json").write_text(json.dumps(self.settings))


PARTS = {family: globals()[f"_{family}"] for family in FAMILIES}
