"""How many of Axolotl's (TRL's, ms-swift's) YAML files start here: `swift import-config`, then a dry run of the result.

    python benchmarks/foreign_configs.py /path/to/axolotl/examples --out counted.json

Models become tiny ones of the same architecture, whose tokenizers have the tokens that the file names; datasets become
small ones with the rows of the method, and folders temporary ones (`foreign_scripts.py`). Models with images become
Qwen3-VL with its own template, and attention SDPA, as other kernels need a GPU. Per file:

    ok       imported without a loss, and the dry run passes
    lost     imported, and these keys have no counterpart
    refused  not imported, or not accepted by the dry run, for this reason
    here     refused for what this machine lacks: a package or an accelerator
    bad      a traceback, or no answer in time

A table of the reasons ends the list: for each the number of files, and of those that it alone keeps from being `ok`.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from foreign_scripts import DATASETS, FOLDERS, MODELS, ROWS, Parts, Result, answered, row, seeming

from swift.arguments.imports.command import Imported, import_file
from swift.arguments.layers import read_config
from swift.errors import ConfigError

ARCHS = {
    r"qwen3\.5.*-a\d+b": "qwen3_5_moe_text", r"qwen3\.5": "qwen3_5_text", "qwen3-next": "qwen3_next",
    r"qwen3.*-a\d+b": "qwen3_moe", "qwen1.5-moe": "qwen2_moe", "qwen3|plano": "qwen3", "qwen": "qwen2",
    "mixtral": "mixtral", "ministral-3": "ministral3", "mistral|devstral|magistral|llava": "mistral",
    "gemma-4": "gemma4_text", "gemma-3": "gemma3_text", "gemma-2": "gemma2", "gemma": "gemma",
    "falcon-h1": "falcon_h1", "lfm2": "lfm2", "olmo": "olmo3", "command|aya": "cohere2", "starcoder2": "starcoder2",
    "phi-3": "phi3", "phi": "phi", "glm-4.7-flash": "glm4_moe_lite", "glm-4.5": "glm4_moe", "glm": "glm4",
    "nemotron-3": "nemotron_h", "nemotron-mini": "nemotron", "gpt-oss": "gpt_oss", "deepseek": "deepseek_v2",
    "jamba": "jamba", "mamba": "mamba", "pythia|redpajama": "gpt_neox", "mpt|replit|dbrx": "mpt", "cerebras": "gpt2",
    "gpt-j": "gptj", "stablelm": "stablelm", "seed-oss": "seed_oss", "apertus": "apertus", "arcee|afm": "arcee",
    "hunyuan": "hunyuan_v1_dense", "minimax": "minimax_m2", "llama-4": "llama4_text",
}  # fmt: skip
"""Beginning of a model's name, in lower case -> architecture; others are llamas."""
FOURTH = ("qwen3_5_moe_text", "qwen3_next")
"""Architectures with attention in every fourth layer."""
TOKENS = re.compile(r"<[|｜]?[\w/ ]+[|｜]?>|\[\w+\]")
CHAT = [{"role": role, "content": role} for role in ("user", "assistant")]
TRANSFORMED = {
    "opencode": ("input", "output"), "alpaca": ("instruction", "input", "output"), "strided_text": ("text",),
    "strided_structured": ("input", "output"),
}  # fmt: skip
"""`--dataset_transform` -> the columns that it reads, where these are no chats."""


class NamedParts(Parts):
    """Parts whose models have the architecture of their names, and further tokens."""

    def seeing(self, tokens: Sequence[str]) -> Path:
        """A tiny model that sees."""
        path = self.folder / f"sees-{abs(hash(tuple(tokens)))}"
        if not path.exists():
            shutil.copytree(self.model("qwen3-vl"), path)
            add_tokens(path, tokens)
        return path

    def model_with(self, name: str, tokens: Sequence[str]) -> Path:
        """A tiny model of the architecture, whose tokenizer and embedding have the tokens."""
        from swift.models.tiny import build_tiny

        plain = name.rpartition("/")[2].lower()
        arch = next((arch for beginning, arch in ARCHS.items() if re.search(beginning, plain)), "llama")
        path = self.folder / f"{arch}-{abs(hash(tuple(tokens)))}"
        if not path.exists():
            build_tiny(path, size="tiny" if arch in FOURTH else "nano", arch=arch)
            add_tokens(path, tokens)
            self.lengthen(path)
        return path

    def rows_of(self, imported: Imported, sees: bool) -> Path:
        """A dataset that the imported configuration reads."""
        settings, mode = imported.draft.settings, imported.draft.mode
        transform, renamed = settings.get("dataset_transform"), settings.get("columns", {})
        if transform is None and mode not in ("ebft", "prm"):
            return self.dataset(mode, sees, settings.get("num_labels"), renamed)
        path = self.folder / f"{mode}-{transform}-{'-'.join(renamed)}.jsonl"
        made = [made_row(mode, transform, at) for at in range(ROWS)]
        for one in made:
            one |= {old: one.pop(new, "5") for old, new in renamed.items()}
        path.write_text("".join(json.dumps(one) + "\n" for one in made))
        return path


