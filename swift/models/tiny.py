"""Tiny decoder models, built from a seed in a second: for tests, the demo and first steps without a network.

A built folder looks exactly like a downloaded model: `config.json`, `generation_config.json`,
`model.safetensors` and a tokenizer with a ChatML template. The weights are random, so the model knows
nothing until `swift sft` teaches it something.

The tokenizer has one token per byte of UTF-8 (every ASCII character, each digit included, is one token),
plus whole-token tags `<think> </think> <answer> </answer>` and the ChatML specials. Any text survives an
encode/decode round trip (composed Unicode; transformers applies NFC to Qwen2 models).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from swift.models.policy import quiet_loading
from swift.models.templates import TEMPLATES

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Arch = Literal["qwen2", "llama", "qwen3"]
Size = Literal["nano", "tiny", "small", "half"]


@dataclass(frozen=True)
class Shape:
    """Widths and depths of a decoder; all counts are plain numbers, the context is in tokens."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    intermediate: int
    context: int


SHAPES: dict[str, Shape] = {
    "nano": Shape(hidden=32, layers=2, heads=4, kv_heads=2, intermediate=128, context=1024),
    "tiny": Shape(hidden=128, layers=4, heads=4, kv_heads=2, intermediate=256, context=2048),
    "small": Shape(hidden=512, layers=8, heads=8, kv_heads=2, intermediate=1536, context=4096),
    "half": Shape(hidden=896, layers=24, heads=14, kv_heads=2, intermediate=4864, context=32768),
}
"""Parameters with tied embeddings: nano 0.04M (tests), tiny 0.6M (the demo), small 24M (benchmarks), half 0.36B, and
0.5B with a vocabulary of 152k, which is the shape of Qwen2.5-0.5B (benchmarks on a GPU)."""

ARCHS = ("qwen2", "llama", "qwen3")

PAD, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
TAGS = ("<think>", "</think>", "<answer>", "</answer>")


def build_tokenizer(context: int = 2048) -> PreTrainedTokenizerBase:
    """The byte-level tokenizer described in the module's docstring (263 tokens).

    Args:
        context: the model's context length in tokens, recorded as `model_max_length`.
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
    )


def build_tiny(
    folder: str | Path,
    arch: Arch | str = "qwen2",
    size: Size | str = "tiny",
    seed: int = 0,
    *,
    init_std: float | None = None,
) -> Path:
    """Writes a decoder with random float32 weights, its tokenizer and configs into `folder`.

    Args:
        folder: created if absent; files of the same names are overwritten.
        arch: qwen2 and qwen3 tie the output layer to the embedding, llama does not.
        size: see `SHAPES`.
        seed: of the weights; equal arguments give equal bytes.
        init_std: standard deviation of the initial weights; None means hidden ** -0.5 / 2, which
            learns faster at these widths than the usual 0.02.

    Returns:
        `folder` as a Path.

    Raises:
        ValueError: for an unknown arch or size.
    """
    from transformers import AutoModelForCausalLM

    return _build(AutoModelForCausalLM, folder, arch, size, seed, init_std)


def build_tiny_reward_model(
    folder: str | Path,
    arch: Arch | str = "qwen2",
    size: Size | str = "nano",
    seed: int = 0,
    *,
    init_std: float | None = None,
) -> Path:
    """Like `build_tiny`, with a sequence-classification head of one label: a reward model's scalar."""
    from transformers import AutoModelForSequenceClassification

    return _build(AutoModelForSequenceClassification, folder, arch, size, seed, init_std, num_labels=1)


def _build(
    auto_class: Any, folder: str | Path, arch: str, size: str, seed: int, init_std: float | None, **options: Any
) -> Path:
    import torch
    from transformers import LlamaConfig, Qwen2Config, Qwen3Config

    if size not in SHAPES:
        raise ValueError(f"size {size!r} is unknown; valid: {', '.join(SHAPES)}")
    classes = {"qwen2": Qwen2Config, "llama": LlamaConfig, "qwen3": Qwen3Config}
    if arch not in classes:
        raise ValueError(f"arch {arch!r} is unknown; valid: {', '.join(classes)}")
    folder, shape = Path(folder), SHAPES[size]
    tokenizer = build_tokenizer(shape.context)
    end = tokenizer.convert_tokens_to_ids(TURN_END)
    config = classes[arch](
        vocab_size=len(tokenizer),
        hidden_size=shape.hidden,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.hidden // shape.heads,
        intermediate_size=shape.intermediate,
        max_position_embeddings=shape.context,
        initializer_range=init_std if init_std is not None else shape.hidden**-0.5 / 2,
        tie_word_embeddings=arch != "llama",
        bos_token_id=None,
        eos_token_id=end,
        pad_token_id=tokenizer.pad_token_id,
        **options,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = auto_class.from_config(config, dtype=torch.float32)
    if getattr(model, "generation_config", None) is not None:
        model.generation_config.eos_token_id = [end, tokenizer.convert_tokens_to_ids(PAD)]
        model.generation_config.pad_token_id = tokenizer.pad_token_id
    with quiet_loading():
        model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
