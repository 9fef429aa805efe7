"""Models that see, on one rank and on several that share streams and rows: `python seeing_parallel_worker.py <folder>`.

The folder holds one of each family's model; what came out is written into it.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
import vlms
from peft import LoraConfig, get_peft_model
from ranks import joined
from sequence_parallel_worker import gradients, relative
from torch import nn
from transformers import AutoModelForImageTextToText

from swift.data.image_store import remember
from swift.data.images import digest_of
from swift.models.attention.choice import choose_attention
from swift.models.attention.interface import transformers_model
from swift.models.attention.sequence_parallel import SequenceGroup, spread_rows
from swift.models.forward import TokenSequence, pack, pad
from swift.models.multimodal import parts_of_parameters
from swift.models.scoring import prepare_scoring, score_tokens
from swift.models.template import Template, load_template
from swift.models.tokenizer import read_tokenizer
from swift.models.vision import Vision, load_processor
from swift.types import Image

TRAINED = ("all", "language model", "lora", "lora everywhere")
COMPLETIONS = ([5, 6, 7, 8, 9], [10, 11])
NO_IMAGE = 2
"""Completions of the last prompt, which has no image."""


def model_of(folder: Path, trained: str) -> tuple[nn.Module, Template]:
    """A model, of which a part is trained, and its template."""
    torch.manual_seed(3)
    model: nn.Module = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    template = load_template(read_tokenizer(folder), folder)
    processor = load_processor(folder, model.config, template.tokenizer)
    parts = parts_of_parameters(model)
    if trained.startswith("lora"):
        linear = [name for name, one in model.named_modules() if isinstance(one, nn.Linear) and "lm_head" not in name]
        reached = [name for name in linear if parts[f"{name}.weight"] == "llm" or trained == "lora everywhere"]
        model = get_peft_model(model, LoraConfig(target_modules=reached, init_lora_weights=False))
    elif trained != "all":
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(parts[name] == "llm")
    template.vision = Vision(folder, processor, transformers_model(model).config, template.render)
    template.vision.attach(model)
    return model, template


def rollout(template: Template) -> list[TokenSequence]:
    """Completions of prompts with one image, with two, and with none."""
    made = [Image(digest_of(content), content=content) for content in (vlms.image(0), vlms.image(1, 64, 64))]
    prompts = [[made[0], "What?"], ["One ", made[0], ", two ", made[1]], ["Nothing"]]
    sequences = []
    for prompt in prompts:
        images = [part for part in prompt if isinstance(part, Image)]
        remember(images)
        content = [
            {"type": "image", "image": part.digest} if isinstance(part, Image) else {"type": "text", "text": part}
            for part in prompt
        ]
        ids = template.encode_prompt([{"role": "user", "content": content}])
        sequences += [TokenSequence(ids, completion) for completion in COMPLETIONS]
    return sequences


def stream(folder: Path, trained: str, group: SequenceGroup) -> float:
    """How far log-probs and gradients of a packed stream, with images and without, are from those of one rank."""
    model, template = model_of(folder, trained)
    assert (obstacle := choose_attention(model)) is None, obstacle
    assert prepare_scoring(model) is None
    gaps = []
    for sequences in (rollout(template), rollout(template)[-NO_IMAGE:]):
        tokens = pack(sequences, vision=template.vision)
        weights = torch.linspace(-1, 1, tokens.target_ids.numel() + 1)[1:]
        made = []
        for one in (tokens, tokens.spread(group)):
            logprobs, _ = score_tokens(model, one)
            (logprobs * weights).sum().backward()
            made.append((logprobs.detach(), gradients(model)))
        dist.all_reduce(made[1][1])
        gaps += [relative(ours, theirs) for ours, theirs in zip(made[1], made[0], strict=True)]
    return max(gaps)


def rows(folder: Path, trained: str, group: SequenceGroup) -> float:
    """How far logits of padded rows, and the mean of gradients over the ranks, are from those of one rank."""
    (own, template), (shared, _) = model_of(folder, trained), model_of(folder, trained)
    assert choose_attention(shared) is None
    spread_rows(transformers_model(shared).base_model, group)
    gaps = []
    for sequences in (rollout(template), rollout(template)[-NO_IMAGE:]):
        inputs = pad(sequences, vision=template.vision).inputs
        made = []
        for model in (own, shared):
            logits = model(**inputs, use_cache=False).logits
            logits = logits.log_softmax(-1) * inputs["attention_mask"][..., None]
            logits.gather(2, inputs["input_ids"][..., None]).sum().backward()
            made.append((logits.detach(), gradients(model)))
        dist.all_reduce(made[1][1])
        gaps += [relative(made[1][0], made[0][0]), relative(made[1][1] / group.size, made[0][1])]
    return max(gaps)


def main(folder: str) -> None:
    place = Path(folder)
    with joined():
        group = SequenceGroup.of_this_rank(dist.get_world_size())
        families = sorted(path.name for path in place.iterdir() if path.is_dir())
        found = {}
        for way in (stream, rows):
            for family in families:
                for trained in TRAINED:
                    found[way.__name__, family, trained] = way(place / family, trained, group)
        if dist.get_rank() == 0:
            torch.save(found, place / "found")


if __name__ == "__main__":
    main(*sys.argv[1:])
