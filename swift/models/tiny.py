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
from typing import TYPE_CHECKING

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
        arch: of `ARCHS`; qwen2 and qwen3 tie the output layer to the embedding, llama does not.
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