def add_tokens(model: Path, tokens: Sequence[str]) -> None:
    """Gives the tokenizer and the embedding of a model further tokens, and a bos token, which templates may write."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.add_tokens(list(tokens), special_tokens=True)
    tokenizer.bos_token = tokenizer.bos_token or "<|endoftext|>"
    kind = AutoModelForImageTextToText if (model / "preprocessor_config.json").exists() else AutoModelForCausalLM
    weights = kind.from_pretrained(model)
    weights.resize_token_embeddings(len(tokenizer))
    tokenizer.save_pretrained(model)
    weights.save_pretrained(model)


def made_row(mode: str, transform: str | None, at: int) -> dict[str, Any]:
    """A row for a mode or transform of its own columns."""
    if mode == "prm":
        return {"prompt": f"How much is {at} + 3?", "completions": [f"{at} + 3", str(at + 3)], "labels": [True, False]}
    if transform in TRANSFORMED:
        times = 40 if mode == "ebft_strided" else 4
        return {column: f"{column} {at} " * times for column in TRANSFORMED[transform]}
    chat = row("sft", False, None, at)
    return chat if transform else {"prompt": chat["messages"][0]["content"], "ground_truth": str(at)}


def main() -> None:
    """Tries every file, prints a table of reasons, and writes the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", default="", help="files whose path has this text")
    parser.add_argument("--pretend", nargs="*", default=["flash_attn", "swanlab", "wandb", "trackio", "liger_kernel"])
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    folder, results, out = options.folder.resolve(), [], options.out and options.out.resolve()
    with tempfile.TemporaryDirectory() as temporary:
        parts = NamedParts(Path(temporary))
        os.chdir(temporary)
        sys.path.append(str(seeming(options.pretend, Path(temporary) / "packages")))
        from transformers.utils import logging

        logging.disable_progress_bar()
        import swift.cli.dry_run
        import swift.models.policy
        import swift.trainers.grpo.prepare  # noqa: F401  (read once, for all children)

        for path in sorted(path for path in folder.rglob("*.y*ml") if options.only in str(path)):
            result = tried(str(path.relative_to(folder)), path, parts)
            results.append(result)
            print(f"{result.verdict:8} {result.kind:6} {result.script}", *result.lines, sep="\n    ", flush=True)
            if out:
                out.write_text(json.dumps([asdict(one) for one in results], indent=1))
    print("", *table(results), sep="\n")


def tried(name: str, path: Path, parts: NamedParts) -> Result:
    """What becomes of a file."""
    config: Mapping[str, Any] = {}
    try:
        config = {given.spelling: given.raw for given in read_config(str(path)).given}
        imported = import_file(str(path))
    except ConfigError as error:
        kind = "images" if "processor_type" in config else "text"
        return Result(name, kind, "refused", [line.replace(str(path), "FILE") for line in error.problems])
    kind = imported.draft.mode
    if lost := [f"{key}: {why}" for key, fate, why in imported.draft.lines if fate == "no counterpart"]:
        return Result(name, kind, "lost", lost)
    has_images = bool(config.get("processor_type"))
    named = str([imported.draft.settings.get(name) for name in ("target_regex", "trainable_parameters_regex")])
    sees = has_images or "language_model" in named
    ours = parts.folder / "ours.yaml"
    changed = dict(replaced(imported, parts, sees, has_images))
    settings = {name: value for name, value in imported.settings().items() if name not in changed}
    ours.write_text(json.dumps(settings | {name: value for name, value in changed.items() if value is not None}))
    processes = str(
        imported.draft.settings.get("sequence_parallel_size", 1) * (4 if "fsdp_replicas" in settings else 1)
    )
    environment = {**imported.draft.environment, "NPROC_PER_NODE": processes}
    return Result(name, kind, *answered([imported.command, str(ours), "--dry_run", "true"], environment))


def replaced(imported: Imported, parts: NamedParts, sees: bool, has_images: bool) -> Iterator[tuple[str, Any]]:
    """Settings with our models, datasets and folders; None leaves one out."""
    settings = imported.draft.settings
    if "torch_dtype" not in settings:
        yield "torch_dtype", "bfloat16"  # what it is on their machines
    for name, value in settings.items():
        if name in MODELS:
            tokens = tokens_of(settings)
            yield name, str(parts.seeing(tokens) if sees else parts.model_with(value, tokens))
        elif name in DATASETS:
            yield name, [f"{parts.rows_of(imported, has_images)}{part_of(one)}" for one in value]
        elif name == "attn_impl" or (sees and name in ("template", "quant_experts")):
            yield name, None
        elif name in FOLDERS:
            yield name, str(parts.folder / "output")
        elif name == "sequence_parallel_size":
            yield name, min(value, 4)  # the heads of a tiny model
        elif name in ("split", "min_length"):
            yield name, None  # of a hub, or of long texts


def part_of(dataset: str) -> str:
    """`#:10%` of a dataset, and of a number of rows at most those that there are."""
    _, mark, part = dataset.partition("#")
    return mark + re.sub(r"\d+(?!%|\d)", lambda found: str(min(int(found[0]), ROWS)), part)


def tokens_of(settings: Mapping[str, Any]) -> list[str]:
    """The tokens that the template of a configuration writes, and those that it names."""
    from swift.models.rendering import render
    from swift.models.templates import read_template

    text = str([settings.get(name) for name in ("special_tokens", "eot_tokens")])
    if template := settings.get("template"):
        variables = {"messages": CHAT, "add_generation_prompt": True, "bos_token": "", "eos_token": ""}
        text += render(read_template(template), variables, marks=False)[0]
    return sorted(set(TOKENS.findall(text)))


def table(results: Sequence[Result]) -> Iterator[str]:
    """Verdicts, then reasons: number of files, of those with this reason alone, the reason."""
    for verdict, number in collections.Counter(result.verdict for result in results).most_common():
        yield f"{verdict:8} {number}"
    reasons, alone = collections.Counter[str](), collections.Counter[str]()
    for result in results:
        found = {re.sub(r"\[\d+\]", "", line)[:150] for line in result.lines}
        reasons.update(found)
        alone.update(found if len(found) == 1 else ())
    yield from (f"{number:4} {alone[reason]:4}  {reason}" for reason, number in reasons.most_common())


if __name__ == "__main__":
    sys.exit(main())
