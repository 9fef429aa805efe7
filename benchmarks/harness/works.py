"""The rows of `benchmarks/run.py`: which work, how often, and against whom."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

ROOT = Path(__file__).resolve().parents[2]
MAKER = Path(__file__).with_name("models.py")
PROMPTS = 64
SETUP_LIMIT_S = 1800.0

PLUGIN = '''"""A reward that costs next to nothing: the share of characters with an even code."""

try:
    from swift.rewards import ORM, orms  # ms-swift 4
except ImportError:
    from swift.plugin import ORM, orms


class EvenShare(ORM):
    def __call__(self, completions, **kwargs):
        return [sum(ord(c) % 2 == 0 for c in text) / max(1, len(text)) for text in completions]


orms["even_share"] = EvenShare
'''


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One row of the table; the defaults are the reference work.

    arch, size: of the model, see `swift.models.tiny`; "demo" is the model of `make demo`. vocab_size: None is the
    tokenizer's. mean_tokens: completions end by themselves, after so many tokens in the mean; None gives each
    `completion_tokens`, since the end token is none that the model can sample. image_side: pixels of the image before
    each prompt's text, which has `prompt_tokens` for itself; 0: no image. steps: counted ones of a run, behind
    `warmup`. compared: seconds of a step, of a command until its first step, or peak memory. peers: who is measured
    beside swift. flags: further ones of swift. variants: swift itself with further flags, by name, as peers.
    """

    title: str
    arch: str = "qwen2"
    size: str = "tiny"
    vocab_size: int | None = None
    prompt_tokens: int = 16
    image_side: int = 0
    completion_tokens: int = 64
    mean_tokens: int | None = None
    num_completions: int = 64
    num_generations: int = 8
    per_device: int = 16
    beta: float = 0.0
    learning_rate: float = 1e-6
    steps: int = 3
    warmup: int = 1
    compared: Literal["step", "start", "peak"] = "step"
    peers: tuple[str, ...] = ("trl", "ms-swift")
    flags: tuple[str, ...] = ()
    variants: dict[str, tuple[str, ...]] = field(default_factory=dict)
    device: Literal["cpu", "cuda"] = "cpu"
    dtype: Literal["float32", "bfloat16"] = "float32"
    recompute: bool = False

    @property
    def per_token(self) -> bool:
        """Whether sides sample different lengths, so that seconds per completion token are what compares."""
        return self.mean_tokens is not None or self.size == "demo"

    @property
    def checks_gradients(self) -> bool:
        """Whether the gradients of swift and TRL are compared first."""
        return "trl" in self.peers and self.compared != "start" and self.size != "demo"


_SMALL = {"size": "small"}
_PROMPT = {**_SMALL, "prompt_tokens": 280, "steps": 2}
_VLLM = ("--use_vllm", "true", "--vllm_enforce_eager", "true")
_ENDING = {**_SMALL, "mean_tokens": 48, "peers": ()}  # vLLM refuses an end token that no model can sample
_GPU = {"size": "half", "vocab_size": 151_936, "device": "cuda", "dtype": "bfloat16", "peers": ("trl",)}

