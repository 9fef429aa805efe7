"""Makes a random model: `python models.py FOLDER ARCH SIZE VOCAB MEAN_TOKENS LONGEST`; 0: the tokenizer's, no end.

Without an end the model is made never to sample the tokenizer's end token, so every completion has the longest length
and no logits processor costs a side time. With one, the token's embedding is pushed along the mean hidden state
until completions, cut at LONGEST, have MEAN_TOKENS tokens in the mean: their lengths are about geometric.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer

from swift.models.tiny import VISION, build_tiny
from swift.models.vision import placeholder_ids

TEMPLATE = "{%- for m in messages -%}{{- m.content + (eos_token if m.role == 'assistant' else '\\n') -}}{%- endfor -%}"
CONTEXTS, CONTEXT_TOKENS = 64, 96
ADDING = ("o_proj", "out_proj", "down_proj", "w2")
"""Linear layers whose output is added to the hidden state, of all architectures."""
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def main() -> None:
    """See the module."""
    folder, arch, size = Path(sys.argv[1]), *sys.argv[2:4]
    vocab_size, mean_tokens, longest = map(int, sys.argv[4:])
    build_tiny(folder, arch, size)
    if vocab_size:
        widen(folder, vocab_size)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    if arch not in VISION:
        tokenizer.chat_template = TEMPLATE
    end = tokenizer.eos_token_id
    if mean_tokens:
        give_end(folder, end, end_rate(mean_tokens, longest))
    else:
        take_tokens(folder, end)
    tokenizer.save_pretrained(folder)
    for name in ("config.json", "generation_config.json"):
        path = folder / name
        path.write_text(json.dumps({**json.loads(path.read_text()), "eos_token_id": end}))


def widen(folder: Path, vocab_size: int) -> None:
    """The same shape with more tokens; the tokenizer names each of them."""
    config = AutoConfig.from_pretrained(folder)
    config.vocab_size = vocab_size
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    file = folder / "tokenizer.json"
    content = json.loads(file.read_text())
    vocab: dict[str, int] = content["model"]["vocab"]
    first = 1 + max(*vocab.values(), *(token["id"] for token in content["added_tokens"]))
    vocab |= {f"filler{number}": number for number in range(first, vocab_size)}
    file.write_text(json.dumps(content))


def end_rate(mean_tokens: int, longest: int) -> float:
    """The share of tokens that must be ends for a mean of geometric lengths that are cut at the longest."""
    low, high = 1e-6, 1.0
    for _ in range(60):
        rate = (low * high) ** 0.5
        mean = (1 - (1 - rate) ** longest) / rate
        low, high = (rate, high) if mean > mean_tokens else (low, rate)
    return rate


def give_end(folder: Path, end: int, rate: float) -> None:
    """Make the model (whose head is its embedding) sample `end` at that rate over contexts that it sampled itself."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(DEVICE)
    torch.manual_seed(0)
    head = model.get_output_embeddings().weight
    with torch.no_grad():
        ids = torch.randint(32, 127, (CONTEXTS, 16)).to(DEVICE)
        ids = model.generate(ids, do_sample=True, max_new_tokens=CONTEXT_TOKENS, eos_token_id=None, pad_token_id=0)
        hidden = model.model(ids).last_hidden_state[:, 16:].flatten(0, 1)
        others = hidden @ head.T
        others[:, end] = -torch.inf
        rest = others.logsumexp(1)
        direction = hidden.mean(0) / hidden.mean(0).square().sum()  # one unit adds one to the mean logit
        low, high = -60.0, 60.0
        for _ in range(60):
            push = (low + high) / 2
            share = torch.sigmoid(push * (hidden @ direction) - rest).mean()
            low, high = (push, high) if share < rate else (low, push)
        head[end] = push * direction
    model.save_pretrained(folder)


def take_tokens(folder: Path, end: int) -> None:
    """Make the model (whose head is its embedding) never sample `end`, nor a token that stands for an image.

    The first number of every hidden state of a text is the same: all embeddings have it, and no layer adds to it. The
    head's rows of these tokens look at it alone.
    """
    config = AutoConfig.from_pretrained(folder)
    kind = AutoModelForImageTextToText if config.model_type in VISION else AutoModelForCausalLM
    model = kind.from_pretrained(folder, dtype=torch.float32)
    embedding = model.get_output_embeddings().weight
    taken = [end, *placeholder_ids(config)]
    with torch.no_grad():
        embedding[:, 0] = embedding.std()
        embedding[taken] = 0.0
        embedding[taken, 0] = -1e4
        for name, module in model.get_decoder().layers.named_modules():
            if name.endswith(ADDING):
                module.weight[0] = 0.0
    model.save_pretrained(folder)


if __name__ == "__main__":
    main()