ROWS: dict[str, Row] = {
    "tiny": Row(title="0.6M, 64 tokens", steps=12, warmup=2),
    "tiny-kl": Row(title="0.6M, 64 tokens, KL (beta 0.04)", steps=12, warmup=2, beta=0.04, peers=("trl",)),
    "small": Row(title="24M, 64 tokens", **_SMALL),
    "small-prompt": Row(title="24M, prompts of 280 tokens, 64 tokens", **_PROMPT),
    "linear-prompt": Row(title="the same, Qwen3.5: linear attention", **_PROMPT, arch="qwen3_5_text", peers=("trl",)),
    "conv-prompt": Row(title="the same, LFM2: convolutions", **_PROMPT, arch="lfm2", peers=("trl",)),
    "vision-prompt": Row(
        title="the same, Qwen3-VL, an image of 256 patches in each", **{**_PROMPT, "prompt_tokens": 200},
        image_side=128, arch="qwen3_vl", peers=("trl",), flags=("--freeze_vit", "false", "--freeze_aligner", "false"),
    ),
    "small-tail": Row(
        title="24M, lengths long-tailed to 256", **_SMALL, completion_tokens=256, mean_tokens=128, peers=("trl",)
    ),
    "demo": Row(
        title="a step of `make demo`", size="demo", completion_tokens=48, num_completions=128, per_device=128,
        learning_rate=1e-4, steps=12, warmup=2, peers=("trl",),
    ),
    "head": Row(
        title="24M, vocabulary 152k, 2048 tokens: peak memory", **_SMALL, vocab_size=151_936, completion_tokens=128,
        num_completions=16, steps=1, compared="peak", peers=("trl",),
    ),
    "start": Row(title="command to first step, 0.6M", steps=0, compared="start"),
    "vllm": Row(title="24M, up to 64 tokens, vLLM colocate", **_ENDING, flags=_VLLM),
    "ahead": Row(
        title="24M, up to 64 tokens, dedicated vLLM, sampling ahead", **_ENDING, steps=4,
        flags=(*_VLLM, "--vllm_mode", "dedicated", "--async_generate", "true"),
        variants={"in turns": ("--async_generate", "false")},
    ),
    "gpu": Row(
        title="0.5B, bf16, prompts of 512, lengths long-tailed to 1024", **_GPU, prompt_tokens=512,
        completion_tokens=1024, mean_tokens=512, per_device=8,
    ),
    "gpu-packed": Row(
        title="0.5B, bf16, 16k tokens, recomputed", **_GPU, completion_tokens=1008, num_completions=16,
        recompute=True,
    ),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Work:
    """A row in a folder: model, prompts and plugin as files.

    dataset: of `messages`, as swift and ms-swift read it. recorded: completions for the comparison of gradients.
    """

    row: Row
    model: Path
    dataset: Path
    plugin: Path
    recorded: Path

    @property
    def accumulation(self) -> int:
        """Micro-batches of a step."""
        return self.row.num_completions // self.row.per_device


def prepare(row: Row, folder: Path, *, python: str = sys.executable) -> Work:
    """Write what a row needs, unless it is there. Models are made by a process of their own."""
    folder.mkdir(parents=True, exist_ok=True)
    plugin = folder / "even_share.py"
    plugin.write_text(PLUGIN, encoding="utf-8")
    if row.size == "demo":
        model, dataset = demo(folder)
        return Work(row, model, dataset, plugin, folder / "no-recorded")
    ending = f"ends{row.mean_tokens}" if row.mean_tokens else "endless"
    model = folder / f"model-{row.arch}-{row.size}-{row.vocab_size or 'bytes'}-{ending}"
    if not (model / "config.json").exists():
        words = [row.arch, row.size, str(row.vocab_size or 0), str(row.mean_tokens or 0), str(row.completion_tokens)]
        subprocess.run([python, str(MAKER), str(model), *words], check=True, timeout=SETUP_LIMIT_S)
    dataset = folder / f"prompts-{row.prompt_tokens}-{row.image_side}.jsonl"
    write_prompts(dataset, prompts(row.prompt_tokens), row.image_side)
    return Work(row, model, dataset, plugin, folder / "recorded.json")


def prompts(tokens: int) -> list[str]:
    """Different prompts of about `tokens` characters, which are as many tokens."""
    texts = [f"What is {i} + {i * 7 % 50}? " for i in range(PROMPTS)]
    return [(text * (tokens // len(text) + 1))[: max(tokens, len(text))] for text in texts]


def write_prompts(path: Path, texts: list[str], image_side: int = 0) -> None:
    """A dataset of one question per row, and its images: another one in each row."""
    rows: list[dict[str, Any]] = []
    for number, text in enumerate(texts):
        turn = {"role": "user", "content": "<image>" * bool(image_side) + text}
        images = {"images": [draw(path.parent, number, image_side)]} if image_side else {}
        rows.append({"messages": [turn], **images})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def draw(folder: Path, seed: int, side: int) -> str:
    """The name of a square image of noise, which is made unless it is there."""
    from PIL import Image

    name = f"{seed}-{side}.png"
    if not (folder / name).exists():
        Image.frombytes("RGB", (side, side), random.Random(seed).randbytes(3 * side * side)).save(folder / name)
    return name


def demo(folder: Path) -> tuple[Path, Path]:
    """The demo's model after its supervised tuning, made by the demo itself, and its training problems."""
    cache, out = folder / "demo-model", folder / "demo"
    models = sorted(cache.glob("*-400-0"))
    if not models:
        environment = {"CACHE": str(cache), "OUT": str(out), "STEPS": "1"}
        run_here(["sh", "examples/demo.sh"], environment, allow_failure=True)  # one step misses the demo's target
        models = sorted(cache.glob("*-400-0"))
    if not models:
        raise RuntimeError("examples/demo.sh made no model")
    return models[0], out / "data" / "train.jsonl"


def run_here(words: list[str], environment: dict[str, str], *, allow_failure: bool = False) -> None:
    """A command in the repository, with this Python's `swift` on the PATH."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    subprocess.run(
        words,
        cwd=ROOT,
        env={**os.environ, "PATH": path, **environment},
        check=not allow_failure,
        stdout=subprocess.DEVNULL,
        timeout=SETUP_LIMIT_S,
    )
